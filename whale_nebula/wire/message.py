"""Control messages: JSON objects with a `kind`, the registry of all kinds, and the state table of a session.

All communication between workers other than tensors is a message of one of these kinds. The sender builds a message
from its entry here, which names its trigger in the state table, and the receiver checks it against the same entry: a
kind without an entry can be neither sent nor received. The state table defines which messages are valid when: each side
has its own state, which its messages change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NoReturn

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import MESSAGE_BYTES, Header, Kind
from whale_nebula.wire.tensor import find_dtype_code

SESSION = "SESSION"
_MAX_BYTES = 256 << 10
_MAX_VALUES = 1 << 15
_LINES = b'{"about":"LINES",'
"""The prefix of the only message that may be larger, up to a frame: the text of a program, if two programs differ."""
_TEXT = rb'"(?:[^"\\]|\\.)*+"'
_TEXTS = re.compile(rb"(?s)\{(?:T:(?:T|\[(?:T(?:,T)*+)?\])[,}])*+".replace(b"T", _TEXT))
_MAX_TEXTS = 1 << 18
MAX_UNREAD_MESSAGES = 64
"""The most messages of one kind that may be unread. Each is answered, or sent once, so there are only a few."""
MAX_UINT64 = (1 << 64) - 1
_UINT8 = find_dtype_code("uint8")


class Trigger(StrEnum):
    """The kinds of messages and tensors that the state table distinguishes."""

    HELLO = "HELLO"
    AUTH = "AUTH"
    INIT = "INIT"  # the runtime's own HELLO, sent by nb.init
    AGREE = "AGREE"
    LINES = "LINES"
    STEP = "STEP"
    VOTE = "VOTE"  # whether the step that was announced is left out
    MEET = "MEET"
    NOTE = "NOTE"  # any other message
    TENSOR = "TENSOR"
    VALUE = "VALUE"
    ROUND = "ROUND"  # weights in local SGD, between steps
    BYE = "BYE"
    FAIL = "FAIL"


Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether a value is a valid count."""
    return type(value) is int and 0 <= value <= MAX_UINT64


def _is_number(value: Any) -> bool:
    return abs(value) <= MAX_UINT64 if type(value) is int else type(value) is float and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_anything(value: Any) -> bool:
    return True


