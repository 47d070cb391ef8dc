"""Worker: runs the function named by its first argument with the other arguments, and reports the results. Tests call
the same functions in their own process, for the results of one process.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests import momenta
from tests.parity.codec_step import CODECS, train_with_codec
from tests.parity.split_models import MODELS, Split
from tests.parity.test_sharded_updates import train
from tests.parity.zoo import ZOO
from tests.parity_harness import Cut, data
from tests.processes import batch_normalization
from tests.processes.two_cluster_model import to_hex
from tests.processes.worker_reports import count_sent_bytes, digest_tensors, encode_outcome, report_value
from tests.processes.worker_runs import open_next_run, run_selected
from whale_nebula.capture.splits import is_undrawn
from whale_nebula.errors import NebulaError
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step import measurements
from whale_nebula.schedule.schedules import DEFAULT
from whale_nebula.strategies import OneBitLamb

Rows = tuple[np.ndarray, np.ndarray]


# ---------------------------------------------------------------------- named models
def read_case(text: str) -> tuple[str, Cut]:
    """A model of the zoo and its cut: "gan,2,3" is 2 stages, 3 micro-batches; "gan,2,3,2+1,gpipe" has more options."""
    name, stages, micro_batches, *more = text.split(",")
    replicas = next((tuple(map(int, word.split("+"))) for word in more if word[0].isdigit()), ())
    schedule = next((word for word in more if not word[0].isdigit()), DEFAULT)
    return name, Cut(int(stages), int(micro_batches), schedule, replicas=replicas)


def train_zoo(config: str, *cases: str) -> None:
    """Train models of the zoo."""
    nb.init(config)
    for case in cases:
        name, cut = read_case(case)
        report_value(case, encode_outcome(ZOO[name].run(cut)))
        report_value(f"{case} sent", count_sent_bytes())


def spoil_replica() -> str:
    """The error for replicas that differ, because a weight is written in only one process."""
    inputs = keras.Input((4,))
    with nb.cluster(), nb.replica(2), nb.stage(cluster="c0"):
        outputs = keras.layers.Dense(1)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    x = np.ones((4, 4), "float32")
    model.train_on_batch(x, x[:, :1])
    if nb.here().worker == "c0/1":
        model.trainable_variables[0].assign(np.zeros((4, 1), "float32"))
    try:
        model.train_on_batch(x, x[:, :1])
    except NebulaError as error:
        return str(error)
    return ""


def train_normalized(*cases: str) -> None:
    """Train with synchronized batch normalisation; "trained,2+3" is a case and the replicas of its stages."""
    nb.init()
    for argument in cases:
        name, copies = argument.split(",")
        try:
            scopes = batch_normalization.make_scopes(tuple(map(int, copies.split("+"))))
            report_value(argument, batch_normalization.CASES[name](scopes))
        except nb.errors.BatchCoupledError as error:
            report_value(argument, str(error))


def train_sharded_slots(*cases: str) -> None:
    """Train with sharded optimizers; a case such as "adamw,gradients" is the optimizer and what is sharded."""
    for argument in cases:
        name, shard = argument.split(",")
        found = train(name, 2, shard)
        report_value(argument, {"history": found.history, "weights": [weight.tolist() for weight in found.weights]})
    report_value("slots", list_pieces())


def list_pieces() -> dict[str, list[int]]:
    """The shapes of the pieces of variables that this process holds, by path."""
    kept = current_run().ledger.variables.values()
    return {each.path: each.piece.variable.shape.as_list() for each in kept if each.piece is not None}


def train_split_models(*cases: str) -> None:
    """Train sharded models in one cluster; a case such as "translator,2,1,4" is a model, devices, stages and
    micro-batches, "translator,2,2,4,2+1" also the replicas of each stage.
    """
    warned: list[str] = []
    tf.get_logger().addFilter(lambda record: warned.append(record.getMessage()) or True)
    for argument in cases:
        name, count, rest = argument.split(",", 2)
        try:
            cut = replace(read_case(f"{name},{rest}")[1], clusters=False)
            found = MODELS[name](Split(cut, int(count)))
        except NebulaError as error:
            report_value(argument, str(error))
            continue
        weights = [weight.tolist() for weight in found.weights]
        report_value(argument, {"losses": found.losses, "history": found.history, "weights": weights})
    report_value("pieces", list_pieces())
    report_value("retracing", [each for each in warned if "retracing" in each])
    kept = current_run().ledger.variables.values()
    try:
        next(each.variable for each in kept if each.piece is not None).numpy()
    except nb.errors.CollectiveReadError as error:
        report_value("read", str(error))


def train_mesh(folder: str, *cases: str) -> None:
    """Save and use a sharded model in replicas, verify it if there are cases, and train these."""
    nb.init()
    scopes = (nb.cluster(["c0"]), nb.replica(2), nb.stage(), nb.split())
    report_value("stored", save_and_use(Path(folder), *scopes, verify=len(cases) > 1))
    train_split_models(*cases)


def train_with_own_weights(folder: str, *cases: str) -> None:
    """Train sharded models whose cluster keeps its weights, models with large variables, and these cases."""
    open_next_run(Path(folder), config={"weights": "own"})
    report_value("kept", save_own_weights(Path(folder), nb.cluster(["c0"]), nb.stage(), nb.split(2)))
    before = list_pieces()
    scopes = nb.cluster(["c0"]), nb.replica(2, shard="optimizer"), nb.stage()
    report_value("slots kept", save_own_weights(Path(folder), *scopes))
    report_value("slots", {path: shape for path, shape in list_pieces().items() if path not in before})
    open_next_run(Path(folder))
    for how in EARLY_USES if cases[1:] else ["planned"]:
        report_value(f"large {how}", train_large_variables(how, nb.cluster(["c0"]), nb.stage(), nb.split()))
    train_split_models(*cases)


SMALL_FIT_OPTIONS: dict[str, Any] = {"batch_size": 6, "shuffle": False, "verbose": 0}


def train_small_model(*scopes: contextlib.AbstractContextManager[Any]) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Two dense layers in these scopes after a few steps, and their training data."""
    keras.utils.set_random_seed(6)
    inputs = keras.Input((6,))
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        hidden = keras.layers.Dense(10, activation="relu")(inputs)
        outputs = keras.layers.Dense(7)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    x, y = data(12, 6), data(12, 7, seed=1)
    model.fit(x, y, **SMALL_FIT_OPTIONS)
    return model, x, y


