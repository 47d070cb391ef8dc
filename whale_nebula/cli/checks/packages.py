"""Python and the packages, against what this version asks for. Nothing is loaded for it."""

from __future__ import annotations

import importlib.util
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from whale_nebula.cli.checks.check import Check

OURS = "whale-nebula"
NEEDED = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "tensorflow-text": "TensorFlow Text",
    "numpy": "NumPy",
    "grpcio": "gRPC",
    "grpcio-health-checking": "gRPC's health service",
    "cryptography": "cryptography",
    "google-crc32c": "google-crc32c",
    "pyyaml": "PyYAML",
    "rich": "rich",
}
FOR_TRAINING = ("tensorflow", "keras", "tensorflow-text")
"""What the host of a gateway does without."""


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


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
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


def own_check() -> Check:
    """Where this package itself comes from, and that all of it comes from there."""
    folder, models = (_folder(module) for module in ("whale_nebula", "whale_nebula.models"))
    version = installed(OURS) or "not installed"
    if models is None:
        why = f"imported from {folder}, which has no models beside it"
        return Check(OURS, "bad", version, why, "pip install -e . in that folder's clone")
    if models not in (folder, folder.parent if folder else None):
        why = f"imported from {folder},\nbut whale_nebula.models from {models}: two copies are mixed"
        mend = "python -m pip install -e . in the copy that is meant, and no PYTHONPATH to another"
        return Check(OURS, "warning", version, why, mend)
    return Check(OURS, "ok", version, f"imported from {folder}")


def _folder(module: str) -> Path | None:
    """The folder that a package lies in; finding it imports what it lies in, and not itself."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    return package if module == "whale_nebula" else package.parent


def package_check(package: str, *, training: bool = True) -> Check:
    """A package that is needed; without `training` those that only training needs may be missing."""
    name, wanted, found = NEEDED[package], requirements().get(package, ""), installed(package)
    supported = f"supported: {wanted}" if wanted else ""
    if found is None and package in FOR_TRAINING and not training:
        return Check(name, "ok", "not installed", "a gateway needs none")
    if found is None:
        return Check(name, "bad", "not installed", supported, f'pip install "{package}{wanted}"')
    if not within(found, wanted):
        return Check(name, "bad", found, supported, f'pip install "{package}{wanted}"')
    return Check(name, "ok", found, supported)


def tensorboard_check() -> Check:
    """TensorBoard, which is only needed for its own files."""
    found = installed("tensorboard")
    if found is not None:
        return Check("TensorBoard", "ok", found)
    why = "only nb.init(tensorboard=...) needs it"
    return Check("TensorBoard", "note", "not installed", why, "pip install tensorboard")
