"""The layout of a plan's drawing: positions of stages, clusters and arrows, as numbers only.

A stage is in the column after those of its inputs. If each cluster has columns of its own the clusters are side by
side; if they alternate each is a lane from left to right::

    ┌ gpu ─┐ ┌ npu ─────────┐          ┌ gpu ──────────────┐
    │  0 ──┼─▶ 1 ──▶ 2      │          │  0         2      │
    └──────┘ └──────────────┘          └────┼──────▲───────┘
                                       ┌ npu▼──────┼───────┐
                                       │    1 ─────┘       │
                                       └───────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from whale_nebula.plan.records import PlanBoundary
from whale_nebula.plan.splits import list_device_facts

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

WIDTH, HEIGHT, LINE = 236, 128, 20
"""The width of a stage, its height with up to three lines, and the height of each further line."""
_ACROSS, _BETWEEN = 168, 64
"""The distances between columns, and between a stage and the one below."""
_SIDE, _TOP, _BOTTOM, _APART = 28, 76, 50, 56
"""The margins inside a cluster's box, and between two boxes."""
_CHANNEL, _SPARE, _TIE = 40, 18, 34
"""The space for an arrow that passes other stages, between such arrows and a cluster's name, and for a tie."""


@dataclass(frozen=True)
class Node:
    """A stage, by its number, with its upper left corner."""

    number: int
    x: float
    y: float


@dataclass(frozen=True)
class Box:
    """The box of a cluster."""

    cluster: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Arrow:
    """An arrow for the tensors that cross between two stages; `channel` is the height at which it passes other
    stages, if it must.
    """

    source: int
    destination: int
    boundaries: tuple[PlanBoundary, ...]
    channel: float | None = None


@dataclass(frozen=True)
class Tie:
    """Variables on the same stages; `channel` is the height below the stages of the line that connects them."""

    stages: tuple[int, ...]
    names: tuple[str, ...]
    channel: float


@dataclass(frozen=True)
class Drawing:
    """A plan's graph with all coordinates; all stages have the height of the one with the most text."""

    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    ties: tuple[Tie, ...]
    width: float
    height: float
    tall: float


def layout(plan: Plan) -> Drawing:
    """Place a plan's graph."""
    return _Layout(plan).drawing()


