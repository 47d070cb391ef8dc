"""Stages follow one another within a phase."""

import pytest

from tests.unit.passes.programs import cut, program_of
from whale_nebula.errors import StageOrderError
from whale_nebula.passes.order import check_order

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


def test_skipping_a_stage_is_no_step_back() -> None:
    program = program_of("""
        stages a b c
        %0 = input x float32[?,4]
        %1 = Exp(%0) float32[?,4] @a
        %2 = Neg(%1) float32[?,4] @b
        %3 = Mul(%1, %2) float32[?,4] @c
    """)
    check_order(program.graph, program.labels, program.stages)
