"""The models of parity tests, each written once and built with or without scopes.

Every entry is a `Case`. `Cut(0)` omits the scope lines.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import Case, Cut, Outcome, data

layers = keras.layers


class RecordingOptimizer(keras.optimizers.Optimizer):
    """An optimizer that keeps the gradients of its first step."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        if not hasattr(self, "first"):
            self.first = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is not None:
            with tf.init_scope():
                self.build(trainable_variables)
        for gradient, recorded in zip(grads, self.first, strict=False):
            if gradient is not None:
                fresh = tf.cast(tf.equal(tf.convert_to_tensor(self.iterations), 0), tf.float32)
                recorded.assign(tf.convert_to_tensor(gradient) * fresh + recorded * (1.0 - fresh))
        return super().apply(grads, trainable_variables)


class RecordingAdam(RecordingOptimizer, keras.optimizers.Adam):
    """The optimizer of models that test optimizers."""


class RecordingMomentum(RecordingOptimizer, keras.optimizers.SGD):
    """The optimizer of all other models, traced in half the time."""


def build_adam(rate: float = 1e-2, **options: Any) -> RecordingAdam:
    """Adam: eps is large enough that noise in a zero gradient stays noise."""
    return RecordingAdam(rate, epsilon=1e-3, **options)


def build_sgd(rate: float = 1e-1, **options: Any) -> RecordingMomentum:
    """SGD with momentum, at ten times the rate of Adam."""
    return RecordingMomentum(rate, momentum=0.9, **options)


def fit(model: Any, cut: Cut, *args: Any, epochs: int = 2, batch_size: int = 16, **kwargs: Any) -> Outcome:
    """Run `fit` and collect the outcome."""
    history = model.fit(*args, epochs=epochs, batch_size=batch_size, shuffle=False, verbose=0, **kwargs).history
    found = Outcome(history=history, losses=list(history["loss"]))
    with nb.gathered():
        found.gradients = [np.array(v) for v in getattr(model.optimizer, "first", ())]
        found.weights = [np.array(v) for v in model.trainable_variables]
    if cut.stages:
        found.stages = tuple(nb.last_report().stages)
    return found


def train_functional(cut: Cut) -> Outcome:
    """Skip connection over a stage, sample weights, AdamW with global-norm clipping, metrics, a ragged last batch."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,), name="features")
    with cut.program():
        with cut.at(0):
            first = layers.Dense(16, activation="gelu")(inputs)
        with cut.at(1):
            second = layers.LayerNormalization()(layers.Dense(16, activation="tanh")(first))
        with cut.at(2):
            outputs = layers.Dense(3)(layers.Add()([first, second]))
    model = keras.Model(inputs, outputs)
    model.compile(build_adam(weight_decay=0.01, global_clipnorm=0.5), "mse", metrics=["mae"], weighted_metrics=["mse"])
    x, y = data(73, 8), data(73, 3, seed=1)
    weights = np.random.default_rng(2).random(73).astype("float32")
    return fit(model, cut, x, y, sample_weight=weights)


class Reader(keras.Model):
    """Attention, a GRU and a tied embedding."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.embedding = layers.Embedding(50, 16, mask_zero=True)
        self.attention = layers.MultiHeadAttention(2, 8)
        self.norm = layers.LayerNormalization()
        self.gru = layers.GRU(16, return_sequences=True)

    def call(self, tokens: Any) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.embedding(tokens)
            with self.cut.at(1):
                hidden = self.norm(hidden + self.attention(hidden, hidden))
            with self.cut.at(2):
                hidden = self.gru(hidden)
                return tf.matmul(hidden, self.embedding.embeddings, transpose_b=True)


def train_subclassed(cut: Cut) -> Outcome:
    """Built lazily: its first act is `fit`."""
    keras.utils.set_random_seed(4)
    model = Reader(cut)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(build_sgd(), loss, metrics=["accuracy"])
    tokens = np.random.default_rng(5).integers(0, 50, (40, 6))
    return fit(model, cut, tokens, np.roll(tokens, 1, axis=1), batch_size=8)


