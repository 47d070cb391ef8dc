"""Aligned text: sentences and their translations, of which a cluster may have only one side."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whale_nebula.errors import DataError, OptionError
from whale_nebula.errors.text import did_you_mean, list_names

Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sentence pairs: row n of `source` is translated by row n of `target`. A side that is in another cluster is None.

    >>> pairs = Pairs(["un gato", "un perro"], ["a cat", "a dog"])
    >>> len(pairs), pairs.sides, pairs.first(1)
    (2, ('source', 'target'), Pairs(source=['un gato'], target=['a cat']))
    """

    source: Sequence[str] | None = None
    target: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.sides:
            raise OptionError("both sides of the pairs are None", mend="Pairs(source=[...]), or target=[...]")
        if self.source is not None and self.target is not None and len(self.source) != len(self.target):
            raise DataError(
                f"{len(self.source)} source sentences and {len(self.target)} target sentences do not form pairs",
                why="row n of one side is the translation of row n of the other",
                mend="pass both sides of the same rows",
            )

    def __len__(self) -> int:
        return len(self.of(self.sides[0]))

    @property
    def sides(self) -> tuple[Side, ...]:
        """The local sides."""
        return tuple(side for side in SIDES if getattr(self, side) is not None)

    def of(self, side: Side) -> Sequence[str]:
        """The sentences of a side, which must be local."""
        sentences: Sequence[str] | None = getattr(self, side)
        if sentences is None:
            raise DataError(f"the {side} side was not loaded", mend=f"sides=('source', 'target'), or remove {side}")
        return sentences

    def first(self, count: int) -> Pairs:
        """The first `count` rows, to measure the effect of little data."""
        return Pairs(*(None if side is None else side[:count] for side in (self.source, self.target)))


def read_folder(
    folder: str | Path,
    split: str,
    *,
    source: str,
    target: str,
    sides: Sequence[Side] = SIDES,
    empty: Literal["refuse", "skip"] = "refuse",
) -> Pairs:
    """Read the files `SPLIT.LANGUAGE` or `SPLIT.LANGUAGE.gz` of both languages, or of one side only.

    Args:
        folder: folder of the files.
        split: name of the split, such as "train".
        source: language of the source side.
        target: language of the target side.
        sides: sides to read; files of other sides are not opened.
        empty: "refuse" raises an error for empty lines; "skip" omits rows with an empty line on either side, and needs
            both sides.

    >>> for language, text in {"es": "un gato", "en": "a cat"}.items():
    ...     _ = Path(f"train.{language}").write_text(text)
    >>> read_folder(".", "train", source="es", target="en")
    Pairs(source=['un gato'], target=['a cat'])
    >>> read_folder(".", "train", source="es", target="en", sides=["target"]).sides
    ('target',)
    """
    _check_options(sides, empty)
    languages = {"source": source, "target": target}
    paths = {side: _find_file(Path(folder), split, side, languages[side]) for side in SIDES if side in sides}
    lines = {side: read_lines(path) for side, path in paths.items()}
    _check_aligned(paths, lines)
    rows = _find_full_rows(paths, lines, skip=empty == "skip")
    return Pairs(**{side: [each[row] for row in rows] for side, each in lines.items()})


def _check_options(sides: Sequence[Side], empty: str) -> None:
    for side in sides:
        if side not in SIDES:
            raise OptionError(f"{side!r} is not a side", mend=did_you_mean(side, SIDES))
    if empty not in ("refuse", "skip"):
        raise OptionError(f"empty={empty!r} is not a valid value", mend=did_you_mean(empty, ["refuse", "skip"]))
    if empty == "skip" and len(set(sides)) < len(SIDES):
        raise OptionError(
            f"empty='skip' requires both sides, but only {list_names(sides)} is loaded",
            why="if only one cluster skipped a row, all later rows would be misaligned",
            mend="remove empty rows from both files before distributing them to the clusters",
        )


