"""What is saved before a script ends by an error, and what is not."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.errors import NebulaWarning, StageFailedError
from whale_nebula.runtime.run import current_run

BATCH, EPOCHS = 4, 2
draws = np.random.default_rng(0)
X, Y = draws.normal(size=(20, 4)).astype("float32"), draws.normal(size=(20, 1)).astype("float32")
"""Five batches."""


class ScriptError(Exception):
    """The error of a script."""


def build_model(cut: bool = False, apart: bool = False) -> keras.Model:
    with nb.cluster(["gpu", "npu"]) if apart else nullcontext(), nb.replica(sync_every=2) if apart else nullcontext():
        return build_layers(cut)


def build_layers(cut: bool) -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(8, activation="relu")(inputs))
    if cut:
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(8)(hidden)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    else:
        outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    return model


class Interruption:
    """Calls a function when a place is reached for the n-th time."""

    def __init__(self, place: str = "", count: int = 0, act: Callable[[], None] | None = None) -> None:
        self.act, self.scale, self.hits = act, 1.0, Counter[str]()
        self._place, self._count = place, count

    def at(self, place: str) -> None:
        """Record that a place is reached."""
        self.hits[place] += 1
        if place == self._place and self.hits[place] == self._count and self.act is not None:
            self.act()


class InterruptionCallback(keras.callbacks.Callback):
    """Reports the places of a `fit` to an `Interruption`; changes variables at the end of an epoch, before it does."""

    def __init__(self, breaks: Interruption) -> None:
        super().__init__()
        self._breaks = breaks

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._breaks.at("batch begins")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._breaks.at("batch")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._breaks.at("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.5)
        self._breaks.at("epoch")

    def on_train_end(self, logs: Any = None) -> None:
        self._breaks.at("end")


class BatchCounter(keras.callbacks.Callback):
    """Counts the beginnings and ends of batches, and remembers their numbers; lowers the learning rate at each."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = Counter[str]()

    def get_state(self) -> Any:
        return dict(self.hits)

    def set_state(self, state: Any) -> None:
        self.hits = Counter(state)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count("begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("end")

    def _count(self, name: str) -> None:
        self.hits[name] += 1
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.95)


def train_with_fit(
    breaks: Interruption, cut: bool = False, early: bool = False, apart: bool = False
) -> list[np.ndarray]:
    """A callback that saves files is called before the error, if it is `early`, or after it."""
    model = build_model(cut, apart)

    def read(batch: Any) -> Any:
        breaks.at("reading")
        return batch

    data = tf.data.Dataset.range(len(X) // BATCH).map(lambda n: tf.py_function(read, [n], tf.int64)).map(take_batch)
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=9, min_delta=9.0)
    path = Path(current_run().checkpoints.levels[0].folder.path) / "{epoch}-{batch}.weights.h5"
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=3)
    counts = [BatchCounter(), BatchCounter()]  # one is called before the error, one after it
    failing = [counts[0], InterruptionCallback(breaks), counts[1]]
    callbacks = [saving, *failing, stopping] if early else [*failing, saving, stopping]
    model.fit(data, epochs=EPOCHS, validation_data=(X, Y), validation_batch_size=20, verbose=0, callbacks=callbacks)
    return [
        *model.get_weights(),
        *map(np.asarray, model.optimizer.variables),
        np.asarray([stopping.wait, *(each.hits[name] for each in counts for name in ("begin", "end"))]),
    ]


def take_batch(number: Any) -> Any:
    rows = tf.range(BATCH) + BATCH * tf.cast(tf.ensure_shape(number, ()), tf.int32)
    return tf.gather(X, rows), tf.gather(Y, rows)


def train_in_loop(
    breaks: Interruption, keeps: bool = False, several: bool = False, cut: bool = False
) -> list[np.ndarray]:
    model, rng, mean = build_model(cut), np.random.default_rng(1), tf.Variable(0.0)
    nb.state(rng=rng, **({"mean": mean} if keeps else {}))

    def train(x: Any) -> Any:
        tf.debugging.assert_less(x, 1e6)
        return model.train_step((x, x[:, :1]))["loss"]

    first, second = nb.function(train), nb.function(lambda x: train(x))
    for _ in range(nb.resumed().step if nb.resumed() else 0, 6):
        x = rng.random((BATCH, 4), "float32")
        breaks.at("turn begins")
        loss = first(x * breaks.scale)
        breaks.at("turn")
        mean.assign(0.5 * mean + loss)
        if several:
            second(x)
    return [*model.get_weights(), *map(np.asarray, model.optimizer.variables), *([mean.numpy()] if keeps else [])]


