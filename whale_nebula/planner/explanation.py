"""Texts that explain a decision: stages, bottleneck, a table of candidates, and sensitivity to rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from textwrap import wrap
from typing import TYPE_CHECKING

from whale_nebula.plan.records import RateCurves
from whale_nebula.plan.text import CANDIDATE, candidate_rows
from whale_nebula.plan.timing import duration
from whale_nebula.planner.cluster_costs import Grounds
from whale_nebula.planner.problem import Candidate, Excess, Part, Problem, Shape
from whale_nebula.planner.score import scale_rate, score
from whale_nebula.planner.search import SearchResult, search
from whale_nebula.planner.stored_plans import find_stored_plan
from whale_nebula.report.records import size

if TYPE_CHECKING:
    from whale_nebula.planner.decision import Decision

WIDTH = 112
SLOWER = 3.0
"""The factor over the best candidate up to which candidates are listed."""
DRAWN = 3
"""The number of candidates that are drawn over the links' rate."""
FACTORS = tuple(2.0 ** (step / 4) for step in range(-12, 13))
"""Multiples of the links' rate at which candidates are scored; at every fourth of them the best plan is searched."""
_MEASURE = "; run whale-nebula measure for more accurate predictions"
_CODECS = ((0.5, "half", "fp16"), (0.25, "a quarter of", "int8"))


def explain(decision: Decision) -> Iterator[str]:
    """The lines of `Plan.explain()`, at most 112 columns wide."""
    for paragraph in _paragraphs(decision):
        yield from wrap(paragraph, WIDTH)
    yield ""
    yield from _candidate_lines(decision)
    yield ""
    yield from sensitivity_lines(decision)
    yield from _list_resize_lines(decision)


# ---------------------------------------------------------------------- the chosen plan
def _paragraphs(decision: Decision) -> Iterator[str]:
    problem, chosen = decision.problem, decision.chosen
    who = ", ".join(f"{cluster} runs {layers}" for cluster, layers in _clusters_and_layers(problem, chosen.parts))
    again = ", forwards are recomputed in the backward" * chosen.shape.recompute
    held = "" if chosen.in_flight is None else f", at most {chosen.in_flight} in flight"
    how = "uncut" if decision.uncut else f"{batch_text(chosen.shape.micro_batches)}, {chosen.schedule}{held}{again}"
    yield f"chosen: {who} ({how})"
    yield f"Predicted step time: {duration(chosen.seconds)}. {_bottleneck_text(problem, chosen)}"
    if decision.seconds_here > chosen.seconds:
        yield f"In this process all clusters share its cores, so a step takes about {duration(decision.seconds_here)}."
    if decision.seconds_here < chosen.seconds:
        yield f"In this process the step runs as it was traced, and takes about {duration(decision.seconds_here)}."
    yield from _codecs_text(problem, chosen)
    yield _memory_text(problem, chosen)
    yield _grounds_text(decision.grounds)
    for reason in decision.reasons:
        yield f"{reason[:1].upper()}{reason[1:]}."


