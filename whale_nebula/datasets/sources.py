"""The sources of a dataset, on its owner's machine: files of text, TFRecord, CSV or Parquet, or a Python factory; and
the transformations of their rows before any row is sent.

A source has a number of rows, and returns requested rows by their numbers, as columns. The files that match a pattern
of an interface are opened inside its folder, or refused: a pattern cannot name a parent folder, and a file is checked
after it is opened, as it may be outside because of a symbolic link, or be replaced meanwhile. Each transformation maps
columns to columns with the same number of rows; an aggregate computes one table of all rows, once.
"""

from __future__ import annotations

import csv
import importlib
import io
import mmap
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from whale_nebula.datasets.schema import STRING, Columns
from whale_nebula.errors import AccessError, InterfaceError
from whale_nebula.errors.text import list_names

MOST_RECORD_BYTES = 1 << 30
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Source(Protocol):
    """Rows that can be read by their numbers."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def read(self, rows: Any) -> dict[str, Any]:
        """The columns of these rows."""


@dataclass(frozen=True)
class Arrays:
    """Columns in memory, or mapped into it."""

    columns: Mapping[str, Any]

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def read(self, rows: Any) -> dict[str, Any]:
        """The columns of these rows."""
        return {name: np.asarray(array[rows]) for name, array in self.columns.items()}


@dataclass(frozen=True)
class Records:
    """Ranges of memory-mapped files, one for each row; `parse` converts them to columns."""

    files: Sequence[Any]
    places: Any  # of each row: file, first byte, end
    parse: Callable[[list[bytes]], dict[str, Any]]

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.places)

    def read(self, rows: Any) -> dict[str, Any]:
        """The columns of these rows."""
        places = self.places[rows]
        if int((places[:, 2] - places[:, 1]).sum()) > MOST_RECORD_BYTES:  # before they are copied
            raise AccessError("these records are too large to be read at once", mend="use a smaller batch=")
        return self.parse([bytes(self.files[file][first:last]) for file, first, last in places.tolist()])


# ---------------------------------------------------------------------- files
def open_text(folder: Path, pattern: str, column: str) -> Source:
    """The lines of files, as texts without line ends; only a line feed ends a line."""

    def find_lines(data: Any) -> Any:
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        last = [] if len(data) == (ends[-1] + 1 if len(ends) else 0) else [len(data)]
        ends = np.concatenate([ends, np.array(last, np.int64)])
        return np.stack([np.concatenate([[0], ends[:-1] + 1]), ends], axis=1)

    return _open_records(
        folder,
        pattern,
        find_lines,
        lambda texts: {column: make_text_column([each.removesuffix(b"\r") for each in texts])},
    )


def open_tfrecord(folder: Path, pattern: str, features: Mapping[str, tuple[str, tuple[int, ...]]]) -> Source:
    """The examples in files of TFRecord, parsed by TensorFlow."""
    import tensorflow as tf

    wanted = {name: tf.io.FixedLenFeature(shape, dtype) for name, (dtype, shape) in features.items()}
    form = [tf.TensorSpec([None], tf.string)]
    parse_all = tf.function(lambda texts: tf.io.parse_example(texts, wanted), input_signature=form, autograph=False)

    def parse(records: list[bytes]) -> dict[str, Any]:
        try:
            found = parse_all(tf.constant(records, tf.string))
        except tf.errors.InvalidArgumentError as error:
            raise InterfaceError("a record is not an example of these features", why=error.message[:300]) from None
        return {name: tensor.numpy() for name, tensor in found.items()}

    return _open_records(folder, pattern, _find_records, parse)


def _find_records(data: Any) -> Any:
    """The positions of the records of a TFRecord file: each is preceded by its length and a checksum, and followed by
    one.
    """
    from google_crc32c import value

    places, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        checksum = int.from_bytes(data[at + 8 : at + 12], "little")
        if at + length + 16 > len(data) or checksum != _mask_checksum(value(bytes(data[at : at + 8]))):
            raise InterfaceError("this is not a TFRecord file, or a truncated one", why=f"at byte {at}")
        places.append((at + 12, at + 12 + length))
        at += length + 16
    return np.array(places, np.int64).reshape(-1, 2)


def _mask_checksum(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _open_records(
    folder: Path, pattern: str, find_places: Callable[[Any], Any], parse: Callable[[list[bytes]], dict[str, Any]]
) -> Source:
    files, places = [], []
    for number, path in enumerate(find_files(folder, pattern)):
        with open_inside(folder, path) as file:
            empty = not file.seek(0, io.SEEK_END)
            data: Any = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        files.append(data)
        found = np.empty((0, 2), np.int64) if empty else find_places(data)
        places.append(np.insert(found, 0, number, axis=1))
    return Records(files, np.concatenate(places).astype(np.int64), parse)


def open_csv(folder: Path, pattern: str, columns: Mapping[str, str]) -> Source:
    """Columns of CSV files whose first line names them; numbers are parsed as the declared type."""
    texts: dict[str, list[str]] = {name: [] for name in columns}
    for path in find_files(folder, pattern):
        with open_inside(folder, path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
            try:
                reader = csv.DictReader(text, strict=True)
                if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                    why = f"its first line has {', '.join(reader.fieldnames or ())}"[:300]
                    raise InterfaceError(f"missing column {missing[0]!r}", where=str(path), why=why)
                for row in reader:
                    for name, selected in texts.items():
                        selected.append(row[name] or "")
            except (csv.Error, UnicodeDecodeError) as error:
                raise InterfaceError("this is not CSV in UTF-8", where=str(path), why=str(error)[:300]) from None
    return Arrays({name: _to_array(name, columns[name], selected) for name, selected in texts.items()})


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _to_array(name: str, dtype: str, texts: list[str]) -> Any:
    if dtype == STRING:
        return make_text_column([text.encode() for text in texts])
    try:
        if dtype == "bool":  # NumPy converts every text to true
            return np.array([_BOOLEANS[text.strip().lower()] for text in texts], bool)
        return np.array([text.strip() for text in texts], "U").astype(dtype)
    except KeyError as error:
        why = f"{error.args[0][:64]!r} is not one of {', '.join(_BOOLEANS)}"
        raise InterfaceError(
            f"column {name!r} contains values that are not bool", why=why, mend=f"{name}: {STRING}"
        ) from None
    except (ValueError, OverflowError) as error:
        why = str(error)[:300]
        what = f"column {name!r} contains values that are not {dtype}"
        raise InterfaceError(what, why=why, mend=f"{name}: {STRING}") from None


def open_parquet(folder: Path, pattern: str, columns: Sequence[str]) -> Source:
    """Columns of Parquet files; requires pyarrow."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        why = "Parquet files are read with pyarrow, which is not installed"
        raise InterfaceError("this source cannot be read here", why=why, mend="pip install pyarrow") from None
    parts: dict[str, list[Any]] = {name: [] for name in columns}
    for path in find_files(folder, pattern):
        with open_inside(folder, path) as file:
            try:
                table = parquet.read_table(file, columns=list(columns))
                for name, selected in parts.items() if table.num_rows else ():
                    values = table.column(name).to_pylist()
                    if None in values:
                        what, mend = f"column {name!r} lacks a value in row {values.index(None)}", "fill missing values"
                        raise InterfaceError(what, where=str(path), mend=mend)
                    texts = isinstance(values[0], str | bytes)
                    selected.append(
                        make_text_column([each.encode() if isinstance(each, str) else each for each in values])
                        if texts
                        else _from_arrow(table, name)
                    )
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise InterfaceError(
                    "this Parquet file cannot be read", where=str(path), why=str(error)[:300]
                ) from None
    return Arrays({name: np.concatenate(selected) if selected else np.empty(0) for name, selected in parts.items()})


