"""The first message of TLS: its protocols, however it is divided, and an error for anything else."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.greetings import REFUSED, cut, hello
from whale_nebula.errors import NebulaError
from whale_nebula.gateway.front import MOST_BYTES, read_hello


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("protocols", [["h2"], ["nebula-login/1"], ["a", "b" * 255], []], ids=str)
def test_the_protocols_of_a_client_of_openssl(protocols: list[str], newest: ssl.TLSVersion) -> None:
    assert read_hello(hello(*protocols, newest=newest)) == tuple(protocols)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_of_a_part_it_is_said_how_much_is_missing(parts: int) -> None:
    """So that nothing need be looked at again before that has come."""
    data, asked = cut(hello("h2"), parts), []
    size = 0
    while isinstance(found := read_hello(data[:size]), int):
        assert found > size
        asked.append(found)
        size = found
    assert (found, size, len(asked)) == (("h2",), len(data), 2 * parts)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_no_first_message_is_an_error(case: tuple[bytes, str]) -> None:
    data, said = case
    with pytest.raises(NebulaError) as refused:
        read_hello(data)
    assert said in f"{refused.value.what}: {refused.value.why}"


@given(st.binary(max_size=64), st.integers(0, 300), st.integers(0, 64), st.integers(1, 8))
def test_any_bytes_are_read_or_refused(more: bytes, at: int, size: int, parts: int) -> None:
    whole = hello("h2")
    for data in (more, cut(whole[:at] + more + whole[at + size :], parts), bytes([22, 3, 1]) + more):
        with contextlib.suppress(NebulaError):
            found = read_hello(data)
            assert not isinstance(found, int) or len(data) < found <= MOST_BYTES