def _make_optional_check(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _make_list_check(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _make_table_check(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_fingerprint(value: Any) -> bool:
    return is_count(value) or _make_list_check(_make_optional_check(is_count))(value)


@dataclass(frozen=True)
class MessageKind:
    """A kind of control message: its trigger in the state table, and its required and optional fields. An `open` kind
    allows further fields.
    """

    trigger: Trigger
    required: Mapping[str, Check] = field(default_factory=dict)
    optional: Mapping[str, Check] = field(default_factory=dict)
    open: bool = False

    def find_fault(self, fields: Mapping[str, Any]) -> str:
        """A description of the first fault in a message's fields, or ""."""
        missing = sorted(self.required.keys() - fields.keys())
        if missing:
            return f"without {', '.join(missing)}"
        for name, value in fields.items():
            check = self.required.get(name) or self.optional.get(name)
            if check is None and not self.open:
                return f"with the unknown field {name!r}"
            if check is not None and not check(value):
                return f"with an invalid value of {name!r}"
        return ""


def _make_session_kind(
    trigger: Trigger, required: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> MessageKind:
    """The kind of a runtime message on a step or a rendezvous, with the worker's action and the line of the script."""
    return MessageKind(trigger, required, {"doing": _is_text, "line": _is_text, **(optional or {})})


KINDS: Mapping[str, MessageKind] = MappingProxyType(
    {
        "SESSION HELLO": MessageKind(
            Trigger.INIT,
            {},
            {
                "seed": _make_optional_check(is_count),
                "host": _is_text,
                "epoch": is_count,
                "workers": _make_list_check(_is_text),
            },
            open=True,
        ),
        "SESSION AGREE": _make_session_kind(
            Trigger.AGREE, {"program": _is_text, "digest": _is_text}, {"states": _make_table_check(is_count)}
        ),
        "SESSION LINES": _make_session_kind(Trigger.LINES, {"program": _is_text, "lines": _make_list_check(_is_text)}),
        "SESSION STEP": _make_session_kind(
            Trigger.STEP,
            {"program": is_count, "step": is_count, "rows": is_count, "inputs": _make_table_check(_is_fingerprint)},
            {
                "name": _is_text,
                "mark": is_count,
                "pace": _make_table_check(_is_number),
                "speeds": _is_table,
                "stays": _is_flag,
                "leaving": _make_optional_check(_is_text),
                "seen": _make_optional_check(_is_table),
                "alike": _make_table_check(is_count),
                "settings": _make_table_check(_is_text),
                "checkpoint": _make_list_check(_is_anything),
            },
        ),
        "SESSION VOTE": _make_session_kind(Trigger.VOTE, {"why": _is_text}),
        "SESSION MEET": _make_session_kind(
            Trigger.MEET,
            {},
            {
                "able": _is_flag,
                "address": _make_optional_check(_is_text),
                "shared": _is_anything,
                "weights": is_count,
                "seeds": _make_list_check(_make_list_check(_is_number)),
            },
        ),
        "LEAVING": MessageKind(
            Trigger.NOTE, {"program": is_count, "step": is_count, "why": _is_text}, {"worker": _is_text}
        ),
        "SAVING": MessageKind(Trigger.NOTE, {"level": is_count, "step": is_count}, {"part": _is_text}),
        "BYE": MessageKind(Trigger.BYE),
        "FAIL": MessageKind(Trigger.FAIL, {}, {"reason": _is_anything, "last": _is_flag}),
        # between the two ends of `whale-nebula bench link`
        "PING": MessageKind(Trigger.NOTE, {"last": _is_flag}, {"found": _make_list_check(_is_number)}),
        "PONG": MessageKind(Trigger.NOTE, {"clock": _is_number}),
        "BURST": MessageKind(
            Trigger.STEP,
            {"program": is_count, "step": is_count, "count": is_count, "size": is_count, "last": _is_flag},
        ),
        "ARRIVED": MessageKind(Trigger.NOTE, {"rate": _is_number, "seconds": _is_number}),
    }
)
"""All kinds of messages after the greeting, by kind, or by kind and subject."""


def find_kind(message: Mapping[str, Any]) -> MessageKind | None:
    """The registered kind of a message; None for an unknown one.

    >>> find_kind({"kind": "SESSION", "about": "VOTE"}).trigger, find_kind({"kind": "SESSION"})
    (<Trigger.VOTE: 'VOTE'>, None)
    """
    kind, about = message.get("kind"), message.get("about")
    name = f"{SESSION} {about}" if kind == SESSION else kind
    return KINDS.get(name) if isinstance(name, str) else None


def find_fault(message: Mapping[str, Any]) -> str:
    """A description of the first fault in a message according to the registry, as a part of a sentence, or "".

    >>> find_fault({"kind": "SESSION", "about": "STEP", "program": 0})
    "'SESSION STEP' without inputs, rows, step"
    >>> find_fault({"kind": "NEWS"})
    "'NEWS' of an unknown kind"
    """
    entry, session = find_kind(message), message.get("kind") == SESSION
    name = f"{SESSION} {message.get('about')}" if session else str(message.get("kind"))
    if not isinstance(message.get("kind"), str):
        return "without a 'kind' that is a string"
    if entry is None:
        return f"{name[:80]!r} of an unknown kind"
    fault = entry.find_fault({n: v for n, v in message.items() if n != "kind" and not (session and n == "about")})
    return f"{name!r} {fault[:200]}" if fault else ""


def build_message(kind: str, about: str | None = None, **fields: Any) -> dict[str, Any]:
    """A message of a registered kind.

    >>> build_message("LEAVING", program=1, step=4, why="SIGTERM")
    {'kind': 'LEAVING', 'program': 1, 'step': 4, 'why': 'SIGTERM'}
    """
    message = {"kind": kind, **({} if about is None else {"about": about}), **fields}
    check_outgoing_message(message)
    return message


def check_outgoing_message(message: Mapping[str, Any]) -> None:
    """Raise for an outgoing message that the other side would refuse."""
    if fault := find_fault(message):
        raise LocalProtocolError(f"invalid control message: {fault}", mend="add it to KINDS in wire/message.py")


def check_message(message: Mapping[str, Any]) -> None:
    """Raise for a message of the other side that does not match its entry."""
    if fault := find_fault(message):
        raise RemoteProtocolError(f"received an invalid control message: {fault}")


def encode_message(message: Mapping[str, Any]) -> bytes:
    """A message as the bytes of one control frame: JSON with sorted keys."""
    if not isinstance(message.get("kind"), str):
        raise LocalProtocolError(f"invalid control message: 'kind' must be a string: {message!r}")
    try:
        data = json.dumps(message, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise LocalProtocolError(f"control message {message['kind']!r} is not plain JSON: {error}") from None
    if fault := _find_excess(data):
        raise LocalProtocolError(f"invalid control message {message['kind']!r}: {fault}")
    return data


def decode_message(data: bytes) -> dict[str, Any]:
    """Parse a message; anything else is a protocol error of the other side."""
    if fault := _find_excess(data):
        raise RemoteProtocolError(f"received an invalid control message: {fault}")
    try:
        message = json.loads(data, parse_int=_read_int, parse_float=_read_float, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise RemoteProtocolError("a control message is not an object with a 'kind'")
    return message


def build_message_header(size: int, source: int = 0, destination: int = 0) -> Header:
    """The header of a control message of this size, as an argument of `split_payload`."""
    return Header(Kind.CONTROL, source=source, destination=destination, dtype=_UINT8, dims=(size,))


def _find_excess(data: bytes) -> str | None:
    """A description of the limit that a message exceeds, or None. It is checked before the message is parsed, as parsed
    objects use many times its bytes.
    """
    lines = has_program_lines(data)
    cap = MESSAGE_BYTES if lines else _MAX_BYTES
    if len(data) > cap:
        return f"{len(data)} bytes exceed the limit of {cap}"
    if lines and not _TEXTS.fullmatch(data):
        return "the lines of a program may contain only texts and lists of texts"
    most = _MAX_TEXTS if lines else _MAX_VALUES
    values = sum(data.count(mark) for mark in ((b'","',) if lines else (b"[", b"{", b",")))
    return f"{values} values exceed the limit of {most}" if values > most else None


def has_program_lines(data: bytes) -> bool:
    """Whether unparsed bytes are the lines of a program, which may be larger than other messages."""
    return data.startswith(_LINES)


def _read_int(text: str) -> int:
    value = int(text)
    if abs(value) > MAX_UINT64:
        raise ValueError("an integer has more than 64 bits")
    return value


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large for a float")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class State(StrEnum):
    """State of one side of a conversation, on its current connection."""

    START = "START"  # of a connection: nothing was sent on it yet
    GREETED = "GREETED"
    OPEN = "OPEN"
    AGREEING = "AGREEING"
    STEPPING = "STEPPING"
    MEETING = "MEETING"
    DRAINED = "DRAINED"
    FAILED = "FAILED"


OPEN_STATES = (State.OPEN, State.AGREEING, State.STEPPING, State.MEETING)
_OPEN_TRANSITIONS = {
    Trigger.AGREE: State.AGREEING,
    Trigger.STEP: State.STEPPING,
    Trigger.MEET: State.MEETING,
    Trigger.BYE: State.DRAINED,
    Trigger.FAIL: State.FAILED,
}

TABLE: Mapping[tuple[State, Trigger], State] = MappingProxyType(
    {
        (State.START, Trigger.HELLO): State.GREETED,
        (State.GREETED, Trigger.AUTH): State.OPEN,
        (State.OPEN, Trigger.INIT): State.OPEN,
        (State.AGREEING, Trigger.LINES): State.AGREEING,
        (State.AGREEING, Trigger.VALUE): State.AGREEING,
        (State.STEPPING, Trigger.TENSOR): State.STEPPING,
        (State.STEPPING, Trigger.VOTE): State.STEPPING,
        (State.MEETING, Trigger.VALUE): State.MEETING,
        (State.DRAINED, Trigger.FAIL): State.FAILED,
        **{(state, trigger): state for state in OPEN_STATES for trigger in (Trigger.NOTE, Trigger.ROUND)},
        **{(state, trigger): after for state in OPEN_STATES for trigger, after in _OPEN_TRANSITIONS.items()},
        # a side that failed may still be sending its queue
        **{
            (State.FAILED, trigger): State.FAILED for trigger in Trigger if trigger not in (Trigger.HELLO, Trigger.AUTH)
        },
    }
)
"""The next state by state and trigger. Any other pair is a protocol error."""

GREETING_STATES = (State.START, State.GREETED)


_TRIGGERS: Mapping[int, Trigger] = {Kind.VALUE: Trigger.VALUE, Kind.ROUND: Trigger.ROUND}


@dataclass(frozen=True, slots=True)
class Side:
    """State machine of one side, driven by the frames that it sends. Immutable."""

    state: State = State.START
    state_before: State | None = None  # the state when the connection broke
    announced: tuple[int, int] | None = None  # program and step

    @property
    def greeted(self) -> bool:
        """Whether its greeting on this connection is over."""
        return self.state not in GREETING_STATES

    def advance(self, trigger: Trigger) -> Side | None:
        """The side after a trigger; None if the table does not allow it."""
        state = TABLE.get((self.state, trigger))
        if state is None:
            return None
        if trigger is Trigger.AUTH:
            return replace(self, state=self.state_before or state, state_before=None)
        return replace(self, state=state)

    def disconnect(self) -> Side:
        """The side after its connection broke: it greets again, and then resumes its state."""
        return replace(self, state=State.START, state_before=self.state if self.greeted else self.state_before)


def apply_frame(side: Side, header: Header, message: Mapping[str, Any] | None) -> Side | str:
    """The side after it sent a numbered frame (with this message in it), or the reason, as text, why it may not."""
    if message is None:
        trigger: Trigger | None = _TRIGGERS.get(header.kind, Trigger.TENSOR)
    else:
        trigger = entry.trigger if (entry := find_kind(message)) else None
    after = side.advance(trigger) if trigger else None
    if trigger is None or after is None:
        return f"{trigger or (message or {}).get('kind')!s} in state {side.state}"
    if trigger is Trigger.STEP:
        announced = _read_step(message or {})
        return (
            replace(after, announced=announced) if announced else "STEP without valid numbers of a program and a step"
        )
    if message is None and header.shard:
        return f"shard {header.shard}, but no tensor has one"
    step_matters = trigger is Trigger.TENSOR and side.state is not State.FAILED
    if step_matters and (header.program, header.step) != side.announced:
        program, step = side.announced or (None, None)
        return (
            f"a tensor of step {header.step} of program {header.program}, "
            f"but step {step} of program {program} was announced"
        )
    return after


def _read_step(message: Mapping[str, Any]) -> tuple[int, int] | None:
    program, step = message.get("program"), message.get("step")
    if type(program) is int and type(step) is int and 0 <= min(program, step) <= max(program, step) <= MAX_UINT64:
        return program, step
    return None
