"""The workers that hold a variable and can compute the inputs of an update; replicas on workers, and their speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import whale_nebula as nb
from tests.unit.passes.examples import GLOBAL_NORM, TWO_STAGES
from tests.unit.passes.programs import assign_worker_per_stage, check_op_texts, compile_text, parse_program
from whale_nebula.capture.step import capture, signature
from whale_nebula.errors import AbsentInputError, NotYetError
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.layout import Layouts
from whale_nebula.ir.program import Pipeline, Program, Stage
from whale_nebula.passes.owners import Homes
from whale_nebula.passes.phases import MAX_SMALL_BYTES, split_parts
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.readings import check_absent_inputs, find_readers, list_readings
from whale_nebula.passes.replicas import find_replica_speeds, list_devices, list_orders, place_stages
from whale_nebula.spec import Value


def find_homes(program: Program) -> Homes:
    """Find homes with each stage on a worker of its own."""
    return Homes(program, split_parts(program), [frozenset({stage}) for stage in range(len(program.stages))])


def describe_home(program: Program) -> Callable[[int], str]:
    """Return a function that lists the stages whose workers can compute an op, and the round."""
    found, keys = find_homes(program), [stage.key for stage in program.stages]

    def describe(op: int) -> str:
        if found.home_of(op) == found.all_workers:
            where = "everywhere"
        else:
            where = ", ".join(keys[worker] for worker in sorted(found.home_of(op)))
        rounds = {found.round_of(op, worker) for worker in found.home_of(op)}
        return where if rounds == {0} else f"{where}, round {max(rounds)}"

    return describe


def test_effect_without_a_variable_runs_on_one_worker() -> None:
    program = parse_program("""
        stages a b
        %0 = input x float32[?]
        %1 = Const {value=(1)} float32[]
        %2 = PrintV2(%1) stateful
        %3 = Exp(%0) float32[?] @b
    """)
    assert find_homes(program).home_of_effect(program.graph.ops[2]) == frozenset({0})


def test_small_forward_value_is_sent_everywhere_and_a_large_one_stays() -> None:
    rows = MAX_SMALL_BYTES // 4 + 1
    check_op_texts(
        f"""
        stages a b
        %0 = input x float32[?,4]
        %1 = capture w resource[]
        %2 = ReadVariableOp(%1) float32[4] stateful @a
        %3 = Mul(%0, %2) float32[?,4] @a                  => a
        %4 = Const {{value=(0)}} int32[1]
        %5 = Sum(%3, %4) float32[4] @a                    => everywhere
        %6 = Fill(%3) float32[{rows}] @a                  => a
        """,
        describe_home,
    )


def test_write_waits_on_every_holder_for_a_value_of_one_worker() -> None:
    """Another stage's worker computes the update of a replica's variable; the other replica reads it a round later."""
    program = parse_program("""
        stages a b
        %0 = capture w resource[]
        %1 = capture v resource[]
        %2 = ReadVariableOp(%0) float32[4] stateful @a
        %3 = ReadVariableOp(%1) float32[4] stateful @b
        %4 = Mul(%2, %3) float32[4]
        %5 = AssignSubVariableOp(%0, %4) stateful
    """)
    found = Homes(program, split_parts(program), [frozenset({0, 1}), frozenset({0})])
    assert found.home_of(4) == {0} and found.home_of_effect(program.graph.ops[5]) == {0, 1}
    assert [found.round_of(5, worker) for worker in (0, 1)] == [0, 1]


def test_every_holder_of_a_tied_variable_has_its_slot_and_updates_it() -> None:
    """One op writes both, as the branch of an optimizer that scales the loss, by a number of one worker."""
    program = parse_program("""
        stages a b
        %0 = capture tied resource[]
        %1 = capture slot resource[]
        %2 = capture v resource[]
        %3 = ReadVariableOp(%0) float32[4] stateful @a
        %4 = ReadVariableOp(%0) float32[4] stateful @b
        %5 = ReadVariableOp(%2) float32[] stateful @b
        %6 = AddV2(%3, %4) float32[4]
        %7 = Const {value=(0.5)} float32[]
        %8 = ResourceApplyMomentum(%0, %1, %5, %6, %7) stateful
    """)
    found = find_homes(program)
    assert found.home_of(5) == {1} and found.variables[1] == found.home_of_effect(program.graph.ops[8]) == {0, 1}
    assert [found.round_of(8, worker) for worker in (0, 1)] == [1, 0]


def test_update_without_a_batch_waits_for_values_of_other_workers() -> None:
    """A norm of variables of two stages, in a step that has no gradients: it is computed a round after its terms."""
    check_op_texts(
        """
        stages a b
        %0 = capture u resource[]
        %1 = capture v resource[]
        %2 = ReadVariableOp(%0) float32[4] stateful @a    => a
        %3 = ReadVariableOp(%1) float32[4] stateful @b    => b
        %4 = L2Loss(%2) float32[]                         => a
        %5 = L2Loss(%3) float32[]                         => b
        %6 = Pack(%4, %5) {axis=0} float32[2]             => everywhere, round 1
        %7 = Const {value=(0)} int32[1]                   => everywhere
        %8 = Sum(%6, %7) float32[]                        => everywhere, round 1
        %9 = Mul(%2, %8) float32[4]                       => a, round 1
        %10 = Mul(%3, %8) float32[4]                      => b, round 1
        %11 = AssignVariableOp(%0, %9) stateful
        %12 = AssignVariableOp(%1, %10) stateful
        """,
        describe_home,
    )


@pytest.mark.parametrize(("shards", "expected"), [(1, {0}), (2, {0, 1})])
def test_all_devices_of_a_split_stage_update_their_shards(shards: int, expected: set[int]) -> None:
    """A norm over all gradients crosses to the device that does not run the other stage."""
    original = parse_program(TWO_STAGES + GLOBAL_NORM)
    first, second = original.stages
    program = replace(original, stages=(replace(first, shards=shards), second))
    found = Homes(program, split_parts(program), [frozenset({0, 1}), frozenset({0})])
    scaled, _ = [op.index for op in program.graph.ops if op.type == "Mul"][-2:]
    assert found.home_of(scaled) == expected
    assert {found.round_of(scaled, worker) for worker in expected} == {shards - 1}


TWO_REPLICATED_STAGES = [Stage("a", "gpu", replicas=2), Stage("b", "gpu", replicas=2)]


@pytest.mark.parametrize(
    ("stages", "workers", "expected"),
    [
        (TWO_REPLICATED_STAGES, {"gpu": [1.0, 2.0]}, [(1.0, 2.0), (1.0, 2.0)]),
        (TWO_REPLICATED_STAGES, {"gpu": [1.0, 2.0, 3.0, 4.0]}, [(1.0, 3.0), (2.0, 4.0)]),
        (TWO_REPLICATED_STAGES, {"gpu": [2.0, 2.0]}, [(2.0, 2.0), (2.0, 2.0)]),
        (TWO_REPLICATED_STAGES, {}, [(), ()]),
        ([Stage("a", "gpu", replicas=2, shards=2)], {"gpu": [1.0, 2.0, 4.0, 3.0]}, [(1.0, 3.0)]),
        ([Stage("a", "gpu", replicas=4)], {"gpu": [1.0, 2.0]}, [(0.5, 1.0, 0.5, 1.0)]),
        ([Stage("a", "gpu"), Stage("b", "npu", replicas=2)], {"gpu": [1.0, 2.0], "npu": [3.0, 1.0]}, [(), (3.0, 1.0)]),
    ],
)
def test_speed_of_a_replica_is_that_of_its_worker(
    stages: list[Stage], workers: dict[str, list[float]], expected: list[tuple[float, ...]]
) -> None:
    assert find_replica_speeds(stages, workers) == expected


def test_speeds_match_the_workers_of_the_replicas() -> None:
    names = {"gpu": ["gpu/0", "gpu/1", "gpu/2", "gpu/3"]}
    speed_by_worker = dict(zip(names["gpu"], (1.0, 2.0, 3.0, 4.0), strict=True))
    found = list_devices(
        Program(Graph(()), stages=tuple(TWO_REPLICATED_STAGES)), place_stages(TWO_REPLICATED_STAGES, names)
    )
    by_stage = [
        tuple(speed_by_worker[device.worker] for device in found if device.stage == stage) for stage in range(2)
    ]
    assert by_stage == find_replica_speeds(TWO_REPLICATED_STAGES, {"gpu": list(speed_by_worker.values())})


def test_replicas_of_several_devices_take_adjacent_workers() -> None:
    """Pieces are gathered in TensorFlow's order: task 10 comes before task 8."""
    stages, names = (Stage("a", "gpu", replicas=3, shards=4),), [f"gpu/{letter}" for letter in "abcdefghijkl"]
    workers = tuple(place_stages(stages, {"gpu": names}))
    program = Program(Graph(()), stages=stages)
    layouts = {0: Layouts(4, {})}
    plan = Cut(program, workers, list_devices(program, workers), (), (), {}, {}, {}, layouts=layouts)
    assert plan.routing.hosts == (("gpu/a", "gpu/e", "gpu/k"),)
    assert plan.group_of(0, "gpu/i") == ("gpu/k", "gpu/l", "gpu/i", "gpu/j")
    assert plan.routings["gpu/c"].hosts == plan.routings["gpu/i"].hosts == (("gpu/c", "gpu/g", "gpu/i"),)
    assert plan.routings["gpu/g"].turns(0, "gpu/g", 6) == (1, 4)


