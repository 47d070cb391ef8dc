"""Control messages as JSON."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import FRAME_CAP
from whale_nebula.wire.message import build_message, check_message, decode_message, encode_message

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=5), st.text())
def test_any_plain_object_with_a_kind_comes_back(message: dict[str, object], kind: str) -> None:
    message["kind"] = kind
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("number", ["1" + 400 * "0", "-" + 30 * "9", "1e999", "-1e999"])
def test_a_number_that_no_float_holds_is_refused_wherever_it_stands(number: str) -> None:
    with pytest.raises(RemoteProtocolError, match="is not JSON"):
        decode_message(f'{{"kind":"SESSION","seen":{{"stages":{{"a":[{number}]}}}}}}'.encode())
    with pytest.raises(RemoteProtocolError, match="wrong value of 'clock'"):
        check_message({"kind": "PONG", "clock": 10**400})


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": 3},
        {"kind": "A", "x": object()},
        {"kind": "A", "x": float("nan")},
        {"kind": "A", "x": "y" * FRAME_CAP},
    ],
    ids=["no kind", "kind is a number", "object", "nan", "too long"],
)
def test_what_is_no_message_is_not_sent(message: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_message(message)


BAD = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"{}",
    b'{"kind": 3}',
    b'{"kind": "A", "x": NaN}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"kind": "A", "x": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("data", BAD, ids=lambda data: repr(data[:12]))
def test_what_is_no_message_is_the_other_sides_mistake(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(data)


LINES = b'{"about":"LINES","kind":"SESSION","lines":[%s],"program":"p"}'
TEXTS = ['say "," and [{}]', "\\", "é\n", "", '\\"', "x" * 70]


def test_lines_of_a_program_may_be_many_and_say_anything() -> None:
    message = build_message("SESSION", "LINES", program="p", lines=TEXTS * 10_000, doing="", line="")
    assert decode_message(encode_message(message)) == message
    assert decode_message(LINES % b"")["lines"] == []


@pytest.mark.parametrize("part", [b"{}", b'{"":0}', b"[[]]", b"0", b"null", b'["a"]'])
def test_lines_of_a_program_are_texts_or_are_not_parsed(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    for count in (1, 300_000):
        with pytest.raises(RemoteProtocolError, match="other values than texts"):
            decode_message(LINES % b",".join([b'"a"', *[part] * count, b'"b"']))
    with pytest.raises(RemoteProtocolError, match="above the cap of 262144"):
        decode_message(LINES % b",".join([b'""'] * 300_000))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_remote_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert "kind" in decode_message(data)
