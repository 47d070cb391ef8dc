"""Compress scopes that have no say: one around a consumer where the producer has its own, and one around nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale_nebula.ir.cut import Boundary
from whale_nebula.ir.program import Program
from whale_nebula.passes.masks import scopes_of


def compress_notes(program: Program, boundaries: Sequence[Boundary]) -> Iterator[str]:
    """What a plan says of them, with the lines where they stand."""
    used: set[str] = set()
    overruled: dict[str, str] = {}
    for each in boundaries:
        counting = next(scopes_of(program, each.value, each.destinations), None)
        if counting is not None:
            used.add(_site(program, counting))
            others = _around(program, each, counting)
            overruled |= {site: _said(each, site, _site(program, counting)) for site in others}
    yield from overruled.values()
    if program.apart is not None:  # they say how differences of weights cross
        return
    for site in dict.fromkeys(program.sites):
        if site not in used and site not in overruled:
            yield f"nb.compress at {site} changes nothing: no tensor that crosses comes under it"


def _around(program: Program, boundary: Boundary, counting: int) -> Iterator[str]:
    """The lines of other scopes around what reads a boundary."""
    found = {
        op.compress
        for op in program.graph.consumers(boundary.value)
        if op.compress is not None and program.labels.get(op.index) in boundary.destinations
    }
    sites = {_site(program, scope) for scope in found}
    yield from sorted(sites - {_site(program, counting)})


def _said(boundary: Boundary, site: str, counting: str) -> str:
    return f"b{boundary.slot}: nb.compress at {site} does not count: what makes the tensor stands in one, at {counting}"


def _site(program: Program, scope: int) -> str:
    return next(iter(program.sites[scope : scope + 1]), "")
