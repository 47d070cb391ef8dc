"""Ops that are only assertions, and when their inputs are computed."""

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.passes.programs import alone, cut, program_of
from whale_nebula.capture.mirror import mirror
from whale_nebula.errors import BatchCoupledError, PlacementError, StageOrderError
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program
from whale_nebula.ir.text import from_text
from whale_nebula.passes.batch import split_assertions
from whale_nebula.passes.checks import check_order, order_stages
from whale_nebula.passes.effects import is_check, is_effect
from whale_nebula.passes.phases import FORWARD, UPDATE, split_parts
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.rules import fold


def traced(body: object) -> Graph:
    return mirror(tf.function(body).get_concrete_function(tf.TensorSpec([], tf.float32)).graph)


def less(x: tf.Tensor) -> None:
    tf.debugging.assert_less(x, 1.0)


def nested(x: tf.Tensor) -> None:
    if x > 0.0:
        tf.debugging.assert_less(x, 1.0)


def finite(x: tf.Tensor) -> None:
    tf.debugging.assert_all_finite(x, "no number")


def prints(x: tf.Tensor) -> None:
    if x > 0.0:
        tf.print(x)


def prints_and_asserts(x: tf.Tensor) -> None:
    if x > 0.0:
        tf.print(x)
        tf.debugging.assert_less(x, 1.0)


def gives(x: tf.Tensor) -> tf.Tensor:
    if x > 0.0:
        tf.debugging.assert_less(x, 1.0)
        x = x * 2.0
    return x + 1.0


@pytest.mark.parametrize(
    ("body", "checks"),
    [(less, True), (nested, True), (finite, True), (prints, False), (prints_and_asserts, False),
     (gives, False)],
)  # fmt: skip
def test_a_check_asserts_and_does_nothing_else(body: object, checks: bool) -> None:
    graph = traced(body)
    effects = [op for op in graph.ops if is_effect(op, graph)]
    assert effects
    assert [is_check(op, graph, graph.returns) for op in effects] == [checks] * len(effects)


ALONE = """
    %0 = input x float32[?]
    %1 = Const {value=(0)} int32[1]
    %2 = capture limit float32[]
    %3 = Const {value=(0)} int32[]
    %4 = Mul(%0, %2) float32[?]
    %5 = Sum(%4, %1) float32[]
    %6 = Max(%4, %1) float32[]
    %7 = Less(%4, %2) bool[?]
    %8 = All(%7, %1) bool[]
    %9 = Less(%5, %2) bool[]
    %10 = Less(%6, %2) bool[]
    %11 = Less(%2, %6) bool[]
    %12 = Shape(%4) int32[1]
    %13 = Prod(%12, %1) int32[]
    %14 = Greater(%13, %3) bool[]
    %15 = Equal(%13, %13) bool[]
    %16 = Assert(%CONDITION) stateful
"""


@pytest.mark.parametrize(
    ("condition", "found"),
    [(8, "each"), (10, "each"), (14, "each"), (15, "each"), (9, "once"), (11, "refused")],
)
def test_each_micro_batch_asserts_what_holds_of_all_where_it_holds_of_each(condition: int, found: str) -> None:
    graph = from_text(ALONE.replace("CONDITION", str(condition)))
    once, refused = split_assertions(graph, {16}, fold(graph, {0: 0}, checks={16}))
    assert (16 in once, len(refused)) == (found == "once", int(found == "refused"))


def test_rows_are_not_sent_to_be_printed_by_an_assertion_of_all_of_them() -> None:
    graph = from_text(ALONE.replace("CONDITION", "9, %4"))
    once, (refused,) = split_assertions(graph, {16}, fold(graph, {0: 0}, checks={16}))
    assert not once and "reports values of each row" in refused.reason


# -------------------- The order of stages within a phase
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
    assert caught.value.what == "stage 'a' reads from stage 'b', which comes after it"
    assert caught.value.where == "train.py:3"
    assert "'last/Sin' (Sin) of 'a' reads 'middle/Neg' of 'b'" in caught.value.why
    assert caught.value.mend == "give the second one its own name: nb.stage(cluster='a', name='a_2')"


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
    assert caught.value.why.endswith("nb.place assigns layer 'z' to 'a' by 'z' and layer 'y' to 'npu' by 'y'")
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


# -------------------- Seeds: writes that are a part of a draw, and draws that would repeat in each micro-batch
DRAW = """
    stages a
    micro 3
    %0 = input x float32[?,4]
    %1 = capture seed resource[]
    %2 = ReadVariableOp(%1) int64[2] stateful @a
    %3 = Const {value=(1)} int64[]
    %4 = AddV2(%2, %3) int64[2]
    {before}
    %6 = Shape(%0) int32[2] @a
    %7 = Const {value=(1)} int32[]
    %8 = StatelessRandomUniformV2(%6, %2, %7) float32[?,4] @a
    %9 = Mul(%0, %8) float32[?,4] @a
    {after}
    returns %9
"""
WRITE = "%{0} = AssignVariableOp(%1, %4) stateful {1} ^%2"


