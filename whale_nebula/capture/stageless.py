"""Warn about a model that has scopes but no stage: it runs as one stage, and `nb.stage` was probably forgotten.

Where a part of it stands in `nb.replica`, all of it is copied, and that is said, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from whale_nebula.capture.mirror import COPIED
from whale_nebula.capture.tracing import Tracing
from whale_nebula.errors import NebulaWarning
from whale_nebula.site import Site
from whale_nebula.tf import private as tf_private

_said: set[Site] = set()


def tell_if_stageless(trace: Tracing) -> None:
    """Warn, once for a place, where a traced step met `nb.cluster` or `nb.pipeline` and no `nb.stage`."""
    around = trace.outer
    if trace.stages or trace.replicas.met or trace.replicas.around or around is None or around.site in _said:
        return
    _said.add(around.site)
    warning = NebulaWarning(
        f"nb.{around.kind} holds no nb.stage: all of the step is one stage, 'stage0'",
        where=str(around.site),
        why="what runs on which cluster is said by nb.stage alone; it is said once for this place",
        mend='with nb.stage(cluster="gpu"): around the calls of the layers that belong together, '
        "or with nb.stage(): around all of them",
    )
    warnings.warn_explicit(warning, NebulaWarning, around.site.file, around.site.line)


def tell_if_partly_copied(trace: Tracing, paths: Mapping[int, str]) -> None:
    """Warn, once for a place, where a step without a stage reads weights inside an `nb.replica`, and others outside. By
    the id of their handle, `paths` names them.
    """
    met = trace.replicas.met
    if trace.stages or trace.replicas.around or not met or met[0].site in _said:
        return
    inside, outside = (set(_weights(trace, copied)) for copied in (True, False))
    rest = sorted(paths.get(handle, name) for handle, name in outside - inside)
    if not inside or not rest:
        return
    site = met[0].site
    _said.add(site)
    warning = NebulaWarning(
        f"nb.replica holds a part of the step, and all of it is copied: {rest[0]!r} stands outside",
        where=str(site),
        why="copies are made of stages, and a step without nb.stage is one; it is said once for this place",
        mend='with nb.replica(...), nb.stage(name="..."): around these lines, and nb.stage(name="...") around the rest'
        "\nor nb.replica around all of it",
    )
    warnings.warn_explicit(warning, NebulaWarning, site.file, site.line)


def _weights(trace: Tracing, copied: bool) -> Iterator[tuple[int, str]]:
    """The trainable variables that the forward reads inside of replica scopes, or outside: handle and name."""
    names = {id(each.handle): each.name.partition(":")[0] for each in trace.graph.variables if each.trainable}
    held = {inner.op.name: id(outer) for outer, inner in trace.graph.captures if id(outer) in names}
    first = trace.requests[0].before if trace.requests else None
    for op in trace.graph.get_operations():
        reads = op.type in ("ReadVariableOp", "ResourceGather") and (first is None or op.name in first)
        handle = held.get(op.inputs[0].op.name) if reads else None
        if handle is not None and (tf_private.number_on(op, COPIED) is not None) == copied:
            yield handle, names[handle]
