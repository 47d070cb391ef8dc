"""Who must be told at his next try that there is no other: the worker he wants is gone, or nobody lets him through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

from whale_nebula.errors import NebulaError

_SECONDS = 10.0


class Verdicts:
    """Errors by who asks and whom he asks for. A worker tries again within seconds, so none of them lasts long: a new
    run with the same workers begins without them.

    >>> verdicts = Verdicts(now=lambda: 0.0)
    >>> verdicts.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    True
    >>> verdicts.find("npu/0", "gpu/0").what, verdicts.find("npu/1", "gpu/0")
    ("worker 'gpu/0' is gone", None)

    One that is gone himself asks nothing: what he would be told must not wait for who is started in his place.

    >>> verdicts.gone("npu/0")
    >>> verdicts.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    False
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._given: dict[tuple[str, str], tuple[NebulaError, float]] = {}
        self._gone: set[str] = set()

    def give(self, asks: str, wanted: str, error: NebulaError) -> bool:
        """Tell `asks` so when he next asks for `wanted`; False if he is gone."""
        with self._lock:
            if asks in self._gone:
                return False
            self._given[asks, wanted] = error, self._now() + _SECONDS
            return True

    def remove_old(self, workers: Set[str]) -> None:
        """Forget what nobody has asked for in time, and who is gone and none of these workers."""
        with self._lock:
            self._gone &= workers
            now = self._now()
            self._given = {pair: given for pair, given in self._given.items() if now < given[1]}

    def find(self, asks: str, wanted: str, *, once: bool = False) -> NebulaError | None:
        """What `asks` is to be told, if anything. With `once` he gives up when he hears it."""
        with self._lock:
            error, until = self._given.get((asks, wanted), (None, 0.0))
            if once:
                self._given.pop((asks, wanted), None)
            return error if self._now() < until else None

    def gone(self, worker: str) -> None:
        """A worker is gone: it asks for nobody, and whatever it was to be told is forgotten."""
        with self._lock:
            self._gone.add(worker)
            self._given = {pair: given for pair, given in self._given.items() if pair[0] != worker}

    def asks(self, worker: str) -> None:
        """A worker asks: it is there."""
        with self._lock:
            self._gone.discard(worker)

    def back(self, worker: str) -> None:
        """A worker can be reached again."""
        with self._lock:
            self._given = {pair: given for pair, given in self._given.items() if pair[1] != worker}

    @property
    def all_gone(self) -> frozenset[str]:
        """Those that are gone, and have not come back."""
        with self._lock:
            return frozenset(self._gone)
