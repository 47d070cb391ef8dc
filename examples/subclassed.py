"""A subclassed Keras model in two clusters: scopes are in `call`, and its embedding is shared by both clusters.

Without the lines with `nb`, this is plain Keras with the same results.
"""

import keras
import numpy as np
from keras import layers

import whale_nebula as nb

ROWS, BATCH, WORDS, LENGTH = 384, 64, 16, 12
keras.utils.set_random_seed(1)

# Each row counts up with its own stride, modulo 16; the model predicts the next number.
random = np.random.default_rng(0)
start, stride = random.integers(0, WORDS, (ROWS, 1)), random.integers(1, 4, (ROWS, 1))
tokens = (start + stride * np.arange(LENGTH + 1)) % WORDS


class Counter(keras.Model):
    """A recurrent language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(WORDS, 32)
        self.reader = layers.GRU(32, return_sequences=True)
        self.thinker = layers.GRU(32, return_sequences=True)
        self.norm = layers.LayerNormalization()

    def call(self, tokens):
        with nb.cluster(), nb.pipeline(micro_batch=2):
            with nb.stage(cluster="gpu"):
                hidden = self.reader(self.embedding(tokens))
            with nb.stage(cluster="npu"):
                hidden = self.norm(hidden + self.thinker(hidden))
                # both stages use the embedding: both clusters hold it, and its gradients are summed over the link
                return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))


model = Counter()
model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=BATCH, epochs=8, verbose=0).history
print(nb.plan(model, tokens[:BATCH, :-1], tokens[:BATCH, 1:]))
print(f"loss {history['loss'][-1]:.6f}")
