"""A run that was interrupted and resumed from its checkpoint ends with the bits of an uninterrupted one."""

from __future__ import annotations

import hashlib
import resource
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.cli.checkpoints import main as show_checkpoints
from whale_nebula.errors import CheckpointError, NebulaWarning, StateError
from whale_nebula.runtime.run import current_run
from whale_nebula.strategies import Curriculum, OneBitLamb

ROWS, BATCH, SEED = 44, 8, 3
"""Six batches, of which the last is smaller."""


class SimulatedKill(BaseException):
    """Ends a run like a kill between two steps: nothing is saved afterwards."""


@dataclass(frozen=True)
class Case:
    """A model, its training, and the stops. Further programs, such as a validation, are traced again by every resumed
    run, so only one case has them.
    """

    build: Callable[[], keras.Model]
    compile_options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    arrays: bool = False
    links: str | None = None
    epochs: int = 2
    stops: tuple[int, ...] = (9,)
    has_validation: bool = False
    has_prediction: bool = False
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.02, momentum=0.9)
    prepare: Callable[[tf.data.Dataset], tf.data.Dataset] = lambda data: data


def build_stages(codec: Any = None, pipeline: Any = None, head: Any = nullcontext) -> keras.Model:
    """Two stages, with dropout in the first one."""
    with nb.cluster(), nb.pipeline(**pipeline) if pipeline else nullcontext():
        with nb.stage(cluster="gpu"):
            inputs = keras.Input((6,), name="x")
            hidden = keras.layers.Dense(32, activation="relu")(inputs)
            hidden = keras.layers.Dropout(0.25)(hidden)
            with nb.compress(**codec) if codec else nullcontext():
                hidden = keras.layers.Dense(32)(hidden)
        with nb.stage(cluster="npu"), head():
            outputs = keras.layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


def build_plain() -> keras.Model:
    """A model without scopes, which is built by its first step."""
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([*layers, keras.layers.Dense(1)])


class SubclassedModel(keras.Model):
    """A model whose scopes are entered when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        with nb.cluster():
            with nb.stage(cluster="gpu"):
                x = self.dropout(self.first(x), training=training)
            with nb.stage(cluster="npu"):
                return self.last(x)


class Noise(keras.layers.Layer):
    """Adds noise with a random op of TensorFlow."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + tf.random.normal(tf.shape(x), stddev=0.1) if training else x


def build_auto_parallel() -> keras.Model:
    nb.auto_parallel(memory="1GiB")
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )


def build_for_any_length(codec: dict[str, Any] | None = None, cut: bool = True) -> keras.Model:
    """For rows of any number of columns."""
    with nb.cluster() if cut else nullcontext():
        with nb.stage(cluster="gpu") if cut else nullcontext():
            inputs = keras.Input((None,), name="x")
            hidden = keras.layers.Reshape((-1, 1))(inputs)
            with nb.compress(**codec) if codec else nullcontext():
                hidden = keras.layers.Dense(8, activation="relu")(hidden)
        with nb.stage(cluster="npu") if cut else nullcontext():
            outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(inputs, outputs)


def build_replicas() -> keras.Model:
    with nb.replica(2, shard="optimizer"):
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(16)(inputs))
    return keras.Model(inputs, outputs)


def build_local_sgd(codec: dict[str, Any] | None = None, **options: Any) -> keras.Model:
    """Two clusters that each train a copy, with their own dropout and noise."""
    codec_scope = nullcontext() if "exchange" in options else nb.compress(**codec or {"fp16": True})
    with nb.cluster(["gpu", "npu"]), codec_scope, nb.replica(**options):
        inputs = keras.Input((6,))
        hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(32, activation="relu")(inputs))
        outputs = keras.layers.Dense(1)(Noise()(hidden))
    return keras.Model(inputs, outputs)


