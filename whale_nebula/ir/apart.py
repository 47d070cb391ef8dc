"""That the clusters of a run train apart: each a copy of all of the program, and every so many steps they meet."""

from __future__ import annotations

from dataclasses import dataclass

from whale_nebula.ir.outer_optimizer import NAMED, Outer, text

SYNC, ASYNC = "sync", "async"


@dataclass(frozen=True)
class Apart:
    """What an `nb.replica(sync_every=...)` says, all defaults filled in. `clusters` are those of its layout, or none
    where it names none; `codec` is the way that weights cross, as text.

    Without a number of `fragments` the size of the weights says how many there are.

    In `mode` "async" a server on the first cluster's first worker takes each cluster's difference as it comes, and none
    is more than `staleness` rounds ahead of the slowest.

    >>> print(Apart(every=100, delay=10, codec="int4"))
    each cluster trains a copy, they meet every 100 steps and have 10 steps for it, int4, average
    """

    every: int
    fragments: int = 0
    delay: int = 0
    outer: Outer = NAMED["average"]
    codec: str = "none"
    clusters: tuple[str, ...] = ()
    mode: str = SYNC
    staleness: int = 0
    where: str = ""

    def __str__(self) -> str:
        if self.mode == ASYNC:
            how = f"each pushes its difference every {self.every} steps, at most {self.staleness} rounds ahead"
        elif self.fragments > 1:
            pieces = f" in {self.fragments} fragments"
            how = f"they meet every {_steps(self.every)}{pieces}"
            how += f" that each have {_count(self.delay)} to arrive in" * bool(self.delay)
        else:
            how = f"they meet every {_steps(self.every)}"
            how += f" and have {_count(self.delay)} for it" * bool(self.delay)
        return f"each cluster trains a copy, {how}, {self.codec}, {text(self.outer)}"


def _steps(count: int) -> str:
    return f"{count} steps" if count > 1 else "step"


def _count(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"
