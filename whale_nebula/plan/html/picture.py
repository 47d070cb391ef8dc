"""The graph of a plan as one SVG file: for notebooks, and for documents that show no page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from importlib.resources import files

from whale_nebula.plan.html.graph import graph

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

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
