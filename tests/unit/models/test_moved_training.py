"""A translator trained in one place continues across two clusters, and back, with a continuous loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.models.small_translators import causal, pairs, randomize_weights, stage_of_side
from whale_nebula.models.smoothing import SmoothedCrossentropy

pytestmark = pytest.mark.grid  # two plans and a plain model: half a minute
STEPS, TURNS, ROWS, RATE = 2, 3, 4, 1e-2
X, Y = pairs(TURNS * STEPS * ROWS)


class TrainingResult(NamedTuple):
    """What a course came to: the loss of each step; then weights, and the optimizer's counters and slots."""

    losses: list[float]
    weights: list[np.ndarray]
    iterations: int
    slots: dict[str, np.ndarray]


class BatchLosses(keras.callbacks.Callback):
    """The loss of each batch by itself: what Keras logs is the mean so far."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.means.append(float(logs["loss"]))

    def each(self) -> list[float]:
        return np.diff(np.arange(1, len(self.means) + 1) * self.means, prepend=0.0).tolist()


def make_model(*, cut: bool) -> keras.Model:
    """The translator, in one place or in two; its optimizer has its slots, or Keras would not load them."""
    if cut:
        with nb.cluster(), nb.pipeline(micro_batch=2):
            model = causal(stage_of_side)
    else:
        model = causal()
    rate = keras.optimizers.schedules.CosineDecay(0.0, 6, warmup_target=RATE, warmup_steps=2)
    model.compile(keras.optimizers.Adam(rate), SmoothedCrossentropy())
    model.optimizer.build(model.trainable_variables)
    return model


def train_turns(model: keras.Model, turn: int, turns: int = 1) -> list[float]:
    """Some turns of steps, each on rows of its own."""
    rows, losses = slice(turn * STEPS * ROWS, (turn + turns) * STEPS * ROWS), BatchLosses()
    x = {side: ids[rows] for side, ids in X.items()}
    model.fit(x, Y[rows], batch_size=ROWS, shuffle=False, verbose=0, callbacks=[losses])
    return losses.each()


def collect_result(model: keras.Model, losses: Sequence[float]) -> TrainingResult:
    slots = {variable.path: np.array(variable) for variable in model.optimizer.variables if variable.shape}
    return TrainingResult(list(losses), model.get_weights(), int(model.optimizer.iterations), slots)


def load_model(model: keras.Model, path: Path) -> keras.Model:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # where an optimizer does not fit, Keras leaves it as it is and only warns
        model.load_weights(path)
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is saved after the first turn, and after the second."""
    folder = tmp_path_factory.mktemp("hot")
    return {turn: folder / f"{turn}.weights.h5" for turn in ("first", "second")}


@pytest.fixture(scope="module")
def local_model() -> keras.Model:
    """The model in one place. What is loaded into it takes the place of all that it has learnt."""
    model = make_model(cut=False)
    randomize_weights(model, 0.2)
    return model


@pytest.fixture(scope="module")
def stationary_result(local_model: keras.Model, files: dict[str, Path]) -> TrainingResult:
    """All steps in one place; a file is written on the way."""
    losses = train_turns(local_model, 0)
    local_model.save_weights(files["first"])
    return collect_result(local_model, losses + train_turns(local_model, 1, TURNS - 1))


@pytest.fixture(scope="module")
def moved_result(local_model: keras.Model, stationary_result: TrainingResult, files: dict[str, Path]) -> TrainingResult:
    """Two steps in one place, two across both, by a model made anew, and two in one place again."""
    remote_model = load_model(make_model(cut=True), files["first"])
    losses = stationary_result.losses[:STEPS] + train_turns(remote_model, 1)
    assert set(nb.last_report().stages) == {"source", "target"}
    remote_model.save_weights(files["second"])
    return collect_result(local_model, losses + train_turns(load_model(local_model, files["second"]), 2))


def test_moved_training_has_the_same_losses(stationary_result: TrainingResult, moved_result: TrainingResult) -> None:
    assert len(stationary_result.losses) == TURNS * STEPS
    np.testing.assert_allclose(moved_result.losses, stationary_result.losses, rtol=1e-5)


def test_moved_training_has_the_same_weights(stationary_result: TrainingResult, moved_result: TrainingResult) -> None:
    for expected, found in zip(stationary_result.weights, moved_result.weights, strict=True):
        tolerance = 1e-5 * np.linalg.norm(expected) + 1e-3 * RATE * TURNS * STEPS
        assert np.linalg.norm(found - expected) <= tolerance


def test_moved_training_has_the_same_optimizer_state(
    stationary_result: TrainingResult, moved_result: TrainingResult
) -> None:
    assert moved_result.iterations == stationary_result.iterations == TURNS * STEPS
    assert moved_result.slots.keys() == stationary_result.slots.keys() and len(stationary_result.slots) > 40
    largest = max(float(np.linalg.norm(slot)) for slot in stationary_result.slots.values())
    for path, expected in stationary_result.slots.items():
        tolerance = 1e-5 * (np.linalg.norm(expected) + 1e-3 * largest)
        assert np.linalg.norm(moved_result.slots[path] - expected) <= 10 * tolerance, path
