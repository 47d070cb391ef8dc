"""Worker: scenarios of two or three processes; the first argument names a function of this module."""

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
from tests.processes.translator import INPUTS, exercise_translator
from tests.processes.two_cluster_model import (
    X,
    Y,
    build_model,
    exercise_model,
    fit,
    summarize_rows,
    to_hex,
    train_in_turn,
)
from tests.processes.worker_reports import digest_tensors, report_value
from tests.processes.worker_runs import open_next_run, run_selected
from whale_nebula.errors import CollectiveReadError
from whale_nebula.launch import attach
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.variables.remote import Ledger


def read_or_explain(read: Callable[[], Any]) -> str:
    """The value that was read, or the error that refused it."""
    try:
        return f"read: {read()}"
    except CollectiveReadError as refusal:
        return str(refusal)


def digest_or_refusal(result: Any) -> Any:
    """The digest of a result, or the error that reading it raises."""
    try:
        return digest_tensors([np.asarray(result)])
    except CollectiveReadError as refused:
        return refused.what


def read_handle(variable: Any) -> Any:
    """Read a variable by its handle, without guards; an empty array if it has no value."""
    variable = getattr(variable, "value", variable)
    if not tf.raw_ops.VarIsInitializedOp(resource=variable.handle):
        return np.zeros(0)
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


# ---------------------------------------------------------------------- what each process holds, reads and saves
def report_held_variables(folder: str) -> None:
    """Run `exercise_model`, and report the variables that this process holds after it, and refused reads."""
    here = nb.here()
    report_value("here", {**dataclasses.asdict(here), "runs": {name: here.runs(name) for name in ("c0", "c1")}})
    model, results = exercise_model(Path(folder))
    for name, value in results.items():
        report_value(name, value)
    held = [*model.variables, *model.optimizer.variables]
    report_value("held", {variable.path: list(read_handle(variable).shape) for variable in held})
    layer = model.get_layer("second" if here.runs("c0") else "first")
    foreign, width = layer.bias, layer.kernel.shape[0]
    alone = keras.Sequential([keras.Input((width,)), layer])  # a model without scopes runs in each process by itself
    reads = (np.array, tf.convert_to_tensor, lambda v: v.numpy(), lambda v: v + 1.0, lambda v: v[0], tf.reduce_sum)
    refused = [read_or_explain(lambda r=r, v=v: r(v)) for v in (foreign, foreign.value) for r in reads]
    report_value("refusals", [*refused, read_or_explain(lambda: alone.predict(np.ones((2, width)), verbose=0))])


def keep_results() -> None:
    """Train and predict with `results: owner`."""
    nb.init({"results": "owner"})
    model = build_model()
    report_value("history", fit(model, epochs=1))
    report_value("evaluate", to_hex(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)))
    report_value("predict", digest_or_refusal(model.predict(X, batch_size=12, verbose=0)))
    report_value("sent", {name: link.raw_bytes for name, link in nb.last_report().links.items()})
    report_value("one batch", digest_or_refusal(model.predict_on_batch(X[:4])))
    found = summarize_rows(X[:7])
    report_value("function", {name: digest_or_refusal(value) for name, value in found.items()})
    report_value("said", {name: repr(value) for name, value in found.items()})


def move_variables() -> None:
    """Train the same layers in other clusters in turn."""
    nb.init()
    report_value("moved", train_in_turn())
    held = current_run().ledger.variables.values()
    report_value("holders", {each.path: each.holders for each in held if each.path.endswith("bias")})


WIDTH = 1600  # 2 kernels of 10 MB, and two slots of Adam for each


def count_bytes(variables: Iterable[Any]) -> int:
    """The bytes of whole variables."""
    return sum(int(np.prod(v.shape)) * v.value.dtype.size for v in variables)


def count_held_bytes(variable: Any) -> int:
    """The bytes that this process holds of a variable."""
    value = read_handle(variable)
    return int(np.prod(value.shape)) * variable.value.dtype.size


