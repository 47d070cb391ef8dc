"""`nb.compress("auto")`: choose the mildest precision whose transfer time the slowest stage's computation hides.

The sending side chooses before a training step: every tenth step, and as soon as the first steps have been measured.
All directions with this codec on one link change together, because they share the link. Hysteresis: it returns to a
milder rung only with some margin, so that a transfer that takes as long as the computation does not switch back and
forth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from whale_nebula.codec.encoding import NONE, Encoding
from whale_nebula.codec.objects import PLAIN, Codec
from whale_nebula.codec.packing import PREFIX
from whale_nebula.codec.sizes import choose_codec, nbytes
from whale_nebula.report.records import BoundaryReport, duration
from whale_nebula.runtime.exchange.ends import LADDER_EVERY as EVERY
from whale_nebula.runtime.exchange.state import States, Tally
from whale_nebula.spec import Spec
from whale_nebula.wire.frame import count_wire_bytes

MILDER_SHARE = 0.8
"""The share of the computing time within which a milder precision must fit."""

ASSUMED_SECONDS = 0.05
"""The assumed computing seconds of the slowest stage in a step, until measured."""

_UNKNOWN_DIMS = (1, 4096)  # stands for the shape of a tensor of unknown rank


@dataclass(frozen=True)
class StepEstimate:
    """Estimates for a step before it begins.

    `rows` are those of its micro-batches, `compute_seconds` those of the slowest stage (None: not measured yet). By
    link, "a->b": `rates` are bytes a second, where a missing link takes no time; `carried_bytes` are the bytes of the
    previous step. For `unmeasured` links no rate was measured although they transferred data: their `rates` are the
    configured ones.
    """

    rows: Sequence[int] = ()
    compute_seconds: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    carried_bytes: Mapping[str, int] = field(default_factory=dict)
    unmeasured: Collection[str] = ()


class Direction(NamedTuple):
    """A direction of a boundary that is sent from this process, on one route: its name in reports (`label`, shared by
    its routes), the name of its state (`key`), its encoding, the spec of its tensor, and its links.
    """

    label: str
    key: str
    encoding: Encoding
    spec: Spec
    links: tuple[str, ...]


class Choice(NamedTuple):
    """The rung for a link, with its transfer time in a step and the computing time that may hide it."""

    rung: int
    transfer_seconds: float
    compute_seconds: float

    def __str__(self) -> str:
        comparison = "under" if self.transfer_seconds <= self.compute_seconds else "and not under"
        seconds = duration(self.transfer_seconds)
        return f"{seconds} of the link a step, {comparison} {duration(self.compute_seconds)} of computation"


@dataclass
class CodecChooser:
    """Chooses the precision of all directions of a program that this process sends."""

    directions: Sequence[Direction]
    states: States
    training: bool = True
    _has_measured: bool = False
    _steps: int = 0

    def choose(self, estimate: StepEstimate, last: Mapping[str, BoundaryReport], tally: Tally) -> None:
        """Choose rungs before a step; `last` is the previous step's report of its boundaries."""
        self._steps += 1
        first = estimate.compute_seconds is not None and not self._has_measured
        begun = [each for each in self.directions if self._has_begun(each)]
        for each in begun:
            _note_unmeasured(each, estimate, tally)
        if not begun or not (first or any(self._is_due(each) for each in begun)):
            return
        self._has_measured |= first
        chosen = {link: self._choose_rung(link, estimate, last) for each in begun for link in each.links}
        for each in begun:
            self._apply_choice(each, max(chosen[link] for link in each.links), tally)

    def _has_begun(self, direction: Direction) -> bool:
        steps = self.states.find_state(direction.key).steps
        return steps >= direction.encoding.start if self.training else not steps

    def _is_due(self, direction: Direction) -> bool:
        steps = self.states.find_state(direction.key).steps if self.training else self._steps - 1
        return (steps - direction.encoding.start) % EVERY == 0

    def _choose_rung(self, link: str, estimate: StepEstimate, last: Mapping[str, BoundaryReport]) -> Choice:
        rate, known = estimate.rates.get(link), estimate.compute_seconds
        compute_seconds = ASSUMED_SECONDS if known is None else known
        if not rate:
            return Choice(0, 0.0, compute_seconds)
        shared = [each for each in self.directions if link in each.links]
        labels = {each.label: each for each in shared}  # with replicas, several routes have the sizes of one direction
        own = sum(last[label].wire_bytes for label in labels if label in last)
        sizes = [self._estimate_sizes(each, estimate.rows, last.get(label)) for label, each in labels.items()]
        rest = max(estimate.carried_bytes.get(link, 0) - own, 0)
        transfer_seconds = [(rest + sum(rung)) / rate for rung in zip(*sizes, strict=True)]
        current_rung = max(self.states.find_state(each.key).rung for each in shared)
        rung = find_mildest(transfer_seconds, compute_seconds, current_rung)
        return Choice(rung, transfer_seconds[rung], compute_seconds)

    def _estimate_sizes(self, direction: Direction, rows: Sequence[int], last: BoundaryReport | None) -> list[float]:
        """Bytes a step on each rung: by the sizes, corrected by the ratio that was measured on the current rung."""
        found: list[float] = [
            sum(_count_wire_bytes(codec, direction.spec, each) for each in rows) for codec in direction.encoding.rungs
        ]
        now = self.states.find_state(direction.key).rung
        if last is None or last.codec != str(direction.encoding.rungs[now] or NONE) or not found[now]:
            return found
        return [size * last.wire_bytes / found[now] for size in found]

    def _apply_choice(self, direction: Direction, choice: Choice, tally: Tally) -> None:
        state = self.states.find_state(direction.key)
        if choice.rung == state.rung:
            return
        self.states.put(direction.key, replace(state, rung=choice.rung))
        tally.note_change(direction.label, f"auto chooses {direction.encoding.rungs[choice.rung] or NONE}: {choice}")


