"""The topology of difference exchange: first workers between clusters, then each to the workers of its own cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whale_nebula.errors import ConfigError
from whale_nebula.ir.program import Apart
from whale_nebula.report.records import LinkReport
from whale_nebula.runtime.run import Run
from whale_nebula.schedule.rounds import shared_out
from whale_nebula.scopes.identity import LOCAL
from whale_nebula.transport.protocol import Key, Link
from whale_nebula.wire.tensor import Bytes

PROGRAMS = 1 << 20
"""What rounds are numbered as is above all numbers of programs: what crosses in them is part of no program."""


@dataclass(frozen=True)
class Ends:
    """One worker's view. `firsts` are the first workers by cluster, in the order in which differences are added.

    `mates` are the other workers of its own cluster: they hold the same weights, so they need no telling of those.
    """

    worker: str
    cluster: str
    firsts: Mapping[str, str]
    links: Mapping[str, Link]
    patience: float
    mates: Sequence[str] = ()
    number: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the worker that speaks for its cluster."""
        return self.firsts[self.cluster] == self.worker

    @property
    def others(self) -> Mapping[str, str]:
        """The first workers of the other clusters."""
        return {cluster: first for cluster, first in self.firsts.items() if cluster != self.cluster}

    @property
    def program(self) -> int:
        """What stands for these rounds where others have the number of a program."""
        return PROGRAMS + self.number

    def tell(self, when: int, fragment: int, data: Bytes, raw: int) -> None:
        """Tell the other clusters; it waits for nobody. What they tell is asked for first: all tell at once, and a link
        holds back who sends much that nobody has asked for.
        """
        for first in self.others.values() if self.leads else ():
            self.links[first].later(self._key(when, fragment, self._place(self.cluster), first, self.worker))
        for cluster, first in self.others.items() if self.leads else ():
            self._send(self._key(when, fragment, self._place(cluster), self.worker, first), data, raw)

    def hear(self, when: int, fragment: int) -> Mapping[str, Bytes]:
        """What the other clusters tell, each by its name."""
        return {cluster: self._receive_from(when, fragment, cluster) for cluster in self.others}

    def give(self, worker: str, data: Bytes) -> None:
        """Before the first round: what another worker is to begin with."""
        self._send(self._key(0, 0, 0, self.worker, worker), data, data.nbytes)

    def given(self, worker: str) -> Bytes:
        """What this one is to begin with, from another worker."""
        return np.asarray(self._receive(self._key(0, 0, 0, worker, self.worker)))

    def _receive_from(self, when: int, fragment: int, cluster: str) -> Bytes:
        place = self._place(self.cluster)
        if self.leads:
            first = self.others[cluster]
            data = np.asarray(self._receive(self._key(when, fragment, place, first, self.worker)))
            for mate in self.mates:
                self._send(self._key(when, fragment, self._place(cluster), self.worker, mate), data, data.nbytes)
            return data
        lead = self.firsts[self.cluster]
        return np.asarray(self._receive(self._key(when, fragment, self._place(cluster), lead, self.worker)))

    @property
    def server(self) -> str:
        """Where the server is, in a run that has one."""
        return next(iter(self.firsts.values()))

    def push(self, when: int, data: Bytes, raw: int) -> None:
        """Give a server what this cluster has gone."""
        if self.leads:
            self._send(self._key(when, 0, self._place(self.cluster), self.worker, self.server), data, raw)

    def pull(self, when: int) -> Bytes:
        """What the server answers; the others of this cluster have it from its first worker."""
        place, first = len(self.firsts), self.firsts[self.cluster]
        source = self.server if self.leads else first
        data = np.asarray(self._receive(self._key(when, 0, place, source, self.worker)))
        self.pass_on(when, data)
        return data

    def pass_on(self, when: int, data: Bytes) -> None:
        """Give the others of this cluster what the server has answered."""
        for mate in self.mates if self.leads else ():
            self._send(self._key(when, 0, len(self.firsts), self.worker, mate), data, data.nbytes)

    def pushed(self, when: int, cluster: str, deadline: float) -> Bytes:
        """At the server: what a cluster has gone."""
        key = self._key(when, 0, self._place(cluster), self.firsts[cluster], self.worker)
        return np.asarray(self.links[key.source].receive(key, deadline))

    def answer(self, when: int, cluster: str, data: Bytes, raw: int) -> None:
        """At the server: answer it."""
        self._send(self._key(when, 0, len(self.firsts), self.worker, self.firsts[cluster]), data, raw)

    def _place(self, cluster: str) -> int:
        return list(self.firsts).index(cluster)

    def _send(self, key: Key, data: Bytes, raw: int) -> None:
        self.links[key.destination].send(key, np.ascontiguousarray(data), raw_bytes=raw)

    def _receive(self, key: Key) -> Any:
        return self.links[key.source].receive(key, self.patience)

    def _key(self, when: int, fragment: int, place: int, source: str, destination: str) -> Key:
        return Key("round", self.program, when, place, -1, fragment, source, destination)

    def sent(self) -> Mapping[str, LinkReport]:
        """What has gone to each other cluster so far, by the name of the link."""
        found = {}
        for cluster, first in self.others.items():
            totals = self.links[first].totals()
            report = LinkReport(totals.payload_bytes, totals.bytes, totals.raw_bytes, totals.frames)
            found[f"{self.cluster}->{cluster}"] = report
        return found


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
