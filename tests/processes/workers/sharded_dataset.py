"""Worker: trains on batches of which it reads its own rows, by `fit` and in a loop; reports the results, and how many
rows were parsed. The reference in one process trains on whole batches.
"""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.two_cluster_model import to_hex
from tests.processes.worker_reports import digest_tensors, report_value

ROWS, BATCH, WIDE = 44, 8, 6
MICRO_BATCHES = 2
"""One for each replica, so that none moves to a faster replica, and sums have the same order."""
parsed_rows: list[int] = []
"""The numbers of the rows that this process has parsed."""


def parse_row(number: Any) -> Any:
    """Parse a row, which is expensive, and record its number."""
    parsed_rows.append(int(number))
    return np.random.default_rng(int(number)).normal(size=WIDE).astype("float32")


def make_row(number: Any) -> Any:
    x = tf.ensure_shape(tf.numpy_function(parse_row, [number], tf.float32), [WIDE])
    return x, tf.reduce_sum(x, keepdims=True)


def make_batches(seed: int | None = 3) -> tf.data.Dataset:
    return tf.data.Dataset.range(ROWS).map(make_row).shuffle(ROWS, seed=seed).batch(BATCH)


def apply_stages(x: Any, front: Any, back: Any) -> Any:
    """Two replicas in c0, one of another stage in c1."""
    with nb.cluster(), nb.pipeline(MICRO_BATCHES):
        with nb.replica(2), nb.stage(cluster="c0"):
            hidden = front(x)
        with nb.replica(1), nb.stage(cluster="c1"):
            return back(hidden)


def make_layers() -> tuple[keras.layers.Layer, keras.layers.Layer]:
    return (
        keras.layers.Dense(5, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)),
    )


def train_by_fit(train: tf.data.Dataset, evaluation: tf.data.Dataset, with_predictions: bool) -> dict[str, Any]:
    """Train two epochs with validation, optionally predict and train on batches, then train on an endless dataset."""
    inputs = keras.Input((WIDE,))
    model = keras.Model(inputs, apply_stages(inputs, *make_layers()))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    history = model.fit(train, validation_data=evaluation, epochs=2, verbose=0).history
    predicted = [digest_tensors([model.predict(evaluation, verbose=0)])] if with_predictions else []
    if with_predictions:
        predicted += [[float(each).hex() for each in model.train_on_batch(x, y)] for x, y in train.take(3)]
    # the endless dataset comes last: how often tf.data shuffles ahead of time depends on chance
    again = model.fit(train.repeat(), epochs=2, steps_per_epoch=4, verbose=0).history
    with nb.gathered():
        weights = digest_tensors(model.variables)
    return {"history": [to_hex(history), to_hex(again)], "predicted": predicted, "weights": weights}


def train_by_loop(train: tf.data.Dataset) -> dict[str, Any]:
    """Train with a custom loop."""
    front, back = make_layers()
    front.build((None, WIDE))
    back.build((None, 5))
    held = [*front.trainable_variables, *back.trainable_variables]
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(held)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((apply_stages(x, front, back) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, held), held, strict=True))
        return loss

    losses = [float(step(x, y)).hex() for _ in range(2) for x, y in train]
    with nb.gathered():
        return {"losses": losses, "weights": digest_tensors(held)}


def train_by_local_sgd(train: tf.data.Dataset) -> dict[str, Any]:
    """Train each cluster on its part of every batch, whose micro-batches its workers divide."""
    inputs = keras.Input((WIDE,))
    front, back = make_layers()
    model = keras.Model(inputs, back(front(inputs)))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    with nb.cluster(), nb.replica(sync_every=2, delay=0):
        history = model.fit(train, epochs=2, verbose=0).history
    with nb.gathered():
        return {"history": to_hex(history), "weights": digest_tensors(model.variables)}


def sum_doubled(x: Any) -> Any:
    """A step without weights."""
    return tf.reduce_sum(apply_stages(x, _double, _take_first_column))


def _double(x: Any) -> Any:
    return 2.0 * x


def _take_first_column(x: Any) -> Any:
    return x[:, :1]


def read_outside_step() -> str:
    """Compute with batches outside a step; returns the error, if tf.data has not made a batch ahead of time."""
    step, message = nb.function(sum_doubled), ""
    for x, _ in nb.shard(make_batches()).repeat(2):
        step(x)
        try:
            x * 2.0
        except nb.errors.AbsentInputError as error:
            message = message or str(error)
    return message


def train_in_different_orders() -> str:
    """Train on rows in an order that differs between processes; returns the error."""
    step = nb.function(sum_doubled)
    try:
        for x, _ in nb.shard(make_batches(seed=1 if nb.here().worker == "c0/1" else 2)):
            float(step(x))
    except nb.errors.NebulaError as error:
        return str(error)
    return ""


def train_on_whole_batches(with_predictions: bool) -> None:
    """Report the results of training on whole batches."""
    report_value("fitted", train_by_fit(make_batches(), make_batches(), with_predictions))
    report_value("looped", train_by_loop(make_batches()))


def main(with_predictions: bool) -> None:
    """Report all results; optionally with predictions and local SGD."""
    report_value("fitted", train_by_fit(nb.shard(make_batches()), nb.shard(make_batches()), with_predictions))
    report_value("parsed", len(parsed_rows))
    parsed_rows.clear()
    report_value("looped", train_by_loop(nb.shard(make_batches())))
    report_value("parsed in the loop", len(parsed_rows))
    if with_predictions:
        report_value("apart whole", train_by_local_sgd(make_batches()))
        parsed_rows.clear()
        report_value("apart", train_by_local_sgd(nb.shard(make_batches())))
        report_value("parsed apart", len(parsed_rows))
    report_value("misread", read_outside_step())
    report_value("unlike", train_in_different_orders())


if __name__ == "__main__":
    with nb.init():
        main(bool(sys.argv[1:]))
