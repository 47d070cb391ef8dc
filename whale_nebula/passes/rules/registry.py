"""The registry of rules by op type, and the view of an op that a rule receives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from whale_nebula.ir.graph import Attribute, Graph, Op
from whale_nebula.spec import Spec, Value

WHOLE = "whole"
"""The same in every micro-batch."""
ROWS = "rows"
"""A micro-batch holds its own slice of the value of the whole batch."""
COUNT = "count"
"""A number proportional to the rows; that of the whole batch is the sum over the micro-batches."""
INVERSE = "inverse"
"""A number inversely proportional to the rows."""
SHAPE = "shape"
"""A vector whose parts are counts and wholes."""
SUM = "sum"
"""The value of the whole batch is the sum over the micro-batches."""
MEAN = "mean"
"""The value of the whole batch is the mean over the micro-batches, weighted by their rows."""
EMPTY = "empty"
"""An empty list."""
AFTER = "after"
"""Correct only when computed once, from merged values."""
COUPLED = "coupled"
"""The value of a row depends on the other rows."""

UNKNOWN = 0
"""`per` for an unknown number of entries a row that is the same for each."""

UNKNOWN_POSITION = -1
"""`position` for an unknown factor."""

_OUTPUTS = 1024


def blocks_of(value: Value) -> int:
    """The `position` of numbers of rows times the size of this tensor's second axis."""
    return UNKNOWN_POSITION - 1 - value.op * _OUTPUTS - value.out


UNDER, OWN = -1, -2
"""First number of an `order`: the batch axis was merged behind other axes; or a unique order."""

_DESCRIPTIONS = {
    WHOLE: "a value that is the same in every micro-batch",
    ROWS: "rows of the batch",
    COUNT: "a number of rows of the batch",
    INVERSE: "one divided by the number of rows of the batch",
    SHAPE: "a shape that counts the rows of the batch",
    SUM: "a sum over the batch",
    MEAN: "a mean over the batch",
    EMPTY: "an empty list",
    AFTER: "a value that is known only after the entire batch",
    COUPLED: "a value whose rows depend on each other",
}

Number = int | float


class Fold(NamedTuple):
    """How a value depends on the batch.

    `axis` is the axis of the rows; `per` the entries of one row along it (for a count: the number per row). `order` is
    empty if rows are in sequence, so that micro-batches' values only need to be concatenated; `ragged` is the mask by
    which each row has a different number of entries. `position` marks multiples of the index of a row in the batch: it
    is the factor (or `UNKNOWN_POSITION`, or `blocks_of`), `offset` whether a value was added. `inputs` is whether the
    value depends on the user's inputs alone. `literal` are the known numbers of a whole, `parts` the folds along the
    last axis. `blame` and `reason` are, for after and coupled, the op that caused it and why.

    >>> str(Fold(ROWS, axis=1)), str(Fold(SUM, inputs=True))
    ('rows(1)', 'sum of inputs')
    """

    kind: str
    axis: int = 0
    per: int = 1
    order: tuple[int, ...] = ()
    ragged: int = 0
    position: int = 0
    offset: bool = False
    inputs: bool = False
    literal: tuple[Number, ...] | None = None
    parts: tuple[Fold, ...] | None = None
    blame: int = -1
    reason: str = ""

    @property
    def is_mergeable(self) -> bool:
        """Whether the values of micro-batches can be merged to that of the whole batch."""
        return self.kind not in (AFTER, COUPLED)

    @property
    def order_problem(self) -> str:
        """Why the concatenated rows of micro-batches are not those of the whole batch; "" if they are."""
        if self.kind == ROWS and self.position:
            return "it contains row numbers, and each micro-batch numbers its rows from zero"
        if self.kind == ROWS and self.order:
            return "its rows are in a different order than the batch's, so the rows of a micro-batch would be adjacent"
        return ""

    @property
    def is_zero(self) -> bool:
        """Whether all entries are known to be zero."""
        return self.literal is not None and not any(self.literal)

    @property
    def without_numbers(self) -> Fold:
        """The fold without known numbers."""
        return self._replace(literal=None, parts=None)

    @property
    def description(self) -> str:
        """The fold as a part of a sentence, with its reason if any.

        >>> Fold(MEAN).description
        'a mean over the batch'
        >>> Fold(AFTER, reason="Sqrt of it is not a mean").description
        'a value that is known only after the entire batch: Sqrt of it is not a mean'
        """
        return f"{_DESCRIPTIONS[self.kind]}: {self.reason}" if self.reason else _DESCRIPTIONS[self.kind]

    def __str__(self) -> str:
        if self.kind == SHAPE and self.parts is not None:
            name = f"shape({', '.join(part.kind for part in self.parts)})"
        elif self.kind == ROWS:
            name = f"{'positions' if self.position else self.kind}({self.axis})"
            name += " ragged" * bool(self.ragged) + " interleaved" * bool(self.order)
        else:
            name = self.kind
        return name + " of inputs" * (self.inputs and self.kind not in (WHOLE, EMPTY))


