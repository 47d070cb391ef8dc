"""Inputs that only some clusters have: their readers, and the values that cross instead."""

from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.passes.programs import apart, program_of
from whale_nebula.capture.step import capture, signature
from whale_nebula.errors import AbsentInputError
from whale_nebula.ir.cut import Cut
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.readings import check_here, readers_of, readings

SIDES = """
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
"""The metric `seen` is everywhere, and counts what is made of the target alone, and the rows of the source."""

BOTH = ("source", "target")
A, B = "a/0", "b/0"


def plan(text: str = SIDES, names: tuple[str, ...] = BOTH, results: str = "everywhere") -> Cut:
    program = program_of(text)
    return cut_program(program, apart(program), results=results, apart=names)


def read(cut: Cut, worker: str) -> set[tuple[str, bool]]:
    return {(cut.program.leaves[each.leaf].name, each.rows) for each in readings(cut, worker)}


def crossed(cut: Cut) -> dict[int, tuple[str, tuple[str, ...], int]]:
    found = [crossing for phase in cut.phases for crossing in phase.crossings]
    return {each.value.op: (each.source, each.destinations, each.round) for each in found}


class TestWhoReads:
    def test_each_cluster_reads_its_side_and_all_may_count_rows(self) -> None:
        assert read(plan(), A) == {("source", False), ("source", True)}
        assert read(plan(), B) == {("target", False), ("source", True)}

    def test_where_all_have_all_everything_is_read_in_place(self) -> None:
        assert ("target", False) in read(plan(names=()), A)
        assert 9 not in crossed(plan(names=()))

    def test_a_number_of_one_side_crosses_before_the_update(self) -> None:
        assert crossed(plan())[9] == (B, (A,), -1)
        assert plan().whole[B].fetches[0].op == 9
        assert A not in plan().whole

    def test_what_is_too_large_to_cross_is_read_in_place(self) -> None:
        large = SIDES.replace("%9 = Sum(%1, %7) float32[]", "%9 = Neg(%1) float32[?,2]").replace(
            "%10 = AssignAddVariableOp(%3, %9) stateful", "%10 = NoOp() stateful"
        )
        assert ("target", False) in read(plan(large), A)

    def test_a_tensor_of_one_side_stays_there_with_results_owner(self) -> None:
        large = SIDES.replace("%9 = Sum(%1, %7) float32[]", "%9 = Neg(%1) float32[?,2]").replace(
            "%10 = AssignAddVariableOp(%3, %9) stateful", "%10 = NoOp() stateful"
        )
        kept = plan(large, results="owner")
        assert ("target", False) not in read(kept, A)
        assert {value.op: owners for value, owners in kept.owners.items()} == {9: (B,)}

    def test_readers_of_an_input_are_the_workers_whose_stages_read_it(self) -> None:
        both = SIDES.replace("%5, %1", "%5, %0").replace("[?,4]", "[?,2]")
        assert readers_of(plan(), BOTH) == {"source": {A}, "target": {B}}
        assert readers_of(plan(), ("target", "nothing")) == {"target": {B}}
        assert readers_of(plan(both), ("source",)) == {"source": {A, B}}


ROWS = [
    ("float32[?,4]", "%14 = StridedSlice(%11, %12, %13, %13) int32[]", True),
    ("float32[?,?]", "%14 = StridedSlice(%11, %12, %13, %13) int32[]", True),
    ("float32[?,4]", "%14 = Prod(%11, %12) int32[]", True),
    ("float32[?,?]", "%14 = Prod(%11, %12) int32[]", False),
    ("float32[?,?]", "%14 = StridedSlice(%11, %13, %13, %13) int32[]", False),
]


@pytest.mark.parametrize(("spec", "line", "rows"), ROWS)
def test_asking_for_rows_is_not_reading(spec: str, line: str, rows: bool) -> None:
    text = SIDES.replace("%0 = input source float32[?,4]", f"%0 = input source {spec}").replace(
        "%14 = StridedSlice(%11, %12, %13, %13) int32[]", line
    )
    found = {each.rows for each in readings(plan(text), A) if each.op.type == "Shape"}
    assert found == {rows}


class TestWhatIsNotHere:
    def test_a_cluster_needs_what_its_stages_read(self) -> None:
        with pytest.raises(AbsentInputError) as caught:
            check_here(plan(), B, [1], lambda op: f"train.py:{op}")
        assert caught.value.what == "input 'target' is None in this process, and stage 'b' of cluster 'b' here reads it"
        assert "Mul" in caught.value.where and "train.py:6" in caught.value.where
        assert "yield 'target' in this cluster as well" in caught.value.mend

    @pytest.mark.parametrize(("worker", "absent"), [(A, [1]), (B, [0]), (A, []), (B, [])])
    def test_and_no_more(self, worker: str, absent: list[int]) -> None:
        check_here(plan(), worker, absent, lambda op: "")

    def test_an_update_that_reads_is_named(self) -> None:
        with pytest.raises(AbsentInputError, match="and the update in cluster 'a' here reads it"):
            check_here(plan(names=()), A, [1], lambda op: "")

    def test_an_input_that_is_given_back_is_read(self) -> None:
        with pytest.raises(AbsentInputError, match=r"'target' is None .* what the step returns here reads it"):
            check_here(plan(SIDES.replace("returns %8", "returns %8, %1")), A, [1], lambda op: "")


def test_weights_of_micro_batches_are_computed_where_they_are_used() -> None:
    """`nb.loss_weight` of the target's words: the source's cluster has neither the words nor any use for them."""
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
    kept = cut_program(program, apart(program), apart=BOTH)
    assert set(kept.weight) == {B} and set(cut_program(program, apart(program)).weight) == {A, B}
    check_here(kept, A, [1], lambda op: "")
    check_here(kept, B, [0], lambda op: "")
