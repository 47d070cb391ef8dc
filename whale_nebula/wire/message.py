"""Control messages: small JSON objects with a `kind`, such as HELLO, AGREE, FAIL and BYE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import MESSAGE_BYTES

_MESSAGE_CAP = 256 << 10
_MOST_VALUES = 1 << 15
_LINES = b'{"about":"LINES",'
"""How the one message begins that may be large: the text of a program, where two programs differ."""

KINDS = frozenset({"ARRIVED", "LEAVING", "PING", "PONG", "SESSION", "SPENT"})
"""What the runtime and `bench link` say to each other; links say BYE and FAIL themselves."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """A message as the bytes of one control frame: JSON with sorted keys.

    >>> encode_message({"kind": "HELLO", "run": "r1"})
    b'{"kind":"HELLO","run":"r1"}'
    """
    if not isinstance(message.get("kind"), str):
        raise LocalProtocolError(f"a control message needs a 'kind' that is a string: {message!r}")
    try:
        data = json.dumps(message, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise LocalProtocolError(f"control message {message['kind']!r} is not plain JSON: {error}") from None
    if fault := _fault(data):
        raise LocalProtocolError(f"control message {message['kind']!r} has {fault}")
    return data


def decode_message(data: bytes) -> dict[str, Any]:
    """The message in these bytes; whatever is not one is the other side's mistake.

    >>> decode_message(b'{"kind":"BYE"}')
    {'kind': 'BYE'}
    """
    if fault := _fault(data):
        raise RemoteProtocolError(f"a control message has {fault}")
    try:
        message = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise RemoteProtocolError("a control message is no object with a 'kind'")
    if data.startswith(_LINES) and not _holds_lines(message):
        raise RemoteProtocolError("the lines of a program are no list of texts")
    return message


def _fault(data: bytes) -> str | None:
    """What is too large about a message, found before it is parsed: as objects it takes many times its bytes."""
    lines = data.startswith(_LINES)
    cap = MESSAGE_BYTES if lines else _MESSAGE_CAP
    if len(data) > cap:
        return f"{len(data)} bytes, above the cap of {cap}"
    values = 0 if lines else sum(data.count(mark) for mark in (b"[", b"{", b","))
    return f"{values} values, above the cap of {_MOST_VALUES}" if values > _MOST_VALUES else None


def _holds_lines(message: Mapping[str, Any]) -> bool:
    lines = message.get("lines")
    return isinstance(lines, list) and all(isinstance(line, str) for line in lines)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
