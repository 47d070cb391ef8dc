"""The text form of a plan, with explanations for new readers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from whale_nebula.codec.encoding import describe_bytes, describe_conditions, describe_encoding, has_open_size
from whale_nebula.errors.text import align_columns
from whale_nebula.ir.routing import compute_share_times, count_turns
from whale_nebula.plan.forbidden import find_breaches
from whale_nebula.plan.records import Considered, PlanBoundary, PlanLink, PlanOnce, PlanStage
from whale_nebula.plan.splits import describe_seconds, list_device_facts
from whale_nebula.plan.timing import (
    PhaseTimes,
    count_phases,
    describe_assumptions,
    duration,
    predict_times,
    step_text,
)
from whale_nebula.report.bottleneck import MIN_WAIT_SHARE, mean_idle_seconds, straggler_text, suggest_micro_batches
from whale_nebula.report.records import size
from whale_nebula.schedule.simulate import draw_timeline
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


WIDTH = 100
_LISTED = 5
_COLLECTIVES = 12
_DRAWN = 12
"""More micro-batches than this are not drawn."""


class Section(NamedTuple):
    """A part of a plan's text: a table, in which some columns are numeric, and sentences below it."""

    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: range = range(0)
    lines: Sequence[str] = ()

    def text(self) -> Iterator[str]:
        """The section in lines."""
        yield from align_columns([self.head, *self.rows] if self.rows else [], self.numbers)
        yield from self.lines


def plan_text(plan: Plan) -> str:
    """The whole text: a head, and all sections that are not empty."""
    lines = [
        f"plan of {plan.name}",
        f"  digest {plan.digest[:12]}, program {plan.program_digest[:12]}",
        f"  {micro_batches_text(plan)}, schedule {plan.schedule}{limit_text(plan)}",
    ]
    if plan.considered:
        taken, binds = duration(plan.considered[0].predicted.seconds), plan.considered[0].binds
        lines.append(f"  chosen by nb.auto_parallel: predicted step time {taken}, bottleneck {binds}")
    for title, section in {**sections(plan), "schedule": Section(lines=list(_schedule(plan)))}.items():
        lines += ["", title, *(f"  {line}".rstrip() for line in section.text())]
    return "\n".join(lines)


def sections(plan: Plan) -> dict[str, Section]:
    """The sections of a plan by title, without empty ones and the schedule."""
    found = {
        "stages": _stages(plan),
        "work per step and memory": _work(plan),
        "boundaries": _boundaries(plan),
        "split stages": _split_stages(plan),
        "collectives of split stages": _collectives(plan),
        "tensors that depend on protected inputs": list_dependences(plan, plan.protected),
        "links": _links(plan),
        "tied variables": Section(lines=list(_tied_lines(plan))),
        "once per step": Section(lines=list(_list_once_lines(plan))),
        "notes": Section(lines=plan.notes),
    }
    return {title: section for title, section in found.items() if section.rows or section.lines}


def micro_batches_text(plan: Plan) -> str:
    """The division of the example's batch, in words."""
    rows = sum(plan.rows)
    if len(plan.rows) == 1:
        few = "" if plan.micro_batch == 1 else f" (of {plan.micro_batch} requested)"
        return f"1 micro-batch{few} of {rows} row{'s' * (rows != 1)}"
    most, least = max(plan.rows), min(plan.rows)
    each = str(most) if most == least else f"{least} to {most}"
    return f"{len(plan.rows)} micro-batches of {each} row{'s' * (most != 1)} ({rows} in the example)"


def limit_text(plan: Plan) -> str:
    """The user's own limit of micro-batches in flight, to follow the schedule's name; "" without one."""
    return "" if plan.in_flight is None else f", at most {plan.in_flight} in flight"


CANDIDATE = ("", "step time", "of best", "micro-batches", "peak memory", "on links", "bottleneck", "stages")
"""The columns of the table of the planner's candidates."""