def drawing(before: str = "", after: str = "") -> str:
    return DRAW.replace("{before}", before).replace("{after}", after)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (drawing(before=WRITE.format(5, "")), FORWARD),
        (drawing(before=WRITE.format(5, "@a")), FORWARD),
        (drawing(after=WRITE.format(10, "@a")), FORWARD),
        (drawing(after=WRITE.format(10, "")), UPDATE),
    ],
    ids=["before the draw", "in the stage", "in the stage after it", "after it"],
)
def test_a_write_belongs_to_a_draw_in_a_stage_or_before_it(text: str, kind: int) -> None:
    program = program_of(text)
    (write,) = (op.index for op in program.graph.ops if op.type == "AssignVariableOp")
    assert split_parts(program).part[write] % 3 == kind


@pytest.mark.parametrize("before", [WRITE.format(5, ""), WRITE.format(5, "@a")])
def test_a_seed_that_moves_on_draws_other_rows(before: str) -> None:
    program = program_of(drawing(before=before))
    assert not any("seed" in note for note in cut_program(program, alone(program)).notes)


def counted(delta: str) -> Program:
    """A program that draws from a generator, which moves on by this much."""
    text = drawing().replace("ReadVariableOp(%1) int64[2] stateful @a", "RngReadAndSkip(%1, %5) int64[2] stateful @a")
    lines = text.splitlines()
    return program_of("\n".join([*lines[:5], f"    %5 = {delta}", *lines[5:]]))


def test_a_generator_moves_on_by_what_each_micro_batch_draws() -> None:
    program = counted("Shape(%0) int32[2] @a")
    assert cut_program(program, alone(program)).phases
    program = counted("Const {value=(8, 4)} int32[2]")
    with pytest.raises(BatchCoupledError, match="the seed is the same"):
        cut_program(program, alone(program))


def test_replicas_in_several_processes_cannot_count_one_anothers_draws() -> None:
    program = counted("Shape(%0) int32[2] @a")
    (worker,) = alone(program)
    with pytest.raises(BatchCoupledError, match="each replica would count only its own draws") as caught:
        cut_program(program, [worker, replace(worker, name="local/1")])
    assert "SeedGenerator" in caught.value.mend


@pytest.mark.parametrize("after", ["", WRITE.format(10, "")], ids=["never written", "written afterwards"])
def test_a_seed_that_all_micro_batches_share_is_refused(after: str) -> None:
    one = program_of(drawing(after=after).replace("micro 3", "micro 1"))
    assert cut_program(one, alone(one)).phases
    program = program_of(drawing(after=after))
    with pytest.raises(BatchCoupledError, match="the seed is the same") as caught:
        cut_program(program, alone(program))
    assert "SeedGenerator" in caught.value.mend


# -------------------- A seed generator in two stages: correct with one micro-batch in one place, refused where t
ROWS = np.ones((4, 3), "float32")


def noisy(micro_batches: int, *, shared: bool, draw: Any) -> Any:
    """A step whose two stages draw from one generator, or from one each."""
    one, other = (keras.random.SeedGenerator(3) for _ in range(2))

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = draw(x, one)
            with nb.stage(cluster="b"):
                return draw(x, one if shared else other)

    return step


def added(x: Any, seed: Any) -> Any:
    return x + keras.random.normal(tf.shape(x), seed=seed)


def test_two_stages_cannot_share_one_with_micro_batches() -> None:
    with pytest.raises(PlacementError, match="seed_generator") as caught:
        noisy(2, shared=True, draw=added)(ROWS)
    assert "test_checks.py" in caught.value.where
    assert "SeedGenerator" in caught.value.mend


@pytest.mark.parametrize(("micro_batches", "shared"), [(1, True), (2, False)])
def test_elsewhere_they_can(micro_batches: int, shared: bool) -> None:
    assert noisy(micro_batches, shared=shared, draw=added)(ROWS).shape == (4, 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_metric_fed_by_two_stages_is_read_before_it_is_added_to(micro_batches: int) -> None:
    mean = keras.metrics.Mean()

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = tf.sin(x)
                mean.update_state(x)
            with nb.stage(cluster="b"):
                x = tf.sin(x)
                mean.update_state(x)
        return mean.result()

    if micro_batches > 1:
        with pytest.raises(PlacementError, match="mean/total"):
            step(ROWS)
    else:
        assert float(step(ROWS)) == pytest.approx((np.sin(1.0) + np.sin(np.sin(1.0))) / 2.0)


@pytest.mark.parametrize("links", [None, "100mbit,1ms"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_draw_between_two_stages_is_at_home_in_one(micro_batches: int, links: str | None) -> None:
    seed = keras.random.SeedGenerator(3)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = tf.sin(x)
            x = added(x, seed)
            with nb.stage(cluster="b"):
                return tf.identity(x)

    nb.shutdown()
    with nb.init(links=links):
        before = seed.state.numpy()
        first, second = step(ROWS), step(ROWS)
        assert not np.allclose(first, second)
        np.testing.assert_array_equal(seed.state.numpy() - before, [0, 2 * micro_batches])
