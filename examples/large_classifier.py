"""A small replicated body, and a large classifier that is sharded over all workers (Whale's second case).

    python examples/large_classifier.py                                                        # in one process
    whale-nebula run --all --config examples/large_classifier.yaml examples/large_classifier.py     # two workers

Without the lines with `nb`, this is plain Keras with the same results up to rounding.
"""

import argparse

import keras
import numpy as np

import whale_nebula as nb

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
ROWS, BATCH, CLASSES = 2048, 64, 5000
nb.init(seed=1)

# Each class is a point, and a row is one of these points with noise. The task is to classify rows.
random = np.random.default_rng(0)
points = random.normal(size=(CLASSES, 32)).astype("float32")
labels = random.integers(0, 200, ROWS)  # only 200 of the classes occur, so that training takes less than a minute
rows = points[labels] + 0.1 * random.normal(size=(ROWS, 32)).astype("float32")

inputs = keras.Input((32,))
with nb.cluster(["gpu"]):
    with nb.replica(2):
        features = keras.layers.Dense(128, activation="relu")(inputs)
    with nb.split(2):
        logits = keras.layers.Dense(CLASSES, name="classifier")(features)
model = keras.Model(inputs, logits)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

plan = nb.plan(model, rows[:BATCH], labels[:BATCH])
if nb.here().lead:
    print(plan)
history = model.fit(rows, labels, batch_size=BATCH, epochs=6, shuffle=False, verbose=0).history
if nb.here().lead:
    print(f"loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.3f}")
