"""Helpers of tests of refusals: a tiny model with a given middle, and checks of an error's text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.parity_harness import assert_same
from whale_nebula.errors import NebulaError

ROWS, WIDTH = 8, 4
Middle = Callable[[Any], Any]


def find_marked_line(name: str) -> str:
    """'file:line' of the line in the calling file that ends in '# mark: name'."""
    file = inspect.stack()[1].filename
    lines = Path(file).read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if line.endswith(f"# mark: {name}")]
    assert len(numbers) == 1, f"{name} is marked {len(numbers)} times"
    return f"{file}:{numbers[0]}"


def find_middle_line(middle: Middle) -> str:
    """'file:line' of a lambda, or of the first line inside a function."""
    code = middle.__code__
    return f"{code.co_filename}:{code.co_firstlineno + (code.co_name != '<lambda>')}"


def check_error(kind: type[NebulaError], call: Callable[[], Any], *said: str, at: str = "") -> NebulaError:
    """The error that a call raises: of this kind, whole, at this line, and with all that should be said in it."""
    with pytest.raises(kind) as caught:
        call()
    error, text = caught.value, str(caught.value)
    assert text.startswith(f"{error.code} ")
    assert error.where, text
    assert error.mend not in ("", "report this with the script that shows it"), text
    assert at in error.where, text
    for part in said:
        assert part in text, text
    return error


def make_two_stage_step(first: Middle, second: Middle = lambda x: x + 1.0, micro: int = 1) -> Any:
    """A step of two stages: the second goes on with what the first gives."""

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro):
            with nb.stage(cluster="a"):
                hidden = first(x)
            with nb.stage(cluster="b"):
                return second(hidden)

    return step


class SubclassedModel(keras.Model):
    """Two stages; what is asked about happens in the second one's code."""

    def __init__(self, middle: Middle, micro: int = 1, scoped: bool = True) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(WIDTH), keras.layers.Dense(2)
        self.middle, self.micro, self.scoped = middle, micro, scoped

    def call(self, x: Any) -> Any:
        if not self.scoped:
            return self.last(self.middle(self.first(x)))
        with nb.cluster(), nb.pipeline(self.micro):
            with nb.stage(cluster="a"):
                hidden = self.first(x)
            with nb.stage(cluster="b"):
                return self.last(self.middle(hidden))


def build_subclassed(middle: Middle = lambda x: x, micro: int = 1, scoped: bool = True, **compiled: Any) -> keras.Model:
    """A subclassed model, compiled."""
    keras.utils.set_random_seed(3)
    model = SubclassedModel(middle, micro, scoped)
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | compiled)
    return model


def build_functional(micro: int = 1, scoped: bool = True, **compiled: Any) -> keras.Model:
    """A functional model of two stages, compiled."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((WIDTH,))
    first, last = keras.layers.Dense(WIDTH, activation="tanh"), keras.layers.Dense(2)
    if scoped:
        with nb.cluster(), nb.pipeline(micro):
            with nb.stage(cluster="a"):
                hidden = first(inputs)
            with nb.stage(cluster="b"):
                outputs = last(hidden)
    else:
        outputs = last(first(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | compiled)
    return model


def make_batch(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """The same numbers each time."""
    draw = np.random.default_rng(1)
    return draw.standard_normal((rows, WIDTH)).astype("float32"), draw.standard_normal((rows, 2)).astype("float32")


def fit(model: keras.Model, rows: int = ROWS, **options: Any) -> dict[str, list[float]]:
    """One epoch, uncut by Keras itself; gives the history."""
    history: dict[str, list[float]] = model.fit(
        *make_batch(rows), **{"batch_size": ROWS, "shuffle": False, "verbose": 0} | options
    ).history
    return history


def assert_same_training(cut: keras.Model, uncut: keras.Model, **options: Any) -> None:
    """Both learn the same; and the first did it by a plan."""
    nb.shutdown()
    histories = fit(cut, **options), fit(uncut, **options)
    assert len(nb.last_report().stages) == 2, "no plan was engaged"
    assert_same(histories[1], histories[0], "sums")
    assert_same(uncut.get_weights(), cut.get_weights(), "sums")
