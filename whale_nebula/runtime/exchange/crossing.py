"""The tensors that cross between the stages of a plan (each boundary and each returning gradient), and their channels
with the local ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from whale_nebula.codec.encoding import NONE, SKIP, Encoding, parse_encoding
from whale_nebula.codec.registry import parse
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.ir.routing import Routing, Seat
from whale_nebula.passes.batch import entries_per_row
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import Auto, Direction
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import AT, LANE, States, StepLines, Tally
from whale_nebula.spec import Spec, Value


@dataclass(frozen=True)
class Crossing:
    """One direction of a boundary: `kind` is forward, or backward for a gradient, which has its own `number`.

    `label` names it in reports ("b0 gpu->npu", and "b0 npu->gpu" for its gradient), `name` in states: the same in every
    program of a model, independent of the lengths of its rows. A gradient's `way` is the backward one. `boundary` is
    None for a gradient without a boundary.
    """

    value: Value
    kind: str
    number: int
    phase: int
    source: int
    readers: tuple[int, ...]
    spec: Spec
    boundary: Boundary | None = None
    way: Encoding = field(default_factory=Encoding)
    label: str = ""
    name: str = ""

    @cached_property
    def back(self) -> bool:
        """Whether it is a gradient."""
        return self.kind == "backward"

    @cached_property
    def ids(self) -> Value | None:
        """The ids of samples, if it is sent as differences to cached ones."""
        return None if self.back or self.boundary is None else self.boundary.ids

    @cached_property
    def tensor(self) -> Value:
        """The value that crosses forward: the tensor itself, or the tensor that this is the gradient of."""
        return self.value if self.boundary is None else self.boundary.value


class Lane(NamedTuple):
    """The route of one micro-batch in a plan: the replica that sends it (`seat`) and its host, those that read it
    (`seats`, by stage), how many other stages read it on each host, and which of these hosts receive it `packed` by its
    codec. `name` is set if the hosts vary; `lead` is the first micro-batch of a step on this route, and `before` the
    previous one.
    """

    seat: Seat
    home: str
    seats: Mapping[int, tuple[str, Seat]]
    readers: Mapping[str, int]
    packed: frozenset[str]
    name: str
    lead: int
    before: int | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The receiving hosts."""
        return tuple(host for host in self.readers if host != self.home)


