"""The last resolver: nothing says where workers are, so there is one, and it is here."""

from __future__ import annotations

from collections.abc import Mapping

from whale_nebula.config import Config
from whale_nebula.launch.resolve.placement import ANY, Asked, Declined, Placement, one_worker, own_cluster


def from_localhost(config: Config, environ: Mapping[str, str], asked: Asked) -> Placement | Declined:
    """One worker of one cluster on this machine.

    >>> from_localhost(Config(), {}, Asked())
    Placement(here=('local/0',), addresses={'local/0': '127.0.0.1:0'})
    """
    if len(config.clusters) > 1:
        return Declined("the config has several clusters; --all starts them all on this machine")
    cluster = own_cluster(config, asked)
    worker = f"{cluster}/{one_worker(cluster, asked, 1, 0)}"
    return Placement((worker,), {worker: ANY})