def candidate_rows(considered: Sequence[Considered]) -> list[tuple[str, ...]]:
    """The rows of the table of candidates, the chosen one first."""
    best = considered[0].predicted.seconds
    return [
        (
            str(number), duration(each.predicted.seconds), f"{each.predicted.seconds / best:.2f}",
            str(each.micro_batches), size(max(each.predicted.memory.values())),
            size(sum(each.predicted.bytes.values())), each.binds, each.stages,
        )
        for number, each in enumerate(considered, 1)
    ]  # fmt: skip


def _wrap(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ")]


# ---------------------------------------------------------------------- stages
def _stages(plan: Plan) -> Section:
    head = ("", "name", "cluster", "worker", "ops forward", "backward", "variables", "parameters", "inputs", "outputs")
    rows = []
    for number, stage in enumerate(plan.stages.values()):
        counts = (stage.forward_ops, stage.backward_ops, len(stage.variables), stage.parameters)
        names = (_list_words(stage.inputs), _list_words(stage.outputs))
        who = (str(number), stage.name, stage.cluster, workers_text(stage))
        rows.append((*who, *(f"{count:,}" for count in counts), *names))
    return Section(head, rows, range(4, 8), _wrap(_share_lines(plan)))


def _share_lines(plan: Plan) -> Iterator[str]:
    """Sentences on the shares of replicas of unequal speed, and on those that wait."""
    count, rows = len(plan.rows), sum(plan.rows)
    for stage in plan.stages.values():
        if not stage.order and not stage.speeds:
            continue
        shares = count_turns(stage.order, stage.replicas, count)
        by = f" (speeds {_ratio(stage.speeds)})" if stage.speeds else ""
        order = f", in the order {' '.join(map(str, stage.order))}" if stage.order else " in turn"
        yield f"{stage.name}: replicas take {_ratio(shares)} of {count} micro-batches{order}{by}"
        took = compute_share_times(shares, stage.speeds) if stage.speeds else ()
        longest, idle = max(took, default=0.0), mean_idle_seconds(took)
        if idle > MIN_WAIT_SHARE * longest:
            waiting = f"{100 * idle / longest:.0f} % of that time"
            yield straggler_text(stage.name, took, waiting, suggest_micro_batches(stage.speeds, count, rows))


def _ratio(numbers: Sequence[float]) -> str:
    return " : ".join(f"{number:g}" for number in numbers)


def workers_text(stage: PlanStage) -> str:
    """The workers of a stage, and its numbers of replicas and shards."""
    copies = [f"{stage.replicas} replicas"] * (stage.replicas > 1) + [f"{stage.shards} shards"] * (stage.shards > 1)
    return ": ".join([stage.worker, *[", ".join(copies)] * bool(copies)])


def _work(plan: Plan) -> Section:
    """FLOPs and the parts of a stage's memory."""
    stages = plan.stages.values()
    if not any(stage.flops or stage.memory_bytes for stage in stages):
        return Section()
    head = ("", "FLOPs forward", "backward", "activations", "variables", "gradients", "slots", "memory")
    rows = []
    for stage in stages:
        kept = f"{size(stage.activation_bytes)} × {stage.in_flight}" if stage.kept_bytes else "-"
        parts = (stage.variable_bytes, stage.gradient_bytes, stage.slot_bytes, stage.memory_bytes)
        flops = (amount(stage.forward_flops), amount(stage.backward_flops))
        rows.append((stage.name, *flops, kept, *(size(each) if each else "-" for each in parts)))
    loops = sum(stage.open_loops for stage in stages)
    open_ones = (
        f"{loops} loop{'s' * (loops > 1)} of unknown length: one iteration is counted, so the actual work is larger"
    )
    return Section(head, rows, range(1, 8), [open_ones] * bool(loops))


# ---------------------------------------------------------------------- sharded stages
def _split_stages(plan: Plan) -> Section:
    """The memory of each device of a sharded stage, and the layouts of its variables."""
    rows, lines = [], []
    for stage in plan.stages.values():
        held = [(path, plan.layouts[path]) for path in stage.variables if path in plan.layouts]
        if stage.shards > 1:
            count = f"{len(held)} of {len(stage.variables)}"
            rows.append((stage.name, str(stage.shards), count, size(stage.variable_bytes), size(stage.shard_bytes)))
            lines += [f"{path} is {layout}" for path, layout in held]
    head = ("", "devices", "sharded variables", "variables", "per device, with slots")
    return Section(head, rows, range(1, 5), lines)


def _collectives(plan: Plan) -> Section:
    """Collectives between devices, the largest first."""
    found = sorted(plan.collectives, key=lambda each: -each.bytes * each.times)
    timed = any(each.seconds is not None for each in found)
    rows = [
        (each.stage, each.where, each.kind, _shorten(each.tensor), f"{size(each.bytes)} × {each.times}")
        + ("" if each.seconds is None else duration(each.seconds),) * timed
        for each in found[:_COLLECTIVES]
    ]
    total = sum(each.bytes * each.times for each in found)
    rest = [f"and {len(found) - len(rows)} more"] * (len(found) > len(rows))
    times, takes = sum(each.times for each in found), describe_seconds(found, ", which take ")
    sent = [f"each device sends {size(total)} per step in {times} collectives{takes}"] * bool(found)
    head = ("", "part", "collective", "tensor", "sent per device", *["time each"] * timed)
    return Section(head, rows, range(4, len(head)), [*rest, *sent])


def _shorten(name: str, most: int = 40) -> str:
    """The end of a long name."""
    return name if len(name) <= most else f"...{name[3 - most :]}"


# ---------------------------------------------------------------------- crossings
def _boundaries(plan: Plan) -> Section:
    phases = len({once.phase for once in plan.once} | {each.phase for each in plan.boundaries}) > 1
    timed = any(each.seconds is not None for each in plan.boundaries)
    head = ("", "tensor", "producer", "from", "to", "per micro-batch", "gradient", "sent per step")
    rows = []
    for each in plan.boundaries:
        name = f"{each.name} (phase {each.phase})" if phases else each.name
        ends = (each.maker or "-", each.source, _list_words(each.destinations))
        sent = [value for _, value in boundary_facts(each)]
        rows.append((name, str(Spec(each.dtype, each.shape)), *ends, *sent[: 3 + timed]))
    lines = [f"{each.name}: {line}" for each in plan.boundaries for line in codec_lines(each)]
    return Section((*head, *["links busy"] * timed), rows, lines=_wrap(lines))


def list_dependences(plan: Plan, inputs: Sequence[str]) -> Section:
    """The crossings between clusters that depend on any of these inputs, and how."""
    breaches = find_breaches(plan.crossings, plan.forbid)
    rules = {(each.crossing.name, each.crossing.source, each.crossing.destination): each.rule for each in breaches}
    rows = []
    for each in plan.crossings:
        ways = [each.depends.get(name, "-") for name in inputs]
        rule = rules.get((each.name, each.source, each.destination))
        ends = (each.name, each.source or "-", each.destination)
        if any(way != "-" for way in ways):
            rows.append((*ends, *ways, "" if rule is None else f"forbidden: {rule}"))
    return Section(("", "from", "to", *inputs, ""), rows)


def boundary_facts(boundary: PlanBoundary) -> list[tuple[str, str]]:
    """What a boundary costs, in both directions: pairs of a column's title and its text."""
    ways = [(boundary.step_bytes, boundary.seconds, boundary.codec)]
    back = "not sent"
    if boundary.backward:
        ways.append((boundary.backward_step_bytes, boundary.backward_seconds, boundary.backward_codec))
        several = " from each" * (len(boundary.destinations) > 1)
        back = f"{_describe_sent(boundary.backward_bytes, boundary.taken[1])}{several}"
    total = sum(count or 0 for count, _, _ in ways)
    most = "at most " * any(has_open_size(codec) for _, _, codec in ways)
    in_step = "?" if None in (count for count, _, _ in ways) else f"{most}{size(total)}" if total else "none"
    return [
        ("per micro-batch", _describe_sent(boundary.bytes, boundary.taken[0])),
        ("gradient", back),
        ("sent per step", in_step),
        ("links busy", " + ".join(duration(seconds) for _, seconds, _ in ways if seconds is not None)),
    ]


def _describe_sent(count: int | None, codec: str) -> str:
    return describe_bytes("known at run time" if count is None else size(count), codec)


def codec_lines(boundary: PlanBoundary) -> Iterator[str]:
    """Details of a boundary's codec in addition to its bytes: conditions, content and time."""
    rungs, back_rungs = (tuple(map(size, sizes)) for sizes in (boundary.rungs, boundary.backward_rungs))
    there, back = (
        describe_conditions(boundary.taken[0], rungs=rungs),
        describe_conditions(boundary.taken[1], back=True, rungs=back_rungs),
    )
    if there and there == back:
        yield f"in both directions {there}"
    else:
        yield from [there] * bool(there) + [f"gradient {back}"] * bool(back)
    seconds = " + ".join(duration(way) for way in (boundary.codec_seconds, boundary.backward_codec_seconds) if way)
    if seconds:
        yield f"encoding and decoding take about {seconds} per step on one core"


def _links(plan: Plan) -> Section:
    timed = any(link.seconds for link in plan.links.values())
    rows = []
    for name, link in plan.links.items():
        held = duration(link.seconds) if link.seconds else ""
        rows.append((name, link.line, link_bytes_text(link), *[held] * timed))
    return Section(
        ("", "rate and delay", "tensors per step", *["busy per step"] * timed), rows, lines=list(_links_bound(plan))
    )


def link_bytes_text(link: PlanLink) -> str:
    """The bytes of a step's tensors on a link, in words."""
    return f"at most {size(link.bytes)}" if link.at_most else size(link.bytes)


def busiest_line(plan: Plan) -> tuple[str, float] | None:
    """The link that a step occupies longest, with the seconds; None if none has a rate."""
    held = {name: link.seconds for name, link in plan.links.items() if link.seconds}
    return max(held.items(), key=lambda item: item[1]) if held else None


def _links_bound(plan: Plan) -> Iterator[str]:
    """Sentences on the busiest link, and the speeds above which a stage waits for it."""
    busiest = busiest_line(plan)
    if busiest is None:
        return
    line, held = busiest
    speeds = [f"{s.name} above {amount(s.flops / held)}FLOP/s" for s in plan.stages.values() if s.flops]
    if plan.links[line].at_most:
        yield f"{line} is the busiest link: busy for at most {duration(held)} per step"
        return
    said = f"{line} is the busiest link: busy for {duration(held)} per step, so a step cannot be shorter"
    yield f"{said};" if speeds else said
    if speeds:
        yield "stages that compute faster than this wait for the link:"
        yield f"  {_list_words(speeds)}"


def _tied_lines(plan: Plan) -> Iterator[str]:
    """The variables that several stages hold, and their costs."""
    for each in plan.tied:
        yield f"{each.path} {Spec(each.dtype, each.shape)} is in {' and '.join(each.stages)}:"
        yield "  each stage has a copy, and its gradients are summed once per step;"
        sent = " and ".join(f"{size(count)} on {line}" for line, count in each.link_bytes.items())
        held = "" if each.seconds is None else f", link busy {duration(each.seconds)}"
        price = f"that adds {'at most ' * each.at_most}{sent}{held}"
        yield f"  {price if sent else 'no link is used: they are in one cluster'}"


# ---------------------------------------------------------------------- once per step
_WHEN = {
    "whole": "from the whole batch",
    "prologue": "before the micro-batches",
    "update": "after the micro-batches",
}


def _list_once_lines(plan: Plan) -> Iterator[str]:
    several = len({each.worker for each in plan.once}) > 1
    phased = len({each.phase for each in plan.once}) > 1
    for each in plan.once:
        where = f" on {each.worker}" if several else ""
        phase = f"phase {each.phase}, " if phased and each.kind != "whole" else ""
        rounds = f" in {each.rounds} rounds with scalars between them" if each.rounds > 1 else ""
        yield f"{phase}{_WHEN[each.kind]}{where}: {each.ops:,} ops{rounds}{_writes(each)}"


def _writes(once: PlanOnce) -> str:
    counts = {"trained": once.trainable, "other": len(once.writes) - once.trainable}
    parts = [f"{count} {kind}" for kind, count in counts.items() if count]
    return (
        f" write {' and '.join(parts)} variable{'s' * (len(once.writes) > 1)}" if parts else " that write no variable"
    )


# ---------------------------------------------------------------------- schedule
def _schedule(plan: Plan) -> Iterator[str]:
    drawn = predict_times(plan, most=_DRAWN)
    yield f"({describe_assumptions(drawn.timed)})"
    if drawn.micro_batches < len(plan.rows):
        yield f"(the first {drawn.micro_batches} of {len(plan.rows)} micro-batches)"
    margin = max((len(row.name) for phase in drawn.phases for row in phase.rows(lines=drawn.timed)), default=0)
    for phase in drawn.phases:
        yield from [f"phase {phase.phase}"] * (count_phases(plan) > 1)
        yield from _draw_phase(phase, margin, lines=drawn.timed)
    if drawn.timed:
        yield step_text(plan)


def _draw_phase(phase: PhaseTimes, margin: int, *, lines: bool) -> list[str]:
    """Draw a phase: a row for each stage and, with `lines`, for each link."""
    shown = phase.timeline.lines if lines else ()
    own = max([len("stage 0") + 2 * any(stage.replicas > 1 for stage in phase.stages), *map(len, shown)])
    rows = draw_timeline(phase.timeline, width=WIDTH - 2 - margin + own, lines=lines).splitlines()
    names = phase.rows(lines=lines)
    return [f"{name.name:<{margin}} {row[row.index('|') :]}" for name, row in zip(names, rows, strict=True)]


def _list_words(names: Sequence[str]) -> str:
    if len(names) > _LISTED:
        names = [*names[: _LISTED - 1], f"{len(names) - _LISTED + 1} more"]
    return ", ".join(names) or "-"


def amount(count: float) -> str:
    """A large number in a readable form, with a space for its unit.

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
    """The plan as Mermaid: clusters are boxes around stages; solid arrows are activations, dotted ones gradients."""
    return "\n".join(["flowchart LR", *(f"    {line}" for line in _mermaid_lines(plan))])


def _mermaid_lines(plan: Plan) -> Iterator[str]:
    boundary_names = {boundary.name for boundary in plan.boundaries}
    clusters: dict[str, list[PlanStage]] = {}
    for stage in plan.stages.values():
        clusters.setdefault(stage.cluster, []).append(stage)
    for cluster, stages in clusters.items():
        yield f'subgraph {_id("cluster", cluster)}["cluster {_escape(cluster)}"]'
        yield from (f'    {_id("stage", stage.name)}["{_stage_label(plan, stage)}"]' for stage in stages)
        yield "end"
    for stage in plan.stages.values():
        for leaf in stage.inputs:
            if leaf not in boundary_names:
                yield f'{_id("input", leaf)}(["{_escape(leaf)}"]) --> {_id("stage", stage.name)}'
    for boundary in plan.boundaries:
        yield from _arrows(boundary)


def _arrows(boundary: PlanBoundary) -> Iterator[str]:
    source, spec = _id("stage", boundary.source), _escape(str(Spec(boundary.dtype, boundary.shape)))
    for name in boundary.destinations:
        yield f'{source} -- "{spec}{_describe_codec(boundary.taken[0])}" --> {_id("stage", name)}'
        if boundary.backward:
            yield f'{_id("stage", name)} -. "gradient{_describe_codec(boundary.taken[1], back=True)}" .-> {source}'


def _describe_codec(codec: str, *, back: bool = False) -> str:
    said = describe_encoding(codec, back=back)
    return "" if not said else f"{' ' if said.startswith('as ') else ', '}{_escape(said)}"


def _stage_label(plan: Plan, stage: PlanStage) -> str:
    """A stage, with a line for each fact about its devices."""
    facts = [f"{_escape(_shorten(name))}: {_escape(value)}" for name, value in list_device_facts(plan, stage)]
    return "<br/>".join([f"stage {_escape(stage.name)}", f"{stage.parameters:,} parameters", *facts])


def _id(kind: str, name: str) -> str:
    """A unique identifier that is valid in Mermaid."""
    return f"{kind}_" + re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", name)


def _escape(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
