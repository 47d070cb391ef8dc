"""The numbers of workers next to those of an elastic run, and the planning problem of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from whale_nebula.config.schema import Elastic
from whale_nebula.hardware import ClusterInfo, Clusters
from whale_nebula.ir.program import Constraints
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.cluster_costs import Measured, MeasuredBlocks, build_problem
from whale_nebula.planner.problem import Options, Problem
from whale_nebula.planner.space import add_written_stages, pin_blocks


@dataclass(frozen=True)
class PlanningInput:
    """What the planning problem of a program is built from, for any clusters: its layers, the user's options,
    constraints of scopes and codec of crossings, the measured blocks of each cluster, and `homes`, the clusters that
    have an input, by its number, for inputs that some clusters lack. `read_costs` reads the measured blocks of this
    machine, as they are stored by then.
    """

    layers: Layers
    options: Options
    measured: Measured = field(default_factory=dict)
    compress: str | None = None
    constraints: Constraints = field(default_factory=Constraints)
    homes: Mapping[int, frozenset[str]] = field(default_factory=dict)
    read_costs: Callable[[], MeasuredBlocks] | None = None

    def build_problem(self, clusters: Clusters) -> Problem:
        """The planning problem for these clusters."""
        problem = build_problem(self.layers, clusters, self.options, self.measured, self.compress)
        return pin_blocks(add_written_stages(problem, self.layers, self.constraints), self.layers, self.homes)

    def names_cluster(self, cluster: str) -> bool:
        """Whether the scopes or the inputs are bound to a cluster."""
        scopes = (self.constraints.clusters, *(each.clusters for each in self.constraints.stages))
        return any(cluster in names for names in (*scopes, *self.homes.values()))


@dataclass(frozen=True)
class Resize:
    """Numbers of workers that an elastic run may get next: `count` instead of `before` of a `cluster`, and `counts` of
    all.

    >>> Resize("npu", 1, 2, {"gpu": 1, "npu": 1}).text, Resize("npu", 0, 2, {"gpu": 1, "npu": 0}).text
    ('with 1 instead of 2 workers of npu', 'without npu')
    """

    cluster: str
    count: int
    before: int
    counts: Mapping[str, int]

    @property
    def text(self) -> str:
        """The numbers in words."""
        if not self.count:
            return f"without {self.cluster}"
        return f"with {self.count} instead of {self.before} worker{'s' * (self.before != 1)} of {self.cluster}"


@dataclass(frozen=True)
class PlannedResize:
    """A resize with its clusters, and the planning problem for them."""

    resize: Resize
    clusters: Clusters
    problem: Problem


def list_next_resizes(counts: Mapping[str, int], elastic: Mapping[str, Elastic]) -> Iterator[Resize]:
    """The numbers of workers next to the running ones: of each elastic cluster one fewer, none, one more or, if it is
    absent, all. At least one worker remains.

    >>> limits = {"npu": Elastic(0, 3)}
    >>> [resize.text for resize in list_next_resizes({"gpu": 1, "npu": 2}, limits)]
    ['with 1 instead of 2 workers of npu', 'without npu', 'with 3 instead of 2 workers of npu']
    >>> [resize.count for resize in list_next_resizes({"gpu": 1, "npu": 0}, limits)]
    [1, 3]
    """
    for cluster, limits in elastic.items():
        before = counts.get(cluster, 0)
        for count in dict.fromkeys([before - 1, limits.least, before + 1, limits.most]):
            changed = {**counts, cluster: count}
            is_next = abs(count - before) == 1 or not before or not count
            if is_next and count != before and limits.least <= count <= limits.most and any(changed.values()):
                yield Resize(cluster, count, before, changed)


def drop_collectives(clusters: Clusters) -> Clusters:
    """The clusters without the costs of their collectives."""
    made: tuple[ClusterInfo, ...] = tuple(replace(each, collectives=()) for each in clusters.clusters)
    return replace(clusters, clusters=made)
