"""What stands in a forward: control flow, state, random numbers, strings, checks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.loops.book import Cut, Loop, chain, descend, mse, normal, rows, script, weights


def within(cut: Cut, first: Any, second: Any = None, *, w: Any = None, more: Any = (), batches: Any = None) -> Loop:
    """A loop whose first and second parts are `first(x)` and `second(hidden)`; the third is a matrix."""
    w = weights() if w is None else w
    second = second or (lambda hidden: tf.tanh(hidden @ w[1]))

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = first(x)
            with cut.at(1):
                hidden = second(hidden)
            with cut.at(2):
                loss = mse(y, hidden @ w[2])
        gradients = tape.gradient(loss, w, unconnected_gradients="zero")
        descend(w, gradients)
        return loss, gradients

    return Loop(step, [*w, *more], batches or rows())


# ---------------------------------------------------------------------- control flow
@script()
def while_loop(cut: Cut) -> Loop:
    w = weights()

    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w[0])), (tf.constant(0), x))[1]

    return within(cut, looped, w=w)


@script()
def scan_over_time(cut: Cut) -> Loop:
    w = weights()

    def scanned(x: Any) -> Any:
        time = tf.transpose(tf.reshape(x, [-1, 3, 4]), [1, 0, 2])
        states = tf.scan(lambda h, t: tf.tanh(t + h @ w[0]), time, initializer=tf.zeros_like(time[0]))
        return states[-1]

    batches = [(normal(6, 12, seed=n), normal(6, 4, seed=30 + n)) for n in range(3)]
    return within(cut, scanned, w=w, batches=batches)


@script(micro=(1,))
def scan_over_rows(cut: Cut) -> Loop:
    """Along the batch: rows depend on each other. With one micro-batch it is exact."""
    w = weights()
    return within(cut, lambda x: tf.scan(lambda h, r: tf.tanh(r + 0.1 * h), x @ w[0]), w=w)


@script(micro=(1,), rarely=True)
def map_over_rows(cut: Cut) -> Loop:
    w = weights()
    return within(
        cut,
        lambda x: tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w[0], row)), x),
        lambda h: tf.map_fn(lambda row: tf.linalg.matvec(w[1], row), h, parallel_iterations=1),
        w=w,
    )


@script(micro=(1,))
def vectorized_over_rows(cut: Cut) -> Loop:
    w = weights()
    return within(cut, lambda x: tf.vectorized_map(lambda row: tf.tanh(tf.linalg.matvec(w[0], row)), x), w=w)


@script(micro=(1,))
def gradients_of_each_row(cut: Cut) -> Loop:
    """A gradient for each example, clipped alone (DP-SGD): the inner tape is part of what is vectorized."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        def of_row(row: Any) -> Any:
            features, label = row
            with tf.GradientTape() as tape:
                tape.watch(w[2])
                loss = mse(label, features[None] @ w[2])
            return tf.clip_by_norm(tape.gradient(loss, w[2]), 0.1)

        with cut.program():
            with cut.at(0):
                hidden = tf.tanh(x @ w[0])
            with cut.at(1):
                hidden = tf.tanh(hidden @ w[1])
            with cut.at(2):
                each = tf.vectorized_map(of_row, (hidden, y))
        w[2].assign_sub(tf.reduce_mean(each, axis=0))
        return each

    return Loop(step, w, rows())


@script(rarely=True)
def array_by_autograph(cut: Cut) -> Loop:
    """A TensorArray filled by AutoGraph's `for`."""
    w = weights()

    def unrolled(x: Any) -> Any:
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        hidden = x
        for n in tf.range(3):
            hidden = tf.tanh(hidden @ w[0])
            array = array.write(n, hidden)
        return tf.reduce_mean(array.stack(), axis=0)

    return within(cut, unrolled, w=w)


@script()
def cond_on_a_number(cut: Cut) -> Loop:
    w, turn = weights(), tf.Variable(0)

    @cut.function
    def step(x: Any, y: Any, flag: Any) -> Any:
        turn.assign_add(1)
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = tf.cond(flag > 0, lambda: tf.tanh(x @ w[0]), lambda: tf.sin(x @ w[0]))
            with cut.at(1):
                hidden = tf.cond(turn % 2 == 0, lambda: hidden @ w[1], lambda: tf.tanh(hidden @ w[1]))
            with cut.at(2):
                hidden = tf.switch_case(turn % 3, [lambda: hidden, lambda: 2.0 * hidden, lambda: tf.sin(hidden)])
                loss = mse(y, hidden @ w[2])
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    return Loop(step, [*w, turn], [(*b, np.float32((-1) ** n)) for n, b in enumerate(rows(4))])


