"""What a measurement of a line has found: data, which both ends have alike, and a file of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whale_nebula.errors import TransportError

FOLDER = "line"
DIRECT, THROUGH = "direct", "through the gateways"


@dataclass(frozen=True, slots=True)
class Crossing:
    """Tensors of one size on the line: bytes a second from the first worker to the second (`there`) and `back`, each
    alone and then both ways at once, and the CPU time that both ends together spent on 10^9 bytes.
    """

    size: int
    there: float
    back: float
    both_there: float
    both_back: float
    cpu_seconds_per_gb: float


@dataclass(frozen=True)
class LineFound:
    """What was found between two workers. Times are in seconds; `clock` says by how much the second one's clock is
    ahead, `sheets` what each said of itself, `broken` how often the connection had to be made again; `when` is the time
    of the clock here.

    >>> one = Crossing(1 << 20, 7.2e6, 7.1e6, 7.0e6, 7.0e6, 2.1)
    >>> found = LineFound("gpu/0", "npu/0", "direct", 0.041, 0.0404, 0.001, (one,), {}, 1, 0, 0.0)
    >>> found.bits, found.delay, LineFound.from_json(found.to_json()) == found
    (56800000.0, 0.0202, True)
    """

    first: str
    second: str
    path: str
    round_trip: float
    least_round_trip: float
    clock: float
    crossings: tuple[Crossing, ...]
    sheets: Mapping[str, Mapping[str, Any]]
    connections: int
    broken: int
    when: float

    @property
    def clusters(self) -> tuple[str, str]:
        """The two clusters that the line joins."""
        return self.first.rpartition("/")[0], self.second.rpartition("/")[0]

    @property
    def bits(self) -> float:
        """The rate of the line in bits a second, as `links` in the config has it: of the slower way, large tensors."""
        largest = max(self.crossings, key=lambda each: each.size)
        return 8 * min(largest.there, largest.back)

    @property
    def delay(self) -> float:
        """One way, as `links` in the config has it: half of the shortest round trip."""
        return self.least_round_trip / 2

    def to_json(self) -> str:
        """As text, for a file or another process."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LineFound:
        """What `to_json` wrote; ValueError for anything else."""
        try:
            said = json.loads(text)
            return cls(**{**said, "crossings": tuple(Crossing(**each) for each in said["crossings"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no measurement of a line: {error!r}") from None

    def document(self) -> dict[str, Any]:
        """For programs: all that was found, and what follows from it."""
        return {**asdict(self), "rate_bits_per_second": self.bits, "delay_seconds": self.delay}


def path_of(config: str | os.PathLike[str], a: str, b: str) -> Path:
    """Where the last measurement between two clusters lies: in a folder beside the config.

    >>> path_of("/srv/clusters.yaml", "npu", "gpu").as_posix()
    '/srv/line/gpu-npu.json'
    """
    name = "-".join(sorted(each.replace("/", "_") for each in (a, b)))
    return Path(os.path.abspath(config)).parent / FOLDER / f"{name}.json"


def save(found: LineFound, path: Path) -> None:
    """Keep a measurement, for `doctor` to compare with the config."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found.to_json() + "\n", "utf-8")
    except OSError as error:
        raise TransportError(
            "the measurement cannot be kept", where=str(path), why=error.strerror, mend=f"ls -ld {path.parent}"
        ) from None


def saved(path: Path) -> LineFound | None:
    """The measurement in a file; None if there is none that can be read."""
    try:
        return LineFound.from_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


