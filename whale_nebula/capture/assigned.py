"""Stamp the ops of a trace by an assignment: those that read a variable belong to the stage that was decided for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whale_nebula.capture.scopes_met import ScopesMet
from whale_nebula.codec.way import both_ways
from whale_nebula.ir.assignment import Assignment
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.effects import is_read
from whale_nebula.scopes.frames import Frame
from whale_nebula.site import Site


def adopt_stages(met: ScopesMet, given: Assignment, site: Site) -> None:
    """Let a trace that meets no scopes have the stages that were decided, as if scopes had said so at this line."""
    numbers = dict[str, int]()
    for codec in dict.fromkeys(given.codecs.values()):
        numbers[codec] = len(met.compressions)
        met.compressions.append(Frame("compress", both_ways(codec), site))
    met.stages = {s.key: replace(s, compress=numbers.get(given.codecs.get(s.key, ""))) for s in given.stages}
    met.pipeline = given.pipeline
    for stage in given.stages:
        if stage.replicas > 1:
            frame = Frame("replica", {"count": stage.replicas}, site)
            met.replicas.met.append(frame)
            met.replicas.holding.add(frame)
            met.replicas.of[stage.key] = frame


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
