"""Measure the link between two clusters, between two workers and over the links that a run would use."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from typing import Any, Literal, NamedTuple

import numpy as np

import whale_nebula
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import DeadlineError, LinkClosedError, NebulaError, RemoteProtocolError, RunError
from whale_nebula.errors.text import align_columns, escape_foreign_text
from whale_nebula.launch.link_advice import DIRECT, THROUGH, LinkMeasurement, LinkThroughput
from whale_nebula.report.records import size
from whale_nebula.security.code import digest_code
from whale_nebula.transport import Key, Link
from whale_nebula.transport.deadlines import Deadlines, Wait
from whale_nebula.transport.grpc.links import GrpcLinks, Place
from whale_nebula.transport.grpc.options import count_lanes, read_congestion_control
from whale_nebula.transport.peer import PeerLink
from whale_nebula.wire.buffers import Bound
from whale_nebula.wire.message import SESSION, build_message

FIRST_BYTES = 256 << 10
MOST_BYTES = 1 << 30  # of one burst: enough for one second of the fastest link
LEAST_TENSORS = 4
_GROWTH = 4
_MIN_TIME_SHARE = 1 / 8  # of the requested time: a burst that took so long suffices to estimate the rate
_WARM_UP = 4  # the first of so many equal parts of a burst is not counted: connections start slowly


def compute_rate(arrivals: Sequence[float], size: int) -> float:
    """Bytes per second, computed from the arrival times of tensors of one size; the first quarter is not counted.

    >>> compute_rate([0.0, 5.0, 6.0, 7.0, 8.0], 1000)
    1000.0
    """
    first = (len(arrivals) - 1) // _WARM_UP
    seconds = arrivals[-1] - arrivals[first]
    return (len(arrivals) - 1 - first) * size / max(seconds, 1e-9)


def choose_count(rate: float, size: int, seconds: float) -> int:
    """The number of tensors of `size` bytes that take about `seconds` at a rate in bytes per second, at least
    `LEAST_TENSORS`, and at most those of `MOST_BYTES`.

    >>> choose_count(7.5e6, 1 << 20, seconds=4.0), choose_count(100e3, 1 << 20, seconds=4.0)
    (28, 4)
    """
    return max(LEAST_TENSORS, min(int(rate * seconds), MOST_BYTES) // size)


SIZES = (64 << 10, 1 << 20)
_BENCH = "bench link"
_ROUNDS = 20
_PROGRAM = 1
_FAST = 40e6  # bytes per second, above which small tensors do not measure a link
_AGAIN_SECONDS = 10.0
_MOST_BURSTS = 16  # of one size and direction: each is `_GROWTH` times the previous one, up to `MOST_BYTES`
_MOST_CONNECTIONS = 64
_TENSOR = Bound("uint8", (max(SIZES),), due=0)  # all are requested in the order in which they are sent


def expect_tensor(key: Key) -> Bound | None:
    """The announced form of tensors that a measured link may receive."""
    known = (key.kind, key.program, key.phase, key.micro_batch) == ("forward", _PROGRAM, 0, -1)
    return _TENSOR if known and key.slot < MOST_BYTES // min(SIZES) else None


class BurstRate(NamedTuple):
    """The rate of a burst of tensors in bytes per second, as measured by the receiver, and its duration in seconds."""

    rate: float
    seconds: float


class RoundTrips(NamedTuple):
    """Round-trip times of small messages in seconds, and the offset of the other clock."""

    median: float
    least: float
    clock: float


class MeasurementEnd:
    """One end of the measurement of a link, which the other end runs at the same time. The end that `leads` goes first
    in everything that the two do not do at once.

    `seconds` is the approximate duration of each burst, `patience` the timeout of each message of the other end.
    `report` is called with a line on each stage of the measurement. `kind` and `program` are those of the keys of
    tensors.
    """

    def __init__(
        self,
        link: Link,
        *,
        leads: bool,
        seconds: float,
        patience: float,
        report: Callable[[str], None],
        kind: Literal["forward", "round"] = "forward",
        program: int = _PROGRAM,
    ) -> None:
        self._link = link
        self._leads = leads
        ends, directions = (link.here, link.there), (self._send_bursts, self._receive_bursts)
        self._ends, self._directions = (ends, directions) if leads else (ends[::-1], directions[::-1])
        self._seconds = seconds
        self._patience = patience
        self._report = report
        self._kind: Literal["forward", "round"] = kind
        self._program = program
        self._burst_count = 0
        self.has_met = False

    def meet(self, sheet: Mapping[str, Any]) -> Mapping[str, Any]:
        """Exchange greetings with the other end; a worker that runs a script is refused.

        If the other end is still measuring a different link, this waits for it and reports that.
        """
        for_a_script = {"results": _BENCH, "seed": None}  # so that it ends at once with a reason
        self._link.post(build_message(SESSION, "HELLO", bench=_BENCH, **for_a_script, **sheet))
        peer_sheet = self._take_greeting()
        if peer_sheet.get("bench") != _BENCH:
            why = "both ends must measure, and no run may be active at the same time"
            mend = "wait until the run has ended, then start bench link at both ends"
            raise RunError(f"worker '{self._link.there}' runs a script instead of a measurement", why=why, mend=mend)
        self.has_met = True
        return peer_sheet

    def _take_greeting(self) -> Mapping[str, Any]:
        limit, started = 2 * self._patience + 20 * self._seconds, time.monotonic()
        while True:
            asked, seconds = time.monotonic(), min(_AGAIN_SECONDS, limit)
            try:
                return self._link.take(SESSION, seconds)
            except DeadlineError:
                waited = time.monotonic() - started
                if waited >= limit or time.monotonic() - asked < seconds:  # earlier, the error is the link's own
                    raise
                why = "it is connected, but still busy, for example with another measurement"
                self._report(str(Wait(f"worker '{self._link.there}'", "", why, waited, limit)))

    def measure(self, sheet: Mapping[str, Any], path: str, when: float) -> LinkMeasurement:
        """Run the whole measurement, from the greeting to the result."""
        peer_sheet = self.meet(sheet)
        trips = self._round_trips()
        self._report(f"{self._link.there}: round trip {1e3 * trips.median:.1f} ms, at least {1e3 * trips.least:.1f} ms")
        crossings = tuple(self._measure_size(size) for size in SIZES)
        here, there = self._link.here, self._link.there
        sheets = {here: dict(sheet), there: {name: peer_sheet.get(name) for name in sheet}}
        count = peer_sheet.get("connections")
        connections = max(int(sheet["connections"]), count if type(count) is int and count <= _MOST_CONNECTIONS else 1)
        return LinkMeasurement(*self._ends, path, *trips, crossings, sheets, connections, 0, when)

    def probe(self, path: str, when: float) -> LinkMeasurement:
        """Measure round trips and each direction alone, after the ends have met; with large tensors on a fast link."""
        trips, found = self._round_trips(), []
        for measure_direction in self._directions:
            slow = measure_direction(SIZES[0])
            found.append(slow.rate if slow.rate < _FAST else measure_direction(SIZES[1]).rate)
        return LinkMeasurement(*self._ends, path, *trips, (LinkThroughput(SIZES[1], *found, *found),), {}, 1, 0, when)

    # ------------------------------------------------------------------ round trips
    def _round_trips(self) -> RoundTrips:
        if not self._leads:
            for _ in range(_ROUNDS + 1):
                if (asked := self._link.take("PING", self._patience))["last"]:
                    return RoundTrips(*map(float, self._check_count(asked.get("found", ()))))
                self._link.post(build_message("PONG", clock=time.time()))
            raise self._protocol_error(f"it requests more than {_ROUNDS} round trips")
        seen = [self._ping() for _ in range(_ROUNDS)]
        took = [each[0] for each in seen]
        found = RoundTrips(statistics.median(took), min(took), min(seen)[1])
        self._link.post(build_message("PING", last=True, found=list(found)))
        return found

    def _check_count(self, found: Sequence[float]) -> Sequence[float]:
        if len(found) != len(RoundTrips._fields):
            raise self._protocol_error(f"it sent {len(found)} numbers for a round trip")
        return found

    def _ping(self) -> tuple[float, float]:
        """Measure one round trip, and the other clock's offset under the assumption of symmetric delays."""
        asked, started = time.time(), time.monotonic()
        self._link.post(build_message("PING", last=False))
        their_clock = float(self._link.take("PONG", self._patience)["clock"])
        took = time.monotonic() - started
        return took, their_clock - (asked + took / 2)

    # ------------------------------------------------------------------ tensors of one size
    def _measure_size(self, size: int) -> LinkThroughput:
        """The throughput for tensors of one size: of each direction alone, then of both at once."""
        there, back = (measure_direction(size) for measure_direction in self._directions)
        own_direction = there if self._leads else back
        with ThreadPoolExecutor(1, "nebula-link") as pool:
            receiving = pool.submit(self._receive_burst, size)
            sent = self._send_burst(size, choose_count(own_direction.rate, size, self._seconds), last=True)
            both = (sent, receiving.result()[1]) if self._leads else (receiving.result()[1], sent)
        self._report_rate(size, "both ways at once", f"{_format_rate(both[0].rate)} and {_format_rate(both[1].rate)}")
        return LinkThroughput(size, there.rate, back.rate, both[0].rate, both[1].rate)

    def _send_bursts(self, size: int) -> BurstRate:
        """Probe the link with bursts of growing size, then send for the requested time; returns the last rate."""
        count = max(2, FIRST_BYTES // size)
        seen = self._send_burst(size, count, last=False)
        while seen.seconds < _MIN_TIME_SHARE * self._seconds and _GROWTH * count * size <= MOST_BYTES:
            count *= _GROWTH
            seen = self._send_burst(size, count, last=False)
        found = self._send_burst(size, choose_count(seen.rate, size, self._seconds), last=True)
        self._report_rate(size, f"{self._link.here} -> {self._link.there}", _format_rate(found.rate))
        return found

    def _receive_bursts(self, size: int) -> BurstRate:
        """Receive what the other end sends by `_send_bursts`; returns the rate of the last burst."""
        for _ in range(_MOST_BURSTS):
            last, found = self._receive_burst(size)
            if last:
                self._report_rate(size, f"{self._link.there} -> {self._link.here}", _format_rate(found.rate))
                return found
        raise self._protocol_error(f"it sends more than {_MOST_BURSTS} bursts of one size")

    def _send_burst(self, size: int, count: int, *, last: bool) -> BurstRate:
        """Announce `count` tensors, send them, and wait for the rate that the receiver has measured."""
        self._burst_count += 1
        step = self._burst_count
        tensor = np.random.default_rng(step).integers(0, 255, size, np.uint8)
        self._link.post(build_message("BURST", program=self._program, step=step, count=count, size=size, last=last))
        for slot in range(count):
            self._link.send(self._key(step, slot, self._link.here, self._link.there), tensor)
        seen = self._link.take("ARRIVED", self._patience + 2 * self._seconds)
        return BurstRate(float(seen["rate"]), float(seen["seconds"]))

    def _receive_burst(self, size: int) -> tuple[bool, BurstRate]:
        """Receive one burst, and send its rate to the sender; returns whether it is the last of its size, and the rate.
        Its tensors must have this size, `MOST_BYTES` together at most, and arrive within the time that the slowest
        supported link takes.
        """
        announced = self._link.take("BURST", self._patience + 2 * self._seconds)
        count, step = int(announced["count"]), int(announced["step"])
        if announced["size"] != size or not 2 <= count <= MOST_BYTES // size:
            raise self._protocol_error(f"it announced {count} tensors of {announced['size']} bytes")
        arrivals: list[float] = []
        limit = time.monotonic() + LEAST_TENSORS * self._patience + 2 * self._seconds
        for slot in range(count):
            left = min(self._patience, limit - time.monotonic())
            self._link.receive(self._key(step, slot, self._link.there, self._link.here), max(left, 0.0))
            arrivals.append(time.monotonic())
        found = BurstRate(compute_rate(arrivals, size), arrivals[-1] - arrivals[0])
        self._link.post(build_message("ARRIVED", rate=found.rate, seconds=found.seconds))
        return bool(announced["last"]), found

    def _key(self, step: int, slot: int, source: str, destination: str) -> Key:
        return Key(self._kind, self._program, step, 0, -1, slot, source, destination)

    def _protocol_error(self, why: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"worker '{self._link.there}' does not follow the measurement protocol", why=why)

    def _report_rate(self, size: int, what: str, found: str) -> None:
        self._report(f"{what}, tensors of {size >> 10} KiB: {found}")


def _format_rate(rate: float) -> str:
    """A rate in bytes per second as text in bits per second, as usual for links.

    >>> _format_rate(7.5e6), _format_rate(124.96e6)
    ('60 Mbit/s', '1000 Mbit/s')
    """
    mbit = 8 * rate / 1e6
    return f"{mbit:.3g} Mbit/s" if mbit < 999.5 else f"{mbit:.0f} Mbit/s"


COMPARED_VERSIONS = ("whale_nebula", "code", "tensorflow", "keras", "python")
"""Versions that must be identical at both ends of a run; of Python only the minor version."""


def list_versions() -> dict[str, str | None]:
    """The versions at this end of what must agree for identical traced programs, by name; None for a package that is
    not installed.
    """
    return {
        "whale_nebula": whale_nebula.__version__,
        "code": digest_code(),
        "tensorflow": _version("tensorflow"),
        "keras": _version("keras"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def describe_end() -> dict[str, Any]:
    """The description of this end that the other one receives: versions, and settings of the network and the host."""
    host = {"congestion_control": read_congestion_control(), "cores": len(os.sched_getaffinity(0))}
    return {**list_versions(), **host, "connections": count_lanes()}


def find_differences(own_sheet: Mapping[str, Any], peer_sheet: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ but must agree; missing ones are not compared.

    >>> find_differences({"tensorflow": "2.21.0", "keras": None}, {"tensorflow": "2.21.1", "keras": "3.15.0"})
    {'tensorflow': ('2.21.0', '2.21.1')}
    """
    pairs = {name: (own_sheet.get(name), peer_sheet.get(name)) for name in COMPARED_VERSIONS}
    return {name: both for name, both in pairs.items() if None not in both and both[0] != both[1]}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def measure_links(
    place: Place, *, seconds: float, patience: float, report: Callable[[str], None]
) -> Iterator[LinkMeasurement]:
    """Measure the links to all peers of a place, one after the other in an order that is the same at all ends.

    `report` is also called with the peer that is waited for; no wait is longer than `patience`.
    """
    joined = GrpcLinks(
        place, expect=expect_tensor, deadlines=Deadlines(patience=patience), announce=lambda wait: report(str(wait))
    )
    try:
        for there in sorted(place.peers, key=lambda each: sorted((place.here, each))):
            yield _measure_link(place, joined.links[there], seconds, patience, report)
    finally:
        joined.close()


def _measure_link(
    place: Place, link: PeerLink, seconds: float, patience: float, report: Callable[[str], None]
) -> LinkMeasurement:
    end = MeasurementEnd(link, leads=place.here < link.there, seconds=seconds, patience=patience, report=report)
    path = THROUGH if place.uses_gateway(link.there) else DIRECT
    try:
        found = end.measure(describe_end(), path, time.time())
    except (DeadlineError, LinkClosedError) as error:
        raise _add_command(error, link.there, path, has_met=end.has_met) from None
    return replace(found, broken=max(0, link.state().connections - 1))


def _add_command(error: NebulaError, there: str, path: str, *, has_met: bool) -> NebulaError:
    """Add the command to start the other end to an error, if that end has never connected."""
    if has_met:
        return error
    command = f"whale-nebula bench link --config clusters.yaml --cluster {cluster_of(there)}"
    gateways = "start the gateways of both clusters, and " if path == THROUGH else ""
    return type(error)(
        error.what, where=error.where, why=error.why, mend=f"{gateways}at the same time, run there: {command}"
    )


def list_far_ends(everyone: Sequence[str], cluster: str, only: str | None = None) -> list[str]:
    """The workers at the other ends: the first of every other cluster, or of one.

    >>> list_far_ends(["gpu/0", "gpu/1", "npu/0", "npu/1", "tpu/0"], "gpu")
    ['npu/0', 'tpu/0']
    """
    found = [each for each in everyone if each.endswith("/0") and each != f"{cluster}/0"]
    return [each for each in found if only is None or each == f"{only}/0"]


_CLOCK_SECONDS = 1.0


def format_table(found: LinkMeasurement) -> str:
    """The measurement as lines of text.

    >>> one = LinkThroughput(1 << 20, 7.2e6, 7.1e6, 7.0e6, 6.9e6)
    >>> print(format_table(LinkMeasurement("gpu/0", "npu/0", "direct", 0.041, 0.0404, 0.001, (one,), {}, 4, 0, 0.0)))
    gpu/0 - npu/0, direct
      round trip 41.0 ms, at least 40.4 ms; 4 connections
      tensors   gpu -> npu   npu -> gpu     both ways at once
      1.0 MiB  57.6 Mbit/s  56.8 Mbit/s  56.0 and 55.2 Mbit/s
    """
    (a, b), times = found.clusters, (1e3 * found.round_trip, 1e3 * found.least_round_trip)
    trip = "round trip {:.1f} ms, at least {:.1f} ms".format(*times)
    rows = [["tensors", f"{a} -> {b}", f"{b} -> {a}", "both ways at once"]]
    for each in found.crossings:
        rates = (each.there, each.back, each.both_there, each.both_back)
        there, back, *both = (f"{8 * rate / 1e6:.{int(8 * rate < 1e9)}f}" for rate in rates)
        rows.append([size(each.size), f"{there} Mbit/s", f"{back} Mbit/s", f"{' and '.join(both)} Mbit/s"])
    lines = [f"  {line}" for line in align_columns(rows, numbers=range(4))]
    connections = f"{found.connections} connection{'s' * (found.connections != 1)}"
    controls = [escape_foreign_text(sheet.get("congestion_control") or "?") for sheet in found.sheets.values()]
    if controls:
        connections += f"; congestion control {' and '.join(dict.fromkeys(controls))}"
    first = [f"{found.first} - {found.second}, {found.path}", f"  {trip}; {connections}"]
    return "\n".join([*first, *lines, *(f"  {note}" for note in list_warnings(found))])


def list_warnings(found: LinkMeasurement) -> list[str]:
    """Warnings on what a measurement shows: a clock offset, reconnections, versions that differ."""
    lines = []
    if abs(found.clock) > _CLOCK_SECONDS:
        late = "ahead of" if found.clock > 0 else "behind"
        lines.append(f"the clock of {found.second} is {abs(found.clock):.1f} s {late} the clock of {found.first}")
    if found.broken:
        times = "once" if found.broken == 1 else f"{found.broken} times"
        lines.append(f"the connection broke {times} during the measurement")
    sheets = [found.sheets.get(worker, {}) for worker in (found.first, found.second)]
    for name, versions in find_differences(*sheets).items():
        first, second = map(escape_foreign_text, versions)
        lines.append(
            f"{name} differs: {first} at {found.first}, {second} at {found.second}; a run would refuse to start"
        )
    return lines
