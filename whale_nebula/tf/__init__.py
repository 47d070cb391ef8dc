"""Private parts of TensorFlow and Keras that this package uses, by subject; each function has a contract test.

`tf` is TensorFlow itself, loaded when it is first used, for modules that are also imported on hosts without TensorFlow.
Private parts change between versions, so unsupported versions of TensorFlow and Keras are refused at first use.
Importing this package checks nothing, because it loads neither of them.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from typing import Any

from whale_nebula.errors import NebulaError, UnsupportedError, VersionError
from whale_nebula.site import script_site


class _Lazy:
    """A module that is loaded when its first attribute is read.

    >>> _Lazy("math").sqrt(4.0)
    2.0
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        self.__dict__[attribute] = value
        return value


tf: Any = _Lazy("tensorflow")

RANGES = {"tensorflow": ("2.21", "2.22"), "keras": ("3.15", "3.16")}
"""Supported versions: from the first of each pair, up to but not including the second."""
BACKEND = "tensorflow"


def require_supported() -> None:
    """Raise if the version of TensorFlow or Keras is unsupported, or the backend of Keras is not TensorFlow."""
    refusal = find_unsupported()
    if refusal is not None:
        raise refusal


def find_unsupported() -> NebulaError | None:
    """The error for an unsupported version of TensorFlow or Keras, or another backend of Keras; otherwise None."""
    for name in RANGES:
        found = _version(name)
        if found is not None and not is_in_range(name, found):
            title = {"tensorflow": "TensorFlow", "keras": "Keras"}[name]
            first, end = RANGES[name]
            specifiers = " ".join(f'"{each}>={low},<{high}"' for each, (low, high) in RANGES.items())
            return VersionError(
                f"{title} {found} is not supported",
                where=str(script_site()),
                why=f"whale_nebula uses internals of {title}, which it supports from {first} up to, "
                f"but not including, {end}",
                mend=f"pip install {specifiers}",
            )
    config = getattr(sys.modules.get("keras"), "config", None)
    backend = config.backend() if config is not None else BACKEND
    if backend == BACKEND:
        return None
    return UnsupportedError(
        f"Keras runs on {backend}",
        where=str(script_site()),
        why="a plan needs a graph that TensorFlow traced, and Keras traces none with another backend",
        mend="KERAS_BACKEND=tensorflow python train.py; or remove that setting from ~/.keras/keras.json",
    )


def is_in_range(name: str, version: str) -> bool:
    """Whether a version of TensorFlow or Keras is supported.

    >>> is_in_range("tensorflow", "2.21.3"), is_in_range("tensorflow", "2.22.0-rc1"), is_in_range("keras", "2.15.0")
    (True, False, False)
    """
    first, end = RANGES[name]
    return _numbers(first) <= _numbers(version) < _numbers(end)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _version(name: str) -> str | None:
    """The loaded version, otherwise the installed one; None if it is not installed."""
    loaded: Any = sys.modules.get(name)
    if loaded is not None:
        return str(getattr(loaded, "__version__", "0.0"))
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
