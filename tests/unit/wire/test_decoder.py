"""The decoder: any bytes, in one piece or one at a time, parse or raise RemoteProtocolError."""

import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.assembly import Bound, Event, FrameDecoder, MessageArrived, TensorArrived
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Flag, Header, Kind, checksum, frames, pack
from whale_nebula.wire.message import encode_message
from whale_nebula.wire.tensor import DTYPE_NAMES, array_bytes, array_from, dtype_code, dtype_of

UINT8 = dtype_code("uint8")


def stream(array: np.ndarray, **fields: int) -> bytes:
    header = Header(Kind.SCALAR, dtype=dtype_code(array.dtype.name), dims=array.shape)._replace(**fields)
    return b"".join(head + chunk.tobytes() for head, chunk in frames(header, array_bytes(array)))


def message_stream(message: dict[str, object], sequence: int = 0) -> bytes:
    data = np.frombuffer(encode_message(message), np.uint8)
    return b"".join(
        h + c.tobytes() for h, c in frames(Header(Kind.CONTROL, dtype=UINT8, dims=data.shape, sequence=sequence), data)
    )


def tensors() -> st.SearchStrategy[np.ndarray]:
    """Arrays of any type that travels, made of any bytes."""

    @st.composite
    def one(draw: st.DrawFn) -> np.ndarray:
        name = draw(st.sampled_from(DTYPE_NAMES))
        dims = draw(hnp.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3))
        size = int(np.prod(dims)) * dtype_of(dtype_code(name)).itemsize
        data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        return array_from(data & 1 if name == "bool" else data, dtype_code(name), dims)

    return one()


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return (data[a:b] for a, b in itertools.pairwise(places))


def arrays(events: list[Event]) -> list[np.ndarray]:
    return [event.array for event in events if isinstance(event, TensorArrived)]


@given(tensors(), st.lists(st.integers(0, 1000), max_size=6))
def test_tensors_come_back_in_whatever_pieces(array: np.ndarray, cuts: list[int]) -> None:
    decoder = FrameDecoder()
    (again,) = arrays([event for piece in pieces(stream(array), cuts) for event in decoder.receive(piece)])
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert decoder.between


def test_tensors_of_many_chunks_come_back() -> None:
    array = np.random.default_rng(0).standard_normal((3, CHUNK_BYTES // 4 + 1), np.float32)
    (again,) = arrays(FrameDecoder().receive(stream(array)))
    np.testing.assert_array_equal(again, array)


def test_room_lies_inside_the_tensor_so_that_nothing_is_copied() -> None:
    array = np.arange(100, dtype=np.float32)
    data = stream(array)
    decoder = FrameDecoder()
    decoder.receive(data[:HEADER_BYTES])
    room = decoder.room()
    assert room.nbytes == array.nbytes
    room[:] = data[HEADER_BYTES:]
    (event,) = decoder.filled(room.nbytes)
    assert np.shares_memory(np.asarray(room), event.array)
    np.testing.assert_array_equal(event.array, array)


def test_a_message_may_come_between_the_chunks_of_a_tensor() -> None:
    array = np.zeros(CHUNK_BYTES + 8, np.uint8)
    (head, chunk), (_, rest) = frames(Header(Kind.SCALAR, dtype=UINT8, dims=array.shape), array)
    last = Header(
        Kind.SCALAR,
        dtype=UINT8,
        dims=array.shape,
        sequence=2,
        flags=Flag.LAST,
        offset=CHUNK_BYTES,
        length=8,
        whole=array.size,
    )
    decoder = FrameDecoder()
    events = decoder.receive(head + chunk.tobytes() + message_stream({"kind": "FAIL"}, sequence=1))
    assert [type(event) for event in events] == [MessageArrived]
    assert not decoder.between
    (event,) = decoder.receive(pack(last, checksum(rest)) + rest.tobytes())
    assert event.array.shape == array.shape


def test_every_flipped_bit_of_a_small_frame_is_rejected() -> None:
    good = stream(np.array(1.5, np.float32))
    for bit in range(len(good) * 8):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            FrameDecoder().receive(data)


@settings(max_examples=30)
@given(st.integers(0, (2 * HEADER_BYTES + CHUNK_BYTES + 64) * 8 - 1))
def test_flipped_bits_of_a_large_tensor_are_rejected(bit: int) -> None:
    data = bytearray(stream(np.ones(CHUNK_BYTES + 64, np.uint8)))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        FrameDecoder().receive(data)


def outcome(decoder: FrameDecoder, parts: Iterator[bytes]) -> tuple[list[object], bool]:
    """What a stream gave before it ended or broke, and whether it broke."""
    seen: list[object] = []
    try:
        for part in parts:
            for event in decoder.receive(part):
                seen.append(event.message if isinstance(event, MessageArrived) else event.array.tobytes())
    except RemoteProtocolError:
        return seen, True
    return seen, False


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """Bytes that look more or less like frames: whole ones, cut ones, mixed up ones, with bytes changed."""
    good = [
        stream(np.arange(5, dtype=np.int16)),
        stream(np.zeros((), np.bool_), sequence=1),
        message_stream({"kind": "HELLO"}, 1),
        stream(np.zeros((0, 4), np.float32)),
    ]
    parts = draw(st.lists(st.sampled_from(good) | st.binary(max_size=200), max_size=4))
    data = bytearray(b"".join(parts))
    for place, value in draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=3)):
        if place < len(data):
            data[place] = value
    return bytes(data[: draw(st.integers(0, 900))])