class RateDecay(keras.callbacks.Callback):
    """Lowers the learning rate before and after each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.99)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_begin(batch)


def make_plateau_callbacks() -> list[Any]:
    return [
        RateDecay(),
        keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=9.0, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=9.0, factor=0.5),
    ]


def apply_curriculum(data: tf.data.Dataset) -> tf.data.Dataset:
    """Rows of 2, 4 and then 6 columns."""
    return make_curriculum()(data)


def make_curriculum() -> Curriculum:
    return Curriculum(2, 6, 15, step=2)


CASES = {
    "pipeline": Case(
        lambda: build_stages(pipeline={"micro_batch": 2}),
        has_validation=True,
        has_prediction=True,
        optimizer=lambda: keras.optimizers.Adam(0.02),
    ),
    "zero-bubble over a line": Case(
        lambda: build_stages(pipeline={"micro_batch": 2, "schedule": "zero-bubble"}), links="1gbit,1ms"
    ),
    "shared basis, int8 by chance": Case(lambda: build_stages({"rank": 8, "int8": True})),
    "a ladder of precisions": Case(lambda: build_stages({"codec": "auto"}), links="100kbit,0ms"),
    "split head": Case(lambda: build_stages(head=lambda: nb.split(2, axis=0))),
    "replicas with shared slots": Case(build_replicas),
    "no scopes": Case(build_plain, arrays=True),
    "no scopes, two steps at once": Case(build_plain, compile_options={"steps_per_execution": 2}),
    "subclassed": Case(SubclassedModel),
    "planned": Case(build_auto_parallel),
    "clusters apart, with differences on their way": Case(
        lambda: build_local_sgd({"topk": 0.2, "int8": True}, sync_every=4, fragments=2, delay=1),
        callbacks=lambda: [RateDecay()],
    ),
    "clusters apart that meet in each epoch": Case(
        lambda: build_local_sgd(sync_every=4, outer="average"), stops=(5, 9)
    ),
    "momenta in a bit a number": Case(
        lambda: build_local_sgd(exchange="1bit"), stops=(3, 9), optimizer=lambda: OneBitLamb(0.02, freeze_step=5)
    ),
    "a curriculum": Case(build_for_any_length, epochs=3, stops=(4, 13), prepare=apply_curriculum),
    "a curriculum as a callback": Case(
        build_for_any_length, epochs=3, stops=(4, 13), callbacks=lambda: [make_curriculum()]
    ),
    "a curriculum, no scopes": Case(
        lambda: build_for_any_length(cut=False), epochs=3, stops=(4, 13), prepare=apply_curriculum
    ),
    "a curriculum, with codecs that remember": Case(
        lambda: build_for_any_length({"rank": 2, "int8": True, "start_step": 3}),
        epochs=3,
        stops=(4, 13),
        prepare=apply_curriculum,
    ),
    "a curriculum, with micro-batches and codecs by length": Case(
        build_for_any_length,
        epochs=3,
        stops=(4, 8, 13),
        callbacks=lambda: [
            Curriculum(
                2,
                6,
                15,
                step=2,
                micro_batch={2: 1, 4: 2},
                compress={2: nb.compress(rank=2, int8=True, start_step=3), 6: nb.compress(topk=0.5, int8=True)},
            )
        ],
    ),
    "callbacks that remember": Case(build_stages, callbacks=make_plateau_callbacks, epochs=6),
}


def train(case: Case, folder: Path | None, stop: int = -1) -> dict[str, Any]:
    """Train in a new run; with `stop` it is killed after this step."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 6)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")
    init_options = {} if folder is None else {"checkpoint": {"folder": str(folder), "every": 2}}
    with nb.init(links=case.links, seed=SEED, **init_options) as run:
        model = case.build()
        model.compile(case.optimizer(), "mse", metrics=["mae"], **case.compile_options)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH)
        data = data.apply(case.prepare)
        fit_data = {"x": x, "y": y, "batch_size": BATCH} if case.arrays else {"x": data}
        kill = keras.callbacks.LambdaCallback(on_train_batch_end=_kill_after(stop))
        try:
            history = model.fit(
                **fit_data,
                epochs=case.epochs,
                verbose=0,
                callbacks=[*case.callbacks(), kill],
                validation_data=(x, y) if case.has_validation else None,
            )
        except SimulatedKill:
            run.checkpoints.failed = True
            return {}
        numbers = {name: [float(each).hex() for each in values] for name, values in history.history.items()}
        weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
        slots = b"".join(np.asarray(each).tobytes() for each in model.optimizer.variables)
        predicted = model.predict(x, verbose=0) if case.has_prediction else np.zeros(0)
        digests = [hashlib.sha256(each).hexdigest() for each in (weights, slots, predicted.tobytes())]
        return {**numbers, "digests": digests}


