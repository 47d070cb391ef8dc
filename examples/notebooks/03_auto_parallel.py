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
# # Automatic placement by the planner
#
# A language model, two clusters and a link between them, without scopes. `nb.auto_parallel()` decides which cluster
# runs which layers, with how many replicas and micro-batches. The clusters are those of a config; this notebook's
# process emulates them, and the plan is the same as on real clusters.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer

SIZES, BATCH = Sizes(vocabulary=64, length=32, width=64, heads=4, blocks=4), 64
CLUSTERS = {"gpu": {"flops": "20G", "memory": "30MiB"}, "npu": {"flops": "10G", "memory": "30MiB"}}
random = np.random.default_rng(0)
start, stride = random.integers(0, 64, (512, 1)), random.integers(1, 9, (512, 1))
tokens = ((start + stride * np.arange(SIZES.length + 1)) % 64).astype("int32")
x, y = tokens[:, :-1], tokens[:, 1:]


def language_model():
    keras.utils.set_random_seed(1)
    model = transformer(SIZES)
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# %%
nb.init({"clusters": CLUSTERS}, links="60mbit,10ms")
nb.auto_parallel()
model = language_model()
plan = nb.plan(model, x[:BATCH], y[:BATCH])
plan  # a notebook shows it as a picture

# %% [markdown]
# ## Why this plan
#
# The candidates with their seconds, memory and bytes, the bottleneck of each, and what would change the choice.

# %%
print(plan.explain())

# %% [markdown]
# ## Step time of the best plan, by the rate of the link
#
# Over a slow link the planner cuts where fewer bytes are sent, or uses only one cluster.


# %%
def plan_for(rate, memory, **limits):
    nb.shutdown()
    clusters = {name: {**options, "memory": memory} for name, options in CLUSTERS.items()}
    nb.init({"clusters": clusters}, links=f"{rate}mbit,10ms")
    with nb.auto_parallel(**limits):
        return nb.plan(model, x[:BATCH], y[:BATCH]).predicted.seconds


rates = [2, 10, 30, 60, 120, 1000]
seconds = [plan_for(rate, "30MiB") for rate in rates]
alone = plan_for(60, "1GiB", clusters=["gpu"])
figure, axes = plt.subplots(figsize=(6, 3.5))
axes.semilogx(rates, seconds, "o-", label="both clusters, 30 MiB each")
axes.axhline(alone, linestyle="--", color="gray", label="gpu alone, if it had the memory")
axes.set_xlabel("rate of the line, Mbit/s")
axes.set_ylabel("predicted seconds a step")
axes.set_ylim(0, 1.1 * max(*seconds, alone))
axes.legend()
plt.show()

# %% [markdown]
# ## Comparison with the uncut model

# %%
nb.shutdown()
nb.init({"clusters": CLUSTERS}, links="60mbit,10ms")
nb.auto_parallel()
model = language_model()
print(nb.verify(model, x[:BATCH], y[:BATCH]))

# %%
losses = model.fit(x, y, batch_size=BATCH, epochs=6, shuffle=False, verbose=0).history["loss"]
print("loss", " ".join(f"{loss:.3f}" for loss in losses))
print(nb.last_report())
