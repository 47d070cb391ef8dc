"""The tensors that a plan lets cross between stages: each boundary and each gradient that returns, described once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from whale_nebula.codec.way import Way, parse_way
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.ir.routing import Routing, Seat
from whale_nebula.spec import Spec, Value

AT = " at "
"""Between a channel's name and the host whose end of it a state is of."""
SKIP = "skip"
"""What `nonfinite` says where a step with a NaN is to be left out."""
LANE = " by "
"""Between its name and the hosts that it joins, where replicas make several channels of one boundary."""


@dataclass(frozen=True)
class Crossing:
    """One direction of a boundary: `kind` is forward, or backward for a gradient, which has a `number` of its own.

    `label` names it in reports ("b0 gpu->npu", and "b0 npu->gpu" for its gradient), `name` in states: that is the same
    in every program of a model. A gradient's `way` is as it returns. `boundary` is None for a gradient of none.
    """

    value: Value
    kind: str
    number: int
    phase: int
    source: int
    readers: tuple[int, ...]
    spec: Spec
    boundary: Boundary | None = None
    way: Way = field(default_factory=Way)
    label: str = ""
    name: str = ""

    @cached_property
    def back(self) -> bool:
        """Whether it is a gradient."""
        return self.kind == "backward"

    @cached_property
    def ids(self) -> Value | None:
        """The ids of samples of which differences are sent."""
        return None if self.back or self.boundary is None else self.boundary.ids

    @cached_property
    def tensor(self) -> Value:
        """What crosses forward: the value itself, or that of which this is the gradient."""
        return self.value if self.boundary is None else self.boundary.value


class Lane(NamedTuple):
    """The way of one micro-batch, as a plan fixes it: the replica that sends it (`seat`) and its host, those that read
    it (`seats`, by stage), how many other stages read it on each host, and which of these hosts take it `packed` by the
    codec of its way. `name` is there where the hosts are not always the same; `lead` is the first micro-batch of a step
    that goes this way, and `before` the last one that went before it.
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
        """The hosts to which it goes."""
        return tuple(host for host in self.readers if host != self.home)


@dataclass(frozen=True)
class Crossings:
    """All crossings of a plan. `clusters` says where hosts stand that are no clusters."""

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
            (there, _), spec, way = self._ends(each), program.graph.spec(value), parse_way(each.codec)
            name = _number_name(f"{there} {spec}{_remembering(way)}", used)
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
                way = parse_way(boundary.backward_codec)
                name = _number_name(f"{tensor.name} gradient{_remembering(way)}", used)
                label = f"b{boundary.slot} {self._ends(boundary)[1]}"
                crossing = replace(crossing, boundary=boundary, way=way.returned, label=label, name=name)
            found[flow.gradient] = crossing
        return found

    def _ends(self, boundary: Boundary) -> tuple[str, str]:
        """Its stages as a tensor passes them, and as its gradient does."""
        stages = self.cut.program.stages
        source, readers = stages[boundary.source].key, ",".join(stages[stage].key for stage in boundary.destinations)
        return f"{source}->{readers}", f"{readers}->{source}"

    @cached_property
    def of_boundaries(self) -> tuple[Crossing, ...]:
        """Those of boundaries, with a way."""
        return tuple(each for each in self.by_value.values() if each.boundary is not None)

    def lane(self, crossing: Crossing, micro_batch: int) -> Lane:
        """The way of a micro-batch."""
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
        """Every lane of it, by its first micro-batch."""
        every = (self.lane(crossing, m) for m in range(self.cut.program.pipeline.micro_batch))
        return tuple({(lane.home, lane.name): lane for lane in every}.values())

    def state_key(self, crossing: Crossing, host: str, lane: str = "", *, out: bool) -> str:
        """The name of what a host remembers of it, where it sends it (`out`) or takes it in."""
        return f"{_channel(crossing, lane)}{AT}{host}{'' if out else ', incoming'}"

    def ends(self, here: Callable[[str], bool]) -> tuple[str, ...]:
        """The names of the channels that have an end here, as states have them before the host."""
        found: dict[str, None] = {}
        for crossing in self.of_boundaries:
            for lane in self.lanes(crossing) if crossing.way.coded else ():
                hosts = (lane.home, *lane.hosts)
                if len(set(map(self.cluster, hosts))) > 1 and any(map(here, hosts)):
                    found[_channel(crossing, lane.name)] = None
        return tuple(found)

    def links(self, crossing: Crossing) -> tuple[str, ...]:
        """The links that it takes, "gpu->npu"; none where all who read it are where it is made."""
        stages = (crossing.source, *crossing.readers)
        home, *others = (self.cluster(self.routing.first(stage)) for stage in stages)
        return tuple(f"{home}->{other}" for other in dict.fromkeys(others) if other != home)

    def cluster(self, host: str) -> str:
        """Where a host stands."""
        return self.clusters.get(host, host)

    def _hosts(self, crossing: Crossing, micro_batch: int) -> tuple[str, ...]:
        stages = (crossing.source, *crossing.readers)
        return tuple(dict.fromkeys(self.routing.host(stage, micro_batch) for stage in stages))


def _channel(crossing: Crossing, lane: str) -> str:
    return f"{crossing.name}{LANE}{lane}" if lane else crossing.name


def _remembering(way: Way) -> str:
    """What tells the states of a structure from those of another: steps without a gradient may have one of their own.

    >>> _remembering(parse_way("rank(4) >> int8")), _remembering(parse_way("int8"))
    (' on rank(4)', '')
    """
    return f" on {way.structure}" if way.structure is not None else ""


def _number_name(kind: str, used: dict[str, int]) -> str:
    used[kind] = used.get(kind, 0) + 1
    return f"{kind} {used[kind]}"


def has_codecs(cut: Cut) -> bool:
    """Whether anything in a plan takes more than a cast to cross."""
    return any(parse_way(text).coded for each in cut.boundaries for text in (each.codec, each.backward_codec))
