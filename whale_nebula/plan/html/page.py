"""The HTML page of a plan: one template, filled with the sections of the plan's text, the graph and the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from importlib.resources import files
from math import prod
from string import Template
from typing import TYPE_CHECKING

from whale_nebula.plan.html import Markup, element, join_markup
from whale_nebula.plan.html.graph import Arrow, color, graph, layout
from whale_nebula.plan.records import PlanBoundary, PlanLayer, PlanStage, RateCurves
from whale_nebula.plan.splits import list_device_facts
from whale_nebula.plan.text import (
    CANDIDATE,
    Section,
    amount,
    boundary_facts,
    busiest_line,
    candidate_rows,
    codec_lines,
    limit_text,
    micro_batches_text,
    sections,
    workers_text,
)
from whale_nebula.plan.timing import PhaseTimes, Row, describe_assumptions, duration, predict_times, step_text
from whale_nebula.report.records import size
from whale_nebula.schedule.simulate import Span
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

_COUNTS = [each.name for each in fields(PlanLayer) if each.name != "name"]
_HEAD = ("layer", "ops", "parameters", "FLOPs per step", "activations")


@dataclass
class Branch:
    """A layer with its sublayers; its counts are those of the whole branch."""

    name: str
    own: PlanLayer | None = None
    inside: dict[str, Branch] = field(default_factory=dict)

    @property
    def total(self) -> PlanLayer:
        """The counts of the layer and of all layers in it."""
        parts = [each for each in (self.own, *(branch.total for branch in self.inside.values())) if each is not None]
        return PlanLayer(self.name, **{count: sum(getattr(part, count) for part in parts) for count in _COUNTS})


def nest_layers(layers: Sequence[PlanLayer]) -> Branch:
    """The layers of a stage as a tree, by their paths; returns its root.

    >>> tree = nest_layers([PlanLayer("block/dense", parameters=6), PlanLayer("block/norm", parameters=2)])
    >>> tree.inside["block"].total.parameters, list(tree.inside["block"].inside)
    (8, ['dense', 'norm'])
    """
    root = Branch("")
    for layer in layers:
        branch = root
        for part in (layer.name or "outside layers").split("/"):
            branch = branch.inside.setdefault(part, Branch(part))
        branch.own = layer
    return root


def layer_tree(stage: PlanStage) -> Markup:
    """The layers of a stage as a table whose rows open."""
    root = nest_layers(stage.layers)
    most = max((branch.total.flops for branch in root.inside.values()), default=0)
    head = element("div", [element("span", text) for text in _HEAD], class_="leaf head")
    return element("div", head, [_branch(branch, most) for branch in root.inside.values()], class_="tree")


def _branch(branch: Branch, most: int) -> Markup:
    if not branch.inside:
        return element("div", _cells(branch.total, most), class_="leaf")
    inside = [_branch(each, most) for each in branch.inside.values()]
    own = branch.own
    if own is not None and (own.flops or own.parameters or own.activation_bytes):
        inside.append(element("div", _cells(replace(own, name="the rest"), most), class_="leaf own"))
    return element("details", element("summary", _cells(branch.total, most), class_="leaf"), element("div", inside))


def _cells(layer: PlanLayer, most: int) -> list[Markup]:
    share = 100 * layer.flops / most if most else 0.0
    return [
        element("span", layer.name),
        element("span", f"{layer.forward_ops + layer.backward_ops:,}"),
        element("span", f"{layer.parameters:,}" if layer.parameters else "–"),
        element("span", amount(layer.flops).strip() if layer.flops else "–", style=f"--share:{share:.0f}%"),
        element("span", size(layer.activation_bytes) if layer.activation_bytes else "–"),
    ]


_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>plan of $name</title>
<style>$style</style>
</head>
<body>
<header>
<div class="title"><p class="kicker">plan of</p><h1>$name</h1></div>
<div class="segments" id="themes" role="group" aria-label="colors">
<button type="button" data-theme="auto" aria-pressed="true">auto</button>
<button type="button" data-theme="light" aria-pressed="false">light</button>
<button type="button" data-theme="dark" aria-pressed="false">dark</button>
</div>
<p class="lead">$lead</p>
<dl class="figures">$figures</dl>
</header>
<main>
<section>
<h2>Stages and boundaries</h2>
<div class="row">
<p class="note">Numbers on arrows are per step. Point at a stage to highlight its connections; open it to see its
layers. Drag to pan; Ctrl and wheel to zoom.</p>
<div class="segments" role="group" aria-label="zoom">
<button type="button" data-zoom="out" aria-label="zoom out" title="zoom out">−</button>
<button type="button" data-zoom="fit" aria-label="show all" title="show all">fit</button>
<button type="button" data-zoom="in" aria-label="zoom in" title="zoom in">+</button>
</div>
</div>
<div class="drawing">
<div class="canvas"><div id="view" tabindex="0" role="application" aria-label="graph of stages; arrow keys move it,
 plus and minus zoom, 0 shows all, Tab moves between stages and arrows">$graph</div></div>
<aside id="panels" aria-label="details"><button type="button" id="close" aria-label="close">×</button>$panels</aside>
</div>
</section>
<section>
<h2>Schedule</h2>
<div class="row">
<p class="legend"><span class="key forward">forward</span><span class="key backward">backward</span>$weights
<span class="key message">transfer on a link</span></p>
</div>
$schedule
</section>
$sections
</main>
<footer><p>digest <code>$digest</code>, program <code>$program</code></p><p>$versions</p></footer>
<div id="hover" role="status" hidden></div>
<script>$script</script>
</body>
</html>
""")