def test_orders_exist_only_for_unequal_speeds() -> None:
    plain, uneven = Stage("a", "gpu", replicas=2), Stage("b", "npu", replicas=2, speeds=(1.0, 2.0))
    pipeline = Pipeline(micro_batch=3)
    assert list_orders(Program(Graph(()), stages=(plain, uneven), pipeline=pipeline)) == ((), (1, 0, 1))
    assert list_orders(Program(Graph(()), stages=(plain, plain), pipeline=pipeline)) == ()


# -------------------- Inputs that only some clusters have: their readers, and the values that cross instead
TWO_INPUTS = """
stages a b
%0 = input source float32[?,4]
%1 = input target float32[?,2]
%2 = capture wa resource[]
%3 = capture seen resource[]
%4 = ReadVariableOp(%2) float32[4,2] stateful @a
%5 = MatMul(%0, %4) float32[?,2] @a
%6 = Mul(%5, %1) float32[?,2] @b
%7 = Const {value=(0, 1)} int32[2]
%8 = Sum(%6, %7) float32[] @b
%9 = Sum(%1, %7) float32[]
%10 = AssignAddVariableOp(%3, %9) stateful
%11 = Shape(%0) int32[2]
%12 = Const {value=(0,)} int32[1]
%13 = Const {value=(1,)} int32[1]
%14 = StridedSlice(%11, %12, %13, %13) int32[]
%15 = Cast(%14) float32[]
%16 = AssignAddVariableOp(%3, %15) stateful
returns %8, %9
"""
"""The metric `seen` is on all workers. It adds a sum of the target, and the number of rows of the source."""