def keep_weights(folder: str) -> None:
    """Train, save and load with `weights: own`; report held and sent bytes."""

    def list_variables() -> list[Any]:
        return [*model.variables, *model.optimizer.variables]

    def select_own(variables: list[Any]) -> list[Any]:
        return [v for v in variables if ("first" if nb.here().runs("c0") else "second") in v.path]

    nb.init({"weights": "own"})
    inputs = keras.Input((WIDTH,))
    with nb.cluster(), nb.stage(cluster="c0"):
        hidden = keras.layers.Dense(WIDTH, name="first", kernel_initializer="ones")(inputs)
    with nb.cluster(), nb.stage(cluster="c1"):
        outputs = keras.layers.Dense(WIDTH, name="second", kernel_initializer="ones")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")

    settle = Ledger.register_program

    def count_slots_and_settle(ledger: Ledger, *rest: Any) -> None:
        """Count slots just before variables of other clusters are emptied: their slots must not exist yet."""
        if "slots" not in found:
            found["slots"] = sum(map(count_held_bytes, model.optimizer.variables))
        settle(ledger, *rest)

    found: dict[str, int] = {}
    Ledger.register_program = count_slots_and_settle  # type: ignore[method-assign]
    x, y = np.full((4, WIDTH), 1e-3, "float32"), np.zeros((4, WIDTH), "float32")
    try:
        model.fit(x, y, batch_size=4, verbose=0)
    finally:
        Ledger.register_program = settle  # type: ignore[method-assign]
    report_value("whole", count_bytes(list_variables()))
    report_value("own", count_bytes(select_own(list_variables())))
    report_value("own slots", count_bytes(select_own(model.optimizer.variables)))
    report_value("held", sum(map(count_held_bytes, list_variables())))
    report_value("slots before emptying", found["slots"])

    report_value(
        "refusals",
        [read_or_explain(read) for read in (model.get_weights, nb.gathered().__enter__, lambda: model.save("m.keras"))],
    )
    path = Path(folder) / "model.weights.h5"
    before = {name: link.totals().raw_bytes for name, link in current_run().ledger.session.links.items()}
    model.save_weights(path)
    after = {name: link.totals().raw_bytes for name, link in current_run().ledger.session.links.items()}
    report_value("crossed", [after[name] - before[name] for name in before])
    saved = digest_tensors(select_own(list_variables()))
    model.fit(x, y, batch_size=4, verbose=0)
    report_value("trained on", digest_tensors(select_own(list_variables())) != saved)
    model.load_weights(path)
    report_value("loaded", digest_tensors(select_own(list_variables())) == saved)
    report_value("bits", saved)
    model.fit(x, y, batch_size=4, verbose=0)


