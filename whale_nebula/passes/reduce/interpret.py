"""The pass itself: every op's rule in trace order, and the two mends where a rule alone would couple the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.ir.spec import Value
from whale_nebula.passes.reduce.registry import Site, transfer
from whale_nebula.passes.reduce.state import (
    AFTER,
    COUNT,
    COUPLED,
    INVERSE,
    MEAN,
    ROWS,
    SHAPE,
    SUM,
    WHOLE,
    Fold,
    count,
    rows,
    whole,
)

GROW, SHARE = "grow", "share"
"""Names of the feeds rows / rows_m and rows_m / rows."""

_HELD = frozenset({INPUT, CAPTURE, HOLDER, FEED})
_ONCE = frozenset({SUM, MEAN, INVERSE, AFTER, COUPLED})
_BADNESS = {AFTER: 1, COUPLED: 2}


class Grow(NamedTuple):
    """Where capture must multiply by rows / rows_m: before input number `position` of op `consumer`."""

    consumer: int
    position: int
    value: Value


@dataclass(frozen=True)
class Folding:
    """How each value was folded, and what must be done for it to be so.

    `wholes` are to be evaluated once on the whole batch and fed; `grows` are to be multiplied where they are read.
    """

    folds: Mapping[Value, Fold]
    wholes: tuple[Value, ...] = ()
    grows: tuple[Grow, ...] = ()

    def of(self, value: Value) -> Fold:
        """The state of a value; one of an op that was left out is the same everywhere."""
        return self.folds.get(value, whole())


def fold(
    graph: Graph,
    batched: Mapping[int, int],
    *,
    targets: Iterable[Value] = (),
    skip: Callable[[int], bool] = lambda op: False,
) -> Folding:
    """How the batch axis is folded into each value of a step that is cut into micro-batches.

    `batched` says for the ops that hold inputs where the batch lies; the others are the same in every micro-batch.
    `targets` are what is differentiated: there, and only there, a value may be grown. `skip` leaves ops out.

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
    fed: frozenset[Value] = frozenset()
    while True:
        run = _Run(graph, batched, closure, skip, fed)
        run.interpret()
        if run.fed == fed:
            used = tuple(sorted(value for value in fed if value in run.natural))
            return Folding(run.folds, used, tuple(run.grows))
        fed = run.fed


def in_order(graph: Graph, skip: Callable[[int], bool]) -> Iterator[Op]:
    """The ops in trace order, but what an op reads always before it: something may have been put in later."""
    done: set[int] = set()
    for root in graph.ops:
        stack = [] if skip(root.index) else [root]
        while stack:
            op = stack[-1]
            late = [v.op for v in op.inputs if v.op > op.index and v.op not in done and not skip(v.op)]
            if late:
                stack.extend(graph.ops[index] for index in late)
                continue
            stack.pop()
            if op.index not in done:
                done.add(op.index)
                yield op


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
    """One walk over the ops, with these values fed from the whole batch."""

    graph: Graph
    batched: Mapping[int, int]
    closure: set[int]
    skip: Callable[[int], bool]
    fed: frozenset[Value]
    folds: dict[Value, Fold] = field(default_factory=dict)
    natural: set[Value] = field(default_factory=set)
    grows: list[Grow] = field(default_factory=list)
    bodies: Bodies = field(default_factory=Bodies)

    def interpret(self) -> None:
        for op in in_order(self.graph, self.skip):
            held = op.role in _HELD or op.index in self.batched or op.type == "Placeholder"
            outcome = self._held(op) if held else self._made(op)
            for value, found in zip(op.values, outcome, strict=True):
                if value in self.fed and found.kind != WHOLE:
                    self.natural.add(value)
                    found = whole()._replace(inputs=True)
                self.folds[value] = found

    def _held(self, op: Op) -> tuple[Fold, ...]:
        """Inputs, captures, and what the runtime feeds."""
        found = whole()
        if op.index in self.batched:
            found = rows(self.batched[op.index])
        elif op.role == FEED and op.name in (GROW, SHARE):
            found = Fold(INVERSE) if op.name == GROW else count(0)
        inputs = op.role == INPUT or op.index in self.batched
        return (found._replace(inputs=inputs),) * len(op.outputs)

    def _made(self, op: Op) -> tuple[Fold, ...]:
        if op.type == "Const":
            return (_constant(op)._replace(inputs=True),)
        folds = tuple(self.folds.get(value, whole()) for value in op.inputs)
        site = Site(self.graph, op, folds, self.bodies, op.index)
        outcome = transfer(site)
        return outcome if _badness(outcome) == 0 else self._mended(site, outcome)

    def _mended(self, site: Site, outcome: tuple[Fold, ...]) -> tuple[Fold, ...]:
        """Feed what comes from inputs alone; else, in what is differentiated, grow sums and counts."""
        own = all(fold.inputs for fold in site.folds)
        if own and not any(fold.kind == ROWS for fold in site.folds):
            return outcome
        places = [place for place, fold in enumerate(site.folds) if self._feedable(site, place, fold)]
        site, outcome = self._try(
            site, outcome, places, lambda fold: whole()._replace(inputs=True), self._feed
        )
        if own or site.op.index not in self.closure:
            return outcome
        for kinds in ({COUNT}, {SUM}, {COUNT, SUM}):
            places = [
                place for place, fold in enumerate(site.folds) if self._growable(site, place, fold, kinds)
            ]
            site, outcome = self._try(site, outcome, places, _grown, self._grow)
        return outcome

    def _try(
        self,
        site: Site,
        outcome: tuple[Fold, ...],
        places: Sequence[int],
        mend: Callable[[Fold], Fold],
        record: Callable[[Site, int], None],
    ) -> tuple[Site, tuple[Fold, ...]]:
        """Apply the rule again with some inputs mended; keep that, and record it, only where it is better."""
        if not places or _badness(outcome) == 0:
            return site, outcome
        folds = tuple(mend(fold) if place in places else fold for place, fold in enumerate(site.folds))
        mended = replace(site, folds=folds)
        better = transfer(mended)
        if _badness(better) >= _badness(outcome):
            return site, outcome
        for place in places:
            record(site, place)
        return mended, better

    def _feedable(self, site: Site, place: int, fold: Fold) -> bool:
        number = fold.kind == COUNT and site.spec(place).floating
        return fold.inputs and (fold.kind in _ONCE or number) and fold.kind != SHAPE

    def _growable(self, site: Site, place: int, fold: Fold, kinds: set[str]) -> bool:
        return fold.kind in kinds and site.spec(place).floating

    def _feed(self, site: Site, place: int) -> None:
        self.fed = self.fed | {site.op.inputs[place]}
        self.folds[site.op.inputs[place]] = whole()._replace(inputs=True)

    def _grow(self, site: Site, place: int) -> None:
        self.grows.append(Grow(site.op.index, place, site.op.inputs[place]))


def _constant(op: Op) -> Fold:
    return whole(*op.constant) if op.constant else whole()


def _grown(fold: Fold) -> Fold:
    return whole() if fold.kind == COUNT else Fold(MEAN)


def _badness(outcome: Sequence[Fold]) -> int:
    return max((_BADNESS.get(fold.kind, 0) for fold in outcome), default=0)
