"""What a process says of itself before anything is measured: what must be alike at both ends, and what may explain a
difference. TensorFlow is asked for its version without being loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import whale_nebula
from whale_nebula.transport.grpc.options import congestion_control, lanes

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
