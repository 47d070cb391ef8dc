"""How one value of a step was folded along the batch: the states that the rules of this pass compute with."""

from __future__ import annotations

from typing import NamedTuple

from whale_nebula.spec import Value

WHOLE = "whole"
"""The same in every micro-batch."""
ROWS = "rows"
"""A micro-batch holds its own slice of the whole's value."""
COUNT = "count"
"""A number proportional to the rows; the whole's is the sum over the micro-batches."""
INVERSE = "inverse"
"""A number inversely proportional to the rows."""
SHAPE = "shape"
"""A vector whose parts are counts and wholes."""
SUM = "sum"
"""The whole's value is the sum over the micro-batches."""
MEAN = "mean"
"""The whole's value is the mean over the micro-batches, weighted by their rows."""
EMPTY = "empty"
"""A list that holds nothing yet."""
AFTER = "after"
"""Right only when computed once, from merged values."""
COUPLED = "coupled"
"""What a row gets depends on the other rows."""

UNKNOWN = 0
"""`per` where the number of entries a row is not known, only that it is the same for each."""

STRANGE = -1
"""`position` where the number of times is not known."""

_OUTPUTS = 1024


def blocks_of(value: Value) -> int:
    """`position` of the numbers of rows, times the size of the second axis of this tensor."""
    return STRANGE - 1 - value.op * _OUTPUTS - value.out


UNDER, OWN = -1, -2
"""First number of an `order`: the batch lies under other axes that were merged with it; an order like no
other."""

_SPOKEN = {
    WHOLE: "a value that is the same in every micro-batch",
    ROWS: "rows of the batch",
    COUNT: "a number of rows of the batch",
    INVERSE: "one divided by the number of rows of the batch",
    SHAPE: "a shape that counts the rows of the batch",
    SUM: "a sum over the batch",
    MEAN: "a mean over the batch",
    EMPTY: "a list that holds nothing yet",
    AFTER: "a value that is known when the whole batch is through",
    COUPLED: "a value whose rows depend on each other",
}

Number = int | float


class Fold(NamedTuple):
    """The state of a value.

    `axis` is where the rows lie; `per` the entries that one row has there (of a count: the number a row). `order`
    is empty where the rows lie one after the other, so that the micro-batches' values only need to be put behind
    each other; `ragged` where each row gives another number of them: by which mask. `position` marks multiples of
    the number that a row has in the batch: it says how many times (or `STRANGE`, or `blocks_of`), `offset` that
    something was added. `inputs` says that the value comes from the user's inputs alone. `literal` are the known
    numbers of a whole, `parts` the states along the last axis. `blame` and `reason` say of after and coupled which op
    made it so, and why.

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
    def good(self) -> bool:
        """Whether micro-batches can be merged to the whole's value."""
        return self.kind not in (AFTER, COUPLED)

    @property
    def misplaced(self) -> str:
        """Why rows of micro-batches that are put behind each other are not the whole's; "" where they are."""
        if self.kind == ROWS and self.position:
            return "it holds the numbers of rows, and each micro-batch numbers its own"
        if self.kind == ROWS and self.order:
            return "its rows lie in another order than the batch's: those of a micro-batch would lie together"
        return ""

    @property
    def zero(self) -> bool:
        """Whether this is known to be nothing but zeros."""
        return self.literal is not None and not any(self.literal)

    @property
    def bare(self) -> Fold:
        """The state without what is known of its numbers."""
        return self._replace(literal=None, parts=None)

    @property
    def spoken(self) -> str:
        """The state as a part of a sentence, with its reason where it has one.

        >>> Fold(MEAN).spoken
        'a mean over the batch'
        >>> Fold(AFTER, reason="Sqrt of it is no mean").spoken
        'a value that is known when the whole batch is through: Sqrt of it is no mean'
        """
        return f"{_SPOKEN[self.kind]}: {self.reason}" if self.reason else _SPOKEN[self.kind]

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
    """The same in every micro-batch; with numbers, these."""
    return Fold(WHOLE, literal=literal or None)


def rows(axis: int, per: int = 1, order: tuple[int, ...] = ()) -> Fold:
    """The batch lies along `axis`."""
    return Fold(ROWS, axis=axis, per=per, order=order)


def count(per: int = 1) -> Fold:
    """`per` times the number of rows."""
    return Fold(COUNT, per=per)


def vector(parts: tuple[Fold, ...]) -> Fold:
    """The state of a vector of wholes and counts."""
    kinds = {part.kind for part in parts}
    if kinds <= {WHOLE}:
        numbers = [part.literal[0] for part in parts if part.literal is not None]
        return Fold(WHOLE, literal=tuple(numbers)) if len(numbers) == len(parts) else Fold(WHOLE, parts=parts)
    pers = {part.per for part in parts}
    return Fold(COUNT if kinds == {COUNT} else SHAPE, per=pers.pop() if len(pers) == 1 else UNKNOWN, parts=parts)
