"""A plan as a Mermaid flowchart, which many places that show Markdown draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import re
from collections.abc import Iterator

from whale_nebula.codec.said import words
from whale_nebula.plan.records import PlanBoundary, PlanStage
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


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
        yield f'{source} -- "{spec}{_coded(boundary.taken[0])}" --> {_id("stage", name)}'
        if boundary.backward:
            yield f'{_id("stage", name)} -. "gradient{_coded(boundary.taken[1], back=True)}" .-> {source}'


def _coded(codec: str, *, back: bool = False) -> str:
    said = words(codec, back=back)
    return "" if not said else f"{' ' if said.startswith('as ') else ', '}{_text(said)}"


def _label(stage: PlanStage) -> str:
    return f"stage {_text(stage.name)}<br/>{stage.parameters:,} parameters"


def _id(kind: str, name: str) -> str:
    """A name that Mermaid takes as a word, and that no other name shares."""
    return f"{kind}_" + re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", name)


def _text(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
