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
from whale_nebula.passes.batch import count_entries_per_row
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.auto import CodecChooser, Direction
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import HOST_SEPARATOR, ROUTE_SEPARATOR, States, StepLines, Tally
from whale_nebula.spec import Spec, Value


@dataclass(frozen=True)
class Crossing:
    """One direction of a boundary: `kind` is forward, or backward for a gradient, which has its own `number`.

    `label` names it in reports ("b0 gpu->npu", and "b0 npu->gpu" for its gradient), `name` in states: the same in every
    program of a model, independent of the lengths of its rows. A gradient's `encoding` is the backward one. `boundary`
    is None for a gradient without a boundary, which is sent unencoded.
    """

    value: Value
    kind: str
    number: int
    phase: int
    source: int
    readers: tuple[int, ...]
    spec: Spec
    boundary: Boundary | None = None
    encoding: Encoding = field(default_factory=Encoding)
    label: str = ""
    name: str = ""

    @cached_property
    def is_gradient(self) -> bool:
        """Whether it is a gradient."""
        return self.kind == "backward"

    @cached_property
    def ids(self) -> Value | None:
        """The ids of samples, if it is sent as differences to cached ones."""
        return None if self.is_gradient or self.boundary is None else self.boundary.ids

    @cached_property
    def tensor(self) -> Value:
        """The value that crosses forward: the tensor itself, or the tensor that this is the gradient of."""
        return self.value if self.boundary is None else self.boundary.value


