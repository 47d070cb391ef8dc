"""The graph of a plan as SVG: clusters as boxes, stages as cards, boundaries as arrows.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

from whale_nebula.codec.encoding import has_open_size
from whale_nebula.plan.html import Attribute, Markup, element, join_markup
from whale_nebula.plan.records import PlanBoundary, PlanStage
from whale_nebula.plan.splits import list_device_facts
from whale_nebula.plan.text import amount
from whale_nebula.plan.timing import duration
from whale_nebula.report.records import size

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
class TiedCurve:
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
    ties: tuple[TiedCurve, ...]
    width: float
    height: float
    card_height: float


def layout(plan: Plan) -> Drawing:
    """Place a plan's graph."""
    return _Layout(plan).drawing()


@dataclass
class _Layout:
    """The layout's intermediate values. A lane is a cluster, above whose stages arrows pass, or all if side by side."""

    plan: Plan

    @cached_property
    def card_height(self) -> float:
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
        return Drawing(nodes, boxes, tuple(arrows), ties, width, height, self.card_height)

    def tie(self, stages: tuple[int, ...], nodes: Sequence[Node]) -> TiedCurve:
        """The tie of these stages, below the stages of the first one's lane."""
        lane = self.lane(self.cluster_of[stages[0]])
        bottom = max(node.y for node in nodes if self.lane(self.cluster_of[node.number]) == lane) + self.card_height
        return TiedCurve(
            stages, tuple(self.tied[stages]), bottom + _BOTTOM + _TIE * (self.ties_in(lane).index(stages) + 0.5)
        )

    def ties_in(self, lane: str) -> list[tuple[int, ...]]:
        return [stages for stages in self.tied if self.lane(self.cluster_of[stages[0]]) == lane]

    def first_row(self, cluster: str) -> float:
        """The top of a cluster's stages, with room above for its name and passing arrows."""
        count = self.channels[self.lane(cluster)]
        return self.tops[cluster] + _TOP + _CHANNEL * count + _SPARE * bool(count)

    def height(self, cluster: str) -> float:
        count, most = self.channels[self.lane(cluster)], max(Counter(self.columns_of[cluster]).values())
        above, below = _TOP + _CHANNEL * count + _SPARE * bool(count), _TIE * len(self.ties_in(self.lane(cluster)))
        return above + most * self.card_height + (most - 1) * _BETWEEN + _BOTTOM + below

    def node(self, number: int) -> Node:
        cluster, column = self.cluster_of[number], self.columns[number]
        x = _SIDE + column * (WIDTH + _ACROSS)
        if self.side_by_side:  # otherwise boxes would overlap
            starts = sorted(min(at) for at in self.columns_of.values())
            x += sum(_SIDE for start in starts[1:] if start <= column)
        above = [n for n in self.clusters[cluster] if n < number and self.columns[n] == column]
        return Node(number, x, self.first_row(cluster) + len(above) * (self.card_height + _BETWEEN))

    def box(self, cluster: str, nodes: Sequence[Node]) -> Box:
        own = [nodes[number] for number in self.clusters[cluster]]
        if self.side_by_side:
            left, right = min(node.x for node in own), max(node.x for node in own)
            return Box(
                cluster, left - _SIDE, 0.0, right - left + WIDTH + 2 * _SIDE, max(map(self.height, self.clusters))
            )
        right = max(node.x for node in nodes)
        return Box(cluster, 0.0, self.tops[cluster], right + WIDTH + _SIDE, self.height(cluster))


COLORS = 8
_GRAPH, _AFTER = "/* the graph */", "/* panels next to it */"
_FONT = '& { font-family: Inter, "Segoe UI", system-ui, sans-serif; background: var(--sheet); display: block }'
_MARGIN = 24
_LETTER = 6.7
"""The approximate width of a letter of the small size."""
_LETTERS = 28
"""The approximate number of letters on a line of a stage."""


def graph(plan: Plan, *, style: str | None = None) -> Markup:
    """Draw the graph; with its own style it is a standalone picture."""
    return _Graph(plan, layout(plan)).svg(style)


