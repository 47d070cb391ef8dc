"""Metrics of understanding: accuracy, F1, Matthews, Pearson, Spearman; for spans exact match and F1 as in SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from whale_nebula.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(found: ArrayLike, expected: ArrayLike) -> float:
    """The share of equal labels.

    >>> accuracy([1, 0, 1, 1], [1, 0, 0, 1])
    0.75
    """
    one, other = _flatten_alike(found, expected)
    return float(np.mean(one == other))


def f1(found: ArrayLike, expected: ArrayLike) -> float:
    """The harmonic mean of precision and recall of label 1; 0 without any correct one.

    >>> f1([1, 0, 1, 1], [1, 0, 0, 1])
    0.8
    """
    one, other = _flatten_alike(found, expected)
    hits = int(np.sum((one == 1) & (other == 1)))
    return 2 * hits / max(1, int(np.sum(one == 1)) + int(np.sum(other == 1)))


def matthews(found: ArrayLike, expected: ArrayLike) -> float:
    """The correlation of two lists of labels, of two classes or more; 0 if either has a single class.

    >>> matthews([1, 0, 1, 0], [1, 0, 0, 1])
    0.0
    """
    one, other = _flatten_alike(found, expected)
    classes = np.unique(np.concatenate([one, other]))
    one, other = ((each[:, None] == classes).astype(float) for each in (one, other))
    one, other = one - one.mean(0), other - other.mean(0)
    size = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum() / size) if size else 0.0


def pearson(found: ArrayLike, expected: ArrayLike) -> float:
    """The linear correlation of two lists of numbers; 0 if either is constant.

    >>> round(pearson([1.0, 2.0, 3.0], [2.0, 4.0, 7.0]), 4)
    0.9934
    """
    one, other = (each.astype(float) for each in _flatten_alike(found, expected))
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum() / size) if size else 0.0


def spearman(found: ArrayLike, expected: ArrayLike) -> float:
    """The rank correlation of two lists of numbers; equal numbers share their mean rank.

    >>> spearman([1.0, 20.0, 300.0], [2.0, 4.0, 7.0])
    1.0
    """
    return pearson(*map(_rank, _flatten_alike(found, expected)))


def exact_match(found: Sequence[str], expected: Sequence[Sequence[str]]) -> float:
    """The share of answers that equal a right one, ignoring case, articles and punctuation.

    >>> exact_match(["The red cup.", "a dog"], [["red cup"], ["cat", "the cat"]])
    0.5
    """
    return _average_best(found, expected, lambda one, other: float(_normalize_answer(one) == _normalize_answer(other)))


def span_f1(found: Sequence[str], expected: Sequence[Sequence[str]]) -> float:
    """The mean F1 of the words of answers against the best of the right ones.

    >>> round(span_f1(["red cup"], [["a large red cup"]]), 4)
    0.8
    """
    return _average_best(found, expected, _compute_word_f1)


METRICS: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    each.__name__: each for each in (accuracy, f1, matthews, pearson, spearman)
}
"""Metrics of labels and numbers, by name."""


def _flatten_alike(found: ArrayLike, expected: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    one, other = np.asarray(found).reshape(-1), np.asarray(expected).reshape(-1)
    if len(one) != len(other) or not len(one):
        raise DataError(
            f"cannot compare {len(one)} predictions with {len(other)} labels",
            why="each prediction needs one label, and there must be at least one",
            mend="pass the predictions and labels of all rows of one split",
        )
    return one, other


def _rank(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[places])


def _average_best(found: Sequence[str], expected: Sequence[Sequence[str]], score: Callable[[str, str], float]) -> float:
    """The mean over answers of the best score against one of the right ones."""
    if len(found) != len(expected) or not len(found) or not all(expected):
        raise DataError(
            f"cannot compare {len(found)} answers with {len(expected)} lists of right answers",
            why="each question needs an answer and at least one right answer",
            mend="pass an answer for each question of one split",
        )
    return float(
        np.mean([max(score(one, each) for each in others) for one, others in zip(found, expected, strict=True)])
    )


def _normalize_answer(answer: str) -> list[str]:
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def _compute_word_f1(found: str, expected: str) -> float:
    one, other = _normalize_answer(found), _normalize_answer(expected)
    if not one or not other:
        return float(one == other)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other))
