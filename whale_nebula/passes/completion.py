"""Complete layouts: infer the layout of every tensor of a stage from the sharded axes of a few variables.

Ops are visited in topological order: forward, backward, update. Layouts of variables without a given one are inferred:
a variable that is only read, or written, in pieces is held in pieces, and the affected ops are completed again until
nothing changes.

The axis description of an op (`rules`) determines which axes may be cut; among the possible strategies the one with
the fewest bytes in collectives for its inputs and its output is chosen. After a change only those ops are visited again
whose inputs have another layout, or are converted to one. An op without a rule is run whole on every device, with a
note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain
from math import fsum
from typing import Any, NamedTuple

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
    list_collectives,
)
from whale_nebula.passes.effects import SHAPE_OPS
from whale_nebula.passes.facts import (
    ASSIGNS,
    COOPERATIVE,
    SCATTERS,
    Facts,
    LayoutChange,
    find_pieces,
    find_requestable_pieces,
)
from whale_nebula.passes.rules.registry import Axes, Fold, Labels
from whale_nebula.spec import Spec, Value

_LINEAR_OPS = frozenset({
    "Identity", "StopGradient", "PreventGradient", "Snapshot", "Neg", "Cast", "Transpose", "Reshape", "ExpandDims",
    "Squeeze", "Sum", "BroadcastTo", "AddV2", "Add", "AddN", "Sub", "Pack", "ConcatV2", "Tile", "Split", "Unpack",
})  # fmt: skip
"""Ops that are linear in all inputs together: partial sums of these give a partial sum."""
_PRODUCT_OPS = frozenset({"Mul", "MatMul", "BatchMatMulV2", "RealDiv", "Einsum"})
"""Ops that are linear in one input if the others are whole; a quotient in its first."""
_LOOKUP_OPS = frozenset({"GatherV2", "ResourceGather"})


class Strategy(NamedTuple):
    """A way to run an op on several devices: the layouts that it requires of its inputs (None for any), those of its
    outputs, and whether the devices compute jointly (`is_joint`) along an axis that cannot be cut.
    """

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    is_joint: bool = False


class CostedStrategy(NamedTuple):
    """A strategy for an op and the bytes of communication that it causes: for an input in a layout, or None for a
    partial sum. It `repeats` work if devices compute the same, or if one adds a whole value to its part.
    """

    strategy: Strategy
    crossing: tuple[tuple[tuple[Value, Layout] | None, float], ...]
    repeats: bool


@dataclass(frozen=True)
class Question:
    """The input of the completion: the ops of a stage in topological order.

    `variables` are the layouts of variables, of which the `settled` ones are fixed; `parts` maps the placeholder of a
    gradient to the value that it sums; `outside_layouts` are layouts of outside values in pieces, others are whole.
    `wholes` must be whole at the end, and ops in `kept_whole` are run whole. `folds` has the known numbers; `where`
    returns the line of an op. Inputs of the identities `row_starts` are split along axis 0, those of `row_ends` are
    whole if that saves bytes. `row_calls` look up or update rows of a table. `shared` are facts from another question
    on the same ops.
    """

    graph: Graph
    ops: Sequence[int]
    count: int
    variables: Mapping[int, Layout]
    parts: Mapping[Value, Value] = field(default_factory=dict)
    outside_layouts: Mapping[Value, Layout] = field(default_factory=dict)
    wholes: Collection[Value] = ()
    settled: Collection[int] = ()
    kept_whole: Collection[int] = ()
    folds: Mapping[Value, Fold] = field(default_factory=dict)
    where: Callable[[int], str] = lambda op: ""
    row_starts: Collection[int] = ()
    row_ends: Collection[int] = ()
    row_calls: Collection[int] = ()
    shared: Facts | None = None

    @cached_property
    def facts(self) -> Facts:
        """Facts that hold in all visits."""
        return self.shared or Facts(self.graph, self.ops, self.folds, self.parts)


@dataclass
class Completion:
    """The strategies of all ops. `requested_layouts` are made in pieces though all their inputs are whole; `needs` has
    for each converted value and layout the places of the ops that need it, in order. `strategies` caches those of an op
    by the layouts of its inputs and the requested ones of its outputs.
    """

    question: Question
    variables: Mapping[int, Layout]
    requested_layouts: Mapping[Value, Layout] = field(default_factory=dict)
    by_value: dict[Value, Layout] = field(default_factory=dict)
    reshards: dict[int, tuple[Reshard, ...]] = field(default_factory=dict)
    needs: dict[tuple[Value, Layout], tuple[int, ...]] = field(default_factory=dict)
    joint_ops: set[int] = field(default_factory=set)
    strategies: dict[tuple[Any, ...], tuple[CostedStrategy, ...]] = field(default_factory=dict)

    @classmethod
    def start(cls, question: Question) -> Completion:
        """The completion of a question by a first visit of all ops."""
        found = cls(question, question.variables)
        found.revise(range(len(question.ops)))
        return found

    def follow(self, change: LayoutChange) -> Completion:
        """A copy in which variables and materialized values have the pieces of a change."""
        copies = {name: getattr(self, name).copy() for name in ("by_value", "reshards", "needs", "joint_ops")}
        variables = {**self.variables, **change.variables}
        requested_layouts = {**self.requested_layouts, **change.requested_layouts}
        found = replace(self, variables=variables, requested_layouts=requested_layouts, **copies)
        facts = self.question.facts
        changed = [place for variable in change.variables for place in facts.readers(Value(variable))]
        changed += [facts.places[value.op] for value in change.requested_layouts]
        found.revise(changed)
        return found

    def revise(self, places: Iterable[int]) -> None:
        """Visit the ops at these places in order, and all ops that they affect."""
        left = sorted(set(places))
        waiting = set(left)
        while left:
            place = heappop(left)
            waiting.discard(place)
            for each in self.visit(self.question.graph.ops[self.question.ops[place]], place):
                if each > place and each not in waiting:
                    waiting.add(each)
                    heappush(left, each)

    def visit(self, op: Op, place: int) -> Iterable[int]:
        """Choose a strategy for an op; returns the places of readers whose inputs have changed."""
        if not op.inputs:
            return ()
        before = [self.by_value.pop(value, None) for value in op.values]
        key = (op.index, *map(self.layout, op.inputs), *map(self.requested_layouts.get, op.values))
        if key not in self.strategies:
            self.strategies[key] = tuple(self.price_strategy(op, each) for each in self.list_strategies(op))
        costed = self.strategies[key]
        best = min(costed, key=lambda each: self.cost(each, place)).strategy if len(costed) > 1 else costed[0].strategy
        inputs = zip(op.inputs, best.inputs, strict=True)
        changed = self.reshard(op, place, [(value, need) for value, need in inputs if need is not None])
        self.by_value.update(zip(op.values, best.outputs, strict=True))
        (self.joint_ops.add if best.is_joint else self.joint_ops.discard)(op.index)
        changed |= {value for value, was in zip(op.values, before, strict=True) if self.by_value.get(value) != was}
        return chain.from_iterable(map(self.question.facts.readers, changed))

    def price_strategy(self, op: Op, strategy: Strategy) -> CostedStrategy:
        """A strategy with the bytes of communication that it causes, including a later all-reduce of a partial sum."""
        size, count = self.question.facts.size, self.question.count
        crossing: list[tuple[tuple[Value, Layout] | None, float]] = []
        masked = False
        for value, need in zip(op.inputs, strategy.inputs, strict=True):
            held = self.layout(value)
            kind = None if need is None else choose_collective(held, need)
            if need is not None and kind is not None:
                crossing.append(((value, need), count_bytes(kind, size(value), count)))
            masked |= need == PARTIAL_LAYOUT and held == WHOLE_LAYOUT
        for value, layout in zip(op.values, strategy.outputs, strict=True):
            if layout.kind == PARTIAL:
                crossing.append((None, count_bytes("all-reduce", size(value), count)))
        return CostedStrategy(strategy, tuple(crossing), masked or WHOLE_LAYOUT in strategy.outputs)

    def cost(self, costed: CostedStrategy, place: int) -> tuple[float, bool]:
        """Cost of a strategy: bytes of communication, then whether it repeats work. Reshards that an earlier op has
        made are free.
        """
        here = (place,)
        own = (nbytes for key, nbytes in costed.crossing if key is None or self.needs.get(key, here)[0] >= place)
        return sum(own), costed.repeats

    def layout(self, value: Value) -> Layout:
        """The layout of a value: that of its op's strategy, a variable's as it is held, a gradient's as its part."""
        found = self.by_value.get(value)
        if found is not None:
            return found
        part = self.question.parts.get(value)
        if part is not None:
            return self.layout(part)
        return self.variables.get(value.op) or self.question.outside_layouts.get(value, WHOLE_LAYOUT)

    def reshard(self, op: Op, place: int, needs: Iterable[tuple[Value, Layout]]) -> set[Value]:
        """Record which inputs of an op need another layout; returns the values for which that has changed."""
        found, before = self.list_reshards(needs), self.reshards.pop(op.index, ())
        if found:
            self.reshards[op.index] = found
        now, was = ({(each.value, each.target) for each in reshards} for reshards in (found, before))
        for each in now - was:
            self.needs[each] = tuple(sorted((*self.needs.get(each, ()), place)))
        for each in was - now:
            left = tuple(other for other in self.needs.pop(each) if other != place)
            self.needs |= {each: left} if left else {}
        return {value for value, _ in now ^ was}

    def list_reshards(self, needs: Iterable[tuple[Value, Layout]]) -> tuple[Reshard, ...]:
        """The reshards that convert values to these layouts."""
        found = []
        for value, target in needs:
            kind = choose_collective(self.layout(value), target)
            if kind is not None:
                nbytes = count_bytes(kind, self.question.facts.size(value), self.question.count)
                found.append(Reshard(value, self.layout(value), target, kind, nbytes))
        return tuple(found)

    @cached_property
    def all_reshards(self) -> Mapping[int, tuple[Reshard, ...]]:
        """Reshards by the op that needs them, in the order of visits; -1 at the end."""
        places, found = self.question.facts.places, self.reshards
        ends = self.list_reshards([(value, WHOLE_LAYOUT) for value in sorted(self.question.wholes)])
        return {op: found[op] for op in sorted(found, key=places.__getitem__)} | ({-1: ends} if ends else {})

    @cached_property
    def nbytes(self) -> float:
        """Bytes that each device sends."""
        return fsum(each.nbytes for each in list_collectives(self.all_reshards))

    def list_layouts(self) -> Layouts:
        """The resulting layouts."""
        question, facts = self.question, self.question.facts
        layouts = ((value, self.layout(value)) for value in (*facts.values, *sorted(question.wholes)))
        pieces = {value: layout for value, layout in layouts if layout != WHOLE_LAYOUT}
        ops = [op for op in map(question.graph.ops.__getitem__, question.ops) if op.inputs]
        touched = [op for op in ops if not pieces.keys().isdisjoint((*op.inputs, *op.values))]
        alone = {op.index: note for op in touched if (note := self.explain(op))}
        return Layouts(
            question.count,
            pieces,
            self.all_reshards,
            dict(self.variables),
            frozenset(self.joint_ops),
            frozenset(op.index for op in touched),
            tuple(dict.fromkeys(alone.values())),
            whole_op_notes=alone,
        )

    def explain(self, op: Op) -> str:
        """The reason why an op that reads pieces is run whole, if it has no rule for its axes; otherwise ""."""
        found = self.question.facts.describe(op) if self.is_cut(op) and self.find_only_strategy(op) is None else None
        if not isinstance(found, str):
            return ""
        return f"{op.type} runs unsharded on every device: {found} ({self.question.where(op.index)})"

    def is_cut(self, op: Op) -> bool:
        """Whether an input of an op is not whole, or an output is requested in pieces, and the op may be cut."""
        if op.index in self.question.kept_whole:
            return False
        return any(self.layout(value) != WHOLE_LAYOUT for value in op.inputs) or any(
            map(self.requested_layouts.get, op.values)
        )

    def list_strategies(self, op: Op) -> Iterator[Strategy]:
        """All strategies of an op, first the one with everything whole."""
        only = self.find_only_strategy(op)
        yield only or Strategy((WHOLE_LAYOUT,) * len(op.inputs), (WHOLE_LAYOUT,) * len(op.outputs))
        if only is not None or not self.is_cut(op):
            return
        strategies = [*self.list_partial_strategies(op)]
        found = self.question.facts.describe(op)
        if not isinstance(found, str):
            for label in self.list_labels(op, found):
                strategies += self.list_strategies_along(op, found, label)
        for strategy in strategies:  # a value that is several inputs of an op is read in one layout
            needs = {
                (value, need or self.layout(value)) for value, need in zip(op.inputs, strategy.inputs, strict=True)
            }
            if len(needs) == len(set(op.inputs)):
                yield strategy

    def find_only_strategy(self, op: Op) -> Strategy | None:
        """The only possible strategy of an op: of one that reads or writes a variable, or measures a tensor, and of
        marked ones; None for others.
        """
        variable, any_layouts = self.variables.get(op.inputs[0].op, WHOLE_LAYOUT), (None,) * len(op.inputs)
        if op.type in ASSIGNS:
            return Strategy((None, variable, *any_layouts[2:]), ())
        if op.type in SCATTERS:
            return Strategy(
                (None, WHOLE_LAYOUT, self.choose_updates_layout(op, variable)), (), variable != WHOLE_LAYOUT
            )
        if op.type == "ReadVariableOp":
            return Strategy(any_layouts, (variable,))
        if op.type == "IdentityN":
            return Strategy(any_layouts, tuple(self.layout(value) for value in op.inputs))
        if op.index in self.question.row_starts:
            return Strategy((Layout(SPLIT, 0),), (Layout(SPLIT, 0),))
        if op.index in self.question.row_ends:
            return Strategy((WHOLE_LAYOUT,), (WHOLE_LAYOUT,))
        if op.index in self.question.row_calls and self.layout(op.inputs[-2]).kind == SPLIT:
            whole, held = (WHOLE_LAYOUT, WHOLE_LAYOUT), self.layout(op.inputs[-2])
            pulls = len(op.outputs) > 1  # ids, places and rows; else zeros for the variable
            given = (WHOLE_LAYOUT,) * (len(op.inputs) - 2)
            return Strategy((*given, None, WHOLE_LAYOUT), (*whole, PARTIAL_LAYOUT) if pulls else (held,), True)
        if op.type in SHAPE_OPS:
            return Strategy(any_layouts, (WHOLE_LAYOUT,) * len(op.outputs))
        return None

    def list_partial_strategies(self, op: Op) -> Iterator[Strategy]:
        """Strategies that keep partial sums, for ops that are linear in them."""
        floating = [self.question.graph.spec(value).floating for value in op.inputs]
        partial = [place for place, value in enumerate(op.inputs) if self.layout(value).kind == PARTIAL]
        outputs = (PARTIAL_LAYOUT,) * len(op.outputs)
        if not partial or not all(spec.floating for spec in op.outputs):
            return
        if op.type in _LINEAR_OPS:
            yield Strategy(tuple(PARTIAL_LAYOUT if number else WHOLE_LAYOUT for number in floating), outputs)
        elif op.type in _PRODUCT_OPS and (op.type != "RealDiv" or partial == [0]):
            for place in partial:
                needs = [PARTIAL_LAYOUT if at == place else WHOLE_LAYOUT for at in range(len(op.inputs))]
                yield Strategy(tuple(needs), outputs)

    def list_labels(self, op: Op, found: Axes) -> list[str]:
        """The labels of the axes along which an input is sharded, or an output is requested to be."""
        sides = zip(op.inputs, found.inputs, strict=False)
        held = [(self.layout(value), side) for value, side in sides if side is not None]
        made = zip(op.values, found.outputs, strict=True)
        held += [(self.requested_layouts.get(value, WHOLE_LAYOUT), side) for value, side in made if side is not None]
        return list(dict.fromkeys(side[layout.axis] for layout, side in held if layout.kind == SPLIT))

    def list_strategies_along(self, op: Op, found: Axes, label: str) -> Iterator[Strategy]:
        """The strategy of an op, if any, in which the axis with this label is cut in all operands that have it."""
        goes = not any(label in (side or ()) for side in found.outputs)
        together = label in found.mixed or (goes and found.folded in ("max", "min"))
        if together and op.type not in COOPERATIVE | _LOOKUP_OPS:
            return
        sides = [*found.inputs, *[None] * (len(op.inputs) - len(found.inputs))]
        specs = self.list_input_specs(op, sides, found.outputs)
        units = self.count_units(op, [*sides, *found.outputs], [*specs, *map(self.spec, op.values)], label)
        if 0 < units < self.question.count:
            return  # a device would have an empty piece, which not every kernel supports
        inputs = [
            _choose_operand_layout(side or (), label, spec, units) for side, spec in zip(sides, specs, strict=True)
        ]
        outputs = []
        for spec, side in zip(map(self.spec, op.values), found.outputs, strict=True):
            if side is not None and label in side:
                outputs.append(_choose_operand_layout(side, label, spec, units))
            elif together and op.type in COOPERATIVE:
                outputs.append(WHOLE_LAYOUT)
            elif side is not None and spec.floating and (together or found.folded in ("sum", "mean")):
                outputs.append(PARTIAL_LAYOUT)  # of a lookup: a device has zeros for rows that it does not hold
            else:
                return
        yield Strategy(tuple(inputs), tuple(outputs), together)

    def count_units(self, op: Op, sides: Sequence[Labels | None], specs: Sequence[Spec], label: str) -> int:
        """The number of indivisible units of an axis: the smallest in any operand; 0 if unknown."""
        sizes = []
        for value, side, spec in zip((*op.inputs, *op.values), sides, specs, strict=True):
            shape = spec.shape
            if side is None or label not in side or shape is None:
                continue
            axis, layout = list(side).index(label), self.layout(value)
            size = layout.units if layout == Layout(SPLIT, axis, layout.units) and layout.units else shape[axis]
            if size is not None and size > 1:
                sizes.append(size)
        return min(sizes, default=0)

    def spec(self, value: Value) -> Spec:
        """The spec of a value; with an unknown shape for a variable's handle."""
        found = self.question.facts.spec(value)
        return Spec(found.dtype, None) if found.dtype == "resource" else found

    def list_input_specs(self, op: Op, sides: Sequence[Labels | None], outputs: Sequence[Labels | None]) -> list[Spec]:
        """The specs of an op's inputs; that of a variable's handle has the axes that the op's outputs have too."""
        specs = [self.spec(value) for value in op.inputs]
        if all(spec.dtype != "resource" for spec in specs):
            return specs
        made = [(side, self.spec(value).shape) for value, side in zip(op.values, outputs, strict=True)]
        sizes = {label: size for side, shape in made for label, size in zip(side or (), shape or (), strict=False)}
        return [
            Spec(spec.dtype, tuple(map(sizes.get, side))) if spec.dtype == "resource" and side else spec
            for spec, side in zip(specs, sides, strict=True)
        ]

    def choose_updates_layout(self, op: Op, variable: Layout) -> Layout:
        """The layout of rows that are scattered into a variable: a device receives all of its own rows, or a piece of
        each.
        """
        numbers, rows = (self.spec(value).rank for value in op.inputs[1:])
        if variable.kind != SPLIT or variable.axis == 0 or not rows or numbers is None:
            return WHOLE_LAYOUT
        return replace(variable, axis=variable.axis + numbers - 1)


