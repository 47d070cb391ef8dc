"""The codec state of an end of a boundary, and the statistics of a step on its channels."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.codec.encoding import NONE, Encoding
from whale_nebula.codec.objects import Codec
from whale_nebula.report.records import BoundaryReport
from whale_nebula.transport.protocol import Packed
from whale_nebula.wire.frame import count_frames, count_wire_bytes

HOST_SEPARATOR = " at "
"""The separator between a channel's name and the host of the end in a state's key."""
ROUTE_SEPARATOR = " by "
"""The separator between a channel's name and its hosts, if replicas cause several channels of one boundary."""

format_codec = functools.cache(str)
"""The text of a codec, cached as it is needed for every tensor."""


@dataclass(frozen=True)
class ChannelState:
    """Codec state of one end of a channel. Frozen: a step creates a new one, and a failed step keeps the old one.

    `steps` counts steps of training that were begun, `rung` is the position on the ladder of precisions, `structure`
    the state of the codec's structure, and `version` the number of times it was sent to the other side. `cache` is the
    cache of differences (a `codec.deltas.Cache`), whose version is then `version`. `codec` is that of the last step
    of training, and `error` its last measured error.
    """

    steps: int = 0
    rung: int = 0
    version: int = 0
    structure: Any = None
    cache: Any = None
    codec: str = ""
    error: float | None = None

    def copy(self) -> ChannelState:
        """A snapshot that later writes do not affect."""
        return self if self.cache is None else replace(self, cache=self.cache.copy())


@dataclass
class States:
    """Codec states of a run by name, shared by all of its programs; those of one `model` are found and put."""

    states_by_name: dict[str, ChannelState] = field(default_factory=dict)
    model: int = 0

    def find_state(self, name: str) -> ChannelState:
        """The state of a channel of this model; a fresh one at first."""
        return self.states_by_name.get(f"model {self.model}: {name}", ChannelState())

    def put(self, name: str, state: ChannelState) -> None:
        """Store the state of a channel."""
        self.states_by_name[f"model {self.model}: {name}"] = state

    def forget(self, models: Collection[int]) -> None:
        """Drop the states of models that were garbage-collected."""
        starts = tuple(f"model {model}: " for model in models)
        for name in [name for name in self.states_by_name if name.startswith(starts)]:
            del self.states_by_name[name]

    def versions(self, ends: Iterable[str] = ()) -> dict[str, int]:
        """The versions that must agree on both sides, by channel: the highest of the local ends. Channels in `ends`
        without a state have version 0.
        """
        found = dict.fromkeys((f"model {self.model}: {name}" for name in ends), 0)
        for name, state in self.states_by_name.items():
            channel = name.partition(HOST_SEPARATOR)[0]
            if state.version:
                found[channel] = max(found.get(channel, 0), state.version)
        return found

    def drop(self, received: Mapping[str, Mapping[str, int]], ends: Iterable[str] = ()) -> list[str]:
        """Drop the states that differ in version, or are missing, in some process with an end; `received` has the
        versions of the other processes, which drop the same. Returns the names of their channels.
        """
        own = self.versions(ends)
        versions: dict[str, set[int]] = {}
        for sheet in (own, *received.values()):
            for channel, version in sheet.items():
                versions.setdefault(channel, set()).add(version)
        unlike = sorted(channel for channel, found in versions.items() if len(found) > 1)
        for name in list(self.states_by_name):
            if name.partition(HOST_SEPARATOR)[0] in unlike:
                del self.states_by_name[name]
        return unlike

    def copy(self) -> dict[str, ChannelState]:
        """A snapshot of all states, for the rollback of a failed step."""
        return {name: state.copy() for name, state in self.states_by_name.items()}

    def restore(self, saved: dict[str, ChannelState]) -> None:
        """Restore a snapshot."""
        self.states_by_name.clear()
        self.states_by_name.update(saved)


@dataclass
class Models:
    """The models of a run, numbered in the order of their first programs, the same in every process.

    >>> class Variable: ...
    >>> models, ours, theirs = Models(), [Variable(), Variable()], [Variable()]
    >>> models.number(ours), models.number(theirs), models.number(ours[1:])
    (0, 1, 0)
    """

    _model_refs: list[list[weakref.ref[Any]]] = field(default_factory=list)

    def number(self, variables: Iterable[Any]) -> int:
        """The model of a program with these variables."""
        given = list(variables)
        for number, refs in enumerate(self._model_refs):
            if any(ref() is each for ref in refs for each in given):
                refs.extend(weakref.ref(each) for each in given if all(ref() is not each for ref in refs))
                return number
        self._model_refs.append([weakref.ref(each) for each in given])
        return len(self._model_refs) - 1

    def find_deleted(self) -> set[int]:
        """The models that were garbage-collected."""
        return {number for number, refs in enumerate(self._model_refs) if refs and all(ref() is None for ref in refs)}


