"""How many numbers a structure leaves: arithmetic of sizes, which a plan needs without TensorFlow."""

from __future__ import annotations


def rank_of(m: int, n: int, ratio: float) -> int:
    """The largest rank k of an m x n matrix with k(m + n + 1) / (m n) <= ratio; 0 where not even 1 is.

    >>> rank_of(8192, 768, 0.6), rank_of(512, 512, 0.6), rank_of(4, 1, 1.0), rank_of(0, 768, 0.6)
    (421, 153, 0, 0)
    """
    if m < 1 or n < 1:
        return 0
    k = int(ratio * m * n / (m + n + 1)) + 1
    while k * (m + n + 1) / (m * n) > ratio:
        k -= 1
    return max(k, 0)


def kept(n: int, fraction: float) -> int:
    """How many of a row's `n` numbers are kept.

    >>> kept(768, 0.1), kept(8, 0.01), kept(0, 0.5)
    (77, 1, 0)
    """
    return min(n, max(1, round(fraction * n)))
