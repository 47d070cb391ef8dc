"""The text form of a plan, for readers who see one for the first time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from whale_nebula.codec.way import describe_bytes, details, has_open_size, words
from whale_nebula.ir.routing import row_name, take_counts, times_of_shares
from whale_nebula.plan.records import PlanBoundary, PlanLink, PlanOnce, PlanStage, PlanTied
from whale_nebula.plan.timing import PhaseTimes, Times, duration, step_text, times
from whale_nebula.report.bottleneck import WORTH, mend, straggler_text, waits
from whale_nebula.report.records import size
from whale_nebula.schedule import draw
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


WIDTH = 100
_LISTED = 5
_DRAWN = 12
"""More micro-batches than this are not drawn."""


def plan_text(plan: Plan) -> str:
    """The whole text: a head, and a section for each thing that there is something to say of."""
    sections: dict[str, Callable[[Plan], Iterator[str]]] = {
        "stages": _stages,
        "work of a step, and memory": _work,
        "boundaries": _boundaries,
        "links": _links,
        "tied variables": tied_lines,
        "once a step": once_lines,
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
    yield f"  {micro_batches(plan)}, schedule {plan.schedule}{_limit(plan)}"


def micro_batches(plan: Plan) -> str:
    """How the batch of the example is cut."""
    rows = sum(plan.rows)
    if len(plan.rows) == 1:
        few = "" if plan.micro_batch == 1 else f" (of {plan.micro_batch} asked for)"
        return f"1 micro-batch{few} of {rows} row{'s' * (rows != 1)}"
    most, least = max(plan.rows), min(plan.rows)
    each = str(most) if most == least else f"{least} to {most}"
    return f"{len(plan.rows)} micro-batches of {each} row{'s' * (most != 1)} ({rows} in the example)"


def _limit(plan: Plan) -> str:
    return "" if plan.in_flight is None else f", at most {plan.in_flight} in flight"


# ---------------------------------------------------------------------- stages
def _stages(plan: Plan) -> Iterator[str]:
    rows = [_stage(number, stage) for number, stage in enumerate(plan.stages.values())]
    yield from _table([_STAGE_HEAD, *rows], numbers=range(4, 8))
    for line in share_lines(plan):
        yield from wrap(line, WIDTH, subsequent_indent="    ")


def share_lines(plan: Plan) -> Iterator[str]:
    """What the replicas of stages take where they are not equally fast, and who waits for whom."""
    for stage in plan.stages.values():
        if not stage.order and not stage.speeds:
            continue
        shares = take_counts(stage.order, stage.replicas, len(plan.rows))
        by = f" (speeds {_ratio(stage.speeds)})" if stage.speeds else ""
        order = f", in the order {' '.join(map(str, stage.order))}" if stage.order else " in turn"
        yield f"{stage.name}: replicas take {_ratio(shares)} of {len(plan.rows)} micro-batches{order}{by}"
        yield from _idle(stage, shares, len(plan.rows), sum(plan.rows))


def _ratio(numbers: Sequence[float]) -> str:
    return " : ".join(f"{number:g}" for number in numbers)


def _idle(stage: PlanStage, shares: Sequence[int], count: int, rows: int) -> Iterator[str]:
    """Who waits for the slowest, by the speeds that the config says."""
    if not stage.speeds:
        return
    took = times_of_shares(shares, stage.speeds)
    idle = waits(took) / max(took)
    if idle > WORTH:
        yield straggler_text(
            stage.name, took, f"{100 * idle:.0f} % of what that takes", mend(stage.speeds, count, rows)
        )


_STAGE_HEAD = (
    *("", "name", "cluster", "worker"),
    *("ops forward", "backward", "variables", "parameters", "reads", "gives"),
)


def _stage(number: int, stage: PlanStage) -> list[str]:
    counts = (stage.forward_ops, stage.backward_ops, len(stage.variables), stage.parameters)
    words = [_list_words(stage.inputs), _list_words(stage.outputs)]
    return [str(number), stage.name, stage.cluster, worker_of(stage), *(f"{count:,}" for count in counts), *words]


def worker_of(stage: PlanStage) -> str:
    """Who runs a stage, and in how many replicas."""
    return stage.worker if stage.replicas == 1 else f"{stage.worker}: {stage.replicas} replicas"


_WORK_HEAD = ("", "FLOPs forward", "backward", "a micro-batch keeps", "variables", "gradients", "slots", "memory")


def _work(plan: Plan) -> Iterator[str]:
    """FLOPs, and what the memory of a stage is made of."""
    if not any(stage.flops or stage.memory_bytes for stage in plan.stages.values()):
        return
    yield from _table([_WORK_HEAD, *map(_work_columns, plan.stages.values())], numbers=range(1, 8))
    loops = sum(stage.open_loops for stage in plan.stages.values())
    if loops:
        yield f"{loops} loop{'s' * (loops > 1)} of unknown length count as one turn: there is more to do than that"


def _work_columns(stage: PlanStage) -> list[str]:
    kept = f"{size(stage.activation_bytes)} × {stage.in_flight}" if stage.in_flight * stage.activation_bytes else "-"
    parts = (stage.variable_bytes, stage.gradient_bytes, stage.slot_bytes, stage.memory_bytes)
    flops = (stage.forward_flops, stage.backward_flops)
    return [stage.name, *(amount(each) for each in flops), kept, *(size(each) if each else "-" for each in parts)]


# ---------------------------------------------------------------------- what crosses
def _boundaries(plan: Plan) -> Iterator[str]:
    if not plan.boundaries:
        return
    phases = len({once.phase for once in plan.once} | {each.phase for each in plan.boundaries}) > 1
    timed = any(each.seconds is not None for each in plan.boundaries)
    head = ["", "tensor", "made by", "from", "to", "a micro-batch", "its gradient", "on lines a step"]
    rows = [_boundary(each, phases, timed) for each in plan.boundaries]
    yield from _table([[*head, *["they are held"] * timed], *rows])
    for each in plan.boundaries:
        for line in codec_lines(each):
            yield from wrap(f"{each.name}: {line}", WIDTH, subsequent_indent="    ")


def _boundary(each: PlanBoundary, phases: bool, timed: bool) -> list[str]:
    name = f"{each.name} (phase {each.phase})" if phases else each.name
    spec = str(Spec(each.dtype, each.shape))
    sent = _describe_sent(each.bytes, each.taken[0])
    back = _describe_sent(each.backward_bytes, each.taken[1]) if each.backward else "does not return"
    if each.backward and len(each.destinations) > 1:
        back += " from each"
    known = [name, spec, each.maker or "-", each.source, _list_words(each.destinations), sent, back, in_a_step(each)]
    return [*known, *[_describe_holder(each)] * timed]


def _describe_sent(count: int | None, codec: str) -> str:
    return describe_bytes("as many bytes as it has" if count is None else size(count), codec)


def codec_lines(each: PlanBoundary) -> Iterator[str]:
    """What there is to say of how a boundary crosses besides its bytes: when, what of it, and what that takes."""
    rungs, back_rungs = (tuple(map(size, sizes)) for sizes in (each.rungs, each.backward_rungs))
    there, back = details(each.taken[0], rungs=rungs), details(each.taken[1], back=True, rungs=back_rungs)
    if there and there == back:
        yield f"both ways {there}"
    else:
        yield from [there] * bool(there) + [f"its gradient {back}"] * bool(back)
    taken = [each.codec_seconds, each.backward_codec_seconds]
    seconds = " + ".join(duration(way) for way in taken if way)
    if seconds:
        yield f"to encode and decode that takes one core about {seconds} a step"


def in_a_step(each: PlanBoundary, unknown: str = "?") -> str:
    """What a boundary puts on lines in a step, there and back."""
    ways = [each.step_bytes, each.backward_step_bytes] if each.backward else [each.step_bytes]
    if None in ways:
        return unknown
    total = sum(way or 0 for way in ways)
    most = "at most " if any(map(has_open_size, (each.codec, each.backward_codec)[: len(ways)])) else ""
    return f"{most}{size(total)}" if total else "none"


def _describe_holder(each: PlanBoundary) -> str:
    ways = [each.seconds, each.backward_seconds] if each.backward else [each.seconds]
    return " + ".join(duration(way) for way in ways if way is not None)


def _links(plan: Plan) -> Iterator[str]:
    if not plan.links:
        return
    timed = any(link.seconds for link in plan.links.values())
    rows = [["", "line", "tensors a step", *["it is held"] * timed]]
    for name, link in plan.links.items():
        held = duration(link.seconds) if link.seconds else ""
        rows.append([name, link.line, bytes_on_link(link), *[held] * timed])
    yield from _table(rows)
    yield from links_bound(plan)


def bytes_on_link(link: PlanLink) -> str:
    """Bytes that a step puts on a link."""
    return f"at most {size(link.bytes)}" if link.at_most else size(link.bytes)


def links_bound(plan: Plan) -> Iterator[str]:
    """From which speed on a line is what a step waits for."""
    held = {name: link.seconds for name, link in plan.links.items() if link.seconds}
    if not held:
        return
    line = max(held, key=lambda name: held[name])
    speeds = [f"{s.name} above {amount(s.flops / held[line])}FLOP/s" for s in plan.stages.values() if s.flops]
    if plan.links[line].at_most:
        yield f"{line} is the busiest line: a step holds it for at most {duration(held[line])}"
        return
    said = f"{line} is the busiest line: a step holds it for {duration(held[line])}, and cannot be shorter than that"
    yield f"{said};" if speeds else said
    if speeds:
        yield "a stage that computes its FLOPs in less time waits for the line:"
        yield f"  {_list_words(speeds)}"


def tied_lines(plan: Plan) -> Iterator[str]:
    """The variables that several stages hold, and what that costs."""
    for each in plan.tied:
        spec = Spec(each.dtype, each.shape)
        yield f"{each.path} {spec} is in {' and '.join(each.stages)}:"
        yield "  each holds it, and once a step its gradients are summed;"
        yield f"  {_price(each)}"


def _price(each: PlanTied) -> str:
    if not each.link_bytes:
        return "no line is needed for that: they are in one cluster"
    sent = " and ".join(f"{size(count)} on {line}" for line, count in each.link_bytes.items())
    sent = f"at most {sent}" if each.at_most else sent
    held = "" if each.seconds is None else f", {duration(each.seconds)} of the line"
    return f"that puts {sent}{held}"


# ---------------------------------------------------------------------- once a step
def once_lines(plan: Plan) -> Iterator[str]:
    """What runs once a step, and where."""
    several = len({each.worker for each in plan.once}) > 1
    phased = len({each.phase for each in plan.once}) > 1
    for each in plan.once:
        where = f" on {each.worker}" if several else ""
        phase = f"phase {each.phase}, " if phased and each.kind != "whole" else ""
        yield f"{phase}{_WHEN[each.kind]}{where}: {each.ops:,} ops{_rounds(each)}{_format_boundary(each)}"


_WHEN = {
    "whole": "from the whole batch",
    "prologue": "before the micro-batches",
    "update": "after the micro-batches",
}


def _rounds(each: PlanOnce) -> str:
    return f" in {each.rounds} rounds with scalars between them" if each.rounds > 1 else ""


def _format_boundary(each: PlanOnce) -> str:
    if not each.writes:
        return ", which write nothing"
    others = len(each.writes) - each.trainable
    parts = [f"{each.trainable} trained"] * bool(each.trainable) + [f"{others} other"] * bool(others)
    return f" write {' and '.join(parts)} variable{'s' * (len(each.writes) > 1)}"


# ---------------------------------------------------------------------- schedule
def _schedule(plan: Plan) -> Iterator[str]:
    drawn = times(plan, most=_DRAWN)
    yield f"({drawn.assumed})"
    if drawn.micro_batches < len(plan.rows):
        yield f"(the first {drawn.micro_batches} of {len(plan.rows)} micro-batches)"
    margin = _margin(plan, drawn)
    for phase in drawn.phases:
        yield from ([f"phase {phase.phase}"] if _phases(plan) > 1 else [])
        yield from _draw_phase(phase, margin, lines=drawn.assumed.timed)
    if drawn.assumed.timed:
        yield step_text(plan)


def _phases(plan: Plan) -> int:
    return max((len(stage.runs) for stage in plan.stages.values()), default=0)


def _margin(plan: Plan, drawn: Times) -> int:
    lines = [line for phase in drawn.phases for line in phase.timeline.lines] if drawn.assumed.timed else []
    return max(map(len, [*(seat for phase in drawn.phases for seat in seats(phase)), *lines]), default=0)


def seats(phase: PhaseTimes) -> list[str]:
    """The names of the rows of stages: a replica has one for itself."""
    return [
        row_name(stage.name, stage.replicas, replica)
        for place, stage in enumerate(phase.stages)
        for replica in phase.timeline.replicas(place)
    ]


def _draw_phase(phase: PhaseTimes, margin: int, *, lines: bool) -> list[str]:
    """A row a stage and, where lines take time, a row a line."""
    shown = phase.timeline.lines if lines else ()
    own = max([len("stage 0") + 2 * any(stage.replicas > 1 for stage in phase.stages), *map(len, shown)])
    rows = draw(phase.timeline, width=WIDTH - 2 - margin + own, lines=lines).splitlines()
    names = [*seats(phase), *shown]
    return [f"{name:<{margin}} {row[row.index('|') :]}" for name, row in zip(names, rows, strict=True)]


# ---------------------------------------------------------------------- layout
def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _list_words(names: Sequence[str]) -> str:
    if len(names) > _LISTED:
        names = [*names[: _LISTED - 1], f"{len(names) - _LISTED + 1} more"]
    return ", ".join(names) or "-"


def amount(count: float) -> str:
    """A large number for people, with a space for its unit.

    >>> amount(950), amount(12_300), amount(2.5e9)
    ('950 ', '12.3 k', '2.50 G')
    """
    for unit, size_of in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size_of:
            return f"{_three(count / size_of)} {unit}"
    return f"{count:.0f} "


def _three(number: float) -> str:
    """Three digits: 1.23, 12.3 or 123."""
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def plan_mermaid(plan: Plan) -> str:
    """Clusters are boxes around stages; a solid arrow is an activation, a dotted one its gradient."""
    return "\n".join(["flowchart LR", *(f"    {line}" for line in _lines(plan))])


def _lines(plan: Plan) -> Iterator[str]:
    crossing = {boundary.name for boundary in plan.boundaries}
    clusters: dict[str, list[PlanStage]] = {}
    for stage in plan.stages.values():
        clusters.setdefault(stage.cluster, []).append(stage)
    for cluster, stages in clusters.items():
        yield f'subgraph {_id("cluster", cluster)}["cluster {_text(cluster)}"]'
        yield from (f'    {_id("stage", stage.name)}["{_label(stage)}"]' for stage in stages)
        yield "end"
    for stage in plan.stages.values():
        for leaf in stage.inputs:
            if leaf not in crossing:
                yield f'{_id("input", leaf)}(["{_text(leaf)}"]) --> {_id("stage", stage.name)}'
    for boundary in plan.boundaries:
        yield from _arrows(boundary)


def _arrows(boundary: PlanBoundary) -> Iterator[str]:
    source, spec = _id("stage", boundary.source), _text(str(Spec(boundary.dtype, boundary.shape)))
    for name in boundary.destinations:
        yield f'{source} -- "{spec}{_describe_codec(boundary.taken[0])}" --> {_id("stage", name)}'
        if boundary.backward:
            yield f'{_id("stage", name)} -. "gradient{_describe_codec(boundary.taken[1], back=True)}" .-> {source}'


def _describe_codec(codec: str, *, back: bool = False) -> str:
    said = words(codec, back=back)
    return "" if not said else f"{' ' if said.startswith('as ') else ', '}{_text(said)}"


def _label(stage: PlanStage) -> str:
    return f"stage {_text(stage.name)}<br/>{stage.parameters:,} parameters"


def _id(kind: str, name: str) -> str:
    """A name that Mermaid takes as a word, and that no other name shares."""
    return f"{kind}_" + re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", name)


def _text(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