def _clusters_and_layers(problem: Problem, parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """For each cluster: its layers, stages and replicas."""
    labels = short_names(problem.chain.names)
    for (cluster, pieces), group in itertools.groupby(parts, lambda part: (part.cluster, part.shards)):
        own = list(group)
        first, last = labels[own[0].begin], labels[own[-1].end - 1]
        replicas = {part.replicas for part in own}
        copies = f" of {max(replicas)} replicas" if max(replicas) > 1 else ""
        stages = f" in {len(own)} stages{copies}" if len(own) > 1 else f" in {max(replicas)} replicas" * bool(copies)
        stages += f" sharded over {pieces} workers" * (pieces > 1)
        yield problem.clusters[cluster].name, (first if first == last else f"{first} to {last}") + stages


def _bottleneck_text(problem: Problem, chosen: Candidate) -> str:
    """The bottleneck of the step, with its share of the time."""
    kind, place, line = chosen.bottleneck
    if kind == "stage":
        part = chosen.parts[place]
        busy = math.ceil(chosen.shape.micro_batches / part.replicas) * chosen.compute[place]
        name = stage_names(problem, chosen.parts)[place]
        if busy < (rest := chosen.seconds - busy) and len(chosen.parts) == 1:
            once = f"updates and calls once per step take {duration(rest)}"
            return f"Stage {name} computes for {duration(busy)} of it, and {once}."
        return f"The bottleneck is stage {name}, which computes for {duration(busy)} of it."
    if kind == "line":
        lines = problem.named_lines
        if line not in lines or line not in chosen.bytes:
            return f"The bottleneck is {line}, between workers of one cluster."
        held = lines[line].seconds(chosen.bytes[line])
        return f"The bottleneck is link {line}: {size(chosen.bytes[line])} take {duration(held)}."
    if kind == "updates":
        return "More than half of it is spent on updates and sums of gradients, once per step."
    return "No stage or link is busy for most of it: the latency of micro-batches determines it."


def _codecs_text(problem: Problem, chosen: Candidate) -> Iterator[str]:
    """The codec of each boundary, if there is a choice."""
    if not problem.chain.codecs or not chosen.crossing_places:
        return
    names = stage_names(problem, chosen.parts)
    codecs = list_codecs(problem, chosen).items()
    texts = (f"{names[place - 1]} to {names[place]} {codec.replace('none', 'uncompressed')}" for place, codec in codecs)
    chosen_one = len(problem.chain.codecs) > 1 and any(chosen.parts[place].codec for place in chosen.crossing_places)
    milder = (
        f"; with a more accurate codec a step would be over {problem.options.slack:.0%} slower than with the fastest"
    )
    yield f"Codecs: {', '.join(texts)}{milder * chosen_one}."


def list_codecs(problem: Problem, candidate: Candidate) -> dict[int, str]:
    """The codec of each stage's input from another cluster, by the stage's place; "none" for uncompressed."""
    return {
        place: problem.chain.codec_choices[candidate.parts[place].codec].codec for place in candidate.crossing_places
    }


def _memory_text(problem: Problem, chosen: Candidate) -> str:
    needed: dict[int, float] = {}
    for part, bytes_ in zip(chosen.parts, chosen.memory, strict=True):
        needed[part.cluster] = max(needed.get(part.cluster, 0.0), bytes_)
    said = []
    for cluster, most in needed.items():
        has = problem.clusters[cluster].memory
        said.append(
            f"{size(most)} in {problem.clusters[cluster].name}{f' (has {size(has)})' if has < math.inf else ''}"
        )
    unknown = "; the available memory is unknown" * all(
        problem.clusters[cluster].memory == math.inf for cluster in needed
    )
    return f"Memory of a worker: {', '.join(said)}{unknown}."


def _grounds_text(grounds: Grounds) -> str:
    """The sources of the predicted seconds.

    >>> _grounds_text(Grounds(0.25, 0.0, 0.0, 0.75))
    'Sources of compute times: 25% measured, 75% estimated; run whale-nebula measure for more accurate predictions.'
    """
    shares = (
        (grounds.measured, "measured"), (grounds.fitted, "from measured rates"),
        (grounds.configured, "from the config"), (grounds.guessed, "estimated"),
    )  # fmt: skip
    said = ", ".join(f"{share:.0%} {how}" for share, how in shares if share >= 0.005)
    return f"Sources of compute times: {said}{_MEASURE * (grounds.guessed > 0.5)}."


# ---------------------------------------------------------------------- the candidates
def _candidate_lines(decision: Decision) -> Iterator[str]:
    best = decision.considered[0].predicted.seconds
    listed = [each for each in decision.considered if each.predicted.seconds <= SLOWER * best]
    yield from _table((CANDIDATE, *candidate_rows(listed)))
    if left := len(decision.considered) - len(listed):
        yield f"{left} more candidate{'s' * (left > 1)} would take over {SLOWER:g} times as long"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Format rows as a table; the last column takes the remaining width."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    left = max(24, WIDTH - sum(widths) - 2 * len(widths))
    for *cells, last in rows:
        shown = last if len(last) <= left else f"{last[: left - 1].rstrip()}…"
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), shown]).rstrip()