BOTH_NAMES = ("source", "target")
A, B = "a/0", "b/0"


def cut_two_inputs(text: str = TWO_INPUTS, names: tuple[str, ...] = BOTH_NAMES, results: str = "everywhere") -> Cut:
    program = parse_program(text)
    return cut_program(program, assign_worker_per_stage(program), results=results, restricted_inputs=names)


def read_inputs(cut: Cut, worker: str) -> set[tuple[str, bool]]:
    return {(cut.program.leaves[each.leaf].name, each.rows) for each in list_readings(cut, worker)}


def list_crossings(cut: Cut) -> dict[int, tuple[str, tuple[str, ...], int]]:
    found = [crossing for phase in cut.phases for crossing in phase.crossings]
    return {each.value.op: (each.source, each.destinations, each.round) for each in found}


class TestInputReaders:
    def test_cluster_reads_its_own_input_and_the_row_count_of_the_other(self) -> None:
        assert read_inputs(cut_two_inputs(), A) == {("source", False), ("source", True)}
        assert read_inputs(cut_two_inputs(), B) == {("target", False), ("source", True)}

    def test_inputs_present_in_all_clusters_are_read_in_place(self) -> None:
        assert ("target", False) in read_inputs(cut_two_inputs(names=()), A)
        assert 9 not in list_crossings(cut_two_inputs(names=()))

    def test_scalar_of_one_input_crosses_before_the_update(self) -> None:
        assert list_crossings(cut_two_inputs())[9] == (B, (A,), -1)
        assert cut_two_inputs().batch_fragments[B].fetches[0].op == 9
        assert A not in cut_two_inputs().batch_fragments

    def test_large_value_is_read_in_place(self) -> None:
        large = TWO_INPUTS.replace("%9 = Sum(%1, %7) float32[]", "%9 = Neg(%1) float32[?,2]").replace(
            "%10 = AssignAddVariableOp(%3, %9) stateful", "%10 = NoOp() stateful"
        )
        assert ("target", False) in read_inputs(cut_two_inputs(large), A)

    def test_large_result_stays_at_its_owner_with_results_owner(self) -> None:
        large = TWO_INPUTS.replace("%9 = Sum(%1, %7) float32[]", "%9 = Neg(%1) float32[?,2]").replace(
            "%10 = AssignAddVariableOp(%3, %9) stateful", "%10 = NoOp() stateful"
        )
        plan = cut_two_inputs(large, results="owner")
        assert ("target", False) not in read_inputs(plan, A)
        assert {value.op: owners for value, owners in plan.owners.items()} == {9: (B,)}

    def test_readers_of_an_input_are_the_workers_of_its_stages(self) -> None:
        both = TWO_INPUTS.replace("%5, %1", "%5, %0").replace("[?,4]", "[?,2]")
        assert find_readers(cut_two_inputs(), BOTH_NAMES) == {"source": {A}, "target": {B}}
        assert find_readers(cut_two_inputs(), ("target", "nothing")) == {"target": {B}}
        assert find_readers(cut_two_inputs(both), ("source",)) == {"source": {A, B}}


