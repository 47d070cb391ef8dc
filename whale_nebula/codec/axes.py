"""A structure that leaves as many numbers, in a form that few bytes hold: each row on the principal axes of its tensor.

What a model sends is no noise: its rows lie mostly along some directions, and hardly along others, and yet nothing may
be left out. On its own axes few numbers of a row are large and most are small, and a precision that spends bits by how
often numbers come (`coded`) spends them on the former. The error is the same in all directions, as it is without axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale_nebula.codec.objects import Dims, Reduced, Structure
from whale_nebula.codec.parts import Part
from whale_nebula.codec.structures import LOOKED_AT, RENEWED, Shared, matrix, reshaped

_ROWS = 3  # times so many rows as columns, or more: else what the axes themselves take is not won back


@dataclass(frozen=True)
class Axes(Structure):
    """The coordinates of each row on axes that both sides hold: those of what crossed lately, the longest first. A
    gradient has axes of its own.

    >>> from whale_nebula.codec import Coded
    >>> str(Axes() >> Coded(2.3)), Axes().numbers((64, 128)), Axes().numbers((8, 128))
    ('axes >> coded(2.3)', ((64, 128),), None)
    """

    name = "axes"
    careful = True

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """As many; none where there are too few rows."""
        rows, columns = matrix(dims)
        return (dims,) if columns > 1 and _ROWS * rows >= columns else None

    def init(self, dims: Dims) -> Shared:
        """No axes yet."""
        return Shared()

    def news(self, dims: Dims) -> tuple[Part, ...]:
        """The axes, in eight bits a number, and the largest number of each."""
        return Part("int8", (dims[-1], dims[-1])), Part("float16", (dims[-1],))

    def refresh(self, state: Shared, x: Any, step: int) -> tuple[Shared, tuple[Any, ...] | None]:
        """Look at what crosses; axes are sent with the first step, and every fiftieth."""
        from whale_nebula.codec.graph import axes, basis

        rows = reshaped(x, matrix(x.shape))
        if state.q is None:
            gram = axes.gram_of(rows)
        else:
            gram = basis.running(state.gram, axes.gram_of(rows, most=LOOKED_AT))
            if step == 0 or step % RENEWED:
                return Shared(state.q, gram), None
        news = axes.told(gram.numpy())
        return Shared(axes.heard(*news), gram), news

    def learn(self, state: Shared, news: Sequence[Any], dims: Dims) -> Shared:
        """The axes that came."""
        from whale_nebula.codec.graph import axes

        return Shared(axes.heard(*news))

    def reduce(self, state: Shared, x: Any) -> Reduced:
        """Coordinates."""
        from whale_nebula.codec.graph.basis import project

        return Reduced((project(x, state.q),))

    def expand(self, state: Shared, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """The rows that have them."""
        from whale_nebula.codec.graph.basis import expand

        return expand(numbers[0], state.q), None
