"""Dataclasses as JSON and back, by the types of their fields; and JSON files that are replaced atomically."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """Convert a value to JSON's types: pairs as keys are written "1>2", and non-finite numbers are null."""
    if isinstance(value, Mapping):
        pairs = ((">".join(map(str, key)) if isinstance(key, tuple) else key, each) for key, each in value.items())
        return {key: to_plain(each) for key, each in pairs}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, value: Any) -> Any:
    """Convert the output of `to_plain` back to a value of a type; missing fields get their defaults.

    A null for a field that cannot be None becomes its default, or a non-finite number.

    >>> from_plain(Mapping[tuple[int, int], float | None], to_plain({(1, 2): 0.5, (2, 3): None}))
    {(1, 2): 0.5, (2, 3): None}
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else from_plain(next(each for each in inner if each is not NoneType), value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_plain(each, own) for each, own in zip(kinds, value, strict=True))
    if origin is Mapping:
        parts = get_args(inner[0]) if get_origin(inner[0]) is tuple else ()
        return {
            tuple(part(word) for part, word in zip(parts, key.split(">"), strict=True)) if parts else key: from_plain(
                inner[1], each
            )
            for key, each in value.items()
        }
    if hasattr(kind, "__dataclass_fields__"):
        types = _field_types(kind)
        known = {name: each for name, each in value.items() if name in types}
        given = {n: each for n, each in known.items() if each is not None or NoneType in get_args(types[n])}
        return kind(**{name: from_plain(types[name], each) for name, each in given.items()})
    return math.nan if kind is float and value is None else value


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file atomically: an existing one is replaced completely or not at all."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")  # other processes may write the same file
    beside.write_text(json.dumps(document, indent=indent, allow_nan=False) + "\n", "utf-8")
    beside.replace(target)