@dataclass(frozen=True)
class Crossings:
    """All crossings of a plan. `clusters` gives the cluster of each host that is not a cluster itself."""

    cut: Cut
    routing: Routing
    clusters: Mapping[str, str] = field(default_factory=dict)
    _lanes: dict[tuple[Value, int], Lane] = field(default_factory=dict)

    @cached_property
    def by_value(self) -> Mapping[Value, Crossing]:
        """Boundaries forward, then the shares of their gradients backward."""
        program, boundaries = self.cut.program, {each.value: each for each in self.cut.boundaries}
        found, used = {}, dict[str, int]()
        for value, each in boundaries.items():
            (there, _), spec, way = self._ends(each), program.graph.spec(value), parse_encoding(each.codec)
            name = _number_name(f"{there} {_leave_sizes_open(spec)}{_remembering(way)}", used)
            ends = each.phase, each.source, each.destinations
            found[value] = Crossing(
                value, "forward", each.slot, *ends, spec, each, way, label=f"b{each.slot} {there}", name=name
            )
        phases = {request: phase.index for phase in self.cut.phases for request in phase.requests}
        flows = [(phases[each.index], flow) for each in program.requests for flow in each.flows]
        for number, (phase, flow) in enumerate(flows):
            spec, target = program.graph.spec(flow.gradient), program.labels.get(flow.boundary.op, 0)
            crossing = Crossing(flow.gradient, "backward", number, phase, flow.stage, (target,), spec)
            if flow.boundary in boundaries:
                boundary, tensor = boundaries[flow.boundary], found[flow.boundary]
                way = parse_encoding(boundary.backward_codec)
                name = _number_name(f"{tensor.name} gradient{_remembering(way)}", used)
                label = f"b{boundary.slot} {self._ends(boundary)[1]}"
                crossing = replace(crossing, boundary=boundary, way=way.returned, label=label, name=name)
            found[flow.gradient] = crossing
        return found

    def _ends(self, boundary: Boundary) -> tuple[str, str]:
        """Names of sender and receiver, of the tensor and of its gradient."""
        stages = self.cut.program.stages
        source, readers = stages[boundary.source].key, ",".join(stages[stage].key for stage in boundary.destinations)
        return f"{source}->{readers}", f"{readers}->{source}"

    @cached_property
    def of_boundaries(self) -> tuple[Crossing, ...]:
        """The crossings of boundaries, with a way."""
        return tuple(each for each in self.by_value.values() if each.boundary is not None)

    def lane(self, crossing: Crossing, micro_batch: int) -> Lane:
        """The route of a micro-batch."""
        key = crossing.value, micro_batch
        if key not in self._lanes:
            self._lanes[key] = self._make_lane(crossing, micro_batch)
        return self._lanes[key]

    def _make_lane(self, crossing: Crossing, micro_batch: int) -> Lane:
        home, *others = self._hosts(crossing, micro_batch)
        moving = not self.routing.replicated.isdisjoint((crossing.source, *crossing.readers))
        name = f"{home}->{','.join(others)}" if moving else ""
        earlier = [m for m in range(micro_batch) if self._hosts(crossing, m) == (home, *others) or not name]
        first, last = (earlier[0], earlier[-1]) if earlier else (micro_batch, None)
        routing = self.routing
        seats = {s: (routing.host(s, micro_batch), routing.seat(s, micro_batch)) for s in crossing.readers}
        readers = dict.fromkeys((host for host, _ in seats.values()), 0)
        for stage, (host, _) in seats.items():
            readers[host] += stage != crossing.source
        takes = not crossing.way.plain or crossing.way.nonfinite == SKIP
        far = {host for host in others if takes and self.cluster(host) != self.cluster(home)}
        return Lane(routing.seat(crossing.source, micro_batch), home, seats, readers, frozenset(far), name, first, last)

    def lanes(self, crossing: Crossing) -> tuple[Lane, ...]:
        """Every lane of a crossing, by its first micro-batch."""
        every = (self.lane(crossing, m) for m in range(self.cut.program.pipeline.micro_batch))
        return tuple({(lane.home, lane.name): lane for lane in every}.values())

    def state_key(self, crossing: Crossing, host: str, lane: str = "", *, out: bool) -> str:
        """The name of a host's codec state of a crossing, on the sending (`out`) or the receiving side."""
        return f"{_channel(crossing, lane)}{AT}{host}{'' if out else ', incoming'}"

    def ends(self, here: Callable[[str], bool]) -> tuple[str, ...]:
        """The names of channels with a local end: the prefixes of state keys, without the host."""
        found: dict[str, None] = {}
        for crossing in self.of_boundaries:
            for lane in self.lanes(crossing) if crossing.way.coded else ():
                hosts = (lane.home, *lane.hosts)
                if len(set(map(self.cluster, hosts))) > 1 and any(map(here, hosts)):
                    found[_channel(crossing, lane.name)] = None
        return tuple(found)

    def links(self, crossing: Crossing) -> tuple[str, ...]:
        """The links of a crossing, such as "gpu->npu"; empty if all readers are on the host that computes it."""
        stages = (crossing.source, *crossing.readers)
        home, *others = (self.cluster(self.routing.first(stage)) for stage in stages)
        return tuple(f"{home}->{other}" for other in dict.fromkeys(others) if other != home)

    def cluster(self, host: str) -> str:
        """The cluster of a host."""
        return self.clusters.get(host, host)

    def _hosts(self, crossing: Crossing, micro_batch: int) -> tuple[str, ...]:
        stages = (crossing.source, *crossing.readers)
        return tuple(dict.fromkeys(self.routing.host(stage, micro_batch) for stage in stages))


def _channel(crossing: Crossing, lane: str) -> str:
    return f"{crossing.name}{LANE}{lane}" if lane else crossing.name


def _leave_sizes_open(spec: Spec) -> Spec:
    """A spec with all sizes but the last left open: rows and lengths differ between the programs of a model.

    >>> str(_leave_sizes_open(Spec("float32", (8, 20, 64)))), str(_leave_sizes_open(Spec("float32", (8,))))
    ('float32[?,?,64]', 'float32[?]')
    """
    if not spec.shape:
        return spec
    *outer, last = spec.shape
    return Spec(spec.dtype, (*[None] * len(outer), last if outer else None))


def _remembering(way: Encoding) -> str:
    """The part of a state's key that separates steps without a gradient, whose structure may have its own state.

    >>> _remembering(parse_encoding("rank(4) >> int8")), _remembering(parse_encoding("int8"))
    (' on rank(4)', '')
    """
    return f" on {way.structure}" if way.structure is not None else ""


