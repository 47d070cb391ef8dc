"""Measurements of this machine: a record, its file in the user's cache, and completion of a cluster object by it; the
slowdowns of clusters that runs have measured; and how calls are timed.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from whale_nebula.hardware.clusters import ClusterInfo, Clusters, Collective, Device, Provenance, WorkerInfo
from whale_nebula.plain import from_plain, to_plain, write_json

FORMAT, BLOCKS, SLOWNESS = "whale_nebula measured 1", "whale_nebula blocks 1", "whale_nebula slowness 2"
"""The format lines of the files of this version."""
MOST_BLOCKS = 4000
"""The most subgraphs that are stored, the latest ones."""


@dataclass(frozen=True)
class Measurement:
    """Measurements of a machine that are not in a config. `sources` has the provenance of each number, by
    "device.rates.matmul", "codecs.int8" or "collectives.all-reduce".

    >>> from whale_nebula.hardware import ClusterInfo, WorkerInfo
    >>> both = Clusters((ClusterInfo("gpu", (WorkerInfo("gpu/0"), WorkerInfo("gpu/1", "10.0.0.2"))),))
    >>> found = Measurement("this one", Device(flops_per_s=1e11)).complete(both, lambda machine: machine == "localhost")
    >>> [worker.device.flops_per_s for worker in found.workers]
    [100000000000.0, None]
    """

    machine: str
    device: Device | None = None
    codecs: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    sources: Mapping[str, Provenance] = field(default_factory=dict)

    def complete(self, clusters: Clusters, is_here: Callable[[str], bool]) -> Clusters:
        """The clusters with missing values filled in: of codecs, of workers on machines for which `is_here` is true,
        and of collectives in clusters whose workers are all on such machines.
        """
        local = cache(is_here)
        sources = {f"codecs.{name}": source for name, source in self._sources("codecs")}
        made = []
        for cluster in clusters.clusters:
            workers = [worker for worker in cluster.workers if local(worker.machine)]
            near = 1 < len(workers) == len(cluster.workers)
            sums = tuple(each.among(len(workers)) for each in self.collectives if near)
            workers = [replace(worker, device=self.device or Device()) for worker in workers]
            made.append(ClusterInfo(cluster.name, tuple(workers), collectives=sums))
            for worker in workers:
                sources |= {f"{worker.name}.{name}": source for name, source in self._sources("device")}
            sources |= {f"{cluster.name}.collectives.{kind}": source for kind, source in self._sources("collectives")}
        return clusters.complete_from(Clusters(tuple(made), {}, self.codecs, sources))

    def _sources(self, part: str) -> list[tuple[str, Provenance]]:
        """The provenance of the numbers of a part, by their names there."""
        return [(name.removeprefix(f"{part}."), each) for name, each in self.sources.items() if name.startswith(part)]


# ---------------------------------------------------------------------- the machine
@cache
def fingerprint() -> str:
    """The properties of the machine that affect measurements: processor, cores, GPUs, version and threads of
    TensorFlow.
    """
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    threads = [f"{name}={value}" for name in _THREADS if (value := os.environ.get(name))]
    cores = count_cores()
    parts = [_read_processor(), f"{cores} core{'s' * (cores != 1)}", *[f"{gpus} GPUs"] * bool(gpus)]
    return ", ".join([*parts, f"TensorFlow {_read_tensorflow_version()}", *threads])


_THREADS = (
    "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _read_tensorflow_version() -> str:
    try:
        return metadata.version("tensorflow")
    except metadata.PackageNotFoundError:
        return "is not installed"


# ---------------------------------------------------------------------- the files
def cache_path() -> Path:
    """The file of measurements of this machine: in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "whale_nebula" / "measured.json"


_Kept = TypeVar("_Kept")
_READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError)
"""The exceptions of reading a missing or invalid file."""


def _read(kind: type[_Kept], path: Path, written_as: str) -> _Kept:
    """Read a file by the fields of its kind; raises one of `_READ_ERRORS`."""
    document = json.loads(path.read_text("utf-8"))
    if document["format"] != written_as:
        raise ValueError(f"its format is {document['format']!r}, not {written_as!r}")
    found: _Kept = from_plain(kind, document)
    return found