def run_custom_loop(where: str) -> None:
    """Train models in a custom loop without `fit`, and read and save them."""
    folder = Path(where)
    rows_of_ones = np.ones((4, 4), "float32")
    drawn = random.getstate()
    nb.init()
    report_value("joining draws", random.getstate() != drawn)
    first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)], name="first")
    second = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name="second")
    whole = keras.Sequential([first, second])
    beside = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer, follower = keras.optimizers.SGD(0.05), tf.Variable(tf.zeros([4, 8]))

    @nb.function
    def step(rows: Any) -> Any:
        """Train, and let a variable in c1 follow what the update has written in c0."""
        with tf.GradientTape() as tape:
            with nb.stage(cluster="c0"):
                hidden = first(rows)
            with nb.stage(cluster="c1"):
                loss = tf.reduce_mean(second(hidden + tf.matmul(rows, follower)) ** 2)
        variables = whole.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        follower.assign(0.5 * follower + 0.5 * first.variables[0])
        return loss

    @nb.function
    def tie(rows: Any) -> Any:
        """Read `first` in both clusters, of which only c0 trains it."""
        with nb.stage(cluster="c0"):
            hidden = first(rows)
        with nb.stage(cluster="c1"):
            return tf.reduce_mean(second(first(rows) + hidden))

    def saved(model: Any, name: str) -> bool:
        """Save a model, and check immediately that the files contain it."""
        model.save(folder / f"{name}.keras")
        model.save_weights(folder / f"{name}.weights.h5")
        loaded = keras.models.load_model(folder / f"{name}.keras")
        again = keras.models.clone_model(loaded)
        again.load_weights(folder / f"{name}.weights.h5")
        return (
            digest_tensors(loaded.get_weights())
            == digest_tensors(again.get_weights())
            == digest_tensors(model.get_weights())
        )

    tied = [float(tie(rows_of_ones))]
    before = float(step(rows_of_ones))
    report_value("weights", {model.name: digest_tensors(model.get_weights()) for model in (first, second)})
    report_value("whole", digest_tensors(whole.get_weights()))
    report_value("saved", [saved(first, "first"), saved(second, "second"), saved(whole, "whole")])
    report_value("one that no step uses", len(beside.get_weights()) if nb.here().lead else 2)
    checkpoint = tf.train.Checkpoint(first=first, second=second, optimizer=optimizer, follower=follower)
    report_value("checkpoint", read_or_explain(lambda: checkpoint.save(folder / "alone")))
    tied.append(float(tie(rows_of_ones)))
    with nb.gathered():
        if nb.here().lead:  # variables that are gathered already are not requested again
            report_value("here", len(whole.get_weights()))
            checkpoint.write(folder / "together")
            tied.append(float(tf.reduce_mean(second(2.0 * first(rows_of_ones)))))
            report_value("tied", tied)
            report_value("followed", bool(tf.reduce_all(follower == 0.5 * first.variables[0])))
    losses = [float(step(rows_of_ones)) for _ in range(2)]
    checkpoint.read(str(folder / "together")).assert_consumed()
    report_value("restored", [losses, float(step(rows_of_ones)) == losses[0] < before])
    norm = tf.function(lambda: tf.linalg.global_norm(whole.trainable_variables))
    report_value("read in a function", read_or_explain(lambda: norm()))
    with nb.gathered():
        step(rows_of_ones)
        inside = digest_tensors(whole.get_weights())
    report_value("trained inside gathered", [inside, digest_tensors(whole.get_weights())])


class Interrupt(keras.callbacks.Callback):
    """Interrupts training in the second epoch; `on_train_end` does not run."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


def run_file_callbacks(where: str, weights: str) -> None:
    """Train with a backup, interrupted and resumed, with `weights: everywhere` or `own`."""
    nb.init({"weights": weights})
    folder = Path(where)

    def trained(*callbacks: Any) -> dict[str, list[str]]:
        keras.utils.set_random_seed(7)
        return fit(build_model(), epochs=3, callbacks=list(callbacks))

    def backup(name: str, **options: Any) -> Any:
        return keras.callbacks.BackupAndRestore(str(folder / name), **options)

    def files(name: str) -> list[str]:
        return sorted(path.name for path in (folder / name).iterdir())

    if weights == "own":
        report_value("unbroken", trained())
    else:
        path = folder / "each/{epoch}/model.weights.h5"
        checkpoint = keras.callbacks.ModelCheckpoint(str(path), save_weights_only=True)
        kept = backup("kept", delete_checkpoint=False, double_checkpoint=True)
        (folder / "events").mkdir(exist_ok=True)  # where TensorBoard describes embeddings before Keras makes it
        loggers = (
            keras.callbacks.CSVLogger(folder / "log.csv", append=True),
            keras.callbacks.TensorBoard(folder / "events", histogram_freq=2, embeddings_freq=1),
        )
        report_value("unbroken", trained(kept, checkpoint, *loggers))
        report_value("kept", files("kept"))
        report_value("each", files("each"))
    try:
        trained(backup("backup"), Interrupt())
    except KeyboardInterrupt:
        report_value("files", files("backup"))
    report_value("begun again", trained(backup("backup")))
    report_value("gone", not (folder / "backup").exists())


def report_results(cases: str, replicated: str = "") -> None:
    """Report Keras's results of small models in three clusters."""
    nb.init()
    for feature, stage in json.loads(cases):
        report_value(f"{feature} {stage}", three_stage_models.run_case(feature, stage, cut=True, replicated=replicated))
    nb.shutdown()