def _number_name(kind: str, used: dict[str, int]) -> str:
    used[kind] = used.get(kind, 0) + 1
    return f"{kind} {used[kind]}"


@dataclass
class Channels:
    """Channels between the hosts of a program, and their local ends. `seed` is the run's.

    `here` selects the hosts of this process, `clusters` gives the cluster of each host that is not one itself.
    """

    cut: Cut
    routing: Routing
    states: States
    seed: int = 0
    here: Callable[[str], bool] = lambda host: True
    clusters: Mapping[str, str] = field(default_factory=dict)
    last: Mapping[str, BoundaryReport] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _ends: dict[tuple[Value, str, str, bool], Any] = field(default_factory=dict)

    @cached_property
    def crossings(self) -> Crossings:
        """The crossings, by value."""
        return Crossings(self.cut, self.routing, self.clusters)

    @cached_property
    def training(self) -> bool:
        """Whether steps of the program train: only these change codec states."""
        return bool(self.cut.program.requests)

    @cached_property
    def may_skip(self) -> bool:
        """Whether any boundary requests to skip steps with a NaN, for which all processes must agree on each step."""
        return self.training and any(each.way.nonfinite == SKIP for each in self.crossings.of_boundaries)

    def end(self, crossing: Crossing, host: str, lane: str, *, out: bool) -> Any:
        """The end of a channel at a host: an `Outgoing` or an `Incoming`."""
        key = (crossing.value, host, lane, out)
        if key not in self._ends:
            state = self.crossings.state_key(crossing, host, lane, out=out)
            ends = crossing.label, state, crossing.way, self.states, crossing.back
            if out:
                self._ends[key] = Outgoing(*ends, stage=self.cut.program.stages[crossing.source].key)
            else:
                self._ends[key] = Incoming(*ends, dtype=crossing.spec.dtype)
        return self._ends[key]

    @cached_property
    def entries(self) -> Mapping[Value, int]:
        """For values that may arrive encoded and whose first axis is known only in a step: the number of entries for
        each row.
        """
        program, boundaries = self.cut.program, self.crossings.of_boundaries
        coded = dict.fromkeys(each.boundary.value for each in boundaries if each.boundary and each.way.coded)
        return entries_per_row(program, [n for n in coded if (program.graph.spec(n).shape or (0,))[0] is None])

    @cached_property
    def auto(self) -> Auto:
        """The chooser of codecs of directions with `nb.compress("auto")`."""
        return Auto(tuple(self._directions()), self.states, self.training)

    def _directions(self) -> Iterator[Direction]:
        """The directions with `nb.compress("auto")` that this process sends."""
        for each in self.crossings.of_boundaries:
            links = self.crossings.links(each) if each.way.auto else ()
            for lane in self.crossings.lanes(each) if links else ():
                if self.here(lane.home):
                    key = self.crossings.state_key(each, lane.home, lane.name, out=True)
                    yield Direction(each.label, key, each.way, each.spec, links)

    def lines_of(self, tally: Tally) -> StepLines:
        """Lines about a step; a skipped step reports no changes."""
        out, notes = tally.left_out, tally.notes()
        changes = () if out else tally.changes()
        fresh = [note for note in notes if note not in self._said]
        self._said.update(fresh)
        return StepLines((*changes, *fresh), (*changes, *notes, *([f"skipped: {out}"] if out else [])), out)

    def boundaries(self) -> tuple[Boundary, ...]:
        """The plan's boundaries with the codecs of the last step, which vary on a ramp or by `nb.compress("auto")`."""
        found = {each.value: each for each in self.cut.boundaries}
        for each in self.crossings.of_boundaries:
            way, last = each.way, self.last.get(each.label)
            if each.boundary is not None and last is not None and (way.auto or way.ladder or way.start):
                used = None if last.codec in ("", NONE) else parse(last.codec)
                text = str(replace(way, codec=used, auto=False, ladder=(), start=0))
                crossed = found[each.boundary.value]
                crossed = replace(crossed, backward_codec=text) if each.back else replace(crossed, codec=text)
                found[crossed.value] = crossed
        return tuple(found.values())


def has_codecs(cut: Cut) -> bool:
    """Whether any boundary of a plan needs more than a cast."""
    return any(parse_encoding(text).coded for each in cut.boundaries for text in (each.codec, each.backward_codec))
