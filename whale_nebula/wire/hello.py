"""HELLO, the first thing on every connection: who speaks, to whom, and all that both must know of each other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.errors.foreign_text import escape_foreign_text
from whale_nebula.wire.message import encode_message

NONCE_BYTES = 16
_EXCHANGE_BYTES = 32
_CHANGING = ("certificate", "challenge", "received", "acknowledged")
_MOST_TEXT = 48 << 10
_MOST_NUMBER = (1 << 64) - 1
_LABEL = b"whale_nebula greeting 2\0"


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's HELLO. Bytes are in hex.

    `nonce` is drawn once by a process, `challenge` anew for each connection: a proof that is signed with it is worth
    nothing on another one. `received` is the number of the next frame that this side expects, `acknowledged` that of
    the first which the other one still counts as on its way, and `budget` how many bytes may be so: the smaller one of
    both sides holds for both.
    """

    run: str
    worker: str
    to: str
    nonce: str
    challenge: str
    budget: int
    received: int
    acknowledged: int
    certificate: str | None = None
    exchange: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """As a control message."""
        return {"kind": "HELLO", **asdict(self)}

    def lasting(self) -> dict[str, Any]:
        """What stays the same on every connection of a process. Its certificate may be renewed."""
        return {name: value for name, value in asdict(self).items() if name not in _CHANGING}


def parse_hello(message: Mapping[str, Any]) -> Hello:
    """The HELLO in a message; every field is checked."""
    fields = {name: value for name, value in message.items() if name != "kind"}
    wrong = sorted(fields.keys() ^ _FIELDS.keys()) or [n for n, fits in _FIELDS.items() if not fits(fields[n])]
    if message.get("kind") != "HELLO" or wrong:
        raise RemoteProtocolError(
            f"the greeting is no HELLO of this protocol: {escape_foreign_text(', '.join(wrong)) or 'kind'}",
            mend="install the same release of whale_nebula in every cluster",
        )
    return Hello(**fields)


def transcript(hellos: tuple[Hello, Hello], signer: str) -> bytes:
    """What the worker `signer` signs: both greetings, and that it is the one who signs.

    >>> a = Hello("run", "gpu/0", "npu/0", "0a" * 16, "1a" * 16, 1, 1, 1)
    >>> b = Hello("run", "npu/0", "gpu/0", "0b" * 16, "1b" * 16, 1, 1, 1)
    >>> transcript((a, b), "gpu/0") == transcript((b, a), "gpu/0") != transcript((a, b), "npu/0")
    True
    """
    said = [asdict(hello) for hello in _sorted(hellos)]
    return _LABEL + encode_message({"kind": "TRANSCRIPT", "signer": signer, "hellos": said})


def salt(hellos: tuple[Hello, Hello]) -> bytes:
    """Both nonces, in an order that both sides know."""
    return b"".join(bytes.fromhex(hello.nonce) for hello in _sorted(hellos))


def epoch(hellos: tuple[Hello, Hello]) -> int:
    """The number on every frame between these two processes; never 0, which greetings have."""
    return int.from_bytes(hashlib.sha256(b"epoch" + salt(hellos)).digest()[:4], "big") or 1


def _sorted(hellos: tuple[Hello, Hello]) -> list[Hello]:
    return sorted(hellos, key=lambda hello: hello.worker)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _number(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MOST_NUMBER


def _hex(value: Any, size: int) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]*", value) is not None and len(value) == 2 * size


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "run": _text,
    "worker": _text,
    "to": _text,
    "nonce": lambda value: _hex(value, NONCE_BYTES),
    "challenge": lambda value: _hex(value, NONCE_BYTES),
    "budget": _number,
    "received": _number,
    "acknowledged": _number,
    "certificate": lambda value: value is None or _text(value),
    "exchange": lambda value: value is None or _hex(value, _EXCHANGE_BYTES),
    "versions": lambda value: isinstance(value, dict) and all(map(_text, value.values())),
}
