"""Metrics, compared with independent computations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from whale_nebula.errors import DataError
from whale_nebula.models.understanding import METRICS, exact_match, span_f1

DRAWN = np.random.default_rng(0)


@pytest.mark.parametrize("trial", range(5))
def test_label_metrics_match_their_definitions(trial: int) -> None:
    found, meant = DRAWN.integers(0, 2, (2, 40))
    pairs = list(zip(found.tolist(), meant.tolist(), strict=True))
    tp, tn, fp, fn = (pairs.count(each) for each in ((1, 1), (0, 0), (1, 0), (0, 1)))
    assert METRICS["accuracy"](found, meant) == pytest.approx((tp + tn) / 40)
    precision, attend_cache = tp / (tp + fp), tp / (tp + fn)
    assert METRICS["f1"](found, meant) == pytest.approx(2 * precision * attend_cache / (precision + attend_cache))
    both = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert METRICS["matthews"](found, meant) == pytest.approx((tp * tn - fp * fn) / both)


def test_matthews_of_three_classes_matches_a_hand_computed_value() -> None:
    """As Gorodkin's R_K of the confusion matrix [[2, 1, 0], [0, 1, 1], [1, 0, 3]] is by hand."""
    meant = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    found = [0, 0, 1, 1, 2, 0, 2, 2, 2]
    # hits times rows, less the products of the sums: 6 * 9 - (3 * 3 + 2 * 2 + 4 * 4)
    assert METRICS["matthews"](found, meant) == pytest.approx(25 / math.sqrt((81 - 29) * (81 - 29)))


@pytest.mark.parametrize("tied", [False, True])
def test_correlation_metrics_match_numpy(tied: bool) -> None:
    found, meant = DRAWN.standard_normal((2, 30))
    if tied:
        found, meant = np.round(found), np.round(meant)
    assert METRICS["pearson"](found, meant) == pytest.approx(np.corrcoef(found, meant)[0, 1])

    def rank(values: Any) -> list[float]:
        return [
            sum(other < each for other in values) + (sum(other == each for other in values) + 1) / 2 for each in values
        ]

    expected = np.corrcoef(rank(found), rank(meant))[0, 1]
    assert METRICS["spearman"](found, meant) == pytest.approx(expected)


@pytest.mark.parametrize("metric", METRICS)
def test_constant_predictions_have_no_correlation(metric: str) -> None:
    assert METRICS[metric]([0, 0, 0], [1, 1, 0]) in (0.0, pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("found", "meant", "exact", "shared"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),
        ("in Paris", ["Paris", "the city of Paris"], 0.0, 2 / 3),
        ("red red cup", ["red cup cup"], 0.0, 2 / 3),
        ("", ["a"], 1.0, 1.0),  # an article alone is not a word
        ("nothing", ["else"], 0.0, 0.0),
    ],
)
def test_span_metrics_normalise_answers(found: str, meant: list[str], exact: float, shared: float) -> None:
    assert exact_match([found], [meant]) == exact
    assert span_f1([found], [meant]) == pytest.approx(shared)


def test_incomparable_predictions_are_refused() -> None:
    with pytest.raises(DataError, match="cannot compare 2 predictions with 1 labels"):
        METRICS["accuracy"]([1, 2], [1])
    with pytest.raises(DataError, match="1 answers with 1 lists of right answers"):
        span_f1(["a"], [[]])