@dataclass
class _Layout:
    """The layout's intermediate values. A lane is a cluster, above whose stages arrows pass, or all if side by side."""

    plan: Plan

    @cached_property
    def tall(self) -> float:
        """The height of a stage."""
        stages = self.plan.stages.values()
        return HEIGHT + LINE * max((sum(1 for _ in list_device_facts(self.plan, stage)) for stage in stages), default=0)

    @cached_property
    def cluster_of(self) -> list[str]:
        """The cluster of each stage, by its number."""
        return [stage.cluster for stage in self.plan.stages.values()]

    @cached_property
    def clusters(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, cluster in enumerate(self.cluster_of):
            found.setdefault(cluster, []).append(number)
        return found

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[PlanBoundary]]:
        """Boundaries by the two stages that they join."""
        names, found = list(self.plan.stages), dict[tuple[int, int], list[PlanBoundary]]()
        for boundary in self.plan.boundaries:
            for name in boundary.destinations:
                found.setdefault((names.index(boundary.source), names.index(name)), []).append(boundary)
        return found

    @cached_property
    def tied(self) -> dict[tuple[int, ...], list[str]]:
        """Tied variables by the stages that hold them."""
        names, found = list(self.plan.stages), dict[tuple[int, ...], list[str]]()
        for each in self.plan.tied:
            found.setdefault(tuple(map(names.index, each.stages)), []).append(each.path)
        return found

    @cached_property
    def columns(self) -> list[int]:
        """The column of each stage: one more than the last of its inputs' columns."""
        found = [0] * len(self.cluster_of)
        for source, destination in sorted(self.pairs, key=lambda pair: pair[1]):
            found[destination] = max(found[destination], found[source] + 1)
        return found

    @cached_property
    def columns_of(self) -> dict[str, list[int]]:
        return {name: [self.columns[number] for number in numbers] for name, numbers in self.clusters.items()}

    @cached_property
    def side_by_side(self) -> bool:
        """Whether no two clusters share a column."""
        spans = sorted((min(at), max(at)) for at in self.columns_of.values())
        return all(before[1] < after[0] for before, after in pairwise(spans))

    def lane(self, cluster: str) -> str:
        return "" if self.side_by_side else cluster

    @cached_property
    def channels(self) -> Counter[str]:
        """The number of arrows that pass other stages in each lane."""
        return Counter(self.lane(self.cluster_of[pair[1]]) for pair in self.pairs if self.span(pair) > 1)

    def span(self, pair: tuple[int, int]) -> int:
        return self.columns[pair[1]] - self.columns[pair[0]]

    @cached_property
    def tops(self) -> dict[str, float]:
        """The upper edge of each cluster's box."""
        found, top = {}, 0.0
        for cluster in self.clusters:
            found[cluster] = top
            top += 0.0 if self.side_by_side else self.height(cluster) + _APART
        return found

    def drawing(self) -> Drawing:
        """All elements with coordinates; short arrows first, as long ones pass above them."""
        nodes = tuple(map(self.node, range(len(self.cluster_of))))
        boxes = tuple(self.box(cluster, nodes) for cluster in self.clusters)
        used: Counter[str] = Counter()
        arrows = []
        for pair in sorted(self.pairs, key=lambda pair: (self.span(pair), pair)):
            channel, cluster = None, self.cluster_of[pair[1]]
            if self.span(pair) > 1:
                used[self.lane(cluster)] += 1
                channel = self.first_row(cluster) - 46 - _CHANNEL * (used[self.lane(cluster)] - 0.5)
            arrows.append(Arrow(*pair, tuple(self.pairs[pair]), channel))
        ties = tuple(self.tie(stages, nodes) for stages in self.tied)
        width, height = max(box.x + box.width for box in boxes), max(box.y + box.height for box in boxes)
        return Drawing(nodes, boxes, tuple(arrows), ties, width, height, self.tall)

    def tie(self, stages: tuple[int, ...], nodes: Sequence[Node]) -> Tie:
        """The tie of these stages, below the stages of the first one's lane."""
        lane = self.lane(self.cluster_of[stages[0]])
        bottom = max(node.y for node in nodes if self.lane(self.cluster_of[node.number]) == lane) + self.tall
        return Tie(stages, tuple(self.tied[stages]), bottom + _BOTTOM + _TIE * (self.ties_in(lane).index(stages) + 0.5))

    def ties_in(self, lane: str) -> list[tuple[int, ...]]:
        return [stages for stages in self.tied if self.lane(self.cluster_of[stages[0]]) == lane]

    def first_row(self, cluster: str) -> float:
        """The top of a cluster's stages, with room above for its name and passing arrows."""
        count = self.channels[self.lane(cluster)]
        return self.tops[cluster] + _TOP + _CHANNEL * count + _SPARE * bool(count)

    def height(self, cluster: str) -> float:
        count, most = self.channels[self.lane(cluster)], max(Counter(self.columns_of[cluster]).values())
        above, below = _TOP + _CHANNEL * count + _SPARE * bool(count), _TIE * len(self.ties_in(self.lane(cluster)))
        return above + most * self.tall + (most - 1) * _BETWEEN + _BOTTOM + below

    def node(self, number: int) -> Node:
        cluster, column = self.cluster_of[number], self.columns[number]
        x = _SIDE + column * (WIDTH + _ACROSS)
        if self.side_by_side:  # otherwise boxes would overlap
            starts = sorted(min(at) for at in self.columns_of.values())
            x += sum(_SIDE for start in starts[1:] if start <= column)
        above = [n for n in self.clusters[cluster] if n < number and self.columns[n] == column]
        return Node(number, x, self.first_row(cluster) + len(above) * (self.tall + _BETWEEN))

    def box(self, cluster: str, nodes: Sequence[Node]) -> Box:
        own = [nodes[number] for number in self.clusters[cluster]]
        if self.side_by_side:
            left, right = min(node.x for node in own), max(node.x for node in own)
            return Box(
                cluster, left - _SIDE, 0.0, right - left + WIDTH + 2 * _SIDE, max(map(self.height, self.clusters))
            )
        right = max(node.x for node in nodes)
        return Box(cluster, 0.0, self.tops[cluster], right + WIDTH + _SIDE, self.height(cluster))
