"""The configuration as typed records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_nebula.config.links import Links

PATIENCE_SECONDS = 120.0
GATEWAY_GRACE_SECONDS = 30.0
SHOWS = ("none", "lines", "live")
"""What may be shown of the steps of a run while it trains."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One process of a cluster: where it listens, its device, and its speed beside that of the others."""

    address: str
    device: str | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A site: its workers, and the gateway through which others reach them."""

    name: str
    workers: tuple[WorkerSpec, ...] = ()
    gateway: str | None = None


@dataclass(frozen=True, slots=True)
class Security:
    """Files of the certificates; `insecure` turns TLS off, and every start says so.

    `revoked` is the deny list, `revoked.json` beside `ca` unless it is given; "none" says that there is none.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    revoked: str | None = None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input that this cluster may leave out of its dataset: its shape (None: unknown) and element type."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Config:
    """All of clusters.yaml; each part has a value that means nothing special.

    >>> Config().patience
    120.0
    """

    run: str | None = None
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    links: Links = field(default_factory=Links)
    security: Security = field(default_factory=Security)
    inputs: Mapping[str, InputSpec] = field(default_factory=dict)
    results: str = "everywhere"
    weights: str = "everywhere"
    patience: float = PATIENCE_SECONDS
    gateway_grace: float = GATEWAY_GRACE_SECONDS
    seed: int | None = None
    plan: tuple[str, ...] = ()
    show: str = SHOWS[0]
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether inputs, results or weights stay in the cluster that has them."""
        return bool(self.inputs) or self.results == "owner" or self.weights == "own"
