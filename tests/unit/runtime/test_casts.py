"""The precisions that a boundary may cross in."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.runtime.exchange.coding import decode_cast, encode_cast


@pytest.mark.parametrize(("codec", "relative"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_a_round_trip_loses_half_a_unit(codec: str, relative: float) -> None:
    x = tf.constant(np.random.default_rng(0).standard_normal(1000).astype("float32"))
    small = encode_cast(codec, x)
    assert small.dtype.size == 2
    back = decode_cast(small, x.dtype)
    assert np.abs(back - x).max() <= relative * np.abs(x).max()


def test_fp16_clamps_what_it_cannot_hold() -> None:
    assert encode_cast("fp16", tf.constant([1e30, -1e30])).numpy().tolist() == [65504.0, -65504.0]


def test_integers_and_none_go_as_they_are() -> None:
    tokens = tf.constant([1, 2])
    assert encode_cast("fp16", tokens) is tokens
    x = tf.constant([1.0])
    assert decode_cast(encode_cast("none", x), x.dtype) is x


def test_what_was_infinite_stays_so() -> None:
    assert encode_cast("fp16", tf.constant([float("inf"), 1e9])).numpy().tolist() == [float("inf"), 65504.0]
