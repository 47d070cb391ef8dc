"""Lazy numbers: what is known without their value, what waits for it, and the effect of a failure."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import LinkClosedError
from whale_nebula.runtime.step.results import Later
from whale_nebula.spec import Spec


@pytest.fixture
def promise() -> Future[Any]:
    return Future()


@pytest.fixture
def loss(promise: Future[Any]) -> Later:
    return Later(promise, 0, Spec("float32", ()))


def test_its_kind_is_known_before_it_comes(loss: Later) -> None:
    assert (loss.dtype, loss.shape.rank) == (tf.float32, 0)
    assert len({loss, loss}) == 1


READS = {
    "float": float,
    "numpy": lambda loss: loss.numpy(),
    "array": np.asarray,
    "format": lambda loss: f"{loss:.1f}",
    "sum": lambda loss: loss + 1.0,
    "sum from the left": lambda loss: 1.0 + loss,
    "comparison": lambda loss: loss < 3.0,
    "op": tf.sqrt,
    "cast": lambda loss: tf.convert_to_tensor(loss, tf.float64),
    "metric": lambda loss: keras.metrics.Mean()(loss),
    "repr": repr,
    "text": str,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_it_reads_as_the_tensor_does(promise: Future[Any], loss: Later, read: Any) -> None:
    tensor = tf.constant(2.25)
    promise.set_result([tensor])
    cast = tf.cast(tensor, tf.float64) if read is READS["cast"] else read(tensor)
    assert np.all(np.asarray(read(loss)) == np.asarray(cast))


@pytest.mark.parametrize("read", [READS["float"], READS["op"], READS["repr"], READS["numpy"], READS["array"]])
def test_what_kept_it_from_coming_is_raised_where_it_is_read(promise: Future[Any], loss: Later, read: Any) -> None:
    promise.set_exception(LinkClosedError("worker 'npu/0' is gone"))
    with pytest.raises(LinkClosedError, match="'npu/0' is gone"):
        read(loss)
