"""The layout of a call's arguments, and the packing of a captured step's results."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.step import capture, fill_layout, signature
from whale_nebula.errors import PlanError, UnsupportedError


def test_names_specs_and_what_is_split() -> None:
    arguments = [("batch", {"ids": np.ones((4, 2), "int32"), "scale": 2.0}), ("table", tf.ones((3, 5))), ("n", 7)]
    layout, tensors = signature(arguments, frozenset({"table"}))
    assert layout.names == ("batch/ids", "table")
    assert [tuple(spec.shape) for spec in layout.specs] == [(None, 2), (3, 5)]
    assert layout.batched == (True, False)
    assert [tuple(tensor.shape) for tensor in tensors] == [(4, 2), (3, 5)]


def test_rows_may_change_and_nothing_else() -> None:
    def key(*shape: int, dtype: str = "float32", plain: Any = 1) -> Any:
        return signature([("x", np.zeros(shape, dtype)), ("n", plain)])[0].key

    assert key(3, 2) == key(5, 2)
    assert key(3, 2) != key(3, 4)
    assert key(3, 2) != key(3, 2, dtype="float64")
    assert key(3, 2) != key(3, 2, plain=2)


def test_arguments_are_filled_again() -> None:
    layout, tensors = signature([("x", {"a": np.ones(2), "b": "text"}), ("y", [tf.zeros(2), 3])])
    first, second = fill_layout(layout, ["A", "B"])
    assert first == {"a": "A", "b": "text"}
    assert second == ["B", 3]
    assert len(tensors) == 2


@pytest.mark.parametrize("strange", [tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[1, 0]])])
def test_what_cannot_be_split_by_rows_is_named(strange: Any) -> None:
    with pytest.raises(UnsupportedError, match="'x/1'"):
        signature([("x", (tf.ones(2), strange))])


def captured(fn: Any, **arguments: Any) -> Any:
    layout, _ = signature(list(arguments.items()))
    return capture(lambda given: fn(*given), layout)


def test_results_keep_the_users_structure() -> None:
    found = captured(lambda x: {"b": (x, None), "a": 3}, x=np.ones(2, "float32"))
    assert found.pack(["three", "X"]) == {"b": ("X", None), "a": "three"}
    assert len(found.program.returns) == 2, "tf.function makes tensors of numbers"


def test_variables_are_named_by_path_and_twins_are_numbered() -> None:
    twins = [tf.Variable(1.0, name="twin"), tf.Variable(2.0, name="twin")]
    found = captured(lambda x: x * twins[0] + twins[1], x=np.ones(2, "float32"))
    assert list(found.variables) == ["twin", "twin#2"]
    assert [v is twin for v, twin in zip(found.variables.values(), twins, strict=True)] == [True, True]


@pytest.mark.parametrize("stacked", [True, False])
def test_a_list_of_tensors_that_would_lose_its_gradient_is_refused(stacked: bool) -> None:
    """A gradient flows through tensors only; a list stays in its stage, or the error says where it leaves it."""
    weight = tf.Variable([1.0, 2.0])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(name="a"):
                rows = tf.TensorArray(tf.float32, size=2, element_shape=[2]).write(0, x * weight).write(1, weight**3)
                whole = rows.stack() if stacked else None
            with nb.stage(name="b"):
                loss = tf.reduce_sum((rows.stack() if whole is None else whole) ** 2)
        return tape.gradient(loss, weight)

    if stacked:
        np.testing.assert_allclose(nb.function(step)(tf.ones(2)), [2.0 + 6.0, 4.0 + 6.0 * 2.0**5], rtol=1e-6)
    else:
        with pytest.raises(PlanError, match=r"list of tensors .* 'a' .* 'b'"):
            nb.function(step)(tf.ones(2))