SHAPE_READS = [
    ("float32[?,4]", "%14 = StridedSlice(%11, %12, %13, %13) int32[]", True),
    ("float32[?,?]", "%14 = StridedSlice(%11, %12, %13, %13) int32[]", True),
    ("float32[?,4]", "%14 = Prod(%11, %12) int32[]", True),
    ("float32[?,?]", "%14 = Prod(%11, %12) int32[]", False),
    ("float32[?,?]", "%14 = StridedSlice(%11, %13, %13, %13) int32[]", False),
]


@pytest.mark.parametrize(("spec", "line", "rows"), SHAPE_READS)
def test_reading_of_a_shape_needs_only_rows_or_the_whole_input(spec: str, line: str, rows: bool) -> None:
    text = TWO_INPUTS.replace("%0 = input source float32[?,4]", f"%0 = input source {spec}").replace(
        "%14 = StridedSlice(%11, %12, %13, %13) int32[]", line
    )
    found = {each.rows for each in list_readings(cut_two_inputs(text), A) if each.op.type == "Shape"}
    assert found == {rows}


class TestAbsentInputs:
    def test_absent_input_that_a_stage_reads_is_refused(self) -> None:
        with pytest.raises(AbsentInputError) as caught:
            check_absent_inputs(cut_two_inputs(), B, [1], lambda op: f"train.py:{op}")
        assert caught.value.what == "input 'target' is None in this process, but stage 'b' of cluster 'b' reads it here"
        assert "Mul" in caught.value.where and "train.py:6" in caught.value.where
        assert "yield 'target' in this cluster as well" in caught.value.mend

    @pytest.mark.parametrize(("worker", "absent"), [(A, [1]), (B, [0]), (A, []), (B, [])])
    def test_absent_input_that_no_stage_reads_is_accepted(self, worker: str, absent: list[int]) -> None:
        check_absent_inputs(cut_two_inputs(), worker, absent, lambda op: "")

    def test_absent_input_error_names_an_update_that_reads_it(self) -> None:
        with pytest.raises(AbsentInputError, match="but the update in cluster 'a' reads it here"):
            check_absent_inputs(cut_two_inputs(names=()), A, [1], lambda op: "")

    def test_absent_input_error_names_a_return_value(self) -> None:
        with pytest.raises(AbsentInputError, match=r"'target' is None .* the return value of the step reads it here"):
            check_absent_inputs(
                cut_two_inputs(TWO_INPUTS.replace("returns %8", "returns %8, %1")), A, [1], lambda op: ""
            )


