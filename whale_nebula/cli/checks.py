"""What `whale-nebula doctor` looks at, one small function each. Nothing here loads TensorFlow."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from whale_nebula.config import load
from whale_nebula.report.text import size

OURS = "whale-nebula"
NEEDED = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tensorflow-text": "TensorFlow Text",
    "numpy": "NumPy",
    "grpcio": "gRPC",
    "google-crc32c": "google-crc32c",
    "pyyaml": "PyYAML",
    "rich": "rich",
}
_LITTLE = 2 * 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `state` is ok, note (it works, but you may want to know) or bad."""

    name: str
    state: str
    found: str
    why: str = ""
    mend: str = ""


def machine_checks() -> list[Check]:
    """All that can be told of this machine and its packages."""
    return [
        python_check(),
        *(package_check(package) for package in NEEDED),
        tensorboard_check(),
        backend_check(),
        *threads_checks(),
        onednn_check(),
        memory_check(),
    ]


# ---------------------------------------------------------------------- versions
def within(version: str, wanted: str) -> bool:
    """Whether a version satisfies something like ">=2.21,<2.22"; what comes before a release counts as the release.

    >>> within("2.21.0", ">=2.21,<2.22"), within("2.22.0rc1", ">=2.21,<2.22"), within("3.14.2", "<3.14,>=3.11")
    (True, False, False)
    """
    return all(_holds(_numbers(version), *part) for part in re.findall(r"(>=|<=|==|!=|<|>)\s*([\d.]+)", wanted))


def _holds(found: tuple[int, ...], sign: str, limit: str) -> bool:
    numbers = _numbers(limit)
    most = max(len(found), len(numbers))
    a, b = (each + (0,) * (most - len(each)) for each in (found, numbers))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}[sign]


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else ()


@cache
def requirements() -> dict[str, str]:
    """Package to the versions that this one asks for, as its own metadata says."""
    try:
        lines = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in (each for each in lines if "extra ==" not in each):
        name, wanted = re.fullmatch(r"([\w.-]+)\s*(?:\[.*?\])?\s*\(?([^;)]*)\)?.*", line).groups()  # type: ignore[union-attr]
        found[name.lower()] = in_order(wanted)
    return found


def in_order(wanted: str) -> str:
    """A range of versions, its lower end first.

    >>> in_order("<3.14,>=3.11 ")
    '>=3.11,<3.14'
    """
    return ",".join(sorted(filter(None, wanted.strip().split(",")), reverse=True))


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python_check() -> Check:
    """Python itself."""
    found = platform.python_version()
    try:
        wanted = in_order(metadata.metadata(OURS)["Requires-Python"] or "")
    except metadata.PackageNotFoundError:
        why = f"{OURS} is not installed, so nothing says what it needs"
        return Check("Python", "note", found, why, "pip install -e .")
    if within(found, wanted):
        return Check("Python", "ok", found, f"supported: {wanted}")
    return Check("Python", "bad", found, f"supported: {wanted}", "make PYTHON=python3.12 install, or a venv of that")


def package_check(package: str) -> Check:
    """A package that is needed."""
    name, wanted, found = NEEDED[package], requirements().get(package, ""), _installed(package)
    supported = f"supported: {wanted}" if wanted else ""
    if found is None:
        return Check(name, "bad", "not installed", supported, f'pip install "{package}{wanted}"')
    if not within(found, wanted):
        return Check(name, "bad", found, supported, f'pip install "{package}{wanted}"')
    return Check(name, "ok", found, supported)


def tensorboard_check() -> Check:
    """TensorBoard, which is only needed for its own files."""
    found = _installed("tensorboard")
    if found is not None:
        return Check("TensorBoard", "ok", found)
    why = "only nb.init(tensorboard=...) needs it"
    return Check("TensorBoard", "note", "not installed", why, "pip install tensorboard")


# ---------------------------------------------------------------------- settings
def backend_check() -> Check:
    """What Keras runs on."""
    found = os.environ.get("KERAS_BACKEND") or _written_backend() or "tensorflow"
    if found == "tensorflow":
        return Check("Keras backend", "ok", found)
    why = "a plan cuts a graph that TensorFlow traced"
    return Check("Keras backend", "bad", found, why, "KERAS_BACKEND=tensorflow")


def _written_backend() -> str | None:
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        found = json.loads((home / "keras.json").read_text("utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def threads_checks() -> Iterator[Check]:
    """Cores, and what the environment says of TensorFlow's threads."""
    cores = len(os.sched_getaffinity(0))
    set_so = {name: value for name in _THREADS if (value := os.environ.get(name))}
    why = "equal bits need equal numbers of threads in every cluster"
    if set_so:
        said = ", ".join(f"{name}={value}" for name, value in set_so.items())
        yield Check("CPU threads", "note", f"{cores} cores", f"{said}; {why}")
    else:
        yield Check("CPU threads", "ok", f"{cores} cores", f"TensorFlow takes them all; {why}")


_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def onednn_check() -> Check:
    """TensorFlow's oneDNN ops, which change the last bits of results."""
    value = os.environ.get("TF_ENABLE_ONEDNN_OPTS")
    why = "equal bits need it alike in every cluster"
    if value is None:
        return Check("oneDNN", "ok", "as TensorFlow has it", f"on for x86; {why}")
    return Check("oneDNN", "note", "off" if value == "0" else "on", f"TF_ENABLE_ONEDNN_OPTS={value}; {why}")


def memory_check() -> Check:
    """Memory that is free, within what the container allows."""
    free = min(_available(), _allowed())
    if free < _LITTLE:
        why = "TensorFlow alone takes some 600 MiB in each process"
        return Check("free memory", "note", size(free), why, "fewer processes on this machine, or a smaller model")
    return Check("free memory", "ok", size(free))


def _available() -> float:
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
    except OSError:
        return float("inf")
    return 1024.0 * int(found[1]) if found else float("inf")


def _allowed() -> float:
    """What is left of a container's limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text("utf-8").strip()
        used = int((group / "memory.current").read_text("utf-8"))
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else max(float(limit) - used, 0.0)


# ---------------------------------------------------------------------- config
def config_checks(path: str) -> list[Check]:
    """A clusters.yaml: what is wrong raises, what is right is counted."""
    config = load(path)
    workers = sum(len(cluster.workers) for cluster in config.clusters.values())
    found = f"{len(config.clusters)} cluster{'s' * (len(config.clusters) != 1)}"
    names = ", ".join(config.clusters) or "none is named"
    checks = [Check("config", "ok", found, f"{path}: {names}; {workers} workers, {len(config.links.pairs)} links")]
    if config.security.insecure:
        checks.append(Check("config", "note", "insecure: true", "links are not encrypted", "leave it out"))
    return checks
