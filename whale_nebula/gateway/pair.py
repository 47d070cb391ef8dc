"""A pair of workers at a gateway: its two halves come in any order, again and again, and are joined here."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from whale_nebula.errors import TransportError
from whale_nebula.gateway.half import Half, Side
from whale_nebula.gateway.inspection import Inspection
from whale_nebula.transport.grpc.limits import TokenBucket

_LOG = logging.getLogger("whale_nebula.gateway")
_INSISTS_SECONDS = _FORGETS_SECONDS = 5.0
_ARRIVALS, _ARRIVALS_A_SECOND = 100, 2.0
REPLACED = "another connection has taken its place"


class Pair:
    """A worker of this cluster (`here`) and one of another (`there`).

    Both gateways may dial the other one for the same pair. Of two attempts that cross one must win: that of the
    gateway whose cluster has the later name. Here it `yields` to the other's, or has its own way.
    """

    def __init__(
        self,
        here: str,
        there: str,
        inspection: Inspection,
        ended: Callable[[Pair, Half, str], None],
        *,
        yields: bool,
        grace: float = 5.0,
        remembers: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.here, self.there, self.inspection, self.yields = here, there, inspection, yields
        self._arrivals = TokenBucket(_ARRIVALS, _ARRIVALS_A_SECOND)
        self._met = float("-inf")  # when the two have parted
        self._ended, self._grace, self._remembers, self._now = ended, grace, remembers, now
        self._lock = threading.Lock()
        self._halves: dict[Side, Half] = {}
        self._attempts = 0
        self._touched = now()
        self._refused = float("-inf")
        self._retired = False

    def __str__(self) -> str:
        return f"{self.here} - {self.there}"

    def half(self, side: Side) -> Half | None:
        """The present half of a side."""
        with self._lock:
            return self._halves.get(side)

    @property
    def known(self) -> bool:
        """Whether the two are joined, or were so lately that they still want to be."""
        with self._lock:
            joined = any(half.partner is not None for half in self._halves.values())
            return joined or self._now() - self._met < self._remembers

    @contextlib.contextmanager
    def attempt(self, near: Half) -> Iterator[bool]:
        """While this gateway dials the other one for `near`; False: it is not needed."""
        with self._lock:
            needed = near.fresh
            self._attempts += needed
        try:
            yield needed
        finally:
            with self._lock:
                self._attempts -= needed

    def retire(self) -> bool:
        """Whether nobody is there, or was lately: then the pair takes nobody any more, and can be forgotten."""
        with self._lock:
            wanted = self._halves or self._attempts or self._now() - self._met < self._remembers
            self._retired = self._retired or not (wanted or self._now() - self._touched < _FORGETS_SECONDS)
            return self._retired

    def _check_alive(self) -> None:
        if self._retired:
            raise TransportError(f"{self} was just forgotten here", why="it is made anew at the next attempt")

    def check_rate(self) -> None:
        """One more half comes: raises if they come too often, as each is written into the audit log."""
        with self._lock:
            self._check_alive()
            self._touched = self._now()
        if not self._arrivals.take():
            raise TransportError(f"streams of {self} come too often", why="each is written into the audit log")

    def give_way(self) -> None:
        """The other gateway has dialled: raises if that has crossed our own attempt, and ours is used."""
        with self._lock:
            self._give_way()

    def arrive(self, half: Half) -> None:
        """A half has come; it takes the place of the one before. Raises if it has crossed ours, and ours is used."""
        with self._lock:
            self._check_alive()
            if half.side is Side.FAR:
                self._give_way()
            before = self._take(half)
        self._settle(half, before)

    def reach(self, half: Half, near: Half) -> bool:
        """Take what was dialled for `near`; False if that is joined already, or over."""
        with self._lock:
            if self._halves.get(Side.NEAR) is not near or not near.fresh:
                return False
            before = self._take(half)
        self._settle(half, before)
        return True

    def _give_way(self) -> None:
        """The other gateway has dialled this one. If it does so again, it does not know of our stream any more."""
        far = self._halves.get(Side.FAR)
        standing = far is not None and far.dialled and not far.connection.over
        if self.yields or not (standing or self._attempts):
            return
        insists = self._now() - self._refused < _INSISTS_SECONDS
        if self._attempts or not insists:
            self._refused = self._now()
            raise TransportError("two streams of one pair have crossed", why="the other one is used")

    def _take(self, half: Half) -> Half | None:
        other = self._halves.get(half.side.other)
        before = self._halves.get(half.side)
        self._halves[half.side] = half
        if other is not None and other.fresh:
            half.join(other)
        return before

    def _settle(self, half: Half, before: Half | None) -> None:
        if before is not None:
            before.connection.end(REPLACED)
        half.connection.on_end(partial(self._part, half))

    def end(self, why: str) -> None:
        """Break both halves."""
        with self._lock:
            halves = list(self._halves.values())
        for half in halves:
            half.connection.end(why)

    def _part(self, half: Half, why: str) -> None:
        """A half is over. What its worker has sent before an end in order is still handed on."""
        with self._lock:
            if self._halves.get(half.side) is half:
                del self._halves[half.side]
            partner = half.partner
            if partner is not None:
                self._met = self._now()
        if partner is not None and half.in_order and not half.fault:
            partner.connection.finish()
            self._end_later(partner, why)
        elif partner is not None:
            partner.connection.end(f"its other half is over: {why}")
        self._ended(self, half, why)

    def _end_later(self, half: Half, why: str) -> None:
        later = threading.Timer(self._grace, half.connection.end, (why,))
        later.daemon = True
        later.start()
        half.connection.on_end(lambda _: later.cancel())
