"""How many bytes a step puts on each link: the same formula that links count by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from whale_nebula.ir.plan import Cut
from whale_nebula.ir.spec import Spec, Value
from whale_nebula.report.report import LinkReport
from whale_nebula.wire.frame import wire_bytes

_PRECISION = {"fp16": 2, "bf16": 2}


class Message(NamedTuple):
    """A tensor that goes from a stage to a host, in one direction."""

    source: int
    destination: int
    payload: int
    raw: int


def messages(cut: Cut, hosts: Sequence[str], rows: int) -> Iterator[Message]:
    """What crosses between hosts for a micro-batch of `rows` rows; sizes that only a step knows are left out."""
    flows = [flow for request in cut.program.requests for flow in request.flows]
    codecs = {b.value: b.backward_codec for b in cut.boundaries}
    for boundary in cut.boundaries:
        for destination in _once(boundary.source, boundary.destinations, hosts):
            yield from _message(cut, boundary.value, boundary.codec, boundary.source, destination, rows)
    for flow in flows:
        target = cut.program.labels.get(flow.boundary.op, 0)
        for destination in _once(flow.stage, (target,), hosts):
            codec = codecs.get(flow.boundary, "none")
            yield from _message(cut, flow.gradient, codec, flow.stage, destination, rows)


def _once(source: int, destinations: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """One destination for each host that is not the source's."""
    first: dict[str, int] = {}
    for destination in destinations:
        if hosts[destination] != hosts[source]:
            first.setdefault(hosts[destination], destination)
    return list(first.values())


def _message(cut: Cut, value: Value, codec: str, source: int, destination: int, rows: int) -> Iterator[Message]:
    spec = cut.program.graph.spec(value)
    raw = _bytes(spec, rows)
    if raw is not None:
        payload = raw * _PRECISION[codec] // _width(spec) if codec in _PRECISION else raw
        yield Message(source, destination, payload, raw)


def _bytes(spec: Spec, rows: int) -> int | None:
    """Bytes of a tensor whose first axis is the batch; None where another axis is unknown."""
    if spec.shape is None or None in spec.shape[1:]:
        return None
    return spec.nbytes(unknown=rows)


def _width(spec: Spec) -> int:
    return Spec(spec.dtype, ()).nbytes()


def link_reports(cut: Cut, hosts: Sequence[str], counts: Sequence[int]) -> Mapping[str, LinkReport]:
    """What each link carries in a step whose micro-batches have `counts` rows."""
    found: dict[str, LinkReport] = {}
    for rows in counts:
        for message in messages(cut, hosts, rows):
            name = f"{hosts[message.source]}->{hosts[message.destination]}"
            link = LinkReport(message.payload, wire_bytes(message.payload), message.raw, 1)
            found[name] = found.get(name, LinkReport()) + link
    return found
