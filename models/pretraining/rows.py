"""Sentences and pairs of translations as rows of ids, all of one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import DataError, OptionError

from ..text import Tokenizer

Ints = npt.NDArray[np.int32]


def encode_sentences(words: Tokenizer, lines: Sequence[str], length: int) -> Ints:
    """`[CLS] a [SEP]`, filled up to `length`; a longer sentence loses its end."""
    return _filled([_ended(row, length, words) for row in _cut(words, lines)], length, words.pad)


def encode_pairs_in_rows(words: Tokenizer, first: Sequence[str], second: Sequence[str], length: int) -> Ints:
    """`[CLS] a [SEP] b [SEP]`, filled up to `length`; of a pair that is longer both halves lose their ends."""
    if len(first) != len(second):
        raise DataError(
            f"{len(first)} and {len(second)} sentences are no pairs",
            why="row n of one language is the translation of row n of the other",
            mend="give both from the same rows",
        )
    room, rows = length + 1, []  # the second half begins with the [SEP] that ends the first
    for one, other in zip(_cut(words, first), _cut(words, second), strict=True):
        begun = _ended(one, max(room // 2, room - len(other)), words)
        rows.append([*begun, *_ended(other, room - len(begun), words)[1:]])
    return _filled(rows, length, words.pad)


def _cut(words: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    rows: list[list[int]] = words.encode(list(lines)).to_list()
    return rows


def _ended(row: list[int], length: int, words: Tokenizer) -> list[int]:
    return row if len(row) <= length else [*row[: length - 1], words.end]


def _filled(rows: Sequence[Sequence[int]], length: int, pad: int) -> Ints:
    if length < 5:
        raise OptionError(f"rows of {length} tokens leave no room for words", mend="length=32")
    found = np.full((len(rows), length), pad, np.int32)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found