def plan_html(plan: Plan) -> str:
    """The whole file: self-contained, and readable without scripts."""
    words = {
        "name": plan.name,
        "lead": f"{micro_batches_text(plan)} · schedule {plan.schedule}{limit_text(plan)}",
        "digest": plan.digest[:12],
        "program": plan.program_digest[:12],
        "versions": " · ".join(f"{name} {version}" for name, version in plan.versions.items()),
    }
    has_weights = any("W" in runs for stage in plan.stages.values() for runs in stage.runs)
    return _PAGE.substitute(
        {name: escape(text) for name, text in words.items()},
        style=_read_asset("plan.css"),
        script=_read_asset("plan.js"),
        figures=join_markup(list(_figures(plan))),
        graph=graph(plan),
        panels=join_markup(list(_panels(plan))),
        sections=join_markup(
            *_candidates(plan), [_section(plan, title, each) for title, each in sections(plan).items()]
        ),
        schedule=draw_schedule(plan),
        weights=element("span", "gradients of weights", class_="key weights") if has_weights else Markup(),
    )


def _read_asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _figures(plan: Plan) -> Iterator[Markup]:
    """The main numbers; in the number of parameters, tied variables count once."""
    stages = plan.stages.values()
    clusters = len({stage.cluster for stage in stages})
    shared = sum(prod(axis or 1 for axis in each.shape or ()) * (len(each.stages) - 1) for each in plan.tied)
    figures = [
        ("stages", f"{len(stages)}", f"in {clusters} cluster{'s' * (clusters > 1)}"),
        ("parameters", f"{sum(stage.parameters for stage in stages) - shared:,}", ""),
        ("FLOPs per step", amount(sum(stage.flops for stage in stages)).strip(), "forward and backward"),
        ("tensors on links", size(sum(link.bytes for link in plan.links.values())), "per step"),
    ]
    if (busiest := busiest_line(plan)) is not None:
        figures.append(("busiest link", duration(busiest[1]), f"per step, {busiest[0].replace('->', ' → ')}"))
    for name, value, more in figures:
        shown = element("dd", value, element("small", more) if more else None)
        yield element("div", element("dt", name), shown)