def _note_unmeasured(direction: Direction, estimate: StepEstimate, tally: Tally) -> None:
    """Add a note if the choice depends on the config alone."""
    for link in direction.links:
        if link in estimate.unmeasured and estimate.compute_seconds is not None:
            rate = estimate.rates.get(link)
            free = "assumes that the link is free, as configured"
            so = f"uses the configured {8e-6 * rate:.4g}mbit" if rate else free
            note = f"auto {so}: too little is written to {link} at a time to measure its rate"
            tally.add(direction.label, BoundaryReport(notes=(note,)))


def find_mildest(transfer_seconds: Sequence[float], compute_seconds: float, current_rung: int) -> int:
    """The least lossy rung whose transfer time is hidden by computation, otherwise the last one.

    >>> find_mildest([4.0, 2.0, 1.0, 0.5], 1.1, current_rung=0), find_mildest([9.0, 5.0, 3.0, 2.0], 1.1, current_rung=0)
    (2, 3)
    >>> find_mildest([4.0, 2.0, 1.0, 0.5], 1.1, current_rung=3), find_mildest([4.0, 2.0, 1.0, 0.5], 1.3, current_rung=3)
    (3, 2)
    """
    for rung, seconds in enumerate(transfer_seconds):
        if seconds <= compute_seconds * (MILDER_SHARE if rung < current_rung else 1.0):
            return rung
    return len(transfer_seconds) - 1


def _count_wire_bytes(codec: Codec | None, spec: Spec, rows: int) -> int:
    """Bytes of a micro-batch on the wire."""
    dims = _UNKNOWN_DIMS if spec.shape is None else spec.fill_shape(rows)
    used = choose_codec(codec, spec.dtype, dims)
    return count_wire_bytes(nbytes((used or PLAIN).arrays(dims, spec.dtype)) + PREFIX * (used is not None))
