"""The channels of a plan that have an end in this process, by boundary and direction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from whale_nebula.codec.registry import parse
from whale_nebula.codec.way import NONE, parse_way
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.ir.routing import Routing
from whale_nebula.passes.batch import entries_per_row
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import Auto, Direction, Outlook
from whale_nebula.runtime.exchange.crossing import Crossing, Crossings, Lane
from whale_nebula.runtime.exchange.ends import SKIP, Incoming, Outgoing
from whale_nebula.runtime.exchange.state import At, ChannelState, Residue, Said, States, Tally
from whale_nebula.spec import Value
from whale_nebula.transport.protocol import Packed


@dataclass
class Channels:
    """Encodes and decodes what crosses between hosts. `seed` is the run's.

    `here` says which hosts this process is, `clusters` in which clusters hosts stand, where they are not clusters.
    """

    cut: Cut
    routing: Routing
    states: States
    seed: int = 0
    here: Callable[[str], bool] = lambda host: True
    clusters: Mapping[str, str] = field(default_factory=dict)
    _tally: Tally = field(default_factory=Tally)
    _residues: dict[tuple[Value, int, str], Residue] = field(default_factory=dict)
    _before: dict[str, ChannelState] = field(default_factory=dict)
    _slices: Sequence[Sequence[Any]] = ()
    _rows: Sequence[int] = ()
    _said: set[str] = field(default_factory=set)
    _ends: dict[tuple[Value, str, str, bool], Any] = field(default_factory=dict)

    def begin(
        self, slices: Sequence[Sequence[Any]] = (), outlook: Outlook | None = None, rows: Sequence[int] = ()
    ) -> None:
        """A step begins; `slices` are the inputs of each micro-batch and `rows` their numbers of rows, `outlook` is
        what is known of it beforehand.
        """
        self._slices, self._rows = slices, rows
        last, self._tally = self._tally.reports(), Tally()
        self._residues.clear()
        self._before = self.states.saved()
        self._auto.choose(outlook or Outlook(), last, self._tally)

    def done(self) -> None:
        """It is over: nothing of its batch is kept."""
        self._slices = self._rows = ()
        self._residues.clear()
        self._before = {}

    def undo(self) -> None:
        """It failed, or is left out: all states are as they were before it."""
        self.states.restore(self._before)

    def encode(self, value: Value, tensor: Any, home: str, step: int, micro_batch: int, rows: Any = None) -> Any:
        """What crosses for a value that a stage of `home` has made."""
        crossing = self.crossings.by_value[value]
        end, lane = self._end(crossing, home, micro_batch, out=True)
        place, at = (
            self._place(crossing, micro_batch, home),
            At(step, micro_batch, self._training, self.seed, lane.lead),
        )
        residue = self._residues.get(place) if crossing.back else None
        payload, residue = end.send(tensor, at, self._tally, residue, rows, self._ids(crossing, micro_batch))
        if not crossing.back:
            self._residues[place] = residue
        return payload

    def decode(self, value: Value, came: Any, host: str, micro_batch: int) -> Any:
        """The tensor that a stage of `host` reads."""
        crossing = self.crossings.by_value[value]
        end, lane = self._end(crossing, host, micro_batch, out=False)
        place, first = self._place(crossing, micro_batch, host), self._training and micro_batch == lane.lead
        if isinstance(came, Packed) and self._rows and crossing.boundary is not None:
            # a few bytes may unpack to any number of rows: refuse what has another number than the micro-batch
            entries = self._entries.get(crossing.boundary.value)
            due = came.dims[0] if entries is None else entries * self._rows[micro_batch]
            if came.dims[0] != due:
                raise RemoteProtocolError(
                    f"{end.name} came with {came.dims[0]} rows, where {due} are due", where=end.name
                )
        residue = self._residues.get(place) if crossing.back else None
        x, residue = end.take(came, self._tally, residue, self._ids(crossing, micro_batch), first=first)
        if not crossing.back:
            self._residues[place] = residue
        return x

    def _place(self, crossing: Crossing, micro_batch: int, host: str) -> tuple[Value, int, str]:
        return crossing.boundary.value if crossing.boundary else crossing.value, micro_batch, host

    @cached_property
    def _entries(self) -> Mapping[Value, int]:
        """Of what may come encoded, with a first axis that only a step knows: how many entries a row has there."""
        program = self.cut.program
        ways = {each.value: (each.codec, each.backward_codec) for each in self.cut.boundaries}
        coded = [value for value, texts in ways.items() if any(parse_way(text).coded for text in texts)]
        return entries_per_row(program, [n for n in coded if (program.graph.spec(n).shape or (0,))[0] is None])

    def _ids(self, crossing: Crossing, micro_batch: int) -> Any:
        """The ids of a micro-batch's samples, where differences of them are sent."""
        ids = None if crossing.back or crossing.boundary is None else crossing.boundary.ids
        if ids is None:
            return None
        leaf = self.cut.program.leaf_ops[ids.op]
        return np.asarray(self._slices[micro_batch][leaf]).astype(np.int64).reshape(-1)

    def takes(self, value: Value) -> bool:
        """Whether a value crosses by a channel; else it goes as it is."""
        way = self.crossings.by_value[value].way
        return not way.plain or way.nonfinite == SKIP

    def reports(self) -> Mapping[str, BoundaryReport]:
        """What this step measured, by direction of boundary."""
        return self._tally.reports()

    def told(self) -> Said:
        """What is to be said of this step. Of one that is left out nothing has changed."""
        out, notes = self._tally.left_out, self._tally.notes()
        changes = () if out else self._tally.changes()
        fresh = [note for note in notes if note not in self._said]
        self._said.update(fresh)
        return Said((*changes, *fresh), (*changes, *notes, *([f"left out: {out}"] if out else [])), out)

    @property
    def left_out(self) -> str:
        """Why this step is to be left out; empty where it is not."""
        return self._tally.left_out

    def leave_out(self, reasons: Sequence[str]) -> None:
        """All processes have said why; they all report the same."""
        self._tally.left_out = next(iter(reasons), "")

    @cached_property
    def may_skip(self) -> bool:
        """Whether any boundary asks that steps with a NaN be left out: then all processes must agree on each step."""
        return self._training and any(each.way.nonfinite == SKIP for each in self.crossings.of_boundaries)

    def boundaries(self) -> tuple[Boundary, ...]:
        """Those of the plan, as they crossed in this step: on a ramp, and where the line decides."""
        codecs = {name: report.codec for name, report in self._tally.reports().items()}
        found = {each.value: each for each in self.cut.boundaries}
        for each in self.crossings.of_boundaries:
            way, codec = each.way, codecs.get(each.label)
            if each.boundary is not None and codec is not None and (way.auto or way.ladder or way.start):
                used = None if codec in ("", NONE) else parse(codec)
                text = str(replace(way, codec=used, auto=False, ladder=(), start=0))
                crossed = found[each.boundary.value]
                crossed = replace(crossed, backward_codec=text) if each.back else replace(crossed, codec=text)
                found[crossed.value] = crossed
        return tuple(found.values())

    def _end(self, crossing: Crossing, host: str, micro_batch: int, *, out: bool) -> tuple[Any, Lane]:
        lane = self.crossings.lane(crossing, micro_batch)
        key = (crossing.value, host, lane.name, out)
        if key not in self._ends:
            state = self.crossings.state_key(crossing, host, lane.name, out=out)
            ends = crossing.label, state, crossing.way, self.states, crossing.back
            if out:
                self._ends[key] = Outgoing(*ends, stage=self.cut.program.stages[crossing.source].key)
            else:
                self._ends[key] = Incoming(*ends, dtype=crossing.spec.dtype)
        return self._ends[key], lane

    @cached_property
    def _auto(self) -> Auto:
        return Auto(tuple(self._directions()), self.states, self._training)

    def _directions(self) -> Iterator[Direction]:
        """Those that are sent from here and leave the choice of their codec to the line."""
        for each in self.crossings.of_boundaries:
            links = self.crossings.links(each) if each.way.auto else ()
            for lane in self.crossings.lanes(each) if links else ():
                if self.here(lane.home):
                    key = self.crossings.state_key(each, lane.home, lane.name, out=True)
                    yield Direction(each.label, key, each.way, each.spec, links)

    @cached_property
    def crossings(self) -> Crossings:
        """What crosses, by value."""
        return Crossings(self.cut, self.routing, self.clusters)

    @cached_property
    def _training(self) -> bool:
        return bool(self.cut.program.requests)


@dataclass
class Models:
    """The models of a run, numbered as their first programs come, which is the same order in every process.

    >>> class Variable: ...
    >>> models, ours, theirs = Models(), [Variable(), Variable()], [Variable()]
    >>> models.number(ours), models.number(theirs), models.number(ours[1:])
    (0, 1, 0)
    """

    _known: list[list[weakref.ref[Any]]] = field(default_factory=list)

    def number(self, variables: Iterable[Any]) -> int:
        """The model of a program with these variables."""
        given = list(variables)
        for number, refs in enumerate(self._known):
            if any(ref() is each for ref in refs for each in given):
                refs.extend(weakref.ref(each) for each in given if all(ref() is not each for ref in refs))
                return number
        self._known.append([weakref.ref(each) for each in given])
        return len(self._known) - 1

    def gone(self) -> set[int]:
        """The models of which nothing is left."""
        return {number for number, refs in enumerate(self._known) if refs and all(ref() is None for ref in refs)}
