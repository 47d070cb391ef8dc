"""Complete layouts: from what a few variables are split along to the layout of every tensor of a stage.

Ops are visited once, in an order in which everything that an op reads comes before it: forward, backward, update. What
an op does to axes (`rules`) says which of them may be cut; of the ways that are left the one is taken for which the
fewest bytes cross, by the collectives that its inputs and its output need. Variables of which nothing was said follow:
one that is only ever read, or written, in pieces is held in pieces, and all is completed anew until nothing changes.

What no rule knows is run whole on every device, and a note says at which op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.layout import (
    PARTIAL,
    PARTIAL_LAYOUT,
    SPLIT,
    WHOLE_LAYOUT,
    Layout,
    Layouts,
    Reshard,
    choose_collective,
    count_bytes,
)
from whale_nebula.passes.pieces import ASSIGNS, Step, find_pieces, find_wanted
from whale_nebula.passes.rules.interpret import Bodies
from whale_nebula.passes.rules.registry import ROWS, RULES, UNDER, Axes, Fold, Labels, Site, whole
from whale_nebula.spec import Spec, Value

_LINEAR = frozenset(
    [
        "Identity",
        "StopGradient",
        "PreventGradient",
        "Snapshot",
        "Neg",
        "Cast",
        "Transpose",
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Sum",
        "BroadcastTo",
        "AddV2",
        "Add",
        "AddN",
        "Sub",
        "Pack",
        "ConcatV2",
        "Tile",
        "Split",
        "Unpack",
    ]
)
"""Ops that make parts of a sum of parts of sums, whichever inputs these are."""
_PRODUCTS = frozenset({"Mul", "MatMul", "BatchMatMulV2", "RealDiv", "Einsum"})
"""Ops that do so of one input, where the others are whole; a quotient of its first."""
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
"""Ops that read of a tensor its form alone, which is the whole's on every device."""
SCATTERS = frozenset(f"ResourceScatter{what}" for what in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update"))
"""Ops that change some rows of a variable, by their numbers."""
_LOOKUPS = frozenset({"GatherV2", "ResourceGather"})
COOPERATIVE = frozenset(
    [
        "Softmax",
        "LogSoftmax",
        "SparseSoftmaxCrossEntropyWithLogits",
        "SoftmaxCrossEntropyWithLogits",
        "ArgMax",
        "ArgMin",
        "InTopK",
        "InTopKV2",
        "TopKV2",
        "Max",
        "Min",
    ]
)
"""Ops that devices compute together along an axis that cannot be cut: by sums and maxima over them."""
_NUMBERS = 64
"""Bytes that may cross in addition, of norms and the like, where something is made in pieces instead of whole."""
_SIZED = frozenset({"Reshape", "DepthwiseConv2dNative"})
"""Ops that give an axis another size than it has in their operands."""
ROWS_COUNTED = 32
"""How many rows a batch has where bytes are compared."""


class Strategy(NamedTuple):
    """A way to run an op on the devices: the layouts that it needs, None for any, and those of what it makes; and
    whether an axis that cannot be cut is, so that the devices compute it `together`.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    together: bool = False


@dataclass(frozen=True)
class Question:
    """What is to be completed: the ops of a stage, in an order in which values come before their readers.

    `variables` says what is held how, and those that are `settled` stay so; `parts` of which value the placeholder of a
    gradient is the sum; `given` are values that come from elsewhere in pieces, others that do are whole. `wholes` has
    to be whole at the end, and ops that are `kept_whole` are run so. `folds` holds the known numbers; `where` tells the
    line that made an op. What the identities `row_starts` read is split along axis 0, what `row_ends` read is whole if
    fewer bytes cross then. `described` and `sizes` keep what is the same in all visits.
    """

    graph: Graph
    ops: Sequence[int]
    count: int
    variables: Mapping[int, Layout]
    parts: Mapping[Value, Value] = field(default_factory=dict)
    given: Mapping[Value, Layout] = field(default_factory=dict)
    wholes: Collection[Value] = ()
    settled: Collection[int] = ()
    kept_whole: Collection[int] = ()
    folds: Mapping[Value, Fold] = field(default_factory=dict)
    where: Callable[[int], str] = lambda op: ""
    row_starts: Collection[int] = ()
    row_ends: Collection[int] = ()
    specs: Mapping[Value, Spec] = field(default_factory=dict)
    described: dict[int, Axes | str] = field(default_factory=dict)
    sizes: dict[Value, float] = field(default_factory=dict)

    def spec(self, value: Value) -> Spec:
        """The form of a value; `specs` are those that are known better than where it was traced."""
        return self.specs.get(value) or self.graph.spec(value)

    def describe(self, op: Op) -> Axes | str:
        """What an op does to axes, or why that is not known. It is found once for all visits."""
        if op.index not in self.described:
            self.described[op.index] = _describe(self, op)
        return self.described[op.index]

    def size(self, value: Value) -> float:
        """Bytes of a value. A variable in pieces is never brought together where only its handle is read."""
        if value not in self.sizes:
            self.sizes[value] = _count_size(self, value)
        return self.sizes[value]


def complete_layouts(question: Question) -> Layouts:
    """The layouts of all values. Variables of which nothing was said are held in the pieces that some reader or writer
    takes, and what is made to be cut is made in pieces, where no more bytes cross then: all of it that can be, else one
    after the other, until nothing changes.
    """
    question = replace(question, specs=_find_sizes(question), described={}, sizes={})
    found = _follow_pieces(question)
    apart = _follow_pieces(replace(question, row_ends=())) if question.row_ends else found
    return min(apart, found, key=lambda each: each.nbytes)


def _follow_pieces(question: Question) -> Layouts:
    found, made = _complete(question, question.variables, {}), dict[Value, Layout]()
    while True:
        steps = list(_list_steps(question, found, made))
        tries = [Step.join(steps), *steps] if len(steps) > 1 else steps
        for step in tries:
            other = _complete(question, {**found.variables, **step.variables}, {**made, **step.wanted})
            if other.nbytes <= found.nbytes + (_NUMBERS if step.wanted else 0):
                found, made = other, {**made, **step.wanted}
                break
        else:
            return found


def _list_steps(question: Question, found: Layouts, made: Mapping[Value, Layout]) -> Iterator[Step]:
    """What could be held, or made, in pieces beside what is already."""
    known = {*question.settled, *found.variables}
    for variable, layout in find_pieces(question.graph, found).items():
        if variable not in known:
            yield Step({variable: layout}, {})
    for step in find_wanted(question.graph, question.ops, found, known, question.describe):
        if not step.wanted.keys() <= made.keys():
            yield step


def _describe(question: Question, op: Op) -> Axes | str:
    """What an op does to axes, or why that is not known."""
    entry = RULES.get(op.type)
    if entry is None or entry.axes is None:
        return "no rule says what it does to axes"
    folds = tuple(question.folds.get(value, whole()) for value in op.inputs)
    return entry.axes(Site(question.graph, op, folds, Bodies(), op.index, question.specs))


def _count_size(question: Question, value: Value) -> float:
    spec = question.spec(value)
    if spec.dtype == "resource":
        return math.inf
    op, fold = question.graph.ops[value.op], question.folds.get(value, whole())
    if op.type == "Reshape" and spec.shape is not None and None in spec.shape:
        return question.size(op.inputs[0])
    own = fold.order[1] if fold.order[:1] == (UNDER,) else fold.per
    return spec.nbytes(ROWS_COUNTED) * (own if fold.kind == ROWS and own > 0 else 1)


def _find_sizes(question: Question) -> dict[Value, Spec]:
    """The forms of values of which a size was not known where they were traced, and an operand has it on that axis."""
    found: dict[Value, Spec] = {}
    question = replace(question, specs=found)
    for op in map(question.graph.ops.__getitem__, question.ops):
        if op.type in _SIZED or all(spec.shape is None or None not in spec.shape[1:] for spec in op.outputs):
            continue
        axes = _describe(question, op)
        if isinstance(axes, str):
            continue
        sizes: dict[str, int | None] = {}
        for value, side in zip(op.inputs, axes.inputs, strict=False):
            pairs = zip(side or (), question.spec(value).shape or (), strict=False)
            sizes |= {label: size for label, size in pairs if size is not None and size > 1}
        if op.type in ("Sum", "Mean", "Max", "Min"):  # what is folded stays as an axis of one entry, if it stays
            read = {label for side in axes.inputs for label in side or ()}
            sizes |= {label: 1 for label in axes.outputs[0] or () if label not in read}
        for value, spec, side in zip(op.values, op.outputs, axes.outputs, strict=True):
            if side is not None and spec.shape is not None and len(side) == len(spec.shape):
                kept = [label not in axes.mixed or op.type in COOPERATIVE for label in side]
                triples = zip(side, kept, spec.shape, strict=True)
                shape = (sizes.get(label) if size is None and same else size for label, same, size in triples)
                found[value] = spec._replace(shape=tuple(shape))
    return found


def _complete(question: Question, variables: Mapping[int, Layout], wanted: Mapping[Value, Layout]) -> Layouts:
    run = _Completion(question, variables, wanted)
    for op in question.ops:
        run.visit(question.graph.ops[op])
    run.reshard(-1, [(value, WHOLE_LAYOUT) for value in sorted(question.wholes)])
    pieces = {value: layout for value, layout in run.of.items() if layout != WHOLE_LAYOUT}
    together, touched, notes = frozenset(run.together), frozenset(run.touched), tuple(dict.fromkeys(run.alone.values()))
    sizes = {op: question.size(question.graph.ops[op].inputs[0]) for op in together}
    return Layouts(
        question.count, pieces, run.reshards, dict(variables), together, touched, notes, alone=run.alone, sizes=sizes
    )


@dataclass
class _Completion:
    """One visit of all ops. `wanted` are made in pieces though all is whole that they are made of; `made` are the
    layouts in which values are there already.
    """

    question: Question
    variables: Mapping[int, Layout]
    wanted: Mapping[Value, Layout]
    of: dict[Value, Layout] = field(default_factory=dict)
    reshards: dict[int, tuple[Reshard, ...]] = field(default_factory=dict)
    made: set[tuple[Value, Layout]] = field(default_factory=set)
    together: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    alone: dict[int, str] = field(default_factory=dict)

    def visit(self, op: Op) -> None:
        """Choose how an op is run."""
        if not op.inputs:
            return
        strategies = list(self.list_strategies(op))
        best = min(strategies, key=lambda each: self.cost(op, each)) if len(strategies) > 1 else strategies[0]
        needs = zip(op.inputs, best.inputs, strict=True)
        self.reshard(op.index, [(value, need) for value, need in needs if need is not None])
        self.of.update(zip(op.values, best.outputs, strict=True))
        if best.together:
            self.together.add(op.index)
        if any(self.layout(value) != WHOLE_LAYOUT for value in (*op.inputs, *op.values)):
            self.touched.add(op.index)

    def layout(self, value: Value) -> Layout:
        """How a value lies: as the op that makes it leaves it, a variable as it is held, a gradient as its part."""
        if value not in self.of:
            part = self.question.parts.get(value)
            held = self.variables.get(value.op, self.question.given.get(value, WHOLE_LAYOUT))
            self.of[value] = held if part is None else self.layout(part)
        return self.of[value]

    def reshard(self, op: int, needs: Sequence[tuple[Value, Layout]]) -> None:
        """Write down what an op needs in another layout than it has."""
        found = []
        for value, target in needs:
            kind = choose_collective(self.layout(value), target)
            if kind is not None:
                nbytes = count_bytes(kind, self.question.size(value), self.question.count)
                found.append(Reshard(value, self.layout(value), target, kind, nbytes))
                self.made.add((value, target))
        if found:
            self.reshards[op] = tuple(found)

    def cost(self, op: Op, way: Strategy) -> tuple[float, bool]:
        """Bytes that cross for a way, those with which a part of a sum will be summed among them; then whether devices
        do again what others do, or one adds what is whole to its part.
        """
        cost = 0.0
        for value, need in zip(op.inputs, way.inputs, strict=True):
            if need is not None and (value, need) not in self.made:
                cost += count_bytes(
                    choose_collective(self.layout(value), need), self.question.size(value), self.question.count
                )
        for value, layout in zip(op.values, way.outputs, strict=True):
            if layout.kind == PARTIAL:
                cost += count_bytes("all-reduce", self.question.size(value), self.question.count)
        masked = any(
            need == PARTIAL_LAYOUT and self.layout(value) == WHOLE_LAYOUT
            for value, need in zip(op.inputs, way.inputs, strict=True)
        )
        return cost, masked or WHOLE_LAYOUT in way.outputs

    def list_strategies(self, op: Op) -> Iterator[Strategy]:
        """All ways to run an op; that in which all is whole comes first."""
        variable = self.variables.get(op.inputs[0].op, WHOLE_LAYOUT)
        if op.type in ASSIGNS:
            yield Strategy((None, variable, *[None] * (len(op.inputs) - 2)), ())
            return
        if op.type in SCATTERS:
            yield Strategy((None, WHOLE_LAYOUT, self.lay_updates(op, variable)), (), variable != WHOLE_LAYOUT)
            return
        if op.type == "ReadVariableOp":
            yield Strategy((None,) * len(op.inputs), (variable,))
            return
        if op.type == "IdentityN":
            yield Strategy((None,) * len(op.inputs), tuple(self.layout(value) for value in op.inputs))
            return
        if op.index in self.question.row_starts:
            yield Strategy((Layout(SPLIT, 0),), (Layout(SPLIT, 0),))
            return
        if op.index in self.question.row_ends:
            yield Strategy((WHOLE_LAYOUT,), (WHOLE_LAYOUT,))
            return
        if op.type in _SHAPES:
            yield Strategy((None,) * len(op.inputs), (WHOLE_LAYOUT,) * len(op.outputs))
            return
        yield Strategy((WHOLE_LAYOUT,) * len(op.inputs), (WHOLE_LAYOUT,) * len(op.outputs))
        alone = all(self.layout(value) == WHOLE_LAYOUT for value in op.inputs)
        if op.index in self.question.kept_whole or (alone and not any(value in self.wanted for value in op.values)):
            return
        yield from self.list_partial_strategies(op)
        found = self.question.describe(op)
        if isinstance(found, str):
            where = self.question.where(op.index)
            self.alone[op.index] = f"{op.type} is run whole on every device: {found} ({where})"
            return
        for label in self.list_labels(op, found):
            yield from self.list_strategies_along(op, found, label)

    def list_partial_strategies(self, op: Op) -> Iterator[Strategy]:
        """Parts of sums stay such where an op is linear in them."""
        floating = [self.question.graph.spec(value).floating for value in op.inputs]
        partial = [place for place, value in enumerate(op.inputs) if self.layout(value).kind == PARTIAL]
        outputs = (PARTIAL_LAYOUT,) * len(op.outputs)
        if not partial or not all(spec.floating for spec in op.outputs):
            return
        if op.type in _LINEAR:
            yield Strategy(tuple(PARTIAL_LAYOUT if number else WHOLE_LAYOUT for number in floating), outputs)
        elif op.type in _PRODUCTS and (op.type != "RealDiv" or partial == [0]):
            for place in partial:
                needs = [PARTIAL_LAYOUT if at == place else WHOLE_LAYOUT for at in range(len(op.inputs))]
                yield Strategy(tuple(needs), outputs)

    def list_labels(self, op: Op, found: Axes) -> list[str]:
        """The axes along which an input lies in pieces, or what the op makes is wanted so."""
        sides = zip(op.inputs, found.inputs, strict=False)
        held = [(self.layout(value), side) for value, side in sides if side is not None]
        made = zip(op.values, found.outputs, strict=True)
        held += [(self.wanted.get(value, WHOLE_LAYOUT), side) for value, side in made if side is not None]
        return list(dict.fromkeys(side[layout.axis] for layout, side in held if layout.kind == SPLIT))

    def list_strategies_along(self, op: Op, found: Axes, label: str) -> Iterator[Strategy]:
        """The way of an op in which one axis is cut, wherever it is among the operands."""
        goes = not any(label in (side or ()) for side in found.outputs)
        together = label in found.mixed or (goes and found.folded in ("max", "min"))
        if together and op.type not in COOPERATIVE | _LOOKUPS:
            return
        sides = [*found.inputs, *[None] * (len(op.inputs) - len(found.inputs))]
        units = self.count_units(op, [*sides, *found.outputs], label)
        specs = [self.spec(value) for value in op.inputs]
        inputs = [_lay(side or (), label, spec, units) for side, spec in zip(sides, specs, strict=True)]
        outputs = []
        for spec, side in zip(map(self.spec, op.values), found.outputs, strict=True):
            if side is not None and label in side:
                outputs.append(_lay(side, label, spec, units))
            elif together and op.type in COOPERATIVE:
                outputs.append(WHOLE_LAYOUT)
            elif side is not None and spec.floating and (together or found.folded in ("sum", "mean")):
                outputs.append(PARTIAL_LAYOUT)  # of a look-up: a device has zeros for what it does not hold
            else:
                return
        yield Strategy(tuple(inputs), tuple(outputs), together)

    def count_units(self, op: Op, sides: Sequence[Labels | None], label: str) -> int:
        """How many units an axis has: no more than the smallest of the sizes that it has in any operand."""
        sizes = []
        for value, side in zip((*op.inputs, *op.values), sides, strict=True):
            shape = self.spec(value).shape
            if side is None or label not in side or shape is None:
                continue
            axis, layout = list(side).index(label), self.layout(value)
            size = layout.units if layout == Layout(SPLIT, axis, layout.units) and layout.units else shape[axis]
            if size is not None and size > 1:
                sizes.append(size)
        return min(sizes, default=0)

    def spec(self, value: Value) -> Spec:
        """The form of a value; that of a variable is not known by its handle."""
        found = self.question.spec(value)
        return Spec(found.dtype, None) if found.dtype == "resource" else found

    def lay_updates(self, op: Op, variable: Layout) -> Layout:
        """How the rows lie that are put into a variable: a device takes of all those that are its own, or of each a
        piece.
        """
        numbers, rows = (self.spec(value).rank for value in op.inputs[1:])
        if variable.kind != SPLIT or variable.axis == 0 or not rows or numbers is None:
            return WHOLE_LAYOUT
        return replace(variable, axis=variable.axis + numbers - 1)


def _lay(side: Labels, label: str, spec: Spec, units: int) -> Layout:
    """The layout of an operand with these labels where an axis is split; one entry there is whole."""
    axis = list(side).index(label) if label in side else -1
    size = None if spec.shape is None or axis < 0 else spec.shape[axis]
    if axis < 0 or size == 1:
        return WHOLE_LAYOUT
    return Layout(SPLIT, axis, 0 if size == units else units)
