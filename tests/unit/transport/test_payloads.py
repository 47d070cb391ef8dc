"""Keys as headers, and codecs' payloads over every kind of link: received unchanged, or refused alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transport.cable import SOON, Pair, close_all, key, memory_pair, step
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


def packed(size: int = 40, **fields: Any) -> Packed:
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    return Packed(data, codec=3, state=9, dtype="float32", dims=(4, 8))._replace(**fields)


def same(one: Packed, other: Packed) -> bool:
    return one[1:] == other[1:] and one.data.dtype == other.data.dtype and one.data.tolist() == other.data.tolist()


def peers() -> Ends:
    pair = Pair()
    return pair.here, pair.there


@contextlib.contextmanager
def linked(make: Callable[[], Ends]) -> Iterator[Ends]:
    """Both ends, of which the first has announced a step."""
    here, there = make()
    here.post(step())
    try:
        yield here, there
    finally:
        close_all(here, there)


EVERY = pytest.mark.parametrize("make", [memory_pair, peers])


@EVERY
@pytest.mark.parametrize("size", [0, 1, 40, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_it_arrives_as_it_was_sent_and_is_counted_alike(make: Callable[[], Ends], size: int) -> None:
    payload = packed(size)
    with linked(make) as (here, there):
        before = here.totals()
        here.send(key(), payload)
        again = there.receive(key(), SOON)
        counted = here.totals() - before
    assert isinstance(again, Packed) and same(again, payload)
    frames = max(1, -(-size // CHUNK_BYTES))
    assert counted == LinkTotals(size, size + frames * HEADER_BYTES, raw_bytes=128, frames=frames)


@EVERY
def test_arrays_and_packed_ones_go_side_by_side(make: Callable[[], Ends]) -> None:
    array = np.ones((4, 8), np.float32)
    with linked(make) as (here, there):
        here.send(key(0), packed())
        here.send(key(1), array)
        np.testing.assert_array_equal(there.receive(key(1), SOON), array)
        assert same(there.receive(key(0), SOON), packed())


WRONG = {
    "no codec": packed(codec=0),
    "a codec beyond its field": packed(codec=1 << 16),
    "a state beyond its field": packed(state=1 << 32),
    "a state below it": packed(state=-1),
    "a size beyond its field": packed(dims=(1 << 32,)),
    "rank nine": packed(dims=(1,) * 9),
    "a type that cannot cross": packed(dtype="string"),
    "numbers that are no bytes": packed(data=np.zeros(3, np.float32)),
    "a matrix": packed(data=np.zeros((3, 3), np.uint8)),
    "every second byte": packed(data=np.zeros(8, np.uint8)[::2]),
    "no array": packed(data=b"abc"),
}


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG.keys())
def test_what_no_frame_can_say_is_refused_by_every_link(payload: Packed) -> None:
    for make in (memory_pair, peers):
        with linked(make) as (here, there):
            with pytest.raises(LocalProtocolError):
                here.send(key(), payload)
            here.send(key(), packed())
            assert same(there.receive(key(), SOON), packed())


@settings(deadline=None, max_examples=60)
@given(
    data=st.binary(max_size=50),
    codec=st.integers(1, 2**16 - 1),
    state=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPE_NAMES),
    dims=st.lists(st.integers(0, 9), max_size=8).map(tuple),
)
def test_a_header_says_all_of_it(data: bytes, codec: int, state: int, dtype: str, dims: tuple[int, ...]) -> None:
    payload = check_packed(Packed(np.frombuffer(data, np.uint8), codec, state, dtype, dims))
    header, payload_bytes, raw = describe_payload(Header(Kind.SCALAR), payload)
    assert raw == payload.raw_bytes
    assert same(read_payload(TensorArrived(header, payload_bytes)), payload)


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
def test_every_key_comes_back(key: Key) -> None:
    assert Roster(WORKERS).key(Roster(reversed(WORKERS)).header(key)) == key


@given(KEYS, KEYS)
def test_different_keys_have_different_headers(one: Key, other: Key) -> None:
    roster = Roster(WORKERS)
    assert (roster.header(one) == roster.header(other)) == (one == other)


def test_value_and_gradient_of_a_boundary_differ_in_direction() -> None:
    roster = Roster(WORKERS)
    ways = {}
    for kind in ("forward", "backward"):
        header = roster.header(Key(kind, 0, 0, 0, 0, 0, "gpu/0", "npu/0"))
        ways[kind] = header.kind, header.direction
    assert ways == {"forward": (Kind.BOUNDARY, Direction.FORWARD), "backward": (Kind.BOUNDARY, Direction.BACKWARD)}


def test_workers_that_are_not_in_the_run_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="tpu/0"):
        Roster(WORKERS).header(Key("scalar", 0, 0, 0, -1, 0, "tpu/0", "npu/0"))
    header = Roster(WORKERS).header(Key("scalar", 0, 0, 0, -1, 0, "gpu/0", "npu/0"))
    with pytest.raises(RemoteProtocolError, match="does not exist"):
        Roster(WORKERS).key(header._replace(source=3))
