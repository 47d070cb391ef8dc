"""What updates of several workers exchange: scalars, results, and the gradient parts of shared variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import tensorflow as tf

from whale_nebula.ir.plan import Crossing, Cut, PhasePlan
from whale_nebula.runtime.gradients import PartKey
from whale_nebula.transport.protocol import Key, KeyKind, Link


class Shared(NamedTuple):
    """A tensor of a gradient part that crosses: its number, where it belongs, who has it and who needs it."""

    slot: int
    key: PartKey
    piece: int
    source: str
    destinations: tuple[str, ...]


@dataclass
class Wires:
    """The exchange of one worker's update in one step."""

    cut: Cut
    worker: str
    links: Mapping[str, Link]
    program: int
    step: int
    patience: float

    def send(self, crossing: Crossing, tensor: Any) -> None:
        """Send a value to every worker that needs it."""
        array = tf.convert_to_tensor(tensor).numpy()
        for destination in crossing.destinations:
            self.links[destination].send(self._key(crossing, destination), array)

    def receive(self, crossing: Crossing) -> Any:
        """Wait for a value of another worker."""
        link = self.links[crossing.source]
        return tf.convert_to_tensor(link.receive(self._key(crossing, self.worker), self.patience))

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
        shared = list(self._shared(phase))
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

    def _shared(self, phase: PhasePlan) -> Iterator[Shared]:
        """Every part's tensor that another worker needs too, numbered alike in every process."""
        program = self.cut.program
        workers = {stage: worker.name for worker in self.cut.workers for stage in worker.stages}
        slot = 0
        for number in phase.requests:
            request = program.requests[number]
            for part in sorted(request.parts, key=lambda part: (part.source, part.stage)):
                variable = program.variable_ops.get(request.origins[part.source])
                holders = self.cut.held.get(variable.path, ()) if variable is not None else ()
                source = workers[part.stage]
                others = tuple(worker for worker in holders if worker != source)
                for index in range(len(part.values)):
                    if others:
                        yield Shared(slot, (number, part.source, part.stage), index, source, others)
                    slot += 1