def test_loss_weights_are_computed_where_they_are_used() -> None:
    """`nb.loss_weight` of the target's words, which the cluster of the source neither has nor needs."""
    kernel = tf.Variable([[1.0], [2.0]])

    def step(source: Any, target: Any) -> Any:
        nb.loss_weight(tf.reduce_sum(tf.cast(target > 0, tf.float32)))
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="a"):
                hidden = source @ kernel
            with nb.stage(cluster="b"):
                kept = tf.cast(target > 0, tf.float32)
                loss = tf.reduce_sum(hidden * kept) / tf.reduce_sum(kept)
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    layout, _ = signature([("source", tf.ones([4, 2])), ("target", tf.ones([4, 1], tf.int32))])
    program = capture(lambda given: step(*given), layout).program
    plan = cut_program(program, assign_worker_per_stage(program), restricted_inputs=BOTH_NAMES)
    assert set(plan.weight_fragments) == {B}
    assert set(cut_program(program, assign_worker_per_stage(program)).weight_fragments) == {A, B}
    check_absent_inputs(plan, A, [1], lambda op: "")
    check_absent_inputs(plan, B, [0], lambda op: "")


def write_in_cond(a: tf.Variable, b: tf.Variable, shared: tf.Variable, loss: tf.Tensor) -> None:
    if loss > 0.0:
        a.assign_add(b * loss)  # too large to cross


def choose_in_cond(a: tf.Variable, b: tf.Variable, shared: tf.Variable, loss: tf.Tensor) -> Any:
    return tf.cond(loss > 0.0, lambda: tf.reduce_sum(a), lambda: tf.reduce_sum(b))


def write_in_loop(a: tf.Variable, b: tf.Variable, shared: tf.Variable, loss: tf.Tensor) -> None:
    for _ in tf.range(2):
        a.assign_add(a * tf.reduce_sum(b))


def add_one_in_cond(a: tf.Variable, b: tf.Variable, shared: tf.Variable, loss: tf.Tensor) -> None:
    if loss > 0.0:
        shared.assign_add(tf.reduce_sum(b))


