"""Ops that are only assertions, and when their inputs are computed."""

import pytest
import tensorflow as tf

from whale_nebula.capture.mirror import mirror
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.text import from_text
from whale_nebula.passes.batch import split_assertions
from whale_nebula.passes.effects import is_check, is_effect
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
    assert not once and "says something of each" in refused.reason
