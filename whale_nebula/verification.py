"""What `nb.verify` found: a row for each tensor that was compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.errors import VerificationError


class Row(NamedTuple):
    """One tensor, compared: its name, how far the plan's is from the uncut one, and how far it may be."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it is near enough; what is no number is not."""
        return self.error <= self.limit

    @property
    def badness(self) -> float:
        """How many times the limit the error is."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.limit if self.limit else math.inf * self.error if self.error else 0.0


@dataclass(frozen=True)
class Verification:
    """One step by the plan against the same step uncut: a row for everything it returned or wrote.

    `comparable` is false where the two must differ (dropout with several micro-batches draws other numbers,
    and `coupled="allow"` runs rows apart that depend on each other): then no row has a limit, and nothing was
    shown. `notes` say why, `mends` what to change for a check that shows something. It is true where `ok` is.

    >>> rows = Row("loss", 0.0, 1e-5), Row("kernel", 2e-3, 1e-5)
    >>> found = Verification(rows, stages=("gpu", "npu"), micro_batches=2)
    >>> found.ok, found.worst.name
    (False, 'kernel')
    >>> print(found)
    2 stages (gpu, npu), micro-batches: 2: 1 of 2 tensors differ from the uncut step
         error    limit
       0.0e+00  1.0e-05  loss
      !2.0e-03  1.0e-05  kernel
    """

    rows: tuple[Row, ...]
    stages: tuple[str, ...] = ()
    micro_batches: int = 1
    comparable: bool = True
    notes: tuple[str, ...] = ()
    mends: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the two steps can be compared, and nothing is further from the uncut one than it may be."""
        return self.comparable and all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def worst(self) -> Row | None:
        """The row that is furthest beyond its limit, or nearest to it; None where nothing was compared."""
        return max(self.rows, key=lambda row: row.badness, default=None)

    def to_text(self) -> str:
        """A table with a line for each tensor, what differs marked by '!', and the notes under it."""
        count = len(self.stages)
        stages = f"{count} stage{'s' * (count != 1)} ({', '.join(self.stages)})"
        head = f"{stages}, micro-batches: {self.micro_batches}"
        lines = [f"{head}: {self._sentence()}", *(f"  mend: {mend}" for mend in self.mends), "     error    limit"]
        lines += [f"  {' ' if row.ok else '!'}{row.error:.1e}  {row.limit:7.1e}  {row.name}" for row in self.rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes[not self.comparable :])])

    def __str__(self) -> str:
        return self.to_text()

    def _sentence(self) -> str:
        bad = sum(not row.ok for row in self.rows)
        if bad:
            return f"{bad} of {len(self.rows)} tensors differ from the uncut step"
        if not self.comparable:
            return f"not comparable: {self._reason()}"
        return f"all {len(self.rows)} tensors are those of the uncut step"

    def _reason(self) -> str:
        return self.notes[0] if self.notes else "the two steps must differ"

    def raise_if_bad(self) -> Verification:
        """Raise `VerificationError` where something differs or could not be compared; else give itself."""
        if not self.comparable:
            raise VerificationError(
                "the plan and the uncut step cannot be compared",
                why=self._reason(),
                mend="\nor ".join(self.mends) or None,
            )
        if not self.ok and self.worst is not None:
            raise VerificationError(
                "the plan and the uncut step do not agree",
                where=self.worst.name,
                why=f"it is {self.worst.error:.1e} away, and may be {self.worst.limit:.1e}\n{self}",
            )
        return self
