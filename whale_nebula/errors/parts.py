"""What every error and warning of this package has: four parts, a code, and how they read."""

from __future__ import annotations

import re
import textwrap
from typing import ClassVar

from whale_nebula.errors.text import escape_foreign_text

MEND = "\n  mend: "
_LONGEST = 20_000


class _FourParts(Exception):
    """What errors and warnings have in common: the four parts, and how they read.

    A part that is not known is an empty text; a mend that is not given is that of the class.
    """

    code: ClassVar[str] = "NB-000"
    usual_mend: ClassVar[str] = "report this with the script that shows it"
    # Keras makes an error that leaves a layer anew, from its first argument alone, unless it bears this mark.
    _keras_call_info_injected: ClassVar[bool] = True
    # AutoGraph makes every error anew, as a StagingError, unless it bears this one.
    ag_pass_through: ClassVar[bool] = True

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, mend: str | None = None) -> None:
        what = to_printable(what)
        super().__init__(what)
        self.what = what
        self.where = to_printable(where or "")
        self.why = to_printable(why or "")
        self.mend = what.partition(MEND)[2] or to_printable(mend or self.usual_mend)

    def __str__(self) -> str:
        if MEND in self.what:  # Keras made it anew from our text, while it inferred a layer's output
            return self.what
        lines = [f"{self.code} {self.what}" + (f" ({self.where})" if self._shows_where() else "")]
        for name, text in (("why", self.why), ("mend", self.mend)):
            if text:  # further lines stand under the first
                lines.append(f"  {name}: " + textwrap.indent(text, " " * len(f"  {name}: ")).lstrip(" "))
        return "\n".join(lines)

    def _shows_where(self) -> bool:
        return bool(self.where)


def to_printable(text: str) -> str:
    """A part of an error as it may be written to a terminal, whoever's words are in it."""
    return text if text.isascii() and text.isprintable() else escape_foreign_text(text, _LONGEST, lines=True)


class NebulaError(_FourParts):
    """Everything that this library raises on purpose.

    `recurs` says of a class that the same script ends by such an error again when it is started again. `peer` is the
    worker that is missed, where it is one.

    >>> print(NebulaError("the line is cut", where="gpu->npu", why="8 s of silence", mend="try the cable"))
    NB-000 the line is cut (gpu->npu)
      why: 8 s of silence
      mend: try the cable
    """

    recurs: ClassVar[bool] = False
    peer: str = ""


class NebulaWarning(_FourParts, UserWarning):
    """Something that goes on, but probably not as it was meant.

    Python writes the line that it is about before it, so its text leaves that line out.

    >>> print(NebulaWarning("stage 'gpu' runs uncut", where="train.py:3", mend="call it in a step"))
    NB-900 stage 'gpu' runs uncut
      mend: call it in a step
    """

    code = "NB-900"
    usual_mend = "warnings.filterwarnings('ignore', category=nb.errors.NebulaWarning), if it was meant"

    def _shows_where(self) -> bool:
        return bool(self.where) and re.search(r":\d+$", self.where) is None
