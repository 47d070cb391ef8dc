"""Arguments and results of a step: nested structures, Python values, methods, options."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    descend,
    differentiate,
    learn,
    mse,
    normal,
    rows,
    script,
    step_script,
    train_loop,
    weights,
)


@dataclasses.dataclass
class Batch:
    """A batch as a dataclass that tf.nest looks into."""

    x: Any
    y: Any
    name: str = "batch"

    def __tf_flatten__(self) -> Any:
        return (self.name,), (self.x, self.y)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        return cls(*components, *metadata)


class Sample(tf.experimental.ExtensionType):
    """A batch as an extension type."""

    x: tf.Tensor
    y: tf.Tensor


def packed(cut: Cut, unpack: Any, batches: Any, pack: Any = lambda loss, outputs, gradients: loss) -> Loop:
    """A loop whose only argument is unpacked by `unpack`, and whose results are packed by `pack`."""
    w = weights()

    @cut.function
    def step(batch: Any) -> Any:
        x, y = unpack(batch)
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return pack(loss, outputs, gradients)

    return Loop(step, w, [(batch,) for batch in batches])


@script()
def a_dict(cut: Cut) -> Loop:
    batches = [{"features": {"x": x}, "label": y} for x, y in rows()]
    return packed(cut, lambda b: (b["features"]["x"], b["label"]), batches)


@script()
def a_dataclass(cut: Cut) -> Loop:
    batches = [Batch(tf.constant(x), tf.constant(y)) for x, y in rows()]
    return packed(cut, lambda b: (b.x, b.y), batches)


@script(micro=(1,))
def an_extension_type(cut: Cut) -> Loop:
    batches = [Sample(tf.constant(x), tf.constant(y)) for x, y in rows()]
    return packed(cut, lambda b: (b.x, b.y), batches)


@script()
def everything_returned(cut: Cut) -> Loop:
    """None, Python numbers and strings, rows, gradients, variables' values, an empty list."""

    def pack(loss: Any, outputs: Any, gradients: Any) -> Any:
        return {"loss": loss, "none": None, "rows": outputs, "gradients": gradients, "empty": [], "t": (outputs[:, 0],)}

    return packed(cut, lambda b: b, rows(), pack)


