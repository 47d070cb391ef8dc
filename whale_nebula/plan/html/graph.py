"""The graph of a plan as SVG: clusters as boxes, stages as cards, boundaries as arrows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING

from whale_nebula.codec.way import has_open_size
from whale_nebula.plan.html import Attribute, Markup, element, join_markup
from whale_nebula.plan.html.layout import LINE, WIDTH, Arrow, Box, Drawing, Node, Tie, layout
from whale_nebula.plan.records import PlanStage
from whale_nebula.plan.splits import list_device_facts
from whale_nebula.plan.text import amount
from whale_nebula.plan.timing import duration
from whale_nebula.report.records import size

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

COLORS = 8
_GRAPH, _AFTER = "/* the graph */", "/* what opens beside it */"
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
    """The number of a cluster's colour."""
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
            _marks(),
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
        for place, (label, value) in enumerate(_facts(self.plan, stage)):
            y, short = node.y + 56 + LINE * place, _short(label, _LETTERS - len(value))
            facts += [_words(node.x + 26, y, short, "label"), _words(node.x + WIDTH - 16, y, value, "value end")]
        return element(
            "g",
            self._pills(node, [leaf for leaf in stage.inputs if leaf not in crossing], above=True),
            self._pills(node, [each for each in stage.outputs if each not in crossing], above=False),
            element("rect", class_="card", x=node.x, y=node.y, width=WIDTH, height=self.drawing.tall, rx=12),
            element("rect", class_="edge", x=node.x + 10, y=node.y + 16, width=4, height=self.drawing.tall - 32, rx=2),
            _words(node.x + 26, node.y + 31, _short(stage.name, 17), "name"),
            _words(node.x + WIDTH - 16, node.y + 30, f"stage {node.number}", "small end"),
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
        place = {"x": node.x + 26, "y": node.y + self.drawing.tall - 15, "height": 4, "rx": 2}
        width = round((WIDTH - 42) * stage.flops / most, 1) if most else 0.0
        load = element("rect", class_="load", width=width, **place) if width else None
        return join_markup(element("rect", class_="track", width=WIDTH - 42, **place), load)

    def _pills(self, node: Node, names: list[str], *, above: bool) -> Markup:
        """Labels of the inputs above a stage, or of its results below."""
        shown = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
        x, made = node.x + 16, []
        for name in shown:
            text = _short(name, 14)
            width = len(text) * _LETTER + 18
            y = node.y - 34 if above else node.y + self.drawing.tall + 12
            stem = (node.y - 12, node.y) if above else (node.y + self.drawing.tall, node.y + self.drawing.tall + 12)
            made.append(element("path", class_="stem", d=f"M{x + width / 2:g} {stem[0]:g}V{stem[1]:g}"))
            made.append(element("rect", class_="pill", x=x, y=y, width=round(width, 1), height=22, rx=11))
            made.append(_words(x + width / 2, y + 15, text, "small middle"))
            x += width + 8
        return join_markup(made)

    # ------------------------------------------------------------------ arrows
    def _arrow(self, number: int, arrow: Arrow) -> Markup:
        crosses = self.stages[arrow.source].cluster != self.stages[arrow.destination].cluster
        a, b = self.drawing.nodes[arrow.source], self.drawing.nodes[arrow.destination]
        there, back, middle = (
            _direct(a, b, self.drawing.tall)
            if arrow.channel is None
            else _passing(a, b, arrow.channel, self.drawing.tall)
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
        lines = _amounts(arrow, len(self.plan.rows), crosses)
        width = max(map(len, lines)) * _LETTER + 20
        height = 8 + 16 * len(lines)
        x, y = middle[0] - width / 2, middle[1] - height / 2
        return join_markup(
            element("rect", class_="tag", x=round(x, 1), y=y, width=round(width, 1), height=height, rx=9),
            [
                _words(middle[0], y + 17 + 16 * place, line, "small middle" if place else "value middle")
                for place, line in enumerate(lines)
            ],
        )

    def _tie(self, tie: Tie) -> Markup:
        """The connection of stages that share variables."""
        nodes = [self.drawing.nodes[number] for number in tie.stages]
        xs = [node.x + WIDTH - 30 for node in nodes]
        legs = [
            f"M{x:g} {node.y + self.drawing.tall if node.y < tie.channel else node.y:g}V{tie.channel:g}"
            for x, node in zip(xs, nodes, strict=True)
        ]
        text = f"{_short(tie.names[0], 24)}, tied" if len(tie.names) == 1 else f"{len(tie.names)} tied variables"
        width, middle = len(text) * _LETTER + 20, (min(xs) + max(xs)) / 2
        return element(
            "g",
            element("path", d=f"{''.join(legs)}M{min(xs):g} {tie.channel:g}H{max(xs):g}"),
            element("rect", class_="tag", x=round(middle - width / 2, 1), y=tie.channel - 12, width=round(width, 1),
                    height=24, rx=9),
            _words(middle, tie.channel + 4, text, "small middle"),
            class_="tie",
            data_stages=" ".join(map(str, tie.stages)),
        )  # fmt: skip

    def _arrow_text(self, arrow: Arrow) -> str:
        source, destination = self.stages[arrow.source].name, self.stages[arrow.destination].name
        names = ", ".join(boundary.name for boundary in arrow.boundaries)
        return f"from {source} to {destination}: {names}, {'; '.join(_amounts(arrow, len(self.plan.rows), True))}"


def _direct(a: Node, b: Node, tall: float) -> tuple[str, str, tuple[float, float]]:
    """The path from the right side of one stage to the left side of the next."""
    x0, x1 = a.x + WIDTH, b.x
    y0, y1 = a.y + tall / 2 - 8, b.y + tall / 2 - 8
    bend = (x1 - x0) * 0.5
    there = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend - 7:g} {y1:g} {x1 - 7:g} {y1:g}"
    z0, z1 = y0 + 34, y1 + 34
    back = f"M{x1:g} {z1:g}C{x1 - bend:g} {z1:g} {x0 + bend + 7:g} {z0:g} {x0 + 7:g} {z0:g}"
    return there, back, ((x0 + x1) / 2, (y0 + y1) / 2)


def _passing(a: Node, b: Node, channel: float, tall: float) -> tuple[str, str, tuple[float, float]]:
    """The path from one stage's upper (or lower) side, along a channel, to the other's upper (or lower) side."""
    x0, x1 = a.x + WIDTH - 44, b.x + 120
    y0 = a.y if channel < a.y else a.y + tall
    y1 = b.y if channel < b.y else b.y + tall
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


def _amounts(arrow: Arrow, count: int, crosses: bool) -> list[str]:
    """The bytes of an arrow in a step, and the seconds on the line."""
    several = f"{len(arrow.boundaries)} tensors, " if len(arrow.boundaries) > 1 else ""
    each = [boundary.bytes for boundary in arrow.boundaries]
    if None in each:
        return [f"{several}size open"]
    most = "at most " if any(has_open_size(boundary.codec) for boundary in arrow.boundaries) else ""
    lines = [f"{several}{most}{size(count * sum(known or 0 for known in each))}"]
    held = sum(boundary.seconds or 0.0 for boundary in arrow.boundaries)
    return [*lines, f"{duration(held)} of the line"] if held and crosses else lines


def _facts(plan: Plan, stage: PlanStage) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{stage.parameters:,}"
    yield "FLOPs a step", amount(stage.flops).strip()
    yield "memory", size(stage.memory_bytes)
    yield from list_device_facts(plan, stage)


def _words(x: float, y: float, text: str, class_: str) -> Markup:
    return element("text", text, class_=class_, x=x, y=y)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _marks() -> Markup:
    """The tips of arrows."""
    tip = element("path", d="M0 0L8 4L0 8z")
    marks = [
        element("marker", tip, id=name, viewBox="0 0 8 8", refX=1, refY=4, markerWidth=8, markerHeight=8, orient="auto",
                markerUnits="userSpaceOnUse")
        for name in ("tip", "tip-back")
    ]  # fmt: skip
    return element("defs", marks)