ONE_AND_TWO: dict[str, Any] = {
    "clusters": {
        "c0": {"workers": ["127.0.0.1:7000"]},
        "c1": {"workers": [{"address": f"127.0.0.1:{port}", "speed": 1} for port in (7001, 7002)]},
    }
}


def train_on_few_rows() -> list[str]:
    """Train four stages that alternate between the clusters, the second of which has two replicas; in the last steps,
    after those that are timed, a replica has no micro-batch. Returns the weights.
    """
    with nb.init(ONE_AND_TWO):
        keras.utils.set_random_seed(4)
        hidden = inputs = keras.Input((6,))
        with nb.cluster(), nb.pipeline(2):
            for number in range(4):
                with nb.replica(1 + number % 2), nb.stage(cluster=f"c{number % 2}", name=f"stage{number}"):
                    hidden = keras.layers.Dense(6)(hidden)
        model = keras.Model(inputs, hidden)
        model.compile("sgd", "mse")
        for rows in (4, 4, 4, 4, 4, 1, 1):
            model.train_on_batch(X[:rows], X[:rows])
        return digest_tensors(model.get_weights())


def report_few_rows() -> None:
    report_value("weights", train_on_few_rows())


def run_ahead(folder: str) -> None:
    """Run a step whose stage in c1 waits until c0 has returned all results, those of c1 included."""
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
    report_value("ahead", {name: float(loss) for name, loss in found.items()})


def train_on_own_side() -> None:
    """Train a translator on the side of the text that this worker reads."""
    nb.init({"results": "owner", "inputs": INPUTS})
    results = exercise_translator("source" if nb.here().runs("c0") else "target")
    function = results.pop("function")
    report_value("function", {name: digest_or_refusal(value) for name, value in function.items()})
    report_value("predict", digest_or_refusal(results.pop("predict")))
    for name, value in results.items():
        report_value(name, value)


# ---------------------------------------------------------------------- processes that differ
def is_second() -> bool:
    """Whether this is the second process."""
    attachment = attach()
    return attachment is not None and attachment.worker == "c1/0"


def own_weights(model: keras.Model) -> list[str]:
    """The digests of the weights of this process's own layer."""
    return digest_tensors(model.get_layer("second" if is_second() else "first").weights)


def run_and_catch(action: Callable[[], Any]) -> dict[str, Any]:
    """Call a function; returns its error and its seconds."""
    start = time.monotonic()
    try:
        action()
    except BaseException as failure:
        error = {"type": type(failure).__name__, "text": str(failure)}
    else:
        error = {"type": "", "text": ""}
    return {**error, "seconds": time.monotonic() - start}


def pass_different_seeds(folder: Path) -> None:
    report_value("seeds", run_and_catch(lambda: open_next_run(folder, seed=1 + is_second())))


def pass_other_row_order(folder: Path) -> None:
    open_next_run(folder)
    model = build_model()
    before = own_weights(model)
    mine = np.roll(X, 16, axis=0) if is_second() else X
    report_value("order", {**run_and_catch(lambda: fit(model, mine)), "untouched": own_weights(model) == before})


def pass_other_batch_size(folder: Path) -> None:
    open_next_run(folder)
    model = build_model()
    report_value("rows", run_and_catch(lambda: fit(model, batch_size=8 if is_second() else 16)))


def build_other_width(folder: Path) -> None:
    open_next_run(folder)
    report_value("width", run_and_catch(lambda: fit(build_model(width=9 if is_second() else 8))))


def set_other_learning_rates(folder: Path) -> None:
    """The second process has another learning rate: from the start, and from the second step on."""
    model = build_model()

    def train_after_change() -> None:
        model.train_on_batch(X[:16], Y[:16])
        change_in_second_process()
        model.train_on_batch(X[:16], Y[:16])

    def change_in_second_process() -> None:
        if is_second():
            model.optimizer.learning_rate = 0.5

    open_next_run(folder)
    report_value("rate later", run_and_catch(train_after_change))
    open_next_run(folder)
    model = build_model()
    change_in_second_process()
    report_value("rate", run_and_catch(lambda: fit(model)))


