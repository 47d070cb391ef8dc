"""Who is told of every step, told from a thread of its own: the training thread only hands the report over.

So a slow terminal or disk costs a step nothing but the hand-over, and numbers that are still on a device are fetched
beside the training.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Protocol

from whale_nebula.report.report import Report

TICK_SECONDS = 0.25
_BACKLOG = 256  # more reports than this do not wait: then the training does
_PATIENCE = 30.0

log = logging.getLogger("whale_nebula")


class Watcher(Protocol):
    """Shows or writes what happens."""

    def step(self, report: Report) -> None:
        """A step has ended."""

    def tick(self) -> None:
        """A quarter of a second has gone."""

    def close(self) -> None:
        """The run ends: show what was not shown yet."""


class Watching:
    """Hands reports to watchers. One that fails is named in the log and told no more; the training goes on."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)
        self._told: queue.Queue[Report | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._work, name="nebula-report", daemon=True)
        self._thread.start()

    def tell(self, report: Report) -> None:
        """A step has ended."""
        self._told.put(report)

    def close(self) -> None:
        """Tell all that was handed over, and end."""
        self._told.put(None)
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        while True:
            try:
                report = self._told.get(timeout=TICK_SECONDS)
            except queue.Empty:
                self._each(methodcaller("tick"))
                continue
            if report is None:
                break
            self._each(methodcaller("step", report))
        self._each(methodcaller("close"))

    def _each(self, act: Callable[[Watcher], object]) -> None:
        for watcher in list(self._watchers):
            try:
                act(watcher)
            except Exception as failure:
                self._watchers.remove(watcher)
                log.warning("%s is not told of steps any more: %s", watcher, failure)
