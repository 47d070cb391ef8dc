"""A plan as text that someone who sees one for the first time understands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from whale_nebula.ir.face import Plan
from whale_nebula.ir.overview import PlanBoundary, PlanOnce, PlanStage
from whale_nebula.ir.spec import Spec
from whale_nebula.report.text import size
from whale_nebula.schedule import Hop, Work, draw, simulate

WIDTH = 100
_LISTED = 5
_DRAWN = 12
"""More micro-batches than this are not drawn."""


def plan_text(plan: Plan) -> str:
    """The whole text: a head, and a section for each thing that there is something to say of."""
    sections: dict[str, Callable[[Plan], Iterator[str]]] = {
        "stages": _stages,
        "boundaries": _boundaries,
        "links": _links,
        "tied variables": _tied,
        "once a step": _once,
        "notes": lambda given: iter(given.notes),
        "schedule": _schedule,
    }
    found = [*_head(plan)]
    for title, write in sections.items():
        lines = [f"  {line}".rstrip() for line in write(plan)]
        found += ["", title, *lines] if lines else []
    return "\n".join(found)


def _head(plan: Plan) -> Iterator[str]:
    yield f"plan of {plan.name}"
    yield f"  digest {plan.digest[:12]}, of the program {plan.program_digest[:12]}"
    yield f"  {_micro_batches(plan)}, schedule {plan.schedule}{_limit(plan)}"


def _micro_batches(plan: Plan) -> str:
    rows = sum(plan.rows)
    if len(plan.rows) == 1:
        few = "" if plan.micro_batch == 1 else f" (of {plan.micro_batch} asked for)"
        return f"1 micro-batch{few} of {rows} rows"
    most, least = max(plan.rows), min(plan.rows)
    each = str(most) if most == least else f"{least} to {most}"
    return f"{len(plan.rows)} micro-batches of {each} rows ({rows} in the example)"


def _limit(plan: Plan) -> str:
    return "" if plan.in_flight is None else f", at most {plan.in_flight} in flight"


# ---------------------------------------------------------------------- sections
def _stages(plan: Plan) -> Iterator[str]:
    rows = [_stage(number, stage) for number, stage in enumerate(plan.stages.values())]
    return _table([_STAGE_HEAD, *rows], numbers=range(4, 8))


_STAGE_HEAD = (
    *("", "name", "cluster", "worker"),
    *("ops forward", "backward", "variables", "parameters", "reads", "gives"),
)


def _stage(number: int, stage: PlanStage) -> list[str]:
    counts = (stage.forward_ops, stage.backward_ops, len(stage.variables), stage.parameters)
    words = [_listed(stage.inputs), _listed(stage.outputs)]
    return [str(number), stage.name, stage.cluster, stage.worker, *(f"{count:,}" for count in counts), *words]


def _boundaries(plan: Plan) -> Iterator[str]:
    if not plan.boundaries:
        return iter(())
    head = ["", "tensor", "from", "to", "a micro-batch", "its gradient"]
    phases = len({once.phase for once in plan.once} | {each.phase for each in plan.boundaries}) > 1
    return _table([head, *(_boundary(each, phases) for each in plan.boundaries)])


def _boundary(each: PlanBoundary, phases: bool) -> list[str]:
    name = f"{each.name} (phase {each.phase})" if phases else each.name
    spec = str(Spec(each.dtype, each.shape))
    sent = _sent(each.bytes, each.codec)
    back = _sent(each.backward_bytes, each.backward_codec) if each.backward else "does not return"
    if each.backward and len(each.destinations) > 1:
        back += " from each"
    return [name, spec, each.source, _listed(each.destinations), sent, back]


def _sent(count: int | None, codec: str) -> str:
    amount = "as many bytes as it has" if count is None else size(count)
    return amount if codec == "none" else f"{amount} as {codec}"


def _links(plan: Plan) -> Iterator[str]:
    rows = [["", "line", "tensors a step"]]
    rows += [[name, link.line, size(link.bytes)] for name, link in plan.links.items()]
    return _table(rows) if plan.links else iter(())


def _tied(plan: Plan) -> Iterator[str]:
    for each in plan.tied:
        spec = Spec(each.dtype, each.shape)
        yield f"{each.path} {spec} is in {' and '.join(each.stages)}:"
        yield f"  each holds it; their gradients, {size(each.bytes)} each, are summed once a step"


def _once(plan: Plan) -> Iterator[str]:
    several = len({each.worker for each in plan.once}) > 1
    phased = len({each.phase for each in plan.once}) > 1
    for each in plan.once:
        where = f" on {each.worker}" if several else ""
        phase = f"phase {each.phase}, " if phased and each.kind != "whole" else ""
        yield f"{phase}{_WHEN[each.kind]}{where}: {each.ops:,} ops{_rounds(each)}{_written(each)}"


_WHEN = {
    "whole": "from the whole batch",
    "prologue": "before the micro-batches",
    "update": "after the micro-batches",
}


def _rounds(each: PlanOnce) -> str:
    return f" in {each.rounds} rounds with scalars between them" if each.rounds > 1 else ""


def _written(each: PlanOnce) -> str:
    if not each.writes:
        return ", which write nothing"
    others = len(each.writes) - each.trainable
    parts = [f"{each.trainable} trained"] * bool(each.trainable) + [f"{others} other"] * bool(others)
    return f" write {' and '.join(parts)} variable{'s' * (len(each.writes) > 1)}"


def _schedule(plan: Plan) -> Iterator[str]:
    count = min(len(plan.rows), _DRAWN)
    if count < len(plan.rows):
        yield f"(the first {count} of {len(plan.rows)} micro-batches)"
    phases = max((len(stage.runs) for stage in plan.stages.values()), default=0)
    for phase in range(phases):
        rows = _phase(plan, phase, count)
        yield from ([f"phase {phase}"] if phases > 1 and rows else [])
        yield from rows


def _phase(plan: Plan, phase: int, count: int) -> list[str]:
    """A row a stage: a forward takes one unit of time, a backward two, and links nothing."""
    taking = [stage for stage in plan.stages.values() if stage.runs[phase]]
    if not taking:
        return []
    works = [_work(stage.runs[phase]) for stage in taking]
    hops = _hops(plan, [stage.name for stage in taking])
    timeline = simulate(works, hops, count, name=plan.schedule, in_flight=plan.in_flight)
    margin = max(len(stage.name) for stage in plan.stages.values())
    rows = draw(timeline, width=WIDTH - 2 - margin + len("stage 0")).splitlines()
    bars = [row[row.index("|") :] for row in rows]
    return [f"{stage.name:<{margin}} {bar}" for stage, bar in zip(taking, bars, strict=True)]


def _work(runs: str) -> Work:
    return Work(float("F" in runs), 2.0 if "B" in runs else None)


def _hops(plan: Plan, names: list[str]) -> dict[tuple[int, int], Hop]:
    """What waits for what: a hop for each pair of stages that a boundary joins."""
    pairs: dict[tuple[int, int], bool] = {}
    for each in plan.boundaries:
        for destination in {each.source, *each.destinations} - {each.source}:
            if each.source in names and destination in names:
                pair = names.index(each.source), names.index(destination)
                pairs[pair] = pairs.get(pair, False) or each.backward
    return {pair: Hop(None, None, 0.0, 0.0 if returns else None) for pair, returns in pairs.items()}


# ---------------------------------------------------------------------- layout
def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _listed(names: Sequence[str]) -> str:
    if len(names) > _LISTED:
        names = [*names[: _LISTED - 1], f"{len(names) - _LISTED + 1} more"]
    return ", ".join(names) or "-"
