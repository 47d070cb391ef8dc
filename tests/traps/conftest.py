"""Run the same step uncut and by a plan, from the same seeds, and compare the results."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import Outcome, assert_same

EMULATED = "1gbit,0ms"
STEP_LENGTH = 1e-2
"""The length of the steps: the learning rate and their number, about."""


@dataclass(frozen=True)
class Cut:
    """The scopes of a test's step; `Cut(on=False)` leaves them away."""

    on: bool = True
    micro: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def program(self) -> Iterator[None]:
        if not self.on:
            yield
            return
        with nb.cluster(), nb.pipeline(self.micro, **self.options):
            yield

    def at(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return nb.stage(cluster=name) if self.on else contextlib.nullcontext()

    @property
    def function(self) -> Any:
        return nb.function if self.on else tf.function


Build = Callable[[Cut], tuple[Any, list[Any]]]


def build_on_matrices(step: Callable[..., Any]) -> Build:
    """A step of a cut, of two square matrices, and of its inputs."""

    def build(cut: Cut) -> tuple[Any, list[Any]]:
        variables = matrices()
        return cut.function(functools.partial(step, cut, variables)), variables

    return build


def run(build: Build, cut: Cut, batches: list[tuple[Any, ...]]) -> Outcome:
    """All tensors that the steps returned, step by step, and the variables they left."""
    keras.utils.set_random_seed(3)
    step, variables = build(cut)
    found = Outcome()
    for batch in batches:
        found.outputs += [np.array(tf.convert_to_tensor(tensor)) for tensor in tf.nest.flatten(step(*batch))]
    found.weights = [np.array(v) for v in variables]
    found.stages = tuple(nb.last_report().stages) if cut.on else ()
    return found


@pytest.fixture
def compare_step() -> Callable[..., Outcome]:
    """Run a step both ways and compare; gives what the plan left."""

    def check(
        build: Build, *batches: tuple[Any, ...], micro: int = 1, exact: bool = False, stages: int = 2, **options: Any
    ) -> Outcome:
        plain = run(build, Cut(on=False), list(batches))
        found = run(build, Cut(True, micro, options), list(batches))
        assert len(found.stages) == stages, "the plan was not engaged"
        assert_same(plain, found, "exact" if exact else "sums", STEP_LENGTH)
        return found

    return check


@pytest.fixture
def compare_fit() -> Callable[..., Any]:
    """Train a Keras model both ways and compare histories and weights; gives the one of the plan."""

    def check(
        build: Callable[[Cut], Any], *data: Any, micro: int = 1, exact: bool = False, stages: int = 2,
        batch_size: int = 8, **options: Any
    ) -> Any:  # fmt: skip
        outcomes, models = [], []
        for cut in (Cut(on=False), Cut(True, micro, options)):
            keras.utils.set_random_seed(3)
            model = build(cut)
            x, y, *rest = data
            given = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
            given |= {"sample_weight": rest[0]} if rest else {}
            history = model.fit(x, y, **given).history
            outcomes.append(Outcome(history=history, weights=model.get_weights()))
            models.append(model)
        assert len(nb.last_report().stages) == stages, "the plan was not engaged"
        assert_same(*outcomes, "exact" if exact else "sums", STEP_LENGTH)
        return models[1]

    return check


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.grid), "emulated"])
def runner(request: pytest.FixtureRequest) -> str:
    """The step by actors over links; in grids also as one function, as scripts and parity tests run it."""
    if request.param == "emulated":
        nb.init(links=EMULATED)
    return request.param


def normal(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, *shape)).astype("float32")


@pytest.fixture(name="normal")
def _normal() -> Callable[..., np.ndarray]:
    """Normal numbers, the same each time."""
    return normal


def matrices(count: int = 2, width: int = 4) -> list[tf.Variable]:
    return [tf.Variable(normal(width, width, seed=90 + n) * 0.5, name=f"w{n}") for n in range(count)]


@pytest.fixture
def weights() -> Callable[..., list[tf.Variable]]:
    """Square matrices as variables."""
    return matrices
