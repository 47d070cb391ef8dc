"""The hash chain: any change of any byte is detected."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.security.chain import (
    START,
    BrokenChainError,
    Link,
    encode_canonical,
    make_line,
    parse_line,
    verify_line,
    verify_lines,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=4), min_size=1, max_size=6)


def chain_records(records: list[dict]) -> list[bytes]:
    chained, link = [], START
    for record in records:
        line, link = make_line(link, record)
        chained.append(line)
    return chained


def follow_lines(given_lines: list[bytes]) -> Link:
    return verify_lines(given_lines, START)


@given(RECORDS)
def test_chained_records_can_be_followed_and_are_single_lines(records: list[dict]) -> None:
    chained = chain_records(records)
    assert follow_lines(chained).seq == len(records) - 1
    assert all(b"\n" not in line and line.isascii() for line in chained)
    assert [{**record, "seq": 0, "prev": ""} for record in records] == [
        {**json.loads(line), "seq": 0, "prev": ""} for line in chained
    ]


@given(RECORDS, st.data())
def test_any_changed_byte_is_detected(records: list[dict], data: st.DataObject) -> None:
    chained = chain_records(records)
    chained.append(make_line(follow_lines(chained), {"action": "end"})[0])
    index = data.draw(st.integers(0, len(chained) - 2))
    position = data.draw(st.integers(0, len(chained[index]) - 1))
    byte_value = data.draw(st.integers(0, 255).filter(lambda byte: byte not in (chained[index][position], 10)))
    chained[index] = chained[index][:position] + bytes([byte_value]) + chained[index][position + 1 :]
    with pytest.raises(BrokenChainError):
        follow_lines(chained)


@given(RECORDS, st.data())
def test_moved_missing_or_duplicated_line_is_detected(records: list[dict], data: st.DataObject) -> None:
    chained = chain_records([*records, {"action": "a"}, {"action": "b"}])
    index = data.draw(st.integers(0, len(chained) - 2))
    swapped = [*chained[:index], chained[index + 1], chained[index], *chained[index + 2 :]]
    for changed in (swapped, chained[:index] + chained[index + 1 :], [*chained[: index + 1], *chained[index:]]):
        with pytest.raises(BrokenChainError):
            follow_lines(changed)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}x",
        b"[]",
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a":NaN}',
        b'{"a":1e400}',
        b'{"a":"\xc3\xa4"}',
        b'{"a":"\\u00E4"}',
        b"[" * 100_000,
        b'{"a":' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
    ],
)
def test_noncanonical_record_is_not_parsed(line: bytes) -> None:
    assert parse_line(line) is None


def test_error_states_why_a_line_does_not_continue_the_chain() -> None:
    first, second = chain_records([{"action": "a"}, {"action": "b"}])
    _, link = verify_line(first, START)
    for line, before, why in [
        (second, START, "number 1"),
        (first, link, "number 0"),
        (second.replace(b'"b"', b'"c"'), Link(0, "0" * 64), "digest of the previous record is wrong"),
        (b"torn", link, "not a complete record"),
        (encode_canonical({"seq": True, "prev": link.digest}), link, "number True"),
    ]:
        with pytest.raises(BrokenChainError, match=why):
            verify_line(line, before)