@given(hostile())
def test_any_bytes_parse_or_raise_alike_in_one_piece_and_one_at_a_time(data: bytes) -> None:
    whole, broke = outcome(FrameDecoder(), iter([data]))
    single, broke_too = outcome(FrameDecoder(), (data[i : i + 1] for i in range(len(data))))
    assert broke == broke_too
    assert broke or whole == single


HEADER_FIELDS = {
    "kind": st.integers(0, 9),
    "dtype": st.integers(0, 20),
    "flags": st.integers(0, 7),
    "direction": st.integers(0, 4),
    "dims": st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    "sequence": st.integers(0, 2),
    "offset": st.integers(0, 2**64 - 1),
    "length": st.integers(0, 2**32 - 1),
    "whole": st.integers(0, 2**64 - 1),
}


@given(st.fixed_dictionaries({}, optional=HEADER_FIELDS), st.binary(max_size=64))
def test_headers_with_right_checksums_and_any_fields_parse_or_raise(fields: dict[str, int], payload: bytes) -> None:
    header = Header(Kind.SCALAR, dtype=UINT8, dims=(4,), flags=Flag.LAST, length=4, whole=4)._replace(**fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale_nebula.wire.frame.find_fault", lambda header, sealed: None)
        head = pack(header, 0)
    outcome(FrameDecoder(), iter([head + payload]))


def test_what_was_announced_too_large_is_never_allocated() -> None:
    header = Header(Kind.SCALAR, dtype=UINT8, dims=(2**40 // 2**10, 2**10), whole=2**40, length=CHUNK_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="above this link's limit"):
            FrameDecoder().receive(pack(header, 0))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("array", "fits"),
    [
        (np.zeros((4, 8), np.float32), True),
        (np.zeros((1, 8), np.float32), True),
        (np.zeros((5, 8), np.float32), False),
        (np.zeros((4, 8), np.float64), False),
        (np.zeros(4, np.float32), False),
    ],
    ids=["at the bound", "fewer rows", "more rows", "other type", "other rank"],
)
def test_the_plan_is_asked_before_anything_is_allocated(array: np.ndarray, fits: bool) -> None:
    asked: list[Header] = []

    def expect(header: Header) -> Bound:
        asked.append(header)
        return Bound("float32", (4, 8))

    decoder = FrameDecoder(expect)
    data = stream(array, slot=7)
    if fits:
        assert len(decoder.receive(data)) == 1
    else:
        with pytest.raises(RemoteProtocolError, match="plan expects float32"):
            decoder.receive(data[:HEADER_BYTES])
    assert [header.slot for header in asked] == [7]


def test_the_plan_may_refuse_what_nobody_expects() -> None:
    def expect(header: Header) -> Bound:
        raise RemoteProtocolError(f"nobody expects slot {header.slot}")

    with pytest.raises(RemoteProtocolError, match="nobody expects slot 7"):
        FrameDecoder(expect).receive(stream(np.zeros(3), slot=7))


@pytest.mark.parametrize("first", [1, 5])
def test_frames_that_are_out_of_order_are_refused(first: int) -> None:
    with pytest.raises(RemoteProtocolError, match="frame 0 came where frame"):
        FrameDecoder(first=first).receive(stream(np.zeros(3)))


def test_the_same_frame_twice_is_refused() -> None:
    decoder = FrameDecoder()
    data = stream(np.zeros(3))
    decoder.receive(data)
    with pytest.raises(RemoteProtocolError, match="frame 0 came where frame 1"):
        decoder.receive(data)


@pytest.mark.parametrize("change", [{"step": 1}, {"slot": 3}, {"offset": 2 * CHUNK_BYTES}], ids=str)
def test_chunks_of_two_tensors_are_not_mixed(change: dict[str, int]) -> None:
    whole = 4 * CHUNK_BYTES
    header = Header(Kind.SCALAR, dtype=UINT8, dims=(whole,), length=CHUNK_BYTES, whole=whole)
    second = header._replace(sequence=1, offset=CHUNK_BYTES)._replace(**change)
    chunk = np.zeros(CHUNK_BYTES, np.uint8)
    decoder = FrameDecoder()
    decoder.receive(pack(header, checksum(chunk)) + chunk.tobytes())
    with pytest.raises(RemoteProtocolError, match="does not continue"):
        decoder.receive(pack(second, checksum(chunk)))


def test_a_bool_that_is_neither_is_refused() -> None:
    header = Header(Kind.SCALAR, dtype=dtype_code("bool"), dims=(2,))
    data = b"".join(head + chunk.tobytes() for head, chunk in frames(header, np.array([1, 2], np.uint8)))
    with pytest.raises(RemoteProtocolError, match="neither 0 nor 1"):
        FrameDecoder().receive(data)


def test_after_an_error_nothing_is_taken_any_more() -> None:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError):
        decoder.receive(b"x" * HEADER_BYTES)
    with pytest.raises(RemoteProtocolError, match="no frame of this protocol"):
        decoder.receive(stream(np.zeros(3)))


def test_a_stream_that_stops_inside_a_frame_or_a_tensor_is_not_between() -> None:
    data = stream(np.zeros(CHUNK_BYTES + 8, np.uint8))
    for place in (1, HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES, len(data) - 1):
        decoder = FrameDecoder()
        decoder.receive(data[:place])
        assert not decoder.between, place


@pytest.mark.parametrize(
    "header",
    [Header(Kind.BEAT, flags=Flag.LAST), Header(Kind.SCALAR, flags=Flag.LAST, dtype=UINT8, dims=(0,), ack=1)],
    ids=["beat", "acknowledgement"],
)
def test_where_nothing_is_acknowledged_no_frame_does_so(header: Header) -> None:
    with pytest.raises(RemoteProtocolError, match="nothing is acknowledged"):
        FrameDecoder().receive(pack(header, 0))
