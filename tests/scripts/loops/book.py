"""The book of custom loops: small scripts as users write them, each with a place for scopes.

A script takes a `Cut` and gives a `Loop`. With `Cut(0)` it is the user's own, under `@tf.function`; with any other it
is the same lines under `@nb.function`, with scopes. `run` takes down all that the steps returned and left.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity import compare, zoo

ROWS = 6
"""Two micro-batches divide it, four do not."""
CHAPTERS = (
    "tapes",
    "edited",
    "optimizers",
    "forwards.control",
    "forwards.state",
    "forwards.draws",
    "forwards.tensors",
    "forwards.checks",
    "forwards.losses",
    "shapes",
    "nested",
)


@dataclass(frozen=True)
class Cut(zoo.Cut):
    """Number of stages (0: the script as it was) and of micro-batches."""

    @property
    def function(self) -> Any:
        """What stands above the step."""
        return nb.function if self.stages else tf.function


@dataclass
class Loop:
    """A step, the arguments of each call of it, and the variables to look at after each.

    A call with keywords is a pair of a tuple and a dict.
    """

    step: Callable[..., Any]
    variables: Sequence[Any]
    calls: Sequence[Any]


@dataclass(frozen=True)
class Script:
    """A script of the book, and the cuts that are natural for it.

    It goes through its stages `passes` times. One that is much like another is tried `rarely`: by the grid alone.
    """

    build: Callable[[Cut], Loop]
    stages: tuple[int, ...]
    micro: tuple[int, ...]
    passes: int
    rarely: bool


@dataclass
class Left:
    """All that some steps returned and left: numbers, and what is no number; and what they were."""

    numbers: list[np.ndarray] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    stages: int = 0

    def take(self, structure: Any) -> None:
        """Take down a nested structure."""
        for leaf in tf.nest.flatten(structure, expand_composites=True):
            array = np.array(leaf) if hasattr(leaf, "__array__") else None
            if array is None or array.dtype.kind not in "fcb?iu":
                self.others.append(leaf if array is None else array.tolist())
            else:
                array = array if array.dtype.kind in "fc" else array.astype("float64")
                self.kinds.append(f"{array.dtype}{array.shape}")
                self.others.append(np.isfinite(array).tolist())
                self.numbers.append(np.nan_to_num(array, posinf=0.0, neginf=0.0))


BOOK: dict[str, Script] = {}


def script(
    stages: tuple[int, ...] = (1, 2, 3), micro: tuple[int, ...] = (1, 2, 4), passes: int = 1, rarely: bool = False
) -> Callable[[Callable[[Cut], Loop]], Callable[[Cut], Loop]]:
    """Write a script into the book."""

    def write(build: Callable[[Cut], Loop]) -> Callable[[Cut], Loop]:
        chapter = build.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        name = f"{chapter}.{build.__name__}"
        BOOK[name] = Script(build, stages, micro, passes, rarely)
        return build

    return write


def opened() -> dict[str, Script]:
    """The whole book."""
    for chapter in CHAPTERS:
        importlib.import_module(f"tests.scripts.loops.{chapter}")
    return BOOK


def run(build: Callable[[Cut], Loop], cut: Cut) -> Left:
    """Run a script from fixed seeds."""
    keras.utils.set_random_seed(7)
    loop = build(cut)
    found = Left()
    for call in loop.calls:
        args, kwargs = call if len(call) == 2 and isinstance(call[1], dict) else (call, {})
        found.take(loop.step(*args, **kwargs))
        found.take([tf.convert_to_tensor(v) for v in loop.variables])
    if cut.stages:
        found.stages = len(nb.last_report().stages)
    return found


def assert_same(plain: Left, found: Left) -> None:
    """Everything that the two runs returned and left is the same."""
    assert found.others == plain.others
    assert found.kinds == plain.kinds
    outcomes = [zoo.Outcome(outputs=each.numbers) for each in (plain, found)]
    compare.assert_parity(*outcomes, zoo.Trial(run))


# ---------------------------------------------------------------------- what scripts are made of
def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, the same each time."""
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def weights(count: int = 3, width: int = 4) -> list[tf.Variable]:
    """Square matrices."""
    return [tf.Variable(normal(width, width, seed=90 + n) * 0.5, name=f"w{n}") for n in range(count)]


def rows(count: int = 3, width: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches (x, y)."""
    return [(normal(ROWS, width, seed=n), normal(ROWS, width, seed=30 + n)) for n in range(count)]


def chain(cut: Any, x: Any, w: Sequence[Any]) -> Any:
    """Three layers, each in its part."""
    with cut.at(0):
        hidden = tf.tanh(x @ w[0])
    with cut.at(1):
        hidden = tf.tanh(hidden @ w[1])
    with cut.at(2):
        return hidden @ w[2]


def mse(y: Any, outputs: Any) -> Any:
    """The mean squared error."""
    return tf.reduce_mean(tf.square(outputs - y))


def descend(variables: Sequence[Any], gradients: Sequence[Any], rate: Any = 0.1) -> None:
    """One step down."""
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(rate * gradient)
