"""The interface of a dataset, as its owner publishes it: a source, its transformations, the published schema, and
limits; and an open dataset on its owner's machine: the rows of an interface by seed, pass and position.

The order of rows is a permutation determined by the seed and the number of the pass, computed row by row: a Feistel
network over the smallest power of four that is not less than the number of rows, with cycle walking. It needs no
memory, begins at any position, and does not depend on the versions of packages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_nebula.config import quantities
from whale_nebula.config.load import read_yaml
from whale_nebula.config.place import Place
from whale_nebula.datasets import sources
from whale_nebula.datasets.schema import DTYPES, STRING, Column, Schema, check_columns
from whale_nebula.datasets.sources import (
    FUNCTION,
    Aggregate,
    Function,
    Select,
    Source,
    Step,
    Tokenise,
    Transform,
    apply_steps,
    check_pattern,
    prepare_rows,
)
from whale_nebula.errors import ConfigError
from whale_nebula.security import files

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
LEAST_GROUP = 2
_EXAMPLE = "name: corpus"
_ABOUT, _FIRST_YEAR = 500, 1970


@dataclass(frozen=True, slots=True)
class Bound:
    """The most rows and bytes; None if unlimited."""

    rows: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The maximum that an account may read in total and in a run, and its rate in bits per second (0: unlimited)."""

    account: Bound = Bound()
    run: Bound = Bound()
    rate: float = 0.0


@dataclass(frozen=True)
class Interface:
    """A dataset interface. `document` is the owner's text as JSON values, and `digest` identifies it."""

    name: str
    about: str
    open_source: Callable[[Path], Source]
    steps: tuple[Step, ...]
    schema: Schema
    limits: Limits
    expires: str
    document: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The SHA-256 of the document."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def text(self) -> str:
        """The canonical text of the interface."""
        return json.dumps(self.document, sort_keys=True)


def read_interface(path: Path) -> Interface:
    """Read the interface in a YAML file; errors name its lines."""
    return parse_interface(read_yaml(path, "the interface", _EXAMPLE))


def parse_interface(place: Place) -> Interface:
    """Parse the interface in these values.

    >>> values = {"name": "a", "source": {"text": "../b"}, "schema": {"x": {"dtype": "int8"}}, "expires": "2027-01-01"}
    >>> parse_interface(Place(values))
    Traceback (most recent call last):
    ...
    whale_nebula.errors.ConfigError: NB-500 '../b' leaves the folder of the interface (source.text)
      why: a pattern names files in the folder of the interface: no '..', no '~', no '**', no absolute path
      mend: text: "*.txt"
    """
    root = place.read_table(("name", "about", "source", "transform", "schema", "limits", "expires"))
    return Interface(
        name=read_name(root.get("name")),
        about=root.get("about").read_or(Place.read_text, "")[:_ABOUT],
        open_source=_read_source(root.get("source")),
        steps=tuple(_read_step(each) for each in root.get("transform").read_items()),
        schema=_read_schema(root.get("schema")),
        limits=_read_limits(root.get("limits")),
        expires=_read_expiry(root.get("expires")),
        document=_to_plain(root.value),
    )


def read_name(place: Place) -> str:
    """The name of a dataset, which is used in addresses and logs, and never as a path."""
    if NAME.fullmatch(place.read_text()) is None:
        why = "a name has at most 32 lower-case letters, digits, '_' and '-', and begins with a letter or digit"
        raise place.make_error(f"{place.value[:64]!r} is not a valid dataset name", why=why, mend="name: corpus")
    return str(place.value)


def _to_plain(value: Any) -> Any:
    """Convert YAML values to JSON values: dates become texts."""
    if isinstance(value, dict):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    return value.isoformat() if isinstance(value, date) else value


# ---------------------------------------------------------------------- source
def _choose_kind(place: Place, known: Mapping[str, tuple[str, ...]], example: str) -> str:
    """The kind of a table that has exactly one of these keys, which allows only the listed further keys."""
    table = place.read_table(dict.fromkeys([*known, *(each for more in known.values() for each in more)]))
    kinds = [name for name in known if name in table.value]
    if len(kinds) != 1:
        raise place.make_error(
            f"exactly one of {', '.join(known)} is required, but there are {len(kinds)}", mend=example
        )
    place.read_table((kinds[0], *known[kinds[0]]))
    return kinds[0]


_SOURCES = {
    "text": ("column",),
    "tfrecord": ("features",),
    "csv": ("columns",),
    "parquet": ("columns",),
    "factory": (),
}


