"""Codec states, saved and restored: the codec continues as without the interruption, also past its renewals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.codec.axes import Axes
from whale_nebula.codec.structures import RENEWAL_STEPS, Rank, Structure
from whale_nebula.runtime.checkpoint.extra_state import decode_state, encode_state
from whale_nebula.runtime.exchange.state import ChannelState

DIMS = (8, 6)


def save_and_restore(structure: Any) -> Any:
    """The state of a structure by way of a checkpoint: a document of JSON, and tensors."""
    arrays: dict[str, Any] = {}

    def put(array: Any) -> str:
        arrays[str(len(arrays))] = tf.constant(array)
        return str(len(arrays) - 1)

    document = json.loads(json.dumps(encode_state(ChannelState(structure=structure), put)))
    found = decode_state(document, arrays.__getitem__)
    assert found is not None
    return found.structure


@pytest.mark.parametrize("structure", [Rank(2), Axes()], ids=str)
def test_restored_codec_state_continues_like_the_original(structure: Structure) -> None:
    draw = np.random.default_rng(0)
    rows = [tf.constant(draw.normal(size=DIMS), tf.float32) for _ in range(RENEWAL_STEPS + 2)]
    whole = broken = structure.init(DIMS)
    sent = 0
    for step, row in enumerate(rows):
        if step in (1, RENEWAL_STEPS - 1):
            broken = save_and_restore(broken)
        whole, news = structure.refresh(whole, row, step)
        broken, other = structure.refresh(broken, row, step)
        assert (news is None) == (other is None)
        sent += news is not None
        for one, another in zip(news or (), other or (), strict=True):
            np.testing.assert_array_equal(one, another)
    assert sent == 2
