"""What casts put on lines that are free: counted, as there all stages run as one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.routing import Routing
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.channels.routes import Routes
from whale_nebula.wire.frame import frame_count, wire_bytes


def counted(cut: Cut, hosts: Sequence[str], counts: Sequence[int]) -> Mapping[str, BoundaryReport]:
    """Every direction of a boundary that is cast, for micro-batches of so many rows; sizes that only a step knows are
    left out.
    """
    routes = Routes(cut, Routing.plain(hosts))
    found: dict[str, BoundaryReport] = {}
    for value, (boundary, back) in routes.of.items():
        cast, spec = routes.way(value).cast, cut.program.graph.spec(value)
        if cast is None or not routes.links(value) or spec.shape is None or None in spec.shape[1:]:
            continue
        label = routes.label(boundary, back=back)
        for rows in counts:
            size = payload_bytes(cast, spec.dtype, spec.sized(rows))
            told = BoundaryReport(cast, spec.nbytes(rows), size, wire_bytes(size), frame_count(size))
            found[label] = found.get(label, BoundaryReport()) + told
    return found
