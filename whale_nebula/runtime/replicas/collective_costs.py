"""Time TensorFlow's collectives among the workers of a cluster, and fit a line through their seconds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale_nebula.hardware.clusters import Collective
from whale_nebula.hardware.measurements import WARM_UP, fit_line, summarise
from whale_nebula.ir.layout import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from whale_nebula.tf import collectives as tf_collectives

_GROUP_NAME = "measured collectives"
_MIN_SIZES = 2
"""The number of sizes that are always timed: a line needs two."""


@dataclass(frozen=True)
class CollectiveCosts:
    """Costs of collectives among workers, and the spread of each kind at its largest tensor."""

    collectives: tuple[Collective, ...]
    spreads: Mapping[str, float]


def time_collectives(
    workers: int, sizes: Sequence[int], runs: int, goes_on: Callable[[float], bool] = lambda seconds: True
) -> dict[str, list[list[float]]]:
    """Seconds of each run, by kind, and then for each of the `sizes`: bytes of whole tensors, in ascending order. All
    workers of the cluster call it at the same point. `goes_on` is called before each size but the first two, with the
    estimated seconds of its measurement, and must return the same value in all of them.
    """
    found: dict[str, list[list[float]]] = {kind: [] for kind in (ALL_REDUCE, ALL_GATHER, ALL_TO_ALL)}
    taken = 0.0
    with tf.device(tf_collectives.find_device()):
        for number, size in enumerate(sizes):
            if number >= _MIN_SIZES and not goes_on(taken * size / sizes[number - 1]):
                break
            taken = 0.0
            for kind, timed in found.items():
                timed.append(_time_one(kind, workers, size, runs))
                taken += sum(timed[-1])
    return found


def fit_collectives(
    found: Mapping[str, Sequence[Sequence[float]]], sizes: Sequence[int], workers: int
) -> CollectiveCosts:
    """The costs that follow from the seconds of each run, by kind and size."""
    made, spreads = [], {}
    for kind, seconds in found.items():
        timed = [summarise(each) for each in seconds]
        line = fit_line([(float(size), each.seconds) for size, each in zip(sizes, timed, strict=False)])
        beta = line.beta or timed[-1].seconds / sizes[len(timed) - 1]  # lost in noise: at most the time of the largest
        made.append(Collective(kind, line.alpha, beta, workers))
        spreads[kind] = timed[-1].spread
    return CollectiveCosts(tuple(made), spreads)


def _time_one(kind: str, workers: int, size: int, runs: int) -> list[float]:
    """Seconds of each run of one collective, with the same number of calls in all workers; each holds its part of a
    tensor of `size` bytes.
    """
    do, rows, parts = _list_collectives(workers)[kind]
    x = tf.ones([rows, max(size // 4 // parts, 1)])
    key = tf_collectives.hash_key(f"{_GROUP_NAME} {kind} {size}")
    collect = functools.partial(do, size=workers, group=tf_collectives.hash_key(_GROUP_NAME), instance=key)
    run = tf.function(collect, autograph=False).get_concrete_function(tf.TensorSpec(x.shape))
    found = []
    for number in range(WARM_UP + runs):
        started = time.perf_counter()
        run(x)
        if tf.config.list_logical_devices("GPU"):
            tf.test.experimental.sync_devices()
        found += [time.perf_counter() - started] * (number >= WARM_UP)
    return found


def _list_collectives(workers: int) -> dict[str, tuple[Callable[..., Any], int, int]]:
    """By kind: its op, the rows of a worker's tensor, and by which number the bytes of the whole tensor are divided to
    get those of a row.
    """
    return {
        ALL_REDUCE: (functools.partial(tf_collectives.reduce, op="Add"), workers, workers),
        ALL_GATHER: (tf_collectives.gather, 1, workers),
        ALL_TO_ALL: (tf_collectives.exchange, workers, workers**2),
    }
