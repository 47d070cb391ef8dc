"""How a conversation goes: what each side may say in which state, as a table. Its picture is drawn from it.

Both sides have a state of their own, moved by what that side says. The words are the two messages of the greeting,
what the runtime says about its steps, its tensors, and the two ways to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

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
