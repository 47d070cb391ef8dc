"""The other workers, as an update sees them, with what it waits for them taken apart from what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle
from whale_nebula.report.records import EXCHANGE, Span
from whale_nebula.runtime.clock import StageClock
from whale_nebula.runtime.once_run import Peers
from whale_nebula.runtime.stage_run import StageRun

T = TypeVar("T")
Parts = dict[PartKey, tuple[Any, ...]]


@dataclass
class TimedPeers:
    """Peers whose answers are waited for on the clock of what runs once a step."""

    peers: Peers
    clock: StageClock

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send something: nobody waits for that."""
        self.peers.send(bundle, tensors)

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for what another worker has made."""
        return self._timed(lambda: self.peers.receive(bundle), bundle.phase)

    def later(self, bundle: Bundle) -> Sequence[Any]:
        """Nobody waits for that either."""
        return self.peers.later(bundle)

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Let the replicas of each stage have what all of them have made."""
        self._timed(lambda: self.peers.even(phase, runs), phase.index)

    def parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Exchange the gradient parts of variables that live on several workers."""
        return self._timed(lambda: self.peers.parts(phase, own), phase.index)

    def _timed(self, wait: Callable[[], T], phase: int) -> T:
        began = time.perf_counter()
        found = wait()
        ended = time.perf_counter()
        self.clock.waiting += ended - began
        start = self.clock.start
        self.clock.spans.append(Span(self.clock.lane, EXCHANGE, began - start, ended - start, None, phase))
        return found