# ---------------------------------------------------------------------- what would change them
def sensitivity_lines(decision: Decision) -> Iterator[str]:
    """A table of the best plans with slower or faster links, fewer bytes at boundaries, or one more worker."""
    problem, chosen = decision.problem, decision.chosen
    changes: list[tuple[str, Problem]] = []
    if has_slow_lines(problem):
        for factor, said in ((0.25, "a quarter of"), (0.5, "half"), (2.0, "twice"), (4.0, "4 times")):
            changes.append((f"links at {said} their rate", scale_rate(problem, factor)))
        changes += [
            (f"{said} the bytes at boundaries ({codec})", scale_crossing(problem, f))
            for f, said, codec in (() if problem.chain.codecs else _CODECS)
        ]
    for number, cluster in enumerate(problem.clusters):
        clusters = list(problem.clusters)
        clusters[number] = replace(cluster, workers=cluster.workers + 1)
        changes.append((f"one more worker in {cluster.name}", replace(problem, clusters=tuple(clusters))))
    rows, same = [("what if", "step time", "relative", "best plan")], []
    for what, changed in changes:
        best = next(iter(search(changed, max_candidates=1).candidates), None)
        if best is not None and best.shape == chosen.shape and abs(best.seconds / chosen.seconds - 1) < 0.005:
            same.append(what)
        elif best is not None:
            found = "unchanged" if best.shape == chosen.shape else describe_shape(changed, best.shape)
            rows.append((f"  {what}", duration(best.seconds), f"{best.seconds / chosen.seconds:.2f}", found))
    yield from _table(rows) if len(rows) > 1 else ["what if"]
    if same:
        yield from wrap(f"no change: {'; '.join(same)}", WIDTH, initial_indent="  ", subsequent_indent="  ")


def _list_resize_lines(decision: Decision) -> Iterator[str]:
    """The best plan for each number of workers that an elastic run may get next, or what it lacks."""
    rows = [("elastic", "step time", "relative", "best plan")]
    for planned, problem in decision.list_resize_problems():
        if problem.options != decision.problem.options:
            continue
        candidates, _ = find_stored_plan(problem)
        found = search(problem, 1) if not candidates else SearchResult(candidates)
        if found.candidates:
            best = found.candidates[0]
            relative = f"{best.seconds / decision.chosen.seconds:.2f}"
            row = duration(best.seconds), relative, describe_shape(problem, best.shape)
        else:
            row = "-", "-", _describe_shortage(found.excess)
        rows.append((f"  {planned.resize.text}", *row))
    if len(rows) > 1:
        yield ""
        yield from _table(rows)


def _describe_shortage(excess: Excess | None) -> str:
    """Why there is no plan, in a few words."""
    if excess is None:
        return "none satisfies the scopes"
    needed, allowed = round_size(excess.needed, math.ceil), round_size(excess.allowed, math.floor)
    return f"none fits: {needed} in {excess.cluster}, limit {allowed}"


def has_slow_lines(problem: Problem) -> bool:
    """Whether some link between clusters has a finite rate."""
    return any(line.rate < math.inf for line in problem.lines.values())


def scale_crossing(problem: Problem, factor: float) -> Problem:
    """The problem with the bytes of all crossings multiplied by a factor: the effect of a codec without its costs."""
    chain = problem.chain
    return replace(
        problem,
        chain=replace(chain, sent_bytes=chain.sent_bytes * factor, returned_bytes=chain.returned_bytes * factor),
    )


def draw_rates(decision: Decision) -> RateCurves | None:
    """Seconds of the best candidates and of the best plan by the links' rate; None if all links are free."""
    problem = decision.problem
    if not has_slow_lines(problem):
        return None
    shapes = dict.fromkeys(each.shape for each in decision.candidates)
    for factor in FACTORS[::4]:
        shapes.update(
            dict.fromkeys(each.shape for each in search(scale_rate(problem, factor), max_candidates=2).candidates)
        )
    seconds = {shape: tuple(_seconds(scale_rate(problem, factor), shape) for factor in FACTORS) for shape in shapes}
    best = [min(shapes, key=lambda shape: seconds[shape][place]) for place in range(len(FACTORS))]
    drawn = [each.shape for each in decision.candidates[:DRAWN]]
    rates = {line.rate for line in problem.lines.values()}
    return RateCurves(
        FACTORS,
        8.0 * rates.pop() if len(rates) == 1 else None,
        tuple(seconds[shape][place] for place, shape in enumerate(best)),
        tuple(describe_shape(problem, shape) for shape in best),
        {describe_shape(problem, shape): seconds[shape] for shape in drawn},
    )


def _seconds(problem: Problem, shape: Shape) -> float:
    found = score(problem, shape)
    return found.seconds if isinstance(found, Candidate) else math.inf


