"""Scopes (`nb.cluster`, `nb.stage`, ...): their grammar, options, identity, and the stack of open ones.

`public` holds what a user writes. The rest is for capture: `open_frames`, `add_watcher`, `reenter` and so on.
"""

from whale_nebula.scopes.compressing import apart_of
from whale_nebula.scopes.frames import (
    Frame,
    Watcher,
    add_watcher,
    around,
    cluster_block_of,
    compress_of,
    hold_something,
    impose_frames,
    numbering,
    open_frames,
    pipeline_of,
    reenter,
    replica_of,
    split_of,
    stage_of,
    watched_anew,
    watchers,
)
from whale_nebula.scopes.identity import (
    Numbers,
    check_layout,
    deal_to,
    home_of,
    most_workers,
    own_home,
    two_clusters,
    worker_speeds,
    workers_in,
)
from whale_nebula.scopes.placing import Placement, Rule, SplitRule
from whale_nebula.scopes.public import auto_parallel, cluster, compress, pipeline, replica, split, stage
from whale_nebula.site import Site, calling_site

__all__ = [
    "Frame",
    "Numbers",
    "Placement",
    "Rule",
    "Site",
    "SplitRule",
    "Watcher",
    "add_watcher",
    "apart_of",
    "around",
    "auto_parallel",
    "calling_site",
    "check_layout",
    "cluster",
    "cluster_block_of",
    "compress",
    "compress_of",
    "deal_to",
    "hold_something",
    "home_of",
    "impose_frames",
    "most_workers",
    "numbering",
    "open_frames",
    "own_home",
    "pipeline",
    "pipeline_of",
    "reenter",
    "replica",
    "replica_of",
    "split",
    "split_of",
    "stage",
    "stage_of",
    "two_clusters",
    "watched_anew",
    "watchers",
    "worker_speeds",
    "workers_in",
]
