"""The hash chain: any change of any byte is detected."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.security.chain import START, BrokenError, Link, canonical, follow, follow_all, forge, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=4), min_size=1, max_size=6)


def lines(records: list[dict]) -> list[bytes]:
    made, link = [], START
    for record in records:
        line, link = forge(link, record)
        made.append(line)
    return made


def walk(given_lines: list[bytes]) -> Link:
    return follow_all(given_lines, START)


@settings(max_examples=40)
@given(RECORDS)
def test_what_is_forged_is_followed_and_is_one_line(records: list[dict]) -> None:
    made = lines(records)
    assert walk(made).seq == len(records) - 1
    assert all(b"\n" not in line and line.isascii() for line in made)
    assert [{**record, "seq": 0, "prev": ""} for record in records] == [
        {**json.loads(line), "seq": 0, "prev": ""} for line in made
    ]


@settings(max_examples=60)
@given(RECORDS, st.data())
def test_any_byte_that_is_changed_is_seen(records: list[dict], data: st.DataObject) -> None:
    made = lines(records)
    made.append(forge(walk(made), {"action": "end"})[0])
    which = data.draw(st.integers(0, len(made) - 2))
    where = data.draw(st.integers(0, len(made[which]) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte not in (made[which][where], 10)))
    made[which] = made[which][:where] + bytes([other]) + made[which][where + 1 :]
    with pytest.raises(BrokenError):
        walk(made)


@settings(max_examples=40)
@given(RECORDS, st.data())
def test_any_line_that_is_moved_lost_or_doubled_is_seen(records: list[dict], data: st.DataObject) -> None:
    made = lines([*records, {"action": "a"}, {"action": "b"}])
    which = data.draw(st.integers(0, len(made) - 2))
    swapped = [*made[:which], made[which + 1], made[which], *made[which + 2 :]]
    for bad in (swapped, made[:which] + made[which + 1 :], [*made[: which + 1], *made[which:]]):
        with pytest.raises(BrokenError):
            walk(bad)


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
def test_there_is_one_way_to_write_a_record(line: bytes) -> None:
    assert parse(line) is None


def test_why_a_line_does_not_follow_is_said() -> None:
    first, second = lines([{"action": "a"}, {"action": "b"}])
    _, link = follow(first, START)
    for line, before, why in [
        (second, START, "number 1"),
        (first, link, "number 0"),
        (second.replace(b'"b"', b'"c"'), Link(0, "0" * 64), "digest of the previous record is wrong"),
        (b"torn", link, "not a complete record"),
        (canonical({"seq": True, "prev": link.digest}), link, "number True"),
    ]:
        with pytest.raises(BrokenError, match=why):
            follow(line, before)
