"""Whole scripts as in practice: translation, adversaries, transfer, physics, text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.masks import TIME, WORDS, sentences, tokens
from tests.scripts.keras.script import (
    ROWS,
    FitArguments,
    LogRecorder,
    classes,
    momentum,
    numbers,
    rows,
    script,
    two_parts,
)

_CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy


@script(lambda: {"x": [tokens(), np.roll(tokens(), 1, axis=1)], "y": classes(WORDS, TIME, seed=1)})
def seq2seq(cut: Cut) -> Any:
    """Keras's translation tutorial: the encoder's states start the decoder's. The inputs are a list."""
    source, target = keras.Input((TIME,), dtype="int32"), keras.Input((TIME,), dtype="int32")
    with cut.program():
        with cut.at(0):
            hidden = layers.Embedding(WORDS, 6, mask_zero=True)(source)
            _, *states = layers.LSTM(5, return_state=True)(hidden)
        with cut.at(1):
            hidden = layers.Embedding(WORDS, 6, mask_zero=True)(target)
            hidden = layers.LSTM(5, return_sequences=True)(hidden, initial_state=states)
            outputs = layers.Dense(WORDS)(hidden)
    model = keras.Model([source, target], outputs)
    model.compile(momentum(), _CROSSENTROPY(from_logits=True), metrics=["accuracy"])
    return model


@script(lambda: {"x": tokens(), "y": np.roll(tokens(), -1, axis=1)}, stages=(1, 2, 3))
def language_model(cut: Cut) -> Any:
    """A causal language model; its last layer is its first one, reversed."""
    inputs = keras.Input((TIME,), dtype="int32")
    embedding = layers.ReversibleEmbedding(WORDS, 8)
    with cut.program():
        with cut.at(0):
            hidden = embedding(inputs) + layers.Embedding(TIME, 8)(ops.arange(TIME))
        with cut.at(1):
            hidden = layers.LayerNormalization()(
                hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
            )
        with cut.at(2):
            outputs = embedding(layers.Dense(8, activation="gelu")(hidden), reverse=True)
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), _CROSSENTROPY(from_logits=True, ignore_class=0), metrics=["accuracy"])
    return model


def _play(model: Any, given: FitArguments, watch: LogRecorder) -> None:
    """The classic loop: a step of the judge, a step of the whole, by `train_on_batch`."""
    generator, judge = model.parts
    watch.set_model(model)
    for step in range(3):
        fake = generator.predict_on_batch(given["noise"])
        images = np.concatenate([given["x"], fake])
        marks = np.concatenate([np.ones((ROWS, 1)), np.zeros((ROWS, 1))]).astype("float32")
        judge.trainable = True
        told = judge.train_on_batch(images, marks, return_dict=True)
        judge.trainable = False
        fooled = model.train_on_batch(given["noise"], np.ones((ROWS, 1), "float32"), return_dict=True)
        watch.on_train_batch_end(step, {"judge": told["loss"], "whole": fooled["loss"]})


@script(lambda: {"x": numbers(6), "noise": numbers(4, seed=2)}, _play, evaluates=False)
def adversaries_by_hand(cut: Cut) -> Any:
    """Three models that share layers; the judge is frozen in the third, and trained by itself."""
    noise, images = keras.Input((4,)), keras.Input((6,))
    with cut.program():
        with cut.at(0):
            fake = layers.Dense(6)(layers.Dense(8, activation="tanh")(noise))
        with cut.at(1):
            verdict = layers.Dense(1, activation="sigmoid")(layers.Dense(8, activation="relu")(images))
    generator, judge = keras.Model(noise, fake), keras.Model(images, verdict)
    judge.compile(momentum(), "binary_crossentropy")
    whole = keras.Model(noise, judge(generator(noise)))
    whole.compile(momentum(), "binary_crossentropy")
    whole.parts = (generator, judge)
    return whole


class Endpoint(layers.Layer):
    """Keras's endpoint layer: it takes the targets, and adds the loss itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loss = keras.losses.MeanSquaredError()

    def call(self, targets: Any, outputs: Any, weight: Any = None) -> Any:
        self.add_loss(self.loss(targets, outputs, sample_weight=weight))
        return outputs


@script(lambda: {"x": {"x": numbers(6), "y": numbers(3, seed=1)}}, evaluates=False)
def loss_from_a_layer(cut: Cut) -> Any:
    """`compile` without a loss; the targets are inputs."""
    inputs, targets = keras.Input((6,), name="x"), keras.Input((3,), name="y")
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(inputs)
        with cut.at(1):
            outputs = Endpoint()(targets, layers.Dense(3)(hidden))
    model = keras.Model({"x": inputs, "y": targets}, outputs)
    model.compile(momentum())
    return model


def _pretrained(cut: Cut) -> tuple[Any, Any]:
    inputs = keras.Input((6,))
    with cut.program(), cut.at(0):
        hidden = layers.BatchNormalization()(layers.Dense(8, activation="relu")(inputs))
    base = keras.Model(inputs, hidden, name="base")
    base.get_layer(index=2).moving_mean.assign(np.linspace(0.0, 1.0, 8))
    return inputs, base


@script(rows())
def transfer(cut: Cut) -> Any:
    """Keras's transfer learning guide: a frozen base called with `training=False`, a new head in another cluster."""
    _, base = _pretrained(cut)
    base.trainable = False
    inputs = keras.Input((6,))
    hidden = base(inputs, training=False)
    with cut.program(), cut.at(1):
        outputs = layers.Dense(3)(layers.Dropout(0.0)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), "mse")
    return model


