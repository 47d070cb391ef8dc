"""Who must be told at his next try that there is no other: the worker he wants is gone, or nobody lets him through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from whale_nebula.errors import NebulaError

_SECONDS = 10.0


class Verdicts:
    """Errors by who asks and whom he asks for. A worker tries again within seconds, so none of them lasts long: a new
    run with the same workers begins without them.

    >>> verdicts = Verdicts(now=lambda: 0.0)
    >>> verdicts.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    >>> verdicts.find("npu/0", "gpu/0").what, verdicts.find("npu/1", "gpu/0")
    ("worker 'gpu/0' is gone", None)
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._given: dict[tuple[str, str], tuple[NebulaError, float]] = {}

    def give(self, asks: str, wanted: str, error: NebulaError) -> None:
        """Tell `asks` so when he next asks for `wanted`."""
        with self._lock:
            self._given[asks, wanted] = error, self._now() + _SECONDS

    def find(self, asks: str, wanted: str, *, once: bool = False) -> NebulaError | None:
        """What `asks` is to be told, if anything. With `once` he gives up when he hears it."""
        with self._lock:
            error, until = self._given.get((asks, wanted), (None, 0.0))
            if once:
                self._given.pop((asks, wanted), None)
            return error if self._now() < until else None

    def forget(self, *, asks: str | None = None, wanted: str | None = None) -> None:
        """`wanted` is back, or `asks` is gone."""
        with self._lock:
            self._given = {pair: given for pair, given in self._given.items() if pair[0] != asks and pair[1] != wanted}
