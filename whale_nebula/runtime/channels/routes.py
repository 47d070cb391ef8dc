"""What crosses between the hosts of a plan, and what it is called: in reports, and in what both sides remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from whale_nebula.codec.way import Way, parse_way
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.ir.routing import Routing
from whale_nebula.runtime.channels.state import AT, LANE
from whale_nebula.spec import Value


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
            found[boundary.value] = _numbered(kind + _remembering(boundary.codec), used)
        for gradient, (boundary, back) in self.of.items():
            if back:
                name = f"{found[boundary.value]} gradient{_remembering(boundary.backward_codec)}"
                found[gradient] = _numbered(name, used)
        return found


def _remembering(way: str) -> str:
    """What tells the states of a structure from those of another: steps without a gradient may have one of their own.

    >>> _remembering("rank(4) >> int8"), _remembering("int8")
    (' on rank(4)', '')
    """
    structure = parse_way(way).structure
    return f" on {structure}" if structure is not None else ""


def _numbered(kind: str, used: dict[str, int]) -> str:
    used[kind] = used.get(kind, 0) + 1
    return f"{kind} {used[kind]}"
