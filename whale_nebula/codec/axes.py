"""A structure that leaves as many numbers, in a form that few bytes hold: each row on the principal axes of its tensor.

What a model sends is no noise: its rows lie mostly along some directions, and hardly along others, and yet nothing may
be left out. On its own axes few numbers of a row are large and most are small, and a precision that spends bits by how
often numbers come (`coded`) spends them on the former. The error is the same in all directions, as it is without axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whale_nebula.codec.objects import Dims, Reduced, Structure
from whale_nebula.codec.parts import Part
from whale_nebula.codec.structures import LOOKED_AT, RENEWED, matrix, reshaped

_ROWS = 3  # times so many rows as columns, or more: else what the axes themselves take is not won back


class Held(NamedTuple):
    """Axes [n, n], a column each; on the side that makes them, the running Gram matrix of what crossed, the step in
    which they were made, and whether there was anything to make them of.
    """

    q: Any = None
    gram: Any = None
    step: int = 0
    found: bool = False


@dataclass(frozen=True)
class Axes(Structure):
    """The coordinates of each row on axes that both sides hold: those of what crossed lately, the longest first. A
    gradient has axes of its own.

    >>> from whale_nebula.codec import Coded
    >>> str(Axes() >> Coded(2.3)), Axes().numbers((64, 128)), Axes().numbers((8, 128))
    ('axes >> coded(2.3)', ((64, 128),), None)
    """

    name = "axes"
    keeps = "axes"
    shrinks = False
    widens = True
    careful = True

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """As many; none where there are too few rows."""
        rows, columns = matrix(dims)
        return (dims,) if columns > 1 and _ROWS * rows >= columns else None

    def init(self, dims: Dims) -> Held:
        """No axes yet."""
        return Held()

    def fits(self, state: Held, dims: Dims) -> bool:
        """Whether they are of so many columns."""
        return state.q is None or len(state.q) == dims[-1]

    def news(self, dims: Dims) -> tuple[Part, ...]:
        """The axes, in eight bits a number, and the largest number of each."""
        return Part("int8", (dims[-1], dims[-1])), Part("float16", (dims[-1],))

    def refresh(self, state: Held, x: Any, step: int) -> tuple[Held, tuple[Any, ...] | None]:
        """Look at what crosses; axes are sent with the first step, every fiftieth, and when there is something to make
        them of for the first time.
        """
        from whale_nebula.codec.graph import axes, basis

        rows = reshaped(x, matrix(x.shape))
        looked = axes.gram_of(rows, most=LOOKED_AT if state.found else 0)
        gram = looked if state.gram is None else basis.running(state.gram, looked)
        found = state.found or bool(gram.numpy().trace() > 0)
        if state.q is not None and found == state.found and step - state.step < RENEWED:
            return state._replace(gram=gram), None
        made, *news = axes.made(gram.numpy())
        return Held(made, gram, step, found), tuple(news)

    def learn(self, state: Held, news: Sequence[Any], dims: Dims) -> Held:
        """The axes that came."""
        from whale_nebula.codec.graph import axes

        return Held(axes.heard(*news))

    def reduce(self, state: Held, x: Any) -> Reduced:
        """Coordinates."""
        from whale_nebula.codec.graph.basis import project

        return Reduced((project(_single(x), state.q),))

    def expand(self, state: Held, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """The rows that have them."""
        from whale_nebula.codec.graph.basis import expand

        return expand(numbers[0], state.q), None


def _single(x: Any) -> Any:
    """In float32 at least: a row of half precision may be longer than its largest number can be."""
    import tensorflow as tf

    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x
