"""What a gateway lets pass: whole frames of one pair, whose headers keep the rules; payloads it does not look into."""

from __future__ import annotations

import numpy as np
import pytest

from whale_nebula.errors import DamagedFrameError, RemoteProtocolError
from whale_nebula.gateway.relay import Inspection
from whale_nebula.wire.frame import FRAME_CAP, HEADER_BYTES, TAG_BYTES, Direction, Flag, Header, Kind, pack
from whale_nebula.wire.tensor import dtype_code

ROSTER = ("gpu/0", "npu/0", "npu/1")


def frame(
    source: int = 0,
    destination: int = 2,
    size: int = 40,
    *,
    sealed: bool = False,
    codec: int = 0,
    rows: int | None = None,
) -> bytes:
    length = size + TAG_BYTES * sealed
    header = Header(
        Kind.BOUNDARY,
        Flag.LAST | (Flag.SEALED if sealed else 0),
        epoch=7,
        source=source,
        destination=destination,
        length=length,
        whole=size,
        direction=Direction.FORWARD,
        dtype=dtype_code("float32"),
        codec=codec,
        state=3 if codec else 0,
        dims=(size // 4 if rows is None else rows,),
    )
    return pack(header, 1234, sealed=sealed) + bytes(length)


@pytest.mark.parametrize("sealed", [False, True])
def test_frames_of_the_pair_pass_both_ways(sealed: bool) -> None:
    pair = Inspection.of(ROSTER, "gpu/0", "npu/1")
    assert pair.check(frame(sealed=sealed), outward=True).epoch == 7
    assert pair.check(frame(2, 0, sealed=sealed), outward=False).source == 2


@pytest.mark.parametrize(("ends", "outward"), [((0, 1), True), ((1, 2), True), ((2, 0), True), ((0, 2), False)])
def test_frames_of_others_do_not(ends: tuple[int, int], outward: bool) -> None:
    with pytest.raises(RemoteProtocolError, match="which is not the pair of this stream"):
        Inspection.of(ROSTER, "gpu/0", "npu/1").check(frame(*ends), outward=outward)


def test_where_the_workers_are_not_known_the_first_frame_tells() -> None:
    pair = Inspection.of(None, "gpu/0", "npu/1")
    pair.check(frame(0, 2), outward=True)
    pair.check(frame(2, 0), outward=False)
    with pytest.raises(RemoteProtocolError, match="which is not the pair"):
        pair.check(frame(0, 1), outward=True)


def test_and_no_worker_speaks_to_itself() -> None:
    with pytest.raises(RemoteProtocolError, match="to itself"):
        Inspection().check(frame(1, 1), outward=True)


@pytest.mark.parametrize("data", [b"", b"x" * (HEADER_BYTES - 1), bytes(FRAME_CAP + 1)])
def test_what_is_too_short_or_too_long_is_no_frame(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="is no frame"):
        Inspection.of(ROSTER, "gpu/0", "npu/1").check(data, outward=True)


@pytest.mark.parametrize("change", [b"x", b""])
def test_a_length_that_is_not_the_header_s(change: bytes) -> None:
    data = frame() + change if change else frame()[:-1]
    with pytest.raises(RemoteProtocolError, match="bytes came in a frame of"):
        Inspection.of(ROSTER, "gpu/0", "npu/1").check(data, outward=True)


def test_every_changed_bit_of_a_header_is_found_and_none_of_a_payload() -> None:
    pair, whole = Inspection.of(ROSTER, "gpu/0", "npu/1"), np.frombuffer(frame(), np.uint8)
    for bit in range(8 * HEADER_BYTES):
        broken = whole.copy()
        broken[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RemoteProtocolError):
            pair.check(broken.tobytes(), outward=True)
    broken = whole.copy()
    broken[-1] ^= 1
    pair.check(broken.tobytes(), outward=True)  # the worker finds it: it has the seal, or the checksum


def test_damage_is_told_from_a_lie() -> None:
    data = bytearray(frame())
    data[20] ^= 1
    with pytest.raises(DamagedFrameError):
        Inspection().check(bytes(data), outward=True)