def _candidates(plan: Plan) -> Iterator[Markup]:
    """The planner's candidates, if it has chosen this plan."""
    if plan.considered:
        table = _table("candidates", CANDIDATE, candidate_rows(plan.considered), range(1, 6))
        note = element("p", "Found by nb.auto_parallel; the first one was chosen.", class_="note")
        yield element("section", element("h2", "Candidates"), note, table, draw_curves(plan))


# ---------------------------------------------------------------------- sections of the plan's text
_MEMORY = {
    "activations": "kept activations", "variables": "variables", "gradients": "gradients", "slots": "optimizer slots",
}  # fmt: skip


def _section(plan: Plan, title: str, section: Section) -> Markup:
    head, rows = list(section.head), [list[str](row) for row in section.rows]
    numbers, legend = {"boundaries": range(5, 9), "links": range(2, 7)}.get(title, section.numbers), None
    if title == "links":
        head += ["with headers", "messages", "delay"]
        for row, link in zip(rows, plan.links.values(), strict=True):
            row[0] = row[0].replace("->", " → ")
            row += [size(link.wire_bytes), f"{link.messages:,}", duration(link.delay) if link.delay else "-"]
    if title in ("stages", "work per step and memory"):
        column = head.index("name") if title == "stages" else 0
        for row, stage in zip(rows, plan.stages.values(), strict=True):
            row[column] = element("b", stage.name, class_=f"dot c{color(plan, stage.cluster)}")
    if title == "work per step and memory":
        most = max(stage.memory_bytes for stage in plan.stages.values())
        head.append("")
        for row, stage in zip(rows, plan.stages.values(), strict=True):
            row.append(_bar(stage, most))
        keys = [element("span", text, class_=f"key {name}") for name, text in _MEMORY.items()]
        legend = element("p", keys, class_="legend")
    table = _table(title, head, rows, numbers) if rows else None
    items = _join_indented(section.lines)
    if rows:
        lines = [element("p", item, class_="note") for item in items]
    else:
        lines = [element("ul", [element("li", item) for item in items], class_="plain")]
    return element("section", element("h2", title.capitalize()), table, legend, lines)


def _join_indented(lines: Sequence[str]) -> list[str]:
    """Append each indented line to the one before."""
    items: list[str] = []
    for line in lines:
        if line.startswith("  ") and items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    return items


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> Markup:
    """A table; the columns in `numbers` are right-aligned."""
    classes = ["number" if column in numbers else None for column in range(len(head))]
    titles = [element("th", text, class_=kind, scope="col") for text, kind in zip(head, classes, strict=True)]
    lines = [
        element(
            "tr",
            [element("td", "–" if cell == "-" else cell, class_=kind) for cell, kind in zip(row, classes, strict=True)],
        )
        for row in rows
    ]
    body = element("table", element("thead", element("tr", titles)), element("tbody", lines))
    return element("div", body, class_="scroll", tabindex=0, role="region", aria_label=f"table of {title}")


def _bar(stage: PlanStage, most: int) -> Markup:
    """A bar of a stage's memory by kind, relative to the largest stage."""
    sizes = (stage.kept_bytes, stage.variable_bytes, stage.gradient_bytes, stage.slot_bytes)
    parts = [(name, part, f"{text}: {size(part)}") for (name, text), part in zip(_MEMORY.items(), sizes, strict=True)]
    pieces = [
        element("i", class_=name, style=f"width:{100 * part / most:.2f}%", title=said)
        for name, part, said in parts
        if part
    ]
    return element("span", pieces, class_="bar", role="img", aria_label=", ".join(said for _, _, said in parts))


# ---------------------------------------------------------------------- panels
def _panels(plan: Plan) -> Iterator[Markup]:
    """The details that open with a stage or an arrow."""
    for number, stage in enumerate(plan.stages.values()):
        yield _panel(f"stage-{number}", *_stage_panel(plan, stage))
    for number, arrow in enumerate(layout(plan).arrows):
        yield _panel(f"arrow-{number}", *_arrow_panel(plan, arrow))


