"""What predictions of clicks are worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from whale_nebula.errors import DataError


def auc(predicted: ArrayLike, clicked: ArrayLike) -> float:
    """The area under the ROC curve, exact: how often a row that was clicked is predicted above one that was not.

    Equal predictions count one half.

    >>> auc([0.9, 0.4, 0.6, 0.1], [1, 0, 1, 0]), auc([0.5, 0.5], [1, 0])
    (1.0, 0.5)
    """
    scores, labels = np.asarray(predicted).reshape(-1), np.asarray(clicked).reshape(-1)
    if len(scores) != len(labels):
        raise DataError(
            f"{len(scores)} predictions and {len(labels)} labels cannot be compared", mend="predict all rows of one log"
        )
    hits = int(np.sum(labels == 1))
    misses = int(np.sum(labels == 0))
    if hits + misses != len(labels) or not hits or not misses:
        raise DataError(
            f"there is no AUC of {hits} rows with label 1 and {misses} with 0, of {len(labels)}",
            why="it compares rows that were clicked with rows that were not",
            mend="labels of 0 and 1, and rows of both",
        )
    if not np.isfinite(scores).all():
        raise DataError("a prediction is not finite, so the rows have no order", mend="a smaller learning rate")
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[places]  # from 1; equal predictions share the mean of theirs
    return float((ranks[labels == 1].sum() - hits * (hits + 1) / 2) / (hits * misses))
