"""Where a boundary's codec is not used, or not all of it, because it would not make the tensor smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale_nebula.codec.precisions import Bits
from whale_nebula.codec.sizes import used_codec
from whale_nebula.codec.way import Way, parse_way
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.spec import Spec


def fallbacks(cut: Cut, rows: Sequence[int]) -> Iterator[str]:
    """A sentence for each such boundary and gradient, with the sizes of the largest micro-batch."""
    for boundary in cut.boundaries:
        spec = cut.program.graph.spec(boundary.value)
        if spec.shape and None not in spec.shape[1:]:
            yield from _of(boundary, spec, max(rows) if boundary.layout == "rows" else 1)


def _of(boundary: Boundary, spec: Spec, rows: int) -> Iterator[str]:
    dims, forward = spec.sized(rows), parse_way(boundary.codec)
    directions: list[tuple[str, Way, Way | None]] = [("", forward, None)]
    directions += [(" gradient", parse_way(boundary.backward_codec), forward)] * boundary.backward
    for what, way, of in directions:
        used = used_codec(way, spec.dtype, dims, of)
        if way.coded and used != way.codec and not isinstance(way.codec, Bits):
            how = f"as {used}" if used is not None else "as it is"
            yield f"b{boundary.slot}{what} {list(dims)} crosses {how}: {way.codec} would not be fewer bytes"
