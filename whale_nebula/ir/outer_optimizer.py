"""Outer optimizers of local SGD, applied to the clusters' averaged differences every `sync_every` steps.

Each cluster trains some steps by itself from the same weights. Its gradient is these weights minus its own. The outer
optimizer is applied to the mean of these gradients; its state is the same in all clusters and is never sent. An outer
optimizer has two pure methods: init and update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from whale_nebula.errors import OptionError

if TYPE_CHECKING:  # scopes are imported before TensorFlow
    import numpy as np
    from numpy.typing import NDArray

Numbers: TypeAlias = "NDArray[np.float32]"


class Outer(ABC):
    """An outer optimizer of local SGD, applied to the mean of the clusters' differences."""

    @abstractmethod
    def init(self, weights: Numbers) -> Any:
        """The initial state."""

    @abstractmethod
    def update(self, weights: Numbers, gradient: Numbers, state: Any) -> tuple[Numbers, Any]:
        """The new weights and state."""


@dataclass(frozen=True)
class Average(Outer):
    """The mean of the clusters' weights.

    >>> import numpy as np
    >>> outer = Average()
    >>> known, ours, theirs = (np.float32([each]) for each in (1.0, 0.0, 4.0))
    >>> new, _ = outer.update(known, ((known - ours) + (known - theirs)) / 2, outer.init(known))
    >>> new.tolist()
    [2.0]
    """

    def init(self, weights: Numbers) -> Any:
        """No state."""
        return None

    def update(self, weights: Numbers, gradient: Numbers, state: Any) -> tuple[Numbers, Any]:
        """Move to the mean of the clusters' weights."""
        return weights - gradient, state


@dataclass(frozen=True)
class Nesterov(Outer):
    """Gradient descent with Nesterov's momentum over the differences.

    >>> import numpy as np
    >>> outer = Nesterov(rate=1.0, momentum=0.5)
    >>> weights, state = outer.update(np.float32([1.0]), np.float32([0.5]), outer.init(np.float32([1.0])))
    >>> weights.tolist(), state.tolist()
    ([0.25], [0.5])
    """

    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 2.0:
            raise OptionError(
                f"Nesterov(rate={self.rate!r}) is out of range", why="rate must be in (0, 2]", mend="rate=0.7"
            )
        if not 0.0 <= self.momentum < 1.0:
            why = "momentum must be in [0, 1)"
            raise OptionError(f"Nesterov(momentum={self.momentum!r}) is out of range", why=why, mend="momentum=0.9")

    def init(self, weights: Numbers) -> Any:
        """Zero momentum."""
        momentum = weights.copy()
        momentum.fill(0.0)
        return momentum

    def update(self, weights: Numbers, gradient: Numbers, state: Any) -> tuple[Numbers, Any]:
        """One step with a look-ahead along the momentum."""
        rate, factor = weights.dtype.type(self.rate), weights.dtype.type(self.momentum)
        state = factor * state + gradient
        return weights - rate * (gradient + factor * state), state


OUTER_BY_NAME: dict[str, Outer] = {"nesterov": Nesterov(), "average": Average()}
"""Outer optimizers by their names in `nb.replica(outer=...)`."""


def format_outer(outer: Outer) -> str:
    """The text of an outer optimizer: its name in `OUTER_BY_NAME`, if it equals one of these.

    >>> format_outer(Nesterov()), format_outer(Nesterov(rate=0.5))
    ('nesterov', 'Nesterov(rate=0.5, momentum=0.9)')
    """
    has_default_repr = type(outer).__repr__ is object.__repr__
    text = f"{type(outer).__name__}({vars(outer)})" if has_default_repr else repr(outer)
    return next((name for name, known in OUTER_BY_NAME.items() if known == outer), text)
