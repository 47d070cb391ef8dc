"""What was measured on this machine: a record, its file in the user's cache, and how it completes a cluster object."""

from __future__ import annotations

import glob
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from whale_nebula.hardware.clusters import ANY, Clusters, Collective, Device, Provenance
from whale_nebula.plain import from_plain, to_plain, write_json

FORMAT = "whale_nebula measured 1"


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
        """The cluster object with what it lacks of workers whose machine is `here`; what it has stays."""
        local = cache(here)
        sources = dict(clusters.measured)
        made = []
        for cluster in clusters.clusters:
            workers = []
            for worker in cluster.workers:
                if self.device is not None and local(worker.machine):
                    device, taken = _complete_device(worker.device, self.device)
                    worker = replace(worker, device=device)
                    sources |= self._sources("device", worker.name, taken)
                workers.append(worker)
            sums = cluster.collectives
            if not sums and len(workers) > 1 and all(local(worker.machine) for worker in workers):
                sums = tuple(each.among(len(workers)) for each in self.collectives)
                sources |= self._sources("collectives", f"{cluster.name}.collectives", [each.kind for each in sums])
            made.append(replace(cluster, workers=tuple(workers), collectives=sums))
        codecs = {**self.codecs, **clusters.codecs}
        sources |= self._sources("codecs", "codecs", [name for name in codecs if name not in clusters.codecs])
        return replace(clusters, clusters=tuple(made), codecs=codecs, measured=sources)

    def _sources(self, part: str, called: str, names: list[str]) -> dict[str, Provenance]:
        """The provenance of some numbers of a part, by what the cluster object calls them."""
        known = ((name, self.sources.get(f"{part}.{name}")) for name in names)
        return {f"{called}.{name}": each for name, each in known if each is not None}


def _complete_device(told: Device, found: Device) -> tuple[Device, list[str]]:
    """A device as the config has it, with what was measured where it says nothing; and the names of what was taken.

    Nothing is taken where the config names another kind of device than the one that was measured.
    """
    if told.kind not in (ANY, found.kind):
        return told, []
    taken = [name for name in _AMOUNTS if getattr(told, name) is None and getattr(found, name) is not None]
    rates = {} if told.flops_per_s is not None else found.rates
    amounts = {name: getattr(found, name) for name in taken}
    return replace(told, kind=found.kind, cores=found.cores, rates=rates, **amounts), [
        *taken, *(f"rates.{kernel}" for kernel in rates),
    ]  # fmt: skip


_AMOUNTS = ("flops_per_s", "memory_bytes", "memory_bytes_per_s", "call_seconds")


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


# ---------------------------------------------------------------------- the file
def cache_path() -> Path:
    """The file of what was measured here: in XDG_CACHE_HOME, or in ~/.cache."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(told) if os.path.isabs(told) else Path.home() / ".cache"
    return folder / "whale_nebula" / "measured.json"


def keep(found: Measurement, path: Path | None = None) -> Path:
    """Write a measurement to its file, and give the path."""
    target = path or cache_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, {"format": FORMAT, **to_plain(found)})
    return target


def read_kept(path: Path | None = None) -> tuple[Measurement | None, str]:
    """The measurement in the file; without one that is of this machine, None and a sentence. There is no sentence
    where there is no file.
    """
    source = path or cache_path()
    try:
        document = json.loads(source.read_text("utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, and not {FORMAT!r}")
        found: Measurement = from_plain(Measurement, document)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"{source} holds no measurement that can be read ({type(error).__name__}: {error})"
    if found.machine != fingerprint():
        return None, f"{source} was measured on another machine: {found.machine}; this one is {fingerprint()}"
    return found, ""
