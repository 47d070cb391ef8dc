"""The tables of a plan's page, and the panels that open beside the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from whale_nebula.codec.way import describe_bytes
from whale_nebula.plan.html.graph import color
from whale_nebula.plan.html.layout import Arrow
from whale_nebula.plan.html.markup import Child, Markup, element, join_markup
from whale_nebula.plan.records import PlanBoundary, PlanLayer, PlanStage
from whale_nebula.plan.text import (
    amount,
    bytes_on_link,
    codec_lines,
    in_a_step,
    links_bound,
    once_lines,
    share_lines,
    tied_lines,
    worker_of,
)
from whale_nebula.plan.timing import duration
from whale_nebula.report.records import size
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


OUTSIDE = "outside layers"
_COUNTS = [each.name for each in fields(PlanLayer) if each.name != "name"]


@dataclass
class Branch:
    """A layer with what lies in it; its counts are those of the whole branch."""

    name: str
    own: PlanLayer | None = None
    inside: dict[str, Branch] = field(default_factory=dict)

    @property
    def total(self) -> PlanLayer:
        """The counts of the layer and of all layers in it."""
        parts = [each for each in (self.own, *(branch.total for branch in self.inside.values())) if each is not None]
        return PlanLayer(self.name, **{count: sum(getattr(part, count) for part in parts) for count in _COUNTS})


def branches(layers: Sequence[PlanLayer]) -> Branch:
    """Layers by their paths, as a tree.

    >>> tree = branches([PlanLayer("block/dense", parameters=6), PlanLayer("block/norm", parameters=2)])
    >>> tree.inside["block"].total.parameters, list(tree.inside["block"].inside)
    (8, ['dense', 'norm'])
    """
    root = Branch("")
    for layer in layers:
        branch = root
        for part in (layer.name or OUTSIDE).split("/"):
            branch = branch.inside.setdefault(part, Branch(part))
        branch.own = layer
    return root


def tree(stage: PlanStage) -> Markup:
    """The tree of a stage."""
    root = branches(stage.layers)
    most = max((branch.total.flops for branch in root.inside.values()), default=0)
    head = element(
        "div",
        [element("span", text) for text in ("layer", "ops", "parameters", "FLOPs a step", "keeps")],
        class_="leaf head",
    )
    return element("div", head, [_branch(branch, most) for branch in root.inside.values()], class_="tree")


def _branch(branch: Branch, most: int) -> Markup:
    if not branch.inside:
        return element("div", _cells(branch.total, most), class_="leaf")
    inside = [_branch(each, most) for each in branch.inside.values()]
    own = branch.own
    if own is not None and (own.flops or own.parameters or own.activation_bytes):
        inside.append(element("div", _cells(_rename_layer(own), most), class_="leaf own"))
    return element("details", element("summary", _cells(branch.total, most), class_="leaf"), element("div", inside))


def _rename_layer(own: PlanLayer) -> PlanLayer:
    return PlanLayer("the rest", **{count: getattr(own, count) for count in _COUNTS})


def _cells(layer: PlanLayer, most: int) -> Markup:
    share = 100 * layer.flops / most if most else 0.0
    return join_markup(
        element("span", layer.name),
        element("span", f"{layer.forward_ops + layer.backward_ops:,}"),
        element("span", f"{layer.parameters:,}" if layer.parameters else "–"),
        element("span", amount(layer.flops).strip() if layer.flops else "–", style=f"--share:{share:.0f}%"),
        element("span", size(layer.activation_bytes) if layer.activation_bytes else "–"),
    )


_MEMORY = (
    ("activations", "kept activations"),
    ("variables", "variables"),
    ("gradients", "gradients"),
    ("slots", "optimizer's slots"),
)


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], *, numbers: Sequence[int] = ()) -> Markup:
    """A table; the columns in `numbers` stand to the right."""

    def cell(tag: str, column: int, content: Child, **more: str) -> Markup:
        return element(tag, content, class_="number" if column in numbers else None, **more)

    titles = element("tr", [cell("th", column, text, scope="col") for column, text in enumerate(head)])
    lines = [element("tr", [cell("td", column, each) for column, each in enumerate(row)]) for row in rows]
    body = element("table", element("thead", titles), element("tbody", lines))
    return element("div", body, class_="scroll", tabindex=0, role="region", aria_label=f"table of {head[0] or 'rows'}")


def stages(plan: Plan) -> Markup:
    """Who runs what, and what it reads and gives."""
    head = ("stage", "cluster", "worker", "ops forward", "backward", "variables", "parameters", "reads", "gives")
    rows = [
        (
            stage_name(plan, stage),
            *(stage.cluster, worker_of(stage), f"{stage.forward_ops:,}", f"{stage.backward_ops:,}"),
            *(f"{len(stage.variables):,}", f"{stage.parameters:,}"),
            *(", ".join(stage.inputs) or "–", ", ".join(stage.outputs) or "–"),
        )
        for stage in plan.stages.values()
    ]
    drawn = table(head, rows, numbers=range(3, 7))
    return join_markup(drawn, *(element("p", line, class_="note") for line in share_lines(plan)))


def work(plan: Plan) -> Markup:
    """FLOPs, and what memory is made of."""
    most = max((stage.memory_bytes for stage in plan.stages.values()), default=0)
    head = ("stage", "FLOPs forward", "backward", "a micro-batch keeps", "in flight", "memory", "")
    rows = [
        (
            stage_name(plan, stage),
            *(amount(stage.forward_flops).strip(), amount(stage.backward_flops).strip()),
            size(stage.activation_bytes) if stage.in_flight * stage.activation_bytes else "–",
            str(stage.in_flight or "–"),
            *(size(stage.memory_bytes), _bar(stage, most)),
        )
        for stage in plan.stages.values()
    ]
    legend = element("p", [element("span", text, class_=f"key {name}") for name, text in _MEMORY], class_="legend")
    loops = sum(stage.open_loops for stage in plan.stages.values())
    open_loops = f"{loops} loop{'s' * (loops > 1)} of unknown length counted as one turn." if loops else None
    return join_markup(
        table(head, rows, numbers=range(1, 6)),
        legend,
        element("p", open_loops, class_="note") if open_loops else None,
    )


def _bar(stage: PlanStage, most: int) -> Markup:
    kept = stage.activation_bytes * stage.in_flight
    parts = (kept, stage.variable_bytes, stage.gradient_bytes, stage.slot_bytes)
    pieces = [
        element("i", class_=name, style=f"width:{100 * part / most:.2f}%", title=f"{text}: {size(part)}")
        for (name, text), part in zip(_MEMORY, parts, strict=True)
        if part and most
    ]
    said = ", ".join(f"{text} {size(part)}" for (_, text), part in zip(_MEMORY, parts, strict=True))
    return element("span", pieces, class_="bar", role="img", aria_label=said)


def boundaries(plan: Plan) -> Markup:
    """What crosses between stages."""
    phased = len({each.phase for each in plan.boundaries}) > 1 or any(each.phase for each in plan.boundaries)
    head = ["boundary", "tensor", "made by", "from", "to", "a micro-batch", "its gradient", "on lines a step"]
    rows = [
        (
            f"{each.name} (phase {each.phase})" if phased else each.name,
            element("code", str(Spec(each.dtype, each.shape))),
            *(each.maker or "–", each.source, ", ".join(each.destinations), _describe_sent(each.bytes, each.taken[0])),
            _describe_sent(each.backward_bytes, each.taken[1]) if each.backward else "does not return",
            *(in_a_step(each, "open"), _describe_holder(each)),
        )
        for each in plan.boundaries
    ]
    said = [f"{each.name}: {line}" for each in plan.boundaries for line in codec_lines(each)]
    drawn = table([*head, "lines held"], rows, numbers=range(5, 9))
    return join_markup(drawn, *(element("p", line, class_="note") for line in said))


def _describe_sent(count: int | None, codec: str) -> str:
    return describe_bytes("open" if count is None else size(count), codec)


def _describe_holder(each: PlanBoundary) -> str:
    ways = [way for way in (each.seconds, each.backward_seconds) if way is not None]
    return " + ".join(map(duration, ways)) or "–"


def links(plan: Plan) -> Markup:
    """The lines between clusters."""
    head = ("link", "line", "tensors a step", "with frames", "messages", "held a step", "delay")
    rows = [
        (
            name.replace("->", " → "),
            *(link.line, bytes_on_link(link), size(link.wire_bytes), f"{link.messages:,}"),
            *(duration(link.seconds) if link.seconds else "–", duration(link.delay) if link.delay else "–"),
        )
        for name, link in plan.links.items()
    ]
    said = " ".join(line.strip() for line in links_bound(plan))
    return join_markup(table(head, rows, numbers=range(2, 7)), element("p", said, class_="note") if said else None)


def list_lines(lines: Iterator[str]) -> Markup:
    """Lines of the plan's text as they are; a line that is indented belongs to the one before."""
    items: list[list[str]] = []
    for line in lines:
        if line.startswith("  ") and items:
            items[-1].append(line.strip())
        else:
            items.append([line])
    return element("ul", [element("li", " ".join(item)) for item in items], class_="plain")


