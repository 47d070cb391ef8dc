"""The cost of a step: its workers by the hour, and what crossed by the byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from whale_nebula.hardware import Clusters
from whale_nebula.report.records import LinkReport

_HOUR = 3600.0
_GB = 1e9


@dataclass(frozen=True)
class StepCost:
    """The cost of a step of so many `rows`, in the currency of the config: of all workers of the run for its seconds,
    and of the bytes that crossed.

    >>> found = StepCost(workers=0.003, links=0.001, rows=32)
    >>> found.total, found.per_sample
    (0.004, 0.000125)
    """

    workers: float
    links: float
    rows: int

    @property
    def total(self) -> float:
        """The cost of the step."""
        return self.workers + self.links

    @property
    def per_sample(self) -> float:
        """The cost of a row."""
        return self.total / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        share = f" ({100 * self.links / self.total:.0f} % of it for what crosses)" if self.links else ""
        return f"{self.total:.3g} a step{share}, {1e6 * self.per_sample:.3g} for a million samples"


@dataclass(frozen=True)
class Prices:
    """The prices of a run: of all its workers for a second, and of a byte on each link, "gpu->npu"."""

    second: float
    byte: Mapping[str, float]

    @classmethod
    def of(cls, clusters: Clusters) -> Self | None:
        """The prices in a cluster object; None where it has none. A worker without a price costs nothing."""
        hours = [worker.device.price_per_hour for worker in clusters.workers]
        byte = {f"{a}->{b}": link.cost_per_gb / _GB for (a, b), link in clusters.links.items() if link.cost_per_gb}
        if not byte and all(price is None for price in hours):
            return None
        return cls(sum(price or 0.0 for price in hours) / _HOUR, byte)

    def of_step(self, seconds: float, links: Mapping[str, LinkReport], rows: int) -> StepCost:
        """The cost of a step.

        >>> Prices(0.001, {"gpu->npu": 1e-9}).of_step(2.0, {"gpu->npu": LinkReport(bytes=10**6)}, 32)
        StepCost(workers=0.002, links=0.001, rows=32)
        """
        crossed = sum(self.byte.get(name, 0.0) * link.bytes for name, link in links.items())
        return StepCost(self.second * seconds, crossed, rows)
