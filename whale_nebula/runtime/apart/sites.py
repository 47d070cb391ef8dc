"""The clusters that train apart, as a run has them: in what order, how fast beside each other, by whom they speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from whale_nebula.errors import ConfigError
from whale_nebula.ir.program import Apart
from whale_nebula.runtime.run import Run
from whale_nebula.schedule.rounds import shared_out
from whale_nebula.scopes.identity import LOCAL


class Sites(NamedTuple):
    """Clusters by name, each with its speed; in several processes also their workers, the first of them first."""

    speeds: Mapping[str, float]
    workers: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which differences are added."""
        return tuple(self.speeds)

    @property
    def shares(self) -> Mapping[str, float]:
        """What each one's difference counts in their mean: as much as it has of the rows."""
        whole = sum(self.speeds.values())
        return {name: speed / whole for name, speed in self.speeds.items()}

    def rows(self, cluster: str, rows: int) -> tuple[int, int]:
        """From which row to which a cluster works on a batch; all work on all of one that has too few for them."""
        if rows < len(self.speeds):
            return 0, rows
        return shared_out(rows, tuple(self.speeds.values()))[self.names.index(cluster)]


def sites_of(apart: Apart, run: Run) -> Sites:
    """The clusters of the layout; where it names none, all that the run has."""
    names = apart.clusters or tuple(run.config.clusters) or tuple(dict.fromkeys(run.workers.values())) or (LOCAL,)
    if not run.alone and run.here().cluster not in names:
        raise ConfigError(
            f"this process is of cluster {run.here().cluster!r}, which nb.cluster leaves out",
            where=apart.where,
            why=f"each of {', '.join(names)} trains a copy, and every process of the run has a part in it",
            mend=f"nb.cluster({[*names, run.here().cluster]!r})",
        )
    speeds = {name: _speed(run, name) for name in names}
    workers = {name: tuple(worker for worker, cluster in run.workers.items() if cluster == name) for name in names}
    absent = next((name for name in names if not run.alone and not workers[name]), None)
    if absent is not None:
        raise ConfigError(
            f"no process runs cluster {absent!r}",
            where=apart.where,
            why=f"the clusters of this run are {', '.join(dict.fromkeys(run.workers.values()))}",
            mend=f"start a worker of {absent!r}, or leave it out of nb.cluster(...)",
        )
    return Sites(speeds, workers)


def _speed(run: Run, cluster: str) -> float:
    """Its workers' speeds together, as the config says; each is 1 where it says nothing."""
    listed = run.config.clusters.get(cluster)
    if listed is not None and listed.workers:
        return sum(worker.speed for worker in listed.workers)
    return float(max(1, list(run.workers.values()).count(cluster)))
