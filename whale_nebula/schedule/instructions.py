"""The instructions of a stage, one micro-batch each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from whale_nebula.errors import OptionError


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage forward and keep what its backward will need.

    >>> print(Forward(3), Forward(3, phase=1))
    F3 1:F3
    """

    micro_batch: int
    phase: int = 0
    letters: ClassVar[str] = "F"

    def __str__(self) -> str:
        return _text(self)


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the stage backward and free what its forward kept."""

    micro_batch: int
    phase: int = 0
    letters: ClassVar[str] = "B"

    def __str__(self) -> str:
        return _text(self)


@dataclass(frozen=True, slots=True)
class Fused:
    """Run forward and backward in one function: nothing has to be kept in between."""

    micro_batch: int
    phase: int = 0
    letters: ClassVar[str] = "FB"

    def __str__(self) -> str:
        return _text(self)


Instruction = Forward | Backward | Fused

_KINDS: dict[str, type[Forward] | type[Backward] | type[Fused]] = {
    kind.letters: kind for kind in (Forward, Backward, Fused)
}
_WORD = re.compile(r"(?:(\d+):)?(F|B|FB)(\d+)")


def _text(instruction: Instruction) -> str:
    phase = f"{instruction.phase}:" if instruction.phase else ""
    return f"{phase}{instruction.letters}{instruction.micro_batch}"


def to_text(instructions: Iterable[Instruction]) -> str:
    """Write a list of instructions on one line.

    >>> to_text([Forward(0), Forward(1), Backward(0)])
    'F0 F1 B0'
    """
    return " ".join(map(str, instructions))


def from_text(text: str) -> tuple[Instruction, ...]:
    """Read what `to_text` wrote.

    >>> from_text("F0 1:FB2")
    (Forward(micro_batch=0, phase=0), Fused(micro_batch=2, phase=1))
    """
    return tuple(_read(word) for word in text.split())


def _read(word: str) -> Instruction:
    match = _WORD.fullmatch(word)
    if match is None:
        raise OptionError(
            f"{word!r} is not an instruction",
            why="an instruction is F, B or FB and the number of a micro-batch, with the phase before it",
            mend="write it like F0, B0, FB0 or 1:F0",
        )
    phase, letters, micro_batch = match.groups()
    return _KINDS[letters](int(micro_batch), int(phase or 0))