def train_sequential(cut: Cut) -> Outcome:
    """Layers added one by one, an input first, so that Keras rebuilds at every `add`."""
    keras.utils.set_random_seed(6)
    model = keras.Sequential([keras.Input((8, 8, 1))])
    with cut.program():
        with cut.at(0):
            model.add(layers.Conv2D(4, 3, activation="relu"))
        with cut.at(1):
            model.add(layers.Flatten())
            model.add(layers.Dense(16, activation="relu", kernel_regularizer="l2"))
        with cut.at(2):
            model.add(layers.Dense(5, activation="softmax"))
    model.compile(build_sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fit(model, cut, data(44, 8, 8, 1), np.random.default_rng(7).integers(0, 5, 44))


def _run_loop(step: Any, batches: Any, variables: Any, cut: Cut) -> Outcome:
    found = Outcome()
    for number, batch in enumerate(batches):
        loss, gradients = step(*batch)
        found.losses.append(float(loss))
        if number == 0:
            found.gradients = [np.array(tf.convert_to_tensor(g)) for g in gradients if g is not None]
    with nb.gathered():
        found.weights = [np.array(v) for v in variables]
    if cut.stages:
        found.stages = tuple(nb.last_report().stages)
    return found


def train_token_loop(cut: Cut) -> Outcome:
    """A custom loop whose loss is divided by a sum of token weights, with a batch that does not divide."""
    keras.utils.set_random_seed(8)
    parts = [layers.Dense(12, activation="gelu"), layers.Dense(12, activation="gelu"), layers.Dense(7)]
    for part, width in zip(parts, (6, 12, 12), strict=True):
        part.build((None, 5, width))
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    variables = [v for part in parts for v in part.trainable_variables]
    sgd.build(variables)

    @cut.function
    def step(x: Any, y: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            hidden = x
            for third, part in enumerate(parts):
                with cut.at(third):
                    hidden = part(hidden)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden)
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        gradients = tape.gradient(loss, variables)
        sgd.apply_gradients(zip(gradients, variables, strict=True))
        return loss, gradients

    random = np.random.default_rng(9)
    batches = [
        (data(10, 5, 6, seed=n), random.integers(0, 7, (10, 5)), random.random((10, 5)).astype("float32"))
        for n in range(10)
    ]
    return _run_loop(step, batches, variables, cut)


@tf.custom_gradient
def _squash(x: Any) -> Any:
    """A custom gradient that closes over a tensor of the trace."""
    y = tf.tanh(x)
    return y, lambda d: d * (1.0 - y * y)


def train_control_flow(cut: Cut) -> Outcome:
    """cond, while and a custom gradient on bare variables."""
    random = np.random.default_rng(10)
    variables = [tf.Variable(random.standard_normal((4, 4)).astype("float32") * 0.5, name=f"w{n}") for n in range(3)]

    @cut.function
    def step(x: Any, y: Any, sign: Any) -> Any:
        first, second, third = variables
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = _squash(x @ first)
            with cut.at(1):
                hidden = tf.while_loop(
                    lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ second) + h), [tf.constant(0), hidden]
                )[1]
            with cut.at(2):
                hidden = tf.cond(sign > 0.0, lambda: hidden @ third, lambda: tf.sin(hidden) @ third)
            loss = tf.reduce_mean(tf.square(hidden - y))
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss, gradients

    batches = [(data(7, 4, seed=n), data(7, 4, seed=20 + n), np.float32((-1) ** n)) for n in range(10)]
    return _run_loop(step, batches, variables, cut)


def train_accumulated(cut: Cut) -> Outcome:
    """Gradients that are summed by hand; every third step a cond applies them, and returns a number."""
    random = np.random.default_rng(11)
    variables = [keras.Variable(random.standard_normal((4, 4)).astype("float32") * 0.5, name=f"w{n}") for n in range(3)]
    sums, count = [tf.Variable(tf.zeros_like(each), trainable=False) for each in variables], tf.Variable(0)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(variables)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            for place, variable in enumerate(variables):
                with cut.at(place):
                    x = tf.tanh(x @ variable)
            loss = tf.reduce_mean(tf.square(x - y))
        gradients = tape.gradient(loss, variables)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        count.assign_add(1)

        def apply() -> Any:
            optimizer.apply_gradients([(total / 3.0, each) for total, each in zip(sums, variables, strict=True)])
            for total in sums:
                total.assign(tf.zeros_like(total))
            return optimizer.iterations + 0

        applied = tf.cond(count % 3 == 0, apply, lambda: tf.constant(0, optimizer.iterations.dtype))
        return loss, [*gradients, applied]

    batches = [(data(7, 4, seed=n), data(7, 4, seed=20 + n)) for n in range(10)]
    return _run_loop(step, batches, variables, cut)


