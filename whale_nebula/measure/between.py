"""Measure collectives of TensorFlow between two processes of this machine.

`python -m whale_nebula.measure.between SIZE... RUNS` is one of the two processes; the launcher assigns its place.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whale_nebula.errors import StateError
from whale_nebula.hardware.clusters import Collective
from whale_nebula.hardware.measured import RUNS, WARM_UP, fit_line, summarise
from whale_nebula.ir.layout import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from whale_nebula.launch import attach, spawn


class Sizes(NamedTuple):
    """Bytes of whole tensors, and runs with each."""

    bytes: tuple[int, ...]
    runs: int


FULL, QUICK = Sizes((1 << 12, 1 << 16, 1 << 20, 1 << 23), RUNS), Sizes((1 << 10, 1 << 14), 3)
WORKERS = 2
_LIMIT_SECONDS, _PATIENCE = 60.0, 20.0
_NAME = "measure"


@dataclass(frozen=True)
class Among:
    """Seconds of collectives between two workers, and the spread of each kind at its largest tensor."""

    collectives: tuple[Collective, ...]
    spreads: Mapping[str, float]


def measure_collectives(sizes: Sizes = FULL, tell: Callable[[str], None] = lambda text: None) -> Among:
    """Start two processes that reduce, gather and exchange tensors of these sizes with each other."""
    child = ["-m", __name__, *map(str, sizes.bytes), str(sizes.runs)]
    with spawn(child, {f"{_NAME}/{number}": _NAME for number in range(WORKERS)}) as job:
        out = job.wait(_LIMIT_SECONDS).check().outcomes[f"{_NAME}/0"].out
    found: dict[str, list[list[float]]] = json.loads(out.splitlines()[-1])
    made, spreads = [], {}
    for kind, seconds in found.items():
        timed = [summarise(each) for each in seconds]
        line = fit_line([(float(size), each.seconds) for size, each in zip(sizes.bytes, timed, strict=True)])
        made.append(Collective(kind, line.alpha, line.beta, WORKERS))
        spreads[kind] = timed[-1].spread
        tell(f"{kind} of two processes: {line.alpha * 1e3:.3g} ms + {line.beta * 1e9:.3g} ms for each MB")
    return Among(tuple(made), spreads)


def main(words: Sequence[str]) -> None:
    """Run as one of the two processes; writes the seconds of each run, by kind and size."""
    import tensorflow as tf

    from whale_nebula.runtime.replicas.collectives import open_collectives
    from whale_nebula.tf import collectives as tf_collectives

    own = attach()
    if own is None or own.listen is None:
        raise StateError("no launcher has started this process", mend="whale-nebula measure")
    *sizes, runs = map(int, words)
    addresses = {own.worker: own.listen, **own.addresses}
    index = own.workers.index(own.worker)
    joined = open_collectives(index, [addresses[worker] for worker in own.workers], patience=_PATIENCE)
    device = tf_collectives.find_device()
    reduce = functools.partial(tf_collectives.reduce, op="Add")
    halves: dict[str, tuple[Callable[..., Any], int, int]] = {
        ALL_REDUCE: (reduce, 2, 2),
        ALL_GATHER: (tf_collectives.gather, 1, 2),
        ALL_TO_ALL: (tf_collectives.exchange, 2, 4),
    }
    found: dict[str, list[list[float]]] = {kind: [] for kind in halves}
    key = itertools.count(1)
    with joined.explain_failures("measuring the collectives"), tf.device(device):
        for kind, (do, rows, parts) in halves.items():  # each process holds half of a tensor
            for size in sizes:
                x = tf.ones([rows, size // 4 // parts])
                run = tf.function(functools.partial(do, size=WORKERS, group=1, instance=next(key)), autograph=False)
                found[kind].append(_time_alike(run.get_concrete_function(tf.TensorSpec(x.shape)), x, runs))
    sys.stdout.write(f"{json.dumps(found)}\n")


def _time_alike(run: Callable[[Any], Any], x: Any, runs: int) -> list[float]:
    """Seconds of each run, with the same number of calls in both processes."""
    found = []
    for number in range(WARM_UP + runs):
        started = time.perf_counter()
        run(x)
        found += [time.perf_counter() - started] * (number >= WARM_UP)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