def whole(*literal: Number) -> Fold:
    """The fold of a value that is the same in every micro-batch, optionally with known numbers."""
    return Fold(WHOLE, literal=literal or None)


def rows(axis: int, per: int = 1, order: tuple[int, ...] = ()) -> Fold:
    """The fold of a value with the batch along `axis`."""
    return Fold(ROWS, axis=axis, per=per, order=order)


def count(per: int = 1) -> Fold:
    """`per` times the number of rows."""
    return Fold(COUNT, per=per)


def vector(parts: tuple[Fold, ...]) -> Fold:
    """The fold of a vector of wholes and counts."""
    kinds = {part.kind for part in parts}
    if kinds <= {WHOLE}:
        numbers = [part.literal[0] for part in parts if part.literal is not None]
        return Fold(WHOLE, literal=tuple(numbers)) if len(numbers) == len(parts) else Fold(WHOLE, parts=parts)
    pers = {part.per for part in parts}
    return Fold(COUNT if kinds == {COUNT} else SHAPE, per=pers.pop() if len(pers) == 1 else UNKNOWN, parts=parts)


Result = Fold | tuple[Fold, ...]

NO_RULE = "no rule for op type"
"""The beginning of the reason for an op type without a rule."""

NO_RANK = "the number of axes is not known, so it is not known whether rows are combined"

BY_ROW = "a loop runs once for each row (tf.map_fn, tf.scan)"
PYTHON = "runs Python, which may combine rows in any way"
ROW_NUMBERS = "row numbers (a range over the batch) are different in a micro-batch"
BESIDE = "rows are combined with a tensor that is not part of the batch"
FIXED = "rows are reshaped to a fixed shape"
"""For BESIDE and FIXED, a micro-batch fails if the other tensor or shape has as many rows as the whole batch."""


class Undecided(Exception):
    """The effect of an op on axes or rows is unknown, for this reason; rows count as coupled then."""


class Caller(Protocol):
    """Interpreter of function bodies for given folds of arguments."""

    def call(self, graph: Graph, name: str, folds: tuple[Fold, ...], owner: int) -> tuple[Fold, ...]:
        """The folds of the results of the body `name`."""


@dataclass(frozen=True, slots=True)
class Node:
    """One op where a rule is applied. `owner` is the op of the user's graph that this one is a part of."""

    graph: Graph
    op: Op
    folds: tuple[Fold, ...]
    caller: Caller
    owner: int
    specs: Mapping[Value, Spec] = field(default_factory=dict)

    def spec(self, place: int) -> Spec:
        """Element type and shape of an input, refined where `specs` has better ones than the trace."""
        value = self.op.inputs[place]
        return self.specs.get(value) or self.graph.spec(value)

    def rank(self, place: int) -> int | None:
        """Number of axes of an input."""
        return self.spec(place).rank

    def size(self, place: int, axis: int) -> int | None:
        """Static size of an input along an axis."""
        shape = self.spec(place).shape
        return None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]

    def attribute(self, name: str, default: Attribute) -> Attribute:
        """An attribute of the op."""
        return self.op.attributes.get(name, default)

    def number(self, name: str, default: int) -> int:
        """An integer attribute of the op."""
        value = self.op.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def flag(self, name: str) -> bool:
        """A boolean attribute of the op."""
        return bool(self.op.attributes.get(name, False))

    def ints(self, place: int) -> tuple[int, ...] | None:
        """The numbers of an input, flat; None if they are not known."""
        literal = self.folds[place].literal
        return None if literal is None else tuple(int(number) for number in literal)

    def int_at(self, place: int) -> int | None:
        """The number of an input with a single entry; None if it is not known."""
        numbers = self.ints(place)
        return numbers[0] if numbers is not None and len(numbers) == 1 else None

    def parts(self, place: int) -> tuple[Fold, ...] | None:
        """The folds of a vector's entries, if they can be distinguished; for rows see `columns`."""
        fold, rank = self.folds[place], self.rank(place)
        if fold.parts is not None and fold.kind != ROWS and rank in (1, None):
            return fold.parts
        if fold.kind != WHOLE or rank != 1:
            return None
        if fold.literal is not None:
            return tuple(whole(number) for number in fold.literal)
        length = self.size(place, 0)
        return None if length is None else (whole(),) * length

    def need_rank(self, place: int, reason: str = NO_RANK) -> int:
        """Number of axes of an input; raises `Undecided` if unknown."""
        rank = self.rank(place)
        if rank is None:
            raise Undecided(reason)
        return rank

    def need_ints(self, place: int, reason: str) -> tuple[int, ...]:
        """The numbers of an input; raises `Undecided` if unknown."""
        numbers = self.ints(place)
        if numbers is None:
            raise Undecided(reason)
        return numbers

    def need_int(self, place: int, reason: str) -> int:
        """The one number of an input; raises `Undecided` if unknown."""
        number = self.int_at(place)
        if number is None:
            raise Undecided(reason)
        return number

    def columns(self, place: int, axis: int) -> tuple[Fold, ...] | None:
        """The folds of entries along an axis of rows; only known for the last axis."""
        rank = self.rank(place)
        return None if rank is None or axis % rank != rank - 1 else self.folds[place].parts

    def couple(self, reason: str) -> Fold:
        """The fold of a result with rows that depend on each other."""
        return Fold(COUPLED, blame=self.owner, reason=self._inside(reason))

    def after(self, reason: str) -> Fold:
        """Correct only when computed once from merged values."""
        return Fold(AFTER, blame=self.owner, reason=self._inside(reason))

    def _inside(self, reason: str) -> str:
        return reason if self.owner == self.op.index else f"{reason} (at {self.op.type} {self.op.name!r} in its body)"

    def nonlinear(self, folds: Iterable[Fold]) -> Fold:
        """A function of values without rows that preserves neither sums nor means."""
        folds = tuple(folds)
        for fold in folds:
            if fold.kind == COUPLED or fold.kind == AFTER:
                return fold.without_numbers
        names = sorted({fold.description for fold in folds if fold.kind != WHOLE})
        if not names:
            return whole()
        return self.after(f"{self.op.type} of {' and '.join(names)} is neither a sum nor a mean over it")


