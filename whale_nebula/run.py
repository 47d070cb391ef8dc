"""What `nb.init` opens: the clusters, the links between them, and who this process is among them."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale_nebula.config import Config, Links, load, parse_links
from whale_nebula.errors import ConfigError, OptionError
from whale_nebula.launch.attach import Attachment, attach
from whale_nebula.scopes import deal_to


@dataclass(frozen=True)
class Here:
    """Where this process stands: its cluster and worker, whether it leads, and all the clusters there are.

    In one process every cluster is here, and it leads.

    >>> Here("local", "local/0", True, ("gpu", "npu"), alone=True).runs("gpu")
    True
    >>> Here("npu", "npu/0", True, ("gpu", "npu")).runs("gpu")
    False
    """

    cluster: str
    worker: str
    lead: bool
    clusters: tuple[str, ...]
    alone: bool = False

    def runs(self, cluster: str) -> bool:
        """Whether this process runs stages of a cluster; true for every one where there is only one process."""
        return self.alone or cluster == self.cluster


@dataclass
class Run:
    """An open run. `nb.shutdown()` closes it, and so does leaving it as a context manager."""

    config: Config
    links: Links
    seed: int | None = None
    ids: str | Sequence[str] | None = None
    attachment: Attachment | None = None
    clusters: list[str] = field(default_factory=list)
    programs: int = 0
    closers: list[Any] = field(default_factory=list)
    ledger: Any = None
    hosts: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        shutdown()

    @property
    def writes_files(self) -> bool:
        """Whether this process writes what the processes of its host would all write alike: the first does."""
        worker = self.attachment.worker if self.attachment is not None else ""
        same = [name for name, host in self.hosts.items() if host == self.hosts.get(worker)]
        return not same or worker == min(same)

    @property
    def alone(self) -> bool:
        """Whether all clusters live in this process."""
        return self.attachment is None

    @property
    def workers(self) -> Mapping[str, str]:
        """Worker to cluster, for a run of several processes."""
        if self.attachment is None:
            return {}
        return dict(sorted({self.attachment.worker: self.attachment.cluster, **self.attachment.peers}.items()))

    def here(self) -> Here:
        """Where this process stands."""
        if self.attachment is None:
            names = tuple(dict.fromkeys([*self.config.clusters, *self.clusters])) or ("local",)
            return Here("local", "local/0", True, names, alone=True)
        clusters = tuple(dict.fromkeys(self.workers.values()))
        return Here(self.attachment.cluster, self.attachment.worker, self._leads(), clusters)

    def _leads(self) -> bool:
        """The lead is the first worker of the last stage's cluster; before a program is known, of the last one."""
        last_cluster = self.clusters[-1] if self.clusters else list(self.workers.values())[-1]
        last = [worker for worker, cluster in self.workers.items() if cluster == last_cluster]
        return self.attachment is not None and self.attachment.worker == last[0]

    def meet(self, clusters: Sequence[str]) -> None:
        """In one process clusters come to be by being named; in several they must be there."""
        self.clusters = list(dict.fromkeys([*self.clusters, *clusters]))
        missing = [name for name in clusters if self.attachment and name not in self.workers.values()]
        if missing:
            raise ConfigError(
                f"no process runs cluster {missing[0]!r}",
                why=f"the processes of this run are {', '.join(self.workers)}",
                mend=f"start a worker of {missing[0]!r}, or name another cluster in the stage",
            )


_LOCK = threading.RLock()
_run: Run | None = None


def init(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    links: str | Mapping[tuple[str, str], str] | None = None,
    seed: int | None = None,
    ids: str | Sequence[str] | None = None,
) -> Run:
    """Open a run. It is optional: without it all clusters live in this process and links are free.

    `config` is a path to clusters.yaml or the same as a dict; `links` says what the lines are like that join clusters
    of one process; `seed` is the seed that all processes agree on; `ids` names the input by which clusters check
    that they train on the same rows.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    >>> run = nb.init(links="60mbit,20ms")
    >>> run.links.between("gpu", "npu").delay
    0.02
    >>> nb.shutdown()
    """
    global _run
    with _LOCK:
        if _run is not None:
            raise OptionError(
                "a run is open already",
                why="nb.init was called before, or a step or a plan has opened the run with free links",
                mend="call nb.shutdown() first, or open the run once at the top of the script",
            )
        loaded = load(config)
        run = Run(loaded, parse_links(links) if links is not None else loaded.links, seed, ids, attach())
        deal_to(list(loaded.clusters))
        if run.attachment is not None:
            _join(run, run.attachment)
        _run = run
        return run


def _join(run: Run, attachment: Attachment) -> None:
    """Meet the other processes. The line between them is a real one: here is where TensorFlow is needed."""
    from whale_nebula.runtime.joining import join

    run.ledger, run.hosts = join(attachment, run.seed if run.seed is not None else run.config.seed)
    run.closers.append(run.ledger.session.close)
    atexit.register(shutdown)


def shutdown() -> None:
    """Close the run: links end in order, threads go, totals start anew. Without a run it does nothing.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    """
    global _run
    from whale_nebula.report.report import forget

    with _LOCK:
        run, _run = _run, None
        for close in reversed(run.closers if run is not None else []):
            close()
        deal_to([])
        forget()


def report_failure(failure: BaseException) -> None:
    """The script ends by an error that it did not catch: tell the other processes, if there are any."""
    with _LOCK:
        if _run is not None and _run.ledger is not None:
            _run.ledger.session.fail(failure)


def here() -> Here:
    """Where this process stands among the clusters.

    >>> import whale_nebula as nb
    >>> nb.here().lead
    True
    """
    return current_run().here()


def current_run() -> Run:
    """The open run; one without a configuration is opened where there is none."""
    with _LOCK:
        return _run if _run is not None else init()


@contextlib.contextmanager
def gathered() -> Iterator[None]:
    """Hold the whole model for a while: inside, variables of other clusters can be read.

    Every process calls it at the same point. In one process everything is here already, and it does nothing.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> weight = tf.Variable([1.0, 2.0])
    >>> with nb.gathered():
    ...     weight.numpy().tolist()
    [1.0, 2.0]
    """
    run = current_run()
    with contextlib.nullcontext() if run.alone else run.ledger.gathered():
        yield
