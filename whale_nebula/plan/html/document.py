"""The HTML page of a plan: head, sections and their order."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING

from whale_nebula.plan.html import tables
from whale_nebula.plan.html.graph import graph
from whale_nebula.plan.html.layout import layout
from whale_nebula.plan.html.markup import Child, Markup, element, join_markup
from whale_nebula.plan.html.timeline import Scene, scenes
from whale_nebula.plan.text import amount, micro_batches
from whale_nebula.plan.timing import duration
from whale_nebula.report.records import size

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def plan_html(plan: Plan) -> str:
    """The whole file."""
    return f"<!doctype html>\n{_page(plan)}\n"


def _page(plan: Plan) -> Markup:
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", f"plan of {plan.name}"),
        element("style", Markup(_asset("plan.css"))),
    )
    body = element("body", _header(plan), element("main", list(_sections(plan))), _footer(plan), _tip(), _script())
    return element("html", head, body, lang="en")


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _script() -> Markup:
    return element("script", Markup(_asset("plan.js")))


def _tip() -> Markup:
    return element("div", id="hover", role="status", hidden=True)


# ---------------------------------------------------------------------- head and foot
def _header(plan: Plan) -> Markup:
    themes = [
        element("button", name, type="button", data_theme=name, aria_pressed="true" if name == "auto" else "false")
        for name in ("auto", "light", "dark")
    ]
    limit = "" if plan.in_flight is None else f", at most {plan.in_flight} in flight"
    return element(
        "header",
        element("div", element("p", "plan of", class_="kicker"), element("h1", plan.name), class_="title"),
        element("div", themes, class_="segments", id="themes", role="group", aria_label="colours"),
        element("p", f"{micro_batches(plan)} · schedule {plan.schedule}{limit}", class_="lead"),
        element("dl", list(_figures(plan)), class_="figures"),
    )


def _figures(plan: Plan) -> Iterator[Markup]:
    """The numbers that one wants first."""
    stages = plan.stages.values()
    clusters = len({stage.cluster for stage in stages})
    yield _figure("stages", f"{len(stages)}", f"in {clusters} cluster{'s' * (clusters > 1)}")
    yield _figure("parameters", f"{_parameters(plan):,}", None)
    yield _figure("FLOPs a step", amount(sum(stage.flops for stage in stages)).strip(), "forward and backward")
    yield _figure("tensors on lines", size(sum(link.bytes for link in plan.links.values())), "a step")
    held = {name: link.seconds for name, link in plan.links.items() if link.seconds}
    if held:
        line = max(held, key=lambda name: held[name])
        yield _figure("busiest line", duration(held[line]), f"a step, {line.replace('->', ' → ')}")


def _parameters(plan: Plan) -> int:
    """Tied variables count once."""
    shared = sum(_numbers(each.shape) * (len(each.stages) - 1) for each in plan.tied)
    return sum(stage.parameters for stage in plan.stages.values()) - shared


def _numbers(shape: tuple[int | None, ...] | None) -> int:
    found = 1
    for axis in shape or ():
        found *= axis or 1
    return found


def _figure(name: str, value: str, more: str | None) -> Markup:
    return element("div", element("dt", name), element("dd", value, element("small", more) if more else None))


def _footer(plan: Plan) -> Markup:
    versions = " · ".join(f"{name} {version}" for name, version in plan.versions.items())
    digests = join_markup(
        "digest ", element("code", plan.digest[:12]), ", of the program ", element("code", plan.program_digest[:12])
    )
    return element("footer", element("p", digests), element("p", versions))


# ---------------------------------------------------------------------- sections
def _sections(plan: Plan) -> Iterator[Markup]:
    yield _section("Stages and boundaries", _drawing(plan))
    yield _section("Schedule", _schedule(scenes(plan)))
    yield _section("Work and memory", tables.work(plan))
    yield _section("Stages", tables.stages(plan))
    if plan.boundaries:
        yield _section("Boundaries", tables.boundaries(plan))
    if plan.links:
        yield _section("Links", tables.links(plan))
    if plan.tied:
        yield _section("Tied variables", tables.tied_table(plan))
    if plan.once:
        yield _section("Once a step", tables.once(plan))
    if plan.notes:
        yield _section("Notes", tables.list_lines(iter(plan.notes)))


def _section(title: str, *content: Child) -> Markup:
    return element("section", element("h2", title), *content)


def _drawing(plan: Plan) -> Markup:
    buttons = [
        element("button", text, type="button", data_zoom=name, aria_label=told, title=told)
        for name, text, told in (
            ("out", "−", "zoom out"),
            ("fit", "fit", "show all"),
            ("in", "+", "zoom in"),
        )
    ]
    hint = (
        "Numbers on arrows are a step's. Point at a stage to see what it is joined to; open it for its layers. "
        "Drag to move, Ctrl and wheel to zoom."
    )
    panels = [tables.stage_panel(plan, number, stage) for number, stage in enumerate(plan.stages.values())]
    panels += [tables.arrow_panel(plan, number, arrow) for number, arrow in enumerate(layout(plan).arrows)]
    close = element("button", "×", type="button", id="close", aria_label="close")
    view = element("div", graph(plan), id="view", tabindex=0, role="application", aria_label=_MOVES)
    return join_markup(
        element(
            "div",
            element("p", hint, class_="note"),
            element("div", buttons, class_="segments", role="group", aria_label="zoom"),
            class_="row",
        ),
        element(
            "div",
            element("div", view, class_="canvas"),
            element("aside", close, panels, id="panels", aria_label="details"),
            class_="drawing",
        ),
    )


_MOVES = "graph of stages; arrow keys move it, plus and minus zoom, 0 shows all, Tab goes to stages and arrows"


def _schedule(drawn: list[Scene]) -> Markup:
    choices = [
        join_markup(
            element("input", type="radio", name="scene", id=f"scene-{number}", checked=number == 0, data_scene=number),
            element("label", scene.title, for_=f"scene-{number}"),
        )
        for number, scene in enumerate(drawn)
    ]
    picker = element("fieldset", element("legend", "a stage computes"), choices, class_="segments")
    legend = element(
        "p",
        [element("span", text, class_=f"key {name}") for name, text in _KEYS],
        class_="legend",
    )
    return join_markup(
        element("div", picker if len(drawn) > 1 else None, legend, class_="row"),
        [
            element(
                "div",
                element("p", scene.note, class_="note"),
                element("div", list(scene.drawings), class_="scroll clocks", tabindex=0, role="region",
                        aria_label=f"schedule: {scene.title}"),
                class_="scene",
                data_scene=number,
            )
            for number, scene in enumerate(drawn)
        ],
    )  # fmt: skip


_KEYS = (("forward", "forward"), ("backward", "backward"), ("message", "a message holds the line"))


_GRAPH, _AFTER = "/* the graph */", "/* what opens beside it */"
_FONT = '& { font-family: Inter, "Segoe UI", system-ui, sans-serif; background: var(--sheet); display: block }'


def plan_svg(plan: Plan) -> str:
    """The graph, with what it takes of the page's style, and no rule that other elements could take for theirs."""
    return graph(plan, style=_style()) + "\n"


def _style() -> str:
    """Colours and the graph's own rules, all of them inside `#graph`: a notebook may have its own `.card`."""
    whole = files(__package__).joinpath("plan.css").read_text("utf-8")
    colours = whole.split("\n\n", 1)[0].replace(":root", "&").replace("light dark;", "light;")
    rules = whole.partition(_GRAPH)[2].partition(_AFTER)[0].replace("#graph ", "& ")
    return f"#graph {{\n{colours}\n{_FONT}\n{rules}}}\n"
