"""Worker: actions of two or three processes beside training, selected by the first argument."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes import three_stage_models
from tests.processes.translator import INPUTS, course
from tests.processes.two_cluster_model import X, Y, fit, hexed, lesson, measured, taught
from tests.processes.worker_reports import bits, tell
from tests.processes.worker_runs import act, reopen
from whale_nebula.errors import CollectiveReadError
from whale_nebula.launch import attach
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.variables.remote import Ledger


def read_or_refused(read: Callable[[], Any]) -> str:
    """What was read, or why it was not."""
    try:
        return f"read: {read()}"
    except CollectiveReadError as refusal:
        return str(refusal)


def seen(result: Any) -> Any:
    """The bits of a result, or what reading it raises."""
    try:
        return bits([np.asarray(result)])
    except CollectiveReadError as refused:
        return refused.what


def raw(variable: Any) -> Any:
    """What the handle of a variable holds, past every guard; nothing if it was never given a value."""
    variable = getattr(variable, "value", variable)
    if not tf.raw_ops.VarIsInitializedOp(resource=variable.handle):
        return np.zeros(0)
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


# ---------------------------------------------------------------------- what each holds, reads and saves
def agreement(folder: str) -> None:
    """The lesson, and what this process holds of the model after it."""
    here = nb.here()
    tell("here", {**dataclasses.asdict(here), "runs": {name: here.runs(name) for name in ("c0", "c1")}})
    model, found = lesson(Path(folder))
    for name, what in found.items():
        tell(name, what)
    held = [*model.variables, *model.optimizer.variables]
    tell("held", {variable.path: list(raw(variable).shape) for variable in held})
    layer = model.get_layer("second" if here.runs("c0") else "first")
    foreign, width = layer.bias, layer.kernel.shape[0]
    alone = keras.Sequential([keras.Input((width,)), layer])  # a model without scopes runs in each process by itself
    reads = (np.array, tf.convert_to_tensor, lambda v: v.numpy(), lambda v: v + 1.0, lambda v: v[0], tf.reduce_sum)
    refused = [read_or_refused(lambda r=r, v=v: r(v)) for v in (foreign, foreign.value) for r in reads]
    tell("refusals", [*refused, read_or_refused(lambda: alone.predict(np.ones((2, width)), verbose=0))])


def owner() -> None:
    """A run that keeps results where they are made."""
    nb.init({"results": "owner"})
    model = taught()
    tell("history", fit(model, epochs=1))
    tell("evaluate", hexed(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)))
    tell("predict", seen(model.predict(X, batch_size=12, verbose=0)))
    tell("sent", {name: link.raw_bytes for name, link in nb.last_report().links.items()})
    tell("one batch", seen(model.predict_on_batch(X[:4])))
    found = measured(X[:7])
    tell("function", {name: seen(value) for name, value in found.items()})
    tell("said", {name: repr(value) for name, value in found.items()})


WIDTH = 1600  # 2 kernels of 10 MB, and two slots of Adam for each


def size(variables: Iterable[Any]) -> int:
    """Bytes of whole variables."""
    return sum(int(np.prod(v.shape)) * v.value.dtype.size for v in variables)


def stored_bytes(variable: Any) -> int:
    """Bytes that a process holds of a variable."""
    value = raw(variable)
    return int(np.prod(value.shape)) * variable.value.dtype.size


def own(folder: str) -> None:
    """A run that keeps weights at home: what each holds, what it saves, and what it reads back."""

    def everything() -> list[Any]:
        return [*model.variables, *model.optimizer.variables]

    def mine(variables: list[Any]) -> list[Any]:
        return [v for v in variables if ("first" if nb.here().runs("c0") else "second") in v.path]

    nb.init({"weights": "own"})
    inputs = keras.Input((WIDTH,))
    with nb.cluster(), nb.stage(cluster="c0"):
        hidden = keras.layers.Dense(WIDTH, name="first", kernel_initializer="ones")(inputs)
    with nb.cluster(), nb.stage(cluster="c1"):
        outputs = keras.layers.Dense(WIDTH, name="second", kernel_initializer="ones")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")

    settle = Ledger.settle

    def settling(ledger: Ledger, *rest: Any) -> None:
        """Just before what is elsewhere is emptied: optimizer slots of it must not be there yet."""
        if "slots" not in found:
            found["slots"] = sum(map(stored_bytes, model.optimizer.variables))
        settle(ledger, *rest)

    found: dict[str, int] = {}
    Ledger.settle = settling  # type: ignore[method-assign]
    x, y = np.full((4, WIDTH), 1e-3, "float32"), np.zeros((4, WIDTH), "float32")
    try:
        model.fit(x, y, batch_size=4, verbose=0)
    finally:
        Ledger.settle = settle  # type: ignore[method-assign]
    tell("whole", size(everything()))
    tell("own", size(mine(everything())))
    tell("own slots", size(mine(model.optimizer.variables)))
    tell("held", sum(map(stored_bytes, everything())))
    tell("slots before emptying", found["slots"])

    tell(
        "refusals",
        [read_or_refused(read) for read in (model.get_weights, nb.gathered().__enter__, lambda: model.save("m.keras"))],
    )
    path = Path(folder) / "model.weights.h5"
    before = {name: link.totals().raw_bytes for name, link in current_run().ledger.session.links.items()}
    model.save_weights(path)
    after = {name: link.totals().raw_bytes for name, link in current_run().ledger.session.links.items()}
    tell("crossed", [after[name] - before[name] for name in before])
    saved = bits(mine(everything()))
    model.fit(x, y, batch_size=4, verbose=0)
    tell("trained on", bits(mine(everything())) != saved)
    model.load_weights(path)
    tell("loaded", bits(mine(everything())) == saved)
    tell("bits", saved)
    model.fit(x, y, batch_size=4, verbose=0)


def looping(where: str) -> None:
    """A custom loop over models that nothing `fit`s, and what they say and save after it."""
    folder = Path(where)
    rows_of_ones = np.ones((4, 4), "float32")
    drawn = random.getstate()
    nb.init()
    tell("joining draws", random.getstate() != drawn)
    first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)], name="first")
    second = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name="second")
    whole = keras.Sequential([first, second])
    beside = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.05)

    @nb.function
    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            with nb.stage(cluster="c0"):
                hidden = first(rows)
            with nb.stage(cluster="c1"):
                loss = tf.reduce_mean(second(hidden) ** 2)
        variables = whole.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def saved(model: Any, name: str) -> bool:
        """Save, and look at once whether the file holds the model."""
        model.save(folder / f"{name}.keras")
        model.save_weights(folder / f"{name}.weights.h5")
        loaded = keras.models.load_model(folder / f"{name}.keras")
        again = keras.models.clone_model(loaded)
        again.load_weights(folder / f"{name}.weights.h5")
        return bits(loaded.get_weights()) == bits(again.get_weights()) == bits(model.get_weights())

    before = float(step(rows_of_ones))
    tell("weights", {model.name: bits(model.get_weights()) for model in (first, second)})
    tell("whole", bits(whole.get_weights()))
    tell("saved", [saved(first, "first"), saved(second, "second"), saved(whole, "whole")])
    tell("one that no step uses", len(beside.get_weights()) if nb.here().lead else 2)
    checkpoint = tf.train.Checkpoint(first=first, second=second, optimizer=optimizer)
    tell("checkpoint", read_or_refused(lambda: checkpoint.save(folder / "alone")))
    with nb.gathered():
        if nb.here().lead:  # what is here already is asked of nobody
            tell("here", len(whole.get_weights()))
            checkpoint.write(folder / "together")
    losses = [float(step(rows_of_ones)) for _ in range(2)]
    checkpoint.read(str(folder / "together")).assert_consumed()
    tell("restored", [losses, float(step(rows_of_ones)) == losses[0] < before])


class BreakOff(keras.callbacks.Callback):
    """Ends a training as a fault does: `on_train_end` does not run."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


