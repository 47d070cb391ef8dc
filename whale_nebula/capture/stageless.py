"""A model with scopes and without a stage runs as one stage: that is said, as `nb.stage` was probably forgotten."""

from __future__ import annotations

import warnings

from whale_nebula.capture.tracing import Tracing
from whale_nebula.errors import NebulaWarning
from whale_nebula.scopes.site import Site

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
