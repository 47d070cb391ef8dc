"""What a codec remembers, it remembers for each pair of workers that a boundary joins. A plan says where that shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale_nebula.codec.way import parse_way
from whale_nebula.ir.cut import Boundary, Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.replicate import running


def lane_notes(program: Program, boundaries: Sequence[Boundary], workers: Sequence[Worker]) -> Iterator[str]:
    """Boundaries whose results depend on how many workers share a stage: each pair of them sees other micro-batches."""
    several = [len(names) > 1 for names in running(len(program.stages), workers)]
    for each in boundaries:
        dims = program.graph.spec(each.value).sized(unknown=1) or (1, 1)
        kept = dict.fromkeys(_kept(text, dims) for text in (each.codec, each.backward_codec))
        if any(several[stage] for stage in (each.source, *each.destinations)):
            yield from (f"b{each.slot}: each pair of workers has {what}, so {_SO}" for what in kept if what)


_SO = "results depend on how many workers there are"


def _kept(text: str, dims: tuple[int, ...]) -> str:
    """What is remembered from one micro-batch to the next, in words; empty where that is nothing.

    >>> _kept("rank(4) >> int8", (8, 16)), _kept("topk(0.5)", (8, 16))
    ('a basis of its own', '')
    """
    way = parse_way(text)
    if way.delta is not None:
        return "samples of its own to tell changes of"
    if way.structure is not None and way.structure.news(dims):
        return "a basis of its own"
    return "a ramp of its own" if way.ladder and not way.auto else ""