def _read_source(place: Place) -> Callable[[Path], Source]:
    kind = _choose_kind(place, _SOURCES, 'source: {text: "*.txt"}')
    value = place.get(kind)
    if kind == "factory":
        name = _read_function_name(value)
        return lambda folder: sources.open_factory(name)
    pattern = value.read_text()
    if why := check_pattern(pattern):
        raise value.make_error(f"{pattern!r} leaves the folder of the interface", why=why, mend=f'{kind}: "*.txt"')
    if kind == "text":
        column = place.get("column").read_or(Place.read_text, "text")
        return lambda folder: sources.open_text(folder, pattern, column)
    if kind == "parquet":
        names = [each.read_text() for each in place.get("columns").read_items()]
        _require_columns(names, place, "columns: [age, income]")
        return lambda folder: sources.open_parquet(folder, pattern, names)
    if kind == "csv":
        types = {name: each.read_choice(DTYPES) for name, each in place.get("columns").read_entries().items()}
        _require_columns(types, place, "columns: {age: int64}")
        return lambda folder: sources.open_csv(folder, pattern, types)
    features = {name: _read_feature(each) for name, each in place.get("features").read_entries().items()}
    _require_columns(features, place, "features: {ids: {dtype: int64, shape: [32]}}")
    return lambda folder: sources.open_tfrecord(folder, pattern, features)


def _require_columns(columns: object, place: Place, mend: str) -> None:
    if not columns:
        raise place.make_error("missing columns of the source", mend=mend)


def _read_function_name(place: Place) -> str:
    if FUNCTION.fullmatch(place.read_text()) is None:
        raise place.make_error(f"{place.value!r} is not a module:function", mend='"mycorpus.reading:open_rows"')
    return str(place.value)


def _read_feature(place: Place) -> tuple[str, tuple[int, ...]]:
    table = place.read_table(("dtype", "shape"))
    return table.get("dtype").read_choice(("int64", "float32", STRING)), _read_shape(table.get("shape"))


def _read_shape(place: Place) -> tuple[int, ...]:
    return tuple(int(axis.read_number(least=1, most=1 << 30, integer=True)) for axis in place.read_items())


# ---------------------------------------------------------------------- transform
_STEPS = dict.fromkeys(("tokenise", "select", "function", "aggregate"), ())


def _read_step(place: Place) -> Step:
    kind = _choose_kind(place, _STEPS, "transform: [{select: [ids, label]}]")
    value = place.get(kind)
    if kind == "select":
        return Select(_read_names(value))
    if kind == "function":
        return Function(_read_function_name(value))
    if kind == "tokenise":
        table = value.read_table(("column", "to", "vocabulary", "length"))
        vocabulary = table.get("vocabulary").read_text()
        if why := check_pattern(vocabulary):
            raise table.get("vocabulary").make_error(
                f"{vocabulary!r} leaves the folder", why=why, mend="vocabulary: a.txt"
            )
        return Tokenise(
            table.get("column").read_or(Place.read_text, "text"),
            table.get("to").read_or(Place.read_text, "ids"),
            vocabulary,
            int(table.get("length").read_number(least=2, most=1 << 16, integer=True)),
        )
    table = value.read_table(("by", "least", "mean", "sum", "count"))
    return Aggregate(
        table.get("by").read_text(),
        int(table.get("least").read_number(least=LEAST_GROUP, integer=True)),
        _read_names(table.get("mean")),
        _read_names(table.get("sum")),
        table.get("count").read_or(Place.read_text, ""),
    )


def _read_names(place: Place) -> tuple[str, ...]:
    return tuple(each.read_text() for each in place.read_items())


# ---------------------------------------------------------------------- schema, limits, end
def _read_schema(place: Place) -> Schema:
    found = []
    for name, each in place.read_entries().items():
        table = each.read_table(("dtype", "shape", "raw"))
        dtype = table.get("dtype").read_choice(DTYPES)
        raw = table.get("raw").read_or(Place.read_boolean, False)
        if dtype == STRING and not raw:
            why = "raw text is published only if the interface has raw: true"
            mend = f"{name}: {{dtype: {STRING}, raw: true}}, or tokenise it"
            raise each.make_error(f"column {name!r} is raw text", why=why, mend=mend)
        found.append(Column(name, dtype, _read_shape(table.get("shape"))))
    if not found:
        raise place.make_error("missing schema", mend="schema: {ids: {dtype: int32, shape: [32]}}")
    return tuple(found)


def _read_limits(place: Place) -> Limits:
    table = place.read_table(("account", "run", "rate"))
    return Limits(
        _read_bound(table.get("account")),
        _read_bound(table.get("run")),
        table.get("rate").read_or(quantities.rate, 0.0),
    )


