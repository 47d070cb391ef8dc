"""Errors raised in functions that TensorFlow calls: where it converts them to its own."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import DataError
from whale_nebula.tf.failures import carry_errors, suspend_carried_errors


@carry_errors()
def fail(_: Any) -> np.ndarray:
    raise DataError("no such row", why="it is gone", mend="look elsewhere")


def generate_rows() -> Iterator[int]:
    with carry_errors():
        yield int(fail(0))


def call_eagerly() -> Any:
    return tf.numpy_function(fail, [1], tf.int32)


def read_dataset() -> Any:
    source = tf.data.Dataset.from_generator(generate_rows, output_signature=tf.TensorSpec((), tf.int32))
    return list(source.map(tf.identity).prefetch(1))


@pytest.mark.parametrize("call", [call_eagerly, tf.function(call_eagerly), read_dataset])
def test_carry_errors_makes_them_leave_tensorflow_unchanged(call: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match="NB-220 no such row\n  why: it is gone\n  mend: look elsewhere"):
        call()


def test_suspend_carried_errors_keeps_tensorflows_and_others_stay() -> None:
    with suspend_carried_errors(), pytest.raises(tf.errors.UnknownError, match="no such row"):
        read_dataset()
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(lambda x: 1 // x)(tf.constant(0))
