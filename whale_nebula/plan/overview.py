"""Build the records of a Plan from a Cut, with counts, and warn of codecs that make a simulated step longer.

A codec that computes while transfers are under way causes no warning. One whose computation takes more time than it
saves does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from whale_nebula.codec.encoding import NONE, has_open_size, parse_encoding
from whale_nebula.codec.objects import Cost
from whale_nebula.codec.packing import Dims
from whale_nebula.codec.sizes import cost, estimate_renewal, payload_bytes, used_codec
from whale_nebula.config import Links
from whale_nebula.ir.cut import Boundary, Cut, Fragment, PhasePlan
from whale_nebula.ir.program import GradientPart, Request, Variable
from whale_nebula.ir.sizes import ExchangeSizes
from whale_nebula.plan import splits
from whale_nebula.plan.plan import Plan
from whale_nebula.plan.records import PlanBoundary, PlanOnce, PlanStage, PlanTied
from whale_nebula.plan.timing import duration, predict_times
from whale_nebula.plan.work import StageVariables, StageWork, count_parameters, list_ops_in, writes_variable
from whale_nebula.spec import Spec
from whale_nebula.wire.frame import count_wire_bytes


@dataclass(frozen=True)
class Direction:
    """How a boundary's tensor, or its gradient, crosses: sizes, links and codec.

    `counts` are the rows of each micro-batch, and `lines` the pairs of clusters between which it is sent, one for each
    time. For a gradient, `forward` is the encoding of the tensor itself.
    """

    spec: Spec
    encoding: str
    counts: Sequence[int]
    lines: Sequence[tuple[str, str]]
    forward: str | None = None
    links: Links = field(default_factory=Links)

    @property
    def micro_batch_bytes(self) -> list[int | None]:
        """Bytes of each micro-batch; None if known only at run time."""
        return [self._payload(self.encoding, rows) for rows in self.counts]

    def _payload(self, encoding: str, rows: int) -> int | None:
        shape = self.spec.shape
        open_size = shape is None or None in shape[1:]
        return None if open_size else payload_bytes(encoding, self.spec.dtype, self.spec.fill_shape(rows), self.forward)

    @property
    def used_encoding(self) -> str:
        """The encoding used for a micro-batch: if the codec would not make it smaller, its precision alone, or none."""
        encoding, shape = parse_encoding(self.encoding), self.spec.shape
        if not encoding.coded or encoding.auto or encoding.lossless or not self.counts:
            return self.encoding
        if not shape or None in shape[1:]:
            return self.encoding
        forward = None if self.forward is None else parse_encoding(self.forward)
        used = used_codec(encoding, self.spec.dtype, self.spec.fill_shape(self.counts[0]), forward)
        if used == encoding.codec:
            return self.encoding
        return str(
            replace(encoding, codec=used) if used is not None else replace(encoding, codec=None, ladder=(), start=0)
        )

    @property
    def rungs(self) -> tuple[int, ...]:
        """Bytes of the first micro-batch on each rung of a ramp except the last, which all other numbers refer to;
        empty without a ramp, or if known only at run time.
        """
        encoding = parse_encoding(self.encoding)
        if not encoding.ladder or encoding.auto or not self.counts:
            return ()
        encodings = (str(replace(encoding, codec=codec)) for codec in encoding.rungs[:-1])
        sizes = [self._payload(each, self.counts[0]) for each in encodings]
        return tuple(size for size in sizes if size is not None) if None not in sizes else ()

    @property
    def step_bytes(self) -> int | None:
        """Bytes per step on links."""
        known = [size for size in self.micro_batch_bytes if size is not None]
        return sum(known) * len(self.lines) if len(known) == len(self.counts) else None

    @property
    def seconds(self) -> float | None:
        """Seconds per step on the slowest link; None without a rate."""
        if self.step_bytes is None:
            return None
        held: dict[tuple[str, str], list[int]] = {}
        for line in self.lines:
            held.setdefault(line, []).extend(size for size in self.micro_batch_bytes if size is not None)
        return max_known(occupied_seconds(self.links, *line, sizes) for line, sizes in held.items())

    @cached_property
    def cost(self) -> Cost | None:
        """Seconds per step on one core, to encode and to decode; None if nothing crosses or costs are unknown."""
        if not self.lines or self.step_bytes is None or parse_encoding(self.encoding).auto:
            return None
        by_rows = {rows: self._cost(self.spec.fill_shape(rows)) for rows in set(self.counts)}
        known = [each for rows in self.counts if (each := by_rows[rows]) is not None]
        if len(known) < len(self.counts):
            return None
        encoded, renewed = 1 if self.forward is None else len(self.lines), 0.0
        if self.forward is None and self.counts:  # a structure is renewed once per step, with the first micro-batch
            dims = self.spec.fill_shape(self.counts[0])
            renewed = estimate_renewal(used_codec(parse_encoding(self.encoding), self.spec.dtype, dims), dims)
        decoded = len(self.lines) * sum(one.decode for one in known)
        return Cost(encoded * sum(one.encode for one in known) + renewed, decoded)

    @property
    def codec_seconds(self) -> float | None:
        """Seconds per step to encode and decode; None if unknown, or without a codec."""
        return None if self.cost is None or parse_encoding(self.encoding).plain else self.cost.seconds

    @property
    def encode_seconds(self) -> float | None:
        """The sender's part of `codec_seconds`."""
        return None if self.codec_seconds is None or self.cost is None else self.cost.encode

    def to_fields(self) -> dict[str, object]:
        """The plan's fields of a boundary for this direction, by name."""
        return {
            "codec": self.encoding,
            "bytes": self.micro_batch_bytes[0],
            "step_bytes": self.step_bytes,
            "seconds": self.seconds,
            "codec_seconds": self.codec_seconds,
            "encode_seconds": self.encode_seconds,
            "used": self.used_encoding if self.used_encoding != self.encoding else "",
            "rungs": self.rungs,
        }

    def replace_encoding(self, encoding: str) -> Direction:
        """The same tensors with another encoding, which for a gradient is also that of the tensor itself."""
        return replace(self, encoding=encoding, forward=None if self.forward is None else encoding)

    def _cost(self, dims: Dims) -> Cost | None:
        encoding, forward = (
            parse_encoding(self.encoding),
            None if self.forward is None else parse_encoding(self.forward),
        )
        used = encoding.codec if encoding.lossless else used_codec(encoding, self.spec.dtype, dims, forward)
        return cost(used, dims, back=forward is not None, delta=encoding.delta is not None and forward is None)


