"""Control messages: small JSON objects with a `kind`, such as HELLO, AGREE, FAIL and BYE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import MESSAGE_BYTES


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
    if len(data) > MESSAGE_BYTES:
        raise LocalProtocolError(
            f"control message {message['kind']!r} has {len(data)} bytes, above a frame's cap"
        )
    return data


def decode_message(data: bytes) -> dict[str, Any]:
    """The message in these bytes; whatever is not one is the other side's mistake.

    >>> decode_message(b'{"kind":"BYE"}')
    {'kind': 'BYE'}
    """
    try:
        message = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise RemoteProtocolError("a control message is no object with a 'kind'")
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