@script()
def cond_by_autograph(cut: Cut) -> Loop:
    """Python's `if` on an argument, with a value that only one side makes."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any, deep: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = tf.tanh(x @ w[0])
                if deep:
                    extra = tf.sin(hidden)
                    hidden = hidden + extra
            with cut.at(1):
                hidden = tf.tanh(hidden @ w[1])
            with cut.at(2):
                loss = mse(y, hidden @ w[2])
        descend(w, tape.gradient(loss, w))
        return loss

    return Loop(step, w, [(*b, tf.constant(n != 1)) for n, b in enumerate(rows())])


@script(micro=(1,))
def cond_on_the_batch(cut: Cut) -> Loop:
    """A predicate that looks at all rows: exact with one micro-batch, coupled with more."""
    w = weights()

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        return tf.cond(tf.reduce_mean(hidden) > 0.0, lambda: tf.tanh(hidden), lambda: tf.sin(hidden))

    return within(cut, first, w=w)


@script(rarely=True)
def where_by_rows(cut: Cut) -> Loop:
    w = weights()

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        return tf.where(tf.reduce_mean(hidden, axis=1, keepdims=True) > 0.0, tf.tanh(hidden), tf.sin(hidden))

    return within(cut, first, w=w)


@script(rarely=True)
def recurrent(cut: Cut) -> Loop:
    keras.utils.set_random_seed(7)
    cell, lstm = keras.layers.GRU(4, return_sequences=True), keras.layers.LSTM(4)
    cell.build((None, 3, 4))
    lstm.build((None, 3, 4))
    w = [*cell.trainable_variables, *lstm.trainable_variables]

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = cell(tf.reshape(x, [-1, 3, 4]))
            with cut.at(1):
                hidden = lstm(hidden)
            with cut.at(2):
                loss = mse(y, hidden)
        gradients = tape.gradient(loss, w)
        descend([v.value for v in w], gradients)
        return loss, gradients

    return Loop(step, w, [(normal(6, 12, seed=n), normal(6, 4, seed=30 + n)) for n in range(3)])


# ---------------------------------------------------------------------- state
@script()
def moving_mean_by_hand(cut: Cut) -> Loop:
    """BatchNorm-like: the forward writes what the next step reads. Its mean is over the batch."""
    w, mean = weights(), tf.Variable(tf.zeros([4]), trainable=False)

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        centred = hidden - mean
        mean.assign(0.9 * mean + 0.1 * tf.stop_gradient(tf.reduce_mean(hidden, axis=0)))
        return tf.tanh(centred)

    return within(cut, first, w=w, more=[mean])


@script(micro=(1,))
def batch_norm_by_hand(cut: Cut) -> Loop:
    w, mean = weights(), tf.Variable(tf.zeros([4]), trainable=False)

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        middle, variance = tf.nn.moments(hidden, axes=[0])
        mean.assign_sub(0.1 * (mean - middle))
        return tf.nn.batch_normalization(hidden, middle, variance, None, None, 1e-3)

    return within(cut, first, w=w, more=[mean])


@script()
def spectral_norm_by_hand(cut: Cut) -> Loop:
    """The forward writes a vector that no row of the batch goes into."""
    w, u = weights(), tf.Variable(normal(4, 1, seed=8), trainable=False)

    def first(x: Any) -> Any:
        v = tf.math.l2_normalize(w[0] @ u)
        fresh = tf.math.l2_normalize(tf.transpose(w[0]) @ v)
        u.assign(tf.stop_gradient(fresh))
        sigma = tf.squeeze(tf.transpose(tf.stop_gradient(v)) @ w[0] @ tf.stop_gradient(fresh))
        return tf.tanh(x @ (w[0] / sigma))

    return within(cut, first, w=w, more=[u])


@script()
def counting_in_the_forward(cut: Cut) -> Loop:
    w, count, seen = weights(), tf.Variable(0.0), tf.Variable(0)

    def first(x: Any) -> Any:
        count.assign_add(1.0)
        seen.assign_add(tf.shape(x)[0])
        return tf.tanh(x @ w[0]) * (1.0 + 0.1 * count)

    return within(cut, first, w=w, more=[count, seen])


@script(micro=(1,))
def memory_bank(cut: Cut) -> Loop:
    """A queue of the last outputs, written with the batch's rows (MoCo)."""
    w, bank = weights(), tf.Variable(normal(12, 4, seed=3), trainable=False)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            with cut.at(2):
                keys = tf.nn.softmax(y @ tf.transpose(bank))
                loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(keys, outputs @ tf.transpose(bank)))
        descend(w, tape.gradient(loss, w))
        bank.assign(tf.concat([tf.stop_gradient(outputs), bank[:6]], axis=0))
        return loss

    return Loop(step, [*w, bank], rows())


