"""The numbers of micro-batches and the codecs of a curriculum with "auto": for each length those with which the planner
predicts the shortest step, in the stages that scopes say.

A step is captured once for sequences of any length. Its blocks are measured for the shortest and the longest sequences;
seconds between them follow by a line. All processes choose from the same numbers, so they choose the same; the choice
is kept in checkpoints.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from whale_nebula.capture.step import Captured, Signature, capture, signature
from whale_nebula.codec.encoding import AUTO, Encoding, derive_encodings, parse_encoding
from whale_nebula.errors import CaptureError, NotYetError
from whale_nebula.hardware import Clusters
from whale_nebula.ir.program import Program
from whale_nebula.planner.chain import Layers, build_layers
from whale_nebula.planner.cluster_costs import MeasuredBlocks, build_problem, code_crossing, code_crossings
from whale_nebula.planner.decision import slow_down
from whale_nebula.planner.problem import Candidate, CodecCosts, Options, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.runtime.clusters import find_configured
from whale_nebula.runtime.decisions import (
    StepKnowledge,
    agree_on_planning_input,
    count_rows,
    explain_whole_batch,
    measure_in_clusters,
    set_rows,
)
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.step.step import Arguments, Step, Unpack, find_declared_inputs, replace_sizes
from whale_nebula.scopes.frames import Frame
from whale_nebula.site import Site

Shapes = Sequence[tuple[int, ...]]
_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass(frozen=True)
class OpenChoices:
    """What is to be chosen for each length: the numbers of micro-batches if `micro_batch` is None, otherwise it has
    those that are given, and likewise the codecs in `compress`. `shapes` are those of a batch's tensors by length, and
    `free` the same with None for sizes that depend on the length.
    """

    micro_batch: Mapping[int, int] | None
    compress: Mapping[int, Frame] | None
    shapes: Mapping[int, Shapes]
    free: Sequence[tuple[int | None, ...]]
    site: Site


@dataclass(frozen=True)
class LengthChoice:
    """The choice for a length; what is None was not open, and scopes or tables determine it. `seconds` are those that
    are predicted for a step.
    """

    micro_batch: int | None = None
    codec: str | None = None
    seconds: float = 0.0


def choose_by_length(
    step: Step, arguments: Arguments, unpack: Unpack, open_choices: OpenChoices
) -> dict[int, LengthChoice]:
    """The choice for each length: that of the run that is resumed, or a new one."""
    run = current_run()
    key = f"{step.name} by the curriculum of {', '.join(map(str, open_choices.shapes))}"
    known = run.length_choices.get(key)
    if known is not None:
        return {length: LengthChoice(*known[str(length)]) for length in open_choices.shapes}
    layout, tensors = signature(arguments, step.whole, find_declared_inputs())
    captured = _capture_any_length(step, layout, unpack, open_choices, run)
    found = _choose(step.name, captured, layout, tensors, open_choices, run)
    run.length_choices[key] = {
        str(length): (each.micro_batch, each.codec, each.seconds) for length, each in found.items()
    }
    _LOG.info("%s: %s", step.name, "; ".join(f"{length}: {each}" for length, each in found.items()))
    return found


def _capture_any_length(step: Step, layout: Signature, unpack: Unpack, open_choices: OpenChoices, run: Run) -> Captured:
    """The step as a program for sequences of any length."""
    form = replace_sizes(layout, [(None, *shape[1:]) if split else shape for shape, split in
                                  zip(open_choices.free, layout.batched, strict=True)])  # fmt: skip
    try:
        captured = capture(
            lambda given: step.call(unpack, given), form or layout,
            paths=step.paths, metrics=step.metrics, later=not run.alone, owner=step.owner, data=step.data(unpack),
        )  # fmt: skip
    except (CaptureError, TypeError, ValueError) as failure:
        raise _make_refusal(
            open_choices, f"the step cannot be traced for sequences of any length: {failure}"
        ) from failure
    captured.initialize_variables(lambda variable: True)
    if captured.program.local_sgd is not None:
        why = "each cluster trains a copy of the step, so there is no boundary to encode"
        raise _make_refusal(open_choices, why, codecs="")
    if captured.program.splits:
        raise _make_refusal(open_choices, "the step has nb.split, whose collectives depend on the length")
    if len(captured.program.requests) != 1:
        raise _make_refusal(open_choices, "the step does not ask for gradients exactly once")
    return captured


def _make_refusal(open_choices: OpenChoices, why: str, codecs: str = ', compress={256: "int8"}') -> NotYetError:
    return NotYetError(
        'a curriculum with "auto" for this step',
        where=str(open_choices.site),
        why=why,
        mend=f"use a table: Curriculum(..., micro_batch={{64: 2, 256: 4}}{codecs})",
    )


def _choose(
    name: str, captured: Captured, layout: Signature, tensors: Sequence[Any], open_choices: OpenChoices, run: Run
) -> dict[int, LengthChoice]:
    program, lengths = captured.program, list(open_choices.shapes)
    clusters, shapes = _agree_on_shapes(name, captured, layout, open_choices, run)
    chains = {length: _build_chain(program, shapes[length], open_choices) for length in lengths}
    count = open_choices.micro_batch
    if count is None and program.pipeline.micro_batch == 1 and explain_whole_batch(captured, chains[lengths[-1]]):
        count = dict.fromkeys(lengths, 1)  # more would give other numbers, or be refused
    pipeline = program.pipeline
    options = Options(recompute=pipeline.recompute, schedules=(pipeline.schedule,))
    ends = {}
    for length in {lengths[-1]: None, lengths[0]: None}:
        measured_name = f"{name} with sequences of {length}"
        measured, slowness, _ = measure_in_clusters(
            measured_name, captured, chains[length], shapes[length], clusters, options, run, tensors
        )
        ends[length] = measured, slowness
    found = {}
    for length in lengths:
        own = chains[length]
        measured, slowness = _interpolate(ends, length)
        problem = build_problem(own, clusters, options, measured)
        times = {number: slowness[each] for number, each in enumerate(clusters.names) if each in slowness}
        found[length] = _choose_best(slow_down(problem, times), own, clusters, program, open_choices, length, count)
    return found


def _agree_on_shapes(
    name: str, captured: Captured, layout: Signature, open_choices: OpenChoices, run: Run
) -> tuple[Clusters, dict[int, list[tuple[int, ...]]]]:
    """The clusters of the step's stages, and the shapes of the batch by length, on which all processes agree."""
    names = list(dict.fromkeys(stage.cluster for stage in captured.program.stages))
    every = [
        None if number in layout.absent else shape
        for own in open_choices.shapes.values() for number, shape in enumerate(own)
    ]  # fmt: skip
    agreed = agree_on_planning_input(f"{name} by length", find_configured(run, names), StepKnowledge(1, every), run)
    flat, size = [tuple(each or ()) for each in agreed.known.shapes], len(layout.specs)
    return agreed.clusters, {
        length: flat[size * place : size * (place + 1)] for place, length in enumerate(open_choices.shapes)
    }


