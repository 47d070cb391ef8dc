"""What updates of several workers exchange: scalars, results, and the gradient parts of shared variables."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import tensorflow as tf

from whale_nebula.ir.plan import Crossing, Cut, PhasePlan
from whale_nebula.passes.exchange import shared_parts
from whale_nebula.runtime.gradients import PartKey
from whale_nebula.runtime.later import Later
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

    def send(self, crossing: Crossing, tensor: Any) -> None:
        """Send a value to every worker that needs it."""
        array = tf.convert_to_tensor(tensor).numpy()
        for destination in crossing.destinations:
            self.links[destination].send(self._key(crossing, destination), array)

    def receive(self, crossing: Crossing) -> Any:
        """Wait for a value of another worker."""
        link = self.links[crossing.source]
        return tf.convert_to_tensor(link.receive(self._key(crossing, self.worker), self.patience))

    def later(self, crossing: Crossing) -> Later:
        """A number that is returned only: it comes when it comes."""
        key = self._key(crossing, self.worker)
        link = self.links[crossing.source]
        link.later(key)
        promise = self.promises.submit(lambda: tf.convert_to_tensor(link.receive(key, self.patience)))
        return Later(promise, self.cut.program.graph.spec(crossing.value))

    def _key(self, crossing: Crossing, destination: str) -> Key:
        slot = self._slots[crossing]
        return self._made("scalar", crossing.phase, slot, crossing.source, destination)

    def _made(self, kind: str, phase: int, slot: int, source: str, destination: str) -> Key:
        return Key(cast(KeyKind, kind), self.program, self.step, phase, -1, slot, source, destination)

    @cached_property
    def _slots(self) -> Mapping[Crossing, int]:
        crossings = [crossing for phase in self.cut.phases for crossing in phase.crossings]
        return {crossing: number for number, crossing in enumerate(crossings)}

    def parts(self, phase: PhasePlan, own: dict[PartKey, tuple[Any, ...]]) -> dict[PartKey, tuple[Any, ...]]:
        """Give the parts of shared variables to the others that hold them, and take theirs."""
        shared = list(shared_parts(self.cut, phase))
        for part in shared:
            if part.source == self.worker:
                array = tf.convert_to_tensor(own[part.key][part.piece]).numpy()
                for destination in part.destinations:
                    key = self._made("part", phase.index, part.slot, self.worker, destination)
                    self.links[destination].send(key, array)
        found: dict[PartKey, list[Any]] = {key: list(tensors) for key, tensors in own.items()}
        for part in shared:
            if self.worker in part.destinations:
                key = self._made("part", phase.index, part.slot, part.source, self.worker)
                array = self.links[part.source].receive(key, self.patience)
                found.setdefault(part.key, []).append(tf.convert_to_tensor(array))
        return {key: tuple(tensors) for key, tensors in found.items()}
