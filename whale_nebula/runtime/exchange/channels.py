"""The channels of a plan that have an end in this process, by boundary and direction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.registry import parse
from whale_nebula.codec.way import NONE, Way, parse_way
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.ir.routing import Routing
from whale_nebula.passes.batch import entries_per_row
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import Auto, Direction, Outlook
from whale_nebula.runtime.exchange.coding import SKIP, decode_cast
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import (
    AT,
    LANE,
    At,
    ChannelState,
    Residue,
    Said,
    States,
    Tally,
    codec_of,
    note_changes,
    report_crossing,
)
from whale_nebula.spec import Value
from whale_nebula.transport.protocol import Packed


@dataclass(frozen=True)
class Routes:
    """The ways of all boundaries and of their gradients. `clusters` says where hosts stand that are no clusters."""

    cut: Cut
    routing: Routing
    clusters: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def of(self) -> Mapping[Value, tuple[Boundary, bool]]:
        """For what crosses, the boundary that it belongs to, and whether it is that boundary's gradient."""
        boundaries = {boundary.value: boundary for boundary in self.cut.boundaries}
        found = {value: (boundary, False) for value, boundary in boundaries.items()}
        for request in self.cut.program.requests:
            for flow in request.flows:
                if flow.boundary in boundaries:
                    found[flow.gradient] = (boundaries[flow.boundary], True)
        return found

    def way(self, value: Value) -> Way:
        """How it crosses."""
        boundary, back = self.of[value]
        return parse_way(boundary.backward_codec if back else boundary.codec)

    def label(self, boundary: Boundary, *, back: bool) -> str:
        """A direction of a boundary in reports: "b0 gpu->npu", and "b0 npu->gpu" for its gradient."""
        stages = self.cut.program.stages
        ends = stages[boundary.source].key, ",".join(stages[stage].key for stage in boundary.destinations)
        return f"b{boundary.slot} {'->'.join(ends[::-1] if back else ends)}"

    def key(self, value: Value, host: str, lane: str = "", *, out: bool) -> str:
        """The name of what a host remembers of it, where it sends it (`out`) or takes it in."""
        return f"{self._name(value, lane)}{AT}{host}{'' if out else ', incoming'}"

    def _name(self, value: Value, lane: str) -> str:
        return f"{self._names[value]}{LANE}{lane}" if lane else self._names[value]

    def lane(self, value: Value, micro_batch: int) -> str:
        """The hosts that a micro-batch of it joins; empty where that is the same for all of them."""
        ends = (self.maker(value), *self._readers(value))
        if self.routing.replicated.isdisjoint(ends):
            return ""
        home, *others = dict.fromkeys(self.routing.host(stage, micro_batch) for stage in ends)
        return f"{home}->{','.join(others)}"

    def lanes(self, value: Value) -> tuple[tuple[str, str], ...]:
        """Every lane of it, with the host that sends."""
        count = self.cut.program.pipeline.micro_batch
        found = ((self.routing.host(self.maker(value), m), self.lane(value, m)) for m in range(count))
        return tuple(dict.fromkeys(found))

    def lead(self, value: Value, micro_batch: int) -> int:
        """The first micro-batch of a step that takes the same lane."""
        lane = self.lane(value, micro_batch)
        return next(m for m in range(micro_batch + 1) if self.lane(value, m) == lane) if lane else 0

    def before(self, value: Value, micro_batch: int) -> int | None:
        """The last micro-batch of a step before this one that takes the same lane."""
        lane = self.lane(value, micro_batch)
        return next((m for m in reversed(range(micro_batch)) if self.lane(value, m) == lane), None)

    def ends(self, here: Callable[[str], bool]) -> tuple[str, ...]:
        """The names of the channels that have an end here, as states have them before the host."""
        found = (
            self._name(value, self.lane(value, m))
            for value in self.of
            for m in range(self.cut.program.pipeline.micro_batch)
            if self.way(value).coded and self._crosses(value, m, here)
        )
        return tuple(dict.fromkeys(found))

    def _crosses(self, value: Value, micro_batch: int, here: Callable[[str], bool]) -> bool:
        hosts = {self.routing.host(stage, micro_batch) for stage in (self.maker(value), *self._readers(value))}
        return len(set(map(self._cluster, hosts))) > 1 and any(map(here, hosts))

    def maker(self, value: Value) -> int:
        """The stage that makes it."""
        return self._flows.get(value, self.of[value][0].source)

    def _readers(self, value: Value) -> tuple[int, ...]:
        boundary, back = self.of[value]
        return (boundary.source,) if back else boundary.destinations

    def links(self, value: Value) -> tuple[str, ...]:
        """The links that it takes, "gpu->npu"; none where all who read it are where it is made."""
        home, *others = (self._cluster(self.routing.first(s)) for s in (self.maker(value), *self._readers(value)))
        return tuple(f"{home}->{other}" for other in dict.fromkeys(others) if other != home)

    def _cluster(self, host: str) -> str:
        return self.clusters.get(host, host)

    @cached_property
    def _flows(self) -> Mapping[Value, int]:
        return {flow.gradient: flow.stage for request in self.cut.program.requests for flow in request.flows}

    @cached_property
    def _names(self) -> Mapping[Value, str]:
        """Names that are the same in every program of a model: the stages, and which of their tensors it is."""
        stages = self.cut.program.stages
        found: dict[Value, str] = {}
        used: dict[str, int] = {}
        for boundary in self.cut.boundaries:
            readers = ",".join(stages[stage].key for stage in boundary.destinations)
            kind = f"{stages[boundary.source].key}->{readers} {self.cut.program.graph.spec(boundary.value)}"
            found[boundary.value] = _number_name(kind + _remembering(boundary.codec), used)
        for gradient, (boundary, back) in self.of.items():
            if back:
                name = f"{found[boundary.value]} gradient{_remembering(boundary.backward_codec)}"
                found[gradient] = _number_name(name, used)
        return found