def _read_bound(place: Place) -> Bound:
    table = place.read_table(("rows", "bytes"))
    rows = table.get("rows").read_or(lambda each: int(each.read_number(least=1, integer=True)), None)
    return Bound(rows, table.get("bytes").read_or(quantities.read_memory, None))


def _read_expiry(place: Place) -> str:
    value = place.value
    try:
        moment = value if isinstance(value, date) else datetime.fromisoformat(place.read_text())
        if not isinstance(moment, datetime):
            moment = datetime(moment.year, moment.month, moment.day)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError, ConfigError):
        moment = None
    if moment is None or moment.year < _FIRST_YEAR:
        mend = f"expires: {files.now().year + 1}-03-01"
        raise place.make_error(f"{value!r} is not a valid end date", why="every interface needs an end date", mend=mend)
    return files.format_time(moment)


# ---------------------------------------------------------------------- an open dataset
_ROUNDS = 4
_BLOCK = 1 << 14
"""The number of positions whose rows are computed together."""
Rows = NDArray[np.uint64]


@dataclass(frozen=True)
class OpenDataset:
    """The rows of an interface. `edition` identifies the interface and the number of rows."""

    interface: Interface
    source: Source
    steps: list[Transform]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.source.count

    @property
    def edition(self) -> str:
        """A digest of the interface and the number of rows."""
        return hashlib.sha256(f"{self.interface.digest} {self.count}".encode()).hexdigest()[:16]

    def read(self, seed: int | None, number: int, first: int, last: int) -> tuple[int, dict[str, Any]]:
        """The number of rows at these positions of a pass, and their columns, checked against the schema."""
        rows = find_rows(self.count, seed, number, first, last)
        columns = apply_steps(self.source.read(rows.astype("int64")), self.steps)
        return check_columns(self.interface.schema, columns, self.interface.name), columns


def open_dataset(interface: Interface, folder: Path) -> OpenDataset:
    """Open the source of an interface whose files are in this folder, and check its first row."""
    source, steps = prepare_rows(folder, interface.open_source(folder), interface.steps)
    opened = OpenDataset(interface, source, steps)
    opened.read(None, 0, 0, 1)
    return opened


# ---------------------------------------------------------------------- the order of rows
def find_rows(count: int, seed: int | None, number: int, first: int, last: int) -> Rows:
    """The rows at the positions from `first` to before `last` of a pass; without a seed they are in their original
    order.

    >>> find_rows(10, None, 0, 3, 6).tolist()
    [3, 4, 5]
    >>> sorted(find_rows(10, 7, 0, 0, 10).tolist()) == list(range(10))
    True
    >>> find_rows(10, 7, 0, 4, 10).tolist() == find_rows(10, 7, 0, 0, 10).tolist()[4:]
    True
    """
    last = min(last, count)
    if seed is None or count < 2 or first >= last:
        return np.arange(first, last, dtype=np.uint64)
    begin = first // _BLOCK
    blocks = [_order_block(count, seed, number, each) for each in range(begin, -(-last // _BLOCK))]
    rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return rows[first - begin * _BLOCK : last - begin * _BLOCK]


@lru_cache(64)
def _order_block(count: int, seed: int, number: int, block: int) -> Rows:
    """A block of positions: a reader of a few rows at a time computes them once, and no request costs more than one."""
    return _order_rows(count, seed, number, block * _BLOCK, (block + 1) * _BLOCK)


def _order_rows(count: int, seed: int, number: int, first: int, last: int) -> Rows:
    places = np.arange(first, min(last, count), dtype=np.uint64)
    half = max(1, -(-(count - 1).bit_length() // 2))
    keys = _derive_keys(seed, number)
    found = _permute(places, half, keys)
    while (outside := found >= count).any():
        found[outside] = _permute(found[outside], half, keys)
    return found


def _derive_keys(seed: int, number: int) -> list[np.uint64]:
    digest = hashlib.sha256(f"whale_nebula order 1 {seed} {number}".encode()).digest()
    return [np.uint64(int.from_bytes(digest[8 * each : 8 * each + 8], "little")) for each in range(_ROUNDS)]


def _permute(places: Rows, half: int, keys: list[np.uint64]) -> Rows:
    mask, bits = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = places >> bits, places & mask
    for key in keys:
        left, right = right, left ^ (_mix_bits(right ^ key) & mask)
    return (left << bits) | right


def _mix_bits(values: Rows) -> Rows:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Rows = values ^ (values >> np.uint64(31))
    return mixed
