"""Any bytes, in one piece or one at a time, are parsed or raise RemoteProtocolError, and allocate nothing above the
cap.
"""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.hostile_frames import HostileFrames, feed_frames, make_peer, make_victim
from tests.unit.wire.conversations import (
    STEP,
    disconnect_all,
    frame_message,
    frame_tensor,
    greet,
    join_packet,
    make_conversation,
    read_contents,
    send_frames,
)
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.buffers import Assembly
from whale_nebula.wire.conversation import Conversation
from whale_nebula.wire.frame import CHUNK_BYTES, Header, Kind, pack_header


def make_stepping_victim() -> tuple[Conversation, list[bytes]]:
    """A victim after a valid greeting, and the frames of a step for it."""
    here, there = make_victim(), make_peer()
    greet(here, there)
    array = np.arange(40, dtype=np.uint8)
    ping = {"kind": "PING", "last": False}
    frames = [
        *frame_message(1, STEP),
        *frame_tensor(1, array),
        *frame_message(1, ping),
        *frame_tensor(1, array[:0], slot=1),
    ]
    return here, send_frames(there, frames)


@given(st.randoms(use_true_random=False), st.sampled_from([0, 20_000]), st.booleans())
def test_hostile_frames_are_parsed_or_refused(draw: random.Random, window: int, sealed: bool) -> None:
    hostile = HostileFrames(draw, window=window, sealed=sealed)
    for frame in itertools.islice(hostile.generate_frames(), 8):
        feed_frames(hostile.prepare_victim(), iter([frame]))


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    conversation = make_victim()
    conversation.connect()
    _, refused = feed_frames(conversation, iter([data]))
    assert refused


@given(st.data())
def test_changed_stream_delivers_a_prefix_of_the_sent_content(data: st.DataObject) -> None:
    """Bytes are changed, removed or inserted anywhere; a prefix of the sent content arrives."""
    conversation, frames = make_stepping_victim()
    changed = [bytearray(frame) for frame in frames]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(changed))
        place = data.draw(st.integers(0, len(frame)))
        frame[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    events, _ = feed_frames(conversation, iter([bytes(frame) for frame in changed]))
    sent_contents = [STEP, np.arange(40, dtype=np.uint8).tobytes(), {"kind": "PING", "last": False}, b""]
    received_contents = list(read_contents(events))
    assert received_contents == sent_contents[: len(received_contents)]


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_frame_with_a_flipped_bit_is_refused_and_resent(sealed: bool) -> None:
    here, there = (make_conversation(side, sealed=sealed) for side in (0, 1))
    greet(here, there)
    here.receive(send_frames(there, frame_message(1, STEP))[0])
    (good,) = send_frames(there, frame_tensor(1, np.array([1.5], np.float32)))
    for bit in range(len(good) * 8):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            here.receive(bytes(data))
        here._error = None  # as a new connection does, which would be slow for each bit
    for side in (here, there):
        side.disconnect()
    (packet,) = greet(here, there)[1][-1].resend
    assert list(read_contents(here.receive(join_packet(packet)))) == [np.array([1.5], np.float32).tobytes()]


def test_header_without_its_payload_is_refused() -> None:
    """A header that announces the largest message, without a payload."""
    conversation = make_victim()
    conversation.connect()
    size = 8_000_000
    header = Header(Kind.CONTROL, flags=2, source=1, dtype=3, dims=(size,), length=size, whole=size)
    assert feed_frames(conversation, iter([pack_header(header, 0)])) == ([], True)


def test_allocation_above_the_cap_is_detected() -> None:
    conversation, _ = make_stepping_victim()
    conversation._assembly = Assembly()
    frames = [
        *frame_message(1, STEP),
        *frame_tensor(1, np.zeros(CHUNK_BYTES + 1, np.uint8)),
    ]  # more than one frame: one is not copied
    sender = make_peer()
    disconnect_all(conversation)
    greet(conversation, sender)
    with pytest.raises(AssertionError, match=f"an array of {CHUNK_BYTES + 1} bytes"):
        feed_frames(conversation, iter(send_frames(sender, frames)))