def backing(where: str, weights: str) -> None:
    """A training that is backed up, broken off and begun again, where weights are kept everywhere or at home."""
    nb.init({"weights": weights})
    folder = Path(where)

    def trained(*callbacks: Any) -> dict[str, list[str]]:
        keras.utils.set_random_seed(7)
        return fit(taught(), epochs=3, callbacks=list(callbacks))

    def backup(name: str, **options: Any) -> Any:
        return keras.callbacks.BackupAndRestore(str(folder / name), **options)

    def files(name: str) -> list[str]:
        return sorted(path.name for path in (folder / name).iterdir())

    if weights == "own":
        tell("unbroken", trained())
    else:
        path = folder / "each/{epoch}/model.weights.h5"
        checkpoint = keras.callbacks.ModelCheckpoint(str(path), save_weights_only=True)
        kept = backup("kept", delete_checkpoint=False, double_checkpoint=True)
        loggers = (
            keras.callbacks.CSVLogger(folder / "log.csv", append=True),
            keras.callbacks.TensorBoard(folder / "events"),
        )
        tell("unbroken", trained(kept, checkpoint, *loggers))
        tell("kept", files("kept"))
        tell("each", files("each"))
    try:
        trained(backup("backup"), BreakOff())
    except KeyboardInterrupt:
        tell("files", files("backup"))
    tell("begun again", trained(backup("backup")))
    tell("gone", not (folder / "backup").exists())


