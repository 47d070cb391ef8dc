"""What this machine is, and what its environment says of TensorFlow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from whale_nebula.cli.checks.check import Check
from whale_nebula.report.units import size

_LITTLE = 2 * 2**30


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
