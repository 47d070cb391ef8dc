"""The client side of `mode="async"`: a cluster pushes its difference and pulls the server's changes between steps.

Every so many steps it takes in the answer to what it pushed last, and pushes what it has gone since. So an exchange has
as many steps to happen in as lie between two of them, and nobody waits but for one that is too far behind.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import google_crc32c
import numpy as np

from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.runtime.local_sgd.async_server import Server
from whale_nebula.runtime.local_sgd.deltas import Differences, Flat
from whale_nebula.runtime.local_sgd.topology import Ends
from whale_nebula.wire.tensor import Bytes


class Pushed(NamedTuple):
    """A difference that is on its way: what the cluster had then, and the shared weights that it will know of."""

    own: Numbers
    known: Future[Numbers]


@dataclass
class Pushes:
    """One cluster's side. The first cluster's first worker has the `server`."""

    flat: Flat
    ends: Ends
    every: int
    differences: Differences
    server: Server | None = None
    steps: int = 0
    met: int = 0
    waited: float = 0.0
    fragments: int = 1
    _known: Numbers | None = None
    _on_way: Pushed | None = None
    _told: int = 0
    _agreed: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-pushes"))

    def begin(self) -> None:
        """From here on all clusters go their own way: what each has now is what all share."""
        if self._known is None:
            self._known = self.flat.read((0, self.flat.total))
            if self.server is not None:
                self.server.begin(self._known)

    def tell(self) -> None:
        """A step is over: every so many, take the answer to the last push, and push again."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._take()
            self._push()

    def take(self) -> None:
        """Answers are taken before the next push."""

    def settle_tell(self) -> None:
        """Everybody wants the weights now: push what was gone since."""
        if not self.settled:
            self._take()
            self._push(last=True)

    def settle_take(self) -> None:
        """Then all clusters have the same weights, bit for bit."""
        self._take(exactly=True)
        self._told = self.steps
        self._agreed = google_crc32c.value(b"" if self._known is None else self._known.tobytes())

    @property
    def settled(self) -> bool:
        """Whether nothing was gone since all had the same."""
        return self.steps == self._told

    def restart(self) -> None:
        """The weights were replaced in all clusters, by the same ones."""
        if self._known is not None:
            self._known = self.flat.read((0, self.flat.total))
            self.differences.forget()
            if self.server is not None:
                self.server.again(self._known)

    def digest(self) -> int:
        """A checksum of what all had when they met last."""
        return self._agreed

    def close(self) -> None:
        """Let the threads go."""
        if self.server is not None:
            self.server.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ a difference's way
    def _push(self, *, last: bool = False) -> None:
        own = self.flat.read((0, self.flat.total))
        known = own if self._known is None else self._known
        self.met += 1
        self._on_way = Pushed(own, self._thread.submit(self._exchange, self.met, known, own, last))

    def _exchange(self, when: int, known: Numbers, own: Numbers, last: bool) -> Numbers:
        data, _ = self.differences.encode(0, known - own)
        answer = self._ask_server(when, data, last)
        if last:
            self.differences.forget()
            return np.ascontiguousarray(answer).view(np.float32)
        return known + self.differences.decode(answer, known.size)

    def _ask_server(self, when: int, data: Bytes, last: bool) -> Bytes:
        if self.server is not None:
            answer = self.server.take(self.ends.cluster, when, data, last=last)
            self.ends.pass_on(when, answer)
            return answer
        self.ends.push(when, np.concatenate([np.array([last], np.uint8), data]), 4 * self.flat.total)
        return self.ends.pull(when)

    def _take(self, *, exactly: bool = False) -> None:
        if self._on_way is None:
            return
        began = time.perf_counter()
        known = self._on_way.known.result()
        self.waited += time.perf_counter() - began
        if exactly:
            self.flat.write((0, self.flat.total), known)
        else:
            self.flat.add((0, self.flat.total), known - self._on_way.own)
        self._known, self._on_way = known.copy(), None