def _from_arrow(table: Any, name: str) -> Any:
    found = table.column(name).to_numpy()
    return np.stack(list(found)) if found.dtype == object else found


# ---------------------------------------------------------------------- Python
def load_function(name: str) -> Callable[..., Any]:
    """Import an installed function by its module and its name."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise InterfaceError(
            f"{module} cannot be imported", why=str(error)[:300], mend="install it on this host"
        ) from None
    if not callable(found):
        raise InterfaceError(f"{module} has no function {function!r}", mend="module:function")
    function_found: Callable[..., Any] = found
    return function_found


def open_factory(name: str) -> Source:
    """The result of a factory function: a dict of arrays, one a column, or an object with `count` and `read(rows)`."""
    found = load_function(name)()
    if isinstance(found, Mapping):
        if len({len(each) for each in found.values()}) != 1:
            raise InterfaceError(f"{name} returned columns of different lengths, or none")
        return Arrays(found)
    if not hasattr(found, "read") or not isinstance(getattr(found, "count", None), int):
        why = f"it returned a {type(found).__name__}"
        mend = "return a dict of arrays, or an object with count and read(rows)"
        raise InterfaceError(f"{name} returned no source", why=why, mend=mend)
    source: Source = found
    return source


def make_text_column(texts: Sequence[bytes]) -> Any:
    """Texts as a column."""
    found = np.empty(len(texts), object)
    found[:] = texts
    return found


# ---------------------------------------------------------------------- files inside a folder
_PLAIN = re.compile(r"[^\0-\x1f\\~]+")


def check_pattern(pattern: str) -> str:
    """Why a pattern is not allowed in an interface; "" if it is.

    >>> [bool(check_pattern(each)) for each in ("a/*.txt", "../a", "/etc/passwd", "~/a", "a/../../b", "")]
    [False, True, True, True, True, True]
    """
    path = PurePosixPath(pattern)
    if not _PLAIN.fullmatch(pattern) or path.is_absolute() or ".." in path.parts or "**" in path.parts:
        return "a pattern names files in the folder of the interface: no '..', no '~', no '**', no absolute path"
    return ""


def find_files(folder: Path, pattern: str) -> list[Path]:
    """The files that match a pattern, in order; links and other non-files are refused."""
    if why := check_pattern(pattern):
        raise _outside_error(pattern, folder, why)
    found = sorted(folder.glob(pattern))
    if not found:
        raise InterfaceError(f"no file matches {pattern!r}", where=str(folder), mend=f"ls {folder}")
    for path in found:
        with open_inside(folder, path):
            pass
    return found


def open_inside(folder: Path, path: Path) -> BinaryIO:
    """Open a file of a folder for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else str(error.strerror)
        if path.is_symlink():
            raise _outside_error(path.name, folder, why) from None
        raise InterfaceError(f"{path.name} cannot be read", where=str(path), why=why) from None
    file = open(descriptor, "rb")  # noqa: SIM115 - the caller closes it
    root, real = os.path.realpath(folder), os.path.realpath(f"/proc/self/fd/{descriptor}")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise InterfaceError(f"{path.name} is not a regular file", where=str(path))
    if os.path.commonpath([root, real]) != root:
        file.close()
        raise _outside_error(path.name, folder, "a link in its path leads to another folder")
    return file


