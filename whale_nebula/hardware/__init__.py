"""The hardware of a run as data: devices, workers, clusters, the links between them, and where each number is from."""

from whale_nebula.hardware.clusters import (
    ClusterInfo,
    Clusters,
    Collective,
    Device,
    LinkRate,
    Provenance,
    WorkerInfo,
)

__all__ = ["ClusterInfo", "Clusters", "Collective", "Device", "LinkRate", "Provenance", "WorkerInfo"]
