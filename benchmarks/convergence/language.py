"""A generated language: sentences, and their translations, which depend on context.

A sentence is a *topic* and then words. Each topic has its own dictionary (a permutation of the words), so that a word
has no meaning without it. An adjective precedes its noun in the one language and follows it in the other; and a word
after a negation is translated by another dictionary. So the translation of every word depends on the topic and on its
neighbours: this is the information that must cross a boundary in the middle of the translator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PAD, START, TOPIC = 0, 1, 2
TOPICS, WORDS, LONGEST, SHORTEST = 2, 32, 12, 4
_FIRST = TOPIC + TOPICS
VOCABULARY = _FIRST + WORDS
_ADJECTIVES, _NEGATIONS = WORDS // 3, WORDS // 8


class Pairs(NamedTuple):
    """Sentences of one language, the decoder's input of the other, and its targets."""

    source: np.ndarray
    decoder_input: np.ndarray
    target: np.ndarray

    @property
    def marks(self) -> np.ndarray:
        """The mask of words in the sentences."""
        return self.source != PAD

    def select(self, which: np.ndarray | slice) -> Pairs:
        """A selection of pairs."""
        return Pairs(*(part[which] for part in self))


def make_pairs(count: int, seed: int) -> Pairs:
    """Sentences with their translations; the dictionaries are the same for every seed."""
    draw = np.random.default_rng(seed)
    both = [_draw_pair(draw) for _ in range(count)]
    source, target = (np.stack(side).astype("int32") for side in zip(*both, strict=True))
    decoder_input = np.concatenate([np.full((count, 1), START, "int32"), target[:, :-1]], axis=1)
    return Pairs(source, decoder_input, target)


def _dictionaries() -> np.ndarray:
    """For each topic two permutations of the words, the second for negated ones."""
    draw = np.random.default_rng(2026)
    return np.stack([[draw.permutation(WORDS) for _ in range(2)] for _ in range(TOPICS)])


_TRANSLATIONS = _dictionaries()


def _draw_pair(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    topic = int(draw.integers(TOPICS))
    words = draw.integers(WORDS, size=int(draw.integers(SHORTEST, LONGEST)))
    negated = np.concatenate([[False], words[:-1] >= WORDS - _NEGATIONS])
    target = _TRANSLATIONS[topic, negated.astype(int), words] + _FIRST
    return _pad([TOPIC + topic, *(words + _FIRST)]), _pad(_swap_adjectives(words, list(target)))


def _swap_adjectives(words: np.ndarray, target: list[int]) -> list[int]:
    """Swap each adjective with the noun behind it."""
    made, at = list(target), 0
    while at + 1 < len(words):
        swap = words[at] < _ADJECTIVES <= words[at + 1]
        if swap:
            made[at], made[at + 1] = made[at + 1], made[at]
        at += 2 if swap else 1
    return made


def _pad(tokens: list[int]) -> np.ndarray:
    row = np.full(LONGEST, PAD, "int32")
    row[: len(tokens)] = tokens
    return row