def results(cases: str, replicated: str = "") -> None:
    """Small models that are cut over three clusters, and what Keras says of them."""
    nb.init()
    for extra, place in json.loads(cases):
        tell(f"{extra} {place}", three_stage_models.result_of(extra, place, cut=True, replicated=replicated))
    nb.shutdown()


def ahead(folder: str) -> None:
    """The stage of c1 is done once c0 has been given its results, those of c1 among them."""
    nb.init()
    mark = Path(folder) / "is ahead"

    def wait_for_mark(given: np.ndarray) -> np.ndarray:
        limit = time.monotonic() + 30.0
        while not mark.exists():
            if time.monotonic() > limit:
                raise RuntimeError("c0 waits for what c1 returns")
            time.sleep(0.01)
        return given

    feeding, fed = tf.Variable([2.0]), tf.Variable([3.0])

    @nb.function
    def step(x: Any) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape, nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = feeding * x
                losses = {"feeding": tf.reduce_sum(hidden)}
            with nb.stage(cluster="c1"):
                waited = tf.numpy_function(wait_for_mark, [tf.stop_gradient(hidden)], x.dtype)
                losses["fed"] = tf.reduce_sum(fed * tf.ensure_shape(waited, x.shape))
        for name, variable in (("feeding", feeding), ("fed", fed)):
            variable.assign_sub(tape.gradient(losses[name], variable))
        return losses

    found = step(np.ones(4, "float32"))
    if nb.here().runs("c0"):
        mark.touch()
    tell("ahead", {name: float(loss) for name, loss in found.items()})


def sides() -> None:
    """A worker that reads its own side of the text."""
    nb.init({"results": "owner", "inputs": INPUTS})
    left = course("source" if nb.here().runs("c0") else "target")
    function = left.pop("function")
    tell("function", {name: seen(value) for name, value in function.items()})
    tell("predict", seen(left.pop("predict")))
    for name, value in left.items():
        tell(name, value)


# ---------------------------------------------------------------------- processes that do not do the same
def is_second() -> bool:
    """Whether this is the second process."""
    attachment = attach()
    return attachment is not None and attachment.worker == "c1/0"


def own_weights(model: keras.Model) -> list[str]:
    """The weights of this process's layer, which it can always read."""
    return bits(model.get_layer("second" if is_second() else "first").weights)


def ended(act: Callable[[], Any]) -> dict[str, Any]:
    """How a scenario ended here."""
    start = time.monotonic()
    try:
        act()
    except BaseException as failure:
        error = {"type": type(failure).__name__, "text": str(failure)}
    else:
        error = {"type": "", "text": ""}
    return {**error, "seconds": time.monotonic() - start}


def seeds(folder: Path) -> None:
    tell("seeds", ended(lambda: reopen(folder, seed=1 + is_second())))


def order(folder: Path) -> None:
    reopen(folder)
    model = taught()
    before = own_weights(model)
    mine = np.roll(X, 16, axis=0) if is_second() else X
    tell("order", {**ended(lambda: fit(model, mine)), "untouched": own_weights(model) == before})


def rows(folder: Path) -> None:
    reopen(folder)
    model = taught()
    tell("rows", ended(lambda: fit(model, batch_size=8 if is_second() else 16)))