@script()
def metrics_in_the_function(cut: Cut) -> Loop:
    w = weights()
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    root, area = keras.metrics.RootMeanSquaredError(), keras.metrics.AUC(num_thresholds=5)

    @cut.function
    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            loss = tf.reduce_mean(losses)
        descend(w, tape.gradient(loss, w))
        mean.update_state(loss)
        accuracy.update_state(labels, outputs)
        root.update_state(tf.one_hot(labels, 4), outputs)
        area.update_state(tf.one_hot(labels, 4), tf.nn.softmax(outputs))
        return {"loss": mean.result(), "accuracy": accuracy.result(), "root": root.result(), "area": area.result()}

    metrics = [v for m in (mean, accuracy, root, area) for v in m.variables]
    batches = [(normal(6, 4, seed=n), np.array([0, 1, 2, 3, 0, 1])) for n in range(3)]
    return Loop(step, [*w, *metrics], batches)


@script()
def metrics_of_rows(cut: Cut) -> Loop:
    """A mean fed with rows and weights, and one reset in the step."""
    w = weights()
    mean, fresh = keras.metrics.Mean(), keras.metrics.Mean()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        fresh.reset_state()
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        descend(w, tape.gradient(loss, w))
        mean.update_state(tf.reduce_mean(outputs, axis=1), sample_weight=tf.abs(y[:, 0]))
        fresh.update_state(outputs)
        return mean.result(), fresh.result()

    return Loop(step, [*w, *mean.variables, *fresh.variables], rows())


# ---------------------------------------------------------------------- random numbers
@script(micro=(1,))
def dropout_with_a_counted_seed(cut: Cut) -> Loop:
    w, count = weights(), tf.Variable(0)

    def first(x: Any) -> Any:
        return tf.nn.experimental.stateless_dropout(tf.tanh(x @ w[0]), 0.3, seed=[1, count])

    return within(cut, first, w=w, more=[count])


@script()
def counter_as_a_seed(cut: Cut) -> Loop:
    """A count of steps that seeds a draw: it must be the count of steps whatever the cut."""
    w, count = weights(), tf.Variable(0)

    def first(x: Any) -> Any:
        count.assign_add(1)
        scale = tf.random.stateless_uniform([], [3, count])
        return tf.tanh(x @ w[0]) * scale

    return within(cut, first, w=w, more=[count])


@script(micro=(1,), rarely=True)
def stateless_noise(cut: Cut) -> Loop:
    w = weights()
    return within(
        cut,
        lambda x: tf.tanh(x @ w[0]) + 0.1 * tf.random.stateless_normal(tf.shape(x), [1, 2]),
        lambda h: tf.nn.experimental.stateless_dropout(h @ w[1], 0.2, seed=[3, 4]),
        w=w,
    )


@script(micro=(1,))
def generator(cut: Cut) -> Loop:
    w, one, other = weights(), tf.random.Generator.from_seed(3), tf.random.Generator.from_seed(4)
    return within(
        cut,
        lambda x: tf.tanh(x @ w[0]) + 0.1 * one.normal(tf.shape(x)),
        lambda h: h @ w[1] * other.uniform([1, 4]) + other.normal([4]),
        w=w,
        more=[one.state, other.state],
    )


@script(micro=(1,), rarely=True)
def generator_in_two_parts(cut: Cut) -> Loop:
    w, chance = weights(), tf.random.Generator.from_seed(3)
    return within(
        cut,
        lambda x: tf.tanh(x @ w[0]) + 0.1 * chance.normal(tf.shape(x)),
        lambda h: h @ w[1] * chance.uniform([1, 4]),
        w=w,
        more=[chance.state],
    )


