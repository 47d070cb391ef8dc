"""The result of a link measurement: a record that both ends share, its advice, and its file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.config.schema import Line, cluster_of
from whale_nebula.errors import TransportError

FOLDER = "line"
DIRECT, THROUGH = "direct", "through the gateways"


@dataclass(frozen=True, slots=True)
class LinkThroughput:
    """Throughput of a link for tensors of one size: bytes per second from the first worker to the second (`there`) and
    `back`, each alone and then both ways at once.
    """

    size: int
    there: float
    back: float
    both_there: float
    both_back: float


@dataclass(frozen=True)
class LinkMeasurement:
    """Measurement of the link between two workers. Times are in seconds; `round_trip` is the median, `clock` the offset
    of the second worker's clock, `sheets` describe both ends (`describe_end`), `connections` is their number, and
    `broken` how often one was lost; `when` is the time of the measurement in seconds since 1970.

    >>> one = LinkThroughput(1 << 20, 7.2e6, 7.1e6, 7.0e6, 7.0e6)
    >>> found = LinkMeasurement("gpu/0", "npu/0", "direct", 0.041, 0.0404, 0.001, (one,), {}, 1, 0, 0.0)
    >>> found.bits, found.delay, LinkMeasurement.from_json(found.to_json()) == found
    (56800000.0, 0.0202, True)
    """

    first: str
    second: str
    path: str
    round_trip: float
    least_round_trip: float
    clock: float
    crossings: tuple[LinkThroughput, ...]
    sheets: Mapping[str, Mapping[str, Any]]
    connections: int
    broken: int
    when: float

    @property
    def clusters(self) -> tuple[str, str]:
        """The two clusters that the link connects."""
        return cluster_of(self.first), cluster_of(self.second)

    @property
    def bits(self) -> float:
        """The rate of the link in bits per second, as in `links` of the config: of the slower direction, for large
        tensors.
        """
        largest = max(self.crossings, key=lambda each: each.size)
        return 8 * min(largest.there, largest.back)

    @property
    def delay(self) -> float:
        """The delay of one direction, as in `links` of the config: half of the shortest round trip."""
        return self.least_round_trip / 2

    def to_json(self) -> str:
        """Serialise as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LinkMeasurement:
        """Parse JSON of `to_json`; ValueError for anything else."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "crossings": tuple(LinkThroughput(**each) for each in fields["crossings"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a link measurement: {error!r}") from None

    def document(self) -> dict[str, Any]:
        """The measurement as JSON, with the rate and the delay for `links` of the config."""
        return {**asdict(self), "rate_bits_per_second": self.bits, "delay_seconds": self.delay}


def find_measurement_path(config: str | os.PathLike[str], a: str, b: str) -> Path:
    """The file of the last measurement between two clusters, in a folder next to the config.

    >>> find_measurement_path("/srv/clusters.yaml", "npu", "gpu").as_posix()
    '/srv/line/gpu-npu.json'
    """
    name = "-".join(sorted(each.replace("/", "_") for each in (a, b)))
    return Path(os.path.abspath(config)).parent / FOLDER / f"{name}.json"


def find_collectives_path(config: str | os.PathLike[str], cluster: str) -> Path:
    """The file of the last measurement of a cluster's collectives, in the same folder.

    >>> find_collectives_path("/srv/clusters.yaml", "gpu").as_posix()
    '/srv/line/gpu.collectives.json'
    """
    return Path(os.path.abspath(config)).parent / FOLDER / f"{cluster.replace('/', '_')}.collectives.json"


def save_measurement(found: LinkMeasurement, path: Path) -> None:
    """Save a measurement, which planning uses and `doctor` compares with the config."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found.to_json() + "\n", "utf-8")
    except OSError as error:
        raise TransportError(
            "cannot save the measurement", where=str(path), why=error.strerror, mend=f"ls -ld {path.parent}"
        ) from None


def load_measurement(path: Path) -> LinkMeasurement | None:
    """Read a measurement from a file; None if it is missing or invalid."""
    try:
        return LinkMeasurement.from_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


_RATE_TOLERANCE = 0.1
_DELAY_TOLERANCE = 0.25
_DELAY_SLACK = 1e-3  # tolerance for busy hosts


class Advice(NamedTuple):
    """Comparison of the config with a measurement: whether they agree, why or in what they differ, and the line to
    write into the config, if they differ.
    """

    agrees: bool
    why: str
    write: str = ""


def advise(found: LinkMeasurement, line: Line) -> Advice:
    """Compare a measurement between two clusters with the config.

    A rate in the config also paces the gateways, so a faster link cannot be measured through them. A correct value is
    left unchanged: a measured rate is slightly lower, so copying it each time would lower it repeatedly.
    """
    why, rate, delay = [], str(Line(line.rate)), str(Line(delay=line.delay))
    near = line.rate is not None and abs(found.bits - line.rate) <= _RATE_TOLERANCE * line.rate
    if line.rate is None or not (near or _is_paced(found, line.rate)):
        configured, rate = rate if line.rate is not None else "no rate", format_link_rate(found.bits)
        why.append(f"the config has {configured}, but the measured rate is {rate}")
    if abs(found.delay - line.delay) > max(_DELAY_SLACK, _DELAY_TOLERANCE * line.delay):
        configured, delay = delay if line.delay else "no delay", format_link_delay(found.delay)
        why.append(f"the config has {configured}, but the measured delay is {delay}")
    if not why:
        paced = "; a faster link would not show, because the gateways limit the rate" if found.path == THROUGH else ""
        return Advice(True, f"the config has {line}, which matches the measurement{paced}")
    delay = delay if delay != str(Line()) else format_link_delay(found.delay)
    a, b = found.clusters
    return Advice(False, "; ".join(why), f"links: [{{between: [{a}, {b}], rate: {rate}, delay: {delay}}}]")


def _is_paced(found: LinkMeasurement, rate: float) -> bool:
    """Whether the measured rate reached the gateways' limit, at least once in each direction: then the link has that
    rate.
    """
    there = max(max(each.there, each.both_there) for each in found.crossings)
    back = max(max(each.back, each.both_back) for each in found.crossings)
    return found.path == THROUGH and 8 * min(there, back) >= (1 - _RATE_TOLERANCE) * rate


def format_link_rate(bits: float) -> str:
    """A rate in the config's syntax, rounded down so that a paced sender does not overflow the link.

    >>> format_link_rate(57.38e6), format_link_rate(3_456e6), format_link_rate(940e3)
    ('57mbit', '3450mbit', '0.94mbit')
    """
    mbit = bits / 1e6
    digits = max(0, 2 - math.floor(math.log10(max(mbit, 1e-3)))) if mbit < 10 else 0
    unit = 10 ** max(0, math.floor(math.log10(max(mbit, 1.0))) - 2)
    return f"{math.floor(mbit / unit * 10**digits + 1e-9) / 10**digits * unit:g}mbit"


def format_link_delay(seconds: float) -> str:
    """A delay in the config's syntax, to a tenth of a millisecond.

    >>> format_link_delay(0.02013), format_link_delay(0.00052), format_link_delay(0.1234)
    ('20ms', '0.5ms', '123ms')
    """
    milliseconds = 1e3 * seconds
    return f"{round(milliseconds) if milliseconds >= 10 else round(milliseconds, 1):g}ms"