def train_adversarial(cut: Cut) -> Outcome:
    """Trains on inputs that a gradient has moved, with a penalty on the gradient of these inputs. The last stage has a
    slow copy of the first weights, by a rate that follows from a counter of the step.
    """
    random = np.random.default_rng(15)
    variables = [tf.Variable(random.standard_normal((4, 4)).astype("float32") * 0.5, name=f"v{n}") for n in range(4)]
    count = tf.Variable(0.0, name="count")
    *trained, slow = variables

    def forward(x: Any) -> Any:
        first, second, third = trained
        with cut.program():
            with cut.at(0):
                hidden = tf.tanh(x @ first)
            with cut.at(1):
                hidden = tf.tanh(hidden @ second)
            with cut.at(2):
                return hidden @ third + tf.stop_gradient(x @ slow)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            clean = tf.reduce_mean(tf.square(forward(x) - y))
        moved = x + 5.0 * tape.gradient(clean, x)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(moved)
                outputs = forward(moved)
            slope = inner.gradient(outputs, moved)
            loss = tf.reduce_mean(tf.square(outputs - y)) + 0.1 * tf.reduce_mean(tf.square(slope))
        gradients = tape.gradient(loss, trained)
        for variable, gradient in zip(trained, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        count.assign_add(1.0)
        rate = tf.abs(tf.cos(count))
        slow.assign((1.0 - rate) * slow + rate * trained[0])
        return loss, gradients

    return _run_loop(step, [(data(7, 4, seed=n), data(7, 4, seed=20 + n)) for n in range(10)], variables, cut)


class Gan(keras.Model):
    """Keras's own example: one step, two tapes, the second after the first one's update."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(16, activation="relu"), layers.Dense(6)])
        self.body = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="relu")])
        self.head = keras.Sequential([keras.Input((16,)), layers.Dense(1)])
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> Any:
        return [self.d_loss, self.g_loss]

    def discriminate(self, images: Any) -> Any:
        with self.cut.at(1):
            hidden = self.body(images)
        with self.cut.at(2):
            return self.head(hidden)

    def train_step(self, batch: Any) -> Any:
        (real, noise, other_noise), _ = batch
        rows = tf.shape(real)[0]
        discriminator_weights = self.body.trainable_weights + self.head.trainable_weights
        with self.cut.program():
            with self.cut.at(0):
                fake = self.generator(noise)
                images = tf.concat([fake, real], axis=0)
                labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminate(images))
            gradients = tape.gradient(d_loss, discriminator_weights)
            self.d_optimizer.apply_gradients(zip(gradients, discriminator_weights, strict=True))
            with tf.GradientTape() as tape:
                with self.cut.at(0):
                    fake = self.generator(other_noise)
                g_loss = self.loss_fn(tf.zeros((rows, 1)), self.discriminate(fake))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def call(self, batch: Any) -> Any:
        return self.discriminate(self.generator(batch[1]))


def train_gan(cut: Cut) -> Outcome:
    """Two phases: the generator's forward reads what the discriminator's update wrote."""
    keras.utils.set_random_seed(11)
    model = Gan(cut)
    model.compile(build_sgd(), build_sgd(), keras.losses.BinaryCrossentropy(from_logits=True))
    x = (data(36, 6), data(36, 4, seed=1), data(36, 4, seed=2))
    history = model.fit(x, np.zeros(36), epochs=2, batch_size=8, shuffle=False, verbose=0).history
    found = Outcome(history=history, losses=[*history["d_loss"], *history["g_loss"]])
    with nb.gathered():
        found.gradients = [np.array(v) for o in (model.d_optimizer, model.g_optimizer) for v in o.first]
        found.weights = [np.array(v) for v in model.trainable_variables]
    if cut.stages:
        found.stages = tuple(nb.last_report().stages)
    return found


def train_frozen(cut: Cut) -> Outcome:
    """A frozen first part and a variable that the loss does not touch: gradients that are None."""
    keras.utils.set_random_seed(12)
    parts = [layers.Dense(8, activation="relu"), layers.Dense(8, activation="relu"), layers.Dense(2)]
    for part, width in zip(parts, (5, 8, 8), strict=True):
        part.build((None, width))
    unused = tf.Variable([1.0, 2.0])
    variables = [*parts[1].trainable_variables, *parts[2].trainable_variables, unused]

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            hidden = x
            for third, part in enumerate(parts):
                with cut.at(third):
                    hidden = part(hidden)
            loss = tf.reduce_mean(tf.square(hidden - y))
        gradients = tape.gradient(loss, variables)
        if gradients[-1] is not None:
            raise AssertionError("the unused variable got a gradient")
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * gradient)
        return loss, gradients

    batches = [(data(9, 5, seed=n), data(9, 2, seed=30 + n)) for n in range(10)]
    return _run_loop(step, batches, [v for part in parts for v in part.variables], cut)


def run_inference(cut: Cut) -> Outcome:
    """A function without any gradient; its rows come back in their order."""
    keras.utils.set_random_seed(13)
    parts = [layers.Dense(8, activation="relu"), layers.Dense(8, activation="relu"), layers.Dense(3)]
    for part, width in zip(parts, (5, 8, 8), strict=True):
        part.build((None, width))

    @cut.function
    def predict(x: Any) -> Any:
        with cut.program():
            hidden = x
            for third, part in enumerate(parts):
                with cut.at(third):
                    hidden = part(hidden)
            return tf.nn.softmax(hidden), tf.reduce_mean(hidden)

    found = Outcome()
    for number in range(3):
        probabilities, mean = predict(data(7, 5, seed=number))
        found.outputs.append(np.array(probabilities))
        found.losses.append(float(mean))
    if cut.stages:
        found.stages = tuple(nb.last_report().stages)
    return found


def train_scaled(cut: Cut, **options: Any) -> Outcome:
    """Loss scaling: one cond applies every stage's gradients; the scale overflows, shrinks, and grows again."""
    keras.utils.set_random_seed(14)
    inputs = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(12, activation="tanh")(inputs)
        with cut.at(1):
            hidden = layers.Dense(12, activation="tanh")(hidden)
        with cut.at(2):
            outputs = layers.Dense(2)(hidden)
    model = keras.Model(inputs, outputs)
    inner = build_adam(weight_decay=0.01, global_clipnorm=0.5, **options)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**125, dynamic_growth_steps=3), "mse")
    found = fit(model, cut, data(73, 6), 300.0 * data(73, 2, seed=1))
    with nb.gathered():
        found.gradients = [np.array(v) for v in inner.first]
        counts = [np.array(v, "float64") for v in model.optimizer.variables[:6]]
    found.outputs = [*counts[:3], np.log2(counts[3]), *counts[4:]]
    return found


def train_scaled_in_turns(cut: Cut) -> Outcome:
    """The same with conds in that cond: gradients are accumulated over two steps, and averages overwrite weights."""
    return train_scaled(cut, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)


ZOO = {
    "functional": Case(train_functional),
    "subclassed": Case(train_subclassed),
    "sequential": Case(train_sequential),
    "token_loop": Case(train_token_loop, rate=0.1),
    "control_flow": Case(train_control_flow, rate=0.1),
    "gan": Case(train_gan, rate=1e-2),
    "frozen": Case(train_frozen, rate=0.1),
    "inference": Case(run_inference),
    "scaled": Case(train_scaled, grid_only=True),
    "scaled_in_turns": Case(train_scaled_in_turns, grid_only=True),
    "accumulated": Case(train_accumulated, rate=0.1, grid_only=True),
    "adversarial": Case(train_adversarial, micro=(1,), rate=0.1, grid_only=True),
}