def _outside_error(what: str, folder: Path, why: str) -> InterfaceError:
    return InterfaceError(
        f"{what!r} leaves the folder of the interface", where=str(folder), why=why, mend="copy the file into the folder"
    )


# ---------------------------------------------------------------------- transformations
Transform = Callable[[Columns], dict[str, Any]]
_ROWS_AT_ONCE = 65536


class Tokenise(NamedTuple):
    """Step from texts to ids of a WordPiece vocabulary: rows of one length, truncated or padded with `[PAD]`."""

    column: str
    to: str
    vocabulary: str
    length: int

    def prepare(self, folder: Path) -> Transform:
        """The step, with its vocabulary."""
        import tensorflow as tf

        from whale_nebula.models.text import Tokenizer, Vocabulary

        with open_inside(folder, folder / self.vocabulary) as file:
            tokens = file.read().decode("utf-8", "replace").split("\n")
        tokenizer = Tokenizer(Vocabulary(tuple(each.removesuffix("\r") for each in tokens if each)))

        def apply(columns: Columns) -> dict[str, Any]:
            texts = _get_column(columns, self.column)
            with tf.device("CPU"):
                ids = tokenizer.encode(tf.constant(list(texts), tf.string)) if len(texts) else None
            shape = (None, self.length)
            found = (
                np.zeros((0, self.length), np.int32)
                if ids is None
                else ids.to_tensor(tokenizer.pad, shape=shape).numpy()
            )
            return {**{name: each for name, each in columns.items() if name != self.column}, self.to: found}

        return apply


