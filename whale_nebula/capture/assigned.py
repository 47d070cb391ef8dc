"""Stamp the ops of a trace by an assignment: those that read a variable belong to the stage that was decided for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whale_nebula.capture.scopes_met import ScopesMet
from whale_nebula.codec.way import both_ways
from whale_nebula.ir.assignment import Assignment, Constraints, Written
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Pipeline, Program
from whale_nebula.passes.effects import is_read
from whale_nebula.scopes.frames import Frame
from whale_nebula.site import Site


def adopt_stages(met: ScopesMet, given: Assignment, site: Site) -> None:
    """Let a trace have the stages that were decided, as if its scopes had said all of it, or new ones at this line."""
    numbers = dict[str, int]()
    for codec in dict.fromkeys(given.codecs.values()):
        numbers[codec] = len(met.compressions)
        met.compressions.append(Frame("compress", both_ways(codec), site))
    met.stages = {s.key: replace(s, compress=numbers.get(given.codecs.get(s.key, ""))) for s in given.stages}
    met.pipeline, met.decided = given.pipeline, True
    for stage in given.stages:
        shard = ("gradients" if stage.shared_gradients else "optimizer") if stage.shared_slots else None
        frame = Frame("replica", {"count": stage.replicas, "shard": shard}, site)
        met.replicas.of[stage.key] = frame
        met.replicas.decided.add(stage.key)
        if stage.replicas > 1:
            met.replicas.met.append(frame)
            met.replicas.holding.add(frame)


def list_constraints(met: ScopesMet, program: Program) -> Constraints:
    """What the scopes that a trace has met say to a planner."""
    frames = {key: met.replicas.of.get(key) for key in met.entered}
    whole = set(frames.values()) if frames else set(met.replicas.all[:1])
    around = whole.pop() if len(whole) == 1 else None
    pipe = met.pipe
    stages = []
    for key, (words, clusters) in met.entered.items():
        frame = frames[key]
        stages.append(Written(key, words, clusters, None if frame is None else frame.options["count"]))
    layouts = [block.options["layout"] for block in met.blocks]
    open_layout = not layouts or "all" in layouts
    return Constraints(
        tuple(stages),
        () if open_layout else tuple(dict.fromkeys(name for layout in layouts for name in layout)),
        met.pipeline if pipe is not None else Pipeline(),
        None if pipe is None else pipe.options["micro_batch"],
        None if around is None else around.options["count"],
        _why_unplanned(met, program),
    )


def _why_unplanned(met: ScopesMet, program: Program) -> str:
    if program.apart is not None:
        return "in it each cluster trains a copy of its own (nb.replica(sync_every=...))"
    if met.splits:
        return f"it has nb.split at {met.splits[0].site}, and so says itself which variables are in pieces"
    if met.entered and len(program.requests) > 1:
        return "it has stages of its own and asks for gradients more than once"
    return ""


def stamp_readers(graph: Graph, given: Assignment, paths: Mapping[int, str], forward: set[int] | None) -> Graph:
    """The graph with a stage for each op of the forward that reads a variable, and for those that read what it gives.

    `paths` names the variables by the op that holds their handle; without `forward` all ops are the forward.
    """
    ops, seen = list(graph.ops), Counter[str]()
    keys = {stage.key: number for number, stage in enumerate(given.stages)}
    found: dict[int, str] = {}

    def stamp(index: int, key: str) -> None:
        if index not in found or keys[key] > keys[found[index]]:
            found[index] = key

    for op in graph.ops:
        path = paths.get(op.inputs[0].op) if is_read(op) and op.inputs else None
        if path is None or (forward is not None and op.index not in forward):
            continue
        key = given.stage_of(path, seen[path])
        seen[path] += 1
        if key is None:
            continue
        stamp(op.index, key)
        for value in op.values if not _is_lookup(op.type) else ():
            for reader in graph.consumers(value):
                if forward is None or reader.index in forward:
                    stamp(reader.index, key)
    for index, key in found.items():
        if ops[index].stage is None:
            ops[index] = replace(ops[index], stage=key)
    return replace(graph, ops=tuple(ops))


def _is_lookup(kind: str) -> bool:
    return kind.startswith("ResourceGather")


def paths_of_handles(graph: Any, numbers: Mapping[str, int], handles: Mapping[int, str]) -> dict[int, str]:
    """The paths of captured variables, by the op that holds their handle; `handles` has them by its id."""
    captured = ((internal.op.name, handles.get(id(external))) for external, internal in graph.captures)
    return {numbers[name]: path for name, path in captured if path is not None}