Rest = Callable[[Node, Sequence[Fold]], Result]
"""A rule for values without rows."""


class Axes(NamedTuple):
    """The axes of an op's inputs and outputs, in labels (see `axes.py`). Inputs after the last one described are only
    parameters. An input that is None is a shape, which adds no information; an output that is None has no such axes.
    `folded` is how entries of a removed axis are combined, `mixed` why an axis cannot be cut.
    """

    inputs: tuple[Labels | None, ...]
    outputs: tuple[Labels | None, ...]
    folded: str = SUM
    mixed: Mapping[str, str] = {}

    def __str__(self) -> str:
        """The description in einsum notation.

        >>> print(Axes(("mk", "kn"), ("mn",)))
        mk, kn -> mn
        """
        sides = (", ".join("".join(labels or ()) or "()" for labels in side) for side in (self.inputs, self.outputs))
        return " -> ".join(sides)


Labels = Sequence[str]
Describe = Callable[[Node], Axes]
"""A function that returns the axes of an op, or raises `Undecided`."""


def find_axes(describe: Describe, node: Node) -> Axes | str:
    """The axes of an op, or the reason why they are unknown."""
    try:
        return describe(node)
    except Undecided as error:
        return str(error)


class Entry(NamedTuple):
    """The registered rules of an op type: its axes, its rule for micro-batches, and the condition of that rule.

    `literal`: also if all inputs are whole, to evaluate their numbers. `raw`: also if an input is coupled. `positions`:
    also for indices of rows.
    """

    apply: Callable[[Node], Result]
    axes: Callable[[Node], Axes | str] | None
    literal: bool
    raw: bool
    positions: bool


RULES: dict[str, Entry] = {}
_F = TypeVar("_F", bound=Callable[[Node], Result])


def rule(
    *types: str, axes: Describe | None = None, literal: bool = False, raw: bool = False, positions: bool = False
) -> Callable[[_F], _F]:
    """Register the rule of op types, with the description of their axes; one text may name several types."""
    found = None if axes is None else functools.partial(find_axes, axes)

    def register(apply: _F) -> _F:
        for name in " ".join(types).split():
            if name in RULES:
                raise ValueError(f"op type {name} has two rules")
            RULES[name] = Entry(apply, found, literal, raw, positions)
        return apply

    return register


def transfer(node: Node) -> tuple[Fold, ...]:
    """The folds of an op's outputs."""
    if not node.op.outputs:
        return ()
    try:
        result = _apply_rule(node)
    except Undecided as error:
        result = node.couple(str(error))
    folds = (result,) * len(node.op.outputs) if isinstance(result, Fold) else result
    inputs = not node.op.stateful and all(fold.inputs for fold in node.folds)
    return tuple(fold._replace(inputs=inputs) for fold in folds)


def _apply_rule(node: Node) -> Result:
    entry = RULES.get(node.op.type)
    if all(fold.kind == WHOLE for fold in node.folds) and not (entry is not None and entry.literal):
        return whole()
    if entry is None:
        bad = next((fold for fold in node.folds if fold.kind == COUPLED), None)
        return bad.without_numbers if bad is not None else node.couple(f"{NO_RULE} {node.op.type}")
    bad = None if entry.raw else find_bad_input(node, positions=entry.positions)
    return entry.apply(node) if bad is None else bad


def find_bad_input(node: Node, *, positions: bool = False) -> Fold | None:
    """The fold of an op's results if an input is coupled, has row numbers or is an empty list; otherwise None."""
    for fold in node.folds:
        if fold.kind == COUPLED:
            return fold.without_numbers
        if fold.position and not positions:
            return node.couple(ROW_NUMBERS)
        if fold.kind == EMPTY and not node.op.type.startswith("TensorList"):
            return node.couple("a list is read while it is empty")
    return None
