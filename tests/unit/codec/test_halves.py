"""Integers of four bits are the same to numpy as they are to TensorFlow."""

import numpy as np
import pytest

from whale_nebula.codec.blocks import apart, dequantise, parts


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (2, 7), (1, 1), (0, 4)])
def test_what_numpy_takes_apart_is_what_is_dequantised(rows: int, columns: int) -> None:
    scales, pairs = (part.dims for part in parts((rows, columns), 4, 32))
    drawn = np.random.default_rng(0).integers(0, 256, pairs, np.uint8)
    ones = np.ones(scales, "float32")
    again = dequantise(_bfloat16(ones), drawn, dims=(rows, columns), bits=4, block=32, dtype="float32")
    np.testing.assert_array_equal(apart(drawn, columns), np.asarray(again))


def _bfloat16(array: np.ndarray) -> object:
    import tensorflow as tf

    return tf.cast(array, tf.bfloat16)
