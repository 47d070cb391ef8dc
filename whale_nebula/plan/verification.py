"""What `nb.verify` found: a row for each tensor that was compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.errors import VerificationError

_FEW = 24  # rows that are shown without being asked for


class Row(NamedTuple):
    """One tensor, compared: its name, how far the plan's is from the uncut one, and how far it may be.

    `noisy` says that rounding alone may move it as far as the step does, so that nothing is shown of it: its gradient
    is all but zero, and an optimizer such as Adam makes full steps of its noise.
    """

    name: str
    error: float
    limit: float
    noisy: bool = False

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
    shown. `notes` say why (the first `reasons` of them do, then come remarks), `mends` what to change for a check that
    shows something. `proviso` is what the headline leaves open: half precision. It is true where `ok` is.

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
    proviso: str = ""
    reasons: int = 1

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

    def to_text(self, *, every: bool = False) -> str:
        """A table with a line for each tensor, what differs marked by '!', noise by '~', and the notes under it.

        Of many tensors it has those that differ and those that are nearest to their limits; with `every` it has all.
        """
        count = len(self.stages)
        stages = f"{count} stage{'s' * (count != 1)} ({', '.join(self.stages)})"
        head = f"{stages}, micro-batches: {self.micro_batches}"
        lines = [f"{head}: {self._sentence()}", *(f"  mend: {mend}" for mend in self.mends)]
        shown = self.rows if every or len(self.rows) <= _FEW else self._telling()
        lines += ["     error    limit", *map(_line, shown)]
        rest = len(self.rows) - len(shown)
        lines += [f"  and {rest} more, further from their limits: to_text(every=True) has them"] * (rest > 0)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes[0 if self.comparable else self.reasons :])])

    def _telling(self) -> list[Row]:
        """The rows that differ, and with them those that are next to; in the order of all."""
        nearest = sorted(self.rows, key=lambda row: row.badness, reverse=True)[:_FEW]
        return [row for row in self.rows if not row.ok or row in nearest]

    def __str__(self) -> str:
        return self.to_text()

    def _sentence(self) -> str:
        bad = sum(not row.ok for row in self.rows)
        if bad:
            return f"{bad} of {len(self.rows)} tensors differ from the uncut step"
        if not self.comparable:
            return f"not comparable: {self._reason()}"
        return ", ".join([f"all {len(self.rows)} tensors are those of the uncut step", *filter(None, [self.proviso])])

    def _reason(self) -> str:
        return "; and ".join(self.notes[: self.reasons]) or "the two steps must differ"

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


def _line(row: Row) -> str:
    mark = "!" if not row.ok else "~" if row.noisy else " "
    limit = f"{row.limit:7.1e}" if math.isfinite(row.limit) else "   none"
    return f"  {mark}{row.error:.1e}  {limit}  {row.name}"
