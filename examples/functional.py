"""A functional Keras model in two clusters: two towers, a skip connection over the link, sample weights, a metric.

Without the lines with `nb`, this is plain Keras with the same results.
"""

import keras
import numpy as np

import whale_nebula as nb

ROWS, BATCH = 512, 64
layers = keras.layers
keras.utils.set_random_seed(1)

# Inputs are a row of numbers and a row of words. The task: is the number to which the first word points above zero?
random = np.random.default_rng(0)
numbers = random.normal(size=(ROWS, 8)).astype("float32")
words = random.integers(0, 8, (ROWS, 4))
answers = (numbers[np.arange(ROWS), words[:, 0]] > 0).astype("float32")
weights = 1.0 + np.abs(numbers[:, 0])

table, text = keras.Input((8,), name="table"), keras.Input((4,), dtype="int32", name="text")
with nb.cluster(), nb.pipeline(micro_batch=4):
    with nb.stage(cluster="gpu"):
        left = layers.Dense(32, activation="gelu")(table)
        right = layers.Flatten()(layers.Embedding(8, 16)(text))
        joined = layers.Dense(64, activation="gelu")(layers.Concatenate()([left, right]))
    with nb.stage(cluster="npu"), nb.compress(fp16=True):  # inputs of npu are sent in half precision
        hidden = layers.Dense(64, activation="gelu")(joined)
        outputs = layers.Dense(1, activation="sigmoid")(layers.Add()([hidden, joined]))
model = keras.Model({"table": table, "text": text}, outputs)
model.compile(keras.optimizers.AdamW(1e-2), "binary_crossentropy", weighted_metrics=["accuracy"])

inputs = {"table": numbers, "text": words}
nb.init(links="60mbit,20ms")  # emulates the link between the two; without it sending takes no time
batch = {name: rows[:BATCH] for name, rows in inputs.items()}
print(nb.plan(model, batch, answers[:BATCH], weights[:BATCH]))
history = model.fit(inputs, answers, sample_weight=weights, batch_size=BATCH, epochs=8, verbose=0).history
print(nb.last_report())
print(f"loss {history['loss'][-1]:.6f}, accuracy {history['accuracy'][-1]:.3f}")
