"""Merging of micro-batches' values and gradients."""

import pytest
import tensorflow as tf

from whale_nebula.ir.graph import CAPTURE, Graph, Op
from whale_nebula.ir.program import GradientPart, Holder, Leaf, Program, Request, Variable
from whale_nebula.runtime.step.gradients import Sums, merge, sum_over_stages
from whale_nebula.spec import Spec, Value

SHARES = [tf.constant(0.75), tf.constant(0.25)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("mean", [2.5]), ("sum", [6.0]), ("last", [4.0]), ("same", [2.0]), ("concat:0", [2.0, 4.0])],
)
def test_rules(rule: str, expected: list[float]) -> None:
    assert merge(rule, [tf.constant([2.0]), tf.constant([4.0])], SHARES).numpy().tolist() == expected


def test_the_entries_of_a_shape_have_each_their_own_rule() -> None:
    shapes = [tf.constant([3, 4, 6]), tf.constant([1, 4, 2])]
    assert merge("vector:sum,same,sum", shapes, SHARES).numpy().tolist() == [4, 4, 8]


def test_one_micro_batch_is_left_as_it_is() -> None:
    only = tf.constant(3.0)
    assert merge("mean", [only], [tf.constant(0.5)]) is only


def program(sparse: bool = False) -> Program:
    """A request of the gradient of one variable (2 x 3) by two stages."""
    spec = Spec("float32", (2, 3))
    ops = (
        Op(0, "Placeholder", outputs=(Spec("resource", ()),), role=CAPTURE),
        Op(1, "Placeholder", outputs=(spec,)),
        Op(2, "Placeholder", outputs=(Spec("int32", (None,)),)),
    )
    values = (Value(1, 0), Value(2, 0)) if sparse else (Value(1, 0),)
    leaves = (Leaf(2, "ids", Spec("int32", (None,))),)
    request = Request(0, 3, frozenset(), (), ("v",), (0,), (Holder(0, values),))
    return Program(Graph(ops), leaves, variables=(Variable(0, "v", spec),), requests=(request,))


def part(stage: int, *values: int) -> GradientPart:
    return GradientPart(stage, 0, tuple(Value(op, 0) for op in values or (1,)))


def test_dense_gradients_are_added_in_stage_order() -> None:
    first, second = Sums(program()), Sums(program())
    first.add(0, part(0), [tf.fill((2, 3), 1e8)])
    second.add(0, part(1), [tf.fill((2, 3), 1.0)])
    second.add(0, part(1), [tf.fill((2, 3), -1e8)])
    found = sum_over_stages(program(), {**second.parts(), **first.parts()})
    assert found[Value(1, 0)].numpy().max() == 0.0  # 1e8 + (1 - 1e8), and in no other order


def test_a_tied_variable_mixes_dense_and_sparse() -> None:
    dense, sparse = Sums(program()), Sums(program())
    dense.add(0, part(1), [tf.ones((2, 3))])
    sparse.add(0, part(0, 1, 2), [tf.ones((2, 3)), tf.constant([1, 1])])
    found = sum_over_stages(program(), {**dense.parts(), **sparse.parts()})
    assert found[Value(1, 0)].numpy().tolist() == [[1.0] * 3, [3.0] * 3]
