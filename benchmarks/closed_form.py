"""Closed forms of the duration of a step with equal stages, and of the best number of micro-batches.

p stages, m micro-batches; a micro-batch computes c seconds in a stage (forward and backward); a message occupies the
line for x seconds in each direction, with latency λ: t_c = x + λ. The simulator agrees without requiring equal stages;
the closed forms explain its results.
"""

from __future__ import annotations

import math


def bubble(seconds: float, micro_batches: int, compute: float) -> float:
    """The share of a step in which a stage is idle: 1 − m·c / T.

    >>> bubble(32.0, 8, 3.0)
    0.25
    """
    return 1.0 - micro_batches * compute / seconds


def free_link_seconds(stages: int, micro_batches: int, compute: float) -> float:
    """GPipe and 1F1B over free links: T = (m + p − 1)·c.

    >>> free_link_seconds(2, 8, 3.0)
    27.0
    """
    return (micro_batches + stages - 1) * compute


def free_link_bubble(stages: int, micro_batches: int) -> float:
    """The bubble of GPipe and 1F1B over free links: (p − 1) / (m + p − 1).

    >>> free_link_bubble(5, 12)
    0.25
    """
    return (stages - 1) / (micro_batches + stages - 1)


def blocking_seconds(stages: int, micro_batches: int, compute: float, transfer: float) -> float:
    """T = (p − 1)·(c + 2·m·t_c) + m·c: GPipe with sends that block and nothing fused.

    Exact for p = 2, an upper bound for p > 2.

    >>> blocking_seconds(2, 8, 3.0, 1.5)
    51.0
    """
    return (stages - 1) * (compute + 2 * micro_batches * transfer) + micro_batches * compute


def one_f_one_b_seconds(micro_batches: int, compute: float, transfer: float) -> float:
    """1F1B on two stages, x ≤ c: with two micro-batches in flight each pair waits for one round trip.

    T = m·(c + t_c) + c for even m, (m + 1)·(c + t_c) for odd m.

    >>> one_f_one_b_seconds(16, 3.0, 3.0)
    99.0
    """
    if micro_batches % 2:
        return (micro_batches + 1) * (compute + transfer)
    return micro_batches * (compute + transfer) + compute


def eager_seconds(stages: int, micro_batches: int, compute: float, seconds: float, delay: float = 0.0) -> float:
    """Eager-1F1B: T = (m − 1)·max(c, x) + (p − 1)·(c + 2·t_c) + c, the line's latency paid once.

    This is optimal. It is exact on two stages, and if the line has a quarter to spare (x ≤ ¾·c); otherwise each stage
    between the first and the last may cost up to one max(c, x) more, once, because lists run in order.

    >>> eager_seconds(2, 16, 3.0, 3.0)
    57.0
    """
    if stages == 1:
        return micro_batches * compute
    fill = (stages - 1) * (compute + 2 * (seconds + delay)) + compute
    return (micro_batches - 1) * max(compute, seconds) + fill


def zero_bubble_seconds(stages: int, micro_batches: int, forward: float, backward: float, weights: float) -> float:
    """Zero-bubble over free links: T = m·c + (p − 1)·(t_B + max(t_F − t_W, 0)), for t_W ≤ t_B and m ≥ p.

    c = t_F + t_B + t_W: a backward in two parts. Of three equal parts a third of the bubble of 1F1B is left.

    >>> zero_bubble_seconds(4, 8, 1.0, 1.0, 1.0), free_link_seconds(4, 8, 3.0)
    (27.0, 33.0)
    """
    compute = forward + backward + weights
    return micro_batches * compute + (stages - 1) * (backward + max(forward - weights, 0.0))


def best_blocking(stages: int, batch_compute: float, overhead: float, delay: float) -> float:
    """The best m for `blocking_seconds` with the batch fixed: √((p − 1)·C / (o + 2·(p − 1)·λ)).

    The slowest stage computes C for the whole batch and o for each micro-batch: c = C/m + o.

    >>> round(best_blocking(2, 4.0, 0.003, 0.03), 1)
    8.0
    """
    return math.sqrt((stages - 1) * batch_compute / (overhead + 2 * (stages - 1) * delay))


def best_eager(stages: int, batch_compute: float, overhead: float, batch_seconds: float) -> float:
    """The best m for `eager_seconds` with the batch fixed, where one direction carries it in X = V/β seconds.

    Bound by compute it is √((p − 1)·(C + 2·X) / o). Bound by the line (C/m + o < X/m) more is always better,
    up to m = (X − C)/o, where compute takes over; so the larger of the two.

    >>> round(best_eager(2, 4.0, 0.003, 4.0), 1)
    63.2
    """
    computing = math.sqrt((stages - 1) * (batch_compute + 2 * batch_seconds) / overhead)
    return max(computing, (batch_seconds - batch_compute) / overhead)
