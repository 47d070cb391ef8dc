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
# # One model, two clusters, a slow line
#
# Half of a small language model lives in cluster `gpu`, the other half in cluster `npu`. A line of 20 Mbit/s and 20 ms
# joins them. Both clusters and the line are emulated in this notebook's process: nothing else is needed.

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
# The task: rows like 3 7 11 15 ... (modulo 32). The model says what comes next, so it has to find each row's stride.

# %%
SIZES = Sizes(vocabulary=32, length=32, width=64, heads=4, blocks=2)
random = np.random.default_rng(0)
start, stride = random.integers(0, 32, (512, 1)), random.integers(1, 9, (512, 1))
tokens = ((start + stride * np.arange(SIZES.length + 1)) % SIZES.vocabulary).astype("int32")
x, y = tokens[:, :-1], tokens[:, 1:]
print(x[0])

# %% [markdown]
# ## Where things run
#
# Scopes say it. What `compress` gets is how the boundary crosses the line; everything else is Keras as you know it.


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
plan  # a notebook shows its picture

# %%
print(plan)

# %% [markdown]
# ## Is it still the same model?
#
# One step by the plan and one of the uncut model, compared number by number:

# %%
print(nb.verify(model, x[:64], y[:64]))

# %% [markdown]
# ## Training across the line
#
# Twice the same model: with a line that carries float32, and with four bits a number, there and back. The emulated line
# is busy for as long as a real one would be.

# %%
CODECS = {"float32": {}, "int4, both ways": {"int4": True, "backward": "int4"}}


class Curve(keras.callbacks.Callback):
    """The loss by time; the first step, which is traced and planned, does not count."""

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
# ## Where the time goes
#
# The report of the last step: who computed, who waited, what crossed, and what would help.

# %%
print(reports["float32"])

# %%
print(reports["float32"].timeline())

# %%
nb.shutdown()