# ---------------------------------------------------------------------- what does not fit
def describe_need(excess: Excess | None, problem: Problem) -> tuple[str, str]:
    """What and why of the error if no plan fits."""
    if excess is None:
        return "no plan satisfies the scopes", "; ".join(each.scope_line for each in problem.written_stages)
    names = short_names(problem.chain.names)
    first, last = names[excess.begin], names[excess.end - 1]
    inside = [
        each.scope_line for each in problem.written_stages if excess.begin <= each.begin and each.end <= excess.end
    ]
    least, most = round_size(excess.needed, math.ceil), size(int(excess.allowed))
    most = round_size(excess.allowed, math.floor) if most == least else most
    needs = f"{least} on a worker of {excess.cluster}, but {most} is the limit"
    what = f"{inside[0]} needs {needs}" if inside else f"no plan fits: {needs}"
    need = f"the layer {first!r} needs" if first == last else f"the layers from {first!r} to {last!r} need"
    return what, f"in the best plan found, {need} this much"


def describe_sufficient_memory(excess: Excess) -> str:
    """The memory with which a plan fits, as a part of a sentence."""
    return "memory of " + " and ".join(
        f"{round_size(need, math.ceil)} for each worker of {name}" for name, need in excess.sufficient.items()
    )


def round_size(count: float, to_integer: Callable[[float], int]) -> str:
    """Bytes in a readable unit, rounded up or down to a tenth of it.

    >>> size(3.04 * 2**20), round_size(3.04 * 2**20, math.ceil)
    ('3.0 MiB', '3.1 MiB')
    """
    unit = next(unit for unit in (2**30, 2**20, 2**10, 1) if count >= unit or unit == 1)
    return size(to_integer(round(10 * count / unit, 6)) * unit / 10)


# ---------------------------------------------------------------------- names
def stage_names(problem: Problem, parts: Sequence[Part]) -> list[str]:
    """Names of the stages: the user's, otherwise the cluster's, numbered if the cluster has several."""
    clusters = [problem.clusters[part.cluster].name for part in parts]
    names = [
        cluster if clusters.count(cluster) == 1 else f"{cluster}-{clusters[:n].count(cluster)}"
        for n, cluster in enumerate(clusters)
    ]
    keys = [each.key for each in problem.written_stages]
    for place, part in enumerate(parts):
        own = [each.key for each in problem.written_stages if part.begin <= each.begin and each.end <= part.end]
        spare = (f"{clusters[place]}-{number}" for number in itertools.count(len(clusters)))
        names[place] = own[0] if own else names[place]
        if not own and names[place] in keys:
            names[place] = next(name for name in spare if name not in keys)
    return names


@lru_cache(64)
def short_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of layers without their common prefix, shortened as far as they stay distinct.

    >>> short_names(("m/block0/attention/query", "m/block0/mlp/wide", "m/head"))
    ('attention/query', 'mlp/wide', 'head')
    >>> short_names(("m/block0/query", "m/block0/key", "m/block1/query"))
    ('block0/query', 'block0/key', 'block1/query')
    """
    parts = [name.split("/") for name in names]
    shared = 0
    while len(names) > 1 and all(len(each) > shared + 1 and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    own = [each[shared:] for each in parts]
    for depth in range(2, max(map(len, own)) + 1):
        found = ["/".join(each[-depth:]) for each in own]
        if len(set(found)) == len(set(names)):
            return tuple(found)
    return tuple("/".join(each) for each in own)


def describe_parts(problem: Problem, parts: Sequence[Part]) -> str:
    """The stages of a plan on one line, by the layers where they begin."""
    labels, said = short_names(problem.chain.names), []
    for part, name in zip(parts, stage_names(problem, parts), strict=True):
        begins = f" from {labels[part.begin]}" if part.begin else ""
        taken = f" x {part.replicas}" * (part.replicas > 1) + f" split {part.shards}" * (part.shards > 1)
        coded = f" by {problem.chain.codec_choices[part.codec].codec}" if part.codec else ""
        said.append(f"{name}{taken}{begins}{coded}")
    return " | ".join(said)


def describe_shape(problem: Problem, shape: Shape) -> str:
    """The stages of a plan, and how its batch is cut."""
    return (
        f"{describe_parts(problem, shape.parts)}, {batch_text(shape.micro_batches)}{', recomputed' * shape.recompute}"
    )


def batch_text(count: int) -> str:
    """The division of a batch, in words."""
    return f"{count} micro-batches" if count > 1 else "undivided batch"
