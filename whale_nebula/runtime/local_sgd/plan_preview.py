"""The planned rounds of local SGD for a plan's text: rows per cluster, and bytes exchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whale_nebula.codec.sizes import fitting, nbytes, parts_of
from whale_nebula.codec.way import parse_way
from whale_nebula.ir.program import Program
from whale_nebula.report.units import duration, size
from whale_nebula.runtime.local_sgd.deltas import dims_of, weights_of
from whale_nebula.runtime.local_sgd.topology import sites_of
from whale_nebula.runtime.run import Run


def foretold(program: Program, variables: Mapping[str, Any], rows: int, run: Run) -> Sequence[str]:
    """A sentence on the rows and one for each other cluster, from the sizes alone; none where nobody is met."""
    apart = program.apart
    sites = None if apart is None else sites_of(apart, run)
    if apart is None or sites is None or len(sites.names) == 1 or not program.requests:
        return ()
    shares = [end - begin for begin, end in (sites.rows(name, rows) for name in sites.names)]
    worked = ", ".join(f"{name} {share}" for name, share in zip(sites.names, shares, strict=True))
    count = sum(math.prod(variable.shape) for variable in weights_of(program, variables, ()).values())
    crosses = _bytes(count, apart.codec)
    here = run.here().cluster if not run.alone else sites.names[0]
    found = [f"of {rows} rows each works on its own ({worked}); what stands above is one cluster's, on all of them"]
    for other in sites.names:
        if other != here:
            rate = run.links.between(here, other).rate
            takes = f", {duration(8 * crosses / rate)} of the line" if rate else ""
            found.append(f"a meeting sends {size(crosses)} from {here} to {other}{takes}, and as much back")
    return found


def _bytes(count: int, way: str) -> int:
    """So many weights as they cross."""
    dims = dims_of(count)
    codec = fitting(parse_way(way).codec, "float32", dims)
    return nbytes(parts_of(codec, "float32", dims)) if codec is not None else 4 * count