def _panel(name: str, title: str, *content: str) -> Markup:
    return element("section", element("h3", title, class_="panel-title"), content, id=f"panel-{name}", class_="panel")


def _stage_panel(plan: Plan, stage: PlanStage) -> Iterator[Markup]:
    flops = f"{amount(stage.forward_flops).strip()} forward, {amount(stage.backward_flops).strip()} backward"
    kept = f", including activations {size(stage.activation_bytes)} × {stage.in_flight} in flight"
    yield element("span", stage.name, class_=f"dot c{color(plan, stage.cluster)}")
    yield _facts(
        ("cluster", stage.cluster),
        ("worker", workers_text(stage)),
        ("parameters", f"{stage.parameters:,} in {len(stage.variables):,} variables"),
        ("FLOPs per step", flops),
        ("memory", f"{size(stage.memory_bytes)}{kept * bool(stage.kept_bytes)}"),
        ("inputs", ", ".join(stage.inputs) or "none"),
        ("outputs", ", ".join(stage.outputs) or "none"),
        *list_device_facts(plan, stage),
    )
    yield element("h4", "Layers")
    yield layer_tree(stage)


def _arrow_panel(plan: Plan, arrow: Arrow) -> Iterator[str]:
    stages = list(plan.stages.values())
    source, destination = stages[arrow.source], stages[arrow.destination]
    link = plan.links.get(f"{source.cluster}->{destination.cluster}")
    inside = f"inside cluster {source.cluster}" if source.cluster == destination.cluster else "over a free link"
    yield f"{source.name} → {destination.name}"
    yield element("p", f"over {link.line}" if link is not None and link.line != "free" else inside, class_="note")
    yield from map(_crossing, arrow.boundaries)


def _crossing(boundary: PlanBoundary) -> Markup:
    made = [("producer", boundary.maker)] if boundary.maker else []
    besides = [("codec", line) for line in codec_lines(boundary)]
    facts = [(name, value or "–") for name, value in boundary_facts(boundary)]
    title = element("h4", f"{boundary.name} ", element("code", str(Spec(boundary.dtype, boundary.shape))))
    return join_markup(title, _facts(*facts, *made, *besides, ("to", ", ".join(boundary.destinations))))


def _facts(*facts: tuple[str, str]) -> Markup:
    return element("dl", [join_markup(element("dt", name), element("dd", value)) for name, value in facts])


# ---------------------------------------------------------------------- the schedule: a row for each stage and link
_ROW, _LINE, _GAP, _TOP = 30, 18, 7, 26
_WIDTH, _MARGIN = 1180, 128
_BLOCKS = 480
"""The approximate number of blocks of stages that are drawn, with at most `_MOST` micro-batches."""
_MOST = 24


