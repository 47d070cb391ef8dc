# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Three methods for slow links
#
# Momenta at one bit per number, rows that grow, and embedding tables next to the model. Each has a page
# (`docs/one-bit.md`, `docs/curriculum.md`, `docs/recommender.md`) and a program (`examples/one_bit.py`,
# `examples/curriculum.py`, `examples/recommend.py`). All clusters are emulated in this notebook's process;
# `whale-nebula run` starts a process for each, with equal results.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models import Sizes, text, transformer
from whale_nebula.models.recommender import HashedEmbedding, auc, dlrm, generated_clicks
from whale_nebula.strategies import ByTokens, Curriculum, OneBitLamb

LINE, WORDS, LENGTH, BATCH = "60mbit,20ms", 512, 64, 16
lines = text.monolingual("en", 4000)
ids = text.Tokenizer(text.learn_vocabulary(lines, WORDS)).encode(lines).flat_values.numpy()
count = (len(ids) - 1) // LENGTH
x, y = ids[: count * LENGTH].reshape(count, LENGTH), ids[1 : count * LENGTH + 1].reshape(count, LENGTH)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class StepRecorder(keras.callbacks.Callback):
    """Records the seconds, the bytes and the loss of each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        report = nb.last_report()
        self.steps.append((report.step_seconds, sum(link.bytes for link in report.links.values()), logs["loss"]))


# %% [markdown]
# ## Momenta at one bit per number
#
# Two clusters train copies of one model. For twelve steps their momenta are sent in float32; then the variance is
# frozen, and only the sign of each number is sent. The error of the signs is added to the next momentum.

# %%
nb.init({"clusters": {"gpu": {}, "npu": {}}}, links=LINE, seed=1)
with nb.cluster(), nb.replica(exchange="1bit"), nb.stage():
    model = transformer(Sizes(vocabulary=WORDS, length=LENGTH, width=64, heads=4, blocks=2))
model.compile(OneBitLamb(1e-2, 12), loss)
recorder = StepRecorder()
model.fit(x, y, batch_size=BATCH, steps_per_epoch=40, shuffle=False, verbose=0, callbacks=[recorder])
nb.shutdown()

seconds, sent, losses = map(np.array, zip(*recorder.steps, strict=True))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.semilogy(sent / 1e3)
left.set(xlabel="step", ylabel="kB that crossed")
right.plot(losses)
right.set(xlabel="step", ylabel="mean loss so far")
plt.show()
print(f"a step after the warm-up sends 1/{sent[:12].mean() / sent[-12:].mean():.0f} of one before")

# %% [markdown]
# ## Rows that grow
#
# A pipeline of two stages starts with rows of 16 tokens, and has full rows from step 30 on. Bytes and seconds follow
# the length; there are two traces, for any number of lengths. The learning rate is a function of tokens.

# %%
nb.init(seed=1, links=LINE)
curriculum = Curriculum(16, LENGTH, 30, step=16)
with nb.cluster(), nb.pipeline(micro_batch=4):
    sizes = Sizes(vocabulary=WORDS, length=LENGTH, width=64, heads=4, blocks=2)
    model = transformer(sizes, around=lambda block: nb.stage(cluster="gpu" if block < 1 else "npu"), shorter=True)
rate = ByTokens(keras.optimizers.schedules.CosineDecay(3e-3, 50, 0.1), curriculum)
model.compile(keras.optimizers.Adam(rate), loss)
nb.plan(model, x[:BATCH], y[:BATCH])

# %%
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1)
data = data.batch(BATCH, drop_remainder=True).repeat().apply(curriculum)
recorder = StepRecorder()
model.fit(data, steps_per_epoch=50, verbose=0, callbacks=[recorder])
nb.shutdown()

seconds, sent, losses = map(np.array, zip(*recorder.steps, strict=True))
lengths = np.array([curriculum.length(step) for step in range(50)])
for length in np.unique(lengths):
    own = lengths == length
    print(f"rows of {length}: {np.median(sent[own]) / 1e3:.0f} kB, {np.median(seconds[own]):.3f} s a step")

# %% [markdown]
# ## Tables in a different cluster
#
# The table of a recommender is in its own cluster, and has a row for each trained id. The dense part is in another
# cluster; only the vectors of a batch and their gradients are sent.

# %%
nb.init(links=LINE, seed=1)
log, held = (
    generated_clicks(16_000, fields=4, vocabulary=200),
    generated_clicks(2000, fields=4, vocabulary=200, start=16_000),
)
table = HashedEmbedding(8, optimizer=keras.optimizers.Adagrad(0.1), name="table")
model = dlrm(table, fields=4, numbers=4, width=8)
nb.place(model, {"table": "cpu", "(?!table$).*": "gpu"})
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
rows, areas = [], []
for _ in range(4):
    model.fit(log.inputs, log.clicked, batch_size=200, verbose=0)
    rows.append(len(table.table))
    areas.append(auc(model.predict(held.inputs, verbose=0), held.clicked))
print("rows of the table:", rows)
print(
    "AUC on rows that were held back:",
    [round(each, 3) for each in areas],
    "of",
    round(auc(held.chances, held.clicked), 3),
)
nb.shutdown()
