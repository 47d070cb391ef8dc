"""Measure TensorFlow's collectives between two processes of this machine.

`python -m whale_nebula.measure.collectives SIZE... RUNS` is one of the two processes; the launcher assigns its rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from whale_nebula.errors import StateError
from whale_nebula.hardware.measurements import RUNS
from whale_nebula.launch import attach, spawn

if TYPE_CHECKING:
    from whale_nebula.runtime.replicas.collective_costs import CollectiveCosts


class Sizes(NamedTuple):
    """Bytes of whole tensors, and runs with each."""

    bytes: tuple[int, ...]
    runs: int


FULL, QUICK = Sizes((1 << 12, 1 << 16, 1 << 20, 1 << 23), RUNS), Sizes((1 << 10, 1 << 14), 3)
WORKERS = 2
_LIMIT_SECONDS, _PATIENCE = 60.0, 20.0
_NAME = "measure"


def measure_collectives(sizes: Sizes = FULL, report: Callable[[str], None] = lambda text: None) -> CollectiveCosts:
    """Measure collectives between two processes, which this starts; `report` receives a line for each collective."""
    from whale_nebula.runtime.replicas.collective_costs import fit_collectives

    child = ["-m", __name__, *map(str, sizes.bytes), str(sizes.runs)]
    with spawn(child, {f"{_NAME}/{number}": _NAME for number in range(WORKERS)}) as job:
        out = job.wait(_LIMIT_SECONDS).check().outcomes[f"{_NAME}/0"].out
    found = fit_collectives(json.loads(out.splitlines()[-1]), sizes.bytes, WORKERS)
    for each in found.collectives:
        report(str(each))
    return found


def main(words: Sequence[str]) -> None:
    """Run as one of the two processes; writes the seconds of each run, by kind and size."""
    from whale_nebula.runtime.replicas.collective_costs import time_collectives
    from whale_nebula.runtime.replicas.collectives import open_collectives

    attachment = attach()
    if attachment is None or attachment.listen is None:
        raise StateError("this process was not started by a launcher", mend="run whale-nebula measure")
    *sizes, runs = map(int, words)
    addresses = {attachment.worker: attachment.listen, **attachment.addresses}
    index = attachment.workers.index(attachment.worker)
    group = open_collectives(index, [addresses[worker] for worker in attachment.workers], patience=_PATIENCE)
    with group.explain_failures("measuring the collectives"):
        seconds = time_collectives(WORKERS, sizes, runs)
    sys.stdout.write(f"{json.dumps(seconds)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