def _build_chain(program: Program, shapes: Shapes, open_choices: OpenChoices) -> Layers:
    rows = count_rows(program.leaves, shapes)
    found = build_layers(program, rows, set_rows(program.leaves, shapes, rows))
    if found is None:
        raise _make_refusal(open_choices, "no op of the step reads a variable, so its time cannot be predicted")
    return found


def _interpolate(
    ends: Mapping[int, tuple[dict[str, MeasuredBlocks], dict[str, float]]], length: int
) -> tuple[dict[str, MeasuredBlocks], dict[str, float]]:
    """The seconds of blocks and the slowdowns of clusters for sequences of a length, between those that were measured
    for the shortest and the longest.
    """
    short, long = min(ends), max(ends)  # what is measured of short sequences takes no longer than of long ones
    share = (length - short) / (long - short) if long > short else 1.0
    (first, _), (last, slowness) = ends[short], ends[long]
    found = {}
    for cluster in first.keys() & last.keys():
        one, other = first[cluster], last[cluster]
        between = {
            kind: (1.0 - share) * np.minimum(getattr(one, kind), getattr(other, kind)) + share * getattr(other, kind)
            for kind in ("forward", "backward", "update", "fused")
        }
        found[cluster] = replace(other, **between)
    return found, slowness


def _choose_best(
    problem: Problem, chain: Layers, clusters: Clusters, program: Program, open_choices: OpenChoices, length: int,
    counts: Mapping[int, int] | None,
) -> LengthChoice:  # fmt: skip
    """The fastest choice; of codecs the mildest with which a step takes hardly longer than with the fastest."""
    parts = _find_parts(problem, chain, program, open_choices)
    coded, variants = _list_codecs(list(parts.values()), list(parts), chain, clusters, program, open_choices, length)
    problem = replace(problem, chain=replace(problem.chain, codecs=coded))
    given = (counts or {}).get(length, program.pipeline.micro_batch)
    tried = (given,) if counts is not None else problem.micro_batch_counts
    best: list[Candidate] = []
    for each in variants:
        shapes = (Shape(each, count, program.pipeline.recompute) for count in tried)
        scored = [found for found in (score(problem, shape) for shape in shapes) if isinstance(found, Candidate)]
        best += [min(scored, key=lambda found: found.seconds)] if scored else []
    if not best:
        raise _make_refusal(open_choices, f"no number of micro-batches fits into memory for sequences of {length}")
    most = (1.0 + problem.options.slack) * min(each.seconds for each in best)
    chosen = next(each for each in best if each.seconds <= most)
    codec = None if open_choices.compress is not None else coded[variants.index(chosen.parts)].codec
    count = chosen.shape.micro_batches if open_choices.micro_batch is None else None
    return LengthChoice(count, codec, chosen.seconds)


