"""Make `nb.auto_parallel(replan=True)` change from one plan to the next, whatever was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from whale_nebula.planner.decision import Observation, Offer
from whale_nebula.planner.problem import Candidate, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import SearchResult
from whale_nebula.report.prediction import PlannedReport
from whale_nebula.runtime import decisions, replan


def force_plans(patch: Callable[..., None], texts: Sequence[str]) -> list[str]:
    """Let the planner choose the first of these plans, and the next one after each measured step; returns the list
    of chosen plans. "gpu, npu" are two stages, half of the blocks each; "gpu, npu: 4" the same in four micro-batches.
    """
    chosen: list[str] = []

    def choose(problem: Problem) -> tuple[Candidate, ...]:
        text = texts[len(chosen)]
        found = score(problem, parse_shape(problem, text))
        assert isinstance(found, Candidate), found
        chosen.append(text)
        return (found,)

    def find_next(problem: Problem, *args: Any) -> Offer | None:
        return Offer(problem, choose(problem)) if len(chosen) < len(texts) else None

    patch(decisions, "search", lambda problem: SearchResult(choose(problem)))
    patch(replan, "find_better_plan", find_next)
    patch(replan, "FIRST_JUDGED", 1)
    patch(PlannedReport, "is_off", property(lambda planned: len(chosen) < len(texts)))
    patch(replan.PlanWatch, "_observe", lambda watch, planned, seconds, outcome: Observation(seconds, planned.compute))
    return chosen


def parse_shape(problem: Problem, text: str) -> Shape:
    """The shape of a text."""
    stages, _, count = text.partition(":")
    names = stages.split(", ")
    numbers = [next(n for n, each in enumerate(problem.clusters) if each.name == name) for name in names]
    blocks, several = len(problem.chain), len(names)
    ends = [round(blocks * (place + 1) / several) for place in range(several)]
    parts = [Part(cluster, begin, end) for cluster, begin, end in zip(numbers, [0, *ends], ends, strict=False)]
    return replace(Shape(tuple(parts)), micro_batches=int(count or 1))
