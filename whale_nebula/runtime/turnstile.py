"""Replicas of one process go forward in the order of their micro-batches, where the order can be told afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from whale_nebula.errors import StateError


@dataclass
class Turnstile:
    """Lets micro-batch m pass once m - 1 has: what both write (the seeds of a dropout) must not be left to chance.

    >>> gate = Turnstile()
    >>> with gate.turn(0), contextlib.suppress(StateError):
    ...     pass
    >>> gate.next
    1
    """

    next: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def turn(self, micro_batch: int) -> Iterator[None]:
        """Wait for the turn of a micro-batch; when it is done, the next one may go."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.next == micro_batch)
            if self._closed:
                raise StateError("another replica of the stage failed", why="the step is given up")
        yield
        with self._changed:
            self.next = micro_batch + 1
            self._changed.notify_all()

    def abort(self) -> None:
        """A replica failed: nobody's turn comes any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
