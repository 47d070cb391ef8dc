"""Worker: trains on batches of which it reads its own rows, by `fit` and in a loop; reports the results, and which rows
were parsed. One process trains on whole batches.
"""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.two_cluster_model import hexed
from tests.processes.worker_reports import bits, tell

ROWS, BATCH, WIDE = 44, 8, 6
MICRO_BATCHES = 2
"""One for each replica: so none is ever given to another one, as it is faster, and sums are made in the same order."""
parsed: list[int] = []


def read(number: Any) -> Any:
    """What is dear to read of a row; notes that it was read."""
    parsed.append(int(number))
    return np.random.default_rng(int(number)).normal(size=WIDE).astype("float32")


def row(number: Any) -> Any:
    x = tf.ensure_shape(tf.numpy_function(read, [number], tf.float32), [WIDE])
    return x, tf.reduce_sum(x, keepdims=True)


def rows(seed: int | None = 3) -> tf.data.Dataset:
    return tf.data.Dataset.range(ROWS).map(row).shuffle(ROWS, seed=seed).batch(BATCH)


def stages(x: Any, front: Any, back: Any) -> Any:
    """Two replicas in c0, one of another stage in c1."""
    with nb.cluster(), nb.pipeline(MICRO_BATCHES):
        with nb.replica(2), nb.stage(cluster="c0"):
            hidden = front(x)
        with nb.replica(1), nb.stage(cluster="c1"):
            return back(hidden)


def layers() -> tuple[keras.layers.Layer, keras.layers.Layer]:
    return (
        keras.layers.Dense(5, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2)),
    )


def fitted(train: tf.data.Dataset, evaluation: tf.data.Dataset, more: bool) -> dict[str, Any]:
    """Two epochs, with a validation after each; with `more` what the model then makes of the rows, batch by batch."""
    inputs = keras.Input((WIDE,))
    model = keras.Model(inputs, stages(inputs, *layers()))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    history = model.fit(train, validation_data=evaluation, epochs=2, verbose=0).history
    predicted = [bits([model.predict(evaluation, verbose=0)])] if more else []
    if more:
        predicted += [[float(each).hex() for each in model.train_on_batch(x, y)] for x, y in train.take(3)]
    # what goes on for ever comes last: how often tf.data shuffles ahead of time is left to chance
    again = model.fit(train.repeat(), epochs=2, steps_per_epoch=4, verbose=0).history
    with nb.gathered():
        weights = bits(model.variables)
    return {"history": [hexed(history), hexed(again)], "predicted": predicted, "weights": weights}


def looped(train: tf.data.Dataset) -> dict[str, Any]:
    """A loop of one's own."""
    front, back = layers()
    front.build((None, WIDE))
    back.build((None, 5))
    held = [*front.trainable_variables, *back.trainable_variables]
    optimizer = keras.optimizers.SGD(0.05)
    optimizer.build(held)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((stages(x, front, back) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, held), held, strict=True))
        return loss

    losses = [float(step(x, y)).hex() for _ in range(2) for x, y in train]
    with nb.gathered():
        return {"losses": losses, "weights": bits(held)}


def apart(train: tf.data.Dataset) -> dict[str, Any]:
    """Each cluster on its part of every batch, of which its workers take micro-batches."""
    inputs = keras.Input((WIDE,))
    front, back = layers()
    model = keras.Model(inputs, back(front(inputs)))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    with nb.cluster(), nb.replica(sync_every=2, delay=0):
        history = model.fit(train, epochs=2, verbose=0).history
    with nb.gathered():
        return {"history": hexed(history), "weights": bits(model.variables)}


def doubled(x: Any) -> Any:
    """A step without weights."""
    return tf.reduce_sum(stages(x, _twice, _first))


def _twice(x: Any) -> Any:
    return 2.0 * x


def _first(x: Any) -> Any:
    return x[:, :1]


def misread() -> str:
    """Compute with batches outside the step: what it ends in, where tf.data has not made whole ones ahead of time."""
    step, said = nb.function(doubled), ""
    for x, _ in nb.shard(rows()).repeat(2):
        step(x)
        try:
            x * 2.0
        except nb.errors.AbsentInputError as error:
            said = said or str(error)
    return said


def unlike() -> str:
    """Train on rows that each process puts into an order of its own: what it ends in."""
    step = nb.function(doubled)
    try:
        for x, _ in nb.shard(rows(seed=1 if nb.here().worker == "c0/1" else 2)):
            float(step(x))
    except nb.errors.NebulaError as error:
        return str(error)
    return ""


def whole(more: bool) -> None:
    """Tells what comes of whole batches."""
    tell("fitted", fitted(rows(), rows(), more))
    tell("looped", looped(rows()))


def main(more: bool) -> None:
    """With `more` of what is fitted, and clusters that train apart."""
    tell("fitted", fitted(nb.shard(rows()), nb.shard(rows()), more))
    tell("parsed", len(parsed))
    parsed.clear()
    tell("looped", looped(nb.shard(rows())))
    tell("parsed in the loop", len(parsed))
    if more:
        tell("apart whole", apart(rows()))
        parsed.clear()
        tell("apart", apart(nb.shard(rows())))
        tell("parsed apart", len(parsed))
    tell("misread", misread())
    tell("unlike", unlike())


if __name__ == "__main__":
    with nb.init():
        main(bool(sys.argv[1:]))
