"""Elastic number of workers of each cluster, within the limits of the config.

If several launchers start workers, whether of one cluster or of several, each decides on its own workers. The launcher
of one worker, the anchor, decides which workers of other launchers the run continues without. Workers learn the
decisions of other launchers at the rendezvous or with a step, and report them to their own when they leave. Every group
that continues contains the anchor, so there are never two such groups.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from whale_nebula.config import Config
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, OptionError
from whale_nebula.errors.text import list_counts, list_names
from whale_nebula.launch.job import Result
from whale_nebula.launch.membership import find_anchor, index_of, limit_workers, list_members, select_workers
from whale_nebula.launch.placement import Placement
from whale_nebula.launch.restarts import Failure
from whale_nebula.plain import write_json


@dataclass
class Membership:
    """The workers that take part in a run: those of the present start (`running`), and of the next one (`requested`).

    `needed` are absent workers with state that no other has. The numbers requested here (`pending_counts`) apply once
    workers have announced them to those of other launchers: they are written to the file `path`, which workers read and
    announce with a step, until all have agreed on them. Without the worker `anchor`, a run of several launchers never
    continues.
    """

    config: Config
    placement: Placement
    path: str | None = None
    anchor: str | None = None
    running: frozenset[str] = frozenset()
    requested: frozenset[str] = frozenset()
    needed: set[str] = field(default_factory=set)
    pending_counts: dict[str, int] = field(default_factory=dict)
    _suspects: frozenset[str] = frozenset()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        everyone, limits = self.placement.addresses, self.config.elastic
        self.has_others = len(self.placement.here) < len(everyone)
        self.anchor = find_anchor(everyone, limits) if self.has_others else None
        self._check_limits()
        self._check_anchor()
        first = limit_workers(everyone, everyone, everyone, limits, self.anchor)
        self.running = self.requested = self._limit({*first, *self.placement.here}, first)

    def _check_limits(self) -> None:
        """Refuse limits that the workers or the other options do not permit."""
        leaving = next((name for name, limits in self.config.elastic.items() if not limits.least), None)
        if leaving is not None and self.config.private:
            raise ConfigError(
                f"elastic cluster {leaving!r} has min: 0 in a run with private inputs, results or weights",
                where=f"elastic.{leaving}.min",
                why="without it, no other cluster could continue with what only this cluster has",
                mend=f"elastic: {{{leaving}: {{min: 1}}}}, or remove 'inputs', 'results' and 'weights'",
            )
        for name, limits in self.config.elastic.items():
            listed = len(list_members(self.placement.addresses, name))
            if limits.most > listed:
                raise ConfigError(
                    f"elastic cluster {name!r} has max: {limits.most}, but {listed} workers are listed",
                    where=f"elastic.{name}",
                    why="every worker that may join needs an address",
                    mend=f"elastic: {{{name}: {{min: {limits.least}, max: {listed}}}}}, or list more workers",
                )

    def _limit(self, chosen: Collection[str], running: Collection[str]) -> frozenset[str]:
        """The chosen workers, within the limits of their clusters."""
        here, everyone = self.placement.here, self.placement.addresses
        own = here if self.has_others and self.anchor not in here else ()
        return limit_workers(running, chosen, everyone, self.config.elastic, self.anchor, own)

    def _check_anchor(self) -> None:
        """Refuse a run of several launchers without an anchor."""
        if self.has_others and self.config.elastic and self.anchor is None:
            first = cluster_of(next(iter(self.placement.addresses)))
            raise ConfigError(
                "all clusters have min: 0 in a run with several launchers",
                where="elastic",
                why="clusters that lose their connection would continue as separate runs",
                mend=f"elastic: {{{first}: {{min: 1}}}}: that cluster always runs, and clusters that lose it wait",
            )

    def _count(self, workers: Iterable[str]) -> dict[str, int]:
        found = Counter(map(cluster_of, workers))
        return {cluster: found[cluster] for cluster in self.placement.clusters}

    @property
    def current_counts(self) -> dict[str, int]:
        """The number of running workers of each cluster."""
        return self._count(self.running)

    @property
    def requested_counts(self) -> dict[str, int]:
        """The number of workers of each cluster in the next start."""
        return self._count(self.requested)

    def request_counts(self, counts: Mapping[str, int]) -> bool:
        """Request numbers of workers of clusters; returns whether they differ from the running ones."""
        for cluster, count in counts.items():
            self._check_count(cluster, count)
        with self._lock:
            if not any({**self.requested_counts, **self.pending_counts, **counts}.values()):
                raise OptionError("the request leaves no worker in any cluster", mend=f"{next(iter(counts))}=1")
            self.pending_counts = {**self.pending_counts, **counts}
            if not self.has_others:
                self.requested = select_workers(self.requested, self.placement.addresses, counts)
            self._write_request()
            return bool(self._list_open_requests())

    def _list_open_requests(self) -> dict[str, int]:
        """The requested numbers that differ from the running ones."""
        current = self.current_counts
        return {name: count for name, count in self.pending_counts.items() if count != current[name]}

    def _write_request(self) -> None:
        """Write the request to a file, which workers read and announce with their next step."""
        if self.path is not None:
            write_json(self.path, self._list_open_requests())

    def adopt_counts(self, result: Result) -> str:
        """Adopt the workers that workers have announced and, if they took no step to announce it, the request made
        here; returns a sentence if something changes. Clusters of other launchers that the workers have lost, and went
        on without, have no workers unless these were announced.
        """
        everyone, limits = self.placement.addresses, self.config.elastic
        announced: dict[str, int] = {}
        self._remove_missed({name for each in result.outcomes.values() for name in each.status.missed or ()})
        for outcome in result.outcomes.values():
            needs = everyone.keys() & set(outcome.status.needs or ())
            self.needed |= needs
            announced.update({**(outcome.status.counts or {}), **dict.fromkeys(needs, 1)})
        with self._lock:
            if result.trained is None and result.culprit is not None:
                announced = {**self.pending_counts, **announced}
            counts = {name: count for name, count in announced.items() if name in everyone or name in limits}
            self.requested = self._limit(select_workers(self.requested, everyone, counts), self.requested)
            return self.describe_change() if announced else ""

    def _remove_missed(self, clusters: set[str]) -> None:
        """Remove the workers of these clusters, if they may leave and belong to other launchers, from both starts."""
        leaving = {name for name in clusters & self.config.elastic.keys() if not self.config.elastic[name].least}
        missed = {worker for worker in self.placement.addresses if cluster_of(worker) in leaving}
        with self._lock:
            self.running -= missed - set(self.placement.here)
            self.requested -= missed - set(self.placement.here)

    def describe_change(self) -> str:
        """A sentence on the workers of the next start, if they change."""
        if self.requested == self.running:
            return ""
        counts = self.requested_counts
        odd = [worker for worker in self.placement.addresses if self._is_odd_absence(worker, counts)]
        return f"the run continues {list_counts({**counts, **dict.fromkeys(odd, 0)})}"

    def _is_odd_absence(self, worker: str, counts: Mapping[str, int]) -> bool:
        """Whether a worker will be absent although later ones of its cluster run."""
        return worker not in self.requested and index_of(worker) < counts[cluster_of(worker)]

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
        """Record the worker that failed first in a start, or the workers of other launchers that were missed; the start
        got further than those before (`progressed`) or not. Those that fail or are missed again without progress are
        excluded from the next start, if the run may continue without them and this launcher decides on them. Returns a
        sentence on it.
        """
        if progressed:
            self.needed, self._suspects = set(), frozenset()
        missed = failure.lost - set(self.placement.here)
        if self.has_others and failure.follows and not missed:
            return ""
        blamed = frozenset(missed or {failure.worker})
        repeated, self._suspects = bool(blamed & self._suspects), blamed
        if not repeated or not self._may_exclude(blamed):
            return ""
        self._suspects = frozenset()
        with self._lock:
            self.requested -= blamed
        counts = self.requested_counts
        ends = [
            f"{cluster} continues with {counts[cluster]}" if counts[cluster] else f"the run continues without {cluster}"
            for cluster in dict.fromkeys(map(cluster_of, sorted(blamed)))
        ]
        return f"{', '.join(sorted(blamed))} did not recover: {', '.join(ends)}"

    def _may_exclude(self, workers: frozenset[str]) -> bool:
        """Whether the next start may exclude these workers: this launcher decides on them, no other worker needs their
        state, a worker of this launcher is left, and the limits permit it.
        """
        left = self.requested - workers
        decides = self.anchor in self.placement.here or workers <= set(self.placement.here)
        return (
            decides
            and workers <= self.requested
            and not workers & self.needed
            and any(worker in left for worker in self.placement.here)
            and self._limit(left, self.requested) == left
        )

    @property
    def is_leaving(self) -> bool:
        """Whether this launcher leaves the run: the next start has none of its workers."""
        return not any(worker in self.requested for worker in self.placement.here)

    def begin_next_start(self) -> Placement:
        """Begin the next start: its workers become the running ones, and are returned as a placement."""
        with self._lock:
            self.running = self.requested
            self.pending_counts = self._list_open_requests()
            self._write_request()
        kept = {worker: address for worker, address in self.placement.addresses.items() if worker in self.running}
        return Placement(tuple(worker for worker in self.placement.here if worker in kept), kept)

    def find_absent(self) -> dict[str, str]:
        """The addresses of absent workers, without which the run continues."""
        return {worker: each for worker, each in self.placement.addresses.items() if worker not in self.running}

    def describe(self) -> Mapping[str, object]:
        """The state for `GET /status`, as JSON."""
        limits = {name: [each.least, each.most] for name, each in self.config.elastic.items()}
        return {
            "workers": self.current_counts,
            "absent": list(self.find_absent()),
            "asked": {**self.requested_counts, **self.pending_counts},
            "limits": limits,
        }
