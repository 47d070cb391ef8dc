"""The abstract interpreter: applies each op's rule, in trace order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.ir.layout import ROW_GROUPS
from whale_nebula.passes.rules.fixes import (
    FED,
    Edge,
    Outcome,
    Recount,
    badness,
    countable,
    feed,
    grow,
    list_check_inputs,
    recount,
)
from whale_nebula.passes.rules.reductions import reduced_spec
from whale_nebula.passes.rules.registry import (
    COUNT,
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

GROW, SHARE = "grow", "share"
"""Names of the feeds rows / rows_m and rows_m / rows."""

_HELD = frozenset({INPUT, CAPTURE, HOLDER, FEED})


@dataclass(frozen=True)
class Folding:
    """The fold of each value, and the changes to the graph that it requires.

    `wholes` depend on the user's inputs only: they are evaluated once, on the whole batch, for all readers. At `grows`
    an op must read the value times rows / rows_m, and only there. At `recounts` it must read a shape, or a value of
    that shape, computed from the rows of an input.
    """

    folds: Mapping[Value, Fold]
    wholes: tuple[Value, ...] = ()
    grows: tuple[Edge, ...] = ()
    recounts: tuple[Recount, ...] = ()

    def of(self, value: Value) -> Fold:
        """The state of a value; whole for an op that is left out."""
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
    >>> str(fold(graph, {0: 0}).of(Value(2)))
    'mean of inputs'
    """
    closure = graph.ascend({value.op for value in targets})
    kept = closure | _ops_read_at_end(graph, skip)
    fed: frozenset[Value] = frozenset()
    while True:
        said = {**dict.fromkeys(means, MEAN), **dict.fromkeys(sums, SUM)}
        run = _Run(graph, batched, closure, kept, skip, fed, checks, said, recounting, apart, grouped)
        run.interpret()
        if run.asked <= fed:
            return Folding(run.folds, tuple(sorted(run.used)), tuple(run.grows), run.all_recounts())
        fed |= run.asked


def _ops_read_at_end(graph: Graph, skip: Callable[[int], bool]) -> set[int]:
    """The ops whose results are read at the end, other than writes to variables."""
    read = {value for op in graph.ops if not skip(op.index) for value in op.inputs}
    return graph.ascend(op.index for op in graph.ops if not skip(op.index) and any(v not in read for v in op.values))


class Bodies:
    """Interpretations of function bodies for states of their arguments, cached."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[Fold, ...], int], tuple[Fold, ...]] = {}

    def call(self, graph: Graph, name: str, folds: tuple[Fold, ...], owner: int) -> tuple[Fold, ...]:
        """The states of the results of the body `name`."""
        key = name, folds, owner
        if key not in self._known:
            self._known[key] = ()
            self._known[key] = self._run(graph.functions[name], folds, owner)
        return self._known[key]

    def _run(self, body: Graph, folds: tuple[Fold, ...], owner: int) -> tuple[Fold, ...]:
        known: dict[Value, Fold] = {}
        specs: dict[Value, Spec] = {}
        given = dict(zip(body.arguments, folds, strict=False))
        for op in body.ops:
            if op.index in given:
                known[Value(op.index)] = given[op.index]
                continue
            node = Node(body, op, tuple(known[value] for value in op.inputs), self, owner, specs)
            outcome = (_constant(op),) if op.type == "Const" else transfer(node)
            specs |= _refine_specs(node)
            known.update(zip(op.values, outcome, strict=True))
        return tuple(known[value] for value in body.returns)


@dataclass
class _Run:
    """One walk over the ops.

    `closure` are the differentiated ops, `kept` those whose values at the end must be those of the batch. Values in
    `fed` are those of the whole batch; others that should be are recorded in `asked`, for another walk.
    """

    graph: Graph
    batched: Mapping[int, int]
    closure: set[int]
    kept: set[int]
    skip: Callable[[int], bool]
    fed: frozenset[Value]
    checks: Collection[int] = ()
    said: Mapping[Value, str] = field(default_factory=dict)
    recounting: bool = False
    apart: bool = False
    grouped: bool = True
    folds: dict[Value, Fold] = field(default_factory=dict)
    used: set[Value] = field(default_factory=set)
    asked: set[Value] = field(default_factory=set)
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
                    found = Fold(self.said[value]) if value in self.said and not found.good else found
                    self.folds[value] = self._feed_once(value, found) if value in self.fed else found

    def _feed_once(self, value: Value, found: Fold) -> Fold:
        """The state of a value to feed; values that are already whole because of fed ones need not be fed."""
        if found.kind == WHOLE:
            return found
        self.used.add(value)
        if found.kind != COUNT:  # a number of rows is available in other ways
            self.needed.add(value.op)
        return FED

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
        """The states of inputs, captures, and values that the runtime feeds."""
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
            node = recount(node, self.recounts)
            sizes = countable(node)
            if sizes is not None:
                self.counted[op.index] = sizes
                return (transfer(node)[0]._replace(inputs=True),)
        outcome = transfer(node)
        if self.grouped and op.name.rpartition("/")[2].startswith(ROW_GROUPS):
            outcome = (node.couple("the rows of a group share the places at experts"),)
        return self._fix_inputs(node, outcome)

    def _fix_inputs(self, node: Node, outcome: Outcome) -> Outcome:
        """Feed values of inputs alone that are combined with others; grow differentiated values.

        For ops of inputs alone feeding is deferred until rows need it; values only written to variables may be sums.
        """
        if node.op.index in self.checks:
            self.asked.update(list_check_inputs(node))
            return outcome
        own = all(fold.inputs for fold in node.folds)
        if own or node.op.index not in self.kept:
            if badness(outcome) and any(fold.kind == ROWS for fold in node.folds):
                _, outcome = feed(node, outcome, self.asked, always=False, apart=self.apart)
            return outcome
        node, outcome = feed(node, outcome, self.asked, always=not self.apart, apart=self.apart)
        return grow(node, outcome, self.grows) if node.op.index in self.closure else outcome


def _refine_specs(node: Node) -> dict[Value, Spec]:
    """The shapes of an op's outputs that are more precise than in the trace."""
    spec = reduced_spec(node)
    return {} if spec is None else {Value(node.op.index): spec}


def _constant(op: Op) -> Fold:
    return Fold(WHOLE, literal=op.constant)