def width(folder: Path) -> None:
    reopen(folder)
    tell("width", ended(lambda: fit(taught(width=9 if is_second() else 8))))


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = is_second() and batch == 1


def stopped_and_read(folder: Path) -> None:
    """The second process stops and goes on with something else."""
    reopen(folder)
    model = taught()

    def act() -> None:
        fit(model, epochs=20, callbacks=[Stop()])
        model.get_weights()

    tell("stopped and read", ended(act))


def stopped_and_left(folder: Path) -> None:
    """The second process stops, and its run ends."""
    reopen(folder)
    model = taught()

    def act() -> None:
        fit(model, epochs=20, callbacks=[Stop()])
        nb.shutdown()

    tell("stopped and left", ended(act))


def asserting(folder: Path) -> None:
    reopen(folder)
    first, second = tf.Variable(tf.ones([6, 4])), tf.Variable(tf.ones([4, 1]))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="c0"):
                hidden = x @ first
            with nb.stage(cluster="c1"):
                tf.debugging.assert_less(tf.abs(hidden), 1e6, "the hidden values exploded")
                loss = tf.reduce_mean((hidden @ second) ** 2)
        for variable, gradient in zip((first, second), tape.gradient(loss, [first, second]), strict=True):
            variable.assign_sub(1e-3 * gradient)
        return loss

    step(X[:8])
    mine = second if is_second() else first
    before = bits([mine])
    tell("asserting", {**ended(lambda: step(X[:8] * 1e9)), "untouched": bits([mine]) == before})


def ids(folder: Path) -> None:
    """Only the named input is compared: the other one is c0's alone, and c1 may hold what it likes there."""
    reopen(folder, ids="names")

    @nb.function
    def step(names: Any, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = 2.0 * x
            with nb.stage(cluster="c1"):
                return tf.reduce_sum(hidden * tf.cast(names, tf.float32))

    names = np.arange(4, dtype="int32")
    blank = np.zeros(4, "float32") if is_second() else np.ones(4, "float32")
    tell("ids alike", float(step(names, blank)))
    tell("ids unlike", ended(lambda: step(names + is_second(), blank)))


def configs(folder: Path) -> None:
    """The one keeps its weights at home, and the other does not."""
    tell("configs", ended(lambda: reopen(folder, config={"weights": "own"} if is_second() else {})))


def absent(folder: Path) -> None:
    """The second process computes the loss, and was not given what it compares with."""
    reopen(folder, config={"inputs": {"y": {"shape": [None, 3]}}})
    model = taught()
    before = own_weights(model)
    error = ended(lambda: fit(model, y=None if is_second() else Y))
    tell("absent", {**error, "untouched": own_weights(model) == before})


def absent_later(folder: Path) -> None:
    """What a process does not read may come and go; what it reads may not."""
    reopen(folder, config={"inputs": {"names": {"shape": [None]}, "x": {"shape": [None]}}})

    @nb.function
    def step(names: Any, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = 2.0 * x
            with nb.stage(cluster="c1"):
                return tf.reduce_sum(hidden * names)

    names, x = np.arange(4, dtype="float32"), np.ones(4, "float32")
    mine = (names, None) if is_second() else (None, x)
    tell("absent and given", [float(step(*given)) for given in (mine, (names, x), mine)])

    def later() -> None:
        with nb.gathered():  # all have read what they were given: a failure would overtake it, and overtakes even this
            pass
        step(None if is_second() else names, x)

    tell("absent later", ended(later))


def uncaught(folder: Path) -> None:
    """The last one: what the script of one process raises reaches the other."""
    reopen(folder)
    model = taught()
    if is_second():
        raise RuntimeError("no data on this site")
    tell("uncaught", ended(lambda: fit(model)))


def disagreement(folder: str) -> None:
    """One run after another; the last ends with an error."""
    for scenario in (
        seeds, order, rows, width, stopped_and_read, stopped_and_left, asserting, ids, configs, absent, absent_later,
        uncaught,
    ):  # fmt: skip
        scenario(Path(folder))


if __name__ == "__main__":
    act((agreement, owner, own, looping, backing, ahead, results, sides, disagreement))
