"""The parameter server of `mode="async"`: holds the shared weights and applies each cluster's difference as it arrives.

It is in the process of the first cluster's first worker, with a thread for each of the other clusters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from whale_nebula.codec.way import Way
from whale_nebula.errors import DeadlineError, LinkClosedError
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.runtime.local_sgd.deltas import Differences
from whale_nebula.runtime.local_sgd.topology import Ends
from whale_nebula.wire.tensor import Bytes

_LOOK = 1.0
"""Seconds after which a thread that waits for a push looks whether the run is over."""
_WHOLE = 0


@dataclass
class Server:
    """Serves clusters, which count by their shares. None is more than `staleness` rounds ahead of the slowest.

    As a run ends it goes on until the other clusters have ended theirs, where it `waits`.

    What a cluster says is last before all meet is answered when all have said so, with the weights themselves.
    """

    ends: Ends
    way: Way
    shares: Mapping[str, float]
    staleness: int
    waits: bool = False
    shared: Numbers | None = None
    failure: BaseException | None = None
    _known: dict[str, Numbers] = field(default_factory=dict)
    _back: dict[str, Differences] = field(default_factory=dict)
    _rounds: dict[str, float] = field(default_factory=dict)
    _met: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, shared: Numbers) -> None:
        """From these weights on."""
        self.shared = shared.copy()
        self._known = {cluster: shared.copy() for cluster in self.ends.firsts}
        self._back = {cluster: Differences(self.way) for cluster in self.ends.firsts}
        self._rounds = dict.fromkeys(self.ends.firsts, 0)
        for cluster in self.ends.others:
            named = f"nebula-serves-{cluster}"
            self._threads.append(threading.Thread(target=self._serve, args=(cluster,), name=named, daemon=True))
            self._threads[-1].start()

    def take(self, cluster: str, when: int, data: Bytes, *, last: bool) -> Bytes:
        """Take a cluster's difference; gives the answer, once it may go on."""
        gone = self._back[cluster].decode(data, self._size)
        with self._changed:
            shared = self._known[cluster] if self.shared is None else self.shared
            self.shared = shared - np.float32(self.shares[cluster]) * gone
            self._rounds[cluster] = inf if last else when
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or self.failure is not None or self._may_go(cluster, last))
            if self.failure is not None:
                raise self.failure
            return self._settled_weights(cluster, when) if last else self._answer(cluster)

    def again(self, shared: Numbers) -> None:
        """From these weights on; all clusters have them, and none has pushed anything since they met."""
        with self._changed:
            self.shared = shared.copy()
            self._known = {cluster: shared.copy() for cluster in self.ends.firsts}

    def close(self) -> None:
        """Let all threads go. A cluster that is slower still wants its answers."""
        for thread in self._threads if self.waits and self.failure is None else ():
            thread.join(self.ends.patience)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def _size(self) -> int:
        return 0 if self.shared is None else self.shared.size

    def _may_go(self, cluster: str, last: bool) -> bool:
        if last:
            return all(each == inf for each in self._rounds.values()) or bool(self._met)
        return self._rounds[cluster] - min(self._rounds.values()) <= self.staleness

    def _answer(self, cluster: str) -> Bytes:
        """What has changed since this cluster asked last, as far as it was told."""
        known = self._known[cluster]
        shared = known if self.shared is None else self.shared
        data, there = self._back[cluster].encode(_WHOLE, shared - known)
        self._known[cluster] = known + there
        return data

    def _settled_weights(self, cluster: str, when: int) -> Bytes:
        """The weights themselves, for all clusters the same; the last one to have them opens the next rounds."""
        shared = self._known[cluster] if self.shared is None else self.shared
        self._known[cluster] = shared.copy()
        self._back[cluster].forget()
        self._met[cluster] = when
        if len(self._met) == len(self._rounds):
            self._rounds = dict(self._met)
            self._met = {}
        return shared.view(np.uint8)

    def _serve(self, cluster: str) -> None:
        """A cluster's thread."""
        when = 0
        try:
            while not self._over:
                try:
                    data = self.ends.pushed(when + 1, cluster, _LOOK)
                except DeadlineError:
                    continue
                when += 1
                answer = self.take(cluster, when, data[1:], last=bool(data[0]))
                self.ends.answer(when, cluster, answer, 4 * self._size)
        except LinkClosedError as closed:
            self._fail(closed)
        except BaseException as failure:
            self._fail(failure)
            raise

    def _fail(self, failure: BaseException) -> None:
        """A cluster that is gone is waited for by nobody; whoever would, gets to know why."""
        with self._changed:
            if not self._over:
                self.failure = failure
            self._changed.notify_all()