def _find_file(folder: Path, split: str, side: Side, language: str) -> Path:
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {str(folder)!r}", mend="pass the folder that contains the files SPLIT.LANGUAGE[.gz]"
        )
    found = [path for path in (folder / f"{split}.{language}", folder / f"{split}.{language}.gz") if path.is_file()]
    if len(found) > 1:
        raise DataError(
            f"{split}.{language} exists twice, plain and gzipped", where=str(folder), mend="remove one of them"
        )
    if not found:
        raise _missing_error(folder, split, side, language)
    return found[0]


def _missing_error(folder: Path, split: str, side: Side, language: str) -> DataError:
    names = {path.name.removesuffix(".gz") for path in folder.iterdir() if path.is_file()}
    parts = sorted((stem, end) for stem, dot, end in (name.rpartition(".") for name in names) if dot)
    languages = sorted(end for stem, end in parts if stem == split)
    if languages:
        why, mend = f"it exists in {list_names(languages)}", did_you_mean(language, languages)
        what = f"split {split!r} does not exist in {language!r}, the {side} side"
        return DataError(what, where=str(folder), why=why, mend=mend)
    splits = sorted({stem for stem, _ in parts})
    why = (
        f"the folder has {list_names(splits)}"
        if splits
        else "the folder contains no file of the form SPLIT.LANGUAGE[.gz]"
    )
    return DataError(f"there is no split {split!r}", where=str(folder), why=why, mend=did_you_mean(split, splits))


def _check_aligned(paths: dict[Side, Path], lines: dict[Side, list[str]]) -> None:
    counts = [f"{path.name} has {len(lines[side])} lines" for side, path in paths.items()]
    if len({len(each) for each in lines.values()}) > 1:
        raise DataError(
            f"files are not aligned: {' and '.join(counts)}",
            where=str(paths["source"].parent),
            why="line n of one file is the translation of line n of the other",
            mend="use both files from the same release of the text",
        )
    if not any(lines.values()):
        raise DataError(f"no text: {counts[0]}", where=str(paths[next(iter(paths))]))


def _find_full_rows(paths: dict[Side, Path], lines: dict[Side, list[str]], *, skip: bool) -> list[int]:
    """The rows that are empty on no side; without `skip` all rows must be."""
    count = len(next(iter(lines.values())))
    for side, each in lines.items():
        empty = [row for row, line in enumerate(each) if not line]
        if empty and not skip:
            several = f", the first of {len(empty)} in the file" if len(empty) > 1 else ""
            why = f"line {empty[0] + 1} is empty{several}, and cannot be used for training"
            raise DataError(
                f"{paths[side].name} has an empty sentence",
                where=f"{paths[side]}:{empty[0] + 1}",
                why=why,
                mend='empty="skip" skips the row on both sides, if both are loaded',
            )
    return [row for row in range(count) if all(each[row] for each in lines.values())]


def read_lines(path: Path, *, exact: bool = False) -> list[str]:
    r"""Read every line without surrounding white space, or `exact`; files that are damaged or not in UTF-8 are refused.

    Only a line feed ends a line. `str.splitlines` would also split at other characters within sentences, and misalign
    the lines after them.

    >>> path = Path("one.txt")
    >>> _ = path.write_bytes("one line\x85still the same \r\nanother\n".encode())
    >>> read_lines(path)
    ['one line\x85still the same', 'another']
    """
    lines = _decode(path, _read_raw(path)).split("\n")
    if lines[-1] == "":  # after the last line feed
        lines.pop()
    return lines if exact else [line.strip() for line in lines]


def _read_raw(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path.name} is damaged", where=str(path), why=str(error), mend="copy it again; gzip -t tests it"
        ) from None
    except OSError as error:
        raise DataError(f"{path.name} cannot be read", where=str(path), why=error.strerror) from None


def _decode(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path.name} is not UTF-8",
            where=f"{path}:{line}",
            why=f"byte 0x{raw[error.start]:02x} in line {line} does not start a character",
            mend=f"iconv -f latin1 -t utf8, if it is Latin-1: {path.name}",
        ) from None
