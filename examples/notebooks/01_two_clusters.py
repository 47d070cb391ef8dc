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
# # One model, two clusters, a slow link
#
# One half of a small language model is in cluster `gpu`, the other half in cluster `npu`. A link of 20 Mbit/s and 20 ms
# connects them. Both clusters and the link are emulated in this notebook's process, so you need nothing else.

# %%
import contextlib
import time

import keras
import matplotlib.pyplot as plt
import numpy as np

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer

LINE = "20mbit,20ms"
run = nb.init(links=LINE)

# %% [markdown]
# The task: rows like 3 7 11 15 ... (modulo 32). The model predicts the next number, so it must infer each row's stride.

# %%
SIZES = Sizes(vocabulary=32, length=32, width=64, heads=4, blocks=2)
random = np.random.default_rng(0)
start, stride = random.integers(0, 32, (512, 1)), random.integers(1, 9, (512, 1))
tokens = ((start + stride * np.arange(SIZES.length + 1)) % SIZES.vocabulary).astype("int32")
x, y = tokens[:, :-1], tokens[:, 1:]
print(x[0])

# %% [markdown]
# ## Placement
#
# Scopes assign layers to clusters. The arguments of `compress` set the encoding of the tensors that are sent between
# the clusters; everything else is plain Keras.


# %%
def language_model(**codec):
    keras.utils.set_random_seed(1)
    compressed = nb.compress(**codec) if codec else contextlib.nullcontext()
    with nb.cluster(), nb.pipeline(micro_batch=4), compressed:
        model = transformer(SIZES, around=lambda block: nb.stage(cluster="gpu" if block == 0 else "npu"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3, epsilon=1e-5), loss)
    return model


# %%
model = language_model()
plan = nb.plan(model, x[:64], y[:64])
plan  # a notebook shows it as a picture

# %%
print(plan)

# %% [markdown]
# ## Comparison with the uncut model
#
# `nb.verify` runs one step by the plan and one step of the uncut model, and compares all results:

# %%
print(nb.verify(model, x[:64], y[:64]))

# %% [markdown]
# ## Training over the link
#
# Train the same model twice: once with float32 on the link, and once with four bits per number in both directions. The
# emulated link is busy for as long as a real link would be.

# %%
CODECS = {"float32": {}, "int4, both ways": {"int4": True, "backward": "int4"}}


class Curve(keras.callbacks.Callback):
    """Records the loss by time; the first step, which is traced and planned, is not counted."""

    def on_train_begin(self, logs=None):
        self.points, self.began = [], None

    def on_train_batch_end(self, batch, logs=None):
        self.began = self.began or time.monotonic()
        self.points.append((time.monotonic() - self.began, float(logs["loss"])))


curves, reports = {}, {}
for name, codec in CODECS.items():
    curves[name] = Curve()
    model = language_model(**codec)
    model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0, callbacks=[curves[name]])
    reports[name] = nb.last_report()

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for name, curve in curves.items():
    left.plot(*np.transpose(curve.points), label=name)
left.set(xlabel="seconds", ylabel="loss, mean of the epoch so far")
left.legend()
ways = {"gpu → npu": "gpu->npu", "npu → gpu": "npu->gpu"}
for place, name in enumerate(CODECS):
    kilobytes = [reports[name].links[link].bytes / 1e3 for link in ways.values()]
    bars = right.bar(np.arange(2) + 0.27 * (place - 0.5), kilobytes, 0.25, label=name)
    right.bar_label(bars, fmt="%.0f")
right.set(xticks=range(2), xticklabels=ways, ylabel="kB a step")
plt.show()

# %% [markdown]
# ## Where time is spent
#
# The report of the last step: computation and waiting of each stage, bytes on each link, and what would make it faster.

# %%
print(reports["float32"])

# %%
print(reports["float32"].timeline())

# %%
nb.shutdown()
