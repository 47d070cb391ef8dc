"""The frame's header: layout, rules, sizes."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import (
    CHUNK_BYTES,
    FRAME_CAP,
    HEADER_BYTES,
    MESSAGE_BYTES,
    TAG_BYTES,
    Direction,
    Flag,
    Header,
    Kind,
    compute_checksum,
    count_frames,
    count_wire_bytes,
    pack_header,
    split_payload,
    unpack_header,
    unseal_header,
)
from whale_nebula.wire.tensor import find_dtype_code


def pack_frames(header: Header, payload: np.ndarray) -> list[tuple[bytes, np.ndarray]]:
    return [(pack_header(each, compute_checksum(chunk)), chunk) for each, chunk in split_payload(header, payload)]


FLOAT32 = find_dtype_code("float32")
VALID_HEADER = Header(
    Kind.BOUNDARY,
    dtype=FLOAT32,
    dims=(2, 3),
    source=1,
    destination=2,
    program=2**64 - 1,
    step=2**40,
    phase=3,
    micro_batch=-1,
    slot=5,
    direction=Direction.BACKWARD,
    shard=6,
    codec=7,
    state=8,
    conversation=9,
    sequence=2**63,
    flags=Flag.LAST,
    offset=0,
    length=24,
    whole=24,
)


def test_header_has_136_bytes_and_starts_with_magic() -> None:
    packed = pack_header(VALID_HEADER, 0)
    assert HEADER_BYTES == len(packed) == 136
    assert packed[:6] == b"NBLA\x01\x01"


U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(
    kind=st.sampled_from([Kind.PART, Kind.SCALAR, Kind.RESULT, Kind.VALUE]),
    dims=st.lists(st.integers(0, 9), max_size=8),
    source=U32,
    destination=U32,
    program=U64,
    step=U64,
    phase=U16,
    micro_batch=st.integers(-1, 2**31 - 1),
    slot=U32,
    shard=U16,
    codec=st.integers(1, 2**16 - 1),
    state=U32,
    size=st.none() | st.integers(0, 5000),
    conversation=U32,
    sequence=U64,
)
def test_header_round_trip_preserves_all_fields(dims: list[int], size: int | None, **fields: int) -> None:
    whole = int(np.prod(dims)) * 4 if size is None else size
    if size is None:
        fields |= {"codec": 0, "state": 0}
    first, chunk = next(
        iter(split_payload(Header(dtype=FLOAT32, dims=tuple(dims), **fields), np.zeros(whole, np.uint8)))
    )
    assert unpack_header(pack_header(first, compute_checksum(chunk))) == (first, compute_checksum(chunk))


def test_header_with_a_flipped_bit_is_refused() -> None:
    good = pack_header(VALID_HEADER, 0)
    for bit in range(HEADER_BYTES * 8):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            unpack_header(bytes(data))


@pytest.mark.parametrize("size", [0, 1, 23, 25, CHUNK_BYTES])
def test_encoded_tensor_may_have_any_number_of_bytes(size: int) -> None:
    encoded = VALID_HEADER._replace(whole=size, length=size)
    assert unpack_header(pack_header(encoded, 0))[0] == encoded and encoded.encoded
    with pytest.raises(LocalProtocolError, match="bytes, not"):
        pack_header(encoded._replace(codec=0, state=0), 0)


MESSAGE = Header(Kind.CONTROL, flags=Flag.LAST, dtype=find_dtype_code("uint8"), dims=(4,), length=4, whole=4)
INVALID_HEADERS = {
    "kind": (VALID_HEADER._replace(kind=99), "kind 99 is unknown"),
    "no kind": (VALID_HEADER._replace(kind=0), "kind 0 is unknown"),
    "flags": (VALID_HEADER._replace(flags=Flag.LAST | 4), "are unknown"),
    "sealed": (VALID_HEADER._replace(flags=Flag.LAST | Flag.SEALED), "this link has no key"),
    "boundary without direction": (VALID_HEADER._replace(direction=Direction.NONE), "cannot have direction 0"),
    "scalar with direction": (VALID_HEADER._replace(kind=Kind.SCALAR), "cannot have direction"),
    "direction": (VALID_HEADER._replace(direction=3), "cannot have direction 3"),
    "micro-batch": (VALID_HEADER._replace(micro_batch=-2), "micro-batch -2 is out of range"),
    "dtype": (VALID_HEADER._replace(dtype=77), "dtype 77 is unknown"),
    "whole and dims": (VALID_HEADER._replace(whole=28, length=28, codec=0, state=0), "has 24 bytes, not 28"),
    "state without a codec": (VALID_HEADER._replace(codec=0), "state 8 without a codec"),
    "rank": (VALID_HEADER._replace(dims=(1, 1, 1, 1, 1, 1, 1, 2, 3)), "rank 9 is above 8"),
    "empty and beyond any array": (
        VALID_HEADER._replace(dims=(0, 2**31, 2**31, 2**31), length=0, whole=0),
        "is too large for an array",
    ),
    "short chunk": (VALID_HEADER._replace(length=20, flags=0), "invalid chunk of 20 bytes"),
    "long chunk": (VALID_HEADER._replace(length=28), "invalid chunk of 28 bytes"),
    "empty chunk": (VALID_HEADER._replace(length=0, flags=0), "invalid chunk of 0 bytes"),
    "offset between chunks": (VALID_HEADER._replace(offset=4, length=20), "invalid chunk of 20 bytes at 4"),
    "offset beyond": (VALID_HEADER._replace(offset=CHUNK_BYTES, length=0), "invalid chunk of 0 bytes at"),
    "last is not marked": (VALID_HEADER._replace(flags=0), "wrongly marked"),
    "message of a step": (MESSAGE._replace(step=1), "cannot belong to a step"),
    "message of a micro-batch": (MESSAGE._replace(micro_batch=0), "cannot belong to micro-batch 0"),
    "message with a codec": (MESSAGE._replace(codec=1), "cannot belong to a step"),
    "sealed without a tag": (
        VALID_HEADER._replace(length=8, whole=8, dims=(1, 2), flags=Flag.LAST | Flag.SEALED),
        "this link has no key",
    ),
    "acknowledgement with a number": (
        Header(Kind.ACK, flags=Flag.LAST, sequence=1),
        "fields that an acknowledgement cannot have",
    ),
    "beat with a payload": (MESSAGE._replace(kind=Kind.BEAT), "fields that an acknowledgement cannot have"),
    "message of floats": (VALID_HEADER._replace(kind=Kind.CONTROL, direction=Direction.NONE), "must be a row of bytes"),
    "first chunk is marked as the last": (
        VALID_HEADER._replace(whole=2 * CHUNK_BYTES, length=CHUNK_BYTES),
        "wrongly marked",
    ),
    "empty chunk after the last": (
        VALID_HEADER._replace(whole=CHUNK_BYTES, offset=CHUNK_BYTES, length=0),
        "empty chunk of a non-empty tensor",
    ),
    "message of two axes": (MESSAGE._replace(dims=(2, 2)), "must be a row of bytes"),
    **{
        f"message with a {field}": (MESSAGE._replace(**{field: 1}), "cannot belong to a step")
        for field in ("program", "phase", "shard", "slot")
    },
}


@pytest.mark.parametrize(("header", "words"), INVALID_HEADERS.values(), ids=INVALID_HEADERS.keys())
def test_invalid_header_is_refused_by_sender_and_receiver(
    header: Header, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        pack_header(header, 0)
    if len(header.dims) <= 8:
        monkeypatch.setattr("whale_nebula.wire.frame.find_fault", lambda header, sealed: None)
        packed = pack_header(header, 0)
        monkeypatch.undo()
        with pytest.raises(RemoteProtocolError, match=words):
            unpack_header(packed)


def replace_checksum(data: bytearray) -> bytes:
    """The header with a valid checksum."""
    return bytes(data[:-4]) + struct.pack("<I", compute_checksum(np.frombuffer(bytes(data[:-4]), np.uint8)))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, b"HTTP", "not a frame of this protocol"),
        (4, b"\x02", "version 2"),
        (92, b"\x09", "rank 9"),
        (92, b"\x01", "rank 1"),
    ],
    ids=["magic", "version", "rank above eight", "sizes beyond the rank"],
)
def test_header_with_wrong_magic_version_or_rank_is_refused(place: int, value: bytes, words: str) -> None:
    data = bytearray(pack_header(VALID_HEADER, 0))
    data[place : place + len(value)] = value
    with pytest.raises(RemoteProtocolError, match=words):
        unpack_header(replace_checksum(data))


@pytest.mark.parametrize("field", ["step", "program", "phase", "slot", "micro_batch", "sequence"])
def test_header_number_too_large_for_its_field_is_refused(field: str) -> None:
    with pytest.raises(LocalProtocolError, match="does not fit into"):
        pack_header(VALID_HEADER._replace(**{field: 2**70}), 0)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_wire_bytes_and_frame_count_match_the_frames(size: int) -> None:
    header = Header(Kind.SCALAR, dtype=find_dtype_code("uint8"), dims=(size,))
    packed_frames = list(pack_frames(header, np.zeros(size, np.uint8)))
    assert len(packed_frames) == count_frames(size)
    assert sum(len(head) + chunk.size for head, chunk in packed_frames) == count_wire_bytes(size)


def test_only_the_last_frame_of_a_tensor_is_marked_last() -> None:
    size = 2 * CHUNK_BYTES + 7
    heads = [head for head, _ in split_payload(Header(Kind.SCALAR, dims=(size,)), np.zeros(size, np.uint8))]
    assert [(head.offset, head.length, head.last) for head in heads] == [
        (0, CHUNK_BYTES, False),
        (CHUNK_BYTES, CHUNK_BYTES, False),
        (2 * CHUNK_BYTES, 7, True),
    ]


def test_message_is_one_frame_and_refused_above_the_cap() -> None:
    most = MESSAGE_BYTES
    header = Header(Kind.CONTROL, dtype=find_dtype_code("uint8"), dims=(most,))
    (frame,) = pack_frames(header, np.zeros(most, np.uint8))
    assert len(frame[0]) + frame[1].size == FRAME_CAP - TAG_BYTES
    with pytest.raises(LocalProtocolError, match="limit"):
        list(pack_frames(header._replace(dims=(most + 1,)), np.zeros(most + 1, np.uint8)))


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.BEAT])
def test_bare_frame_is_only_a_header_and_round_trips(kind: Kind) -> None:
    header = Header(kind, flags=Flag.LAST, conversation=9, ack=2**64 - 1, source=1, destination=2)
    packed = pack_header(header, 0)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == (header, 0)


SEALED = VALID_HEADER._replace(flags=Flag.LAST | Flag.SEALED, length=24 + TAG_BYTES)


def test_sealed_header_length_includes_its_tag() -> None:
    assert unpack_header(pack_header(SEALED, 0, sealed=True), sealed=True) == (SEALED, 0)
    assert unseal_header(SEALED) == VALID_HEADER == unseal_header(VALID_HEADER)


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 24},
        {"length": 15},
        {"length": 0},
        {"whole": 40},
        {"whole": 40, "dims": (10,), "codec": 0, "state": 0},
        {"flags": Flag.SEALED},
    ],
    ids=str,
)
def test_invalid_sealed_header_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        pack_header(SEALED._replace(**fields), 0, sealed=True)
