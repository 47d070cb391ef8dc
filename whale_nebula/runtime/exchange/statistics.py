"""Statistics of a step's channels: bytes, seconds and errors by boundary, and codec changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.codec.objects import Codec
from whale_nebula.codec.sizes import by_number, structure_in
from whale_nebula.codec.way import NONE, Way
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.state import ChannelState
from whale_nebula.transport.protocol import Packed
from whale_nebula.wire.frame import frame_count, wire_bytes


class Said(NamedTuple):
    """Lines about a step: those that are new, for the log, all of them, for its report, and why it was left out."""

    fresh: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: str = ""


@dataclass
class Tally:
    """Adds up one step. Stages call it from their threads.

    What was sent and what was taken in are kept apart: in one process both ends of a boundary are here, and its bytes
    count once. `left_out` says why the step is to be left out, and is empty where it is not.
    """

    left_out: str = ""
    _sent: dict[str, BoundaryReport] = field(default_factory=dict)
    _taken: dict[str, BoundaryReport] = field(default_factory=dict)
    _changes: dict[tuple[str, str], None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, report: BoundaryReport) -> None:
        """More of a boundary's direction was sent."""
        with self._lock:
            self._sent[name] = self._sent.get(name, BoundaryReport()) + report

    def took(self, name: str, report: BoundaryReport) -> None:
        """More of it has come."""
        with self._lock:
            self._taken[name] = self._taken.get(name, BoundaryReport()) + report

    def changed(self, name: str, what: str) -> None:
        """Something is otherwise from this step on; where both ends are here, they say the same once."""
        with self._lock:
            self._changes[name, what] = None

    def leave_out(self, why: str) -> None:
        """The step is to be left out; the first reason stays."""
        with self._lock:
            self.left_out = self.left_out or why

    @contextmanager
    def encoding(self, name: str) -> Iterator[None]:
        """Around what makes a tensor small."""
        start = perf_counter()
        yield
        self.add(name, BoundaryReport(encode_seconds=perf_counter() - start))

    @contextmanager
    def decoding(self, name: str) -> Iterator[None]:
        """Around what makes it whole again."""
        start = perf_counter()
        yield
        self.took(name, BoundaryReport(decode_seconds=perf_counter() - start))

    def reports(self) -> dict[str, BoundaryReport]:
        """By name, with what changed among the notes."""
        with self._lock:
            return {name: self._both(name) for name in (*self._sent, *(self._taken.keys() - self._sent.keys()))}

    def changes(self) -> tuple[str, ...]:
        """What changed in this step, in words."""
        with self._lock:
            return tuple(f"{name}: {what}" for name, what in self._changes)

    def notes(self) -> tuple[str, ...]:
        """What is otherwise than one would think, and stays so."""
        with self._lock:
            both = (*self._sent.items(), *self._taken.items())
            return tuple(dict.fromkeys(f"{name}: {note}" for name, report in both for note in report.notes))

    def _both(self, name: str) -> BoundaryReport:
        sent, taken = self._sent.get(name), self._taken.get(name)
        found = sent or taken or BoundaryReport()
        if sent is not None and taken is not None:
            found = replace(sent, decode_seconds=taken.decode_seconds) + BoundaryReport(notes=taken.notes)
        return found + BoundaryReport(notes=tuple(what for of, what in self._changes if of == name))


def note_changes(
    tally: Tally, name: str, way: Way, before: ChannelState, after: ChannelState, codec: Codec | None
) -> ChannelState:
    """Tell, at either end, what is otherwise than in the step of training before: the codec, or the state that it works
    with. Gives the state that remembers it; an error that was measured of another codec is none of this one.
    """
    if way.lossless:  # whole numbers cross as they are where that is less
        return replace(after, error=0.0)
    told, known = str(codec or NONE), after.codec or (NONE if way.auto else "")
    if known and told != known:
        tally.changed(name, f"{known} -> {told}")
    structure = structure_in(codec)
    if structure is not None and before.version != after.version:
        tally.changed(name, f"{structure.keeps} {before.version} -> {after.version}")
    return replace(after, codec=told, error=after.error if told == known else None)


def report_crossing(payload: Any, tensor: Any, codec: Codec | None, error: float | None = None) -> BoundaryReport:
    """What is told of a tensor that has crossed as a payload."""
    raw = _bytes(tensor)
    size = payload.nbytes if isinstance(payload, Packed) else _bytes(payload)
    return BoundaryReport(str(codec or NONE), raw, size, wire_bytes(size), frame_count(size), error=error)


def _bytes(tensor: Any) -> int:
    return prod(int(size) for size in tensor.shape) * int(tf.as_dtype(tensor.dtype).size)


def codec_of(came: Any, way: Way) -> Codec | None:
    """What was used for something that has crossed."""
    if isinstance(came, Packed):
        return by_number(way).get(came.codec)
    return way.codec if way.cast is not None else None
