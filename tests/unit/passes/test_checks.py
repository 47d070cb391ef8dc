"""Ops that are only assertions, and when their inputs are computed."""

import contextlib
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.passes.programs import assign_one_worker, assign_worker_per_stage, compile_text, parse_program
from whale_nebula.capture.mirror import mirror
from whale_nebula.errors import BatchCoupledError, NotYetError, PlacementError, StageOrderError
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program
from whale_nebula.ir.text import from_text
from whale_nebula.passes.batch import split_assertions
from whale_nebula.passes.checks import check_order, order_stages
from whale_nebula.passes.effects import is_check, is_effect
from whale_nebula.passes.phases import FORWARD, UPDATE, split_parts
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.rules import fold


def trace_body(body: object) -> Graph:
    return mirror(tf.function(body).get_concrete_function(tf.TensorSpec([], tf.float32)).graph)


def assert_less_than_one(x: tf.Tensor) -> None:
    tf.debugging.assert_less(x, 1.0)


def assert_in_branch(x: tf.Tensor) -> None:
    if x > 0.0:
        tf.debugging.assert_less(x, 1.0)


def assert_finite(x: tf.Tensor) -> None:
    tf.debugging.assert_all_finite(x, "no number")


def print_in_branch(x: tf.Tensor) -> None:
    if x > 0.0:
        tf.print(x)


def print_and_assert_in_branch(x: tf.Tensor) -> None:
    if x > 0.0:
        tf.print(x)
        tf.debugging.assert_less(x, 1.0)


def assert_in_branch_and_return(x: tf.Tensor) -> tf.Tensor:
    if x > 0.0:
        tf.debugging.assert_less(x, 1.0)
        x = x * 2.0
    return x + 1.0


@pytest.mark.parametrize(
    ("body", "checks"),
    [(assert_less_than_one, True), (assert_in_branch, True), (assert_finite, True), (print_in_branch, False),
     (print_and_assert_in_branch, False), (assert_in_branch_and_return, False)],
)  # fmt: skip
def test_check_is_an_effect_that_only_asserts(body: object, checks: bool) -> None:
    graph = trace_body(body)
    effects = [op for op in graph.ops if is_effect(op, graph)]
    assert effects
    assert [is_check(op, graph, graph.returns) for op in effects] == [checks] * len(effects)


ASSERTION = """
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
def test_assertion_runs_per_micro_batch_or_once_or_is_refused(condition: int, found: str) -> None:
    graph = from_text(ASSERTION.replace("CONDITION", str(condition)))
    once, refused = split_assertions(graph, {16}, fold(graph, {0: 0}, checks={16}))
    assert (16 in once, len(refused)) == (found == "once", int(found == "refused"))


def test_batch_assertion_that_reports_rows_is_refused() -> None:
    graph = from_text(ASSERTION.replace("CONDITION", "9, %4"))
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


def test_stage_order_error_names_both_stages_and_the_fix() -> None:
    program = parse_program(BACK_AND_FORTH)
    with pytest.raises(StageOrderError) as caught:
        check_order(program.graph, program.labels, program.stages, where=lambda op: f"train.py:{op}")
    assert caught.value.what == "stage 'a' reads from stage 'b', which comes after it"
    assert caught.value.where == "train.py:3"
    assert "'last/Sin' (Sin) of 'a' reads 'middle/Neg' of 'b'" in caught.value.why
    assert caught.value.mend == "give the second one its own name: nb.stage(cluster='a', name='a_2')"


def test_stage_order_error_names_the_op_if_no_line_is_known() -> None:
    with pytest.raises(StageOrderError) as caught:
        compile_text(BACK_AND_FORTH)
    assert caught.value.where == "last/Sin"


def test_stage_order_may_differ_between_phases() -> None:
    program = parse_program(BACK_AND_FORTH)
    check_order(program.graph, program.labels, program.stages, phase_of=lambda op: int(op == 3))


def test_stage_order_error_names_layers_placed_by_nb_place() -> None:
    program = parse_program("""
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
SHARED_WEIGHT = """
    stages right left
    %0 = input x float32[?,4]
    %1 = capture w resource[] @right
    %2 = ReadVariableOp(%1) float32[4] stateful @right
    %3 = Mul(%0, %2) float32[?,4] @right
    %4 = ReadVariableOp(%1) float32[4] stateful @left
    %5 = Mul(%0, %4) float32[?,4] @left
    %6 = Sub(%5, %3) float32[?,4] @right
"""


