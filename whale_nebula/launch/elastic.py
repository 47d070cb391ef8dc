"""How many workers of each cluster a launcher starts, where the config lets that change while a run goes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_nebula.config import Config
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, NotYetError, OptionError
from whale_nebula.errors.text import list_names
from whale_nebula.launch.placement import Placement

_LOST = 2
"""A worker that fails first in so many starts, one after the other, is not expected to come back."""


@dataclass
class Sizes:
    """The number of workers of each cluster: `now`, and as it is `asked` for, which counts from the next start on."""

    config: Config
    placement: Placement
    asked: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    _failed: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.now = dict(Counter(map(cluster_of, self.placement.addresses)))
        self.asked = dict(self.now)
        if self.config.elastic and set(self.placement.here) != set(self.placement.addresses):
            raise NotYetError(
                "a run whose workers are started by several launchers, and come and go",
                where="elastic",
                why="the others would have to know how many workers there are",
                mend="whale-nebula run --all, or leave 'elastic' out of the config",
            )
        leaving = next((name for name, limits in self.config.elastic.items() if not limits.least), None)
        if leaving is not None and self.config.private:
            raise ConfigError(
                f"cluster {leaving!r} may leave a run in which clusters have inputs, results or weights of their own",
                where=f"elastic.{leaving}.min",
                why="what it alone has nobody else can train with",
                mend=f"elastic: {{{leaving}: {{min: 1}}}}, or leave 'inputs', 'results' and 'weights' out",
            )
        for name, limits in self.config.elastic.items():
            listed = self.now.get(name, 0)
            if limits.most > listed:
                raise ConfigError(
                    f"cluster {name!r} may have {limits.most} workers, and {listed} are listed",
                    where=f"elastic.{name}",
                    why="every worker that may come has an address",
                    mend=f"elastic: {{{name}: {{min: {limits.least}, max: {listed}}}}}, or list more workers",
                )

    def ask(self, counts: Mapping[str, int]) -> bool:
        """Ask for other numbers of workers of clusters; whether these are others than there are."""
        for cluster, count in counts.items():
            self._check_asked(cluster, count)
        with self._lock:
            asked = {**self.asked, **counts}
            if not any(asked.values()):
                raise OptionError("no worker would be left in any cluster", mend=f"{next(iter(counts))}=1")
            self.asked = asked
            return self.asked != self.now

    def _check_asked(self, cluster: str, count: int) -> None:
        limits = self.config.elastic.get(cluster)
        if limits is None:
            known = list_names(self.config.elastic) if self.config.elastic else "none"
            raise OptionError(
                f"the number of workers of {cluster!r} is not to change",
                why=f"clusters whose number may change: {known}",
                mend=f"elastic: {{{cluster}: {{min: 1, max: {max(1, self.now.get(cluster, 1))}}}}} in the config",
            )
        if not limits.least <= count <= limits.most:
            raise OptionError(
                f"cluster {cluster!r} has {limits.least} to {limits.most} workers, and {count} are asked for",
                mend=f"{cluster}={min(max(count, limits.least), limits.most)}",
            )

    def note_failure(self, worker: str, further: bool = False) -> str:
        """A worker has failed first, in a start that got `further` than those before or not. One that does so again and
        again, and comes no further, is left out of the next start, where its cluster may do without it; gives a
        sentence about it.
        """
        before = [] if further else self._failed[-1:]
        self._failed = [*self._failed, worker] if worker in before else [worker]
        cluster = cluster_of(worker)
        limits = self.config.elastic.get(cluster)
        last = sum(self.asked.values()) == 1
        if len(self._failed) < _LOST or limits is None or self.asked[cluster] <= limits.least or last:
            return ""
        self._failed = []
        with self._lock:
            self.asked[cluster] -= 1
        left = (
            f"{cluster} goes on with {self.asked[cluster]}" if self.asked[cluster] else f"it goes on without {cluster}"
        )
        return f"{worker} does not come back: {left}"

    def select(self) -> Placement:
        """The workers of the next start: of each cluster the first ones."""
        with self._lock:
            self.now = dict(self.asked)
        kept = {
            worker: address
            for worker, address in self.placement.addresses.items()
            if int(worker.rpartition("/")[2]) < self.now[cluster_of(worker)]
        }
        return Placement(tuple(worker for worker in self.placement.here if worker in kept), kept)

    def describe(self) -> Mapping[str, object]:
        """What there is, as JSON has it."""
        limits = {name: [each.least, each.most] for name, each in self.config.elastic.items()}
        return {"workers": dict(self.now), "asked": dict(self.asked), "limits": limits}
