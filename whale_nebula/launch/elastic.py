"""Elastic number of workers of each cluster, within the limits of the config.

If several launchers start workers, each decides the numbers for the clusters that it starts. Workers report the numbers
of other clusters to their launchers when they leave or at the rendezvous. A cluster that is never absent belongs to
every group that continues, so there are never two such groups.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_nebula.config import Config
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, NotYetError, OptionError
from whale_nebula.errors.text import list_counts, list_names
from whale_nebula.launch.job import Result
from whale_nebula.launch.placement import Placement
from whale_nebula.launch.restarts import Failure
from whale_nebula.plain import write_json

_MOST_FAILURES = 2
"""The number of consecutive starts in which a worker may fail first before it is excluded."""


@dataclass
class Sizes:
    """The number of workers of each cluster: `current_counts`, and as requested (`requested_counts`), which applies
    from the next start on.

    `configured_counts` are the numbers in the config, `needed_clusters` the clusters with state that no other has. The
    request made here (`pending_counts`) applies once workers have announced it to those of other launchers: it is
    written to the file `path`, which workers read and announce with a step, until all have agreed on it.
    """

    config: Config
    placement: Placement
    path: str | None = None
    configured_counts: dict[str, int] = field(default_factory=dict)
    needed_clusters: set[str] = field(default_factory=set)
    requested_counts: dict[str, int] = field(default_factory=dict)
    pending_counts: dict[str, int] = field(default_factory=dict)
    current_counts: dict[str, int] = field(default_factory=dict)
    _failed_names: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.configured_counts = dict(Counter(map(cluster_of, self.placement.addresses)))
        self.current_counts, self.requested_counts = dict(self.configured_counts), dict(self.configured_counts)
        self.own_clusters = set(map(cluster_of, self.placement.here))
        self._check_launchers()
        leaving = next((name for name, limits in self.config.elastic.items() if not limits.least), None)
        if leaving is not None and self.config.private:
            raise ConfigError(
                f"elastic cluster {leaving!r} has min: 0 in a run with private inputs, results or weights",
                where=f"elastic.{leaving}.min",
                why="without it, no other cluster could continue with what only this cluster has",
                mend=f"elastic: {{{leaving}: {{min: 1}}}}, or remove 'inputs', 'results' and 'weights'",
            )
        for name, limits in self.config.elastic.items():
            listed = self.configured_counts.get(name, 0)
            if limits.most > listed:
                raise ConfigError(
                    f"elastic cluster {name!r} has max: {limits.most}, but {listed} workers are listed",
                    where=f"elastic.{name}",
                    why="every worker that may join needs an address",
                    mend=f"elastic: {{{name}: {{min: {limits.least}, max: {listed}}}}}, or list more workers",
                )

    def _check_launchers(self) -> None:
        """Refuse options that are not supported if several launchers start workers."""
        torn = next(
            (c for c in self.config.elastic if 0 < self._count_here(c) < self.configured_counts.get(c, 0)), None
        )
        if torn is not None:
            raise NotYetError(
                f"elastic cluster {torn!r} with workers of several launchers",
                where=f"elastic.{torn}",
                why="a single launcher decides how many workers a cluster has",
                mend=f"start all workers of {torn!r} with one command, or remove it from 'elastic'",
            )
        limits = self.config.elastic
        has_others = self.own_clusters != self.configured_counts.keys()
        if limits and has_others and not any(c not in limits or limits[c].least for c in self.configured_counts):
            first = next(iter(self.configured_counts))
            raise ConfigError(
                "all clusters have min: 0 in a run with several launchers",
                where="elastic",
                why="clusters that lose their connection would continue as separate runs",
                mend=f"elastic: {{{first}: {{min: 1}}}}: that cluster always runs, and clusters that lose it wait",
            )

    def _count_here(self, cluster: str) -> int:
        return sum(cluster_of(worker) == cluster for worker in self.placement.here)

    def request_counts(self, counts: Mapping[str, int]) -> bool:
        """Request numbers of workers of clusters; returns whether they differ from the running ones."""
        for cluster, count in counts.items():
            self._check_count(cluster, count)
        with self._lock:
            if not any({**self.requested_counts, **self.pending_counts, **counts}.values()):
                raise OptionError("the request leaves no worker in any cluster", mend=f"{next(iter(counts))}=1")
            self.pending_counts = {**self.pending_counts, **counts}
            if self.own_clusters == self.configured_counts.keys():
                self.requested_counts = {**self.requested_counts, **counts}
            self._write_request()
            return any(count != self.current_counts[cluster] for cluster, count in self.pending_counts.items())

    def _write_request(self) -> None:
        """Write the request to a file, which workers read and announce with their next step."""
        if self.path is not None:
            write_json(
                self.path,
                {name: count for name, count in self.pending_counts.items() if count != self.current_counts[name]},
            )

    def adopt_counts(self, result: Result) -> str:
        """Adopt the numbers of workers that workers have announced and, if they took no step to announce it, the
        request made here; returns a sentence if something changes. Clusters of other launchers that the workers have
        lost, and went on without, have no workers unless these were announced.
        """
        announced: dict[str, int] = {}
        self._remove_missed({name for each in result.outcomes.values() for name in each.status.missed or ()})
        for outcome in result.outcomes.values():
            needs = self.config.elastic.keys() & set(outcome.status.needs or ())
            self.needed_clusters |= needs
            announced.update(
                {**(outcome.status.counts or {}), **{name: self.configured_counts[name] for name in needs}}
            )
        with self._lock:
            if result.trained is None and result.culprit is not None:
                announced = {**self.pending_counts, **announced}
            for cluster, count in announced.items():
                limits = self.config.elastic.get(cluster)
                if limits is not None:
                    self.requested_counts[cluster] = min(max(count, limits.least), limits.most)
            return self.describe_change() if announced else ""

    def _remove_missed(self, clusters: set[str]) -> None:
        with self._lock:
            for cluster in clusters & self.config.elastic.keys() - self.own_clusters:
                if not self.config.elastic[cluster].least:
                    self.current_counts[cluster] = self.requested_counts[cluster] = 0

    def describe_change(self) -> str:
        """A sentence on the numbers of workers of the next start, if they change."""
        return (
            ""
            if self.requested_counts == self.current_counts
            else f"the run continues with {list_counts(self.requested_counts)}"
        )

    def _check_count(self, cluster: str, count: int) -> None:
        limits = self.config.elastic.get(cluster)
        if limits is None:
            known = list_names(self.config.elastic) if self.config.elastic else "none"
            most = max(1, self.current_counts.get(cluster, 1))
            raise OptionError(
                f"the number of workers of {cluster!r} cannot change",
                why=f"clusters whose number may change: {known}",
                mend=f"elastic: {{{cluster}: {{min: 1, max: {most}}}}} in the config",
            )
        if not limits.least <= count <= limits.most:
            raise OptionError(
                f"{count} workers requested for cluster {cluster!r}, which may have {limits.least} to {limits.most}",
                mend=f"{cluster}={min(max(count, limits.least), limits.most)}",
            )

    def note_failure(self, failure: Failure, progressed: bool = False) -> str:
        """Record the first worker that failed in a start, which got further than those before (`progressed`) or not. A
        worker that fails repeatedly without progress is excluded from the next start, if its cluster may run without
        it; so is the whole cluster of a worker that another launcher should have started. Returns a sentence on it.
        """
        missed = cluster_of(failure.lost) if failure.lost else ""
        away = missed in self.configured_counts and missed not in self.own_clusters
        worker = failure.lost if away else failure.worker
        self.needed_clusters = set() if progressed else self.needed_clusters
        who = missed if away else worker  # of a lost site any worker may be missed first
        before = [] if progressed else self._failed_names[-1:]
        self._failed_names = [*self._failed_names, who] if who in before else [who]
        cluster = cluster_of(worker)
        limits = self.config.elastic.get(cluster)
        left = 0 if away else self.requested_counts[cluster] - 1
        last = sum(self.requested_counts.values()) == 1 or cluster in self.needed_clusters
        if (
            len(self._failed_names) < _MOST_FAILURES
            or limits is None
            or left < limits.least
            or self.requested_counts[cluster] == 0
            or last
        ):
            return ""
        self._failed_names = []
        with self._lock:
            self.requested_counts[cluster] = left
        words = f"{cluster} continues with {left}" if left else f"the run continues without {cluster}"
        return f"{worker} did not recover: {words}"

    def select_placement(self) -> Placement:
        """The workers of the next start: of each cluster the first ones."""
        with self._lock:
            self.current_counts = dict(self.requested_counts)
            self.pending_counts = {
                cluster: count
                for cluster, count in self.pending_counts.items()
                if count != self.current_counts[cluster]
            }
            self._write_request()
        kept = {worker: address for worker, address in self.placement.addresses.items() if self._is_running(worker)}
        return Placement(tuple(worker for worker in self.placement.here if worker in kept), kept)

    def find_absent(self) -> dict[str, str]:
        """The addresses of absent workers, without which the run continues."""
        return {worker: address for worker, address in self.placement.addresses.items() if not self._is_running(worker)}

    def _is_running(self, worker: str) -> bool:
        return int(worker.rpartition("/")[2]) < self.current_counts[cluster_of(worker)]

    def describe(self) -> Mapping[str, object]:
        """The state as JSON."""
        limits = {name: [each.least, each.most] for name, each in self.config.elastic.items()}
        return {
            "workers": dict(self.current_counts),
            "asked": {**self.requested_counts, **self.pending_counts},
            "limits": limits,
        }