def _write(record: object, path: Path, written_as: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": written_as, **to_plain(record)})


def save_measurement(measurement: Measurement, path: Path | None = None) -> Path:
    """Write a measurement to a file, by default that of this machine; returns the path."""
    target = path or cache_path()
    _write(measurement, target, FORMAT)
    return target


def read_measurement() -> tuple[Measurement | None, str]:
    """The measurement in the file and ""; if it is not of this machine, None and the reason; without a file, None and
    "".
    """
    source = cache_path()
    try:
        found = _read(Measurement, source, FORMAT)
    except FileNotFoundError:
        return None, ""
    except _READ_ERRORS as error:
        return None, f"{source} contains no valid measurement ({type(error).__name__}: {error})"
    if found.machine != fingerprint():
        return None, f"{source} was measured on a different machine: {found.machine}; this one is {fingerprint()}"
    return found, ""


# ---------------------------------------------------------------------- subgraphs
@dataclass(frozen=True)
class BlockTime:
    """Seconds of one run of a subgraph, their spread, and the time of the measurement."""

    seconds: float
    spread: float
    date: str


@dataclass(frozen=True)
class _BlocksFile:
    machine: str
    blocks: Mapping[str, BlockTime]


def blocks_path() -> Path:
    """The file of the measured subgraphs; machines that share a cache have one each."""
    number = hashlib.sha256(fingerprint().encode()).hexdigest()[:12]
    return cache_path().with_name(f"blocks-{number}.json")


def read_blocks() -> dict[str, BlockTime]:
    """The subgraphs that were measured on this machine, by their keys; empty if the file is of another machine, or
    invalid: they are measured again.
    """
    try:
        found = _read(_BlocksFile, blocks_path(), BLOCKS)
    except _READ_ERRORS:
        return {}
    return dict(found.blocks) if found.machine == fingerprint() else {}


def save_blocks(blocks: Mapping[str, BlockTime]) -> None:
    """Add measured subgraphs to the file."""
    every = {**read_blocks(), **blocks}
    newest = dict(sorted(every.items(), key=lambda item: item[1].date)[-MOST_BLOCKS:])
    _write(_BlocksFile(fingerprint(), newest), blocks_path(), BLOCKS)


# ---------------------------------------------------------------------- slowdowns
@dataclass(frozen=True)
class Slowness:
    """The ratio of a cluster's time in a run on a machine to the predicted one: alone in its processes, or `together`
    with all others in one. The prediction was from `measured` blocks, or from estimates; the ratio applies only to the
    same kind of prediction, and to the same number of `workers`.
    """

    machine: str
    cluster: str
    workers: tuple[WorkerInfo, ...]
    together: bool
    measured: bool
    factor: float = 1.0
    date: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that identify the ratio."""
        return self.machine, self.cluster, str(to_plain(self.workers)), self.together, self.measured


@dataclass(frozen=True)
class _SlownessFile:
    found: tuple[Slowness, ...]


def slowness_path() -> Path:
    """The file of slowdowns, next to that of measurements."""
    return cache_path().with_name("slowness.json")


def _load_slowness() -> dict[tuple[object, ...], Slowness]:
    try:
        return {each.key: each for each in _read(_SlownessFile, slowness_path(), SLOWNESS).found}
    except _READ_ERRORS:
        return {}


def read_slowness(clusters: Clusters, together: bool, measured: Collection[str]) -> dict[str, float]:
    """By cluster, the slowdown that earlier runs on this machine have measured for the same workers; `measured` names
    the clusters with measured blocks.
    """
    known, machine = _load_slowness(), fingerprint()
    made = (Slowness(machine, c.name, c.workers, together, c.name in measured) for c in clusters.clusters)
    return {each.cluster: known[each.key].factor for each in made if each.key in known}


def save_slowness(factors: Mapping[str, float], clusters: Clusters, together: bool, measured: Collection[str]) -> None:
    """Store the slowdowns of a run; if they cannot be written, the next run plans without them."""
    date, known = datetime.now(UTC).isoformat(timespec="seconds"), _load_slowness()
    for each in clusters.clusters:
        if each.name in factors:
            is_measured, factor = each.name in measured, factors[each.name]
            slowness = Slowness(fingerprint(), each.name, each.workers, together, is_measured, factor, date)
            known[slowness.key] = slowness
    with contextlib.suppress(OSError):
        _write(_SlownessFile(tuple(known.values())), slowness_path(), SLOWNESS)


# ---------------------------------------------------------------------- times of calls
RUNS, _FEWEST_RUNS = 10, 3
WARM_UP = 2
_MOST_SECONDS = 2.0
_LEAST_SECONDS = 2e-3
"""The least duration of a run of calls, so that clock resolution and interruptions matter little."""


class CallTime(NamedTuple):
    """The median seconds of a call over some runs, and their interquartile range as a share of it."""

    seconds: float
    spread: float


def time_calls(call: Callable[[], Any], runs: int = RUNS, most: float = _MOST_SECONDS) -> CallTime:
    """Time a call after a warm-up, in `runs` runs; in fewer, but at least three, if they exceed `most` seconds."""
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-9)
    count = max(1, round(_LEAST_SECONDS / once))
    found = []
    for _ in range(max(min(runs, int(most / once)), _FEWEST_RUNS)):
        started = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - started) / count)
    return summarise(found)


def summarise(seconds: Sequence[float]) -> CallTime:
    """The median of some runs, and their spread.

    >>> summarise([1.0, 2.0, 2.0, 2.0, 9.0])
    CallTime(seconds=2.0, spread=0.0)
    """
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return CallTime(median, (high - low) / median if median else 0.0)


class LinearFit(NamedTuple):
    """Seconds as a line over an amount of work: `alpha` for each call, and `beta` for each unit of work."""

    alpha: float
    beta: float


def fit_line(points: Sequence[tuple[float, float]]) -> LinearFit:
    """Least-squares line through (work, seconds) by relative errors, with coefficients of at least 0.

    >>> fit_line([(0.0, 2.0), (10.0, 7.0), (20.0, 12.0)])
    LinearFit(alpha=2.0, beta=0.5)
    >>> fit_line([(1.0, 1.0), (10.0, 100.0)]).alpha
    0.0
    """
    # relative errors: weights are 1/t
    rows = [(1 / seconds, work / seconds) for work, seconds in points]
    one = sum(a * a for a, _ in rows)
    both = sum(a * b for a, b in rows)
    two = sum(b * b for _, b in rows)
    left, right = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = one * two - both * both
    if determinant > 1e-12 * one * two:
        alpha, beta = (left * two - right * both) / determinant, (right * one - left * both) / determinant
        if alpha >= 0 and beta >= 0:
            return LinearFit(alpha, beta)
        if beta < 0:  # no measurable effect of the work
            return LinearFit(left / one, 0.0)
    return LinearFit(0.0, right / two)