@script(micro=(1,))
def keras_seeds_in_two_parts(cut: Cut) -> Loop:
    w, seed = weights(), keras.random.SeedGenerator(4)
    return within(
        cut,
        lambda x: tf.tanh(x @ w[0]) + keras.random.normal((1, 4), seed=seed),
        lambda h: h @ w[1] * keras.random.uniform((1, 4), seed=seed),
        w=w,
        more=[seed.state],
    )


@script()
def generator_in_the_update(cut: Cut) -> Loop:
    """Langevin: the noise is drawn once a step."""
    w, chance = weights(), tf.random.Generator.from_seed(3)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x, w))
        gradients = tape.gradient(loss, w)
        descend(w, [g + 0.1 * chance.normal(g.shape) for g in gradients])
        return loss

    return Loop(step, [*w, chance.state], rows())


@script()
def generator_before_the_forward(cut: Cut) -> Loop:
    """One number drawn for the whole batch, before it: stochastic depth."""
    w, chance = weights(), tf.random.Generator.from_seed(3)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        keep = chance.uniform([])
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, keep * chain(cut, x, w))
        descend(w, tape.gradient(loss, w))
        return loss, keep

    return Loop(step, [*w, chance.state], rows())


@script()
def a_number_for_all_parts(cut: Cut) -> Loop:
    """A temperature made of a variable outside any part: read in two of them, returned, and trained."""
    w, log = weights(), tf.Variable(0.3)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            temperature = tf.exp(log)
            with cut.at(0):
                hidden = tf.tanh(x @ w[0]) / temperature
            with cut.at(1):
                hidden = tf.tanh(hidden @ w[1]) * temperature
            with cut.at(2):
                loss = mse(y, hidden @ w[2] / temperature)
        gradients = tape.gradient(loss, [*w, log])
        descend([*w, log], gradients)
        return loss, temperature, gradients

    return Loop(step, [*w, log], rows())


@script()
def drawn_before_the_forward(cut: Cut) -> Loop:
    """The same from TensorFlow's own seeds: drawn once, used in two parts, and returned."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        keep, tilt = tf.random.uniform([]), tf.random.normal([4], seed=3)
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = tf.tanh(x @ w[0]) * keep
            with cut.at(1):
                hidden = tf.tanh(hidden @ w[1]) + tilt
            with cut.at(2):
                loss = mse(y, keep * (hidden @ w[2]))
        descend(w, tape.gradient(loss, w))
        return loss, keep, tilt

    return Loop(step, w, rows())


@script(rarely=True)
def drawn_in_the_update(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x, w))
        descend(w, [g + 0.1 * tf.random.normal(g.shape) for g in tape.gradient(loss, w)])
        return loss

    return Loop(step, w, rows())


@script(micro=(1,), rarely=True)
def seeded_by_op(cut: Cut) -> Loop:
    w = weights()
    return within(
        cut,
        lambda x: tf.tanh(x @ w[0]) + tf.random.normal([1, 4], seed=5),
        lambda h: tf.nn.dropout(h @ w[1], 0.3, seed=6),
        w=w,
    )


@script(micro=(1,), rarely=True)
def keras_dropout(cut: Cut) -> Loop:
    w, drop = weights(), keras.layers.Dropout(0.3, seed=4)
    return within(cut, lambda x: drop(tf.tanh(x @ w[0]), training=True), w=w, more=drop.variables)


@script(micro=(1,), rarely=True)
def keras_seed_generator(cut: Cut) -> Loop:
    w, seed = weights(), keras.random.SeedGenerator(4)
    return within(cut, lambda x: tf.tanh(x @ w[0]) + keras.random.normal((1, 4), seed=seed), w=w, more=[seed.state])


@script(micro=(1,))
def noise_drawn_outside(cut: Cut) -> Loop:
    """What is drawn for the batch before any stage has its rows from the batch."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        noise = tf.random.stateless_normal(tf.shape(x), [1, 2])
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x + 0.1 * noise, w))
        descend(w, tape.gradient(loss, w))
        return loss

    return Loop(step, w, rows())