class TensorPosition(NamedTuple):
    """Position of a tensor: its program's step, the micro-batch, and whether the step trains, with the run's seed;
    `first_micro_batch` is the first one of the step on the same route.
    """

    step: int
    micro_batch: int
    training: bool
    seed: int = 0
    first_micro_batch: int = 0

    @property
    def first(self) -> bool:
        """Whether it is the step's first tensor on its route."""
        return self.micro_batch == self.first_micro_batch


@dataclass(frozen=True)
class Residue:
    """What both ends keep of a micro-batch's tensor to encode and decode its gradient: the rows that were sent, whether
    a structure was applied (`has_structure`) and its residue, and the tensor's sizes.
    """

    rows: Any = None
    structure: Any = None
    dims: tuple[int, ...] | None = None
    has_structure: bool = False


class StepLines(NamedTuple):
    """Lines about a step: new ones, for the log; all, for its report; and why it was skipped."""

    fresh: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skip_reason: str = ""


@dataclass
class Tally:
    """Statistics of one step's channels, summed up at its end. Thread-safe.

    Sent and received tensors are counted separately: if both ends of a boundary are in this process, its bytes count
    once. `skip_reason` is the reason to skip the step, or "".
    """

    skip_reason: str = ""
    _sent: defaultdict[str, list[BoundaryReport]] = field(default_factory=lambda: defaultdict(list))
    _received: defaultdict[str, list[BoundaryReport]] = field(default_factory=lambda: defaultdict(list))
    _changes: dict[tuple[str, str], None] = field(default_factory=dict)

    def add(self, name: str, report: BoundaryReport) -> None:
        """Count a tensor sent in a direction of a boundary."""
        self._sent[name].append(report)

    def add_received(self, name: str, report: BoundaryReport) -> None:
        """Count a tensor received in a direction of a boundary."""
        self._received[name].append(report)

    def note_change(self, name: str, what: str) -> None:
        """Record a change from this step on; if both ends are in this process, their equal notes count once."""
        self._changes[name, what] = None

    def skip_step(self, why: str) -> None:
        """Mark the step as skipped; the first reason is kept."""
        self.skip_reason = self.skip_reason or why

    def reports(self) -> dict[str, BoundaryReport]:
        """Statistics by name, with changes among the notes."""
        return {name: self._merge_ends(name) for name in (*self._sent, *(self._received.keys() - self._sent.keys()))}

    def changes(self) -> tuple[str, ...]:
        """The changes of this step as text."""
        return tuple(f"{name}: {what}" for name, what in self._changes)

    def notes(self) -> tuple[str, ...]:
        """Lasting notes on unexpected conditions."""
        both = (*self._sent.items(), *self._received.items())
        return tuple(
            dict.fromkeys(f"{name}: {note}" for name, reports in both for each in reports for note in each.notes)
        )

    def _merge_ends(self, name: str) -> BoundaryReport:
        sent, taken = (
            sum(each[name], BoundaryReport()) if name in each else None for each in (self._sent, self._received)
        )
        found = sent or taken or BoundaryReport()
        if sent is not None and taken is not None:
            found = replace(sent, decode_seconds=taken.decode_seconds) + BoundaryReport(notes=taken.notes)
        return found + BoundaryReport(notes=tuple(what for of, what in self._changes if of == name))


def note_changes(
    tally: Tally, name: str, encoding: Encoding, before: ChannelState, after: ChannelState, codec: Codec | None
) -> ChannelState:
    """Report at either end differences from the previous training step: of the codec, or its state. Returns the state
    that includes them; an error measured with another codec is discarded.
    """
    if encoding.lossless:  # integers cross unchanged if that is smaller
        return replace(after, error=0.0)
    current, known = format_codec(codec or NONE), after.codec or (NONE if encoding.auto else "")
    if known and current != known:
        tally.note_change(name, f"{known} -> {current}")
    structure = None if codec is None else codec.structure
    if structure is not None and before.version != after.version:
        tally.note_change(name, f"{structure.keeps} {before.version} -> {after.version}")
    return replace(after, codec=current, error=after.error if current == known else None)


def report_crossing(payload: Any, x: Any, codec: Codec | None, **more: Any) -> BoundaryReport:
    """Statistics of a tensor that crossed as a payload."""
    raw = prod(x.shape) * int(tf.as_dtype(x.dtype).size)
    size = payload.nbytes if isinstance(payload, Packed) else prod(payload.shape) * int(tf.as_dtype(payload.dtype).size)
    return BoundaryReport(format_codec(codec or NONE), raw, size, count_wire_bytes(size), count_frames(size), **more)
