"""Keys as headers, and codecs' payloads over every kind of link: received unchanged, or refused alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport.link_pairs import (
    TIMEOUT_SECONDS,
    LinkPair,
    build_step_message,
    close_all,
    make_key,
    make_memory_pair,
)
from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.transport.base import Link
from whale_nebula.transport.protocol import (
    Key,
    LinkTotals,
    Packed,
    Roster,
    check_packed,
    describe_payload,
    read_payload,
)
from whale_nebula.wire.buffers import TensorArrived
from whale_nebula.wire.frame import CHUNK_BYTES, HEADER_BYTES, Direction, Header, Kind
from whale_nebula.wire.tensor import DTYPE_NAMES

Ends: TypeAlias = tuple[Link, Link]


def make_packed(size: int = 40, **fields: Any) -> Packed:
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    return Packed(data, codec=3, state=9, dtype="float32", dims=(4, 8))._replace(**fields)


def are_equal(one: Packed, other: Packed) -> bool:
    return one[1:] == other[1:] and one.data.dtype == other.data.dtype and one.data.tolist() == other.data.tolist()


def make_peer_links() -> Ends:
    pair = LinkPair()
    return pair.here, pair.there


@contextlib.contextmanager
def open_links(make: Callable[[], Ends]) -> Iterator[Ends]:
    """Both ends, of which the first has announced a step."""
    here, there = make()
    here.post(build_step_message())
    try:
        yield here, there
    finally:
        close_all(here, there)


EVERY_LINK = pytest.mark.parametrize("make", [make_memory_pair, make_peer_links])


@EVERY_LINK
@pytest.mark.parametrize("size", [0, 1, 40, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_packed_payload_arrives_unchanged_and_is_counted(make: Callable[[], Ends], size: int) -> None:
    payload = make_packed(size)
    with open_links(make) as (here, there):
        before = here.totals()
        here.send(make_key(), payload)
        received = there.receive(make_key(), TIMEOUT_SECONDS)
        totals = here.totals() - before
    assert isinstance(received, Packed) and are_equal(received, payload)
    frames = max(1, -(-size // CHUNK_BYTES))
    assert totals == LinkTotals(size, size + frames * HEADER_BYTES, raw_bytes=128, frames=frames)


@EVERY_LINK
def test_arrays_and_packed_payloads_share_a_link(make: Callable[[], Ends]) -> None:
    array = np.ones((4, 8), np.float32)
    with open_links(make) as (here, there):
        here.send(make_key(0), make_packed())
        here.send(make_key(1), array)
        np.testing.assert_array_equal(there.receive(make_key(1), TIMEOUT_SECONDS), array)
        assert are_equal(there.receive(make_key(0), TIMEOUT_SECONDS), make_packed())


INVALID_PAYLOADS = {
    "no codec": make_packed(codec=0),
    "a codec beyond its field": make_packed(codec=1 << 16),
    "a state beyond its field": make_packed(state=1 << 32),
    "a state below it": make_packed(state=-1),
    "a size beyond its field": make_packed(dims=(1 << 32,)),
    "rank nine": make_packed(dims=(1,) * 9),
    "a type that cannot cross": make_packed(dtype="string"),
    "numbers that are no bytes": make_packed(data=np.zeros(3, np.float32)),
    "a matrix": make_packed(data=np.zeros((3, 3), np.uint8)),
    "every second byte": make_packed(data=np.zeros(8, np.uint8)[::2]),
    "no array": make_packed(data=b"abc"),
}


@pytest.mark.parametrize("payload", INVALID_PAYLOADS.values(), ids=INVALID_PAYLOADS.keys())
def test_unrepresentable_payload_is_refused_by_every_link(payload: Packed) -> None:
    for make in (make_memory_pair, make_peer_links):
        with open_links(make) as (here, there):
            with pytest.raises(LocalProtocolError):
                here.send(make_key(), payload)
            here.send(make_key(), make_packed())
            assert are_equal(there.receive(make_key(), TIMEOUT_SECONDS), make_packed())


@given(
    data=st.binary(max_size=50),
    codec=st.integers(1, 2**16 - 1),
    state=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPE_NAMES),
    dims=st.lists(st.integers(0, 9), max_size=8).map(tuple),
)
def test_packed_payload_round_trips_through_its_header(
    data: bytes, codec: int, state: int, dtype: str, dims: tuple[int, ...]
) -> None:
    payload = check_packed(Packed(np.frombuffer(data, np.uint8), codec, state, dtype, dims))
    header, payload_bytes, raw = describe_payload(Header(Kind.SCALAR), payload)
    assert raw == payload.raw_bytes
    assert are_equal(read_payload(TensorArrived(header, payload_bytes)), payload)


WORKERS = ("npu/0", "gpu/1", "gpu/0")

KEYS = st.builds(
    Key,
    st.sampled_from(["forward", "backward", "part", "scalar", "result", "control"]),
    st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    phase=st.integers(0, 2**16 - 1),
    micro_batch=st.integers(-1, 2**31 - 1),
    slot=st.integers(0, 2**32 - 1),
    source=st.sampled_from(WORKERS),
    destination=st.sampled_from(WORKERS),
)


@given(KEYS)
def test_key_round_trips_through_its_header(key: Key) -> None:
    assert Roster(WORKERS).read_key(Roster(reversed(WORKERS)).build_header(key)) == key


@given(KEYS, KEYS)
def test_different_keys_have_different_headers(one: Key, other: Key) -> None:
    roster = Roster(WORKERS)
    assert (roster.build_header(one) == roster.build_header(other)) == (one == other)


def test_value_and_gradient_of_a_boundary_differ_in_direction() -> None:
    roster = Roster(WORKERS)
    ways = {}
    for kind in ("forward", "backward"):
        header = roster.build_header(Key(kind, 0, 0, 0, 0, 0, "gpu/0", "npu/0"))
        ways[kind] = header.kind, header.direction
    assert ways == {"forward": (Kind.BOUNDARY, Direction.FORWARD), "backward": (Kind.BOUNDARY, Direction.BACKWARD)}


def test_unknown_workers_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="tpu/0"):
        Roster(WORKERS).build_header(Key("scalar", 0, 0, 0, -1, 0, "tpu/0", "npu/0"))
    header = Roster(WORKERS).build_header(Key("scalar", 0, 0, 0, -1, 0, "gpu/0", "npu/0"))
    with pytest.raises(RemoteProtocolError, match="does not exist"):
        Roster(WORKERS).read_key(header._replace(source=3))