def tied_table(plan: Plan) -> Markup:
    """Variables in several stages."""
    return list_lines(tied_lines(plan))


def once(plan: Plan) -> Markup:
    """What runs once a step."""
    return list_lines(once_lines(plan))


def stage_name(plan: Plan, stage: PlanStage) -> Markup:
    """A stage's name with its cluster's colour."""
    return element("b", stage.name, class_=f"dot c{color(plan, stage.cluster)}")


# ---------------------------------------------------------------------- panels
def stage_panel(plan: Plan, number: int, stage: PlanStage) -> Markup:
    """What opens with a stage: its facts and its layers."""
    facts = (
        ("cluster", stage.cluster),
        ("worker", worker_of(stage)),
        ("parameters", f"{stage.parameters:,} in {len(stage.variables):,} variables"),
        ("FLOPs a step", _flops(stage)),
        ("memory", f"{size(stage.memory_bytes)}{_keeps(stage)}"),
        ("reads", ", ".join(stage.inputs) or "nothing"),
        ("gives", ", ".join(stage.outputs) or "nothing"),
    )
    name = element("span", stage.name, class_=f"dot c{color(plan, stage.cluster)}")
    return element(
        "section",
        element("h3", name, class_="panel-title"),
        _facts(facts),
        element("h4", "Layers"),
        tree(stage),
        id=f"panel-stage-{number}",
        class_="panel",
    )