def occupied_seconds(links: Links, a: str, b: str, sizes: Sequence[int]) -> float | None:
    """Seconds for which tensors of this size occupy the link from a to b; None without a rate."""
    rate = links.between(a, b).rate
    return sum(8 * count_wire_bytes(size) for size in sizes) / rate if rate else None


def max_known(seconds: Iterable[float | None]) -> float | None:
    """The maximum of the known numbers."""
    return max((each for each in seconds if each is not None), default=None)


_ROUNDING = 1e-9

Step = Callable[[Sequence[Direction]], float]
"""A function from the encodings of a boundary to the seconds of a step."""


class CodecAdvice(NamedTuple):
    """A codec, or a part of it, that makes a step longer: what to remove, and seconds of a step with and without."""

    what: str
    seconds: float
    seconds_without: float

    def text(self, names: Sequence[str], where: str) -> str:
        """The warning for all boundaries of one line of the script; its numbers are those of the first.

        >>> CodecAdvice("nb.compress", 2.5, 2.0).text(["b0, gpu to npu", "b1, gpu to npu"], "t.py:3")
        'warning: b0, gpu to npu: a step takes 2.5 s, or 2 s without nb.compress; remove it at t.py:3 (also for b1)'
        """
        others = ", ".join(name.partition(",")[0] for name in names[1:])
        mend = f"remove it{f' at {where}' if where else ''}{f' (also for {others})' if others else ''}"
        steps = f"a step takes {duration(self.seconds)}, or {duration(self.seconds_without)} without {self.what}"
        return f"warning: {names[0]}: {steps}; {mend}"


def judge_codecs(directions: Sequence[Direction], step: Step) -> CodecAdvice | None:
    """Advice on the codecs of a boundary with which a step takes longer than without them, or than without their
    structure; None if there is no such codec. `step` returns the seconds of a step with these encodings.

    `directions` are those of the tensor and, if it crosses back, of its gradient. A codec whose saving depends on
    values (a mask) is not compared with no codec. A codec with unknown costs is not compared at all.
    """
    structure, others = parse_encoding(directions[0].encoding).structure, dict[str, list[Direction]]()
    if not has_open_size(directions[0].encoding):
        others["nb.compress"] = [each.replace_encoding(NONE) for each in directions]
    if structure is not None and structure.shrinks:
        others[structure.name] = [each.replace_encoding(_drop_structure(each.encoding)) for each in directions]
    known = {what: step(each) for what, each in others.items() if _are_known(directions, each)}
    best = min(known, key=lambda what: known[what], default="")
    longer = bool(best) and known[best] < (1.0 - _ROUNDING) * step(directions)
    return CodecAdvice(best, step(directions), known[best]) if longer else None


