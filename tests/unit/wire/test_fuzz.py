"""Any bytes, in one piece or one at a time, are parsed or raise RemoteProtocolError, and allocate nothing above the
cap.

`python -m tests.fuzz.wire --seconds 60` does the same for longer.
"""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.hostile import Hostile, fed, peer, victim
from tests.unit.wire.talk import STEP, contents, conversation, cut, greet, said, sent, tensor, whole
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.buffers import Assembly
from whale_nebula.wire.conversation import Conversation
from whale_nebula.wire.frame import CHUNK_BYTES, Header, Kind, pack


def stepping() -> tuple[Conversation, list[bytes]]:
    """A victim that was greeted in good order, and the frames of a step that are to come, with all that they say."""
    here, there = victim(), peer()
    greet(here, there)
    array = np.arange(40, dtype=np.uint8)
    ping = {"kind": "PING", "last": False}
    frames = [*said(1, STEP), *tensor(1, array), *said(1, ping), *tensor(1, array[:0], slot=1)]
    return here, sent(there, frames)


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0, 20_000]), st.booleans())
def test_hostile_frames_parse_or_are_refused(draw: random.Random, window: int, sealed: bool) -> None:
    hostile = Hostile(draw, window=window, sealed=sealed)
    for frame in itertools.islice(hostile.frames(), 8):
        fed(hostile.prepared(), iter([frame]))


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_at_all(data: bytes) -> None:
    talk = victim()
    talk.connect()
    _, refused = fed(talk, iter([data]))
    assert refused


@settings(deadline=None)
@given(st.data())
def test_a_changed_stream_gives_nothing_but_what_was_said(data: st.DataObject) -> None:
    """Bytes changed, lost or put in anywhere: what arrives is the beginning of what was sent."""
    talk, frames = stepping()
    changed = [bytearray(frame) for frame in frames]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(changed))
        place = data.draw(st.integers(0, len(frame)))
        frame[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    events, _ = fed(talk, iter([bytes(frame) for frame in changed]))
    truth = [STEP, np.arange(40, dtype=np.uint8).tobytes(), {"kind": "PING", "last": False}, b""]
    found = list(contents(events))
    assert found == truth[: len(found)]


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_every_flipped_bit_of_a_small_frame_is_refused_and_the_frame_comes_again(sealed: bool) -> None:
    here, there = (conversation(side, sealed=sealed) for side in (0, 1))
    greet(here, there)
    here.receive(sent(there, said(1, STEP))[0])
    (good,) = sent(there, tensor(1, np.array([1.5], np.float32)))
    for bit in range(len(good) * 8):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            here.receive(bytes(data))
        here._error = None  # as after a new connection, which would take a while for each bit
    for side in (here, there):
        side.disconnect()
    (packet,) = greet(here, there)[1][-1].resend
    assert list(contents(here.receive(whole(packet)))) == [np.array([1.5], np.float32).tobytes()]


def test_what_is_only_announced_is_refused() -> None:
    """A header that announces the largest message there may be, and nothing behind it."""
    talk = victim()
    talk.connect()
    size = 8_000_000
    header = Header(Kind.CONTROL, flags=2, source=1, dtype=3, dims=(size,), length=size, whole=size)
    assert fed(talk, iter([pack(header, 0)])) == ([], True)


def test_an_array_above_the_cap_would_be_noticed() -> None:
    talk, _ = stepping()
    talk._assembly = Assembly()
    frames = [*said(1, STEP), *tensor(1, np.zeros(CHUNK_BYTES + 1, np.uint8))]  # what comes in one frame has no other
    peer_of_it = peer()
    cut(talk)
    greet(talk, peer_of_it)
    with pytest.raises(AssertionError, match=f"an array of {CHUNK_BYTES + 1} bytes"):
        fed(talk, iter(sent(peer_of_it, frames)))
