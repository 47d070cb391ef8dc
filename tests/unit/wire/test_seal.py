"""Sealed frames: only valid ones open; unacknowledged frames until acknowledgement, and the order of arrivals."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import DamagedFrameError, LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.buffers import Arrivals, Packet, UnacknowledgedFrames, count_held_bytes
from whale_nebula.wire.frame import TAG_BYTES, Flag, Header, Kind, encode_sealed_header, pack_header, unpack_header
from whale_nebula.wire.greeting import Exchange, Sealer
from whale_nebula.wire.tensor import find_dtype_code

HEADER = Header(
    Kind.SCALAR,
    flags=Flag.LAST,
    conversation=9,
    sequence=5,
    source=0,
    destination=1,
    length=4,
    whole=4,
    dtype=find_dtype_code("uint8"),
    dims=(4,),
)
CHUNK = np.array([1, 2, 3, 4], np.uint8)


def make_sealers() -> tuple[Sealer, Sealer]:
    material = bytes(range(64))
    return Sealer(material, 0, 1), Sealer(material, 1, 0)


def open_chunk(sealer: Sealer, header: Header, sealed: np.ndarray) -> tuple[Header, list[int]]:
    place = np.zeros(sealed.size - TAG_BYTES, np.uint8)
    return sealer.open(header, sealed, place), place.tolist()


def test_sealed_chunk_opens_at_the_other_side() -> None:
    here, there = make_sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    assert header == HEADER._replace(flags=Flag.LAST | Flag.SEALED, length=4 + TAG_BYTES)
    assert sealed.size == header.length and CHUNK.tobytes() not in sealed.tobytes()
    assert open_chunk(there, header, sealed) == (HEADER, [1, 2, 3, 4])


def test_empty_chunk_round_trips_sealed() -> None:
    here, there = make_sealers()
    empty = HEADER._replace(length=0, whole=0, dims=(0,))
    assert open_chunk(there, *here.seal(empty, CHUNK[:0])) == (empty, [])


CHANGES = [
    {"kind": Kind.RESULT},
    {"conversation": 8},
    {"sequence": 6},
    {"program": 1},
    {"step": 1},
    {"source": 1},
    {"destination": 0},
    {"phase": 1},
    {"shard": 1},
    {"slot": 1},
    {"micro_batch": 0},
    {"offset": 1},
    {"whole": 5},
    {"codec": 1},
    {"direction": 1},
    {"dtype": 2},
    {"state": 1},
    {"dims": (2, 2)},
    {"flags": int(Flag.SEALED)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_chunk_does_not_open_under_a_changed_header(change: dict[str, int]) -> None:
    here, there = make_sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    with pytest.raises(DamagedFrameError, match="the seal of frame"):
        open_chunk(there, header._replace(**change), sealed)


def test_seal_covers_every_header_field_except_ack() -> None:
    changed = {name for change in CHANGES for name in change}
    assert changed == set(Header._fields) - {"ack", "length"}  # a wrong length is a wrong ciphertext
    here, there = make_sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    assert open_chunk(there, header._replace(ack=77), sealed)[1] == [1, 2, 3, 4]
    assert encode_sealed_header(header) == encode_sealed_header(header._replace(ack=77))


def test_flipped_bit_breaks_the_seal() -> None:
    here, there = make_sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    for bit in range(sealed.size * 8):
        broken = sealed.copy()
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFrameError):
            open_chunk(there, header, broken)


def test_directions_have_different_keys() -> None:
    here, there = make_sealers()
    header, sealed = here.seal(HEADER, CHUNK)
    with pytest.raises(DamagedFrameError):
        open_chunk(here, header, sealed)
    assert there.seal(HEADER, CHUNK)[1].tobytes() != sealed.tobytes()


def test_sealed_header_is_refused_without_a_key() -> None:
    header, _ = make_sealers()[0].seal(HEADER, CHUNK)
    packed = pack_header(header, 0, sealed=True)
    assert unpack_header(packed, sealed=True) == (header, 0)
    with pytest.raises(RemoteProtocolError, match="no key"):
        unpack_header(packed)


def test_key_material_depends_on_both_public_keys_and_salt() -> None:
    a, b, c = Exchange(), Exchange(), Exchange()
    materials = [a.agree(b.public, b"1"), a.agree(b.public, b"2"), a.agree(c.public, b"1"), b.agree(c.public, b"1")]
    assert b.agree(a.public, b"1") == materials[0]
    assert all(len(material) == 64 for material in materials)
    assert all(one != other for one, other in itertools.combinations(materials, 2))


@pytest.mark.parametrize("theirs", [bytes(32), b"\x01" + bytes(31), b"short", b""], ids=repr)
def test_invalid_public_key_is_refused(theirs: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="key exchange"):
        Exchange().agree(theirs, b"salt")


def make_packet(number: int, size: int = 10) -> Packet:
    return bytes([number]), np.full(size, number, np.uint8)


def make_frames(count: int, budget: int = 5000) -> UnacknowledgedFrames:
    sent = UnacknowledgedFrames(budget)
    for number in range(1, count + 1):
        sent.keep(make_packet(number))
    return sent


def numbers(packets: list[Packet]) -> list[int]:
    return [head[0] for head, _ in packets]


def test_unacknowledged_frames_are_kept_without_copying() -> None:
    sent = UnacknowledgedFrames(100)
    head, chunk = make_packet(1)
    sent.keep((head, chunk))
    ((kept_head, kept_chunk),) = sent.list_since(1)
    assert kept_head is head and kept_chunk is chunk


def test_unacknowledged_frames_refuse_acknowledgement_of_unsent_frames() -> None:
    sent = make_frames(3)
    with pytest.raises(RemoteProtocolError, match="frame 5, but only 3 were sent"):
        sent.acknowledge(5)
    assert sent.bytes == 33


@pytest.mark.parametrize("number", [2, 5])
def test_unacknowledged_frames_refuse_to_resend_released_frames(number: int) -> None:
    sent = make_frames(3)
    sent.acknowledge(3)
    with pytest.raises(LocalProtocolError, match="is no longer stored"):
        sent.list_since(number)


@given(st.lists(st.integers(0, 40) | st.none(), max_size=60))
def test_unacknowledged_counts_match_frames(moves: list[int | None]) -> None:
    """None sends a frame, a number acknowledges that many frames."""
    sent = UnacknowledgedFrames(100)
    for move in moves:
        if move is None:
            sent.keep(make_packet(sent.next_number % 256, size=sent.next_number % 7))
        else:
            sent.acknowledge(min(sent.oldest_number + move, sent.next_number))
        frames = sent.list_since(sent.oldest_number)
        assert sent.bytes == sum(len(head) + chunk.size for head, chunk in frames)
        assert numbers(frames) == [n % 256 for n in range(sent.oldest_number, sent.next_number)]
        assert sent.room == 100 - sum(count_held_bytes(len(head) + chunk.size) for head, chunk in frames)


def deliver_all(arrivals: Arrivals[int], numbers: list[int]) -> list[int]:
    """What is taken when frames come in this order."""
    delivered = []
    for number in numbers:
        with pytest.raises(RemoteProtocolError, match="twice") if number in delivered else contextlib.nullcontext():
            arrivals.add(number, number, 1)
        while (due := arrivals.due_frame) is not None:
            delivered.append(due)
            arrivals.advance()
    return delivered


@given(st.permutations(range(1, 9)), st.lists(st.integers(1, 8), max_size=10))
def test_arrivals_are_delivered_once_and_in_order(order: list[int], kept_head: list[int]) -> None:
    arrivals = Arrivals[int](1 << 20)
    assert deliver_all(arrivals, [*order, *kept_head]) == list(range(1, 9))
    assert arrivals.expected_number == 9


def test_arrivals_without_a_window_refuse_a_gap() -> None:
    arrivals = Arrivals[int]()
    assert deliver_all(arrivals, [1, 1, 2]) == [1, 2]
    with pytest.raises(RemoteProtocolError, match="received frame 4, but expected frame 3"):
        arrivals.add(4, 4, 1)


def test_arrivals_hold_at_most_window_bytes() -> None:
    arrivals = Arrivals[int](2000)
    arrivals.add(2, 2, 800)
    with pytest.raises(RemoteProtocolError, match="at most 2000 bytes"):
        arrivals.add(3, 3, 800)
    assert deliver_all(arrivals, [1]) == [1, 2]
    arrivals.add(4, 4, 800)


def test_arrivals_refuse_a_number_far_ahead() -> None:
    with pytest.raises(RemoteProtocolError):
        Arrivals[int](1 << 40).add(1 << 32, 0, 1)