def save_and_use(folder: Path, *scopes: contextlib.AbstractContextManager[Any], verify: bool = False) -> dict[str, Any]:
    """Save a model, overwrite its weights, load it, use it, and train it further; returns the results."""
    model, x, y = train_small_model(*scopes)
    before = model.get_weights()
    model.save_weights(folder / "mesh.weights.h5")
    model.save(folder / "mesh.keras")
    model.set_weights([0 * weight for weight in before])
    model.load_weights(folder / "mesh.weights.h5")
    found = {"weights": [weight.tolist() for weight in before]}
    found["loaded"] = [bool(np.array_equal(*each)) for each in zip(before, model.get_weights(), strict=True)]
    found["evaluated"] = model.evaluate(x, y, batch_size=6, verbose=0)
    found["predicted"] = model.predict(x, batch_size=6, verbose=0).tolist()
    if verify:
        report_value("verified", str(nb.verify(model, x[:6], y[:6])))
    return {**found, "further": model.fit(x, y, **SMALL_FIT_OPTIONS).history}


def use_early(model: keras.Model, x: np.ndarray) -> None:
    """Assign one large variable, and read the other by a call."""
    model.get_layer("large").kernel.assign(tf.fill([512, 600], 0.01))
    tf.function(model)(x)


EARLY_USES: Mapping[str, Any] = {"planned": lambda model, x: None, "used": use_early}
"""How a model is used before its first step is planned."""


