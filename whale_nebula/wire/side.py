"""One side of a conversation: its state, and the step that it announced last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from whale_nebula.wire.frame import Header, Kind
from whale_nebula.wire.message import Word
from whale_nebula.wire.states import GREETING_STATES, TABLE, State, word_of

_MOST_NUMBER = (1 << 64) - 1
_WORDS: Mapping[int, Word] = {Kind.VALUE: Word.VALUE, Kind.ROUND: Word.ROUND}


@dataclass(frozen=True, slots=True)
class Side:
    """Where a side is, moved by what it says.

    >>> side = Side().said(Word.HELLO).said(Word.AUTH).said(Word.MEET)
    >>> side.cut().state, side.cut().said(Word.HELLO).said(Word.AUTH).state
    (<State.START: 'START'>, <State.MEETING: 'MEETING'>)
    >>> side.said(Word.TENSOR) is None
    True
    """

    state: State = State.START
    before: State | None = None  # where it was when the connection was cut
    announced: tuple[int, int] | None = None  # program and step

    @property
    def greeted(self) -> bool:
        """Whether its greeting on this connection is over."""
        return self.state not in GREETING_STATES

    def said(self, word: Word) -> Side | None:
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
    word = _tensor_word(header) if message is None else word_of(message)
    after = side.said(word) if word else None
    if word is None or after is None:
        return f"{word or (message or {}).get('kind')!s} in state {side.state}"
    if word is Word.STEP:
        step = _step_of(message or {})
        return replace(after, announced=step) if step else "STEP without the numbers of a program and a step"
    fault = _tensor_fault(side, header, word) if message is None else None
    return fault or after


def _tensor_word(header: Header) -> Word:
    return _WORDS.get(header.kind, Word.TENSOR)


def _tensor_fault(side: Side, header: Header, word: Word) -> str | None:
    if header.shard:
        return f"shard {header.shard}, where no plan has any"
    step_matters = word is Word.TENSOR and side.state is not State.FAILED
    if step_matters and (header.program, header.step) != side.announced:
        program, step = side.announced or (None, None)
        return (
            f"a tensor of step {header.step} of program {header.program}, "
            f"where step {step} of program {program} was announced"
        )
    return None


def _step_of(message: Mapping[str, Any]) -> tuple[int, int] | None:
    program, step = message.get("program"), message.get("step")
    if type(program) is int and type(step) is int and 0 <= min(program, step) <= max(program, step) <= _MOST_NUMBER:
        return program, step
    return None