@pytest.mark.parametrize(
    ("update", "op"),
    [
        (write_in_cond, "cond (If)"),
        (choose_in_cond, "cond (If)"),
        (write_in_loop, "while (While)"),
        (add_one_in_cond, ""),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_op_with_variables_of_several_clusters_is_refused_with_its_line(update: Callable[..., Any], op: str) -> None:
    large = 1 + MAX_SMALL_BYTES // 4
    a, b, shared = (tf.Variable(tf.ones(n), name=name) for name, n in (("a", large), ("b", large), ("shared", ())))

    @nb.function
    def step(x: tf.Tensor) -> Any:
        with nb.cluster(), tf.GradientTape() as tape:
            with nb.stage(cluster="a"):
                x = x * a
            with nb.stage(cluster="b"):
                loss = tf.reduce_sum(x * b)
        for variable, gradient in zip((a, b), tape.gradient(loss, [a, b]), strict=True):
            variable.assign_sub(gradient)
        return update(a, b, shared, loss)

    step(tf.ones((2, large)))
    program = step._step.last.captured.program
    if op:
        what = "a use of variable" if update is choose_in_cond else "an op that uses variables of several clusters"
        with pytest.raises(NotYetError, match=what) as caught:
            cut_program(program, assign_worker_per_stage(program), lambda number: "train.py:3")
        assert caught.value.where.endswith(f"{op}, train.py:3")
    else:
        assert cut_program(program, assign_worker_per_stage(program)).variable_workers["shared"] == (B,)


def test_write_waits_for_a_read_of_the_old_value_that_needs_another_cluster() -> None:
    cut = compile_text(
        """
        stages a b
        %0 = input x float32[?]
        %1 = capture v resource[]
        %2 = capture w resource[]
        %3 = ReadVariableOp(%1) float32[4] stateful @a
        %4 = Mul(%0, %3) float32[?] @a
        %5 = ReadVariableOp(%2) float32[] stateful @b
        %6 = Mul(%4, %5) float32[?] @b
        %7 = ReadVariableOp(%2) int32[] stateful
        %8 = ResourceGather(%1, %7) float32[] stateful
        %9 = Const {value=(1)} float32[4]
        %10 = AssignAddVariableOp(%1, %9) stateful ^%3 ^%8
        returns %6, %8
        """,
        assign_worker_per_stage,
    )
    rounds = {op: fragment.round for fragment in cut.phases[0].updates[A] for op in fragment.ops}
    assert rounds[10] == rounds[8] == 1


@st.composite
def draw_updates(draw: st.DrawFn) -> tuple[str, list[float]]:
    """The text of a program whose updates read and write variables of three stages, and one of no stage, in any order;
    and the values of these variables after a step, computed in the order of the text. Before it they are 1 to 4.
    """
    lines = ["stages a b c", "%0 = input x float32[?]", *(f"%{n} = capture v{n} resource[]" for n in range(1, 5))]
    last, reads, values = dict.fromkeys(range(1, 5), ()), {n: [] for n in range(1, 5)}, [0.0, 1.0, 2.0, 3.0, 4.0]
    number, row = 5, 0
    for variable, stage in zip((1, 2, 3), "abc", strict=True):
        lines.append(f"%{number} = ReadVariableOp(%{variable}) float32[] stateful @{stage}")
        lines.append(f"%{number + 1} = Mul(%{row}, %{number}) float32[?] @{stage}")
        reads[variable].append(number)
        number, row = number + 2, number + 1
    known: list[tuple[int, float]] = []
    for written in draw(st.lists(st.integers(1, 4), min_size=1, max_size=8)):
        for read in draw(st.lists(st.integers(1, 4), min_size=0 if known else 1, max_size=2)):
            lines.append(f"%{number} = ReadVariableOp(%{read}) float32[] stateful{format_control(last[read])}")
            reads[read].append(number)
            known.append((number, values[read]))
            number += 1
        (first, one), (second, other) = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        lines.append(f"%{number} = AddV2(%{first}, %{second}) float32[]")
        control = format_control([*last[written], *reads[written]])
        lines.append(f"%{number + 1} = AssignAddVariableOp(%{written}, %{number}) stateful{control}")
        values[written] += one + other
        known.append((number, one + other))
        last[written], reads[written], number = (number + 1,), [], number + 2
    return "\n".join([*lines, f"returns %{row}"]), values


def format_control(ops: Iterable[int]) -> str:
    return "".join(f" ^%{op}" for op in ops)


def run_updates(cut: Cut) -> dict[str, list[float]]:
    """The values of all variables on each worker after the updates of a cut, whose values are exchanged as planned."""
    (phase,), ops = cut.phases, cut.program.graph.ops
    variables = {worker: [0.0, 1.0, 2.0, 3.0, 4.0] for worker in phase.updates}
    made: dict[tuple[str, Value], float] = {}
    sources = {(worker, each.value): each.source for each in phase.crossings for worker in each.destinations}
    pending = [(worker, fragment) for worker, fragments in phase.updates.items() for fragment in fragments]
    while pending:
        worker, fragment = next(
            (worker, each)
            for worker, each in pending
            if all((sources.get((worker, value), worker), value) in made for value in each.feeds)
            and not any(other.round < each.round for mate, other in pending if mate == worker)
        )
        pending.remove((worker, fragment))
        results = {value: made[sources.get((worker, value), worker), value] for value in fragment.feeds}
        for op in map(ops.__getitem__, fragment.ops):
            if op.type == "ReadVariableOp":
                results[Value(op.index)] = variables[worker][op.inputs[0].op]
            elif op.type == "AssignAddVariableOp":
                variables[worker][op.inputs[0].op] += results[op.inputs[1]]
            else:
                results[Value(op.index)] = sum(results[value] for value in op.inputs)
        made |= {(worker, value): results[value] for value in fragment.fetches}
    return variables


@settings(max_examples=40, deadline=None)
@given(draw_updates())
def test_updates_that_read_what_other_clusters_have_written_keep_their_order(drawn: tuple[str, list[float]]) -> None:
    text, expected = drawn
    cut = compile_text(text, assign_worker_per_stage)
    for worker, values in run_updates(cut).items():
        held = [op for op, each in cut.program.variable_ops.items() if worker in cut.variable_workers[each.path]]
        assert [values[op] for op in held] == [expected[op] for op in held], (worker, text)
