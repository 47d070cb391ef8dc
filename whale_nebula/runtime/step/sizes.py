"""Predicted bytes on each link per step, by the same formula as links count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.codec.wording import has_open_size
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.exchanged import Exchanged
from whale_nebula.ir.program import Flow
from whale_nebula.report.records import LinkReport
from whale_nebula.spec import Spec, Value
from whale_nebula.wire.frame import frame_count, wire_bytes


class Message(NamedTuple):
    """A tensor that goes from a stage to a host, in one direction.

    `numbers` is how many floating-point numbers it holds that a codec can make smaller: no scalar, nothing complex.
    `bounded` says that there may be fewer bytes, because values decide what its codec makes of it.
    """

    source: int
    destination: int
    payload: int
    raw: int
    phase: int = 0
    numbers: int = 0
    bounded: bool = False


def messages(cut: Cut, hosts: Sequence[str], rows: int) -> Iterator[Message]:
    """What crosses between hosts for a micro-batch of `rows` rows; sizes that only a step knows are left out."""
    ways = {b.value: (b.backward_codec, b.codec) for b in cut.boundaries}
    for boundary in cut.boundaries:
        for destination in _once(boundary.source, boundary.destinations, hosts):
            ends = boundary.source, destination, boundary.phase
            yield from _message(cut, boundary.value, boundary.codec, ends, rows)
    for phase, flow in _flows(cut):
        target = cut.program.labels.get(flow.boundary.op, 0)
        for destination in _once(flow.stage, (target,), hosts):
            codec, forward = ways.get(flow.boundary, ("none", "none"))
            yield from _message(cut, flow.gradient, codec, (flow.stage, destination, phase), rows, forward)


def all_sized(cut: Cut, exchanged: Exchanged, counts: Sequence[int]) -> bool:
    """Whether the size of all that crosses is known before a step, given its rows."""
    crossing = [*(b.value for b in cut.boundaries), *(flow.gradient for _, flow in _flows(cut))]
    sized = all(_bytes(cut.program.graph.spec(value), 1) is not None for value in crossing)
    return sized and all(exchanged.nbytes(each, counts) is not None for each in cut.exchange)


def _flows(cut: Cut) -> Iterator[tuple[int, Flow]]:
    """The gradients that cross, each with its phase."""
    phases = {request: phase.index for phase in cut.phases for request in phase.requests}
    return ((phases[r.index], flow) for r in cut.program.requests for flow in r.flows)


def _once(source: int, destinations: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """One destination for each host that is not the source's."""
    first: dict[str, int] = {}
    for destination in destinations:
        if hosts[destination] != hosts[source]:
            first.setdefault(hosts[destination], destination)
    return list(first.values())


def _message(
    cut: Cut, value: Value, codec: str, ends: tuple[int, int, int], rows: int, forward: str | None = None
) -> Iterator[Message]:
    spec = cut.program.graph.spec(value)
    raw = _bytes(spec, rows)
    if raw is not None:
        payload = payload_bytes(codec, spec.dtype, spec.sized(rows), forward)
        source, destination, phase = ends
        coded = spec.floating and not spec.scalar and not spec.dtype.startswith("complex")
        yield Message(
            source, destination, payload, raw, phase, raw // _width(spec) if coded else 0, has_open_size(codec)
        )


def _bytes(spec: Spec, rows: int) -> int | None:
    """Bytes of a tensor whose first axis is the batch; None where another axis is unknown."""
    if spec.shape is None or None in spec.shape[1:]:
        return None
    return spec.nbytes(unknown=rows)


def _width(spec: Spec) -> int:
    return Spec(spec.dtype, ()).nbytes()


def bounded_links(
    cut: Cut, hosts: Sequence[str], clusters: Sequence[str] = (), exchanged: Exchanged | None = None
) -> frozenset[str]:
    """The links of which it is known only at most how much they carry, because values in the batch decide it."""
    names, exchanged = clusters or hosts, exchanged or Exchanged(cut)
    sent = (each for each in messages(cut, hosts, 1) if each.bounded)
    found = {f"{names[each.source]}->{names[each.destination]}" for each in sent}
    return frozenset(found | {f"{each.source}->{each.destination}" for each in cut.exchange if exchanged.at_most(each)})


def link_reports(
    cut: Cut,
    hosts: Sequence[str],
    counts: Sequence[int],
    clusters: Sequence[str] = (),
    exchanged: Exchanged | None = None,
) -> Mapping[str, LinkReport]:
    """What each link carries in a step whose micro-batches have `counts` rows; `clusters` name the hosts' links,
    `exchanged` knows the sizes of what is sent once a step.
    """
    found: dict[str, LinkReport] = {}
    names = clusters or hosts
    for rows in counts:
        for message in messages(cut, hosts, rows):
            name = f"{names[message.source]}->{names[message.destination]}"
            frames = frame_count(message.payload)
            link = LinkReport(message.payload, wire_bytes(message.payload), message.raw, frames)
            found[name] = found.get(name, LinkReport()) + link
    exchanged = exchanged or Exchanged(cut)
    for each in cut.exchange:
        name, size = f"{each.source}->{each.destination}", exchanged.nbytes(each, counts)
        if size is not None:
            link = LinkReport(size, wire_bytes(size), size, frame_count(size))
            found[name] = found.get(name, LinkReport()) + link
    return found