# ---------------------------------------------------------------------- kinds of tensors
@script()
def strings(cut: Cut) -> Loop:
    """Words looked up in a table, inside the first part; strings come back."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], tf.constant([0, 1, 2], tf.int64)), 3
    )
    embeddings, w = tf.Variable(normal(4, 4, seed=2)), weights()

    @cut.function
    def step(words: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                x = tf.gather(embeddings, table.lookup(words))
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        variables = [embeddings, *w]
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        return loss, tf.strings.join([words, tf.strings.as_string(tf.argmax(outputs, axis=1))])

    words = np.array([b"a", b"c", b"x", b"b", b"a", b"b"])
    return Loop(step, [embeddings, *w], [(np.roll(words, n), normal(6, 4, seed=n)) for n in range(3)])


@script()
def doubles_and_complex(cut: Cut) -> Loop:
    w = [tf.Variable(normal(4, 4, seed=90 + n).astype("float64") * 0.5) for n in range(3)]

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                wave = tf.signal.fft(tf.cast(x @ w[0], tf.complex128))
            with cut.at(1):
                hidden = tf.math.real(tf.signal.ifft(wave * tf.cast(w[1][0], tf.complex128)))
            with cut.at(2):
                loss = tf.reduce_mean((hidden @ w[2] - y) ** 2)
        gradients = tape.gradient(loss, w)
        descend(w, gradients, 0.01)
        return loss, gradients, wave

    return Loop(step, w, [tuple(part.astype("float64") for part in batch) for batch in rows()])


@script(rarely=True)
def images(cut: Cut) -> Loop:
    kernels = [tf.Variable(normal(3, 3, 2, 4, seed=1) * 0.3), tf.Variable(normal(3, 3, 4, 4, seed=2) * 0.3)]
    last = tf.Variable(normal(4, 3, seed=3))
    w = [*kernels, last]

    @cut.function
    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = tf.nn.relu(tf.nn.conv2d(tf.cast(x, tf.float32) / 255.0, kernels[0], 1, "SAME"))
                hidden = tf.nn.max_pool2d(hidden, 2, 2, "SAME")
            with cut.at(1):
                hidden = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(hidden, kernels[1], 1, "SAME")), axis=[1, 2])
            with cut.at(2):
                logits = hidden @ last
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, tf.argmax(logits, axis=1), gradients

    random = np.random.default_rng(3)
    pictures = [random.integers(0, 255, (6, 6, 6, 2)).astype("uint8") for _ in range(3)]
    return Loop(step, w, [(each, random.integers(0, 3, 6)) for each in pictures])


@script(rarely=True)
def masked_loss(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
            weight = tf.cast(mask, tf.float32)
            loss = tf.reduce_sum(losses * weight) / tf.reduce_sum(weight)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    masks = [np.array(m, bool) for m in ([1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1])]
    return Loop(step, w, [(*b, m) for b, m in zip(rows(), masks, strict=True)])


@script()
def boolean_mask(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
            loss = tf.reduce_sum(tf.boolean_mask(losses, mask))
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    masks = [np.array(m, bool) for m in ([1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1])]
    return Loop(step, w, [(*b, m) for b, m in zip(rows(), masks, strict=True)])


@script(micro=(1,))
def hard_examples(cut: Cut) -> Loop:
    """Only the worst rows count: coupled with micro-batches."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
            loss = tf.reduce_mean(tf.math.top_k(losses, 2).values)
        descend(w, tape.gradient(loss, w))
        return loss

    return Loop(step, w, rows())