@step_script()
def inputs_returned(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    loss, gradients = differentiate(cut, w, x, y)
    descend(w, gradients)
    return x, loss, y, x


@step_script()
def constants_returned(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    learn(cut, w, x, y)
    return tf.constant([1, 2, 3]), 3.5, w[0], tf.zeros([2, 2])


@script()
def keywords_and_defaults(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any = None, *, rate: float = 0.1, double: bool = False, names: Any = ("a", "b")) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w) * (2.0 if double else 1.0)
            loss = tf.reduce_mean(outputs**2) if y is None else mse(y, outputs)
        descend(w, tape.gradient(loss, w), rate)
        return loss, len(names)

    x, y = rows(1)[0]
    return Loop(step, w, [((x,), {}), ((x,), {"y": y}), ((x, y), {"rate": 0.05, "double": True}), ((x, None), {})])


@script()
def python_numbers(cut: Cut) -> Loop:
    """A Python number is part of the program: another number is another program."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any, power: int, rate: float, how: str) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = tf.reduce_mean(tf.abs(chain(cut, x, w) - y) ** power)
        descend(w, tape.gradient(loss, w), rate if how == "slow" else 2.0 * rate)
        return loss

    calls = [(2, 0.1, "slow"), (3, 0.1, "fast"), (2, 0.05, "slow"), (2, 0.1, "slow")]
    return Loop(step, w, [(*b, *c) for b, c in zip(rows(4), calls, strict=True)])


@script()
def numpy_scalars(cut: Cut) -> Loop:
    """A numpy scalar and a scalar tensor are fed, not part of the program."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any, rate: Any, shift: Any) -> Any:
        return learn(cut, w, x + shift, y, rate)

    calls = [(np.float32(0.1 / (n + 1)), tf.constant(0.1 * n)) for n in range(3)]
    return Loop(step, w, [(*b, *c) for b, c in zip(rows(), calls, strict=True)])


@script()
def none_among_the_leaves(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(batch: Any) -> Any:
        x, y, sample_weight = batch
        with tf.GradientTape() as tape, cut.program():
            losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
            loss = tf.reduce_mean(losses if sample_weight is None else losses * sample_weight)
        descend(w, tape.gradient(loss, w))
        return loss

    weighted = [((*b, None if n == 1 else np.abs(normal(6, seed=n))),) for n, b in enumerate(rows())]
    return Loop(step, w, weighted)


@script()
def an_argument_for_all(cut: Cut) -> Loop:
    """`whole=`: a table that is not a batch, beside a batch."""
    w = weights()

    def step(x: Any, y: Any, table: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x @ table, w)
            loss = mse(y, outputs)
        descend(w, tape.gradient(loss, w))
        return loss, outputs

    function = nb.function(whole=("table",))(step) if cut.stages else tf.function(step)
    return Loop(function, w, [(*b, normal(4, 4, seed=50 + n)) for n, b in enumerate(rows())])


@script()
def a_growing_and_shrinking_batch(cut: Cut) -> Loop:
    w = weights()
    sizes = (6, 5, 8, 4)

    @train_loop(cut, w, calls=[(normal(n, 4, seed=n), normal(n, 4, seed=30 + n)) for n in sizes])
    def loop(x: Any, y: Any) -> Any:
        outputs = chain(cut, x, w)
        loss = mse(y, outputs)
        return loss, outputs

    return loop


class Trainer:
    """A class with a decorated method."""

    def __init__(self, cut: Cut) -> None:
        self.cut, self.w, self.rate, self.calls = cut, weights(), 0.1, 0

    def _step(self, x: Any, y: Any, *, rate: Any = None) -> Any:
        return learn(self.cut, self.w, x, y, rate or self.rate)

    plain = tf.function(_step)
    planned = nb.function(_step)

    @property
    def step(self) -> Any:
        return self.planned if self.cut.stages else self.plain


@script()
def a_method(cut: Cut) -> Loop:
    trainer = Trainer(cut)

    def step(x: Any, y: Any, n: int) -> Any:
        return trainer.step(x, y, rate=0.1 * n)

    return Loop(step, trainer.w, [(*b, n + 1) for n, b in enumerate(rows())])


class Part(tf.Module):
    """A layer of one's own that makes its variable on its first call."""

    def __init__(self, seed: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self.seed, self.w = seed, None

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        if self.w is None:
            self.w = tf.Variable(normal(x.shape[-1], 4, seed=self.seed) * 0.5, name="w")
        return tf.tanh(x @ self.w)


class Network(tf.Module):
    """A model of tf.Modules; the step is its own method."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(name="network")
        self.cut, self.parts = cut, [Part(n, f"part{n}") for n in range(3)]
        self.scale = tf.Variable(1.0, trainable=False)

    @tf.Module.with_name_scope
    def __call__(self, x: Any) -> Any:
        for n, part in enumerate(self.parts):
            with self.cut.at(n):
                x = part(x)
        return x * self.scale

    def _step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, self.cut.program():
            loss = mse(y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        descend(self.trainable_variables, gradients)
        self.scale.assign(self.scale * 0.99)
        return loss, gradients


class PlainNetwork(Network):
    step = tf.function(Network._step)


class PlannedNetwork(Network):
    step = nb.function(Network._step)


@script()
def modules_built_in_the_step(cut: Cut) -> Loop:
    """Variables made in the first trace."""
    network = (PlannedNetwork if cut.stages else PlainNetwork)(cut)

    def step(x: Any, y: Any) -> Any:
        found = network.step(x, y)
        return found, [v.read_value() for v in network.variables]

    return Loop(step, [], rows())


@script()
def a_keras_model_in_a_loop(cut: Cut) -> Loop:
    """A functional model with scopes, its loss and metrics, trained by hand; regularised."""
    inputs = keras.Input((4,))
    with cut.program():
        with cut.at(0):
            hidden = keras.layers.Dense(6, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
        with cut.at(1):
            hidden = keras.layers.LayerNormalization()(hidden)
        with cut.at(2):
            outputs = keras.layers.Dense(4)(hidden)
    model = keras.Model(inputs, outputs)
    chosen, entropy = keras.optimizers.Adam(0.01, epsilon=1e-3), keras.losses.MeanSquaredError()
    chosen.build(model.trainable_variables)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = entropy(y, outputs) + tf.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_weights)
        chosen.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return {"loss": loss, "outputs": outputs}

    return Loop(step, [*model.variables, *chosen.variables], rows())


@script()
def evaluation(cut: Cut) -> Loop:
    """Training and testing functions over the same weights, and a metric between them."""
    w, mean = weights(), keras.metrics.Mean()

    @cut.function
    def train(x: Any, y: Any) -> Any:
        return learn(cut, w, x, y)

    @cut.function
    def test(x: Any, y: Any) -> Any:
        with cut.program():
            outputs = chain(cut, x, w)
        mean.update_state(tf.reduce_mean((outputs - y) ** 2, axis=1))
        return outputs

    def step(x: Any, y: Any) -> Any:
        return train(x, y), test(y, x), mean.result()

    return Loop(step, [*w, *mean.variables], rows())


@script()
def no_variables_at_all(cut: Cut) -> Loop:
    @cut.function
    def step(x: Any, y: Any) -> Any:
        with cut.program():
            with cut.at(0):
                x = tf.sin(x)
            with cut.at(1):
                x = x + y
            with cut.at(2):
                return tf.nn.softmax(x), tf.reduce_mean(x)

    return Loop(step, [], rows())


@script(micro=(1,))
def an_iterator(cut: Cut) -> Loop:
    """The step takes its own batch from a dataset's iterator."""
    w = weights()
    data = tf.data.Dataset.from_tensor_slices(tuple(map(np.concatenate, zip(*rows(4), strict=True)))).batch(6)
    iterator = iter(data)

    @cut.function
    def step(batches: Any) -> Any:
        x, y = next(batches)
        return learn(cut, w, x, y)

    return Loop(step, w, [(iterator,)] * 3)


@script()
def a_partial(cut: Cut) -> Loop:
    w = weights()

    def train(rate: float, x: Any, y: Any) -> Any:
        return learn(cut, w, x, y, rate)

    return Loop(cut.function(functools.partial(train, 0.05)), w, rows())


class Callable:
    """An object that is called."""

    def __init__(self, cut: Cut) -> None:
        self.cut, self.w = cut, weights()

    def __call__(self, x: Any, y: Any) -> Any:
        return learn(self.cut, self.w, x, y)


@script()
def variables_as_arguments(cut: Cut) -> Loop:
    """Models and variables are handed to the step: each is a program of its own."""
    one, other = Callable(cut), Callable(cut)
    rate = tf.Variable(0.1)

    @cut.function
    def train(model: Any, x: Any, y: Any, rate: Any) -> Any:
        return learn(cut, model.w, x, y, rate)

    def step(x: Any, y: Any) -> Any:
        found = train(one, x, y, rate), train(other, y, x, rate)
        rate.assign(rate * 0.5)
        return found

    return Loop(step, [*one.w, *other.w], rows())
