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
    """Convert a value to JSON's types: dataclasses are objects, tuples as keys are written "1>2", and non-finite
    numbers are null.
    """
    if isinstance(value, Mapping):
        pairs = ((">".join(map(str, key)) if isinstance(key, tuple) else key, each) for key, each in value.items())
        return {key: to_plain(each) for key, each in pairs}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, value: Any) -> Any:
    """Convert the output of `to_plain` back to a value of the type `kind`.

    Unknown fields of a dataclass are ignored, and missing ones get their defaults, as do nulls of fields that cannot be
    None. Any other null of type float is NaN.

    >>> from_plain(Mapping[tuple[int, int], float | None], to_plain({(1, 2): 0.5, (2, 3): None}))
    {(1, 2): 0.5, (2, 3): None}
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else from_plain(next(each for each in arguments if each is not NoneType), value)
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(from_plain(*pair) for pair in zip(kinds, value, strict=True))
    if origin is Mapping:
        parts = get_args(arguments[0]) if get_origin(arguments[0]) is tuple else ()
        keys = [
            tuple(part(word) for part, word in zip(parts, key.split(">"), strict=True)) if parts else key
            for key in value
        ]
        return {key: from_plain(arguments[1], each) for key, each in zip(keys, value.values(), strict=True)}
    if hasattr(kind, "__dataclass_fields__"):
        types = _field_types(kind)
        known = {name: each for name, each in value.items() if name in types}
        fields = {n: each for n, each in known.items() if each is not None or NoneType in get_args(types[n])}
        return kind(**{name: from_plain(types[name], each) for name, each in fields.items()})
    return math.nan if kind is float and value is None else value


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file atomically: an existing one is replaced completely or not at all."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")  # other processes may write the same file
    temporary.write_text(json.dumps(document, indent=indent, allow_nan=False) + "\n", "utf-8")
    temporary.replace(target)
