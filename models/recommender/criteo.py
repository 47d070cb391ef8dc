"""Criteo's click logs: each line is a row with a label, 13 whole numbers and 26 values of eight hexadecimal digits."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from whale_nebula.errors import DataError, OptionError

from .clicks import Clicks
from .hashing import id_of

CRITEO_NUMBERS = 13
CRITEO_FIELDS = 26
_COLUMNS = 1 + CRITEO_NUMBERS + CRITEO_FIELDS
_ABSENT = 1 << 40
"""The value that stands for a missing one, of which ids are made; others are below 2 ** 32."""


def iterate_criteo(path: str | os.PathLike[str], *, rows: int = 65_536) -> Iterator[Clicks]:
    """Iterate over the rows of a Criteo file, plain or `.gz`; the file is streamed, never held in memory as a whole.

    Numbers x become log(1 + x), or -log(1 - x) if negative, or 0 if missing. Ids are hashes of field and value; a
    missing value has its own id.

    Args:
        path: the file.
        rows: number of rows in each `Clicks`.
    """
    if rows < 1:
        raise OptionError(f"rows={rows!r} is less than 1", mend="rows=65536")
    file = Path(path)
    numbers: list[list[float]] = []
    values: list[list[int]] = []
    labels: list[int] = []
    for line, text in enumerate(_iterate_lines(file), 1):
        label, dense, sparse = _parse_line(text, file, line)
        labels.append(label)
        numbers.append(dense)
        values.append(sparse)
        if len(labels) == rows:
            yield _join_rows(numbers, values, labels)
            numbers, values, labels = [], [], []
    if labels:
        yield _join_rows(numbers, values, labels)


def _iterate_lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="ascii") if path.suffix == ".gz" else path.open(encoding="ascii") as file:
            for text in file:
                yield text.rstrip("\n")
    except UnicodeDecodeError:
        raise DataError(
            f"{path.name} is not a Criteo file", where=str(path), why="it contains bytes that are not ASCII"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path.name} is damaged", where=str(path), why=str(error), mend="copy it again; gzip -t tests it"
        ) from None
    except OSError as error:
        mend = "pass the path of the log, a text file or .gz"
        raise DataError(f"{path.name} cannot be read", where=str(path), why=error.strerror, mend=mend) from None


def _parse_line(text: str, path: Path, line: int) -> tuple[int, list[float], list[int]]:
    columns = text.split("\t")
    where = f"{path}:{line}"
    if len(columns) != _COLUMNS:
        raise DataError(
            f"{path.name} has a row of {len(columns)} columns",
            where=where,
            why=f"a label, {CRITEO_NUMBERS} numbers and {CRITEO_FIELDS} values are {_COLUMNS}, separated by tabs",
            mend="use train.txt as published by Criteo; test.txt has no labels"
            if len(columns) == _COLUMNS - 1
            else "leave absent values empty, between two tabs",
        )
    if columns[0] not in ("0", "1"):
        raise DataError(
            f"{path.name} has the label {columns[0]!r}", where=where, why="labels must be 0 or 1", mend="0 or 1"
        )
    numbers = [_parse(each, 10, at, where) for at, each in enumerate(columns[1 : 1 + CRITEO_NUMBERS], 2)]
    values = [_parse(each, 16, at, where) for at, each in enumerate(columns[1 + CRITEO_NUMBERS :], 2 + CRITEO_NUMBERS)]
    return (
        int(columns[0]),
        [float(each or 0) for each in numbers],
        [_ABSENT if each is None else each for each in values],
    )


def _parse(text: str, base: int, column: int, where: str) -> int | None:
    """Parse a number; None if it is missing."""
    if not text:
        return None
    try:
        number = int(text, base)
        if "_" not in text and (base == 10 or 0 <= number < 1 << 32):
            return number
    except ValueError:
        pass
    kind = "integer" if base == 10 else "value of up to eight hexadecimal digits"
    raise DataError(
        f"column {column} is {text!r}, which is not a valid {kind}",
        where=where,
        mend="leave the column empty if it is absent",
    )


def _join_rows(numbers: list[list[float]], values: list[list[int]], labels: list[int]) -> Clicks:
    dense = np.array(numbers)
    dense = np.sign(dense) * np.log1p(np.abs(dense))
    ids = id_of(np.arange(CRITEO_FIELDS)[None, :], np.array(values, np.int64))
    return Clicks(dense.astype(np.float32), ids, np.array(labels, np.float32)[:, None])