class Route(NamedTuple):
    """The route of one micro-batch of a crossing: the replica that sends it (`seat`) and its host, those that read it
    (`seats`, by stage), how many stages other than the source read it on each host (`readers`), and which of these
    hosts receive it packed by its codec (`packed_hosts`). `name` is that of the hosts if these vary, otherwise "".
    `first_micro_batch` is the first one of a step on this route, and `previous_micro_batch` the one before this.
    """

    seat: Seat
    source_host: str
    seats: Mapping[int, tuple[str, Seat]]
    readers: Mapping[str, int]
    packed_hosts: frozenset[str]
    name: str
    first_micro_batch: int
    previous_micro_batch: int | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The receiving hosts."""
        return tuple(host for host in self.readers if host != self.source_host)


@dataclass(frozen=True)
class Crossings:
    """All crossings of a plan. `clusters` gives the cluster of each host that is not a cluster itself."""

    cut: Cut
    routing: Routing
    clusters: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_value(self) -> Mapping[Value, Crossing]:
        """Boundaries forward, then the shares of their gradients backward."""
        program, boundaries = self.cut.program, {each.value: each for each in self.cut.boundaries}
        found, used = {}, dict[str, int]()
        for value, each in boundaries.items():
            (there, _), spec, encoding = self._name_ends(each), program.graph.spec(value), parse_encoding(each.codec)
            name = _number_name(f"{there} {_leave_sizes_open(spec)}{_name_structure(encoding)}", used)
            ends = each.phase, each.source, each.destinations
            found[value] = Crossing(
                value, "forward", each.slot, *ends, spec, each, encoding, label=f"b{each.slot} {there}", name=name
            )
        phases = {request: phase.index for phase in self.cut.phases for request in phase.requests}
        flows = [(phases[each.index], flow) for each in program.requests for flow in each.flows]
        for number, (phase, flow) in enumerate(flows):
            spec, target = program.graph.spec(flow.gradient), program.labels.get(flow.boundary.op, 0)
            crossing = Crossing(flow.gradient, "backward", number, phase, flow.stage, (target,), spec)
            if flow.boundary in boundaries:
                boundary, tensor = boundaries[flow.boundary], found[flow.boundary]
                encoding = parse_encoding(boundary.backward_codec)
                name = _number_name(f"{tensor.name} gradient{_name_structure(encoding)}", used)
                label = f"b{boundary.slot} {self._name_ends(boundary)[1]}"
                crossing = replace(crossing, boundary=boundary, encoding=encoding.returned, label=label, name=name)
            found[flow.gradient] = crossing
        return found

    def _name_ends(self, boundary: Boundary) -> tuple[str, str]:
        """Names of sender and receiver, of the tensor and of its gradient."""
        stages = self.cut.program.stages
        source, readers = stages[boundary.source].key, ",".join(stages[stage].key for stage in boundary.destinations)
        return f"{source}->{readers}", f"{readers}->{source}"

    @cached_property
    def boundary_crossings(self) -> tuple[Crossing, ...]:
        """The crossings of boundaries and of their gradients."""
        return tuple(each for each in self.by_value.values() if each.boundary is not None)

    @cached_property
    def routes(self) -> Mapping[tuple[Value, int], Route]:
        """The routes of all crossings, by micro-batch."""
        found: dict[tuple[Value, int], Route] = {}
        for value, crossing in self.by_value.items():
            ends: dict[str, tuple[int, int]] = {}  # the first and the last micro-batch so far of each name
            for micro_batch in range(self.cut.program.pipeline.micro_batch):
                route = found[value, micro_batch] = self._make_route(crossing, micro_batch, ends)
                ends[route.name] = route.first_micro_batch, micro_batch
        return found

    def _make_route(self, crossing: Crossing, micro_batch: int, earlier: Mapping[str, tuple[int, int]]) -> Route:
        routing = self.routing
        stages = (crossing.source, *crossing.readers)
        source_host, *others = dict.fromkeys(routing.host(stage, micro_batch) for stage in stages)
        name = "" if routing.replicated.isdisjoint(stages) else f"{source_host}->{','.join(others)}"
        first, last = earlier.get(name, (micro_batch, None))
        seats = {s: (routing.host(s, micro_batch), routing.seat(s, micro_batch)) for s in crossing.readers}
        readers = dict.fromkeys((host for host, _ in seats.values()), 0)
        for stage, (host, _) in seats.items():
            readers[host] += stage != crossing.source
        packs = not crossing.encoding.plain or crossing.encoding.nonfinite == SKIP
        far = {host for host in others if packs and self.find_cluster(host) != self.find_cluster(source_host)}
        return Route(
            routing.seat(crossing.source, micro_batch), source_host, seats, readers, frozenset(far), name, first, last
        )

    def list_routes(self, crossing: Crossing) -> tuple[Route, ...]:
        """The different routes of a crossing, in the order of their first micro-batches."""
        every = (self.routes[crossing.value, m] for m in range(self.cut.program.pipeline.micro_batch))
        return tuple({(route.source_host, route.name): route for route in every}.values())

    def state_key(self, crossing: Crossing, host: str, route: str = "", *, out: bool) -> str:
        """The name of a host's codec state of a crossing, on the sending (`out`) or the receiving side."""
        return f"{_name_channel(crossing, route)}{HOST_SEPARATOR}{host}{'' if out else ', incoming'}"

    def list_ends(self, here: Callable[[str], bool]) -> tuple[str, ...]:
        """The names of channels with a local end: the prefixes of state keys, without the host."""
        found: dict[str, None] = {}
        for crossing in self.boundary_crossings:
            for route in self.list_routes(crossing) if crossing.encoding.coded else ():
                hosts = (route.source_host, *route.hosts)
                if len(set(map(self.find_cluster, hosts))) > 1 and any(map(here, hosts)):
                    found[_name_channel(crossing, route.name)] = None
        return tuple(found)

    def list_links(self, crossing: Crossing) -> tuple[str, ...]:
        """The links of a crossing, such as "gpu->npu"; empty if all readers are in the cluster that computes it."""
        stages = (crossing.source, *crossing.readers)
        source_host, *others = (self.find_cluster(self.routing.first(stage)) for stage in stages)
        return tuple(f"{source_host}->{other}" for other in dict.fromkeys(others) if other != source_host)

    def find_cluster(self, host: str) -> str:
        """The cluster of a host."""
        return self.clusters.get(host, host)


def _name_channel(crossing: Crossing, route: str) -> str:
    return f"{crossing.name}{ROUTE_SEPARATOR}{route}" if route else crossing.name


def _leave_sizes_open(spec: Spec) -> Spec:
    """A spec with all sizes but the last left open: rows and lengths differ between the programs of a model.

    >>> str(_leave_sizes_open(Spec("float32", (8, 20, 64)))), str(_leave_sizes_open(Spec("float32", (8,))))
    ('float32[?,?,64]', 'float32[?]')
    """
    if not spec.shape:
        return spec
    *outer, last = spec.shape
    return Spec(spec.dtype, (*[None] * len(outer), last if outer else None))


def _name_structure(encoding: Encoding) -> str:
    """The part of a state's key that separates steps without a gradient, whose structure may have its own state.

    >>> _name_structure(parse_encoding("rank(4) >> int8")), _name_structure(parse_encoding("int8"))
    (' on rank(4)', '')
    """
    return f" on {encoding.structure}" if encoding.structure is not None else ""