def train_large_variables(
    how: str, *scopes: contextlib.AbstractContextManager[Any]
) -> tuple[list[bool], dict[str, Any]]:
    """Whether large variables are undrawn after their creation and before training; and the results of training."""
    keras.utils.set_random_seed(6)
    inputs, x = keras.Input((6,)), data(12, 6)
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        hidden = keras.layers.Dense(512, activation="relu")(inputs)
        outputs = keras.layers.Dense(600, name="other")(keras.layers.Dense(600, name="large")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    kernels = [model.get_layer(name).kernel.value for name in ("large", "other")]
    undrawn = [*map(is_undrawn, kernels)]
    EARLY_USES[how](model, x)
    undrawn += map(is_undrawn, kernels)
    history = model.fit(x, data(12, 600, seed=1), **SMALL_FIT_OPTIONS).history
    return undrawn, {"history": history, "weights": [weight[..., ::97].tolist() for weight in model.get_weights()]}


def save_own_weights(folder: Path, *scopes: contextlib.AbstractContextManager[Any]) -> dict[str, Any]:
    """Like `save_and_use` with `weights: own`, when no process may hold the whole model."""
    model, x, y = train_small_model(*scopes)
    model.save_weights(folder / "kept.weights.h5")
    model.set_weights([np.zeros(weight.shape) for weight in model.weights])
    model.load_weights(folder / "kept.weights.h5")
    found = {"predicted": model.predict(x, batch_size=6, verbose=0).tolist()}
    return {**found, "further": model.fit(x, y, **SMALL_FIT_OPTIONS).history}


def train_compressed(*cases: str) -> None:
    """Train a small step with each codec: "int8" or "int8,2,gpipe"."""
    for case in cases:
        name, *how = case.split(",")
        options: dict[str, Any] = {"micro_batches": int(how[0]), "schedule": how[1]} if how else {}
        found = train_with_codec(CODECS[name], steps={"ramp": 12}.get(name, 3), **options)
        report_value(case, {"losses": [loss.hex() for loss in found.losses], "weights": digest_tensors(found.weights)})
        report_value(f"{case} sent", count_sent_bytes())


# ---------------------------------------------------------------------- trainings that are ended from outside
class StepReporter(keras.callbacks.Callback):
    """Reports the number of steps, and may pause after each, so that a short training lasts as long as needed."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.steps, self.pause = 0, pause

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        report_value("steps", self.steps)
        time.sleep(self.pause)


def train_endlessly() -> None:
    """Train a stage in each cluster until a process is killed or asked to stop."""
    nb.init()
    hidden = inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(2):
        for name in nb.here().clusters:
            with nb.stage(cluster=name):
                hidden = keras.layers.Dense(6)(hidden)
    model = keras.Model(inputs, hidden)
    model.compile("sgd", "mse")
    try:
        model.fit(data(64, 6), data(64, 6), batch_size=2, epochs=10**6, verbose=0, callbacks=[StepReporter()])
    except NebulaError as failure:
        report_value("error", str(failure))
        raise
    sys.exit("the training ended by itself")


def train_steps(steps: int, pause: float = 0.0) -> None:
    """Train this number of steps, with a pause of `pause` seconds after each, and report the results."""
    steps = int(steps)
    inputs = keras.Input((64,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(64, activation="relu")(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(16)(keras.layers.Dropout(0.1)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x, y = data(8 * steps, 64), data(8 * steps, 16, seed=1)
    try:
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[StepReporter(float(pause))])
    except NebulaError as failure:
        report_value("error", str(failure))
        raise
    report_value("loss", to_hex(history.history)["loss"])
    report_value("weights", digest_tensors(model.get_weights()))
    links = {} if current_run().ledger is None else current_run().ledger.session.links
    report_value("connections", {peer: link.state().connections for peer, link in links.items()})


# ---------------------------------------------------------------------- local SGD
LOCAL_SGD_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"sync_every": 4, "fragments": 2, "delay": 1},
    "each": {"sync_every": 1, "outer": "average"},
    "async": {"sync_every": 3, "mode": "async"},
    "endless": {"sync_every": 10},
    "auto": {"sync_every": "auto"},
    "1bit": {"exchange": "1bit"},
}
DRAWN = np.random.default_rng(0)
LOCAL_SGD_X = DRAWN.random((48, 8)).astype("float32")
LOCAL_SGD_Y = np.tanh(LOCAL_SGD_X @ DRAWN.random((8, 2)).astype("float32"))
FIT_OPTIONS: Mapping[str, Any] = {"batch_size": 12, "shuffle": False, "verbose": 0}


def train_model_by_local_sgd(way: str, seed: int = 1, **options: Any) -> keras.Model:
    """Train a model by local SGD in this way, by default two epochs with validation; report losses and weights."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(1200, activation="tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dropout(0.2)(hidden)))
    plain, one_bit = keras.optimizers.SGD(0.002, momentum=0.9), OneBitLamb(0.01, freeze_step=3)
    model.compile(one_bit if way == "1bit" else plain, "mse")
    fit_options = {**FIT_OPTIONS, "epochs": 2, "validation_data": (LOCAL_SGD_X, LOCAL_SGD_Y), **options}
    compress = contextlib.nullcontext() if way == "1bit" else nb.compress(int4=True)
    with nb.cluster(), compress, nb.replica(**LOCAL_SGD_OPTIONS[way]):
        logs = model.fit(LOCAL_SGD_X, LOCAL_SGD_Y, **fit_options).history
        meetings = nb.last_report(f"{model.name}.train_step").meetings
    report_value(f"{way} meetings", None if meetings is None else [list(meetings.others), meetings.steps])
    report_value(f"{way} chosen", "" if meetings is None else meetings.chosen)
    report_value(f"{way} losses", logs["loss"])
    report_value(f"{way} validation", [*logs["val_loss"], model.evaluate(LOCAL_SGD_X[:5], LOCAL_SGD_Y[:5], verbose=0)])
    report_value(f"{way} weights", digest_tensors(model.get_weights()))
    return model


