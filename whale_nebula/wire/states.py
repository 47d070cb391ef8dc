"""The state table of a session: what each side may say in which state.

Both sides have a state of their own, moved by what that side says. The words are the two messages of the greeting,
what the runtime says about its steps, its tensors, and the two ways to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from whale_nebula.wire.frame import Header, Kind
from whale_nebula.wire.message import Word, kind_of


class State(StrEnum):
    """Where one side of a conversation is."""

    START = "START"  # of a connection: nothing is said on it yet
    GREETED = "GREETED"
    OPEN = "OPEN"
    AGREEING = "AGREEING"
    STEPPING = "STEPPING"
    MEETING = "MEETING"
    DRAINED = "DRAINED"
    FAILED = "FAILED"


OPEN_STATES = (State.OPEN, State.AGREEING, State.STEPPING, State.MEETING)
_ANYWHERE = {
    Word.AGREE: State.AGREEING,
    Word.STEP: State.STEPPING,
    Word.MEET: State.MEETING,
    Word.BYE: State.DRAINED,
    Word.FAIL: State.FAILED,
}

TABLE: Mapping[tuple[State, Word], State] = MappingProxyType(
    {
        (State.START, Word.HELLO): State.GREETED,
        (State.GREETED, Word.AUTH): State.OPEN,
        (State.OPEN, Word.INIT): State.OPEN,
        (State.AGREEING, Word.LINES): State.AGREEING,
        (State.AGREEING, Word.VALUE): State.AGREEING,
        (State.STEPPING, Word.TENSOR): State.STEPPING,
        (State.STEPPING, Word.VOTE): State.STEPPING,
        (State.MEETING, Word.VALUE): State.MEETING,
        (State.DRAINED, Word.FAIL): State.FAILED,
        **{(state, word): state for state in OPEN_STATES for word in (Word.NOTE, Word.ROUND)},
        **{(state, word): after for state in OPEN_STATES for word, after in _ANYWHERE.items()},
        # who failed may still be sending what it had queued
        **{(State.FAILED, word): State.FAILED for word in Word if word not in (Word.HELLO, Word.AUTH)},
    }
)
"""(state, word): the state after it. What is not in it breaks the protocol."""

GREETING_STATES = (State.START, State.GREETED)


_MOST_NUMBER = (1 << 64) - 1
_WORDS: Mapping[int, Word] = {Kind.VALUE: Word.VALUE, Kind.ROUND: Word.ROUND}


@dataclass(frozen=True, slots=True)
class Side:
    """Where a side is, moved by what it says."""

    state: State = State.START
    before: State | None = None  # where it was when the connection was cut
    announced: tuple[int, int] | None = None  # program and step

    @property
    def greeted(self) -> bool:
        """Whether its greeting on this connection is over."""
        return self.state not in GREETING_STATES

    def say(self, word: Word) -> Side | None:
        """The side after a word; None where the table does not allow it."""
        state = TABLE.get((self.state, word))
        if state is None:
            return None
        if word is Word.AUTH:
            return replace(self, state=self.before or state, before=None)
        return replace(self, state=state)

    def cut(self) -> Side:
        """The side after its connection broke: it greets anew, and then goes on where it was."""
        return replace(self, state=State.START, before=self.state if self.greeted else self.before)


def speak(side: Side, header: Header, message: Mapping[str, Any] | None) -> Side | str:
    """The side after it sent a numbered frame (with this message in it), or in words why it may not."""
    if message is None:
        word: Word | None = _WORDS.get(header.kind, Word.TENSOR)
    else:
        word = entry.word if (entry := kind_of(message)) else None
    after = side.say(word) if word else None
    if word is None or after is None:
        return f"{word or (message or {}).get('kind')!s} in state {side.state}"
    if word is Word.STEP:
        announced = _step_of(message or {})
        return replace(after, announced=announced) if announced else "STEP without the numbers of a program and a step"
    if message is None and header.shard:
        return f"shard {header.shard}, where no plan has any"
    step_matters = word is Word.TENSOR and side.state is not State.FAILED
    if step_matters and (header.program, header.step) != side.announced:
        program, step = side.announced or (None, None)
        return (
            f"a tensor of step {header.step} of program {header.program}, "
            f"where step {step} of program {program} was announced"
        )
    return after


def _step_of(message: Mapping[str, Any]) -> tuple[int, int] | None:
    program, step = message.get("program"), message.get("step")
    if type(program) is int and type(step) is int and 0 <= min(program, step) <= max(program, step) <= _MOST_NUMBER:
        return program, step
    return None
