"""The pass itself: every op's rule, in trace order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.ir.spec import Value
from whale_nebula.passes.reduce.mends import Edge, badness, feed, grow
from whale_nebula.passes.reduce.registry import Site, transfer
from whale_nebula.passes.reduce.state import (
    INVERSE,
    ROWS,
    Fold,
    count,
    rows,
    whole,
)

GROW, SHARE = "grow", "share"
"""Names of the feeds rows / rows_m and rows_m / rows."""
ONCE = "whole"
"""How the names begin of feeds with values of the whole batch."""

_HELD = frozenset({INPUT, CAPTURE, HOLDER, FEED})


@dataclass(frozen=True)
class Folding:
    """How each value was folded, and what must be done for it to be so.

    At `feeds` an op must read the value as it is for the whole batch; at `grows` the value times rows /
    rows_m. Only there: what else reads the same value (a counter, a metric) reads it micro-batch by
    micro-batch.
    """

    folds: Mapping[Value, Fold]
    feeds: tuple[Edge, ...] = ()
    grows: tuple[Edge, ...] = ()

    def of(self, value: Value) -> Fold:
        """The state of a value; one of an op that was left out is the same everywhere."""
        return self.folds.get(value, whole())

    @property
    def wholes(self) -> tuple[Value, ...]:
        """What must be evaluated once, on the whole batch; it comes from the user's inputs alone."""
        return tuple(sorted({edge.value for edge in self.feeds}))


def fold(
    graph: Graph,
    batched: Mapping[int, int],
    *,
    targets: Iterable[Value] = (),
    skip: Callable[[int], bool] = lambda op: False,
) -> Folding:
    """How the batch axis is folded into each value of a step that is cut into micro-batches.

    `batched` says for the ops that hold inputs where the batch lies; the others are the same in every
    micro-batch. `targets` are what is differentiated: there, and only there, a value may be grown. `skip`
    leaves ops out.

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
    run = _Run(graph, batched, closure, closure | _kept(graph, skip), skip)
    run.interpret()
    return Folding(run.folds, tuple(run.feeds), tuple(run.grows))


def _kept(graph: Graph, skip: Callable[[int], bool]) -> set[int]:
    """The ops whose results are read at the end, and not only written into variables."""
    read = {value for op in graph.ops if not skip(op.index) for value in op.inputs}
    return graph.ascend(
        op.index for op in graph.ops if not skip(op.index) and any(v not in read for v in op.values)
    )


class Bodies:
    """What bodies of functions make of their arguments; each question is answered once."""

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
        given = dict(zip(body.arguments, folds, strict=False))
        for op in body.ops:
            if op.index in given:
                known[Value(op.index)] = given[op.index]
                continue
            site = Site(body, op, tuple(known[value] for value in op.inputs), self, owner)
            outcome = (_constant(op),) if op.type == "Const" else transfer(site)
            known.update(zip(op.values, outcome, strict=True))
        return tuple(known[value] for value in body.returns)


@dataclass
class _Run:
    """One walk over the ops. `closure` is what is differentiated, `kept` what may be fed from the whole
    batch.
    """

    graph: Graph
    batched: Mapping[int, int]
    closure: set[int]
    kept: set[int]
    skip: Callable[[int], bool]
    folds: dict[Value, Fold] = field(default_factory=dict)
    feeds: list[Edge] = field(default_factory=list)
    grows: list[Edge] = field(default_factory=list)
    bodies: Bodies = field(default_factory=Bodies)

    def interpret(self) -> None:
        for op in self.graph.ops:
            if not self.skip(op.index):
                held = op.role in _HELD or op.index in self.batched or op.type == "Placeholder"
                outcome = self._held(op) if held else self._made(op)
                self.folds.update(zip(op.values, outcome, strict=True))

    def _held(self, op: Op) -> tuple[Fold, ...]:
        """Inputs, captures, and what the runtime feeds."""
        found = whole()
        if op.index in self.batched:
            found = rows(self.batched[op.index])
        elif op.role == FEED and op.name in (GROW, SHARE):
            found = Fold(INVERSE) if op.name == GROW else count(0)
        inputs = (
            op.role == INPUT or op.index in self.batched or (op.role == FEED and op.name.startswith(ONCE))
        )
        return (found._replace(inputs=inputs),) * len(op.outputs)

    def _made(self, op: Op) -> tuple[Fold, ...]:
        if op.type == "Const":
            return (_constant(op)._replace(inputs=True),)
        folds = tuple(whole() if self.skip(value.op) else self.folds[value] for value in op.inputs)
        site = Site(self.graph, op, folds, self.bodies, op.index)
        return self._mended(site, transfer(site))

    def _mended(self, site: Site, outcome: tuple[Fold, ...]) -> tuple[Fold, ...]:
        """Feed what comes from inputs alone and meets anything else; in what is differentiated, grow sums and
        counts.
        """
        own = all(fold.inputs for fold in site.folds)
        only_mixed = own or site.op.index not in self.kept
        if only_mixed and (badness(outcome) == 0 or not any(fold.kind == ROWS for fold in site.folds)):
            return outcome
        site, outcome = feed(site, outcome, self.feeds)
        if own or site.op.index not in self.closure:
            return outcome
        return grow(site, outcome, self.grows)


def _constant(op: Op) -> Fold:
    return whole(*op.constant) if op.constant else whole()
