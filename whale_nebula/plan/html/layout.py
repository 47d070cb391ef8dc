"""The layout of a plan's drawing: positions of stages, clusters and arrows, as numbers only.

A stage stands in the column after those that it reads from. Where each cluster has columns of its own the clusters
stand side by side; where they take turns each is a lane from left to right::

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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from whale_nebula.plan.records import PlanBoundary

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

WIDTH, HEIGHT = 236, 128
"""Of a stage."""
_ACROSS, _BETWEEN = 168, 64
"""From one column to the next, and from one stage to the one below it."""
_SIDE, _TOP, _BOTTOM, _APART = 28, 76, 50, 56
"""Room inside a cluster's box, and between two boxes."""
_CHANNEL, _SPARE, _TIE = 40, 18, 34
"""Room for an arrow that passes by other stages, between such arrows and a cluster's name, and for a tie."""


@dataclass(frozen=True)
class Node:
    """A stage, by its number, with its upper left corner."""

    number: int
    x: float
    y: float


@dataclass(frozen=True)
class Box:
    """A cluster."""

    cluster: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Arrow:
    """What crosses from one stage to another; `channel` is the height at which it passes by others, if it must."""

    source: int
    destination: int
    boundaries: tuple[PlanBoundary, ...]
    channel: float | None = None


@dataclass(frozen=True)
class Tie:
    """Variables that the same stages hold; `channel` is the height below the stages at which they are joined."""

    stages: tuple[int, ...]
    names: tuple[str, ...]
    channel: float


@dataclass(frozen=True)
class Drawing:
    """A plan's graph with all its places."""

    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    ties: tuple[Tie, ...]
    width: float
    height: float


def layout(plan: Plan) -> Drawing:
    """Place a plan's graph."""
    return _Layout(plan).drawing()