def plan_svg(plan: Plan) -> str:
    """The graph as a standalone SVG with the necessary part of the page's style, scoped so that it does not affect
    other elements, such as a notebook's own `.card`.
    """
    whole = files(__package__).joinpath("plan.css").read_text("utf-8")
    colours = whole.split("\n\n", 1)[0].replace(":root", "&").replace("light dark;", "light;")
    rules = whole.partition(_GRAPH)[2].partition(_AFTER)[0].replace("#graph ", "& ")
    return graph(plan, style=f"#graph {{\n{colours}\n{_FONT}\n{rules}}}\n") + "\n"


def color(plan: Plan, cluster: str) -> int:
    """The number of a cluster's color."""
    clusters = list(dict.fromkeys(stage.cluster for stage in plan.stages.values()))
    return clusters.index(cluster) % COLORS


@dataclass
class _Graph:
    plan: Plan
    drawing: Drawing

    @cached_property
    def stages(self) -> list[PlanStage]:
        return list(self.plan.stages.values())

    def svg(self, style: str | None) -> Markup:
        width, height = self.drawing.width + 2 * _MARGIN, self.drawing.height + 2 * _MARGIN
        alone: dict[str, Attribute] = {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height}
        return element(
            "svg",
            None if style is None else element("style", style),
            _define_markers(),
            element(
                "g",
                [self._box(box) for box in self.drawing.boxes],
                [self._tie(tie) for tie in self.drawing.ties],
                [self._arrow(number, arrow) for number, arrow in enumerate(self.drawing.arrows)],
                [self._stage(node) for node in self.drawing.nodes],
                id="world",
            ),
            **({} if style is None else alone),
            id="graph",
            viewBox=f"{-_MARGIN} {-_MARGIN} {width:g} {height:g}",
            role="group",
            aria_label=f"Graph of stages ({len(self.stages)}) and boundaries ({len(self.plan.boundaries)})",
        )

    def _box(self, box: Box) -> Markup:
        return element(
            "g",
            element("rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=18),
            element("text", "cluster ", element("tspan", box.cluster), x=box.x + 22, y=box.y + 30),
            class_=f"cluster c{color(self.plan, box.cluster)}",
        )

    # ------------------------------------------------------------------ stages
    def _stage(self, node: Node) -> Markup:
        stage, facts, crossing = self.stages[node.number], [], {boundary.name for boundary in self.plan.boundaries}
        height = self.drawing.card_height
        for place, (label, value) in enumerate(_facts(self.plan, stage)):
            y, short = node.y + 56 + LINE * place, _shorten(label, _LETTERS - len(value))
            facts += [
                _text_element(node.x + 26, y, short, "label"),
                _text_element(node.x + WIDTH - 16, y, value, "value end"),
            ]
        return element(
            "g",
            self._pills(node, [leaf for leaf in stage.inputs if leaf not in crossing], above=True),
            self._pills(node, [each for each in stage.outputs if each not in crossing], above=False),
            element("rect", class_="card", x=node.x, y=node.y, width=WIDTH, height=height, rx=12),
            element("rect", class_="edge", x=node.x + 10, y=node.y + 16, width=4, height=height - 32, rx=2),
            _text_element(node.x + 26, node.y + 31, _shorten(stage.name, 17), "name"),
            _text_element(node.x + WIDTH - 16, node.y + 30, f"stage {node.number}", "small end"),
            facts,
            self._load(node, stage),
            class_=f"stage c{color(self.plan, stage.cluster)}",
            data_stage=node.number,
            tabindex=0,
            role="button",
            aria_label=self._stage_title(node.number, stage),
        )

    def _stage_title(self, number: int, stage: PlanStage) -> str:
        facts = ", ".join(f"{label} {value}" for label, value in _facts(self.plan, stage))
        return f"stage {number}, {stage.name}, in cluster {stage.cluster}: {facts}. Enter shows its layers."

    def _load(self, node: Node, stage: PlanStage) -> Markup:
        """The work of a stage relative to the largest."""
        most = max(each.flops for each in self.stages)
        place = {"x": node.x + 26, "y": node.y + self.drawing.card_height - 15, "height": 4, "rx": 2}
        width = round((WIDTH - 42) * stage.flops / most, 1) if most else 0.0
        load = element("rect", class_="load", width=width, **place) if width else None
        return join_markup(element("rect", class_="track", width=WIDTH - 42, **place), load)

    def _pills(self, node: Node, names: list[str], *, above: bool) -> Markup:
        """Labels of the inputs above a stage, or of its results below."""
        shown = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
        x, made, bottom = node.x + 16, [], node.y + self.drawing.card_height
        for name in shown:
            text = _shorten(name, 14)
            width = len(text) * _LETTER + 18
            y = node.y - 34 if above else bottom + 12
            stem = (node.y - 12, node.y) if above else (bottom, bottom + 12)
            made.append(element("path", class_="stem", d=f"M{x + width / 2:g} {stem[0]:g}V{stem[1]:g}"))
            made.append(element("rect", class_="pill", x=x, y=y, width=round(width, 1), height=22, rx=11))
            made.append(_text_element(x + width / 2, y + 15, text, "small middle"))
            x += width + 8
        return join_markup(made)

    # ------------------------------------------------------------------ arrows
    def _arrow(self, number: int, arrow: Arrow) -> Markup:
        crosses = self.stages[arrow.source].cluster != self.stages[arrow.destination].cluster
        a, b = self.drawing.nodes[arrow.source], self.drawing.nodes[arrow.destination]
        there, back, middle = (
            _route_direct(a, b, self.drawing.card_height)
            if arrow.channel is None
            else _route_through_lane(a, b, arrow.channel, self.drawing.card_height)
        )
        returns = any(boundary.backward for boundary in arrow.boundaries)
        return element(
            "g",
            element("path", class_="reach", d=there),
            element("path", class_="back", d=back, marker_end="url(#tip-back)") if returns else None,
            element("path", class_="there", d=there, marker_end="url(#tip)"),
            self._label(arrow, middle, crosses),
            class_="arrow line" if crosses else "arrow",
            data_arrow=number,
            data_from=arrow.source,
            data_to=arrow.destination,
            tabindex=0,
            role="button",
            aria_label=self._arrow_text(arrow),
        )

    def _label(self, arrow: Arrow, middle: tuple[float, float], crosses: bool) -> Markup:
        lines = _list_amounts(arrow, len(self.plan.rows), crosses)
        width = max(map(len, lines)) * _LETTER + 20
        height = 8 + 16 * len(lines)
        x, y = middle[0] - width / 2, middle[1] - height / 2
        return join_markup(
            element("rect", class_="tag", x=round(x, 1), y=y, width=round(width, 1), height=height, rx=9),
            [
                _text_element(middle[0], y + 17 + 16 * place, line, "small middle" if place else "value middle")
                for place, line in enumerate(lines)
            ],
        )

    def _tie(self, tie: TiedCurve) -> Markup:
        """The connection of stages that share variables."""
        nodes = [self.drawing.nodes[number] for number in tie.stages]
        xs = [node.x + WIDTH - 30 for node in nodes]
        legs = [
            f"M{x:g} {node.y + self.drawing.card_height if node.y < tie.channel else node.y:g}V{tie.channel:g}"
            for x, node in zip(xs, nodes, strict=True)
        ]
        text = f"{_shorten(tie.names[0], 24)}, tied" if len(tie.names) == 1 else f"{len(tie.names)} tied variables"
        width, middle = len(text) * _LETTER + 20, (min(xs) + max(xs)) / 2
        return element(
            "g",
            element("path", d=f"{''.join(legs)}M{min(xs):g} {tie.channel:g}H{max(xs):g}"),
            element("rect", class_="tag", x=round(middle - width / 2, 1), y=tie.channel - 12, width=round(width, 1),
                    height=24, rx=9),
            _text_element(middle, tie.channel + 4, text, "small middle"),
            class_="tie",
            data_stages=" ".join(map(str, tie.stages)),
        )  # fmt: skip

    def _arrow_text(self, arrow: Arrow) -> str:
        source, destination = self.stages[arrow.source].name, self.stages[arrow.destination].name
        names = ", ".join(boundary.name for boundary in arrow.boundaries)
        return f"from {source} to {destination}: {names}, {'; '.join(_list_amounts(arrow, len(self.plan.rows), True))}"


def _route_direct(a: Node, b: Node, card_height: float) -> tuple[str, str, tuple[float, float]]:
    """The path from the right side of one stage to the left side of the next."""
    x0, x1 = a.x + WIDTH, b.x
    y0, y1 = a.y + card_height / 2 - 8, b.y + card_height / 2 - 8
    bend = (x1 - x0) * 0.5
    there = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend - 7:g} {y1:g} {x1 - 7:g} {y1:g}"
    z0, z1 = y0 + 34, y1 + 34
    back = f"M{x1:g} {z1:g}C{x1 - bend:g} {z1:g} {x0 + bend + 7:g} {z0:g} {x0 + 7:g} {z0:g}"
    return there, back, ((x0 + x1) / 2, (y0 + y1) / 2)


