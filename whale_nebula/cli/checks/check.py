"""One thing that `whale-nebula doctor` has looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and how to mend it.

    `state` is ok, note (it works, but you may want to know), warning (it works now, and will hurt) or bad.
    """

    name: str
    state: str
    found: str
    why: str = ""
    mend: str = ""