def train_local_sgd(folder: str, *ways: str) -> None:
    """Train by local SGD in each of these ways. The processes begin with different weights."""
    nb.init()
    if ways == ("endless",):
        train_model_by_local_sgd("endless", epochs=10**6, validation_data=None, callbacks=[StepReporter()])
        sys.exit("the training ended by itself")
    first = nb.here().worker == "c0/0"
    for way in ways:
        model = train_model_by_local_sgd(way, 1 if first else 2)
        path, file = f"{folder}/{way}", f"{folder}/{way}.weights.h5"
        model.save_weights(file)
        nb.save(path, model)
        with nb.gathered():
            saved = digest_tensors(model.get_weights())
        loads = {"loaded": partial(model.load_weights, file), "restored": partial(nb.restore, path, model)}
        for name, load in loads.items():
            model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
            load()
            report_value(f"{way} {name}", digest_tensors(model.get_weights()) == saved)
    weight = tf.Variable([0.0 if first else 5.0])

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.replica(sync_every=2, outer="average", delay=0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x - weight) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    for _ in range(4):
        step(tf.ones((6, 1)))
    with nb.gathered():
        report_value("loop", float(weight.numpy()[0]).hex())
    report_value("lead", nb.here().lead)


def train_momentum_exchange(steps: str, *kinds: str) -> None:
    """Train copies in the workers of one cluster, which exchange momenta; then a layer with moving averages."""
    nb.init()
    with nb.cluster(), nb.replica(5, exchange="1bit"):
        model = momenta.build_model(*kinds[:1])
    try:
        model.train_on_batch(*momenta.read_rows(0))
    except nb.errors.OptionError as error:
        report_value("refused", str(error))
    for kind in kinds:
        servers = HAS_SERVERS[kind]
        with nb.cluster(), nb.replica(exchange="1bit"):
            model = momenta.build_model(kind, servers=servers)
        found, sent_bytes = [], []
        for step in range(int(steps)):
            model.train_on_batch(*momenta.read_rows(step))
            found.append([each.tolist() for each in model.get_weights()])
            sent_bytes.append(nb.last_report().meetings.sent_bytes)
        report_value(f"{kind} weights", found)
        report_value(f"{kind} crossed", [sent_bytes[0], *np.diff(sent_bytes).tolist()])
    report_value("plan", str(nb.plan(model, *momenta.read_rows(0))))
    with nb.cluster(), nb.replica(exchange="1bit"):
        normalised = keras.Sequential([keras.Input((momenta.WIDTH,)), keras.layers.BatchNormalization(name="norm")])
    normalised.compile(OneBitLamb(0.1, freeze_step=3), "mse")
    x, _ = momenta.read_rows(0)
    normalised.train_on_batch(x, x)
    report_value("mean", normalised.get_layer("norm").moving_mean.numpy().tolist())


HAS_SERVERS = {"lamb": False, "adam": True}
"""Whether each worker is the server of a part, by optimizer."""


# ---------------------------------------------------------------------- boundaries that change
def build_two_stages(
    clusters: Sequence[str], width: int, optimizer: str = "sgd", ids: bool = False, **options: Any
) -> keras.Model:
    """A dense layer in each cluster, and these options of `nb.compress` for the boundary between them."""
    keras.utils.set_random_seed(1)
    activation = None if options.get("basis") == "svd" else "tanh"  # a kernel's singular vectors are of its product
    inputs = {"x": keras.Input((5,), name="x"), "ids": keras.Input((), dtype="int64", name="ids")}
    with nb.cluster(), nb.pipeline(2), nb.compress(**options):
        with nb.stage(cluster=clusters[0]):
            hidden = keras.layers.Dense(width, activation=activation, name="first")(inputs["x"])
        with nb.stage(cluster=clusters[1]):
            outputs = keras.layers.Dense(2, name="second")(hidden)
    model = keras.Model(inputs if ids else inputs["x"], outputs, name="boundary")
    model.compile(optimizer, "mse")
    return model


