"""Texts of a cluster object: a table for people, and a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whale_nebula.hardware.clusters import Clusters, Device

_UNKNOWN = "?"


def with_prefix(number: float | None, unit: str, step: float = 1000.0) -> str:
    """A number with a prefix of its unit, to three digits.

    >>> with_prefix(9.42e10, "FLOP/s"), with_prefix(2**34, "B", 1024.0), with_prefix(76e-6, "s"), with_prefix(None, "s")
    ('94.2 GFLOP/s', '16 GiB', '76 µs', '?')
    """
    if number is None:
        return _UNKNOWN
    power = 0
    while number >= step and power < 5:
        number, power = number / step, power + 1
    while 0 < number < 1 and power > -3:
        number, power = number * step, power - 1
    prefix = ("", "k", "M", "G", "T", "P", "n", "µ", "m")[power]
    between = "i" if step == 1024.0 and prefix else ""
    return f"{float(f'{number:.3g}'):g} {prefix.upper() if between else prefix}{between}{unit}"


def table(clusters: Clusters) -> str:
    """Workers, links, collectives and codecs, a line each, with the date of what was measured."""
    rows = [["worker", "machine", "device", "memory", "FLOP/s", "call"]]
    for worker in clusters.workers:
        device = worker.device
        cores = f"{device.kind}, {device.cores} core{'s' * (device.cores != 1)}"
        memory, call = with_prefix(device.memory_bytes, "B", 1024.0), with_prefix(device.call_seconds, "s")
        rows.append([worker.name, worker.machine, cores, memory, _rates(device), call])
    lines = list(_align(rows))
    for each in clusters.clusters:
        if len(each.workers) > 1:
            lines.append(f"inside {each.name}: {each.inside}")
        lines += [
            f"{one.kind} of {one.workers} in {each.name}: {with_prefix(one.alpha_s, 's')} "
            f"+ {with_prefix(one.beta_s_per_byte * 1e6, 's')} for each MB"
            for one in each.collectives
        ]
    lines += [f"{a} -> {b}: {link}" for (a, b), link in clusters.links.items()]
    if clusters.codecs:
        told = (f"{name} {with_prefix(seconds * 1e6, 's')}" for name, seconds in clusters.codecs.items())
        lines.append(f"codecs, for each MB: {', '.join(told)}")
    dates = sorted(each.date for each in clusters.measured.values())
    return "\n".join([*lines, *([f"measured {dates[0][:10]}"] if dates else [])])


def _rates(device: Device) -> str:
    if not device.rates:
        return with_prefix(device.flops_per_s, "")
    return ", ".join(f"{kernel} {with_prefix(rate, '')}" for kernel, rate in device.rates.items())


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def mermaid(clusters: Clusters) -> str:
    """A flowchart: a box for each cluster with its workers, and an arrow for each link; one for both ways alike."""
    lines = ["flowchart LR"]
    for number, cluster in enumerate(clusters.clusters):
        lines.append(f'    subgraph c{number}["{cluster.name}"]')
        for index, worker in enumerate(cluster.workers):
            rate = with_prefix(worker.device.rate_of("matmul"), "FLOP/s")
            memory = with_prefix(worker.device.memory_bytes, "B", 1024.0)
            said = [worker.name, worker.device.kind, *(each for each in (rate, memory) if each != _UNKNOWN)]
            lines.append(f'        w{number}_{index}["{"<br>".join(said)}"]')
        lines.append("    end")
    place = {name: f"c{number}" for number, name in enumerate(clusters.names)}
    for (a, b), link in clusters.links.items():
        back = clusters.links.get((b, a))
        if back != link:
            lines.append(f'    {place[a]} -->|"{link}"| {place[b]}')
        elif clusters.names.index(a) < clusters.names.index(b):
            lines.append(f'    {place[a]} <-->|"{link}"| {place[b]}')
    return "\n".join(lines)
