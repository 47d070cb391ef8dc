"""Resolvers, which find the workers of a run: from a config, or from the platform that started this process."""

from whale_nebula.launch.resolve.chain import CHAIN, Resolved, everything, resolve
from whale_nebula.launch.resolve.placement import ANY, PORT, Asked, Declined, Placement, cluster_of, host_of

__all__ = [
    "ANY",
    "CHAIN",
    "PORT",
    "Asked",
    "Declined",
    "Placement",
    "Resolved",
    "cluster_of",
    "everything",
    "host_of",
    "resolve",
]