def _kill_after(stop: int) -> Callable[..., None]:
    seen = [0]

    def count(batch: int, logs: Any = None) -> None:
        checkpoints = current_run().checkpoints
        seen[0] = 0 if checkpoints is None else checkpoints.position.step
        _finish_writing(checkpoints)
        if seen[0] == stop:
            raise SimulatedKill

    return count


def _finish_writing(checkpoints: Any) -> None:
    """Wait for checkpoints that are being written, so that the saved steps do not depend on the machine."""
    if checkpoints is not None:
        for level in checkpoints.levels:
            if level._committing is not None:
                level._committing.result()


SAMPLE = (
    "pipeline",
    "clusters apart, with differences on their way",
    "callbacks that remember",
)
"""The other cases are marked `grid`."""


@pytest.mark.parametrize(
    "name", [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.grid) for each in CASES]
)
def test_resumed_run_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = train(case, None)
    for stop in case.stops:
        train(case, tmp_path, stop)
    assert train(case, tmp_path) == expected
    if case.has_prediction:  # no step is left
        assert train(case, tmp_path)["digests"] == expected["digests"]


def test_more_epochs_continue_like_a_longer_fit(tmp_path: Path) -> None:
    """A callback changes the restored learning rate before the first new step."""
    case = Case(build_plain, epochs=1, callbacks=lambda: [keras.callbacks.LearningRateScheduler(lambda _, lr: lr / 2)])
    first, longer = train(case, tmp_path), replace(case, epochs=2)
    found, expected = train(longer, tmp_path), train(longer, None)
    assert found == expected and found["loss"][:1] == first["loss"]


# ------------------------------------------------------------------ local SGD
def fit_dense(folder: Path, epochs: int, stop: int = -1, every: int = 2, **options: Any) -> Any:
    """Train one model, by local SGD if there are options; returns its run, the model and its
    losses.
    """
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    run = nb.init(seed=SEED, checkpoint={"folder": str(folder), "every": every})
    model = build_local_sgd(**options) if options else build_one_model()
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 6)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")
    kill = keras.callbacks.LambdaCallback(on_train_batch_end=_kill_after(stop))
    try:
        losses = model.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=[kill]).history["loss"]
    except SimulatedKill:
        run.checkpoints.failed, losses = True, []
    return run, model, losses


def build_one_model() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(32, activation="relu")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


@pytest.mark.filterwarnings("ignore:.*nebula_draws.* keep their initial values")
def test_local_sgd_checkpoint_is_restored_as_one_model(tmp_path: Path) -> None:
    _, model, _ = fit_dense(tmp_path, 1, sync_every=4)
    weights = model.get_weights()
    keras.utils.clear_session(free_memory=False)
    found = build_one_model()
    found.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    nb.restore(tmp_path, found)
    assert all(np.array_equal(a, b) for a, b in zip(weights, found.get_weights(), strict=True))
    assert int(found.optimizer.iterations) == 6
    _, _, losses = fit_dense(tmp_path, 2)  # continues as one model, and then with local SGD again
    run, _, apart_losses = fit_dense(tmp_path, 3, sync_every=4)
    assert apart_losses[:2] == losses and run.checkpoints.resumed.step == 12
    [rounds] = run.rounds.list_rounds()
    assert len({each.digest() for each in rounds.values()}) == 1


