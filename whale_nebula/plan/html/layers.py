"""The layers of a stage as a tree of HTML elements that open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from whale_nebula.plan.html.markup import Markup, element
from whale_nebula.plan.records import PlanLayer, PlanStage
from whale_nebula.plan.text import amount
from whale_nebula.report.records import size

_COUNTS = [each.name for each in fields(PlanLayer) if each.name != "name"]
_HEAD = ("layer", "ops", "parameters", "FLOPs a step", "keeps")


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
        for part in (layer.name or "outside layers").split("/"):
            branch = branch.inside.setdefault(part, Branch(part))
        branch.own = layer
    return root


def tree(stage: PlanStage) -> Markup:
    """The tree of a stage."""
    root = branches(stage.layers)
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
