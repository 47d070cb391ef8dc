"""Assembly of tensors from chunks: those of the plan are completed, others are refused before memory is allocated."""

import numpy as np
import pytest

from tests.unit.wire.conversations import frame_tensor, open_pair, send_frames
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.buffers import Assembly, Bound, TensorArrived
from whale_nebula.wire.frame import CHUNK_BYTES, Header
from whale_nebula.wire.tensor import find_dtype_code

ARRAY = np.arange(CHUNK_BYTES // 4 + 10, dtype=np.uint64)


def test_assembly_accepts_a_chunk_again_after_a_partial_write() -> None:
    assembly = Assembly()
    frames = frame_tensor(0, ARRAY)
    assert len(frames) == 3
    for header, chunk in frames:
        assembly.place(header)[:10] = 77  # interrupted
        assembly.place(header)[:] = chunk
        events = assembly.finish_chunk(header)
    assert (events[0].array == ARRAY).all()


def test_refused_chunk_does_not_change_assembly() -> None:
    checked_headers: list[Header] = []

    def expect(header: Header) -> Bound:
        checked_headers.append(header)
        return Bound("uint64", (len(ARRAY),))

    assembly = Assembly(expect)
    frames = frame_tensor(0, ARRAY)
    with pytest.raises(RemoteProtocolError, match="plan expects"):
        assembly.place(frame_tensor(0, np.zeros(3))[0][0])
    for header, chunk in frames:
        with pytest.raises(RemoteProtocolError, match="does not continue"):
            assembly.place(header._replace(slot=9, offset=header.offset or CHUNK_BYTES))
        assembly.place(header)[:] = chunk
        done = assembly.finish_chunk(header)
    assert (done[0].array == ARRAY).all()
    assert len(checked_headers) == 2


CODEC, STATE, DIMS = 5, 77, (3, 8)
FLOAT32 = find_dtype_code("float32")
RAW = 3 * 8 * 4
EXTRA = 10
BOUND = Bound("float32", (4, 8), frozenset({CODEC, 9}), EXTRA)


def frame_encoded(size: int, **fields: object) -> list[tuple[Header, np.ndarray]]:
    """The frames of an encoded tensor of this many bytes."""
    described = {"dtype": FLOAT32, "dims": DIMS, "codec": CODEC, "state": STATE, **fields}
    return frame_tensor(0, np.arange(size, dtype=np.uint32).astype(np.uint8), **described)


def assemble(assembly: Assembly, parts: list[tuple[Header, np.ndarray]]) -> TensorArrived:
    for header, chunk in parts:
        assembly.place(header)[:] = chunk
        done = assembly.finish_chunk(header)
    return done[0]


@pytest.mark.parametrize("size", [0, 1, 40, RAW, RAW + EXTRA])
def test_encoded_tensor_within_bound_arrives_as_bytes_with_its_header(size: int) -> None:
    event = assemble(Assembly(lambda header: BOUND), frame_encoded(size))
    assert event.array.dtype == np.uint8 and event.array.tolist() == np.arange(size).tolist()
    header = event.header
    assert (header.codec, header.state, header.dtype, header.dims) == (CODEC, STATE, FLOAT32, DIMS)


@pytest.mark.parametrize(
    ("frame", "bound", "words"),
    [
        (
            frame_encoded(40),
            Bound("float32", (4, 8)),
            "40 bytes of codec 5 for a tensor of 96 bytes, .* allows no codec",
        ),
        (frame_encoded(40, codec=6), BOUND, r"codec 6 .* allows codecs \[5, 9\]"),
        (frame_encoded(RAW + EXTRA + 1), BOUND, "107 bytes of codec 5 for a tensor of 96 bytes, .* and 10 bytes more"),
        (
            frame_encoded(40, dims=(5, 8)),
            BOUND,
            r"received float32\[5, 8\], but the plan expects float32, at most \[4, 8\]",
        ),
        (frame_encoded(40, dims=(24,)), BOUND, r"received float32\[24\]"),
        (frame_encoded(40, dtype=find_dtype_code("float16")), BOUND, r"received float16\[3, 8\]"),
        (frame_encoded(EXTRA + 1, dims=(0, 8)), BOUND, "11 bytes of codec 5 for a tensor of 0"),
    ],
    ids=["no codec", "another codec", "too many bytes", "more rows", "other rank", "other type", "empty"],
)
def test_encoded_tensor_beyond_bound_is_refused_before_allocation(
    frame: list[tuple[Header, np.ndarray]], bound: Bound, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = Assembly(lambda header: bound)
    monkeypatch.setattr(np, "empty", lambda *size: pytest.fail("allocated"))
    with pytest.raises(RemoteProtocolError, match=words):
        assembly.place(frame[0][0])


def test_plain_tensor_is_accepted_where_a_codec_is_allowed() -> None:
    array = np.ones((2, 8), np.float32)
    np.testing.assert_array_equal(assemble(Assembly(lambda header: BOUND), frame_tensor(0, array)).array, array)


@pytest.mark.parametrize(("size", "dims"), [(101, (1,)), (4, (26,))], ids=["encoded", "decoded"])
def test_encoded_and_decoded_sizes_are_limited_without_a_plan(size: int, dims: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds this link's limit of 100"):
        Assembly(limit=100).place(frame_encoded(size, dims=dims)[0][0])
    assert assemble(Assembly(limit=100), frame_encoded(100, dims=(25,))).array.size == 100


def test_encoded_bool_tensor_may_have_any_bytes() -> None:
    parts = frame_encoded(4, dtype=find_dtype_code("bool"), dims=(32,))
    assert assemble(Assembly(), parts).array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("change", [{"codec": 9}, {"state": 78}, {"dims": (4, 8)}, {"whole": 3 * CHUNK_BYTES}], ids=str)
def test_chunk_of_another_codec_state_or_size_is_refused(change: dict[str, int]) -> None:
    bound = Bound("float32", (4, 8), frozenset({CODEC, 9}), 4 * CHUNK_BYTES)
    assembly = Assembly(lambda header: bound)
    first, second = frame_encoded(2 * CHUNK_BYTES)
    assembly.place(first[0])[:] = first[1]
    assembly.finish_chunk(first[0])
    with pytest.raises(RemoteProtocolError, match="does not continue"):
        assembly.place(second[0]._replace(**change))


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_conversation_delivers_encoded_tensor(sealed: bool) -> None:
    size = 2 * CHUNK_BYTES + 9
    bound = Bound("float32", (1 << 20,), frozenset({CODEC}))
    here, there = open_pair(stepping=True, sealed=sealed, expect=lambda header: bound)
    parts = frame_encoded(size, dims=(1 << 20,))
    events = [event for frame in send_frames(here, parts) for event in there.receive(frame)]
    (event,) = [event for event in events if isinstance(event, TensorArrived)]
    assert (event.header.codec, event.header.state) == (CODEC, STATE)
    assert event.array.tobytes() == b"".join(chunk.tobytes() for _, chunk in parts)