def run_script(
    script: Callable[[Interruption], list[np.ndarray]], folder: Path, breaks: Interruption | None = None, **options: Any
) -> Any:
    """Run a script by itself; returns its result as bytes, or the error by which it ended."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    try:
        with nb.init(checkpoint={"folder": str(folder), "every": 1000, **options}):
            return [each.tobytes() for each in script(breaks or Interruption())]
    except (ScriptError, KeyboardInterrupt, tf.errors.OpError, StageFailedError) as error:
        return error


def raise_error() -> None:
    raise ScriptError


def list_steps(folder: Path) -> list[int]:
    return [found.step for found in Folder(str(folder)).scan() if not found.check()]


def list_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.message for each in caplog.records if "could be saved" in each.message or "last completed" in each.message
    ]


# ------------------------------------------------------------------ a fit
INTERRUPTIONS = [("batch", 3, 3), ("batch", 3, 3), ("validation", 1, 5), ("batch begins", 8, 7), ("end", 1, 10)]
"""Where it ends, at which time in that start, and the step that is saved then. Skipped batches count, too: the same
error may come again, and no step was taken.
"""
MORE_INTERRUPTIONS = [
    ("batch begins", 2, 1),
    ("batch", 3, 3),
    ("epoch", 1, 5),
    ("batch begins", 7, 6),
    ("epoch", 1, 10),
]


@pytest.mark.parametrize(
    ("interruptions", "options"),
    [
        (INTERRUPTIONS, {}),
        *(
            pytest.param(*each, marks=pytest.mark.grid)
            for each in ((MORE_INTERRUPTIONS, {"early": True}), (INTERRUPTIONS, {"apart": True}))
        ),
    ],
    ids=["one process", "files are saved before the error", "clusters apart"],
)
def test_interrupted_fit_ends_like_an_uninterrupted_one(
    interruptions: list[tuple[str, int, int]],
    options: dict[str, bool],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = partial(train_with_fit, **options)
    expected = run_script(script, tmp_path / "undisturbed")
    last = 0
    for place, count, step in interruptions:
        caplog.clear()
        assert isinstance(run_script(script, tmp_path / "run", Interruption(place, count, raise_error)), ScriptError)
        assert list_steps(tmp_path / "run")[0] == step
        messages = [f"the last completed step, {step}, is saved in {tmp_path}/run"]
        assert list_messages(caplog) == ([] if step == last else messages)
        last = step
    assert run_script(script, tmp_path / "run") == expected
    assert read_saved(tmp_path / "run") == read_saved(tmp_path / "undisturbed")


class BrokenCallback(keras.callbacks.Callback):
    """A callback whose state cannot be read, by an error without a text."""

    def get_state(self) -> Any:
        raise ValueError

    def set_state(self, state: Any) -> None: ...


def test_failure_without_a_text_is_not_reported_as_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ScriptError), nb.init(checkpoint={"folder": str(tmp_path), "every": 100}):
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: raise_error() if batch else None)
        build_model().fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[BrokenCallback(), stop])
    assert list_messages(caplog) == [f"no step could be saved in {tmp_path}: ValueError"]


def test_unreadable_data_loses_no_step(tmp_path: Path) -> None:
    """With scopes a batch is read before its step begins. No checkpoint of before is let go for the one of an error."""
    assert isinstance(
        run_script(partial(train_with_fit, cut=True), tmp_path, Interruption("reading", 4, raise_error)),
        tf.errors.OpError,
    )
    assert isinstance(
        run_script(partial(train_with_fit, cut=True), tmp_path, Interruption("reading", 6, raise_error), keep=1),
        Exception,
    )
    assert list_steps(tmp_path) == [5, 3]


def read_saved(folder: Path) -> dict[str, list[bytes]]:
    """What `ModelCheckpoint` has saved every three batches, of ten."""
    built, found = build_model(), {}
    model = keras.Model(built.inputs, built.outputs)
    for path in sorted(folder.glob("*.weights.h5")):
        model.load_weights(path)
        found[path.name.partition(".")[0]] = [each.tobytes() for each in model.get_weights()]
    assert list(found) == ["1-3", "2-1", "2-4"]
    return found


# ------------------------------------------------------------------ Ctrl-C
def press_ctrl_c(times: int) -> Callable[[], None]:
    def act() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    return act


@pytest.mark.parametrize(("times", "begun"), [(1, 4), (2, 3)])
def test_ctrl_c_ends_fit_before_the_next_step_and_twice_at_once(
    times: int, begun: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    breaks = Interruption("batch", 3, press_ctrl_c(times))
    assert isinstance(run_script(train_with_fit, tmp_path, breaks), KeyboardInterrupt)
    assert list_steps(tmp_path) == [3] and breaks.hits["batch begins"] == begun
    assert (
        capfd.readouterr().err.count("SIGINT: saves, then stops before the next step; send it again to stop now") == 1
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ------------------------------------------------------------------ a loop
def set_scale(breaks: Interruption, scale: float) -> Callable[[], None]:
    def act() -> None:
        breaks.scale = scale

    return act


@pytest.mark.filterwarnings("ignore:.*runs uncut")
@pytest.mark.parametrize(
    "act", [press_ctrl_c(1), pytest.param(raise_error, marks=pytest.mark.grid)], ids=["Ctrl-C", "error"]
)
def test_interrupted_loop_ends_like_an_uninterrupted_one(act: Callable[[], None], tmp_path: Path) -> None:
    expected = run_script(train_in_loop, tmp_path / "undisturbed")
    assert isinstance(
        run_script(train_in_loop, tmp_path / "run", Interruption("turn", 3, act)), ScriptError | KeyboardInterrupt
    )
    assert list_steps(tmp_path / "run") == [3]
    assert run_script(train_in_loop, tmp_path / "run") == expected


@pytest.mark.filterwarnings("ignore:.*runs uncut")
@pytest.mark.parametrize(
    ("options", "scale", "why"),
    [
        ({"keeps": True}, 1.0, "'mean' of nb.state may be written after a step, which has not happened yet"),
        pytest.param(
            {"several": True},
            1.0,
            "each step may be followed by other steps, and not all of them were completed",
            marks=pytest.mark.grid,
        ),
        ({}, 1e9, "step 3 failed or got no batch, and may have changed variables"),
        ({}, -1e30, "is NaN"),
    ],
    ids=["objects", "several steps", "a step fails", "NaN"],
)
def test_inconsistent_state_is_not_saved(
    options: dict[str, Any], scale: float, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    breaks = Interruption("turn begins" if scale > 1 else "turn", 3)
    breaks.act = set_scale(breaks, scale) if scale > 1 else raise_error
    breaks.scale = min(scale, 1.0)
    assert isinstance(run_script(partial(train_in_loop, **options), tmp_path, breaks), Exception)
    assert list_steps(tmp_path) == [] and list_messages(caplog)[0].endswith(why)


def train_with_schedule(
    registers: bool, changes: Collection[int], steps: int, losses: dict[int, float]
) -> Callable[[Any], list[np.ndarray]]:
    """A loop that sets the learning rate before the steps of these numbers."""

    def script(breaks: Interruption) -> list[np.ndarray]:
        model = build_model()
        if registers:
            nb.state(rate=model.optimizer.learning_rate)
        for number in range(nb.resumed().step if nb.resumed() else 0, steps):
            if number in changes:
                model.optimizer.learning_rate.assign(0.1 / number)
            losses[number] = float(model.train_on_batch(X[number:], Y[number:]))
        breaks.at("loop ends")
        return []

    return script


@pytest.mark.parametrize(
    ("registers", "changes", "act", "resumed"),
    [
        (False, range(1, 9), raise_error, 0),
        (False, [1], raise_error, 4),
        (True, range(1, 9), None, 4),
        pytest.param(False, range(1, 9), None, 4, marks=pytest.mark.grid),
    ],
)
def test_values_written_before_a_step_are_not_lost_unnoticed(
    registers: bool, changes: Collection[int], act: Callable[[], None] | None, resumed: int, tmp_path: Path
) -> None:
    """A script that ends is saved after its last step: only its next start writes the next learning rate."""
    expected: dict[int, float] = {}
    found: dict[int, float] = {}
    before: dict[int, float] = {}
    is_exact = registers or act is not None
    script = partial(train_with_schedule, registers, changes)
    run_script(script(7, expected), tmp_path / "undisturbed")
    run_script(script(4, before), tmp_path / "run", Interruption("loop ends", 1, act))
    with nullcontext() if is_exact else pytest.warns(NebulaWarning, match="has the value of step 4 in step 5"):
        run_script(script(7, found), tmp_path / "run")
    assert min(found) == resumed and found[resumed] == expected[resumed]
    assert (found.items() <= expected.items()) is is_exact


def test_failed_step_without_changes_saves_the_state_before_it(tmp_path: Path) -> None:
    """All of the turn before it was done."""
    breaks = Interruption("turn begins", 3)
    breaks.act = set_scale(breaks, 1e9)
    script = partial(train_in_loop, keeps=True, cut=True)
    expected = run_script(script, tmp_path / "undisturbed")
    assert isinstance(run_script(script, tmp_path / "run", breaks), StageFailedError)
    assert list_steps(tmp_path / "run") == [2]
    assert run_script(script, tmp_path / "run") == expected
