"""Keys and headers are two encodings of the same address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.transport.protocol import Key, Roster
from whale_nebula.wire.frame import Direction, Kind

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
    with pytest.raises(RemoteProtocolError, match="do not exist"):
        Roster(WORKERS).key(header._replace(source=3))
