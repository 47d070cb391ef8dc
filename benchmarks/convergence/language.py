"""A language that a program makes: sentences of one, and their translations, which depend on what stands around.

A sentence is a *topic* and then words. Each topic has a dictionary of its own (a permutation of the words), so that a
word means nothing without it. An adjective stands before its noun in the one language and behind it in the other; and
a word right behind one that denies is translated by another dictionary. Who translates has to know of every word
what topic it is in and what stands beside it: that is what has to cross a boundary in the middle of the translator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PAD, START, TOPIC = 0, 1, 2
TOPICS, WORDS, LONGEST, SHORTEST = 2, 32, 12, 4
_FIRST = TOPIC + TOPICS
VOCABULARY = _FIRST + WORDS
_ADJECTIVES, _DENYING = WORDS // 3, WORDS // 8


class Pairs(NamedTuple):
    """Sentences of one language, what the translator is shown of the other, and what it has to say."""

    source: np.ndarray
    shown: np.ndarray
    said: np.ndarray

    @property
    def marks(self) -> np.ndarray:
        """Which positions of the sentences hold a word."""
        return self.source != PAD

    def of(self, which: np.ndarray | slice) -> Pairs:
        """Some of them."""
        return Pairs(*(part[which] for part in self))


def pairs(count: int, seed: int) -> Pairs:
    """So many sentences with their translations; the dictionaries are the same for every seed."""
    draw = np.random.default_rng(seed)
    both = [_pair(draw) for _ in range(count)]
    source, said = (np.stack(side).astype("int32") for side in zip(*both, strict=True))
    shown = np.concatenate([np.full((count, 1), START, "int32"), said[:, :-1]], axis=1)
    return Pairs(source, shown, said)


def _dictionaries() -> np.ndarray:
    """For each topic two permutations of the words: the second is for what is negated."""
    draw = np.random.default_rng(2026)
    return np.stack([[draw.permutation(WORDS) for _ in range(2)] for _ in range(TOPICS)])


_MEANS = _dictionaries()


def _pair(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    topic = int(draw.integers(TOPICS))
    words = draw.integers(WORDS, size=int(draw.integers(SHORTEST, LONGEST)))
    denied = np.concatenate([[False], words[:-1] >= WORDS - _DENYING])
    said = _MEANS[topic, denied.astype(int), words] + _FIRST
    return _padded([TOPIC + topic, *(words + _FIRST)]), _padded(_turned(words, list(said)))


def _turned(words: np.ndarray, said: list[int]) -> list[int]:
    """An adjective and the noun behind it change places."""
    made, at = list(said), 0
    while at + 1 < len(words):
        swap = words[at] < _ADJECTIVES <= words[at + 1]
        if swap:
            made[at], made[at + 1] = made[at + 1], made[at]
        at += 2 if swap else 1
    return made


def _padded(tokens: list[int]) -> np.ndarray:
    row = np.full(LONGEST, PAD, "int32")
    row[: len(tokens)] = tokens
    return row
