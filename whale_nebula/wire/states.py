"""The state table of a session: what each side may say in which state.

Both sides have a state of their own, moved by what that side says. The words are the two messages of the greeting,
what the runtime says about its steps, its tensors, and the two ways to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


_OPEN = (State.OPEN, State.AGREEING, State.STEPPING, State.MEETING)
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
        **{(state, word): state for state in _OPEN for word in (Word.NOTE, Word.ROUND)},
        **{(state, word): after for state in _OPEN for word, after in _ANYWHERE.items()},
        # who failed may still be sending what it had queued
        **{(State.FAILED, word): State.FAILED for word in Word if word not in (Word.HELLO, Word.AUTH)},
    }
)
"""(state, word): the state after it. What is not in it breaks the protocol."""

GREETING_STATES = (State.START, State.GREETED)
OPEN_STATES = _OPEN


def word_of(message: Mapping[str, Any]) -> Word | None:
    """The word that a numbered message is; None for what no side ever says.

    >>> word_of({"kind": "SESSION", "about": "STEP"}), word_of({"kind": "BYE"}), word_of({"kind": "SESSION"})
    (<Word.STEP: 'STEP'>, <Word.BYE: 'BYE'>, None)
    """
    entry = kind_of(message)
    return None if entry is None else entry.word


def table() -> str:
    """The table as text: a line for each state, and what leads where from it."""
    lines = []
    for state in State:
        moves = ", ".join(f"{word} -> {after}" for word in Word if (after := TABLE.get((state, word))))
        lines.append(f"{state}: {moves}")
    return "\n".join(lines)


def diagram() -> str:
    """The table as a mermaid state diagram. What leads out of all open states is drawn once, from their frame."""
    return "\n".join(
        [
            "stateDiagram-v2",
            "    [*] --> START",
            *_arrows(GREETING_STATES),
            "    state joined {",
            *(f"    {line}" for line in _arrows(_OPEN, within=True)),
            "    }",
            *_common_arrows(),
            *_arrows((State.DRAINED, State.FAILED)),
            "    joined --> START: cut",
            "    note right of START: after a cut both greet again, and AUTH leads back to where each was",
        ]
    )


def _arrows(sources: tuple[State, ...], *, within: bool = False) -> Iterator[str]:
    for source in sources:
        for target in State:
            words = [word for word in Word if TABLE.get((source, word)) == target]
            if source is State.FAILED or not words or (within and target not in _OPEN):
                continue
            yield f"    {source} --> {target}: {', '.join(words)}"


def _common_arrows() -> Iterator[str]:
    for target in State:
        words = [word for word in Word if all(TABLE.get((source, word)) == target for source in _OPEN)]
        if words and target not in _OPEN:
            yield f"    joined --> {target}: {', '.join(words)}"


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