def draw_rows(count: int) -> Rows:
    drawn = np.random.default_rng(0)
    return drawn.standard_normal((count, 5)).astype("float32"), drawn.standard_normal((count, 2)).astype("float32")


def train_auto_codec(*clusters: str) -> None:
    """Train with a codec chosen by the line, which is slow and then free; and skip steps with a NaN."""
    logging.basicConfig(level=logging.INFO)
    x, y = draw_rows(8)
    bad = x.copy()
    bad[-1, 0] = np.nan

    def trained(model: keras.Model, batches: Sequence[Any], rate: float | None = None) -> dict[str, Any]:
        """The results on which both sides agree: losses, notes of each step without those of the chooser, and weights.

        Every line has this rate, and stages compute for a millisecond in each step, so that choices are predictable.
        """
        measurements.LineRates._find_rate = lambda self, name: rate  # type: ignore[method-assign]
        measurements.find_slowest_seconds = lambda medians, count: 1e-3 if medians else None  # type: ignore[assignment]
        losses, notes = [], []
        for batch in batches:
            losses.append(float(model.train_on_batch(batch, y)).hex())
            notes.append([note for note in nb.last_report().notes if ": auto " not in note])
        return {"losses": losses, "notes": notes, "weights": digest_tensors(model.get_weights())}

    model = build_two_stages(clusters, 32, codec="auto")
    report_value("auto", trained(model, [x] * 4, 1e4))
    report_value("free again", trained(model, [x] * 7))  # rates are measured in steps one, three and eleven
    model = build_two_stages(clusters, 32, rank=4, int8=True, nonfinite="skip")
    report_value("left out", trained(model, [x, bad, x, x]))


def train_delta_codec(*clusters: str) -> None:
    """Train with a delta codec by sample ids: three epochs, each in a different order."""
    model = build_two_stages(clusters, 96, ids=True, int4=True, delta="x/ids")
    x, y = draw_rows(10)
    orders, losses, sent_bytes = np.random.default_rng(1), [], []
    for batch in [rows for _ in range(3) for rows in np.split(orders.permutation(10), [4, 8])]:
        losses.append(float(model.train_on_batch({"x": x[batch], "ids": batch}, y[batch])).hex())
        sent_bytes.append(count_sent_bytes())
    report_value("losses", losses)
    report_value("sent", sent_bytes)
    session = getattr(current_run().ledger, "session", None)
    report_value("begun", None if session is None else [tuple(step) for step in session.expected._steps.values()])
    report_value("outputs", digest_tensors([model.predict({"x": x, "ids": np.arange(10)}, batch_size=10, verbose=0)]))
    report_value("weights", digest_tensors(model.get_weights()))
    states = (state.cache for _, state in sorted(current_run().channels.items()) if state.cache is not None)
    report_value("held", [digest_tensors(held.as_arrays().values()) for held in states])


def train_projection(basis: str, *clusters: str) -> None:
    """Train with a boundary that is projected on a basis in the model: three steps with Adam, and a prediction."""
    model = build_two_stages(clusters, 8, "adam", rank=3, basis=basis, backward=None)
    x, y = draw_rows(6)
    losses = model.fit(x, y, batch_size=2, shuffle=False, verbose=0).history["loss"]
    report_value("sent", count_sent_bytes())
    report_value("losses", [float(loss).hex() for loss in losses])
    report_value("outputs", digest_tensors([model.predict(x, batch_size=6, verbose=0)]))
    report_value("names", [variable.path for variable in model.trainable_variables])
    report_value("weights", digest_tensors(model.get_weights()))


# ---------------------------------------------------------------------- replicas that are not equally fast
SPEEDS: dict[str, Any] = {
    "clusters": {
        "c0": {"workers": ["127.0.0.1:7000", "127.0.0.1:7001"]},
        "c1": {"workers": [{"address": "127.0.0.1:7002"}, {"address": "127.0.0.1:7003", "speed": 2}]},
    }
}
"""Two clusters of two workers each; in the second, one is configured to be twice as fast."""