@dataclass
class _Layout:
    plan: Plan
    channels: Counter[str] = field(default_factory=Counter)

    @cached_property
    def names(self) -> list[str]:
        return list(self.plan.stages)

    @cached_property
    def clusters(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, stage in enumerate(self.plan.stages.values()):
            found.setdefault(stage.cluster, []).append(number)
        return found

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[PlanBoundary]]:
        """Boundaries by the two stages that they join."""
        found: dict[tuple[int, int], list[PlanBoundary]] = {}
        for boundary in self.plan.boundaries:
            for name in boundary.destinations:
                pair = self.names.index(boundary.source), self.names.index(name)
                found.setdefault(pair, []).append(boundary)
        return found

    @cached_property
    def tied(self) -> dict[tuple[int, ...], list[str]]:
        """Tied variables by the stages that hold them."""
        found: dict[tuple[int, ...], list[str]] = {}
        for each in self.plan.tied:
            found.setdefault(tuple(self.names.index(name) for name in each.stages), []).append(each.path)
        return found

    @cached_property
    def columns(self) -> list[int]:
        """The column of each stage: one more than the last of those that it reads from."""
        found = [0] * len(self.names)
        for source, destination in sorted(self.pairs, key=lambda pair: pair[1]):
            found[destination] = max(found[destination], found[source] + 1)
        return found

    @cached_property
    def side_by_side(self) -> bool:
        """Whether no two clusters share a column."""
        spans = sorted((min(at), max(at)) for at in self._columns_of.values())
        return all(before[1] < after[0] for before, after in pairwise(spans))

    @cached_property
    def _columns_of(self) -> dict[str, list[int]]:
        return {name: [self.columns[number] for number in numbers] for name, numbers in self.clusters.items()}

    @cached_property
    def tops(self) -> dict[str, float]:
        """The upper edge of each cluster's box."""
        found, top = {}, 0.0
        for cluster in self.clusters:
            found[cluster] = top
            top += 0.0 if self.side_by_side else self._height(cluster) + _APART
        return found

    def drawing(self) -> Drawing:
        """Everything with its place."""
        passing = [pair for pair in self.pairs if self.columns[pair[1]] - self.columns[pair[0]] > 1]
        for _, destination in passing:
            self.channels[self._lane(destination)] += 1
        nodes = tuple(self._node(number) for number in range(len(self.names)))
        boxes = tuple(self._box(cluster, nodes) for cluster in self.clusters)
        used: Counter[str] = Counter()
        arrows = tuple(self._arrow(pair, pair in passing, used) for pair in sorted(self.pairs, key=self._span))
        ties = tuple(self._tie(stages, nodes) for stages in self.tied)
        width, height = max(box.x + box.width for box in boxes), max(box.y + box.height for box in boxes)
        return Drawing(nodes, boxes, arrows, ties, width, height)

    def _tie(self, stages: tuple[int, ...], nodes: Sequence[Node]) -> Tie:
        """Below the stages of the first one's lane."""
        lane = self._lane(stages[0])
        cluster = self.plan.stages[self.names[stages[0]]].cluster
        own = [node for node in nodes if lane == "" or self.plan.stages[self.names[node.number]].cluster == cluster]
        same = [other for other in self.tied if self._lane(other[0]) == lane]
        bottom = max(node.y for node in own) + HEIGHT
        return Tie(stages, tuple(self.tied[stages]), bottom + _BOTTOM + _TIE * (same.index(stages) + 0.5))

    def _span(self, pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        """Short arrows first: long ones pass above them."""
        return self.columns[pair[1]] - self.columns[pair[0]], pair

    def _lane(self, number: int) -> str:
        """What an arrow to a stage passes above: its cluster's lane, or all clusters where they are side by side."""
        stage = self.plan.stages[self.names[number]]
        return "" if self.side_by_side else stage.cluster

    def _room(self, cluster: str) -> float:
        """Room above the stages of a cluster for arrows that pass by."""
        count = self.channels["" if self.side_by_side else cluster]
        return _CHANNEL * count + _SPARE * bool(count)

    def _below(self, cluster: str) -> float:
        """Room below the stages of a cluster for ties."""
        lane = "" if self.side_by_side else cluster
        return _TIE * sum(self._lane(stages[0]) == lane for stages in self.tied)

    def _height(self, cluster: str) -> float:
        most = max(Counter(self._columns_of[cluster]).values())
        return _TOP + self._room(cluster) + most * HEIGHT + (most - 1) * _BETWEEN + _BOTTOM + self._below(cluster)

    def _x(self, column: int) -> float:
        """Side by side, each cluster's box takes room of its own."""
        x = _SIDE + column * (WIDTH + _ACROSS)
        if self.side_by_side:
            starts = sorted(min(at) for at in self._columns_of.values())
            x += sum(_SIDE for start in starts[1:] if start <= column)
        return x

    def _node(self, number: int) -> Node:
        cluster = self.plan.stages[self.names[number]].cluster
        column = self.columns[number]
        above = [n for n in self.clusters[cluster] if n < number and self.columns[n] == column]
        y = self.tops[cluster] + _TOP + self._room(cluster) + len(above) * (HEIGHT + _BETWEEN)
        return Node(number, self._x(column), y)

    def _box(self, cluster: str, nodes: Sequence[Node]) -> Box:
        own = [nodes[number] for number in self.clusters[cluster]]
        if self.side_by_side:
            left, right = min(node.x for node in own), max(node.x for node in own)
            height = max(self._height(each) for each in self.clusters)
            return Box(cluster, left - _SIDE, 0.0, right - left + WIDTH + 2 * _SIDE, height)
        right = max(node.x for node in nodes)
        return Box(cluster, 0.0, self.tops[cluster], right + WIDTH + _SIDE, self._height(cluster))

    def _arrow(self, pair: tuple[int, int], passes: bool, used: Counter[str]) -> Arrow:
        source, destination = pair
        channel = None
        if passes:
            lane = self._lane(destination)
            cluster = self.plan.stages[self.names[destination]].cluster
            used[lane] += 1
            room = self.tops[cluster] + _TOP + self._room(cluster)
            channel = room - 46 - _CHANNEL * (used[lane] - 0.5)
        return Arrow(source, destination, tuple(self.pairs[pair]), channel)
