"""The digest of a program, and in words where two programs part.

Workers compare digests when they meet. The digest is a hash of lines that a reader can follow, so that where
two programs are not the same it can be said how.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from whale_nebula.ir.canonical import canonical_lines
from whale_nebula.ir.program import Program

_OP = re.compile(r"%(\d+) = (.*)")
_WORDS = {
    "pipeline": "the pipeline",
    "stage": "stage {}",
    "compress": "codec {}",
    "input": "input {}",
    "variable": "variable {}",
    "request": "gradient request {}",
    "returns": "what the step returns",
    "weights": "the loss weights",
    "func": "function {}",
}


def program_digest(program: Program) -> str:
    """The same for every trace of the same program, in whichever process: 64 hexadecimal digits.

    >>> from whale_nebula.ir.text import from_text
    >>> one = Program(from_text('%0 = VarHandleOp resource[] "a"'))
    >>> program_digest(one) == program_digest(Program(from_text('%0 = VarHandleOp resource[] "b_1"')))
    True
    """
    return digest_lines(canonical_lines(program))


def digest_lines(lines: Iterable[str]) -> str:
    """The hash of canonical lines.

    >>> digest_lines(["a", "b"])[:8]
    '911169dd'
    """
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


HERE, THERE = "here", "there"
Words = tuple[str, str]
"""How the two sides are called where their difference is told."""


def first_difference(
    here: Program | Sequence[str], there: Program | Sequence[str], words: Words = (HERE, THERE)
) -> str:
    """In words, the first thing in which two programs (or their lines) differ; empty if they do not.

    >>> first_difference(["variable w float32[2] trainable"], ["variable w float32[3] trainable"])
    'variable w: float32[2] trainable here, float32[3] trainable there'
    """
    pairs = list(zip_longest(_lines(here), _lines(there)))
    at = first_unlike(_lines(here), _lines(there))
    if at == len(pairs):
        return ""
    mine, theirs = pairs[at]
    inside = next((line for line, _ in reversed(pairs[:at]) if line and line.startswith("func ")), "")
    indented = (mine or theirs or "").startswith("  ")
    return _told(mine, theirs, words) + (f" (in {_split(inside)[0]})" if indented and inside else "")


def first_unlike(here: Sequence[str], there: Sequence[str]) -> int:
    """The number of the first line, from 0 on, that is not the same; the number of lines where all are.

    >>> first_unlike(["a", "b"], ["a", "c"]), first_unlike(["a"], ["a", "b"]), first_unlike(["a"], ["a"])
    (1, 1, 1)
    """
    pairs = list(zip_longest(here, there))
    return next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))


def _lines(program: Program | Sequence[str]) -> Sequence[str]:
    return canonical_lines(program) if isinstance(program, Program) else program


def _told(mine: str | None, theirs: str | None, words: Words) -> str:
    here, there = words
    if mine is None or theirs is None:
        what, rest = _split(mine or theirs or "")
        return f"{what} ({rest}) is {there if mine is None else here} only"
    (what, rest), (other, others) = _split(mine), _split(theirs)
    if what == other:
        return f"{what}: {rest} {here}, {others} {there}"
    return f"{what} ({rest}) stands {here} where {other} ({others}) stands {there}"


def _split(line: str) -> tuple[str, str]:
    """What a line is about, and what it says of it."""
    line = line.strip()
    op = _OP.fullmatch(line)
    if op:
        return f"op {op[1]}", op[2]
    kind, _, rest = line.partition(" ")
    words = _WORDS.get(kind, kind)
    if "{}" not in words:
        return words, rest
    name, _, rest = rest.partition(" ")
    return words.format(name.partition("(")[0]), rest
