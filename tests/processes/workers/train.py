"""Worker: trains the lesson of its first argument, and reports the results. The other arguments are the lesson's.

Tests call the same lessons in their own process, for the results of one process.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests import momenta
from tests.parity.crossing import CODECS, crossed
from tests.parity.splits import MODELS, Split
from tests.parity.test_shared_slots import train
from tests.parity.zoo import ZOO
from tests.processes import synchronized
from tests.processes.lesson import hexed
from tests.processes.running import act, reopen
from tests.processes.telling import bits, left, sent, tell
from tests.same import Cut, data
from whale_nebula.capture.splits import is_undrawn
from whale_nebula.errors import NebulaError
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step import measurements
from whale_nebula.schedule.schedules import DEFAULT
from whale_nebula.strategies import OneBitLamb

Rows = tuple[np.ndarray, np.ndarray]


# ---------------------------------------------------------------------- named models
def read_case(text: str) -> tuple[str, Cut]:
    """A model of the zoo and its cut: "gan,2,3" is two stages, three micro-batches; "gan,2,4,2+1" has replicas, too,
    and "gan,2,3,gpipe" a schedule.
    """
    name, stages, micro_batches, *more = text.split(",")
    replicas = next((tuple(map(int, word.split("+"))) for word in more if word[0].isdigit()), ())
    schedule = next((word for word in more if not word[0].isdigit()), DEFAULT)
    return name, Cut(int(stages), int(micro_batches), schedule, replicas=replicas)


def zoo(*asked: str) -> None:
    """Models of the zoo."""
    nb.init()
    for case in asked:
        name, cut = read_case(case)
        tell(case, left(ZOO[name].run(cut)))
        tell(f"{case} sent", sent())


def spoil() -> str:
    """What is said of replicas of which one is spoiled: a weight is written in one process alone."""
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


def normalised(*asked: str) -> None:
    """Synchronized batch normalisation, as "trained,2+3" says."""
    nb.init()
    for argument in asked:
        name, copies = argument.split(",")
        try:
            tell(argument, synchronized.CASES[name](synchronized.within(tuple(map(int, copies.split("+"))))))
        except nb.errors.BatchCoupledError as error:
            tell(argument, str(error))


def sharing(*asked: str) -> None:
    """Optimizers whose slots are in parts, each as "adamw,gradients" says: its name, and what is in parts."""
    for argument in asked:
        name, shard = argument.split(",")
        found = train(name, 2, shard)
        tell(argument, {"history": found.history, "weights": [weight.tolist() for weight in found.weights]})
    tell("slots", pieces())


def pieces() -> dict[str, list[int]]:
    """The sizes of what this process holds a piece of, by its path."""
    kept = current_run().ledger.kept.values()
    return {each.path: each.piece.variable.shape.as_list() for each in kept if each.piece is not None}


def divided(*asked: str) -> None:
    """Models in pieces in one cluster, each as "translator,2,1,4" says: devices, stages, micro-batches; with
    replicas of each stage "translator,2,2,4,2+1".
    """
    warned: list[str] = []
    tf.get_logger().addFilter(lambda record: warned.append(record.getMessage()) or True)
    for argument in asked:
        name, count, rest = argument.split(",", 2)
        try:
            cut = replace(read_case(f"{name},{rest}")[1], clusters=False)
            found = MODELS[name](Split(cut, int(count)))
        except NebulaError as error:
            tell(argument, str(error))
            continue
        weights = [weight.tolist() for weight in found.weights]
        tell(argument, {"losses": found.losses, "history": found.history, "weights": weights})
    tell("pieces", pieces())
    tell("retracing", [each for each in warned if "retracing" in each])
    kept = current_run().ledger.kept.values()
    try:
        next(each.variable for each in kept if each.piece is not None).numpy()
    except nb.errors.CollectiveReadError as error:
        tell("read", str(error))


def meshed(folder: str, *asked: str) -> None:
    """A model in pieces in replicas that is stored, and verified where there are others, as for `divided`."""
    nb.init()
    scopes = (nb.cluster(["c0"]), nb.replica(2), nb.stage(), nb.split())
    tell("stored", stored(Path(folder), *scopes, verify=len(asked) > 1))
    divided(*asked)


def at_home(folder: str, *asked: str) -> None:
    """A model in pieces whose cluster keeps its weights; and others, as for `divided`."""
    reopen(Path(folder), config={"weights": "own"})
    tell("kept", kept(Path(folder), nb.cluster(["c0"]), nb.stage(), nb.split(2)))
    before = pieces()
    tell("slots kept", kept(Path(folder), nb.cluster(["c0"]), nb.replica(2, shard="optimizer"), nb.stage()))
    tell("slots", {path: shape for path, shape in pieces().items() if path not in before})
    reopen(Path(folder))
    for how in BEFORE:
        tell(f"large {how}", large(how, nb.cluster(["c0"]), nb.stage(), nb.split()))
    divided(*asked)


ROWS_IN_ORDER: dict[str, Any] = {"batch_size": 6, "shuffle": False, "verbose": 0}


def small(*scopes: contextlib.AbstractContextManager[Any]) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Two dense layers in these scopes, trained a little; and what they are trained on."""
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
    model.fit(x, y, **ROWS_IN_ORDER)
    return model, x, y


