"""Custom loops: small scripts as users write them, each with a place for scopes.

A script takes a `Cut` and returns a `Loop`. With `Cut(0)` it is the user's own, under `@tf.function`; with any other it
is the same lines under `@nb.function`, with scopes. `run` records all results of the steps.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import Case, Cut, Outcome

ROWS = 6
"""Two micro-batches divide it, four do not."""
SCRIPT_MODULES = (
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


@dataclass
class Loop:
    """A step, the arguments of each call of it, and the variables to look at after each.

    A call with keywords is a pair of a tuple and a dict.
    """

    step: Callable[..., Any]
    variables: Sequence[Any]
    calls: Sequence[Any]


LOOP_SCRIPTS: dict[str, Case] = {}


def script(
    stages: tuple[int, ...] = (1, 2, 3), micro: tuple[int, ...] = (1, 2, 4), passes: int = 1, grid_only: bool = False
) -> Callable[[Callable[[Cut], Loop]], Callable[[Cut], Loop]]:
    """Write a script into `LOOP_SCRIPTS`. One that is much like another is tried `grid_only`: by the grid alone."""

    def register(build: Callable[[Cut], Loop]) -> Callable[[Cut], Loop]:
        module = build.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        case = Case(functools.partial(run, build), stages, micro, passes=passes, grid_only=grid_only)
        LOOP_SCRIPTS[f"{module}.{build.__name__}"] = case
        return build

    return register


def loss_script(count: int = 3, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Write a script that trains `count` matrices on a forward with its loss, `loss(cut, w, x, y)`."""

    def register(loss: Callable[..., Any]) -> Callable[..., Any]:
        def build(cut: Cut) -> Loop:
            w = weights(count)
            return train_loop(cut, w)(lambda x, y: loss(cut, w, x, y))

        build.__name__, build.__module__ = loss.__name__, loss.__module__
        script(**options)(build)
        return loss

    return register


def step_script(
    count: int = 3, *, state: Callable[[], Sequence[Any]] = list, steps: int = 3, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Write a script of one step over `count` matrices: `step(cut, w, x, y, *state)` with its own tape and update.

    `state` makes the other variables that it reads and writes.
    """

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        def build(cut: Cut) -> Loop:
            w, more = weights(count), state()

            @cut.function
            def whole(x: Any, y: Any) -> Any:
                return step(cut, w, x, y, *more)

            return Loop(whole, [*w, *more], rows(steps))

        build.__name__, build.__module__ = step.__name__, step.__module__
        script(**options)(build)
        return step

    return register


def train_loop(
    cut: Cut, w: Sequence[Any], more: Sequence[Any] = (), *, calls: Any = None, rate: float = 0.1,
    unconnected: str = "none", update: Callable[[Any, Any], Any] | None = None
) -> Callable[[Callable[..., Any]], Loop]:  # fmt: skip
    """Make a forward with its loss a loop that trains `w`, by `update(gradients, w)`, and looks at `more`, too.

    The loss is all that the forward gives, or the first of it.
    """

    def make(loss: Callable[..., Any]) -> Loop:
        @cut.function
        def step(*batch: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                found = loss(*batch)
            differentiated = found[0] if isinstance(found, tuple) else found
            gradients = tape.gradient(differentiated, w, unconnected_gradients=unconnected)
            updated = descend(w, gradients, rate) if update is None else update(gradients, w)
            return found, gradients, updated

        return Loop(step, [*w, *more], rows() if calls is None else calls)

    return make


def load_scripts() -> dict[str, Case]:
    """All scripts, with their modules imported."""
    for module in SCRIPT_MODULES:
        importlib.import_module(f"tests.scripts.loops.{module}")
    return LOOP_SCRIPTS


def run(build: Callable[[Cut], Loop], cut: Cut) -> Outcome:
    """Run a script from fixed seeds."""
    keras.utils.set_random_seed(7)
    loop = build(cut)
    found = Outcome()
    for call in loop.calls:
        args, kwargs = call if len(call) == 2 and isinstance(call[1], dict) else (call, {})
        _record(found, loop.step(*args, **kwargs))
        _record(found, [tf.convert_to_tensor(v) for v in loop.variables])
    if cut.stages:
        found.stages = tuple(nb.last_report().stages)
    return found


def _record(found: Outcome, structure: Any) -> None:
    """Take down a nested structure: its numbers, and what must be equal."""
    for leaf in tf.nest.flatten(structure, expand_composites=True):
        array = np.array(leaf) if hasattr(leaf, "__array__") else None
        if array is None or array.dtype.kind not in "fcb?iu":
            found.others.append(leaf if array is None else array.tolist())
        else:
            found.others.append(f"{array.dtype}{array.shape}")
            found.outputs.append(array)


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


def two_layers(cut: Any, x: Any, w: Sequence[Any]) -> Any:
    """Two layers, each in its part."""
    with cut.at(0):
        hidden = tf.tanh(x @ w[0])
    with cut.at(1):
        return tf.tanh(hidden @ w[1])


def chain(cut: Any, x: Any, w: Sequence[Any]) -> Any:
    """Three layers, each in its part."""
    hidden = two_layers(cut, x, w)
    with cut.at(2):
        return hidden @ w[2]


def mse(y: Any, outputs: Any) -> Any:
    """The mean squared error."""
    return tf.reduce_mean(tf.square(outputs - y))


def descend(variables: Sequence[Any], gradients: Sequence[Any], rate: Any = 0.1) -> None:
    """One step down."""
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(rate * gradient)


def differentiate(cut: Any, w: Sequence[Any], x: Any, y: Any) -> tuple[Any, list[Any]]:
    """The mean squared error of `chain`, and its gradients."""
    with tf.GradientTape() as tape, cut.program():
        loss = mse(y, chain(cut, x, w))
    return loss, tape.gradient(loss, w)


def learn(cut: Any, w: Sequence[Any], x: Any, y: Any, rate: Any = 0.1) -> Any:
    """One step down by it; gives the loss."""
    loss, gradients = differentiate(cut, w, x, y)
    descend(w, gradients, rate)
    return loss
