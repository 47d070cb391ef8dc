"""The order of stages within a phase."""

import pytest

from tests.unit.passes.programs import cut, program_of
from whale_nebula.errors import StageOrderError
from whale_nebula.passes.checks import check_order, order_stages

BACK_AND_FORTH = """
    stages a b=npu
    %0 = input x float32[?,4]
    %1 = Exp(%0) float32[?,4] @a "first/Exp"
    %2 = Neg(%1) float32[?,4] @b "middle/Neg"
    %3 = Sin(%2) float32[?,4] @a "last/Sin"
"""


def test_going_back_to_an_earlier_stage_names_both_and_the_mend() -> None:
    program = program_of(BACK_AND_FORTH)
    with pytest.raises(StageOrderError) as caught:
        check_order(program.graph, program.labels, program.stages, where=lambda op: f"train.py:{op}")
    assert caught.value.what == "stage 'b' feeds stage 'a', which comes before it"
    assert caught.value.where == "train.py:3"
    assert "'last/Sin' (Sin) of 'a' reads 'middle/Neg' of 'b'" in caught.value.why
    assert caught.value.mend == "give the second a name: nb.stage(cluster='a', name='a_2')"


def test_without_a_line_the_op_is_named() -> None:
    with pytest.raises(StageOrderError) as caught:
        cut(BACK_AND_FORTH)
    assert caught.value.where == "last/Sin"


def test_another_phase_may_go_back() -> None:
    program = program_of(BACK_AND_FORTH)
    check_order(program.graph, program.labels, program.stages, phase_of=lambda op: int(op == 3))


def test_what_nb_place_gave_names_its_layers() -> None:
    program = program_of("""
        stages a b=npu
        %0 = input x float32[?,4]
        %1 = Exp(%0) {_nebula_layer="layer 'x' to 'a' by 'x'"} float32[?,4] @a
        %2 = Neg(%1) {_nebula_layer="layer 'y' to 'npu' by 'y'"} float32[?,4] @b
        %3 = Exp(%2) float32[?,4]
        %4 = Sin(%3) {_nebula_layer="layer 'z' to 'a' by 'z'"} float32[?,4] @a
    """)
    with pytest.raises(StageOrderError) as caught:
        check_order(program.graph, program.labels, program.stages)
    assert caught.value.why.endswith("nb.place gives layer 'z' to 'a' by 'z' and layer 'y' to 'npu' by 'y'")
    assert caught.value.mend.endswith("name='a_2') in the map of nb.place")


DECODER_FIRST = """
    stages decoder encoder loss
    %0 = input x float32[?,4]
    %1 = Exp(%0) float32[?,4] @decoder
    %2 = Neg(%0) float32[?,4] @encoder
    %3 = Sin(%2) float32[?,4]
    %4 = Add(%1, %3) float32[?,4] @decoder
    %5 = Cos(%4) float32[?,4] @loss
"""
SIDE_BY_SIDE = """
    stages b a c
    %0 = input x float32[?,4]
    %1 = Exp(%0) float32[?,4] @b
    %2 = Neg(%0) float32[?,4] @a
    %3 = Add(%1, %2) float32[?,4] @c
"""


@pytest.mark.parametrize(
    ("text", "order"),
    [(DECODER_FIRST, ["encoder", "decoder", "loss"]), (SIDE_BY_SIDE, ["b", "a", "c"]), (BACK_AND_FORTH, ["a", "b"])],
    ids=["as a functional model runs its nodes", "as entered where none feeds another", "as entered in a circle"],
)
def test_stages_are_put_in_the_order_of_the_flow(text: str, order: list[str]) -> None:
    program = program_of(text)
    assert order_stages(program.graph, [stage.key for stage in program.stages]) == order