class StopSecondProcess(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = is_second() and batch == 1


def stop_and_read(folder: Path) -> None:
    """The second process stops training and reads the weights."""
    open_next_run(folder)
    model = build_model()

    def train_and_stop() -> None:
        fit(model, epochs=20, callbacks=[StopSecondProcess()])
        model.get_weights()

    report_value("stopped and read", run_and_catch(train_and_stop))


def stop_and_shut_down(folder: Path) -> None:
    """The second process stops training and shuts its run down."""
    open_next_run(folder)
    model = build_model()

    def train_and_stop() -> None:
        fit(model, epochs=20, callbacks=[StopSecondProcess()])
        nb.shutdown()

    report_value("stopped and left", run_and_catch(train_and_stop))


def fail_assertion(folder: Path) -> None:
    open_next_run(folder)
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
    before = digest_tensors([mine])
    report_value(
        "asserting", {**run_and_catch(lambda: step(X[:8] * 1e9)), "untouched": digest_tensors([mine]) == before}
    )


def compare_ids(folder: Path) -> None:
    """Call a step with different inputs: only the one named by `ids` is compared."""
    open_next_run(folder, ids="names")

    @nb.function
    def step(names: Any, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = 2.0 * x
            with nb.stage(cluster="c1"):
                return tf.reduce_sum(hidden * tf.cast(names, tf.float32))

    names = np.arange(4, dtype="int32")
    blank = np.zeros(4, "float32") if is_second() else np.ones(4, "float32")
    report_value("ids alike", float(step(names, blank)))
    report_value("ids unlike", run_and_catch(lambda: step(names + is_second(), blank)))


def open_other_config(folder: Path) -> None:
    """Open a run with `weights: own` in only one process."""
    report_value(
        "configs", run_and_catch(lambda: open_next_run(folder, config={"weights": "own"} if is_second() else {}))
    )


def omit_input(folder: Path) -> None:
    """Omit `y` in the process that computes the loss."""
    open_next_run(folder, config={"inputs": {"y": {"shape": [None, 3]}}})
    model = build_model()
    before = own_weights(model)
    error = run_and_catch(lambda: fit(model, y=None if is_second() else Y))
    report_value("absent", {**error, "untouched": own_weights(model) == before})


def omit_input_later(folder: Path) -> None:
    """Omit inputs that a process does not read, then one that it reads."""
    open_next_run(folder, config={"inputs": {"names": {"shape": [None]}, "x": {"shape": [None]}}})

    @nb.function
    def step(names: Any, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = 2.0 * x
            with nb.stage(cluster="c1"):
                return tf.reduce_sum(hidden * names)

    names, x = np.arange(4, dtype="float32"), np.ones(4, "float32")
    mine = (names, None) if is_second() else (None, x)
    report_value("absent and given", [float(step(*given)) for given in (mine, (names, x), mine)])

    def later() -> None:
        with nb.gathered():  # all have received their inputs: a failure would overtake them
            pass
        step(None if is_second() else names, x)

    report_value("absent later", run_and_catch(later))


def raise_uncaught_error(folder: Path) -> None:
    """Raise an error in the script of the second process."""
    open_next_run(folder)
    model = build_model()
    if is_second():
        raise RuntimeError("no data on this site")
    report_value("uncaught", run_and_catch(lambda: fit(model)))


def run_mismatches(folder: str) -> None:
    """Run all mismatches, each in its own run; the last ends with an error."""
    for scenario in (
        pass_different_seeds, pass_other_row_order, pass_other_batch_size, build_other_width,
        set_other_learning_rates, stop_and_read, stop_and_shut_down, fail_assertion, compare_ids, open_other_config,
        omit_input, omit_input_later, raise_uncaught_error,
    ):  # fmt: skip
        scenario(Path(folder))


if __name__ == "__main__":
    run_selected(
        (
            report_held_variables, keep_results, move_variables, keep_weights, run_custom_loop, run_file_callbacks,
            run_ahead, report_results, report_few_rows, train_on_own_side, run_mismatches,
        )
    )  # fmt: skip
