"""The abstract interpreter: applies each op's rule, in trace order.

Three rewrites change inputs with which an op's rule alone would couple the rows or lose a sum. Feed: a value of inputs
only is computed for the whole batch. Grow: a differentiated value is multiplied by rows / rows_m; a sum becomes a mean,
and a number of rows that of the whole batch. Recount: a model output of which only the shape is read is replaced by an
input's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.ir.layout import ROW_GROUPS
from whale_nebula.passes.effects import find_written_inputs, is_effect
from whale_nebula.passes.rules.reductions import reduced_spec
from whale_nebula.passes.rules.registry import (
    AFTER,
    COUNT,
    COUPLED,
    INVERSE,
    MEAN,
    ROWS,
    SUM,
    WHOLE,
    Fold,
    Node,
    count,
    rows,
    transfer,
    whole,
)
from whale_nebula.spec import Spec, Value

_ONCE = frozenset({SUM, MEAN, INVERSE, AFTER, COUPLED})
_BADNESS = {AFTER: 1, COUPLED: 2}


class Edge(NamedTuple):
    """One input of one op."""

    consumer: int
    position: int
    value: Value


class Recount(NamedTuple):
    """A read of the shape of a model's output, to be replaced by `sizes`, in which None is the count of rows along
    `axis` of `rows`.
    """

    edge: Edge
    rows: Value
    axis: int
    sizes: tuple[int | None, ...]


Outcome = tuple[Fold, ...]
FED_FOLD = whole()._replace(inputs=True)
"""The fold of a value that is computed for the whole batch."""


def feed_inputs(
    node: Node, outcome: Outcome, requested: set[Value], *, always: bool, apart: bool
) -> tuple[Node, Outcome]:
    """Read values of inputs alone as computed for the whole batch: always, or if the outcome is better. They are added
    to `requested`.

    If micro-batches may be `apart`, a coupled value may consist of rows: then its size is unknown, and each micro-batch
    has its own.
    """
    places = [
        place
        for place, fold in enumerate(node.folds)
        if fold.inputs and (fold.kind in _ONCE or (fold.kind == COUNT and node.spec(place).floating))
        if not (apart and fold.kind == COUPLED and _lacks_sizes(node.spec(place)))
    ]
    if not places:
        return node, outcome
    mended, better = _try_fix(node, places, lambda _: FED_FOLD)
    if not always and rank_outcome(better) >= rank_outcome(outcome):
        return node, outcome
    requested.update(node.op.inputs[place] for place in places)
    return mended, better


def _lacks_sizes(spec: Spec) -> bool:
    return spec.shape is None or None in spec.shape


def list_check_inputs(node: Node) -> list[Value]:
    """The inputs of an assertion that should be those of the whole batch: scalars that depend on inputs only.

    An assertion on all rows can be made in each micro-batch, which the error then names.
    """

    def for_all(fold: Fold) -> bool:
        return fold.kind == COUPLED and 0 <= fold.blame < len(node.graph) and node.graph.ops[fold.blame].type == "All"

    folds = zip(node.op.inputs, node.folds, strict=True)
    return [value for value, fold in folds if fold.inputs and fold.kind in _ONCE and not for_all(fold)]


def recount_rows(node: Node, recounts: list[Recount]) -> Node:
    """Replace the number of rows in reshapes of inputs by their own, so that the result depends on inputs only."""
    if node.op.type != "Reshape" or not node.folds[0].inputs or node.folds[1].inputs:
        return node
    data, parts = node.folds[0], node.parts(1)
    sizes = (
        None if data.kind != ROWS or parts is None else tuple(_find_requested_size(part, data.per) for part in parts)
    )
    if sizes is None or sizes.count(None) != 1 or sizes.count(-1) > 1:
        return node
    rows, shape = node.op.inputs
    recounts.append(Recount(Edge(node.op.index, 1, shape), rows, data.axis, sizes))
    return replace(node, folds=(data, node.folds[1]._replace(inputs=True)))


def _find_requested_size(part: Fold, per: int) -> int | None:
    """A size of a shape: -1 if unknown, None if it counts rows like the data."""
    if part.kind == COUNT and part.per == per > 0:
        return None
    return int(part.literal[0]) if part.kind == WHOLE and part.literal is not None else -1


def find_counted_sizes(node: Node) -> tuple[int | None, ...] | None:
    """The sizes of a model's output if an op reads only these, the rows as None; None if one is unknown.

    An example is Keras's mask of a `Concatenate` of a masked and an unmasked tensor: ones of the size of the latter.
    """
    if node.op.type not in SHAPE_ONLY_OPS:
        return None
    data, shape = node.folds[0], node.spec(0).shape
    if data.inputs or data.kind != ROWS or data.per != 1 or data.order or data.ragged or shape is None:
        return None
    sizes = tuple(None if axis == data.axis else size for axis, size in enumerate(shape))
    return sizes if sizes.count(None) == 1 else None


SHAPE_ONLY_OPS = frozenset({"Shape", "ZerosLike", "OnesLike"})
"""Ops that read only the shape of a tensor."""


def grow_operands(node: Node, outcome: Outcome, edges: list[Edge]) -> Outcome:
    """Multiply counts, sums or both by rows / rows_m, as a last resort."""
    for kinds in ({COUNT}, {SUM}, {COUNT, SUM}):
        places = [at for at, fold in enumerate(node.folds) if fold.kind in kinds and node.spec(at).floating]
        if not places or rank_outcome(outcome) == 0:
            continue
        mended, better = _try_fix(node, places, lambda fold: whole() if fold.kind == COUNT else Fold(MEAN))
        if rank_outcome(better) < rank_outcome(outcome):
            edges.extend(Edge(node.op.index, place, node.op.inputs[place]) for place in places)
            node, outcome = mended, better
    return outcome


def rank_outcome(outcome: Sequence[Fold]) -> int:
    """The worst fold as a number: 0 can be merged, 1 must be computed from merged values, 2 is coupled."""
    return max((_BADNESS.get(fold.kind, 0) for fold in outcome), default=0)


def _try_fix(node: Node, places: Sequence[int], mend: Callable[[Fold], Fold]) -> tuple[Node, Outcome]:
    """Apply the rule again with some inputs changed."""
    folds = tuple(mend(fold) if place in places else fold for place, fold in enumerate(node.folds))
    mended = replace(node, folds=folds)
    return mended, transfer(mended)


GROW, SHARE = "grow", "share"
"""Names of the feeds rows / rows_m and rows_m / rows."""

_HELD = frozenset({INPUT, CAPTURE, HOLDER, FEED})


class BodyWrite(NamedTuple):
    """A write in the body of a branch, loop or call, and the folds of the values there."""

    body: Graph
    op: Op
    folds: Mapping[Value, Fold]

    @property
    def inputs(self) -> list[Fold]:
        """The folds of the inputs of the write."""
        return [self.folds[value] for value in self.op.inputs]


@dataclass(frozen=True)
class Folding:
    """The fold of each value, and the changes to the graph that it requires.

    `wholes` depend on the user's inputs only: they are evaluated once, on the whole batch, for all readers. At `grows`
    an op must read the value times rows / rows_m, and only there. At `recounts` it must read a shape, or a value of
    that shape, computed from the rows of an input. `body_writes` are, for each branch, loop or call, the writes in its
    bodies.
    """

    folds: Mapping[Value, Fold]
    wholes: tuple[Value, ...] = ()
    grows: tuple[Edge, ...] = ()
    recounts: tuple[Recount, ...] = ()
    body_writes: Mapping[int, Sequence[BodyWrite]] = field(default_factory=dict)

    def fold_of(self, value: Value) -> Fold:
        """The fold of a value; whole for an op that is omitted."""
        return self.folds.get(value, whole())


def fold(
    graph: Graph,
    batched: Mapping[int, int],
    *,
    targets: Iterable[Value] = (),
    skip: Callable[[int], bool] = lambda op: False,
    checks: Collection[int] = (),
    means: Collection[Value] = (),
    sums: Collection[Value] = (),
    recounting: bool = False,
    apart: bool = False,
    grouped: bool = True,
) -> Folding:
    """Determine the fold of the batch axis in each value of a step that is divided into micro-batches.

    `batched` gives the batch axis of input ops; other inputs are the same in every micro-batch. `targets` are the
    differentiated values: only there may a value be grown. `skip` leaves ops out; `checks` are assertions, which run on
    the whole batch if they depend on inputs only; `means` and `sums` are declared as such over micro-batches,
    independent of their inputs; `recounting` requests `recounts`. With `apart` values of inputs only are computed for
    the whole batch only if that helps: otherwise a micro-batch has its own. Rows of values marked as groups are
    coupled, unless `grouped` is off.

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = input x float32[?,4]
    ... %1 = Const {value=(0, 1)} int32[2]
    ... %2 = Mean(%0, %1) float32[]
    ... ''')
    >>> str(fold(graph, {0: 0}).fold_of(Value(2)))
    'mean of inputs'
    """
    closure = graph.ascend({value.op for value in targets})
    kept = closure | _find_ops_read_at_end(graph, skip)
    fed: frozenset[Value] = frozenset()
    while True:
        declared = {**dict.fromkeys(means, MEAN), **dict.fromkeys(sums, SUM)}
        run = _Run(graph, batched, closure, kept, skip, fed, checks, declared, recounting, apart, grouped)
        run.interpret()
        if run.requested_values <= fed:
            writes = run.bodies.writes
            return Folding(run.folds, tuple(sorted(run.used)), tuple(run.grows), run.all_recounts(), writes)
        fed |= run.requested_values


def _find_ops_read_at_end(graph: Graph, skip: Callable[[int], bool]) -> set[int]:
    """The ops whose results are read at the end, other than writes to variables."""
    read = {value for op in graph.ops if not skip(op.index) for value in op.inputs}
    return graph.ascend(op.index for op in graph.ops if not skip(op.index) and any(v not in read for v in op.values))


class Bodies:
    """Interpretations of function bodies for folds of their arguments, cached. `writes` are the writes in bodies, by
    the op of the user's graph that they are a part of.
    """

    def __init__(self) -> None:
        self.writes: dict[int, list[BodyWrite]] = {}
        self._folds_by_call: dict[tuple[str, tuple[Fold, ...], int], tuple[Fold, ...]] = {}

    def call(self, graph: Graph, name: str, folds: tuple[Fold, ...], owner: int) -> tuple[Fold, ...]:
        """The folds of the results of the body `name`."""
        key = name, folds, owner
        if key not in self._folds_by_call:
            self._folds_by_call[key] = ()
            self._folds_by_call[key] = self._run(graph.functions[name], folds, owner)
        return self._folds_by_call[key]

    def _run(self, body: Graph, folds: tuple[Fold, ...], owner: int) -> tuple[Fold, ...]:
        known: dict[Value, Fold] = {}
        specs: dict[Value, Spec] = {}
        given = dict(zip(body.arguments, folds, strict=False))
        for op in body.ops:
            if op.index in given:
                known[Value(op.index)] = given[op.index]
                continue
            node = Node(body, op, tuple(known[value] for value in op.inputs), self, owner, specs)
            if not op.functions and is_effect(op, body) and find_written_inputs(op, body):
                self.writes.setdefault(owner, []).append(BodyWrite(body, op, known))
            outcome = (_constant(op),) if op.type == "Const" else transfer(node)
            specs |= _refine_specs(node)
            known.update(zip(op.values, outcome, strict=True))
        return tuple(known[value] for value in body.returns)


@dataclass
class _Run:
    """One walk over the ops of a graph. `declared` has the kinds of values that are declared means or sums.

    `closure` are the differentiated ops, `final_ops` those whose values at the end must be those of the batch. Values
    in `whole_values` are those of the whole batch; others that should be are recorded in `requested_values`, for
    another walk.
    """

    graph: Graph
    batched: Mapping[int, int]
    closure: set[int]
    final_ops: set[int]
    skip: Callable[[int], bool]
    whole_values: frozenset[Value]
    checks: Collection[int] = ()
    declared: Mapping[Value, str] = field(default_factory=dict)
    recounting: bool = False
    apart: bool = False
    grouped: bool = True
    folds: dict[Value, Fold] = field(default_factory=dict)
    used: set[Value] = field(default_factory=set)
    requested_values: set[Value] = field(default_factory=set)
    grows: list[Edge] = field(default_factory=list)
    recounts: list[Recount] = field(default_factory=list)
    counted: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    bodies: Bodies = field(default_factory=Bodies)
    specs: dict[Value, Spec] = field(default_factory=dict)

    def interpret(self) -> None:
        for op in self.graph.ops:
            if not self.skip(op.index):
                held = op.role in _HELD or op.index in self.batched or op.type == "Placeholder"
                outcome = self._source_folds(op) if held else self._output_folds(op)
                for value, found in zip(op.values, outcome, strict=True):
                    found = Fold(self.declared[value]) if value in self.declared and not found.is_mergeable else found
                    self.folds[value] = self._feed_once(value, found) if value in self.whole_values else found

    def _feed_once(self, value: Value, found: Fold) -> Fold:
        """The fold of a value to feed; values that are already whole because of fed ones need not be fed."""
        if found.kind == WHOLE:
            return found
        self.used.add(value)
        if found.kind != COUNT:  # a number of rows is available in other ways
            self.needed.add(value.op)
        return FED_FOLD

    def all_recounts(self) -> tuple[Recount, ...]:
        """The recounts of reshapes, and of all other values that depend on the shape of a model's output."""
        above = sorted(self.graph.ascend(self.needed, stop=self.counted.__contains__))
        leaf = next((op for op in above if op in self.batched), -1)
        edges = [Edge(op, at, value) for op in above for at, value in enumerate(self.graph.ops[op].inputs)]
        likes = [
            Recount(edge, Value(leaf), self.batched[leaf], self.counted[edge.value.op])
            for edge in edges
            if leaf >= 0 and edge.value.op in self.counted and edge.consumer not in self.counted
        ]
        return (*self.recounts, *likes)

    def _source_folds(self, op: Op) -> tuple[Fold, ...]:
        """The folds of the outputs of a placeholder: an input, a capture, or a value that the runtime feeds."""
        found = whole()
        if op.index in self.batched:
            found = rows(self.batched[op.index])
        elif op.role == FEED and op.name in (GROW, SHARE):
            found = Fold(INVERSE) if op.name == GROW else count(0)
        inputs = op.role == INPUT or op.index in self.batched
        return (found._replace(inputs=inputs),) * len(op.outputs)

    def _output_folds(self, op: Op) -> tuple[Fold, ...]:
        if op.type == "Const":
            return (_constant(op)._replace(inputs=True),)
        folds = tuple(whole() if self.skip(value.op) else self.folds[value] for value in op.inputs)
        node = Node(self.graph, op, folds, self.bodies, op.index, self.specs)
        self.specs |= _refine_specs(node)
        if self.recounting:
            node = recount_rows(node, self.recounts)
            sizes = find_counted_sizes(node)
            if sizes is not None:
                self.counted[op.index] = sizes
                return (transfer(node)[0]._replace(inputs=True),)
        outcome = transfer(node)
        if self.grouped and op.name.rpartition("/")[2].startswith(ROW_GROUPS):
            outcome = (node.couple("the rows of a group share the capacity of experts"),)
        return self._fix_inputs(node, outcome)

    def _fix_inputs(self, node: Node, outcome: Outcome) -> Outcome:
        """Feed values of inputs alone that are combined with others; grow differentiated values.

        For ops of inputs alone feeding is deferred until rows need it; values only written to variables may be sums.
        """
        if node.op.index in self.checks:
            self.requested_values.update(list_check_inputs(node))
            return outcome
        own = all(fold.inputs for fold in node.folds)
        if own or node.op.index not in self.final_ops:
            if rank_outcome(outcome) and any(fold.kind == ROWS for fold in node.folds):
                _, outcome = feed_inputs(node, outcome, self.requested_values, always=False, apart=self.apart)
            return outcome
        node, outcome = feed_inputs(node, outcome, self.requested_values, always=not self.apart, apart=self.apart)
        return grow_operands(node, outcome, self.grows) if node.op.index in self.closure else outcome


def _refine_specs(node: Node) -> dict[Value, Spec]:
    """The shapes of an op's outputs that are more precise than in the trace."""
    spec = reduced_spec(node)
    return {} if spec is None else {Value(node.op.index): spec}


def _constant(op: Op) -> Fold:
    return Fold(WHOLE, literal=op.constant)
