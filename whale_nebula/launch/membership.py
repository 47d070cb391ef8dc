"""The workers with which a run continues, as sets of names: which may be absent, and which a request selects.

One worker, the *anchor*, belongs to every group of workers that continues. Groups that lose their connection can
therefore not both continue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from whale_nebula.config.schema import Elastic, cluster_of


def index_of(worker: str) -> int:
    """The index of a worker in its cluster.

    >>> index_of("gpu/11")
    11
    """
    return int(worker.rpartition("/")[2])


def list_members(workers: Iterable[str], cluster: str) -> list[str]:
    """The workers of a cluster, by their index.

    >>> list_members(["gpu/10", "npu/0", "gpu/2"], "gpu")
    ['gpu/2', 'gpu/10']
    """
    return sorted((worker for worker in workers if cluster_of(worker) == cluster), key=index_of)


def find_anchor(workers: Iterable[str], limits: Mapping[str, Elastic]) -> str | None:
    """The worker without which a run of several launchers never continues: the first of the first cluster with a fixed
    number of workers; otherwise of the first cluster that must have workers. None if every cluster may leave.

    >>> find_anchor(["gpu/0", "gpu/1", "npu/0"], {"gpu": Elastic(1, 2)})
    'npu/0'
    >>> find_anchor(["gpu/0", "gpu/1"], {"gpu": Elastic(1, 2)})
    'gpu/0'
    """
    everyone = list(workers)
    clusters = dict.fromkeys(map(cluster_of, everyone))
    fixed = [cluster for cluster in clusters if cluster not in limits]
    needed = [cluster for cluster in clusters if cluster in limits and limits[cluster].least]
    first = next(iter([*fixed, *needed]), None)
    return None if first is None else list_members(everyone, first)[0]


def select_workers(running: Collection[str], everyone: Collection[str], counts: Mapping[str, int]) -> frozenset[str]:
    """The workers that run after a change: `counts` has 0 or 1 for single workers, and numbers for clusters. A smaller
    number keeps the first of a cluster's running workers; a larger one adds the first of its absent workers.

    >>> everyone = ["gpu/0", "gpu/1", "gpu/2"]
    >>> sorted(select_workers(everyone, everyone, {"gpu/1": 0}))
    ['gpu/0', 'gpu/2']
    >>> sorted(select_workers(["gpu/0", "gpu/2"], everyone, {"gpu": 1}))
    ['gpu/0']
    >>> sorted(select_workers(["gpu/2"], everyone, {"gpu": 2}))
    ['gpu/0', 'gpu/2']
    """
    chosen = {worker for worker in running if counts.get(worker, 1)}
    chosen |= {worker for worker in everyone if counts.get(worker, 0)}
    for cluster in counts.keys() & {cluster_of(worker) for worker in everyone}:
        present = list_members(chosen, cluster)
        others = list_members(set(everyone) - chosen, cluster)
        chosen = chosen.difference(present) | set([*present, *others][: counts[cluster]])
    return frozenset(chosen)


def limit_workers(
    running: Collection[str],
    chosen: Collection[str],
    everyone: Collection[str],
    limits: Mapping[str, Elastic],
    anchor: str | None = None,
    own: Collection[str] = (),
) -> frozenset[str]:
    """The `chosen` workers, within limits: a cluster that would get too few, or lose the anchor, keeps the `running`
    ones; one that would get too many gets running ones first, then others by their index. For a launcher without the
    anchor, its `own` workers are the last; if none of them fits, all are spare, and included: they wait until the
    anchor lets them take part.

    >>> everyone = ["gpu/0", "gpu/1"]
    >>> sorted(limit_workers(everyone, ["gpu/1"], everyone, {"gpu": Elastic(1, 2)}, anchor="gpu/0"))
    ['gpu/0', 'gpu/1']
    >>> one = {"gpu": Elastic(1, 1)}
    >>> [sorted(limit_workers(everyone, everyone, everyone, one, own=own)) for own in ([], ["gpu/1"])]
    [['gpu/0'], ['gpu/0', 'gpu/1']]
    """
    limited: set[str] = set()
    for cluster in dict.fromkeys(map(cluster_of, everyone)):
        before, after = list_members(running, cluster), list_members(chosen, cluster)
        allowed = limits.get(cluster, Elastic(len(before), len(before)))
        if len(after) < allowed.least or (anchor in before and anchor not in after):
            after = list_members({*before, *after}, cluster)
        kept = sorted(after, key=lambda worker: (worker in own, worker not in before))[: allowed.most]
        limited |= {*kept, *(set(after).intersection(own) if not set(kept).intersection(own) else ())}
    return frozenset(limited)