def _choose_operand_layout(side: Labels, label: str, spec: Spec, units: int) -> Layout:
    """The layout of an operand with these labels if an axis is split; an operand with a single entry there is whole."""
    axis = list(side).index(label) if label in side else -1
    size = None if spec.shape is None or axis < 0 else spec.shape[axis]
    if axis < 0 or size == 1:
        return WHOLE_LAYOUT
    return Layout(SPLIT, axis, 0 if size == units else units)


_EXTRA_BYTES = 64
"""Additional bytes, of norms for example, that may cross if a value is made in pieces instead of whole."""


def complete_layouts(question: Question) -> Layouts:
    """The layouts of all values of a question. Variables without a given layout get the pieces that some reader or
    writer uses, and materialized values are sharded, if that adds no communication: all of them if possible, else
    greedily until nothing changes.
    """
    found = _follow_pieces(question)
    apart = _follow_pieces(replace(question, row_ends=())) if question.row_ends else found
    return min(apart, found, key=lambda each: each.nbytes)


def _follow_pieces(question: Question) -> Layouts:
    run = Completion.start(question)
    while True:
        changes = list(_list_changes(run))
        for change in [LayoutChange.join(changes), *changes] if len(changes) > 1 else changes:
            other = run.follow(change)
            if other.nbytes <= run.nbytes + (_EXTRA_BYTES if change.requested_layouts else 0):
                run = other
                break
        else:
            return run.list_layouts()


def _list_changes(run: Completion) -> Iterator[LayoutChange]:
    """The variables and values that could be sharded in addition."""
    known = {*run.question.settled, *run.variables}
    for variable, layout in find_pieces(run.question.graph, run.all_reshards).items():
        if variable not in known:
            yield LayoutChange({variable: layout}, {})
    for change in find_requestable_pieces(
        run.question.facts, run.all_reshards, known, lambda value: run.layout(value) == WHOLE_LAYOUT
    ):
        if not change.requested_layouts.keys() <= run.requested_layouts.keys():
            yield change