class Select(NamedTuple):
    """Step that keeps only some columns."""

    columns: tuple[str, ...]

    def prepare(self, folder: Path) -> Transform:
        """The step."""
        return lambda columns: {name: _get_column(columns, name) for name in self.columns}


class Function(NamedTuple):
    """Step that applies the owner's function from columns to columns."""

    name: str

    def prepare(self, folder: Path) -> Transform:
        """The step, with the function that is installed here."""
        function = load_function(self.name)

        def apply(columns: Columns) -> dict[str, Any]:
            found = function(dict(columns))
            if not isinstance(found, dict) or not all(isinstance(each, np.ndarray) for each in found.values()):
                raise InterfaceError(
                    f"{self.name} returned no columns", mend="return a dict of NumPy arrays, one per column"
                )
            return found

        return apply


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Means and sums over groups with at least `least` rows, and their number of rows; smaller groups are omitted."""

    by: str
    least: int
    mean: tuple[str, ...] = ()
    sum: tuple[str, ...] = ()
    count: str = ""

    def make_table(self, columns: Columns) -> dict[str, Any]:
        """The table, with a row for each group that is large enough, in the order of the grouping column."""
        keys, where, sizes = np.unique(_get_column(columns, self.by), return_inverse=True, return_counts=True)
        large_groups = sizes >= self.least
        found: dict[str, Any] = {self.by: keys[large_groups]}
        for name in dict.fromkeys((*self.mean, *self.sum)):
            values = _get_column(columns, name)
            if values.ndim != 1 or not np.issubdtype(values.dtype, np.number):
                raise InterfaceError(
                    f"column {name!r} is not numeric", mend="aggregate columns with one number per row"
                )
            total = np.bincount(where.reshape(-1), values.astype(np.float64), len(keys))[large_groups]
            found |= {f"{name}_sum": total} if name in self.sum else {}
            found |= {f"{name}_mean": total / sizes[large_groups]} if name in self.mean else {}
        return found | ({self.count: sizes[large_groups].astype(np.int64)} if self.count else {})


Step = Tokenise | Select | Function | Aggregate


def _get_column(columns: Columns, name: str) -> Any:
    if name not in columns:
        what = f"a step needs column {name!r}, which does not exist"
        raise InterfaceError(what, why=f"the columns are {list_names(sorted(columns))}")
    return columns[name]


def prepare_rows(folder: Path, source: Source, steps: Sequence[Step]) -> tuple[Source, list[Transform]]:
    """Apply the steps up to the last aggregate, whose table is computed now; returns the rows, and the steps to apply
    when they are read.
    """
    remaining: list[Transform] = []
    for step in steps:
        if isinstance(step, Aggregate):
            source, remaining = Arrays(step.make_table(read_all(source, remaining))), []
        else:
            remaining.append(step.prepare(folder))
    return source, remaining


def read_all(source: Source, steps: Sequence[Transform]) -> dict[str, Any]:
    """All rows, after some steps."""
    parts = [
        apply_steps(source.read(np.arange(first, min(first + _ROWS_AT_ONCE, source.count))), steps)
        for first in range(0, max(1, source.count), _ROWS_AT_ONCE)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def apply_steps(columns: dict[str, Any], steps: Sequence[Transform]) -> dict[str, Any]:
    """Apply steps to columns, each of which keeps the number of rows."""
    for step in steps:
        before = {len(each) for each in columns.values()}
        columns = step(columns)
        after = {len(each) for each in columns.values()}
        if after != before:
            raise InterfaceError(
                "a step changed the number of rows",
                why=f"it returned {sorted(after)} rows for {sorted(before)}",
                mend="return one row for each row; omit rows in the source instead",
            )
    return columns
