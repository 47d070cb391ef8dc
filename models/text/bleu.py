"""Corpus BLEU, case-insensitive and detokenised, with sacrebleu's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import DataError, OptionError

_ORDERS = 4
_SMOOTHING = "exp"


class Score(NamedTuple):
    """BLEU of a text, from 0 to 100, with its components: the precisions in percent, the brevity penalty, and the words
    of both texts. `signature` records the settings for comparisons.
    """

    value: float
    signature: str
    precisions: tuple[float, ...]
    brevity: float
    words: int
    reference_words: int

    def __str__(self) -> str:
        return f"BLEU {self.value:.2f} ({self.signature})"


class Difference(NamedTuple):
    """The improvement of `b` over `a`, and the interval from `low` to `high` of 95 % of the bootstrap samples."""

    delta: float
    low: float
    high: float
    p_value: float
    samples: int
    a: Score
    b: Score

    def __str__(self) -> str:
        return f"{self.delta:+.2f} BLEU [{self.low:+.2f}, {self.high:+.2f}], p={self.p_value:.3f}"


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Score translations against one reference for each sentence.

    Args:
        hypotheses: the translations.
        references: the reference translations, in the same order.

    >>> score = bleu(["A cat sits on the mat."], ["a cat sits on the mat ."])
    >>> round(score.value, 6), score.signature.split("|")[:4]
    (100.0, ['nrefs:1', 'case:lc', 'eff:no', 'tok:13a'])
    """
    _check(references, hypotheses=hypotheses)
    return _make_score(_count_ngrams(hypotheses, references).sum(axis=0))


def paired_bootstrap(
    a: Sequence[str], b: Sequence[str], references: Sequence[str], *, samples: int = 1000, seed: int = 12345
) -> Difference:
    """Paired bootstrap test of whether translations `b` are better than translations `a`.

    Both are scored on sentences that are drawn with replacement. The p-value is sacrebleu's: how often a difference
    deviates from the mean by at least the observed difference.

    Args:
        a: translations of the baseline.
        b: translations to compare.
        references: the reference translations, in the same order.
        samples: number of bootstrap samples.
        seed: seed of the samples.

    >>> texts = ["one two three four", "five six seven eight nine"]
    >>> paired_bootstrap(texts, texts, texts, samples=10).delta
    0.0
    """
    _check(references, a=a, b=b)
    if samples < 1:
        raise OptionError(f"samples={samples!r} is less than 1", mend="samples=1000")
    statistics_a, statistics_b = _count_ngrams(a, references), _count_ngrams(b, references)
    draws = np.random.default_rng(seed).integers(0, len(references), (samples, len(references)))
    deltas = np.asarray(
        [
            _compute_value(statistics_b[rows].sum(axis=0)) - _compute_value(statistics_a[rows].sum(axis=0))
            for rows in draws
        ]
    )
    a_score, b_score = _make_score(statistics_a.sum(axis=0)), _make_score(statistics_b.sum(axis=0))
    delta = b_score.value - a_score.value
    extreme = int(np.sum(np.abs(deltas - deltas.mean()) >= abs(delta)))
    low, high = np.percentile(deltas, [2.5, 97.5])
    p_value = (extreme + 1) / (samples + 1)
    return Difference(delta, float(low), float(high), p_value, samples, a_score, b_score)


def _check(references: Sequence[str], **texts: Sequence[str]) -> None:
    if not references:
        raise DataError("BLEU needs references, and none were given", mend="pass one reference for each sentence")
    for name, text in texts.items():
        if isinstance(text, str) or len(text) != len(references):
            raise DataError(
                f"{len(text)} sentences of {name!r} and {len(references)} references do not form pairs",
                why="sentence n is scored against reference n",
                mend="pass both in the same order: Order.restored restores the order of rows",
            )


def _make_metric() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(lowercase=True, effective_order=True, smooth_method=_SMOOTHING)


def _count_ngrams(hypotheses: Sequence[str], references: Sequence[str]) -> npt.NDArray[np.int64]:
    """A row of counts for each sentence: right n-grams and all n-grams by n, words here and in the reference."""
    metric = _make_metric()
    found = [metric.sentence_score(each, [reference]) for each, reference in zip(hypotheses, references, strict=True)]
    return np.asarray([[*each.counts, *each.totals, each.sys_len, each.ref_len] for each in found], np.int64)


def _compute_score(counts: npt.NDArray[np.int64]) -> Any:
    """The score, an object of sacrebleu, for a sum of `_count_ngrams` over sentences."""
    from sacrebleu.metrics.bleu import BLEU

    *grams, words, reference_words = counts.tolist()
    return BLEU.compute_bleu(grams[:_ORDERS], grams[_ORDERS:], words, reference_words, smooth_method=_SMOOTHING)


def _compute_value(counts: npt.NDArray[np.int64]) -> float:
    return float(_compute_score(counts).score)


def _make_score(counts: npt.NDArray[np.int64]) -> Score:
    from sacrebleu.metrics.bleu import BLEU

    found = _compute_score(counts)
    whole = BLEU(lowercase=True, smooth_method=_SMOOTHING)
    whole.corpus_score(["a"], [["a"]])  # a signature exists after the first score
    signature = str(whole.get_signature())
    return Score(found.score, signature, tuple(found.precisions), found.bp, found.sys_len, found.ref_len)
