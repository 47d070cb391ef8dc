"""What a run's time is spent on, over all its starts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from whale_nebula.checkpoint.manifest import Manifest
from whale_nebula.report.goodput import Goodput


@dataclass
class Spent:
    """Counts seconds. `before` is what a checkpoint says of earlier starts; `ended` is when the last of them ended, in
    seconds since 1970, where a launcher has seen it.
    """

    ended: float | None = None
    before: Goodput = field(default_factory=Goodput)
    _now: Goodput = field(default_factory=Goodput)
    _began: float | None = None

    def resume(self, manifest: Manifest) -> None:
        """Go on from a checkpoint: what was done after it is lost."""
        self.before = Goodput(**manifest.spent)
        if self.ended is not None and manifest.at:
            self._now = replace(self._now, lost=max(0.0, self.ended - manifest.at))

    def begin(self) -> None:
        """A step begins: the first one ends the recovery."""
        if self._began is None:
            self._began = time.monotonic()
            if self.ended is not None and self.before.total:
                self._now = replace(self._now, recovery=max(0.0, time.time() - self.ended))

    @contextlib.contextmanager
    def count_step(self) -> Iterator[None]:
        """Around a step."""
        began = time.monotonic()
        yield
        self._now = replace(self._now, steps=self._now.steps + time.monotonic() - began)

    @contextlib.contextmanager
    def count_saving(self) -> Iterator[None]:
        """Around what training waits for while it is saved."""
        began = time.monotonic()
        yield
        self._now = replace(self._now, saving=self._now.saving + time.monotonic() - began)

    def sum_up(self) -> Goodput:
        """All starts together."""
        passed = 0.0 if self._began is None else time.monotonic() - self._began
        now = replace(self._now, total=passed + self._now.lost + self._now.recovery)
        return Goodput(
            *(mine + theirs for mine, theirs in zip(asdict(now).values(), asdict(self.before).values(), strict=True))
        )
