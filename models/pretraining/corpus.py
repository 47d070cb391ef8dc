"""Text of several languages for pretraining, generated or read from a folder, and its encoding for generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import OptionError

from .. import text
from .mixing import encode_pairs_in_rows, encode_sentences

Ints = npt.NDArray[np.int32]
Lines = Mapping[str, list[str]]


@dataclass(frozen=True)
class Corpus:
    """For each language: sentences `alone`, aligned `pairs`, and aligned `tests`.

    If the corpus is `made` by rule, a wrong translation differs from the right one in one thing; otherwise it is
    another sentence of about the same length.
    """

    alone: Lines
    pairs: Lines
    tests: Lines
    made: bool = False

    @classmethod
    def by_rule(cls, languages: Sequence[str], count: int, tests: int = 400) -> Corpus:
        """Generate `count` sentences of each language alone, and as many pairs.

        >>> sorted(Corpus.by_rule(["en", "fr"], 5).pairs)
        ['en', 'fr']
        """
        alone = {language: text.alone(language, count) for language in languages}
        pairs = text.aligned("train", count, languages=languages)
        return cls(alone, pairs, text.aligned("val", tests, languages=languages), made=True)

    @classmethod
    def of_folder(
        cls, folder: Path, languages: Sequence[str], count: int, split: str = "train", test: str = "val"
    ) -> Corpus:
        """Read the first `count` lines of aligned files SPLIT.LANGUAGE[.gz], and of the files of the split `test`.
        Those of `split` are both `alone` and `pairs`.
        """
        first, *others = languages
        if not others:
            raise OptionError(
                f"languages={list(languages)!r} has a single language",
                why="the files are aligned, so they are read in pairs with the first language",
                mend="languages=['en', 'de']",
            )
        found: dict[str, dict[str, list[str]]] = {split: {}, test: {}}
        for name, lines in found.items():
            for other in others:
                read = text.read_folder(folder, name, source=first, target=other).first(count)
                lines |= {first: list(read.of("source")), other: list(read.of("target"))}
        return cls(found[split], found[split], found[test])

    def lines(self) -> list[str]:
        """All training text, to learn a vocabulary from."""
        return [line for each in (self.alone, self.pairs) for lines in each.values() for line in lines]

    def choices(self, split: str, first: str, second: str, count: int) -> text.Choices:
        """At most `count` sentences with right and wrong translations, of `pairs` if the split is "train", otherwise of
        `tests`.
        """
        if self.made:
            return text.choices("train" if split == "train" else "test", count, first, second)
        lines = self.pairs if split == "train" else self.tests
        right = lines[second][:count]
        order = sorted(range(len(right)), key=lambda row: (len(right[row]), row))
        if len(order) < 2:
            raise OptionError(
                f"the corpus has {len(order)} sentences in {second!r} for {split}, but choices need at least 2",
                why="a wrong translation is that of another sentence",
                mend="use longer files, and a count of at least 2",
            )
        neighbour = {row: order[(place + 1) % len(order)] for place, row in enumerate(order)}
        wrong = [right[neighbour[row]] for row in range(len(right))]
        return text.Choices(lines[first][:count], right, wrong, ["another"] * len(right))


def check_families(families: Mapping[str, Sequence[str]], languages: Sequence[str]) -> None:
    """Refuse families that omit a language or repeat one.

    >>> check_families({"all": ["en", "de"]}, ["de", "en"])
    """
    members = [language for each in families.values() for language in each]
    if sorted(members) != sorted(languages):
        raise OptionError(
            f"the families contain {', '.join(members)}, but the languages are {', '.join(languages)}",
            why="each language must belong to exactly one family",
            mend=f"all={','.join(languages)}",
        )


def _check_languages(languages: Sequence[str], known: Lines) -> None:
    if unknown := [language for language in languages if language not in known]:
        raise OptionError(
            f"the corpus has no text in {', '.join(unknown)}", mend=f"use languages of {', '.join(known)}"
        )


def encode_alone(corpus: Corpus, words: text.Tokenizer, languages: Sequence[str], length: int) -> dict[str, Ints]:
    """Encode the sentences of each of these languages as rows (MRTD)."""
    _check_languages(languages, corpus.alone)
    return {language: encode_sentences(words, corpus.alone[language], length) for language in languages}


def encode_with_pivot(
    corpus: Corpus, words: text.Tokenizer, languages: Sequence[str], pivot: str, length: int
) -> dict[str, Ints]:
    """Encode pairs whose first half is one of these languages (TRTD): the pivot with each other language, each other
    language with the pivot.

    Two languages other than the pivot are never in one row.
    """
    _check_languages([*languages, pivot], corpus.pairs)
    found = {}
    for first in languages:
        for second in corpus.pairs if first == pivot else [pivot]:
            if second != first:
                lines = corpus.pairs[first], corpus.pairs[second]
                found[f"{first}-{second}"] = encode_pairs_in_rows(words, *lines, length)
    return found