def draw_schedule(plan: Plan) -> Markup:
    """The schedule as the plan's text assumes it, with the assumption and its result."""
    drawn = predict_times(plan, most=max(4, min(_MOST, _BLOCKS // max(len(plan.stages), 1))))
    notes = [describe_assumptions(drawn.timed)]
    if drawn.micro_batches < len(plan.rows):
        notes.append(f"the first {drawn.micro_batches} of {len(plan.rows)} micro-batches")
    if drawn.timed:
        notes.append(step_text(plan))
    figures = [_PhaseDrawing(plan, phase, drawn.timed).figure(len(drawn.phases) > 1) for phase in drawn.phases]
    clocks = element("div", figures, class_="scroll clocks", tabindex=0, role="region", aria_label="schedule")
    return join_markup(element("p", " ".join(f"{n[:1].upper()}{n[1:]}." for n in notes), class_="note"), clocks)


@dataclass(frozen=True)
class _PhaseDrawing:
    """The drawing of one phase."""

    plan: Plan
    phase: PhaseTimes
    timed: bool

    @property
    def end(self) -> float:
        return max((span.end for span in self.phase.timeline.spans), default=1.0) or 1.0

    def x(self, seconds: float) -> float:
        return _MARGIN + seconds * _WIDTH / self.end

    def when(self, seconds: float) -> str:
        if not self.timed:
            return f"{seconds:g}"
        return duration(seconds) if seconds else "0"

    def figure(self, several: bool) -> Markup:
        label, y, rows = f"Phase {self.phase.phase}" if several else "Schedule", _TOP, []
        for row in self.phase.rows(lines=self.timed):
            height = _LINE if row.stage is None else _ROW
            rows.append(self.row(row, y, height))
            y += height + _GAP
        height, said = y + 6, f"{label}: {describe_assumptions(self.timed)}"
        view = f"0 0 {_MARGIN + _WIDTH + 16} {height}"
        drawn = element("svg", self.axis(height), rows, class_="clock", viewBox=view, role="img", aria_label=said)
        return element("figure", element("figcaption", label) if several else None, drawn, class_="time")

    def row(self, row: Row, y: int, height: int) -> Markup:
        name = row.name if row.stage is not None else row.name.replace("->", " → ")
        label = name if len(name) < 17 else f"{name[:15]}…"
        return element(
            "g",
            element("text", label, class_="row end", x=_MARGIN - 12, y=y + height / 2 + 4),
            element("rect", class_="rest", x=_MARGIN, y=y, width=_WIDTH, height=height, rx=4),
            [self.block(span, y, height) for span in row.spans if span.seconds or row.stage is None],
            class_="wire" if row.stage is None else f"c{color(self.plan, row.stage.cluster)}",
        )

    def block(self, span: Span, y: int, height: int) -> Markup:
        x, width = self.x(span.start), max(self.x(span.end) - self.x(span.start) - 1.0, 1.5)
        name = f"{span.what}{span.micro_batch}"
        text = element("text", name, class_="middle", x=round(x + width / 2, 1), y=y + height / 2 + 4)
        return element(
            "g",
            element("rect", x=round(x, 2), y=y, width=round(width, 2), height=height, rx=min(4, width / 2)),
            text if width > 7 * len(name) + 4 else None,
            class_=span.what.lower(),
            data_t=f"{name} · {self.when(span.start)} to {self.when(span.end)}",
            data_m=span.micro_batch,
        )

    def axis(self, height: float) -> list[Markup]:
        """Ticks at round times: multiples of the first of 1, 2, 5, 10 ... above an eighth of the total."""
        least = self.end / 8
        power = 10.0 ** math.floor(math.log10(least))
        step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= least * (1 - 1e-9))
        ticks = []
        for number in range(int(self.end / step + 1e-9) + 1):
            x, when = self.x(number * step), self.when(number * step)
            ticks.append(element("path", class_="tick", d=f"M{x:g} {_TOP - 6}V{height - 4:g}"))
            ticks.append(element("text", when, class_="tick middle", x=round(x, 1), y=13))
        return ticks


# ---------------------------------------------------------------------- the step time by link rate
WIDTH, HEIGHT = 920, 330
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 54


def draw_curves(plan: Plan) -> Markup:
    """The plot with its legend; empty if all links are free, or for a plan from a file."""
    curves = plan.decision.curves() if plan.decision is not None else None
    if curves is None:
        return Markup()
    keys = [element("span", "best plan at each rate", class_="key best")]
    keys += [element("span", f"{number}: {name}", class_=f"key c{number}") for number, name in _number_plans(curves)]
    rows = [
        (f"{_times(factor)}", duration(seconds), name)
        for factor, seconds, name in zip(curves.factors, curves.best, curves.best_plans, strict=True)
        if _is_power(factor)
    ]
    return join_markup(
        element("p", "Step time if all links were faster or slower by this factor; both axes are logarithmic.",
                class_="note"),
        element("div", _plot(curves), class_="clocks"),
        element("p", keys, class_="legend"),
        element("details", element("summary", "best plan at each rate, as a table"),
                _table("rates", ("rate", "per step", "plan"), rows, ())),
    )  # fmt: skip


def _number_plans(curves: RateCurves) -> Iterator[tuple[int, str]]:
    return enumerate(curves.plans, 1)


def _plot(curves: RateCurves) -> Markup:
    """The curves as SVG: the best plan as a broad band, the candidates as lines on it."""
    every = [each for line in (curves.best, *curves.plans.values()) for each in line if math.isfinite(each)]
    margin = max(1.1, math.sqrt(1.6 * min(every) / max(every)))
    low, high = min(every) / margin, max(every) * margin
    first, last = math.log(curves.factors[0]), math.log(curves.factors[-1])

    def x(factor: float) -> float:
        return LEFT + (math.log(factor) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(seconds: float) -> float:
        return TOP + (math.log(high) - math.log(seconds)) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)

    def line(values: Sequence[float], kind: str, title: str) -> Markup:
        points = [(x(f), y(v)) for f, v in zip(curves.factors, values, strict=True) if math.isfinite(v)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        return element("path", element("title", title), d=path, class_=kind)

    drawn = [
        element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="tick") for tick in _ticks(low, high)
    ]
    drawn += [
        element("text", duration(tick), x=LEFT - 10, y=y(tick) + 4, class_="tick end") for tick in _ticks(low, high)
    ]
    for factor in filter(_is_power, curves.factors):
        kind = "tick now" if factor == 1 else "tick"
        drawn.append(element("line", x1=x(factor), x2=x(factor), y1=TOP, y2=HEIGHT - BOTTOM, class_=kind))
        place = "end" if factor == curves.factors[-1] else "middle"
        drawn.append(element("text", _times(factor), x=x(factor), y=HEIGHT - BOTTOM + 18, class_=f"tick {place}"))
        if curves.rate is not None:
            said = f"{curves.rate * factor / 1e6:.4g} Mbit/s"
            drawn.append(element("text", said, x=x(factor), y=HEIGHT - BOTTOM + 34, class_=f"tick {place}"))
    drawn.append(element("text", "link rate", x=LEFT, y=HEIGHT - 3, class_="tick"))
    drawn.append(line(curves.best, "best", "best plan at each rate"))
    drawn += [
        line(curves.plans[name], f"curve c{number}", f"{number}: {name}") for number, name in _number_plans(curves)
    ]
    for factor, seconds, name in zip(curves.factors, curves.best, curves.best_plans, strict=True):
        if _is_power(factor) and math.isfinite(seconds):
            title = element("title", f"{_times(factor)}: {duration(seconds)}, {name}")
            drawn.append(element("circle", title, cx=x(factor), cy=y(seconds), r=4, class_="best"))
    label = "step time of the best candidates by link rate"
    return element("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="clock curves", role="img", aria_label=label)


def _is_power(factor: float) -> bool:
    return math.log2(factor).is_integer()


def _times(factor: float) -> str:
    """Format a multiple of the configured rate.

    >>> _times(0.125), _times(1.0), _times(8.0)
    ('1/8', 'as configured', '8 times')
    """
    if factor == 1:
        return "as configured"
    return f"1/{1 / factor:g}" if factor < 1 else f"{factor:g} times"


_STEPS = ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), (1, 1.2, 1.4, 1.6, 2, 2.4, 2.8, 3.2, 4, 4.8, 5.6, 6.4, 8))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two, at least three of them if possible.

    >>> _ticks(0.03, 0.6), _ticks(0.09, 0.15)
    ([0.05, 0.1, 0.2, 0.5], [0.1, 0.12, 0.14])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in _STEPS:
        found = [each for power in powers for step in steps if low <= (each := float(f"{step}e{power}")) <= high]
        if len(found) >= 3:
            break
    return found