class Physics(keras.Model):
    """A network whose loss holds its own derivative by its input."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(1)

    def call(self, x: Any) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.first(x)
            with self.cut.at(1):
                with tf.GradientTape() as tape:
                    tape.watch(hidden)
                    found = self.second(tf.sin(hidden))
                slope = tape.gradient(found, hidden)
                self.add_loss(0.1 * tf.reduce_mean(tf.square(slope)))
                return found


@script(lambda: {"x": numbers(6), "y": numbers(1, seed=1)})
def physics(cut: Cut) -> Any:
    """A tape in a `call`, differentiated again by the step's own."""
    model = Physics(cut)
    model.compile(momentum(), "mse")
    return model


def _texts() -> FitArguments:
    words = np.array(["to", "be", "or", "not", "that", "is", "the", "question"])
    lines = [" ".join(words[row % 8]) for row in classes(8, 4)]
    return {"x": tf.constant(lines)[:, None], "y": classes(4, seed=1)}


@script(_texts, micro=(1,))  # how strings are split into words is not followed row by row
def texts(cut: Cut) -> Any:
    """Strings in: the vocabulary is a part of the model."""
    vectorize = layers.TextVectorization(output_sequence_length=4)
    vectorize.adapt(["to be or not to be that is the question"])
    return two_parts(
        cut,
        keras.Input((1,), dtype="string"),
        lambda texts: layers.Embedding(12, 6, mask_zero=True)(vectorize(texts)),
        lambda hidden: layers.Dense(4)(layers.GRU(5)(hidden)),
        _CROSSENTROPY(from_logits=True),
    )


@script(rows())
def choices_cross(cut: Cut) -> Any:
    """What crosses is not a number alone: choices, and an activation whose gradient is stopped."""
    inputs = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(inputs)
            best, sure = ops.argmax(hidden, axis=-1), ops.stop_gradient(hidden)
            positive = hidden > 0.0
        with cut.at(1):
            chosen = layers.Embedding(8, 4)(best)
            masked = ops.where(positive, hidden, 0.1 * sure)
            outputs = layers.Dense(3)(layers.Concatenate()([chosen, masked, sure]))
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), "mse")
    return model


def _padded() -> FitArguments:
    lengths = [[int(n) for n in row if n] for row in tokens()]
    data = tf.data.Dataset.from_generator(
        lambda: zip(lengths, classes(4, seed=1), strict=True),
        output_signature=(tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int64)),
    )
    return {"x": data.padded_batch(4).apply(tf.data.experimental.assert_cardinality(9)), "batch_size": None}


@script(_padded, steps=16)
def padded_batches(cut: Cut) -> Any:
    """Sentences of many lengths: each batch is as long as its longest."""
    embedding = layers.Embedding(WORDS, 6, mask_zero=True)
    return two_parts(
        cut,
        keras.Input((None,), dtype="int32"),
        embedding,
        lambda hidden: layers.Dense(4)(layers.GRU(5)(hidden)),
        _CROSSENTROPY(from_logits=True),
    )


@script(sentences)
def recurrent_cells(cut: Cut) -> Any:
    """Cells of the user's own, stacked; a convolution over time; a second return value that is read elsewhere."""
    inputs = keras.Input((TIME,), dtype="int32")
    with cut.program():
        with cut.at(0):
            hidden = layers.Embedding(WORDS, 6)(inputs)
            hidden, state = layers.GRU(6, return_sequences=True, return_state=True)(hidden)
        with cut.at(1):
            hidden = layers.Conv1D(6, 3, padding="causal", activation="relu")(hidden)
            cells = [layers.LSTMCell(4), layers.GRUCell(5, reset_after=False)]
            outputs = layers.Dense(4)(layers.Concatenate()([layers.RNN(cells)(hidden), state]))
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), _CROSSENTROPY(from_logits=True))
    return model


@script(rows())
def indicators(cut: Cut) -> Any:
    """Which numbers are in a row, and how often: counts along the row, and what a table says of the numbers."""
    buckets = layers.Discretization([-0.5, 0.0, 0.5])
    encoders = [layers.CategoryEncoding(4, mode) for mode in ("multi_hot", "count")]
    encoders.append(layers.IntegerLookup(vocabulary=[1, 2], output_mode="multi_hot"))
    dense = layers.Dense(3)
    return two_parts(cut, keras.Input((6,)), buckets, lambda x: dense(layers.concatenate([e(x) for e in encoders])))


@script(lambda: {"x": numbers(32), "y": numbers(3, seed=1)}, grid_only=True)
def spectrogram(cut: Cut) -> Any:
    """Frames of a signal and their spectra, whose sizes TensorFlow takes from split shapes."""
    return two_parts(
        cut,
        keras.Input((32,)),
        layers.Lambda(lambda x: tf.abs(tf.signal.stft(x, 8, 4)), output_shape=(7, 5)),
        lambda spectra: layers.Dense(3)(layers.Conv1D(4, 3, activation="relu")(spectra)[:, 0]),
    )
