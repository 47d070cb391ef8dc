"""Whole frames out of a stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.wire.talk import said, tensor
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import HEADER_BYTES, checksum, pack
from whale_nebula.wire.replay import Splitter


def frames() -> list[bytes]:
    parts = [*said(0, {"kind": "PING", "last": True}), *tensor(0, np.zeros(0)), *tensor(0, np.arange(30))]
    return [pack(header, checksum(chunk)) + chunk.tobytes() for header, chunk in parts]


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=12))
def test_frames_come_out_whole_in_whatever_pieces(sizes: list[int]) -> None:
    stream, splitter, found = b"".join(frames()), Splitter(), []
    for size in [*sizes, len(stream)]:
        found += list(splitter.split(stream[:size]))
        stream = stream[size:]
    assert found == frames()


def test_half_a_frame_is_forgotten() -> None:
    first, _, last = frames()
    splitter = Splitter()
    assert list(splitter.split(last[:-1])) == []
    splitter.forget()
    assert list(splitter.split(first)) == [first]


def test_good_frames_before_a_bad_one_come_out() -> None:
    splitter = Splitter().split(frames()[0] + b"x" * HEADER_BYTES)
    assert next(splitter) == frames()[0]
    with pytest.raises(RemoteProtocolError, match="no frame of this protocol"):
        next(splitter)