def _flops(stage: PlanStage) -> str:
    return f"{amount(stage.forward_flops).strip()} forward, {amount(stage.backward_flops).strip()} backward"


def _keeps(stage: PlanStage) -> str:
    if not stage.in_flight or not stage.activation_bytes:
        return ""
    return f", of which activations {size(stage.activation_bytes)} × {stage.in_flight} in flight"


def arrow_panel(plan: Plan, number: int, arrow: Arrow) -> Markup:
    """What opens with an arrow: each tensor that crosses there."""
    names = list(plan.stages)
    source, destination = plan.stages[names[arrow.source]], plan.stages[names[arrow.destination]]
    link = plan.links.get(f"{source.cluster}->{destination.cluster}")
    inside = f"inside cluster {source.cluster}" if source.cluster == destination.cluster else "over a free line"
    where = f"over {link.line}" if link is not None and link.line != "free" else inside
    return element(
        "section",
        element("h3", f"{source.name} → {destination.name}", class_="panel-title"),
        element("p", where, class_="note"),
        [_crossing(each) for each in arrow.boundaries],
        id=f"panel-arrow-{number}",
        class_="panel",
    )


def _crossing(each: PlanBoundary) -> Markup:
    back = _describe_sent(each.backward_bytes, each.taken[1]) if each.backward else "does not return"
    return join_markup(
        element("h4", f"{each.name} ", element("code", str(Spec(each.dtype, each.shape)))),
        _facts(
            (
                ("a micro-batch", _describe_sent(each.bytes, each.taken[0])),
                ("its gradient", back),
                ("on lines a step", in_a_step(each, "open")),
                ("lines held", _describe_holder(each)),
                *([("made by", each.maker)] if each.maker else []),
                *(("besides", line) for line in codec_lines(each)),
                ("to", ", ".join(each.destinations)),
            )
        ),
    )


def _facts(facts: Sequence[tuple[str, str]]) -> Markup:
    pairs = (join_markup(element("dt", name), element("dd", value)) for name, value in facts)
    return element("dl", list(pairs))