def stored(folder: Path, *scopes: contextlib.AbstractContextManager[Any], verify: bool = False) -> dict[str, Any]:
    """What a model comes to that is saved, spoiled, loaded, used and trained on."""
    model, x, y = small(*scopes)
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
        tell("verified", str(nb.verify(model, x[:6], y[:6])))
    return {**found, "further": model.fit(x, y, **ROWS_IN_ORDER).history}


def use_early(model: keras.Model, x: np.ndarray) -> None:
    """Assign one large variable, and read the other by a call."""
    model.get_layer("large").kernel.assign(tf.fill([512, 600], 0.01))
    tf.function(model)(x)


BEFORE: Mapping[str, Any] = {"planned": lambda model, x: None, "used": use_early}
"""What happens to a model before its first step is planned."""


def large(how: str, *scopes: contextlib.AbstractContextManager[Any]) -> tuple[list[bool], dict[str, Any]]:
    """Whether large variables have no value yet when they are made, and before training; and what that leaves."""
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
    BEFORE[how](model, x)
    undrawn += map(is_undrawn, kernels)
    history = model.fit(x, data(12, 600, seed=1), **ROWS_IN_ORDER).history
    return undrawn, {"history": history, "weights": [weight[..., ::97].tolist() for weight in model.get_weights()]}


def kept(folder: Path, *scopes: contextlib.AbstractContextManager[Any]) -> dict[str, Any]:
    """The same where no process may hold the whole model."""
    model, x, y = small(*scopes)
    model.save_weights(folder / "kept.weights.h5")
    model.set_weights([np.zeros(weight.shape) for weight in model.weights])
    model.load_weights(folder / "kept.weights.h5")
    found = {"predicted": model.predict(x, batch_size=6, verbose=0).tolist()}
    return {**found, "further": model.fit(x, y, **ROWS_IN_ORDER).history}


def compressed(*asked: str) -> None:
    """A small step once for each codec that is named, "int8" or "int8,2,gpipe"."""
    for case in asked:
        name, *how = case.split(",")
        options: dict[str, Any] = {"micro_batches": int(how[0]), "schedule": how[1]} if how else {}
        found = crossed(CODECS[name], steps={"ramp": 12}.get(name, 3), **options)
        tell(case, {"losses": [loss.hex() for loss in found.losses], "weights": bits(found.weights)})
        tell(f"{case} sent", sent())


# ---------------------------------------------------------------------- trainings that somebody ends
class Told(keras.callbacks.Callback):
    """Tells how many steps there were, and may rest after each: so a run of few steps lasts as long as a test needs."""

    def __init__(self, rest: float = 0.0) -> None:
        super().__init__()
        self.steps, self.rest = 0, rest

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        tell("steps", self.steps)
        time.sleep(self.rest)


def endless() -> None:
    """A stage in each cluster, until one is killed or asked to end."""
    nb.init()
    hidden = inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(2):
        for name in nb.here().clusters:
            with nb.stage(cluster=name):
                hidden = keras.layers.Dense(6)(hidden)
    model = keras.Model(inputs, hidden)
    model.compile("sgd", "mse")
    try:
        model.fit(data(64, 6), data(64, 6), batch_size=2, epochs=10**6, verbose=0, callbacks=[Told()])
    except NebulaError as failure:
        tell("error", str(failure))
        raise
    sys.exit("nobody left")


