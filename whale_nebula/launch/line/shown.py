"""A measurement of a line as a small table."""

from __future__ import annotations

from whale_nebula.errors.foreign_text import escape_foreign_text
from whale_nebula.launch.line.found import Crossing, LineFound
from whale_nebula.launch.line.sheet import unlike
from whale_nebula.report.units import size

_CLOCK_SECONDS = 1.0


def table(found: LineFound) -> str:
    """All of it in lines.

    >>> one = Crossing(1 << 20, 7.2e6, 7.1e6, 7.0e6, 6.9e6, 2.11)
    >>> print(table(LineFound("gpu/0", "npu/0", "direct", 0.041, 0.0404, 0.001, (one,), {}, 4, 0, 0.0)))
    gpu/0 - npu/0, direct
      round trip 41.0 ms, at least 40.4 ms; 4 connections
      tensors     gpu -> npu   npu -> gpu   both ways at once        CPU, both ends
      1.0 MiB    57.6 Mbit/s  56.8 Mbit/s  56.0 and 55.2 Mbit/s  2.1 s for each GB
    """
    (a, b), trip = found.clusters, f"round trip {_ms(found.round_trip)}, at least {_ms(found.least_round_trip)}"
    head = ["tensors", f"{a} -> {b}", f"{b} -> {a}", "both ways at once", "CPU, both ends"]
    rows = [head, *map(_row, found.crossings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    connections = f"{found.connections} connection{'s' * (found.connections != 1)}"
    first = [f"{found.first} - {found.second}, {found.path}", f"  {trip}; {connections}{_control(found)}"]
    return "\n".join([*first, *lines, *(f"  {note}" for note in notes(found))])


def notes(found: LineFound) -> list[str]:
    """What else is to be known: clocks that are apart, a connection that broke, versions that differ."""
    said = []
    if abs(found.clock) > _CLOCK_SECONDS:
        late = "ahead" if found.clock > 0 else "behind"
        said.append(f"the clock of {found.second} is {abs(found.clock):.1f} s {late} of that of {found.first}")
    if found.broken:
        said.append(f"the connection broke {found.broken} times meanwhile")
    sheets = [found.sheets.get(worker, {}) for worker in (found.first, found.second)]
    for name, versions in unlike(*sheets).items():
        first, second = map(escape_foreign_text, versions)
        said.append(f"{name} differs: {first} at {found.first}, {second} at {found.second}; a run would refuse that")
    return said


def _row(each: Crossing) -> list[str]:
    both = f"{_mbit(each.both_there)} and {_mbit(each.both_back)} Mbit/s"
    cpu = f"{each.cpu_seconds_per_gb:.1f} s for each GB"
    return [size(each.size), f"{_mbit(each.there)} Mbit/s", f"{_mbit(each.back)} Mbit/s", both, cpu]


def _mbit(rate: float) -> str:
    return f"{8 * rate / 1e6:.1f}" if 8 * rate < 1e9 else f"{8 * rate / 1e6:.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _control(found: LineFound) -> str:
    controls = [escape_foreign_text(sheet.get("congestion_control") or "?") for sheet in found.sheets.values()]
    return f"; congestion control {' and '.join(dict.fromkeys(controls))}" if controls else ""
