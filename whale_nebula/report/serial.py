"""Dataclasses as JSON and back, by the types of their fields: one rule for reports and plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """A value as JSON has it: pairs as keys are written "1>2", and numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {_key_text(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _key_text(key: object) -> object:
    return ">".join(map(str, key)) if isinstance(key, tuple) else key


def from_plain(kind: Any, value: Any) -> Any:
    """A value of a type from what `to_plain` made of it; fields that are missing have their defaults.

    A null where none can be is a field's default, and a number that is not finite.

    >>> from whale_nebula.schedule.lines import Hop, Line
    >>> hop = Hop(Line("a->b"), None, 4.0, None)
    >>> to_plain(hop)["there"], from_plain(Hop, to_plain(hop)) == hop
    ({'name': 'a->b', 'rate': None, 'delay': 0.0}, True)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else from_plain(next(each for each in inner if each is not NoneType), value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_plain(each, own) for each, own in zip(kinds, value, strict=True))
    if origin is Mapping:
        pairs = get_origin(inner[0]) is tuple
        return {_key_from(key) if pairs else key: from_plain(inner[1], each) for key, each in value.items()}
    if hasattr(kind, "__dataclass_fields__"):
        types = _field_types(kind)
        known = {name: each for name, each in value.items() if name in types}
        given = {n: each for n, each in known.items() if each is not None or NoneType in get_args(types[n])}
        return kind(**{name: from_plain(types[name], each) for name, each in given.items()})
    return math.nan if kind is float and value is None else value


def _key_from(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(">")))


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