@script(micro=(1,))
def float16_inside(cut: Cut) -> Loop:
    """Half precision between the parts, weights in single."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = tf.tanh(tf.cast(x, tf.bfloat16) @ tf.cast(w[0], tf.bfloat16))
            with cut.at(1):
                hidden = tf.tanh(hidden @ tf.cast(w[1], tf.bfloat16))
            with cut.at(2):
                loss = tf.reduce_mean((tf.cast(hidden, tf.float32) @ w[2] - y) ** 2)
        descend(w, tape.gradient(loss, w))
        return loss

    return Loop(step, w, rows())


# ---------------------------------------------------------------------- checks, prints, Python
@script()
def asserting(cut: Cut) -> Loop:
    w = weights()

    def first(x: Any) -> Any:
        tf.debugging.assert_equal(tf.shape(x)[1], 4)
        tf.debugging.assert_all_finite(x, "x")
        with tf.control_dependencies([tf.debugging.assert_less(tf.abs(x), 1e6)]):
            hidden = x @ w[0]
        return tf.debugging.check_numerics(tf.tanh(hidden), "hidden")

    return within(cut, first, w=w)


@script()
def printing(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        tf.print("loss", loss, tf.shape(outputs), output_stream="file:///dev/null")
        gradients = tape.gradient(loss, w)
        tf.print("norm", tf.linalg.global_norm(gradients), output_stream="file:///dev/null")
        descend(w, gradients)
        return loss

    return Loop(step, w, rows())


@script(micro=(1,))
def calling_python(cut: Cut) -> Loop:
    w = weights()

    def first(x: Any) -> Any:
        mask = tf.numpy_function(lambda a: (a > 0).astype("float32"), [x], tf.float32)
        doubled = tf.py_function(lambda a: 2.0 * a, [x @ w[0]], tf.float32)
        return tf.tanh(tf.ensure_shape(doubled, [None, 4])) * tf.ensure_shape(mask, [None, 4])

    return within(cut, first, w=w)


# ---------------------------------------------------------------------- losses
@script()
def losses_not_used(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
            other = {
                "l1": tf.reduce_mean(tf.abs(outputs - y)),
                "sum": tf.reduce_sum(outputs),
                "rows": tf.reduce_mean((outputs - y) ** 2, axis=1),
                "accuracy": tf.reduce_mean(tf.cast(tf.argmax(outputs, 1) == tf.argmax(y, 1), tf.float32)),
                "right": tf.reduce_sum(tf.cast(tf.argmax(outputs, 1) == tf.argmax(y, 1), tf.int32)),
                "count": tf.shape(x)[0],
            }
        descend(w, tape.gradient(loss, w))
        return loss, other

    return Loop(step, w, rows())


@script(micro=(1,))
def extremes_returned(cut: Cut) -> Loop:
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        descend(w, tape.gradient(loss, w))
        return loss, tf.reduce_max(outputs), tf.reduce_all(outputs < 1e3), tf.sort(outputs, axis=0)

    return Loop(step, w, rows())


@script()
def statistics_returned(cut: Cut) -> Loop:
    """What many loops log: norms, a standard deviation, the mean of the hidden layer."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return {
            "loss": loss,
            "root": tf.sqrt(loss),
            "perplexity": tf.exp(loss),
            "norm": tf.linalg.global_norm(gradients),
            "weights": tf.linalg.global_norm(w),
            "columns": tf.reduce_mean(outputs, axis=0),
        }

    return Loop(step, w, rows())


@script()
def sum_over_a_fixed_batch(cut: Cut) -> Loop:
    """`sum / global_batch_size`, as tf.distribute teaches it."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=6) + tf.nn.scale_regularization_loss(
                tf.add_n([tf.nn.l2_loss(v) for v in w])
            )
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    return Loop(step, w, rows())


@script(rarely=True)
def keras_losses(cut: Cut) -> Loop:
    w = weights()
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    squared = keras.losses.MeanSquaredError()

    @cut.function
    def step(x: Any, y: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            loss = tf.reduce_mean(entropy(labels, outputs)) + squared(y, outputs) + keras.losses.Huber()(y, outputs)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    labels = np.array([0, 1, 2, 3, 0, 1])
    return Loop(step, w, [(*batch, labels) for batch in rows()])


@script()
def weighted_by_hand(cut: Cut) -> Loop:
    """nb.loss_weight: a mean over what the pass cannot see through."""
    w = weights()

    @cut.function
    def step(x: Any, y: Any, tokens: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
            total = nb.loss_weight(tf.reduce_sum(tokens))
            loss = tf.reduce_sum(losses * tokens) / tf.maximum(total, 1e-3)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    tokens = np.array([1, 5, 2, 0.5, 7, 1], "float32")
    return Loop(step, w, [(*batch, tokens) for batch in rows()])


@script()
def reinforce(cut: Cut) -> Loop:
    """A policy gradient with a baseline that the step keeps."""
    w, baseline = weights(), tf.Variable(0.0, trainable=False)

    @cut.function
    def step(states: Any, actions: Any, rewards: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            logits = chain(cut, states, w)
            chosen = tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(actions, 4), axis=1)
            loss = -tf.reduce_mean(chosen * (rewards - baseline))
        descend(w, tape.gradient(loss, w))
        baseline.assign(0.9 * baseline + 0.1 * tf.reduce_mean(rewards))
        return loss

    actions = np.array([0, 1, 2, 3, 0, 1])
    return Loop(step, [*w, baseline], [(normal(6, 4, seed=n), actions, normal(6, seed=9 + n)) for n in range(3)])
