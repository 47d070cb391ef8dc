"""What crosses between the hosts of a plan, and what it is called: in reports, and in what both sides remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale_nebula.codec.way import Way, parse_way
from whale_nebula.ir.plan import Boundary, Cut
from whale_nebula.ir.spec import Value
from whale_nebula.runtime.channels.state import AT


@dataclass(frozen=True)
class Routes:
    """The ways of all boundaries and of their gradients. `clusters` says where hosts stand that are no clusters."""

    cut: Cut
    hosts: Sequence[str]
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

    def key(self, value: Value, host: str, *, out: bool) -> str:
        """The name of what a host remembers of it, where it sends it (`out`) or takes it in."""
        return f"{self._names[value]}{AT}{host}{'' if out else ', incoming'}"

    def ends(self, here: Callable[[str], bool]) -> tuple[str, ...]:
        """The names of the channels that have an end here, as states have them before the host."""
        return tuple(self._names[value] for value in self.of if self._crosses(value, here) and self.way(value).coded)

    def _crosses(self, value: Value, here: Callable[[str], bool]) -> bool:
        boundary, back = self.of[value]
        readers = (boundary.source,) if back else boundary.destinations
        hosts = {self.hosts[stage] for stage in (self.maker(value), *readers)}
        return len(hosts) > 1 and any(map(here, hosts))

    def maker(self, value: Value) -> int:
        """The stage that makes it."""
        return self._flows.get(value, self.of[value][0].source)

    def links(self, value: Value) -> tuple[str, ...]:
        """The links that it takes, "gpu->npu"; none where all who read it are where it is made."""
        (boundary, back), home = self.of[value], self.hosts[self.maker(value)]
        readers = (boundary.source,) if back else boundary.destinations
        others = dict.fromkeys(self.hosts[stage] for stage in readers if self.hosts[stage] != home)
        return tuple(f"{self._cluster(home)}->{self._cluster(other)}" for other in others)

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
            found[boundary.value] = _numbered(kind, used)
        for gradient, (boundary, back) in self.of.items():
            if back:
                found[gradient] = _numbered(f"{found[boundary.value]} gradient", used)
        return found


def _numbered(kind: str, used: dict[str, int]) -> str:
    used[kind] = used.get(kind, 0) + 1
    return f"{kind} {used[kind]}"
