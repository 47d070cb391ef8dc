"""Examples as ids: `[CLS] first [SEP] second [SEP]`, padded; for spans also the position of each token in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whale_nebula.errors import DataError, OptionError

from ..text.tokenizer import Tokenizer
from .examples import Examples, Question

_SHORTEST = 3
_WORD = re.compile(r"\w+|[^\w\s]")


class Rows(NamedTuple):
    """The data of `fit`: ids (rows, length), and labels."""

    ids: np.ndarray
    labels: np.ndarray


class Spans(NamedTuple):
    """Ids (rows, length), the first and the last token of each answer (rows, 2), and for each token its range of
    characters of the text, (-1, -1) outside the text (rows, length, 2).
    """

    ids: np.ndarray
    labels: np.ndarray
    characters: np.ndarray


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes examples to rows of `longest` tokens; longer ones are truncated, the second sentence first.

    Args:
        words: the tokenizer.
        longest: number of tokens in a row.

    >>> from ..text import SPECIAL, Vocabulary
    >>> encoder = Encoder(Tokenizer(Vocabulary((*SPECIAL, "a", "cup", "dog"))), longest=8)
    >>> encoder.examples(Examples(["a cup"], [1], ["a dog"])).ids.tolist()
    [[2, 5, 6, 3, 5, 7, 3, 0]]
    """

    words: Tokenizer
    longest: int

    def __post_init__(self) -> None:
        if self.longest < _SHORTEST:
            why = "each row of a pair contains [CLS], [SEP] and [SEP]"
            raise OptionError(
                f"longest={self.longest!r} is less than {_SHORTEST}", why=why, mend=f"longest={_SHORTEST}"
            )

    def examples(self, rows: Examples) -> Rows:
        """Encode sentences, or pairs of them."""
        first = self._tokenize(rows.first)
        second = self._tokenize(rows.second) if rows.second is not None else [[]] * len(first)
        ids = [
            self._join_tokens(one, other, pair=rows.second is not None)
            for one, other in zip(first, second, strict=True)
        ]
        return Rows(np.array(ids, np.int32), np.asarray(rows.labels, np.float32))

    def questions(self, rows: Sequence[Question]) -> Spans:
        """Encode questions, each before its text, with their first right answers. An answer that was truncated is at
        the first token, which belongs to no answer.
        """
        made = [self._encode_question(row) for row in rows]
        ids, labels, characters = (np.array(each, np.int32) for each in zip(*made, strict=True))
        return Spans(ids, labels, characters)

    def _encode_question(self, row: Question) -> tuple[list[int], tuple[int, int], list[tuple[int, int]]]:
        (asked,) = self._tokenize([row.text])
        found = list(_WORD.finditer(row.context))
        if not found:
            raise DataError("the text has no words", where=row.name, mend="remove the question")
        pieces = [(token, word.span()) for word, cut in zip(found, self._tokenize([w[0] for w in found]), strict=True)
                  for token in cut]  # fmt: skip
        begin = len(asked) + 2
        ids = self._join_tokens(asked, [token for token, _ in pieces], pair=True)
        spans = [span for _, span in pieces][: max(0, self.longest - begin - 1)]
        characters = [(-1, -1)] * begin + spans
        characters = (characters + [(-1, -1)] * self.longest)[: self.longest]
        start, answer = row.answers[0]
        inside = [place for place, (at, to) in enumerate(characters) if at < start + len(answer) and to > start]
        return ids, (inside[0], inside[-1]) if inside else (0, 0), characters

    def _tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        return [row[1:-1] for row in self.words.encode(list(sentences)).to_list()]

    def _join_tokens(self, first: Sequence[int], second: Sequence[int], *, pair: bool) -> list[int]:
        start, end = self.words.start, self.words.end
        room = self.longest - 2 - pair
        first = first[:room]
        second = second[: room - len(first)]
        ids = [start, *first, end, *(*second, end) * pair]
        return ids + [self.words.pad] * (self.longest - len(ids))


def read_spans(scores: np.ndarray, spans: Spans, rows: Sequence[Question], *, longest: int = 30) -> list[str]:
    """Decode answers from scores (rows, 2, length) of their first and last tokens: the best ordered pair within the
    text.

    >>> characters = np.array([[[-1, -1]] * 3 + [[0, 1], [2, 5], [-1, -1]]])
    >>> spans = Spans(np.array([[2, 5, 3, 6, 7, 3]]), np.array([[4, 4]]), characters)
    >>> scores = np.zeros((1, 2, 6)); scores[0, 0, 4] = scores[0, 1, 4] = 1
    >>> read_spans(scores, spans, [Question("what", "a cup", ((2, "cup"),))])
    ['cup']
    """
    found = []
    for (first, last), characters, row in zip(scores, spans.characters, rows, strict=True):
        both = first[:, None] + last[None, :]
        places = np.arange(len(first))
        inside = characters[:, 0] >= 0
        after = places[None, :] - places[:, None]
        both = np.where(inside[:, None] & inside[None, :] & (after >= 0) & (after < longest), both, -np.inf)
        start, end = np.unravel_index(int(both.argmax()), both.shape)
        found.append(row.context[characters[start][0] : characters[end][1]] if inside.any() else "")
    return found