def _route_through_lane(a: Node, b: Node, channel: float, card_height: float) -> tuple[str, str, tuple[float, float]]:
    """The path from one stage's upper (or lower) side, along a channel, to the other's upper (or lower) side."""
    x0, x1 = a.x + WIDTH - 44, b.x + 120
    y0 = a.y if channel < a.y else a.y + card_height
    y1 = b.y if channel < b.y else b.y + card_height
    tip = -7 if channel < b.y else 7
    there = _draw_path(x0, y0, x1, y1 + tip, channel)
    back = _draw_path(x1 + 16, y1, x0 - 16, y0 + (-7 if channel < a.y else 7), channel - 10)
    return there, back, ((x0 + x1) / 2, channel)


def _draw_path(x0: float, y0: float, x1: float, y1: float, channel: float) -> str:
    turn = 22 if x1 > x0 else -22
    up, down = (-22 if channel < y0 else 22), (-22 if channel < y1 else 22)
    return (
        f"M{x0:g} {y0:g}V{channel - up:g}Q{x0:g} {channel:g} {x0 + turn:g} {channel:g}"
        f"H{x1 - turn:g}Q{x1:g} {channel:g} {x1:g} {channel - down:g}V{y1:g}"
    )


def _list_amounts(arrow: Arrow, count: int, crosses: bool) -> list[str]:
    """The bytes of an arrow in a step, and the seconds for which the link is busy."""
    several = f"{len(arrow.boundaries)} tensors, " if len(arrow.boundaries) > 1 else ""
    each = [boundary.bytes for boundary in arrow.boundaries]
    if None in each:
        return [f"{several}size unknown"]
    most = "at most " if any(has_open_size(boundary.codec) for boundary in arrow.boundaries) else ""
    lines = [f"{several}{most}{size(count * sum(known or 0 for known in each))}"]
    held = sum(boundary.seconds or 0.0 for boundary in arrow.boundaries)
    return [*lines, f"link busy {duration(held)}"] if held and crosses else lines


def _facts(plan: Plan, stage: PlanStage) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{stage.parameters:,}"
    yield "FLOPs per step", amount(stage.flops).strip()
    yield "memory", size(stage.memory_bytes)
    yield from list_device_facts(plan, stage)


def _text_element(x: float, y: float, text: str, class_: str) -> Markup:
    return element("text", text, class_=class_, x=x, y=y)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _define_markers() -> Markup:
    """The tips of arrows."""
    tip = element("path", d="M0 0L8 4L0 8z")
    marks = [
        element("marker", tip, id=name, viewBox="0 0 8 8", refX=1, refY=4, markerWidth=8, markerHeight=8, orient="auto",
                markerUnits="userSpaceOnUse")
        for name in ("tip", "tip-back")
    ]  # fmt: skip
    return element("defs", marks)