def _remembering(way: str) -> str:
    """What tells the states of a structure from those of another: steps without a gradient may have one of their own.

    >>> _remembering("rank(4) >> int8"), _remembering("int8")
    (' on rank(4)', '')
    """
    structure = parse_way(way).structure
    return f" on {structure}" if structure is not None else ""


def _number_name(kind: str, used: dict[str, int]) -> str:
    used[kind] = used.get(kind, 0) + 1
    return f"{kind} {used[kind]}"


def has_codecs(cut: Cut) -> bool:
    """Whether anything in a plan takes more than a cast to cross."""
    return any(parse_way(text).coded for b in cut.boundaries for text in (b.codec, b.backward_codec))


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
    _residues: dict[tuple[int, int, str], Residue] = field(default_factory=dict)
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
        boundary, back = self._routes.of[value]
        end, place = self._end(value, home, micro_batch, out=True), (boundary.slot, micro_batch, home)
        at = At(step, micro_batch, self._training, self.seed, self._routes.lead(value, micro_batch))
        residue = self._residues.get(place) if back else None
        payload, residue = end.send(tensor, at, self._tally, residue, rows, self._ids(boundary, micro_batch, back))
        if not back:
            self._residues[place] = residue
        return payload

    def decode(self, value: Value, came: Any, host: str, micro_batch: int) -> Any:
        """The tensor that a stage of `host` reads."""
        boundary, back = self._routes.of[value]
        end, place = self._end(value, host, micro_batch, out=False), (boundary.slot, micro_batch, host)
        residue, before = self._residues.get(place) if back else None, self.states.of(end.key)
        if isinstance(came, Packed):
            self._check_rows(boundary.value, came, micro_batch, end.name)
        tensor, residue = end.take(came, self._tally, residue, self._ids(boundary, micro_batch, back))
        if end.way.cast is not None:
            with self._tally.decoding(end.name):
                tensor = decode_cast(tensor, tf.as_dtype(self.cut.program.graph.spec(value).dtype))
        self._hear(end, came, tensor, before, micro_batch == self._routes.lead(value, micro_batch))
        if not back:
            self._residues[place] = residue
        return tensor

    def _check_rows(self, value: Value, came: Packed, micro_batch: int, name: str) -> None:
        """Refuse what has another number of rows than a micro-batch: a few bytes may unpack to any number of them."""
        entries = self._entries.get(value)
        if entries is None or not self._rows:
            return
        due = entries * self._rows[micro_batch]
        if came.dims[0] != due:
            raise RemoteProtocolError(f"{name} came with {came.dims[0]} rows, where {due} are due", where=name)

    @cached_property
    def _entries(self) -> Mapping[Value, int]:
        """Of what may come encoded, with a first axis that only a step knows: how many entries a row has there."""
        program = self.cut.program
        ways = {each.value: (each.codec, each.backward_codec) for each in self.cut.boundaries}
        coded = [value for value, texts in ways.items() if any(parse_way(text).coded for text in texts)]
        return entries_per_row(program, [n for n in coded if (program.graph.spec(n).shape or (0,))[0] is None])

    def _hear(self, end: Incoming, came: Any, tensor: Any, before: ChannelState, first: bool) -> None:
        """Tell of what has come, as its sender tells of what he has sent."""
        codec = codec_of(came, end.way)
        self._tally.took(end.name, report_crossing(came, tensor, codec))
        if self._training and first:
            after = self.states.of(end.key)
            self.states.put(end.key, note_changes(self._tally, end.name, end.way, before, after, codec))

    def _ids(self, boundary: Boundary, micro_batch: int, back: bool) -> Any:
        """The ids of a micro-batch's samples, where differences of them are sent."""
        if boundary.ids is None or back:
            return None
        leaf = self.cut.program.leaf_ops[boundary.ids.op]
        return np.asarray(self._slices[micro_batch][leaf]).astype(np.int64).reshape(-1)

    def takes(self, value: Value) -> bool:
        """Whether a value crosses by a channel; else it goes as it is."""
        if value not in self._routes.of:
            return False
        way = self._routes.way(value)
        return not way.plain or way.nonfinite == SKIP

    def before(self, value: Value, micro_batch: int) -> int | None:
        """The micro-batch that an end of its channel codes before this one."""
        return self._routes.before(value, micro_batch)

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
        return self._training and any(self._routes.way(value).nonfinite == SKIP for value in self._routes.of)

    def boundaries(self) -> tuple[Boundary, ...]:
        """Those of the plan, as they crossed in this step: on a ramp, and where the line decides."""
        if not self._moving:
            return self.cut.boundaries
        codecs = {name: report.codec for name, report in self._tally.reports().items()}
        return tuple(self._as_crossed(boundary, codecs) for boundary in self.cut.boundaries)

    def _as_crossed(self, boundary: Boundary, codecs: Mapping[str, str]) -> Boundary:
        there, back = (codecs.get(self._routes.label(boundary, back=back)) for back in (False, True))
        ways = _as_crossed(boundary.codec, there), _as_crossed(boundary.backward_codec, back)
        return replace(boundary, codec=ways[0], backward_codec=ways[1])

    @cached_property
    def _moving(self) -> bool:
        return any(_moves(parse_way(text)) for b in self.cut.boundaries for text in (b.codec, b.backward_codec))

    def _end(self, value: Value, host: str, micro_batch: int, *, out: bool) -> Any:
        lane = self._routes.lane(value, micro_batch)
        key = (value, host, lane, out)
        if key not in self._ends:
            (boundary, back), routes = self._routes.of[value], self._routes
            label, way = routes.label(boundary, back=back), routes.way(value)
            state = routes.key(value, host, lane, out=out)
            if out:
                stage = self.cut.program.stages[routes.maker(value)].key
                self._ends[key] = Outgoing(label, state, way, self.states, back, stage=stage)
            else:
                self._ends[key] = Incoming(label, state, way, self.states, back)
        return self._ends[key]

    @cached_property
    def _auto(self) -> Auto:
        return Auto(tuple(self._directions()), self.states, self._training)

    def _directions(self) -> Iterator[Direction]:
        """Those that are sent from here and leave the choice of their codec to the line."""
        routes = self._routes
        for value, (boundary, back) in routes.of.items():
            way, links = routes.way(value), routes.links(value)
            for home, lane in routes.lanes(value) if way.auto and links else ():
                if self.here(home):
                    label, key = routes.label(boundary, back=back), routes.key(value, home, lane, out=True)
                    yield Direction(label, key, way, self.cut.program.graph.spec(value), links)

    @cached_property
    def _routes(self) -> Routes:
        return Routes(self.cut, self.routing, self.clusters)

    @cached_property
    def _training(self) -> bool:
        return bool(self.cut.program.requests)


def _moves(way: Way) -> bool:
    """Whether it is not the same codec all along."""
    return way.auto or bool(way.ladder) or bool(way.start)


def _as_crossed(text: str, codec: str | None) -> str:
    way = parse_way(text)
    if codec is None or not _moves(way):
        return text
    used = None if codec in ("", NONE) else parse(codec)
    return str(replace(way, codec=used, auto=False, ladder=(), start=0))


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