def _number_name(kind: str, used: dict[str, int]) -> str:
    used[kind] = used.get(kind, 0) + 1
    return f"{kind} {used[kind]}"


@dataclass
class Channels:
    """Channels between the hosts of a program, and their local ends. `seed` is the run's, and `last_reports` has the
    statistics of the last step by the crossings' labels.

    `is_local` selects the hosts of this process, `clusters` gives the cluster of each host that is not one itself.
    """

    cut: Cut
    routing: Routing
    states: States
    seed: int = 0
    is_local: Callable[[str], bool] = lambda host: True
    clusters: Mapping[str, str] = field(default_factory=dict)
    last_reports: Mapping[str, BoundaryReport] = field(default_factory=dict)
    _logged_notes: set[str] = field(default_factory=set)
    _channel_ends: dict[tuple[Value, str, str, bool], Any] = field(default_factory=dict)

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
        return self.training and any(each.encoding.nonfinite == SKIP for each in self.crossings.boundary_crossings)

    def find_end(self, crossing: Crossing, host: str, route: str, *, out: bool) -> Any:
        """The end of a channel at a host: an `Outgoing` or an `Incoming`."""
        key = (crossing.value, host, route, out)
        if key not in self._channel_ends:
            state = self.crossings.state_key(crossing, host, route, out=out)
            ends = crossing.label, state, crossing.encoding, self.states, crossing.is_gradient
            if out:
                self._channel_ends[key] = Outgoing(*ends, stage=self.cut.program.stages[crossing.source].key)
            else:
                self._channel_ends[key] = Incoming(*ends, dtype=crossing.spec.dtype)
        return self._channel_ends[key]

    @cached_property
    def entries(self) -> Mapping[Value, int]:
        """For tensors that may arrive encoded and whose first axis is known only in a step: the number of entries of
        that axis for each row of the batch.
        """
        program, boundaries = self.cut.program, self.crossings.boundary_crossings
        coded = dict.fromkeys(each.boundary.value for each in boundaries if each.boundary and each.encoding.coded)
        return count_entries_per_row(program, [n for n in coded if (program.graph.spec(n).shape or (0,))[0] is None])

    @cached_property
    def codec_chooser(self) -> CodecChooser:
        """The chooser of codecs of directions with `nb.compress("auto")`."""
        return CodecChooser(tuple(self._list_directions()), self.states, self.training)

    def _list_directions(self) -> Iterator[Direction]:
        """The directions with `nb.compress("auto")` that this process sends."""
        for each in self.crossings.boundary_crossings:
            links = self.crossings.list_links(each) if each.encoding.auto else ()
            for route in self.crossings.list_routes(each) if links else ():
                if self.is_local(route.source_host):
                    key = self.crossings.state_key(each, route.source_host, route.name, out=True)
                    yield Direction(each.label, key, each.encoding, each.spec, links)

    def list_lines(self, tally: Tally) -> StepLines:
        """Lines about a step; a skipped step reports no changes. Notes are logged once in a run."""
        skip_reason, notes = tally.skip_reason, tally.notes()
        changes = () if skip_reason else tally.changes()
        fresh = [note for note in notes if note not in self._logged_notes]
        self._logged_notes.update(fresh)
        skipped = [f"skipped: {skip_reason}"] if skip_reason else []
        return StepLines((*changes, *fresh), (*changes, *notes, *skipped), skip_reason)

    def list_boundaries(self) -> tuple[Boundary, ...]:
        """The plan's boundaries with the codecs of the last step, which vary on a ramp or by `nb.compress("auto")`."""
        found = {each.value: each for each in self.cut.boundaries}
        for each in self.crossings.boundary_crossings:
            encoding, last = each.encoding, self.last_reports.get(each.label)
            if each.boundary is not None and last is not None and (encoding.auto or encoding.ladder or encoding.start):
                used = None if last.codec in ("", NONE) else parse(last.codec)
                text = str(replace(encoding, codec=used, auto=False, ladder=(), start=0))
                crossed = found[each.boundary.value]
                crossed = replace(crossed, backward_codec=text) if each.is_gradient else replace(crossed, codec=text)
                found[crossed.value] = crossed
        return tuple(found.values())


def has_codecs(cut: Cut) -> bool:
    """Whether any boundary of a plan, or its gradient, has an encoding that is more than a cast."""
    return any(parse_encoding(text).coded for each in cut.boundaries for text in (each.codec, each.backward_codec))
