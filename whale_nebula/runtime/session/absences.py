"""Clusters that may be lost while a run goes on: the errors of the links to their workers do not end it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import NebulaError


class LostLink(NamedTuple):
    """The error of a link, and when it was noticed, by the monotonic clock."""

    error: NebulaError
    noticed_at: float


@dataclass
class Absences:
    """The clusters without which a run goes on if they are lost, and the first error of a link to each lost one.

    Without such `clusters`, no error is tolerated. Whether a lost cluster is absent is decided elsewhere, once for all
    workers; until then its links are skipped. `on_loss` is called with each lost cluster.

    >>> from whale_nebula.errors import DeadlineError
    >>> absences = Absences(frozenset({"npu"}))
    >>> with absences.tolerate("npu/0"):
    ...     raise DeadlineError("no message from worker 'npu/0'")
    >>> absences.find_error("npu").what
    "no message from worker 'npu/0'"
    >>> with contextlib.suppress(DeadlineError), absences.tolerate("gpu/0"):  # it is raised
    ...     raise DeadlineError("no message from worker 'gpu/0'")
    >>> absences.find_error("gpu") is None
    True
    """

    clusters: frozenset[str] = frozenset()
    on_loss: Callable[[str], None] = lambda cluster: None
    _lost: dict[str, LostLink] = field(default_factory=dict)

    @contextlib.contextmanager
    def tolerate(self, worker: str) -> Iterator[None]:
        """Context of an operation on the link to a worker: its error is recorded if the run may go on without its
        cluster, and raised otherwise.
        """
        try:
            yield
        except NebulaError as error:
            cluster = cluster_of(worker)
            if cluster not in self.clusters:
                raise
            loss = LostLink(error, time.monotonic())
            if self._lost.setdefault(cluster, loss) is loss:
                self.on_loss(cluster)

    def find_error(self, cluster: str) -> NebulaError | None:
        """The error by which a cluster was noticed to be lost, if it was."""
        found = self._lost.get(cluster)
        return None if found is None else found.error

    def check_members(self, clusters: Collection[str], patience: float) -> None:
        """Raise if one of these clusters, which were decided to take part, cannot be reached from here for longer than
        the patience in seconds.
        """
        for cluster in clusters:
            found = self._lost.get(cluster)
            if found is not None and time.monotonic() - found.noticed_at > patience:
                raise found.error