def train_slowed_replicas(seconds: Mapping[str, float]) -> list[float]:
    """Train two stages of two replicas each, where workers sleep for each micro-batch of c0; returns the losses."""
    keras.utils.set_random_seed(8)
    weight, wide = tf.Variable(0.3 * data(6, 3, seed=2)), tf.constant(data(3, 12, seed=3))

    def sleep_and_return(rows: np.ndarray) -> np.ndarray:
        time.sleep(seconds.get(nb.here().worker, 0.0))
        return rows

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.replica(2), nb.pipeline(6, coupled="allow"):
            with nb.stage(cluster="c0"), nb.compress(fp16=True, backward=None):
                slept = tf.numpy_function(sleep_and_return, [x], tf.float32)
                slept.set_shape(x.shape)
                hidden = slept @ weight @ wide
            with nb.stage(cluster="c1"):
                loss = tf.reduce_mean((hidden[:, :3] - y) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return [float(step(data(18, 6), data(18, 3, seed=1))) for _ in range(7)]


def train_uneven_replicas(case: str) -> None:
    """Train with configured speeds, then with measured ones; at the end, one replica is changed."""
    nb.init(SPEEDS)
    name, cut = read_case(case)
    report_value("model", encode_outcome(ZOO[name].run(cut)))
    report_value("many", nb.last_report().micro_batches)
    report_value("slowed", train_slowed_replicas({"c0/0": 0.04, "c0/1": 0.01}))
    report = nb.last_report()
    report_value("notes", [note for note in report.notes if note.startswith("plan version")])
    stage = {**report.elsewhere.stages, **report.stages}["c0"]
    report_value("computed", [each.compute_seconds for each in stage.replicas])
    report_value("spoiled", spoil_replica())


# ---------------------------------------------------------------------- reports and verification
def write_reports(path: str) -> None:
    """Train a few steps that write reports to one file of metrics."""
    nb.init(links="1mbit,0ms", metrics=path)
    kernels = [tf.Variable(tf.ones([8, 8]) / 8) for _ in range(2)]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="c0"):
                hidden = tf.tanh(x @ kernels[0])
            with nb.stage(cluster="c1"), nb.compress(int8=True):
                loss = tf.reduce_mean(tf.square(hidden @ kernels[1]))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(0.1 * gradient)
        return {"loss": loss}

    for _ in range(4):
        step(tf.ones([4, 8]))
    report = nb.last_report()
    report_value("worker", report.worker)
    report_value("stages", list(report.stages))
    report_value("text", str(report))
    nb.shutdown()


@tf.custom_gradient
def scale_gradient_by_rows(x: Any) -> Any:
    """Tanh with a gradient that depends on the number of rows, so that micro-batches change it."""
    return tf.tanh(x), lambda upstream: upstream * tf.cast(tf.shape(x)[0], x.dtype)


def build_verified_model(activation: Any = "relu", micro_batch: int = 3) -> keras.Model:
    """Two stages, a weight of both clusters, dropout of one, and slots."""
    inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(micro_batch=micro_batch):
        with nb.stage(cluster="c0"):
            hidden = keras.layers.Dense(8, activation, name="first")(inputs)
        with nb.stage(cluster="c1"):
            outputs = keras.layers.Dense(2, name="second")(hidden)
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.5, name="momentum")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def verify_model() -> None:
    """Train, verify and train further; and verify a model whose gradient depends on the number of rows."""
    batches = [(data(12, 6, seed=seed), data(12, 2, seed=9 + seed)) for seed in range(3)]
    model = build_verified_model()
    model.fit(*batches[0], batch_size=12, epochs=2, verbose=0)
    before = model.get_weights()
    found = nb.verify(model, *batches[1])
    report_value("text", str(found))
    report_value("ok", found.ok)
    report_value("names", [row.name for row in found.rows])
    report_value("as before", all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)))
    try:
        report_value("first is empty", len(model.get_layer("first").kernel.numpy()) == 0)
    except nb.errors.CollectiveReadError:
        report_value("first is empty", True)
    report_value("loss", model.fit(*batches[2], batch_size=12, verbose=0).history["loss"][0])
    report_value("wrong", nb.verify(build_verified_model(scale_gradient_by_rows, 2), *batches[1]).ok)


if __name__ == "__main__":
    run_selected(
        (
            train_zoo, train_normalized, train_mesh, train_with_own_weights, train_sharded_slots, train_compressed,
            train_endlessly, train_steps, train_local_sgd, train_auto_codec, train_delta_codec, train_projection,
            train_uneven_replicas, write_reports, verify_model, train_momentum_exchange,
        )
    )  # fmt: skip
