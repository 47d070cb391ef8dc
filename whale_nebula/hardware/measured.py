"""What was measured on this machine: a record, its file in the user's cache, and how it completes a cluster object; and
what runs have shown of how long clusters compute.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from whale_nebula.hardware.clusters import ClusterInfo, Clusters, Collective, Device, Provenance, WorkerInfo
from whale_nebula.plain import from_plain, to_plain, write_json

FORMAT, BLOCKS, SLOWNESS = "whale_nebula measured 1", "whale_nebula blocks 1", "whale_nebula slowness 2"
"""What the files of this version begin with."""
MOST_BLOCKS = 4000
"""So many subgraphs are remembered, those that were measured last."""


@dataclass(frozen=True)
class Measurement:
    """What was measured on a machine, and is not said in a config. `sources` has the provenance of each number, by
    "device.rates.matmul", "codecs.int8" or "collectives.all-reduce".

    >>> from whale_nebula.hardware import ClusterInfo, WorkerInfo
    >>> told = Clusters((ClusterInfo("gpu", (WorkerInfo("gpu/0"), WorkerInfo("gpu/1", "10.0.0.2"))),))
    >>> found = Measurement("this one", Device(flops_per_s=1e11)).complete(told, lambda machine: machine == "localhost")
    >>> [worker.device.flops_per_s for worker in found.workers]
    [100000000000.0, None]
    """

    machine: str
    device: Device | None = None
    codecs: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    sources: Mapping[str, Provenance] = field(default_factory=dict)

    def complete(self, clusters: Clusters, here: Callable[[str], bool]) -> Clusters:
        """Fill in missing values of workers whose machine is `here`."""
        local = cache(here)
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
    """The machine as numbers depend on it: processor, cores, GPUs, version and threads of TensorFlow."""
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    threads = [f"{name}={value}" for name in _THREADS if (value := os.environ.get(name))]
    cores = count_cores()
    parts = [_processor(), f"{cores} core{'s' * (cores != 1)}", *[f"{gpus} GPUs"] * bool(gpus)]
    return ", ".join([*parts, f"TensorFlow {_tensorflow()}", *threads])


_THREADS = (
    "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _tensorflow() -> str:
    try:
        return metadata.version("tensorflow")
    except metadata.PackageNotFoundError:
        return "is not installed"


# ---------------------------------------------------------------------- the files
def cache_path() -> Path:
    """The file of what was measured here: in XDG_CACHE_HOME, or in ~/.cache."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(told) if os.path.isabs(told) else Path.home() / ".cache"
    return folder / "whale_nebula" / "measured.json"


_Kept = TypeVar("_Kept")
_BROKEN = (OSError, ValueError, TypeError, KeyError, AttributeError)
"""What reading a file raises that is not there, or is not what was written."""


def _read(kind: type[_Kept], path: Path, written_as: str) -> _Kept:
    """What a file holds, by the fields of its kind; it raises one of `_BROKEN`."""
    document = json.loads(path.read_text("utf-8"))
    if document["format"] != written_as:
        raise ValueError(f"its format is {document['format']!r}, and not {written_as!r}")
    found: _Kept = from_plain(kind, document)
    return found


def _write(found: object, path: Path, written_as: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": written_as, **to_plain(found)})


def keep(found: Measurement, path: Path | None = None) -> Path:
    """Write a measurement to its file, and give the path."""
    target = path or cache_path()
    _write(found, target, FORMAT)
    return target


def read_kept() -> tuple[Measurement | None, str]:
    """The measurement in the file; without one that is of this machine, None and a sentence. There is no sentence
    where there is no file.
    """
    source = cache_path()
    try:
        found = _read(Measurement, source, FORMAT)
    except FileNotFoundError:
        return None, ""
    except _BROKEN as error:
        return None, f"{source} holds no measurement that can be read ({type(error).__name__}: {error})"
    if found.machine != fingerprint():
        return None, f"{source} was measured on another machine: {found.machine}; this one is {fingerprint()}"
    return found, ""


# ---------------------------------------------------------------------- subgraphs
@dataclass(frozen=True)
class BlockTime:
    """Seconds of one run of a subgraph, the spread of them, and when it was measured."""

    seconds: float
    spread: float
    date: str


@dataclass(frozen=True)
class _Blocks:
    machine: str
    blocks: Mapping[str, BlockTime]


def blocks_path() -> Path:
    """The file of the subgraphs that were measured here; machines that share a cache have one each."""
    number = hashlib.sha256(fingerprint().encode()).hexdigest()[:12]
    return cache_path().with_name(f"blocks-{number}.json")


def read_blocks() -> dict[str, BlockTime]:
    """The subgraphs that were measured on this machine, by their keys; none where a file is of another one, or broken:
    they are measured again.
    """
    try:
        found = _read(_Blocks, blocks_path(), BLOCKS)
    except _BROKEN:
        return {}
    return dict(found.blocks) if found.machine == fingerprint() else {}


def keep_blocks(found: Mapping[str, BlockTime]) -> None:
    """Add to the subgraphs that were measured on this machine."""
    every = {**read_blocks(), **found}
    newest = dict(sorted(every.items(), key=lambda item: item[1].date)[-MOST_BLOCKS:])
    _write(_Blocks(fingerprint(), newest), blocks_path(), BLOCKS)


# ---------------------------------------------------------------------- what runs have shown
@dataclass(frozen=True)
class Slowness:
    """How many times as long as was counted a cluster computed in a run on a machine: alone in its processes, or
    `together` with all others in one. What was counted were seconds of blocks that were `measured`, or estimates; of
    the other, and of a cluster with other `workers`, it says nothing.
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
        """What it is of."""
        return self.machine, self.cluster, str(to_plain(self.workers)), self.together, self.measured


@dataclass(frozen=True)
class _Shown:
    found: tuple[Slowness, ...]


def slowness_path() -> Path:
    """The file of what runs have shown, beside that of what was measured."""
    return cache_path().with_name("slowness.json")


def _load_slowness() -> dict[tuple[object, ...], Slowness]:
    try:
        return {each.key: each for each in _read(_Shown, slowness_path(), SLOWNESS).found}
    except _BROKEN:
        return {}


def read_slowness(clusters: Clusters, together: bool, measured: Collection[str]) -> dict[str, float]:
    """By cluster, the slowdown that earlier runs on this machine have measured for the same workers; `measured` names
    the clusters with measured blocks.
    """
    known, machine = _load_slowness(), fingerprint()
    made = (Slowness(machine, c.name, c.workers, together, c.name in measured) for c in clusters.clusters)
    return {each.cluster: known[each.key].factor for each in made if each.key in known}


def keep_slowness(found: Mapping[str, float], clusters: Clusters, together: bool, measured: Collection[str]) -> None:
    """Write what a run has shown of clusters; where that cannot be written, the next run plans without it."""
    date, known = datetime.now(UTC).isoformat(timespec="seconds"), _load_slowness()
    for each in clusters.clusters:
        if each.name in found:
            how = together, each.name in measured
            own = Slowness(fingerprint(), each.name, each.workers, *how, found[each.name], date)
            known[own.key] = own
    with contextlib.suppress(OSError):
        _write(_Shown(tuple(known.values())), slowness_path(), SLOWNESS)
