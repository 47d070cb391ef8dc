"""What could be in pieces beside what is: variables that are read or written so, and what is made whole to be cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.layout import SLICE, SPLIT, Layout, Reshard
from whale_nebula.passes.facts import ASSIGNS, Facts
from whale_nebula.passes.rules.registry import Axes
from whale_nebula.spec import Value

DEALS = "UnsortedSegmentSum"
"""The op that adds rows up by their numbers: of whole rows, a device can make its own part of the sums."""


class Step(NamedTuple):
    """Variables, and values of which all is whole that they are made of, and the pieces that they could be in."""

    variables: Mapping[int, Layout]
    wanted: Mapping[Value, Layout]

    @classmethod
    def join(cls, steps: Iterable[Step]) -> Step:
        """All of them at once."""
        variables, wanted = dict[int, Layout](), dict[Value, Layout]()
        for step in steps:
            variables |= step.variables
            wanted |= step.wanted
        return cls(variables, wanted)


def find_pieces(graph: Graph, needed: Mapping[int, Sequence[Reshard]]) -> dict[int, Layout]:
    """Variables that are read, or written, in pieces, of which all that take such take the same."""
    pieces: dict[int, set[Layout]] = {}
    for op, reshards in needed.items():
        for each in reshards if op >= 0 else ():
            source, reader = graph.ops[each.value.op], graph.ops[op]
            if source.type == "ReadVariableOp" and each.target.kind == SPLIT:
                pieces.setdefault(source.inputs[0].op, set()).add(each.target)
            elif reader.type in ASSIGNS and each.source.kind == SPLIT:
                pieces.setdefault(reader.inputs[0].op, set()).add(each.source)
    return {variable: layouts.pop() for variable, layouts in pieces.items() if len(layouts) == 1}


def find_wanted(
    facts: Facts, needed: Mapping[int, Sequence[Reshard]], known: Collection[int], is_whole: Callable[[Value], bool]
) -> Iterator[Step]:
    """For each value that is cut after it was made whole: itself and all that it is made of, entry by entry, where that
    begins with a variable that is not `known` or with rows that are added up by their numbers. These are not needed
    whole then.
    """
    graph = facts.graph
    for each in (each for reshards in needed.values() for each in reshards if each.kind == SLICE):
        variables, wanted, left = dict[int, Layout](), dict[Value, Layout](), [(each.value, each.target)]
        while left:
            value, layout = left.pop()
            op = graph.ops[value.op]
            if value in wanted or op.index not in facts.places or not op.inputs or not is_whole(value):
                continue
            if op.type == "ReadVariableOp":
                variables |= {} if op.inputs[0].op in known else {op.inputs[0].op: layout}
                continue
            axes = facts.describe(op)
            if not isinstance(axes, str) and (op.type == DEALS or _is_by_entry(axes, value.out)):
                wanted[value] = layout
                left += _list_sources(graph, op, axes, value.out, layout)
        if variables or any(graph.ops[value.op].type == DEALS for value in wanted):
            yield Step(variables, wanted)


def _is_by_entry(axes: Axes, out: int) -> bool:
    """Whether an entry of what an op makes depends on one of each operand alone."""
    made = set(axes.outputs[out] or ())
    return not axes.mixed and all(set(side or ()) <= made for side in axes.inputs)


def _list_sources(graph: Graph, op: Op, axes: Axes, out: int, layout: Layout) -> Iterator[tuple[Value, Layout]]:
    """The operands of which a device needs its piece alone, where what is made is in these pieces."""
    label = list(axes.outputs[out] or ())[layout.axis]
    for value, side in zip(op.inputs, axes.inputs, strict=False):
        shape = graph.spec(value).shape
        if side is not None and label in side and shape is not None and shape[list(side).index(label)] != 1:
            yield value, Layout(SPLIT, list(side).index(label), layout.units)
