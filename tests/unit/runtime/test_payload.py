"""The header of a codec's payload: round trips, and any bytes are decoded or refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from whale_nebula.codec.packing import PREFIX, Payload, read_payload, write_payload
from whale_nebula.errors import RemoteProtocolError

BYTES = st.binary(max_size=300).map(lambda data: np.frombuffer(data, np.uint8))
ROWS = st.none() | st.lists(st.booleans(), min_size=1, max_size=70).map(np.array)
NEWS = st.none() | st.binary(min_size=1, max_size=40).map(lambda data: np.frombuffer(data, np.uint8))


@given(BYTES, ROWS, NEWS, st.booleans(), st.booleans())
def test_payload_round_trip(data: Any, rows: Any, news: Any, changes: bool, zstd: bool) -> None:
    given = Payload(data, rows, news, changes)
    crossed = write_payload(given, zstd=zstd)
    found = read_payload(crossed, 0 if rows is None else rows.size, 0 if news is None else news.size, data.size)
    assert found.data.tobytes() == data.tobytes()
    assert found.changes == changes
    for sent, came in ((rows, found.rows), (news, found.news)):
        assert came is None if sent is None else came.tolist() == sent.tolist()
    assert crossed.size <= PREFIX + data.size + (0 if rows is None else -(-rows.size // 8)) + (
        0 if news is None else news.size
    )


@given(st.binary(max_size=60), st.integers(0, 100), st.integers(0, 40), st.integers(0, 200))
@example(b"\x04\x00\x00\x00\xff\xff\xff\xff", 0, 0, 10)
@example(b"\x04\x00\x00\x00", 8, 8, 10)
@example(b"\x01\x00\x00\x00\x01", 100, 0, 10)
@example(b"\x02\x00\x00\x00\x01", 0, 40, 10)
def test_arbitrary_bytes_are_read_or_refused(data: bytes, rows: int, news: int, most: int) -> None:
    try:
        found = read_payload(np.frombuffer(data, np.uint8), rows, news, most)
    except RemoteProtocolError:
        return
    assert found.rows is None or found.rows.size == rows
    assert found.data.dtype == np.uint8


def test_declared_size_is_checked_before_decompression() -> None:
    crossed = write_payload(Payload(np.zeros(100_000, np.uint8)), zstd=True)
    assert crossed.size < 1000
    with pytest.raises(
        RemoteProtocolError, match="declares 100000 bytes before compression, which exceeds the maximum of 60"
    ):
        read_payload(crossed, 0, 0, 600)


@pytest.mark.parametrize("head", [b"", b"\x00\x00\x00", b"\x80\x00\x00\x00", b"\x00\x00\x00\x01"])
def test_invalid_headers_are_refused(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="invalid header"):
        read_payload(np.frombuffer(head, np.uint8), 0, 0, 100)
