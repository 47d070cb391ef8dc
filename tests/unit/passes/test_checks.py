"""Which ops only assert, and when those run that they read."""

import pytest
import tensorflow as tf

from tests.unit.passes.programs import alone, program_of
from whale_nebula.capture.mirror import mirror
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.effects import is_check, is_effect
from whale_nebula.passes.plan import cut_program


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


ROOT = """
    stages a
    micro 2
    %0 = input x float32[?]
    %1 = capture w resource[]
    %2 = ReadVariableOp(%1) float32[] stateful @a
    %3 = Mul(%0, %2) float32[?] @a
    %4 = Const {value=(0)} int32[1]
    %5 = Mean(%3, %4) float32[] @a
    %6 = Sqrt(%5) float32[] @a
    %7 = Const {value=(9.0)} float32[]
    %8 = Less(%6, %7) bool[] @a
    %9 = Assert(%8, %6) stateful @a
    returns %6
"""


def test_what_a_check_reads_is_computed_for_it_and_again_for_the_result() -> None:
    program = program_of(ROOT)
    plan = cut_program(program, alone(program))
    (phase,) = plan.phases
    forward = phase.stages[0].forward
    assert forward is not None
    assert {6, 8, 9} <= set(forward.ops)
    (update,) = phase.updates["local/0"]
    assert update.ops == (6,)
    assert {value.op: rule for value, rule in plan.merges.items()} == {5: "mean"}
