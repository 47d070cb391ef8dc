"""Build the records of a Plan from a Cut, with counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from whale_nebula.config import Links
from whale_nebula.ir.cut import Boundary, Cut, Fragment, StagePhase
from whale_nebula.ir.program import GradientPart, Request, Variable
from whale_nebula.ir.sizes import Exchanged
from whale_nebula.plan.codec_advice import CodecAdvice, Direction, holds, judge_codecs, slowest
from whale_nebula.plan.plan import Plan
from whale_nebula.plan.records import PlanBoundary, PlanOnce, PlanStage, PlanTied
from whale_nebula.plan.timing import assumptions_of, times
from whale_nebula.plan.work import Holdings, Work, made_in, parameters, writes
from whale_nebula.wire.frame import wire_bytes


@dataclass(frozen=True)
class Overview:
    """Reads a Cut; `rows` are those of each micro-batch of the example, `shapes` those of its leaves, and `returned`
    the names of what the step returns.
    """

    cut: Cut
    rows: Sequence[int]
    links: Links = field(default_factory=Links)
    shapes: Sequence[tuple[int, ...]] = ()
    subject: str = ""
    returned: Sequence[str] = ()

    @cached_property
    def holdings(self) -> Holdings:
        """Who holds which variable."""
        return Holdings(self.cut)

    @cached_property
    def work(self) -> Work:
        """What the stages compute and keep for the first micro-batch."""
        leaves = self.cut.program.leaves
        known = zip(leaves, self.shapes, strict=True) if self.shapes else ()
        shapes = {leaf.op: (self.rows[0], *shape[1:]) if leaf.batched else shape for leaf, shape in known}
        return Work(self.cut, self.holdings, self.rows[0], shapes, self.subject)

    @cached_property
    def exchanged(self) -> Exchanged:
        """Sizes of what clusters exchange once a step."""
        return Exchanged(self.cut, self.shapes)

    def exchange_seconds(self) -> float:
        """For how long clusters wait for what they exchange once a step: round after round, each for its slowest."""
        rounds: dict[tuple[int, int], dict[tuple[str, str], int]] = {}
        for each in self.cut.exchange:
            together = rounds.setdefault((each.phase, each.round), {})
            ends = each.source, each.destination
            together[ends] = together.get(ends, 0) + wire_bytes(self.exchanged.nbytes(each, self.rows) or 0)
        return sum(max(self._away(*ends, size) for ends, size in together.items()) for together in rounds.values())

    def _away(self, a: str, b: str, size: int) -> float:
        """Seconds from sending so many bytes to their arrival."""
        line = self.links.between(a, b)
        return line.delay + (8 * size / line.rate if line.rate else 0.0)

    def stages(self) -> dict[str, PlanStage]:
        """The stages by name, in their order."""
        keys = [stage.key for stage in self.cut.program.stages]
        return {key: self._stage(n, ", ".join(self.cut.routing.of(n))) for n, key in enumerate(keys)}

    def boundaries(self) -> tuple[PlanBoundary, ...]:
        """The boundaries, in the order of their making."""
        return tuple(self._boundary(boundary) for boundary in self.cut.boundaries)

    def advice(self, plan: Plan) -> tuple[str, ...]:
        """Which codecs cost more time than they save, by the steps that the plan foretells; once a line of the script,
        about the boundary by which most is lost.
        """
        stages = self.cut.program.stages
        found: dict[tuple[str, str], list[tuple[CodecAdvice, str]]] = {}
        for each in self.cut.boundaries:
            there, back = self._directions(each)
            one = judge_codecs((there, back)[: 1 + each.backward], partial(self._step, plan, each))
            if one is not None:
                readers = " and ".join(stages[number].key for number in each.destinations)
                told = one, f"{_name(each)}, {stages[each.source].key} to {readers}"
                found.setdefault((each.where, one.mend), []).append(told)
        notes = []
        for (where, _), together in found.items():
            together.sort(key=lambda told: -told[0].lost)
            notes.append(together[0][0].text([name for _, name in together], where))
        return tuple(notes)

    def _step(self, plan: Plan, boundary: Boundary, ways: Sequence[Direction]) -> float:
        """Seconds of a step in which a boundary crosses otherwise than planned, on the same assumption."""
        so = self._crossing(boundary, ways[0], ways[-1])
        others = (so if each.name == so.name else each for each in plan.boundaries)
        return times(replace(plan, boundaries=tuple(others)), assumptions_of(plan)).seconds

    def once(self) -> tuple[PlanOnce, ...]:
        """What runs once, in the order of its running."""
        found = [self._once([fragment]) for fragment in self.cut.whole.values()]
        for phase in self.cut.phases:
            found += [self._once([fragment]) for fragment in phase.prologue.values()]
            found += [self._once(fragments) for fragments in phase.updates.values()]
        return tuple(each for each in found if each.ops)

    def tied(self) -> tuple[PlanTied, ...]:
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
        stage, steps = self.cut.program.stages[number], self._steps
        pieces = self.work.pieces(number)
        variables = self.holdings.of(number)
        return PlanStage(
            name=stage.key,
            cluster=stage.cluster,
            worker=worker,
            replicas=stage.replicas,
            order=self.cut.routing.orders[number] if self.cut.routing.orders else (),
            speeds=stage.speeds,
            forward_ops=len(self.work.told(number, backward=False)),
            backward_ops=len(self.work.told(number, backward=True)),
            variables=tuple(variable.path for variable in variables),
            parameters=sum(parameters(variable.spec) for variable in variables),
            inputs=tuple(self._inputs(number, pieces)),
            outputs=tuple(self._outputs(number)),
            runs=tuple(self._runs(number, phase.index) for phase in self.cut.phases),
            forward_flops=round(self.work.flops(number, backward=False) * steps),
            backward_flops=round(self.work.flops(number, backward=True) * steps),
            activation_bytes=max((sum(self.work.kept(piece).values()) for piece in pieces), default=0),
            variable_bytes=sum(variable.spec.nbytes() for variable in variables),
            gradient_bytes=sum(self._gradient(part) for _, part in self._parts if part.stage == number),
            slot_bytes=sum(slot.spec.nbytes() for slot in self.holdings.slots(number)),
            layers=self.work.layers(number, steps),
            open_loops=len(self._open_loops(pieces)),
        )

    @property
    def _steps(self) -> float:
        """How many times the first micro-batch a step is."""
        return sum(self.rows) / self.rows[0] if self.rows[0] else 1.0

    def _open_loops(self, pieces: Iterable[StagePhase]) -> set[str]:
        ops = made_in(f for piece in pieces for f in (piece.forward, piece.backward) if f is not None)
        return {name for op in ops if (name := self.cut.program.graph.ops[op].name) in self.work.effort.open_loops}

    def _inputs(self, number: int, pieces: Iterable[StagePhase]) -> Iterator[str]:
        program = self.cut.program
        fragments = [f for piece in pieces for f in (piece.forward, piece.backward) if f is not None]
        fed = {value.op for fragment in fragments for value in fragment.feeds}
        yield from (leaf.name for leaf in program.leaves if leaf.op in fed)
        yield from (_name(b) for b in self.cut.boundaries if number in b.destinations)

    def _outputs(self, number: int) -> Iterator[str]:
        program = self.cut.program
        yield from (_name(b) for b in self.cut.boundaries if b.source == number)
        made = self.work.told(number, backward=False)
        given = {value.op: name for value, name in zip(program.returns, self._returned, strict=True)}
        losses = self._losses & made
        yield from dict.fromkeys(given.get(op) or "loss" for op in sorted(losses))
        yield from dict.fromkeys(name or "result" for op, name in given.items() if op in made - losses)

    @property
    def _returned(self) -> Sequence[str]:
        """The names of what the step returns; nothing where it returns a single tensor."""
        return self.returned or [""] * len(self.cut.program.returns)

    @cached_property
    def _losses(self) -> set[int]:
        """What stages make of what is differentiated: it itself, or the terms of a sum that is taken once a step."""
        program = self.cut.program
        made = set[int]().union(*(self.work.told(stage, backward=False) for stage in range(len(program.stages))))
        targets = (value.op for request in program.requests for value in request.targets)
        return program.graph.ascend(targets, stop=made.__contains__) & made & program.of_batch

    def _runs(self, number: int, phase: int) -> str:
        pieces = [piece for piece in self.cut.phases[phase].stages if piece.stage == number]
        request_of = self.cut.program.request_of
        ops = made_in(f for piece in pieces for f in (piece.forward, piece.backward) if f is not None)
        forward = any(piece.forward is not None for piece in pieces)
        return "F" * forward + "B" * any(request_of(op) is not None for op in ops)

    # ------------------------------------------------------------------ gradients
    @property
    def _parts(self) -> Iterator[tuple[Request, GradientPart]]:
        return ((request, part) for request in self.cut.program.requests for part in request.parts)

    def _gradient(self, part: GradientPart) -> int:
        """Bytes of what a stage adds up over a step: rows of a table are listed, all else is summed."""
        size = sum(self.work.effort.nbytes(value) for value in part.values)
        return round(size * self._steps) if part.concatenated else size

    def _tied_variable(self, variable: Variable, parts: Sequence[tuple[Request, GradientPart]]) -> PlanTied:
        stages = self.cut.program.stages
        numbers = sorted({part.stage for _, part in parts})
        sent: dict[str, int] = {}
        for _, part in parts:
            for other in dict.fromkeys(stages[number].cluster for number in numbers):
                if other != stages[part.stage].cluster:
                    line = f"{stages[part.stage].cluster}->{other}"
                    sent[line] = sent.get(line, 0) + self._gradient(part)
        return PlanTied(
            variable.path,
            *variable.spec,
            tuple(stages[number].key for number in numbers),
            variable.spec.nbytes(),
            sent,
            slowest(holds(self.links, *_ends(line), [size]) for line, size in sent.items()),
            self._unsure(parts),
        )

    def _unsure(self, parts: Sequence[tuple[Request, GradientPart]]) -> bool:
        """Whether values decide how many rows these gradients list."""
        keys = {request.key_of(part) for request, part in parts}
        return any(each.part in keys and self.exchanged.at_most(each) for each in self.cut.exchange)

    # ------------------------------------------------------------------ what crosses, what runs once
    def _boundary(self, boundary: Boundary) -> PlanBoundary:
        return self._crossing(boundary, *self._directions(boundary))

    def _crossing(self, boundary: Boundary, there: Direction, returns: Direction) -> PlanBoundary:
        """A boundary whose tensor, and gradient, cross so."""
        program = self.cut.program
        spec = program.graph.spec(boundary.value)
        back = boundary.backward
        return PlanBoundary(
            name=_name(boundary),
            source=program.stages[boundary.source].key,
            destinations=tuple(program.stages[stage].key for stage in boundary.destinations),
            dtype=spec.dtype,
            shape=spec.shape,
            phase=boundary.phase,
            codec=there.way,
            bytes=there.each[0],
            backward=back,
            backward_codec=returns.way if back else "none",
            backward_bytes=returns.each[0] if back else None,
            step_bytes=there.total,
            backward_step_bytes=returns.total if back else None,
            seconds=there.seconds,
            backward_seconds=returns.seconds if back else None,
            codec_seconds=there.codec_seconds,
            backward_codec_seconds=returns.codec_seconds if back else None,
            encode_seconds=there.encode_seconds,
            backward_encode_seconds=returns.encode_seconds if back else None,
            used=there.used if there.used != there.way else "",
            backward_used=returns.used if back and returns.used != returns.way else "",
            rungs=there.rungs,
            backward_rungs=returns.rungs if back else (),
            maker=self.work.names.maker(program.graph.ops[boundary.value.op].name),
        )

    def _directions(self, boundary: Boundary) -> tuple[Direction, Direction]:
        """The tensor on its way, and its gradient."""
        spec, counts = self.cut.program.graph.spec(boundary.value), self._counts(boundary)
        there = Direction(spec, boundary.codec, counts, self._lines(boundary), links=self.links)
        back = replace(there, way=boundary.backward_codec, lines=self._returns(boundary), forward=boundary.codec)
        return there, back

    def _counts(self, boundary: Boundary) -> list[int]:
        """The rows of each micro-batch, as far as they matter to a boundary's size."""
        return list(self.rows) if boundary.layout == "rows" else [1] * len(self.rows)

    def _lines(self, boundary: Boundary) -> list[tuple[str, str]]:
        """The lines that a boundary is sent over: once to each other cluster."""
        clusters = [stage.cluster for stage in self.cut.program.stages]
        source = clusters[boundary.source]
        others = dict.fromkeys(clusters[number] for number in boundary.destinations)
        return [(source, other) for other in others if other != source]

    def _returns(self, boundary: Boundary) -> list[tuple[str, str]]:
        """The lines that its gradients come back over: one from each stage that makes a share of it."""
        clusters = [stage.cluster for stage in self.cut.program.stages]
        flows = (flow for request in self.cut.program.requests for flow in request.flows)
        pairs = [(clusters[f.stage], clusters[boundary.source]) for f in flows if f.boundary == boundary.value]
        return [(a, b) for a, b in pairs if a != b]

    def _once(self, fragments: Iterable[Fragment]) -> PlanOnce:
        found = list(fragments)
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        ops = sorted({op for fragment in found for op in fragment.ops if graph.ops[op].type != "Const"})
        touched = [value.op for op in ops if writes(graph.ops[op]) for value in graph.ops[op].inputs]
        written = list(dict.fromkeys(variables[op] for op in touched if op in variables))
        return PlanOnce(
            kind=found[0].kind,
            phase=found[0].phase,
            worker=found[0].worker,
            ops=len(ops),
            rounds=len(found),
            writes=tuple(variable.path for variable in written),
            trainable=sum(variable.op in self._descended for variable in written),
        )

    @cached_property
    def _descended(self) -> frozenset[int]:
        """The variables that the step asks gradients for."""
        return frozenset(op for request in self.cut.program.requests for op in request.origins)


def _ends(line: str) -> tuple[str, str]:
    source, _, destination = line.partition("->")
    return source, destination


def _name(boundary: Boundary) -> str:
    return f"b{boundary.slot}"
