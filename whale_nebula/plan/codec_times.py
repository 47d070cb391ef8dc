"""What codecs take the stages of a plan: who sends encodes, and in each other cluster the first who reads decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from whale_nebula.plan.records import PlanBoundary

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


class Coding(NamedTuple):
    """Seconds of one core for a micro-batch, around a stage's forward and around its backward.

    >>> Coding(0.5) + Coding(0.25, 1.0)
    Coding(forward=0.75, backward=1.0)
    """

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: object) -> Coding:
        if not isinstance(other, Coding):
            return NotImplemented
        return Coding(self.forward + other.forward, self.backward + other.backward)


def coding(plan: Plan, names: Sequence[str]) -> dict[str, Coding]:
    """By stage, of those that take part; a codec of which nothing is known takes nothing."""
    found = dict.fromkeys(names, Coding())
    for each in plan.boundaries:
        for name, one in _of(plan, each, names):
            found[name] += one
    return found


def _of(plan: Plan, each: PlanBoundary, names: Sequence[str]) -> Iterator[tuple[str, Coding]]:
    cluster = {name: plan.stages[name].cluster for name in (each.source, *each.destinations)}
    away = [name for name in each.destinations if name in names and cluster[name] != cluster[each.source]]
    if not away or each.source not in names:
        return
    first = {cluster[name]: name for name in reversed(away)}.values()
    encode, decode = _sides(each.codec_seconds, each.encode_seconds, len(plan.rows))
    encode_back, decode_back = _sides(each.backward_codec_seconds, each.backward_encode_seconds, len(plan.rows))
    yield each.source, Coding(encode, decode_back)
    yield from ((name, Coding(decode / len(first))) for name in first)
    yield from ((name, Coding(0.0, encode_back / len(away))) for name in away)


def _sides(both: float | None, encode: float | None, micro_batches: int) -> tuple[float, float]:
    """What a micro-batch takes to encode and to decode."""
    sent = encode or 0.0
    return sent / micro_batches, max((both or 0.0) - sent, 0.0) / micro_batches
