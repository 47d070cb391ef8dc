"""An emptied variable takes no memory, refuses to be read, and can be filled again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import CollectiveReadError
from whale_nebula.runtime.variables.remote import Kept, empty, fill

READS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda v: v.numpy(),
    "np.array": np.array,
    "convert": tf.convert_to_tensor,
    "add": lambda v: v + 1.0,
    "multiply": lambda v: 2.0 * v,
    "index": lambda v: v[0],
    "reduce": tf.reduce_sum,
    "matmul": lambda v: tf.matmul(v, v),
    "stack": lambda v: tf.stack([v, v]),
    "identity": tf.identity,
    "gather": lambda v: tf.gather(v, [0]),
    "keras": keras.ops.sum,
}


def square() -> Any:
    return tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="square")


def kept(variable: Any) -> Kept:
    return Kept("layer/square", variable, ("npu/0",))


def raw(variable: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_every_way_of_reading_is_refused(read: Callable[[Any], Any]) -> None:
    variable = square()
    empty(kept(variable))
    with pytest.raises(CollectiveReadError, match=r"'layer/square' is on npu/0, not in this process") as caught:
        read(variable)
    assert re.search(r"test_elsewhere\.py:\d+$", caught.value.where)
    assert "with nb.gathered():" in caught.value.mend and "get_weights" in caught.value.mend


def test_it_holds_nothing_and_keeps_its_form() -> None:
    variable = square()
    empty(kept(variable))
    assert raw(variable).shape == (0,)
    assert (variable.shape, variable.dtype, variable.name) == ((2, 2), tf.float32, "square:0")
    assert isinstance(variable, tf.Variable)


def test_writes_are_the_homes_business() -> None:
    variable = square()
    empty(kept(variable))
    variable.assign([[5.0, 6.0], [7.0, 8.0]])
    variable.assign_add([[5.0, 6.0], [7.0, 8.0]])
    assert raw(variable).shape == (0,)


def test_it_can_be_traced() -> None:
    """A trace only names the variable; the function runs where the variable is."""
    variable = square()
    empty(kept(variable))
    traced = tf.function(lambda: tf.reduce_sum(variable * 2.0)).get_concrete_function()
    fill(kept(variable), np.full((2, 2), 3.0, "float32"))
    assert float(traced()) == 24.0


def test_filled_it_is_as_before() -> None:
    variable = square()
    plain = type(variable)
    for _ in range(2):
        empty(kept(variable))
        fill(kept(variable), np.eye(2, dtype="float32"))
        assert type(variable) is plain
        assert float(tf.reduce_sum(variable)) == 2.0


def test_it_may_be_an_argument_of_a_function() -> None:
    """The type of an argument is asked of its handle."""
    variable = square()
    empty(kept(variable))
    assert tf.function(lambda v: tf.shape(v.handle)).get_concrete_function(variable) is not None


def test_a_checkpoint_of_it_is_refused(tmp_path: Path) -> None:
    """It would hold an empty tensor, and nobody would know until it is restored."""
    variable = square()
    empty(kept(variable))
    with pytest.raises(CollectiveReadError):
        tf.train.Checkpoint(variable=variable).write(str(tmp_path / "checkpoint"))


def test_a_checkpoint_gives_it_nothing_back(tmp_path: Path) -> None:
    """Every process restores all of a checkpoint, and keeps its part."""
    path = tf.train.Checkpoint(square=square(), own=square()).write(str(tmp_path / "checkpoint"))
    variable, own = square(), tf.Variable(tf.zeros([2, 2]))
    empty(kept(variable))
    tf.train.Checkpoint(square=variable, own=own).read(path).assert_consumed()
    assert raw(variable).shape == (0,)
    assert own.numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]
