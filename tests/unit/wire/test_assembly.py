"""Tensors out of chunks, beyond the decoder's tests: chunks that come again, refusals that change nothing."""

import numpy as np
import pytest

from tests.unit.wire.talk import tensor
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.assembly import Assembly, Bound
from whale_nebula.wire.frame import CHUNK_BYTES, Header

ARRAY = np.arange(CHUNK_BYTES // 4 + 10, dtype=np.uint64)


def test_a_chunk_that_did_not_come_whole_is_placed_again() -> None:
    assembly = Assembly()
    frames = tensor(0, ARRAY)
    assert len(frames) == 3
    for header, chunk in frames:
        assembly.place(header)[:10] = 77  # the line was cut
        assembly.place(header)[:] = chunk
        events = assembly.finish_chunk(header)
    assert (events[0].array == ARRAY).all()


def test_what_is_refused_changes_nothing() -> None:
    asked: list[Header] = []

    def expect(header: Header) -> Bound:
        asked.append(header)
        return Bound("uint64", (len(ARRAY),))

    assembly = Assembly(expect)
    frames = tensor(0, ARRAY)
    with pytest.raises(RemoteProtocolError, match="plan expects"):
        assembly.place(tensor(0, np.zeros(3))[0][0])
    for header, chunk in frames:
        with pytest.raises(RemoteProtocolError, match="does not continue"):
            assembly.place(header._replace(slot=9, offset=header.offset or CHUNK_BYTES))
        assembly.place(header)[:] = chunk
        done = assembly.finish_chunk(header)
    assert (done[0].array == ARRAY).all()
    assert len(asked) == 2