def _find_parts(problem: Problem, chain: Layers, program: Program, open_choices: OpenChoices) -> dict[str, Part]:
    """The stages of the program as parts of its chain of blocks, in the order of the chain."""
    names = [cluster.name for cluster in problem.clusters]
    stages = {stage.key: stage for stage in program.stages}
    if not chain.written_ranges:
        (stage,) = program.stages[:1]
        return {stage.key: Part(names.index(stage.cluster), 0, len(chain.chain), stage.replicas)}
    ranges = sorted((begin, end, key) for key, (begin, end) in chain.written_ranges.items())
    if any(end > begin for (_, end, _), (begin, _, _) in itertools.pairwise(ranges)):
        raise _make_refusal(open_choices, "its stages do not follow the order of the layers")
    begins = [0, *(begin for begin, _, _ in ranges[1:]), len(chain.chain)]
    return {
        key: Part(names.index(stages[key].cluster), begins[place], begins[place + 1], stages[key].replicas)
        for place, (_, _, key) in enumerate(ranges)
    }


def _list_codecs(
    parts: Sequence[Part], keys: Sequence[str], chain: Layers, clusters: Clusters, program: Program,
    open_choices: OpenChoices, length: int,
) -> tuple[tuple[CodecCosts, ...], list[tuple[Part, ...]]]:  # fmt: skip
    """The codecs of crossings, the mildest first, and the stages with each possible choice of them."""

    def code(name: str, there: Encoding, back: Encoding) -> CodecCosts:
        return code_crossing(name, there, back, chain.tensors, chain.rows, clusters.codecs)

    if open_choices.compress is None:
        coded = code_crossings(AUTO, chain.tensors, chain.rows, clusters.codecs)
        return coded, [tuple(replace(part, codec=number) for part in parts) for number in range(len(coded))]
    if length in open_choices.compress:
        return (code("given", *map(_find_sized, derive_encodings(open_choices.compress[length].options))),), [
            tuple(parts)
        ]
    scoped = [tuple(_find_sized(parse_encoding(text)) for text in pair) for pair in program.compressions]
    coded = tuple(code(str(n), there, back) for n, (there, back) in enumerate([(Encoding(), Encoding()), *scoped]))
    own = {key: op.compress for key in keys for op in program.graph.ops if op.stage == key and op.compress is not None}
    crossing = [own.get(before, own.get(key)) for before, key in zip(["", *keys], keys, strict=False)]
    return coded, [
        tuple(replace(part, codec=0 if n is None else n + 1) for part, n in zip(parts, crossing, strict=False))
    ]


def _find_sized(encoding: Encoding) -> Encoding:
    """An encoding whose size is known beforehand: "auto", which adapts to the link, begins without a codec."""
    return Encoding() if encoding.auto else encoding