def train_in_turns(folder: Path, turns: int, **state: Callable[[Any], Any]) -> dict[int, float]:
    """Train by local SGD in a loop, with `nb.state` of parts of the model; returns the losses by number."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    losses, numbers = {}, np.random.default_rng(0).normal(size=(16, BATCH, 7)).astype("float32")
    with nb.init(seed=SEED, checkpoint={"folder": str(folder), "every": 99}):
        model = build_local_sgd(sync_every=3)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
        nb.state(**{name: choose(model) for name, choose in state.items()})
        for number in range(nb.resumed().step if nb.resumed() else 0, turns):
            losses[number] = float(model.train_on_batch(numbers[number, :, :6], numbers[number, :, 6:]))
    return losses


@pytest.mark.parametrize(
    "state",
    [{"slots": lambda model: model.optimizer}, pytest.param({"model": lambda model: model}, marks=pytest.mark.grid)],
)
def test_state_of_a_model_in_local_sgd_leaves_copies_of_clusters(state: Any, tmp_path: Path) -> None:
    expected = train_in_turns(tmp_path / "undisturbed", 8)
    train_in_turns(tmp_path / "run", 4, **state)
    found = train_in_turns(tmp_path / "run", 8, **state)
    assert min(found) == 4 and found.items() <= expected.items()


def test_other_local_sgd_options_start_from_shared_weights(tmp_path: Path) -> None:
    """Fragments in flight are discarded."""
    fit_dense(tmp_path, 2, stop=9, sync_every=4, fragments=2, delay=1)
    first = Folder(str(tmp_path)).scan()[0]
    run, model, _ = fit_dense(tmp_path, 2, stop=1 + first.step, sync_every=3, outer="average")
    [rounds] = run.rounds.list_rounds()
    assert {each.steps for each in rounds.values()} == {1}
    assert int(model.optimizer.iterations) == 1 + first.step


@pytest.mark.grid
def test_async_local_sgd_resumes(tmp_path: Path) -> None:
    """Clusters synchronise before they are saved, because the order of updates at a server depends on chance."""
    fit_dense(tmp_path, 3, stop=9, every=4, sync_every=3, mode="async")
    run, model, losses = fit_dense(tmp_path, 3, every=4, sync_every=3, mode="async")
    assert run.checkpoints.resumed.step == 8 and int(model.optimizer.iterations) == 18
    assert losses[-1] < losses[0]
    [rounds] = run.rounds.list_rounds()
    model.get_weights()
    assert len({each.digest() for each in rounds.values()}) == 1


# ------------------------------------------------------------------ refusals
def test_different_batch_after_resumption_is_refused(tmp_path: Path) -> None:
    case = Case(build_stages)
    train(case, tmp_path, 5)
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED + 1)  # shuffles in another order
    with nb.init(checkpoint=str(tmp_path)):
        model = build_stages()
        model.compile(case.optimizer(), "mse", metrics=["mae"])
        data = tf.data.Dataset.from_tensor_slices((np.ones((ROWS, 6), "float32"), np.ones((ROWS, 1), "float32")))
        with pytest.raises(CheckpointError, match="the batch of step 5 differs from the one that this run had"):
            model.fit(data.batch(BATCH), epochs=2, verbose=0)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    case = Case(build_stages)
    train(case, tmp_path, 5)
    for units in (16, 33):
        nb.shutdown()
        keras.utils.clear_session(free_memory=False)
        with nb.init(checkpoint=str(tmp_path)):
            with nb.cluster(), nb.stage(cluster="gpu"):
                inputs = keras.Input((6,))
                outputs = keras.layers.Dense(1)(keras.layers.Dense(units)(inputs))
            model = keras.Model(inputs, outputs)
            model.compile(case.optimizer(), "mse")
            with pytest.raises(CheckpointError, match="in the checkpoint") as caught:
                model.fit(np.ones((BATCH, 6), "float32"), np.ones((BATCH, 1), "float32"), verbose=0, shuffle=False)
        assert "a different model" in caught.value.why


# ------------------------------------------------------------------ by hand
def build_scaled_optimizer() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02))


@pytest.mark.parametrize(
    "make",
    [pytest.param(build_scaled_optimizer, marks=pytest.mark.grid), lambda: keras.optimizers.Adafactor(0.02)],
    ids=["scaled", "one name"],
)
def test_saved_model_is_restored_without_scopes(make: Callable[[], Any], tmp_path: Path) -> None:
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    x, y = np.ones((BATCH, 6), "float32"), np.ones((BATCH, 1), "float32")
    model = build_stages(pipeline={"micro_batch": 2})
    model.compile(make(), "mse")
    nb.save(tmp_path / "begin", model)
    first = [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
    model.fit(x, y, epochs=2, verbose=0)
    nb.save(tmp_path / "model", model)
    nb.save(tmp_path / "model", model)
    values = [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((6,), name="x")
    hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(32, activation="relu")(inputs))
    hidden = keras.layers.Dense(32)(hidden)
    found = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    found.compile(make(), "mse")
    nb.restore(tmp_path / "model", found)
    restored = [*found.get_weights(), *map(np.asarray, found.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(values, restored, strict=True))
    assert int(found.optimizer.iterations) == 2
    nb.restore(tmp_path / "begin", found)  # slots too, although no step had created them when the model was saved
    again = [*found.get_weights(), *map(np.asarray, found.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    found.compile(make(), "mse")  # an optimizer of another name, and without slots
    with pytest.warns(NebulaWarning, match="is not in the checkpoint, and keeps its value, like .* of its optimizer"):
        nb.restore(tmp_path / "model", found)
    found.fit(x, y, verbose=0)
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="alien")])
    with pytest.raises(CheckpointError, match=r"'\w+/alien/bias' of \w+ is not in the checkpoint"):
        nb.restore(tmp_path / "model", other)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        nb.restore(tmp_path / "nothing", model)
    nb.shutdown()
    with pytest.raises(CheckpointError, match="contains a model that"):
        nb.init(checkpoint=tmp_path / "model")
    nb.shutdown()


def test_renumbered_layers_are_explained(tmp_path: Path) -> None:
    def train() -> None:
        nb.shutdown()
        nb.init(checkpoint=tmp_path)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)], name="numbered")
        model.compile("sgd", "mse")
        model.fit(np.ones((BATCH, 6), "float32"), np.ones((BATCH, 1), "float32"), verbose=0)

    train()
    with pytest.raises(CheckpointError, match="is not in the checkpoint") as caught:
        train()
    assert "Keras numbers unnamed layers" in str(caught.value.why) and "clear_session" in str(caught.value.mend)


def test_completed_run_explains_its_missing_report_and_shows_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        nb.shutdown()
        keras.utils.clear_session()
        with nb.init(checkpoint=tmp_path):
            with nb.cluster(), nb.stage(cluster="gpu"):
                inputs = keras.Input((6,))
                outputs = keras.layers.Dense(1)(inputs)
            model = keras.Model(inputs, outputs, name="over")
            model.compile("sgd", "mse")
            x, y = np.ones((BATCH, 6), "float32"), np.ones((BATCH, 1), "float32")
            model.fit(x, y, verbose=0, shuffle=False)
            if nb.resumed() is None:
                digest = nb.plan(model, x, y).program_digest
                assert nb.last_report().program == "over.train_step"
                continue
            with pytest.raises(StateError, match="no step has run since this start of the run") as caught:
                nb.last_report()
            assert "all its steps of over.train_step had already been completed" in str(caught.value.why)
    assert show_checkpoints(["show", str(tmp_path)]) == 0
    plan = f"plan of over.train_step: gpu on local/0; 1 micro-batch; program {digest[:12]}"
    assert plan in capsys.readouterr().out


def test_full_disk_does_not_end_training(tmp_path: Path) -> None:
    """The file size is limited, with the same errors in TensorFlow and Python as a full disk."""
    nb.shutdown()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    x, y = np.ones((ROWS, 6), "float32"), np.ones((ROWS, 1), "float32")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nb.init(checkpoint={"folder": str(tmp_path), "every": 2}) as run:
        model = build_stages()
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        saved = Folder(str(tmp_path)).scan()[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.fit(x, y, batch_size=BATCH, verbose=0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert any("could not be saved" in str(each.message) and "free space" in str(each.message) for each in caught)
        assert run.checkpoints.position.step == 12
        assert not [path for path in tmp_path.glob("step-*/.*") if path.is_dir()], "parts fill the disk"
        assert Folder(str(tmp_path)).scan()[-1].check() == () and saved.check() == ()
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert Folder(str(tmp_path)).scan()[0].step == 18 and not Folder(str(tmp_path)).scan()[0].check()
