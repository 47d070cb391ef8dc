"""In one process an update has all it needs at hand. Over emulated lines it still waits as clusters apart would.

What updates in separate processes would exchange (a tied variable's gradient parts, the scalars of a global norm,
results) is in the plan, and is put on the lines: empty, with its true size. So the bytes and the seconds of an
emulated run are those of a real one; the numbers come from this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from whale_nebula.ir.cut import Exchange, PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle
from whale_nebula.runtime.stage_run import StageRun
from whale_nebula.transport.protocol import Key, KeyKind, Link

Parts = dict[PartKey, tuple[Any, ...]]


@dataclass
class Rehearsal:
    """The exchange of one step. It stands where an update has its peers in several processes."""

    exchange: Sequence[Exchange]
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    rows: int
    patience: float

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """The replicas of a stage share one memory."""

    def parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Let the lines carry what the update of a phase would exchange, round after round; gives the parts back."""
        due = [each for each in self.exchange if each.phase == phase.index]
        for number in sorted({each.round for each in due}):
            self._carry([each for each in due if each.round == number], own)
        return own

    def _carry(self, together: Sequence[Exchange], own: Parts) -> None:
        for each in together:
            size = _size(each, own, self.rows)
            self.links[each.source, each.destination].send(self._key(each), None, raw_bytes=size, size=size)
        for each in together:
            self.links[each.destination, each.source].receive(self._key(each), self.patience)

    def _key(self, each: Exchange) -> Key:
        kind = cast(KeyKind, each.kind)
        return Key(kind, self.program, self.step, each.phase, -1 - each.copy, each.slot, each.source, each.destination)

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Between the fragments of one process nothing crosses."""

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Between the fragments of one process nothing crosses."""
        return ()

    def later(self, bundle: Bundle) -> Sequence[Any]:
        """Between the fragments of one process nothing crosses."""
        return ()


def _size(each: Exchange, own: Parts, rows: int) -> int:
    """Bytes of what is sent: a result has the rows of the batch, a sparse gradient as many as the batch asked for."""
    if each.part is None:
        return each.spec.nbytes(unknown=rows)
    tensor = own[each.part][each.piece]
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
