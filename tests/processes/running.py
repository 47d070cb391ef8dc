"""Starts worker scripts of this folder as the processes of one run, and gives what they told.

They are joined as by `whale-nebula run --all`: over gRPC and mutual TLS, by an authority of their own, directly or
through a gateway for each cluster.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes.telling import told
from whale_nebula.launch import Job, Result, spawn
from whale_nebula.launch.processes import Echo

HERE = Path(__file__).parent
DEADLINE, GRACE, SEED = 90.0, 60.0, 5
BEGINS = "begins: "


@dataclass(frozen=True)
class Ended:
    """How a run ended: what each worker told, in the order of the workers, and the launcher's result."""

    told: Mapping[str, Mapping[str, Any]]
    result: Result

    def all(self, name: str) -> list[Any]:
        """What each worker told under this name."""
        return [things[name] for things in self.told.values()]

    def same(self, name: str) -> Any:
        """What all workers told alike under this name."""
        first, *rest = self.all(name)
        assert all(other == first for other in rest), (name, first, rest)
        return first


@contextlib.contextmanager
def started(
    script: str, workers: int, *arguments: object, gateways: bool = False, echo: Echo | None = None
) -> Iterator[Job]:
    """Run a worker script once in each of the clusters c0, c1 ..."""
    names = {f"c{number}/0": f"c{number}" for number in range(workers)}
    child = ["-m", "whale_nebula.launch.child", str(HERE / "workers" / f"{script}.py")]
    argv = [*child, *map(str, arguments)]
    with spawn(argv, names, seed=SEED, gateways=gateways, echo=echo, silence=DEADLINE) as job:
        yield job


def ended(job: Job, deadline: float = DEADLINE) -> Ended:
    """Wait for the end; whoever fails to come to it is killed."""
    result = job.wait(deadline, grace=GRACE)
    assert not result.late, {name: outcome.err[-3000:] for name, outcome in result.outcomes.items()}
    for name, outcome in result.outcomes.items():
        print(f"---- {name} ended with {outcome.code}\n{outcome.err[-6000:]}")  # pytest shows it where a test fails
    return Ended({name: told(outcome.out) for name, outcome in result.outcomes.items()}, result)


def run(script: str, workers: int, *arguments: object, gateways: bool = False) -> Ended:
    """Start and wait."""
    with started(script, workers, *arguments, gateways=gateways) as job:
        return ended(job)


def several(folder: Path, asked: Mapping[str, Sequence[object]], *, gateways: bool = False) -> Mapping[str, Ended]:
    """Run worker scripts one after the other in the same two processes; how each ended, by its name."""
    words = [json.dumps([name, *map(str, arguments)]) for name, arguments in asked.items()]
    with started("several", 2, folder, *words, gateways=gateways) as job:
        found = ended(job, DEADLINE * len(asked))
    parts = {name: _parts(outcome.out) for name, outcome in found.result.outcomes.items()}
    return {
        script: Ended({worker: told(part.get(script, "")) for worker, part in parts.items()}, found.result)
        for script in asked
    }


def _parts(out: str) -> dict[str, str]:
    """What each script wrote, by its name."""
    pieces = (piece.partition("\n") for piece in out.split(BEGINS)[1:])
    return {name: said for name, _, said in pieces}