@pytest.mark.parametrize(
    ("text", "order"),
    [
        (DECODER_FIRST, ["encoder", "decoder", "loss"]),
        (SIDE_BY_SIDE, ["b", "a", "c"]),
        (BACK_AND_FORTH, ["a", "b"]),
        (SHARED_WEIGHT, ["left", "right"]),
    ],
    ids=[
        "as a functional model runs its nodes",
        "as entered where none feeds another",
        "as entered in a circle",
        "a weight that several stages read belongs to none",
    ],
)
def test_order_stages_follows_the_data_flow(text: str, order: list[str]) -> None:
    program = parse_program(text)
    assert order_stages(program.graph, [stage.key for stage in program.stages]) == order


# -------------------- Seeds: their writes, and draws that would repeat in each micro-batch
def test_write_before_the_forward_that_reads_a_variable_of_another_cluster_is_refused() -> None:
    text = """
        stages a b
        %0 = input x float32[?]
        %1 = capture target resource[]
        %2 = capture trained resource[]
        %3 = ReadVariableOp(%2) float32[] stateful
        %4 = AssignVariableOp(%1, %3) stateful
        %5 = ReadVariableOp(%1) float32[] stateful @a ^%4
        %6 = Mul(%0, %5) float32[?] @a
        %7 = ReadVariableOp(%2) float32[] stateful @b
        %8 = Mul(%6, %7) float32[?] @b
        returns %8
    """
    compile_text(text, assign_one_worker)
    with pytest.raises(NotYetError, match="a use of variable 'trained' on worker 'a/0'"):
        compile_text(text, assign_worker_per_stage)


CHANGES = {"LookupTableInsertV2": "a lookup table", "QueueEnqueueV2": "a queue", "LookupTableExportV2": None}


@pytest.mark.parametrize(("op", "refused"), CHANGES.items())
def test_change_of_a_table_or_a_queue_is_refused_between_processes(op: str, refused: str | None) -> None:
    text = f"""
        stages a b
        %0 = input x float32[?]
        %1 = capture held resource[]
        %2 = Exp(%0) float32[?] @a
        %3 = Neg(%2) float32[?] @b
        %4 = {op}(%1) stateful @b ^%3
        returns %3
    """
    compile_text(text, assign_one_worker)
    with pytest.raises(NotYetError, match=f"^NB-001 {refused} that") if refused else contextlib.nullcontext():
        compile_text(text, assign_worker_per_stage)


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


def draw_program(before: str = "", after: str = "") -> str:
    return DRAW.replace("{before}", before).replace("{after}", after)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (draw_program(before=WRITE.format(5, "")), FORWARD),
        (draw_program(before=WRITE.format(5, "@a")), FORWARD),
        (draw_program(after=WRITE.format(10, "@a")), FORWARD),
        (draw_program(after=WRITE.format(10, "")), UPDATE),
    ],
    ids=["before the draw", "in the stage", "in the stage after it", "after it"],
)
def test_seed_write_in_a_stage_or_before_the_draw_runs_in_the_forward(text: str, kind: int) -> None:
    program = parse_program(text)
    (write,) = (op.index for op in program.graph.ops if op.type == "AssignVariableOp")
    assert split_parts(program).part[write] % 3 == kind


