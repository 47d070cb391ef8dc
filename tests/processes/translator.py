"""A small translator with separate sides: source text in cluster c0, target text in cluster c1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.two_cluster_model import to_hex
from tests.processes.worker_reports import digest_tensors

ROWS, BATCH, WORDS = 24, 8, 50
SOURCE, TARGET = 1 << 20, 1 << 21
"""Offsets of the ids of each side, which make them distinguishable from all other sent numbers."""
INPUTS = {
    "x/source": {"shape": [None, 5], "dtype": "int32"},
    "x/target": {"shape": [None, 6], "dtype": "int32"},
    "y": {"shape": [None, 6], "dtype": "int32"},
    "source": {"shape": [None, None], "dtype": "int32"},
    "target": {"shape": [None, None], "dtype": "int32"},
}


def make_sentences() -> dict[str, Any]:
    """Both sides; zeros are padding."""
    random = np.random.default_rng(3)
    source = random.integers(1, WORDS, (ROWS, 5)) + SOURCE
    target = random.integers(1, WORDS, (ROWS, 7)) + TARGET
    for row in range(ROWS):
        target[row, 7 - row % 4 :] = 0
    source, target = source.astype("int32"), target.astype("int32")
    return {"source": source, "target": target[:, :-1], "y": target[:, 1:]}


class SideEmbedding(keras.layers.Layer):
    """Embeds the ids of one side; all ids of the other side would be the same word."""

    def __init__(self, base: int, **options: Any) -> None:
        super().__init__(**options)
        self.base, self.table = base, keras.layers.Embedding(WORDS, 8)

    def call(self, ids: Any) -> Any:
        return self.table(keras.ops.where(ids > self.base, ids - self.base, 0))


def masked_loss(y: Any, scores: Any) -> Any:
    """The mean over the words that are not padding."""
    is_word = keras.ops.cast(y > 0, "float32")
    each = keras.losses.sparse_categorical_crossentropy(keras.ops.where(y > 0, y - TARGET, 0), scores, from_logits=True)
    return keras.ops.sum(each * is_word, axis=1) / 6.0


class TargetShare(keras.metrics.Mean):
    """A metric that depends only on the target."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.reduce_mean(tf.cast(y_true > 0, "float32")))


def build_translator() -> keras.Model:
    """An encoder in c0, a decoder in c1."""
    source = keras.Input((5,), dtype="int32", name="source")
    target = keras.Input((6,), dtype="int32", name="target")
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="c0"):
            memory = keras.layers.Dense(8, activation="tanh", name="memory")(SideEmbedding(SOURCE, name="in")(source))
            memory = keras.ops.mean(memory, axis=1, keepdims=True)
        with nb.stage(cluster="c1"):
            scores = keras.layers.Dense(WORDS, name="scores")(SideEmbedding(TARGET, name="out")(target) + memory)
    model = keras.Model({"source": source, "target": target}, scores, name="translator")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), masked_loss, metrics=[TargetShare(name="kept")])
    return model


def select_side(side: str) -> dict[str, Any]:
    """The inputs that a cluster reads; "both" for one process that reads all."""
    return {name: value if side in ("both", name) or (side == "target" and name == "y") else None
            for name, value in make_sentences().items()}  # fmt: skip


def generate_batches(rows: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Generate the batches of a custom generator."""
    for start in range(0, ROWS, BATCH):
        cut = {name: None if value is None else value[start : start + BATCH] for name, value in rows.items()}
        yield {"source": cut["source"], "target": cut["target"]}, cut["y"]


@nb.function
def average_both_sides(source: Any, target: Any) -> Any:
    """Scalars of one side and of both, and a tensor that stays in its cluster."""
    with nb.cluster():
        with nb.stage(cluster="c0"):
            low = tf.reduce_mean(tf.cast(source - SOURCE, tf.float32), axis=1)
        with nb.stage(cluster="c1"):
            is_word = tf.cast(target > 0, tf.float32)
            each = is_word * low[:, None]
    words = tf.reduce_sum(tf.cast(target > 0, tf.int32))
    return {"words": words, "mean": tf.reduce_sum(each) / tf.cast(words, tf.float32), "each": each}


def exercise_translator(side: str) -> dict[str, Any]:
    """Train and evaluate on arrays, a generator and a dataset; predict; call a function."""
    rows = select_side(side)
    x = {"source": rows["source"], "target": rows["target"]}
    model = build_translator()
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    found = {"arrays": to_hex(model.fit(x, rows["y"], **options).history)}
    found["generator"] = to_hex(model.fit(generate_batches(rows), steps_per_epoch=3, verbose=0).history)
    found["dataset"] = to_hex(model.fit(make_dataset(rows), verbose=0).history)
    found["evaluate"] = to_hex(model.evaluate(x, rows["y"], batch_size=BATCH, verbose=0, return_dict=True))
    found["batch"] = to_hex(model.train_on_batch(x, rows["y"], return_dict=True))
    found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
    found["function"] = average_both_sides(rows["source"], rows["target"])
    with nb.gathered():
        found["weights"] = digest_tensors([*model.variables, *model.optimizer.variables])
    return found


def make_dataset(rows: Mapping[str, Any]) -> tf.data.Dataset:
    """The same batches as a dataset, with None for inputs that this cluster lacks."""
    here = {name: value for name, value in rows.items() if value is not None}
    each = tf.data.Dataset.from_tensor_slices(here).batch(BATCH)
    return each.map(lambda row: ({"source": row.get("source"), "target": row.get("target")}, row.get("y")))
