"""Exchange between workers for their updates: scalars, results, and partial gradients of shared variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, cast

import tensorflow as tf

from whale_nebula.ir.cut import Cut, PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle, shared_parts
from whale_nebula.runtime.replicas.exchange import Mates, bundle_tensors, unbundle_tensors
from whale_nebula.runtime.step.scalars import Later
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.transport.protocol import Key, KeyKind, Link


@dataclass
class Wires:
    """The exchange of one worker's update in one step. `promises` is the thread that takes in what nobody waits for."""

    cut: Cut
    worker: str
    links: Mapping[str, Link]
    program: int
    step: int
    patience: float
    promises: Executor
    mates: Mates

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Let the replicas of each stage have what all of them have made."""
        self.mates.even(phase, runs)

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send what another worker needs."""
        self.links[bundle.destination].send(self._key(bundle), bundle_tensors(tensors))

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for what another worker has made."""
        return unbundle_tensors(self.links[bundle.source].receive(self._key(bundle), self.patience), bundle.specs)

    def later(self, bundle: Bundle) -> Sequence[Later]:
        """Numbers that are returned only: they come when they come."""
        key, link = self._key(bundle), self.links[bundle.source]
        link.later(key)

        def come() -> Sequence[Any]:
            return unbundle_tensors(link.receive(key, self.patience), bundle.specs)

        promise = self.promises.submit(come)
        return [Later(promise, place, spec) for place, spec in enumerate(bundle.specs)]

    def _key(self, bundle: Bundle) -> Key:
        return self._make_key("scalar", bundle.phase, bundle.number, bundle.source, bundle.destination)

    def _make_key(self, kind: str, phase: int, slot: int, source: str, destination: str) -> Key:
        return Key(cast(KeyKind, kind), self.program, self.step, phase, -1, slot, source, destination)

    def parts(self, phase: PhasePlan, own: dict[PartKey, tuple[Any, ...]]) -> dict[PartKey, tuple[Any, ...]]:
        """Give the parts of shared variables to the others that hold them, and take theirs."""
        shared = list(shared_parts(self.cut, phase))
        for part in shared:
            if part.source == self.worker:
                array = tf.convert_to_tensor(own[part.key][part.piece]).numpy()
                for destination in part.destinations:
                    key = self._make_key("part", phase.index, part.slot, self.worker, destination)
                    self.links[destination].send(key, array)
        found: dict[PartKey, list[Any]] = {key: list(tensors) for key, tensors in own.items()}
        for part in shared:
            if self.worker in part.destinations:
                key = self._make_key("part", phase.index, part.slot, part.source, self.worker)
                array = self.links[part.source].receive(key, self.patience)
                found.setdefault(part.key, []).append(tf.convert_to_tensor(array))
        return {key: tuple(tensors) for key, tensors in found.items()}
