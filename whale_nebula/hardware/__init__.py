"""The hardware of a run as data: devices, workers, clusters, links between them, and the provenance of numbers."""

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