@pytest.mark.parametrize("before", [WRITE.format(5, ""), WRITE.format(5, "@a")])
def test_seed_advanced_in_each_micro_batch_gives_no_note(before: str) -> None:
    program = parse_program(draw_program(before=before))
    assert not any("seed" in note for note in cut_program(program, assign_one_worker(program)).notes)


def generator_program(delta: str) -> Program:
    """A program that draws from a generator and advances it by `delta`."""
    text = draw_program().replace(
        "ReadVariableOp(%1) int64[2] stateful @a", "RngReadAndSkip(%1, %5) int64[2] stateful @a"
    )
    lines = text.splitlines()
    return parse_program("\n".join([*lines[:5], f"    %5 = {delta}", *lines[5:]]))


def test_generator_advanced_by_a_constant_is_refused() -> None:
    program = generator_program("Shape(%0) int32[2] @a")
    assert cut_program(program, assign_one_worker(program)).phases
    program = generator_program("Const {value=(8, 4)} int32[2]")
    with pytest.raises(BatchCoupledError, match="the seed is the same"):
        cut_program(program, assign_one_worker(program))


def test_generator_is_refused_with_replicas_in_several_processes() -> None:
    program = generator_program("Shape(%0) int32[2] @a")
    (worker,) = assign_one_worker(program)
    with pytest.raises(BatchCoupledError, match="each replica would count only its own draws") as caught:
        cut_program(program, [worker, replace(worker, name="local/1")])
    assert "SeedGenerator" in caught.value.mend


@pytest.mark.parametrize("after", ["", WRITE.format(10, "")], ids=["never written", "written afterwards"])
def test_seed_shared_by_all_micro_batches_is_refused(after: str) -> None:
    one = parse_program(draw_program(after=after).replace("micro 3", "micro 1"))
    assert cut_program(one, assign_one_worker(one)).phases
    program = parse_program(draw_program(after=after))
    with pytest.raises(BatchCoupledError, match="the seed is the same") as caught:
        cut_program(program, assign_one_worker(program))
    assert "SeedGenerator" in caught.value.mend


# -------------------- A seed generator that two stages share
ROWS = np.ones((4, 3), "float32")


def make_noisy_step(micro_batches: int, *, shared: bool, draw: Any) -> Any:
    """Return a step whose two stages draw from a shared generator, or from one each."""
    one, other = (keras.random.SeedGenerator(3) for _ in range(2))

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = draw(x, one)
            with nb.stage(cluster="b"):
                return draw(x, one if shared else other)

    return step


def add_noise(x: Any, seed: Any) -> Any:
    return x + keras.random.normal(tf.shape(x), seed=seed)


def test_generator_shared_by_two_stages_is_refused_with_micro_batches() -> None:
    with pytest.raises(PlacementError, match="seed_generator") as caught:
        make_noisy_step(2, shared=True, draw=add_noise)(ROWS)
    assert "test_checks.py" in caught.value.where
    assert "SeedGenerator" in caught.value.mend


@pytest.mark.parametrize(("micro_batches", "shared"), [(1, True), (2, False)])
def test_generator_works_unshared_or_with_one_micro_batch(micro_batches: int, shared: bool) -> None:
    assert make_noisy_step(micro_batches, shared=shared, draw=add_noise)(ROWS).shape == (4, 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_metric_updated_by_two_stages_works_only_without_micro_batches(micro_batches: int) -> None:
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
def test_draw_between_two_stages_advances_its_seed_per_micro_batch(micro_batches: int, links: str | None) -> None:
    seed = keras.random.SeedGenerator(3)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = tf.sin(x)
            x = add_noise(x, seed)
            with nb.stage(cluster="b"):
                return tf.identity(x)

    nb.shutdown()
    with nb.init(links=links):
        before = seed.state.numpy()
        first, second = step(ROWS), step(ROWS)
        assert not np.allclose(first, second)
        np.testing.assert_array_equal(seed.state.numpy() - before, [0, 2 * micro_batches])
