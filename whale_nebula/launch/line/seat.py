"""The position of a measuring worker in a run, and its measurements with each other cluster in turn."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import whale_nebula
from whale_nebula.errors import DeadlineError, LinkClosedError, NebulaError
from whale_nebula.errors.foreign_text import escape_foreign_text
from whale_nebula.launch.line.advice import DIRECT, THROUGH, Crossing, LineFound
from whale_nebula.launch.line.ends import End
from whale_nebula.report.units import size
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.grpc.options import congestion_control, lanes
from whale_nebula.transport.peer import PeerLink

ALIKE = ("whale_nebula", "code", "tensorflow", "keras", "python")
"""What must be the same at both ends of a run; Python only in its minor version."""


def sheet() -> dict[str, Any]:
    """All that the process says."""
    return {**versions(), **host()}


def versions() -> dict[str, str | None]:
    """What the same program can only be traced with, if it is the same everywhere; None: not installed here."""
    return {
        "whale_nebula": whale_nebula.__version__,
        "code": code_digest(),
        "tensorflow": _version("tensorflow"),
        "keras": _version("keras"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def host() -> dict[str, Any]:
    """What this host carries a line with."""
    control = congestion_control()
    return {"congestion_control": control, "connections": lanes(), "cores": len(os.sched_getaffinity(0))}


def unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs that must be alike; what one of them does not have is not compared.

    >>> unlike({"tensorflow": "2.21.0", "keras": None}, {"tensorflow": "2.21.1", "keras": "3.15.0"})
    {'tensorflow': ('2.21.0', '2.21.1')}
    """
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ALIKE}
    return {name: both for name, both in pairs.items() if None not in both and both[0] != both[1]}


@cache
def code_digest() -> str:
    """The first digits of the SHA-256 of this package's source: the same where the code is."""
    root = Path(whale_nebula.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Seat(Place):
    """A worker's place, for which only some of the others are there; `everyone` are all workers of the run, as frames
    and gateways number them.
    """

    everyone: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run, whether they take part or not."""
        return self.everyone or (*self.peers, self.here)


def measure(seat: Seat, *, seconds: float, patience: float, tell: Callable[[str], None]) -> Iterator[LineFound]:
    """Measure the lines to all peers of a seat, one after the other in an order that all ends know.

    Who is waited for is told as well; nobody is waited for longer than `patience`.
    """
    joined = GrpcLinks(seat, deadlines=Deadlines(patience=patience), announce=lambda wait: tell(str(wait)))
    try:
        for there in sorted(seat.peers, key=lambda each: sorted((seat.here, each))):
            yield _measure_link(seat, joined.links[there], seconds, patience, tell)
    finally:
        joined.close()


def _measure_link(
    seat: Seat, link: PeerLink, seconds: float, patience: float, tell: Callable[[str], None]
) -> LineFound:
    end = End(link, leads=seat.here < link.there, seconds=seconds, patience=patience, tell=tell)
    path = THROUGH if seat.through_gateway(link.there) else DIRECT
    try:
        found = end.measure(sheet(), path, time.time())
    except (DeadlineError, LinkClosedError) as error:
        raise _absent(error, link.there, path, came=end.met) from None
    return replace(found, broken=max(0, link.state().connections - 1))


def _absent(error: NebulaError, there: str, path: str, *, came: bool) -> NebulaError:
    """The same error with the command that is missing, if the other end has never come."""
    if came:
        return error
    command = f"whale-nebula bench link --config clusters.yaml --cluster {there.rpartition('/')[0]}"
    gateways = "start the gateways of both clusters, and " if path == THROUGH else ""
    return type(error)(
        error.what, where=error.where, why=error.why, mend=f"{gateways}run there, at the same time: {command}"
    )


def others(everyone: Sequence[str], cluster: str, only: str | None = None) -> list[str]:
    """Who is at the other ends: the first worker of every other cluster, or of one.

    >>> others(["gpu/0", "gpu/1", "npu/0", "npu/1", "tpu/0"], "gpu")
    ['npu/0', 'tpu/0']
    """
    found = [each for each in everyone if each.endswith("/0") and each != f"{cluster}/0"]
    return [each for each in found if only is None or each == f"{only}/0"]


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