def course(steps: int, rest: float = 0.0) -> None:
    """So many steps, and what they come to."""
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
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Told(float(rest))])
    except NebulaError as failure:
        tell("error", str(failure))
        raise
    tell("loss", hexed(history.history)["loss"])
    tell("weights", bits(model.get_weights()))
    links = {} if current_run().ledger is None else current_run().ledger.session.links
    tell("connections", {peer: link.state().connections for peer, link in links.items()})


# ---------------------------------------------------------------------- clusters apart
APART: Mapping[str, Mapping[str, Any]] = {
    "sync": {"sync_every": 4, "fragments": 2, "delay": 1},
    "each": {"sync_every": 1, "outer": "average"},
    "async": {"sync_every": 3, "mode": "async"},
    "endless": {"sync_every": 10},
    "auto": {"sync_every": "auto"},
    "1bit": {"exchange": "1bit"},
}
DRAWN = np.random.default_rng(0)
APART_X = DRAWN.random((48, 8)).astype("float32")
APART_Y = np.tanh(APART_X @ DRAWN.random((8, 2)).astype("float32"))
IN_ORDER: Mapping[str, Any] = {"batch_size": 12, "shuffle": False, "verbose": 0}


def trained_apart(way: str, seed: int = 1, **options: Any) -> keras.Model:
    """Two epochs with validation, and the same in all clusters then."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(1200, activation="tanh")(inputs)
    made = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dropout(0.2)(hidden)))
    plain, one_bit = keras.optimizers.SGD(0.002, momentum=0.9), OneBitLamb(0.01, freeze_step=3)
    made.compile(one_bit if way == "1bit" else plain, "mse")
    given = {**IN_ORDER, "epochs": 2, "validation_data": (APART_X, APART_Y), **options}
    with nb.cluster(), contextlib.nullcontext() if way == "1bit" else nb.compress(int4=True), nb.replica(**APART[way]):
        history = made.fit(APART_X, APART_Y, **given).history
        meetings = nb.last_report(f"{made.name}.train_step").meetings
    tell(f"{way} meetings", None if meetings is None else [list(meetings.others), meetings.steps])
    tell(f"{way} chosen", "" if meetings is None else meetings.chosen)
    tell(f"{way} losses", history["loss"])
    tell(f"{way} validation", history["val_loss"])
    tell(f"{way} weights", bits(made.get_weights()))
    return made


def apart(folder: str, *ways: str) -> None:
    """Train a model apart from the other clusters, in each of these ways. The processes begin with unlike weights."""
    nb.init()
    if ways == ("endless",):
        trained_apart("endless", epochs=10**6, validation_data=None, callbacks=[Told()])
        sys.exit("nobody left")
    first = nb.here().worker == "c0/0"
    for way in ways:
        made = trained_apart(way, 1 if first else 2)
        path = Path(folder) / f"{way}.weights.h5"
        made.save_weights(path)
        with nb.gathered():
            saved = bits(made.get_weights())
        made.set_weights([np.zeros_like(weight) for weight in made.get_weights()])
        made.load_weights(path)
        tell(f"{way} loaded", bits(made.get_weights()) == saved)
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
        tell("loop", float(weight.numpy()[0]).hex())


def members(steps: str, *kinds: str) -> None:
    """Train copies in the workers of one cluster, which exchange momenta; with averages of a layer at the end."""
    nb.init()
    with nb.cluster(), nb.replica(5, exchange="1bit"):
        model = momenta.build_model(*kinds[:1])
    try:
        model.train_on_batch(*momenta.rows_of(0))
    except nb.errors.OptionError as error:
        tell("refused", str(error))
    for kind in kinds:
        servers = MEMBERS[kind]
        with nb.cluster(), nb.replica(exchange="1bit"):
            model = momenta.build_model(kind, servers=servers)
        found, crossed = [], []
        for step in range(int(steps)):
            model.train_on_batch(*momenta.rows_of(step))
            found.append([each.tolist() for each in model.get_weights()])
            crossed.append(nb.last_report().meetings.sent_bytes)
        tell(f"{kind} weights", found)
        tell(f"{kind} crossed", [crossed[0], *np.diff(crossed).tolist()])
    tell("plan", str(nb.plan(model, *momenta.rows_of(0))))
    with nb.cluster(), nb.replica(exchange="1bit"):
        normalised = keras.Sequential([keras.Input((momenta.WIDTH,)), keras.layers.BatchNormalization(name="norm")])
    normalised.compile(OneBitLamb(0.1, freeze_step=3), "mse")
    x, _ = momenta.rows_of(0)
    normalised.train_on_batch(x, x)
    tell("mean", normalised.get_layer("norm").moving_mean.numpy().tolist())


MEMBERS = {"lamb": False, "adam": True}
"""Optimizers, and whether workers are servers of a part each."""


# ---------------------------------------------------------------------- boundaries that change
def two_stages(
    clusters: Sequence[str], width: int, optimizer: str = "sgd", ids: bool = False, **options: Any
) -> keras.Model:
    """A dense layer in each cluster, and what `nb.compress` is told of the boundary between them."""
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


def drawn_rows(count: int) -> Rows:
    drawn = np.random.default_rng(0)
    return drawn.standard_normal((count, 5)).astype("float32"), drawn.standard_normal((count, 2)).astype("float32")


def choosing(*clusters: str) -> None:
    """Leave the codec to the line, which is slow and then free again; and steps with a NaN out."""
    logging.basicConfig(level=logging.INFO)
    x, y = drawn_rows(8)
    bad = x.copy()
    bad[-1, 0] = np.nan

    def trained(model: keras.Model, batches: Sequence[Any], rate: float | None = None) -> dict[str, Any]:
        """What both sides must say alike: the notes of each step but for the reasons of who chose, and what is left.

        Every line has this rate, and stages compute a millisecond a step: what a test can foresee.
        """
        measurements.LineRates._find_rate = lambda self, name: rate  # type: ignore[method-assign]
        measurements.find_slowest_seconds = lambda medians, count: 1e-3 if medians else None  # type: ignore[assignment]
        losses, notes = [], []
        for batch in batches:
            losses.append(float(model.train_on_batch(batch, y)).hex())
            notes.append([note for note in nb.last_report().notes if ": auto " not in note])
        return {"losses": losses, "notes": notes, "weights": bits(model.get_weights())}

    model = two_stages(clusters, 32, codec="auto")
    tell("auto", trained(model, [x] * 4, 1e4))
    tell("free again", trained(model, [x] * 7))  # it looks in the first, the third and the eleventh step
    tell("left out", trained(two_stages(clusters, 32, rank=4, int8=True, nonfinite="skip"), [x, bad, x, x]))


def differences(*clusters: str) -> None:
    """Differences of samples, by their ids: three epochs, in another order each."""
    model = two_stages(clusters, 96, ids=True, int4=True, delta="x/ids")
    x, y = drawn_rows(10)
    orders, losses, crossed = np.random.default_rng(1), [], []
    for _ in range(3):
        order = orders.permutation(10)
        for batch in (order[:4], order[4:8], order[8:]):
            losses.append(float(model.train_on_batch({"x": x[batch], "ids": batch}, y[batch])).hex())
            crossed.append(sent())
    tell("losses", losses)
    tell("sent", crossed)
    tell("outputs", bits([model.predict({"x": x, "ids": np.arange(10)}, batch_size=10, verbose=0)]))
    tell("weights", bits(model.get_weights()))
    states = (state.held for _, state in sorted(current_run().channels.items()) if state.held is not None)
    tell("held", [bits(held.as_arrays().values()) for held in states])


def projected(basis: str, *clusters: str) -> None:
    """A boundary that is projected on a basis in the model: three steps with Adam, and a prediction."""
    model = two_stages(clusters, 8, "adam", rank=3, basis=basis, backward=None)
    x, y = drawn_rows(6)
    losses = model.fit(x, y, batch_size=2, shuffle=False, verbose=0).history["loss"]
    tell("sent", sent())
    tell("losses", [float(loss).hex() for loss in losses])
    tell("outputs", bits([model.predict(x, batch_size=6, verbose=0)]))
    tell("names", [variable.path for variable in model.trainable_variables])
    tell("weights", bits(model.get_weights()))


# ---------------------------------------------------------------------- replicas that are not equally fast
SPEEDS: dict[str, Any] = {
    "clusters": {
        "c0": {"workers": ["127.0.0.1:7000", "127.0.0.1:7001"]},
        "c1": {"workers": [{"address": "127.0.0.1:7002"}, {"address": "127.0.0.1:7003", "speed": 2}]},
    }
}
"""Two clusters of two workers each; of the second the config says that one is twice as fast."""


def slowed(seconds: Mapping[str, float]) -> list[float]:
    """Train two stages of two replicas each; on cluster c0 each worker sleeps so long for a micro-batch. The losses."""
    keras.utils.set_random_seed(8)
    weight, wide = tf.Variable(0.3 * data(6, 3, seed=2)), tf.constant(data(3, 12, seed=3))

    def rest(rows: np.ndarray) -> np.ndarray:
        time.sleep(seconds.get(nb.here().worker, 0.0))
        return rows

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.replica(2), nb.pipeline(6, coupled="allow"):
            with nb.stage(cluster="c0"), nb.compress(fp16=True, backward=None):
                slept = tf.numpy_function(rest, [x], tf.float32)
                slept.set_shape(x.shape)
                hidden = slept @ weight @ wide
            with nb.stage(cluster="c1"):
                loss = tf.reduce_mean((hidden[:, :3] - y) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return [float(step(data(18, 6), data(18, 3, seed=1))) for _ in range(7)]


def uneven(case: str) -> None:
    """Train where the config says how fast workers are, and where it shows; at the end a replica is spoiled."""
    nb.init(SPEEDS)
    name, cut = read_case(case)
    tell("model", left(ZOO[name].run(cut)))
    tell("many", nb.last_report().micro_batches)
    tell("slowed", slowed({"c0/0": 0.04, "c0/1": 0.01}))
    report = nb.last_report()
    tell("notes", [note for note in report.notes if note.startswith("plan version")])
    stage = {**report.elsewhere.stages, **report.stages}["c0"]
    tell("computed", [each.compute_seconds for each in stage.replicas])
    tell("spoiled", spoil())


# ---------------------------------------------------------------------- what is said of a training
def seeing(path: str) -> None:
    """A few steps of gradient descent, all told to one file of metrics."""
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
    tell("worker", report.worker)
    tell("stages", list(report.stages))
    tell("text", str(report))
    nb.shutdown()


@tf.custom_gradient
def coupled(x: Any) -> Any:
    """A gradient that hangs on how many rows it sees, which no plan can know."""
    return tf.tanh(x), lambda upstream: upstream * tf.cast(tf.shape(x)[0], x.dtype)


def verified(activation: Any = "relu", micro_batch: int = 3) -> keras.Model:
    """Two stages, a weight of both clusters, dropout of one, and slots."""
    inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(micro_batch=micro_batch):
        with nb.stage(cluster="c0"):
            hidden = keras.layers.Dense(8, activation, name="first")(inputs)
        with nb.stage(cluster="c1"):
            outputs = keras.layers.Dense(2, name="second")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.5, name="momentum"), "mse", metrics=["mae"]
    )
    return model


def verifying() -> None:
    """Train, verify, train on; and verify what no plan can know."""
    batches = [(data(12, 6, seed=seed), data(12, 2, seed=9 + seed)) for seed in range(3)]
    model = verified()
    model.fit(*batches[0], batch_size=12, epochs=2, verbose=0)
    before = model.get_weights()
    found = nb.verify(model, *batches[1])
    tell("text", str(found))
    tell("ok", found.ok)
    tell("names", [row.name for row in found.rows])
    tell("as before", all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True)))
    try:
        tell("first is empty", len(model.get_layer("first").kernel.numpy()) == 0)
    except nb.errors.CollectiveReadError:
        tell("first is empty", True)
    tell("loss", model.fit(*batches[2], batch_size=12, verbose=0).history["loss"][0])
    tell("wrong", nb.verify(verified(coupled, 2), *batches[1]).ok)


if __name__ == "__main__":
    act(
        (
            zoo, normalised, meshed, at_home, sharing, compressed, endless, course, apart, choosing,
            differences, projected, uneven, seeing, verifying, members,
        )
    )  # fmt: skip