def _are_known(directions: Sequence[Direction], others: Sequence[Direction]) -> bool:
    """Whether the seconds of all encodings that differ are known."""
    changed = [
        each for pair in zip(directions, others, strict=True) if pair[0].encoding != pair[1].encoding for each in pair
    ]
    return all(each.seconds is not None and each.cost is not None for each in changed)


def _drop_structure(text: str) -> str:
    encoding = parse_encoding(text)
    ladder = encoding.ladder if encoding.precision is not None else ()
    return str(replace(encoding, codec=encoding.precision, ladder=ladder))


def list_fallbacks(plan: Plan) -> Iterator[str]:
    """A sentence for each boundary or gradient that does not use the requested codec, as that would
    increase its size.
    """
    for each in plan.boundaries:
        dims = [plan.rows[0] if size is None else size for size in each.shape or ()]
        ways = ("", each.used, each.codec), (" gradient", each.backward_used, each.backward_codec)
        for what, used, asked in ways:
            if used:
                codec = parse_encoding(used).codec
                how = f"as {codec}" if codec is not None else "uncompressed"
                yield f"{each.name}{what} {dims} crosses {how}: {parse_encoding(asked).codec} would not make it smaller"


@dataclass(frozen=True)
class RecordBuilder:
    """Builds the records of a Plan from a Cut. `rows` are those of each micro-batch of the example, `shapes` those of
    its leaves, `subject` is the model's name in a step of Keras's, and `returned` are the names of the step's results.
    """

    cut: Cut
    rows: Sequence[int]
    links: Links = field(default_factory=Links)
    shapes: Sequence[tuple[int, ...]] = ()
    subject: str = ""
    returned: Sequence[str] = ()

    @cached_property
    def stage_variables(self) -> StageVariables:
        """The variables and optimizer slots of each stage."""
        return StageVariables(self.cut)

    @cached_property
    def work(self) -> StageWork:
        """The computation and memory of stages for the first micro-batch."""
        leaves = self.cut.program.leaves
        known = zip(leaves, self.shapes, strict=True) if self.shapes else ()
        shapes = {leaf.op: (self.rows[0], *shape[1:]) if leaf.batched else shape for leaf, shape in known}
        return StageWork(self.cut, self.stage_variables, self.rows[0], shapes, self.subject)

    @cached_property
    def exchanged(self) -> ExchangeSizes:
        """Sizes of the exchanges between clusters once per step."""
        return ExchangeSizes(self.cut, self.shapes)

    def stages(self) -> dict[str, PlanStage]:
        """The stages by name, in their order."""
        keys = [stage.key for stage in self.cut.program.stages]
        return {key: self._stage(n, ", ".join(self.cut.workers_of(n))) for n, key in enumerate(keys)}

    def boundaries(self) -> tuple[PlanBoundary, ...]:
        """The boundaries, in the order of the ops that make them."""
        return tuple(self._boundary_record(each, *self._directions(each)) for each in self.cut.boundaries)

    def advice(self, plan: Plan) -> tuple[str, ...]:
        """Warnings of codecs that make a step longer, by simulated steps; one for each line of the script, on the
        boundary with the largest loss.
        """
        stages, found = self.cut.program.stages, dict[tuple[str, str], list[tuple[CodecAdvice, str]]]()
        for each in self.cut.boundaries:
            one = judge_codecs(self._directions(each)[: 1 + each.backward], partial(self._step, plan, each))
            if one is not None:
                readers = " and ".join(stages[number].key for number in each.destinations)
                name = f"{_name(each)}, {stages[each.source].key} to {readers}"
                found.setdefault((each.where, one.what), []).append((one, name))
        for own in found.values():
            own.sort(key=lambda one: one[0].seconds_without - one[0].seconds)
        return tuple(own[0][0].text([name for _, name in own], where) for (where, _), own in found.items())

    def _step(self, plan: Plan, boundary: Boundary, directions: Sequence[Direction]) -> float:
        """Seconds of a step in which a boundary has other encodings than planned."""
        changed = self._boundary_record(boundary, directions[0], directions[-1])
        boundaries = (changed if each.name == changed.name else each for each in plan.boundaries)
        return predict_times(replace(plan, boundaries=tuple(boundaries))).seconds

    def list_once_parts(self) -> tuple[PlanOnce, ...]:
        """The parts that run once per step, in order."""
        found = [self._describe_once([fragment]) for fragment in self.cut.batch_fragments.values()]
        for phase in self.cut.phases:
            found += [self._describe_once([fragment]) for fragment in phase.prologue.values()]
            found += [self._describe_once(fragments) for fragments in phase.updates.values()]
        return tuple(each for each in found if each.ops)

    def list_tied_variables(self) -> tuple[PlanTied, ...]:
        """The variables with a gradient from two or more stages."""
        owners: dict[int, list[tuple[Request, GradientPart]]] = {}
        for request in self.cut.program.requests:
            for part in request.parts:
                owners.setdefault(request.origins[part.source], []).append((request, part))
        variables = self.cut.program.variable_ops
        several = {op: parts for op, parts in owners.items() if len({part.stage for _, part in parts}) > 1}
        return tuple(self._tied_variable(variables[op], parts) for op, parts in several.items() if op in variables)

    # ------------------------------------------------------------------ stages
    def _stage(self, number: int, worker: str) -> PlanStage:
        stage, factor = self.cut.program.stages[number], self._step_factor
        phases = self.work.list_phases(number)
        fragments = [fragment for phase in phases for fragment in phase.fragments]
        variables, slots = self.stage_variables.list_variables(number), self.stage_variables.list_slots(number)
        flops, ops = (self.work.count_flops(number, backward=back) for back in (False, True)), list_ops_in(fragments)
        forward_flops, backward_flops = (round(each * factor) for each in flops)
        return PlanStage(
            name=stage.key,
            cluster=stage.cluster,
            worker=worker,
            replicas=stage.replicas,
            order=self.cut.routing.orders[number] if self.cut.routing.orders else (),
            speeds=stage.speeds,
            shards=stage.shards if number in self.cut.layouts else 1,
            shard_bytes=splits.shard_bytes(self.cut, number, variables) if number in self.cut.layouts else 0,
            forward_ops=len(self.work.list_ops(number, backward=False)),
            backward_ops=len(self.work.list_ops(number, backward=True)),
            variables=tuple(variable.path for variable in variables),
            parameters=sum(count_parameters(variable.spec) for variable in variables),
            inputs=tuple(self._inputs(number, fragments)),
            outputs=tuple(self._outputs(number)),
            runs=tuple(self._runs(number, phase) for phase in self.cut.phases),
            forward_flops=forward_flops,
            backward_flops=backward_flops,
            weights_flops=round(self.work.count_weights_flops(number) * factor),
            activation_bytes=max((sum(self.work.count_kept_bytes(phase).values()) for phase in phases), default=0),
            variable_bytes=sum(variable.spec.nbytes() for variable in variables),
            gradient_bytes=sum(self._gradient(part) for _, part in self._parts if part.stage == number),
            slot_bytes=sum(splits.slot_bytes(self.cut, number, slot) for slot in slots),
            layers=self.work.list_layers(number, factor),
            open_loops=len({self.cut.program.graph.ops[op].name for op in ops} & self.work.flop_counter.open_loops),
        )

    @property
    def _step_factor(self) -> float:
        """The rows of a step, as a multiple of those of the first micro-batch."""
        return sum(self.rows) / self.rows[0] if self.rows[0] else 1.0

    def _inputs(self, number: int, fragments: Iterable[Fragment]) -> Iterator[str]:
        fed = {value.op for fragment in fragments for value in fragment.feeds}
        yield from (leaf.name for leaf in self.cut.program.leaves if leaf.op in fed)
        yield from (_name(b) for b in self.cut.boundaries if number in b.destinations)

    def _outputs(self, number: int) -> Iterator[str]:
        program = self.cut.program
        yield from (_name(b) for b in self.cut.boundaries if b.source == number)
        made = self.work.list_ops(number, backward=False)
        returned = self.returned or [""] * len(program.returns)  # a single tensor has no name
        given = {value.op: name for value, name in zip(program.returns, returned, strict=True)}
        losses = self._losses & made
        yield from dict.fromkeys(given.get(op) or "loss" for op in sorted(losses))
        yield from dict.fromkeys(name or "result" for op, name in given.items() if op in made - losses)

    @cached_property
    def _losses(self) -> set[int]:
        """The ops of stages for the differentiated value: itself, or the terms of a sum that is computed once per
        step.
        """
        program = self.cut.program
        made = set[int]().union(*(self.work.list_ops(stage, backward=False) for stage in range(len(program.stages))))
        targets = (value.op for request in program.requests for value in request.targets)
        return program.graph.ascend(targets, stop=made.__contains__) & made & program.batch_dependent_ops

    def _runs(self, number: int, phase: PhasePlan) -> str:
        phases = [stage_phase for stage_phase in phase.stages if stage_phase.stage == number]
        request_of = self.cut.program.request_of
        ops = list_ops_in(fragment for stage_phase in phases for fragment in stage_phase.fragments)
        forward, weights = (any(getattr(p, name) is not None for p in phases) for name in ("forward", "weights"))
        return "F" * forward + "B" * any(request_of(op) is not None for op in ops) + "W" * weights

    # ------------------------------------------------------------------ gradients
    @property
    def _parts(self) -> Iterator[tuple[Request, GradientPart]]:
        return ((request, part) for request in self.cut.program.requests for part in request.parts)

    def _gradient(self, part: GradientPart) -> int:
        """Bytes of a stage's accumulated gradients: rows of embedding tables are concatenated, others are summed."""
        size = sum(self.work.flop_counter.nbytes(value) for value in part.values)
        return round(size * self._step_factor) if part.concatenated else size

    def _tied_variable(self, variable: Variable, parts: Sequence[tuple[Request, GradientPart]]) -> PlanTied:
        stages = self.cut.program.stages
        numbers = sorted({part.stage for _, part in parts})
        sent: dict[tuple[str, str], int] = {}
        for _, part in parts:
            own = stages[part.stage].cluster
            for other in dict.fromkeys(stages[number].cluster for number in numbers):
                if other != own:
                    sent[own, other] = sent.get((own, other), 0) + self._gradient(part)
        keys = {request.key_of(part) for request, part in parts}
        return PlanTied(
            variable.path,
            *variable.spec,
            tuple(stages[number].key for number in numbers),
            variable.spec.nbytes(),
            {"->".join(ends): size for ends, size in sent.items()},
            max_known(occupied_seconds(self.links, *ends, [size]) for ends, size in sent.items()),
            any(each.part in keys and self.exchanged.is_upper_bound(each) for each in self.cut.exchanges),
        )

    # ------------------------------------------------------------------ crossings, and parts that run once
    def _boundary_record(self, boundary: Boundary, there: Direction, returns: Direction) -> PlanBoundary:
        program, back = self.cut.program, boundary.backward
        fields: dict[str, Any] = {"backward_codec": "none", "backward_bytes": None, **there.to_fields()}
        if back:
            fields |= {f"backward_{name}": value for name, value in returns.to_fields().items()}
        return PlanBoundary(
            name=_name(boundary),
            source=program.stages[boundary.source].key,
            destinations=tuple(program.stages[stage].key for stage in boundary.destinations),
            **program.graph.spec(boundary.value)._asdict(),
            phase=boundary.phase,
            backward=back,
            maker=self.work.names.find_maker(program.graph.ops[boundary.value.op].name),
            **fields,
        )

    def _directions(self, boundary: Boundary) -> tuple[Direction, Direction]:
        """The tensor's direction, once to each other cluster, and the gradient's, from each stage with a share."""
        program, clusters = self.cut.program, [stage.cluster for stage in self.cut.program.stages]
        source = clusters[boundary.source]
        readers = dict.fromkeys(clusters[number] for number in boundary.destinations)
        flows = (flow for request in program.requests for flow in request.flows)
        makers = [clusters[flow.stage] for flow in flows if flow.boundary == boundary.value]
        counts = list(self.rows) if boundary.layout == "rows" else [1] * len(self.rows)
        lines = [(source, other) for other in readers if other != source]
        there = Direction(program.graph.spec(boundary.value), boundary.codec, counts, lines, links=self.links)
        lines = [(other, source) for other in makers if other != source]
        return there, replace(there, encoding=boundary.backward_codec, lines=lines, forward=boundary.codec)

    def _describe_once(self, fragments: Iterable[Fragment]) -> PlanOnce:
        found = list(fragments)
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        ops = sorted({op for fragment in found for op in fragment.ops if graph.ops[op].type != "Const"})
        touched = [value.op for op in ops if writes_variable(graph.ops[op]) for value in graph.ops[op].inputs]
        written = list(dict.fromkeys(variables[op] for op in touched if op in variables))
        descended = {op for request in self.cut.program.requests for op in request.origins}
        return PlanOnce(
            kind=found[0].kind,
            phase=found[0].phase,
            worker=found[0].worker,
            ops=len(ops),
            rounds=len(found),
            writes=tuple(variable.path for variable in written),
            trainable=sum(variable.op in descended for variable in written),
        )


def _name(boundary: Boundary) -> str:
    return f"b{boundary.slot}"
