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
# # Operators split over several devices
#
# A classifier may be larger than the rest of its model. If every worker has a copy of it, steps wait for its gradients.
# Here the feature layers are replicated, and the classifier is split: each device computes some of the classes. All
# devices are emulated in this notebook's process; `whale-nebula run` starts a process for each, with equal results.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

import whale_nebula as nb
from whale_nebula.models import SwitchFeedForward

CLASSES, BATCH = 2000, 64
random = np.random.default_rng(0)
points = random.normal(size=(100, 32)).astype("float32")
labels = random.integers(0, 100, 1024)
rows = points[labels] + 0.1 * random.normal(size=(1024, 32)).astype("float32")


def classifier(split=True, devices=2):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((32,))
    if split:
        with nb.cluster(["gpu"]):
            with nb.replica(devices):
                features = keras.layers.Dense(128, activation="relu")(inputs)
            with nb.split(devices):
                logits = keras.layers.Dense(CLASSES, name="classifier")(features)
    else:
        features = keras.layers.Dense(128, activation="relu")(inputs)
        logits = keras.layers.Dense(CLASSES, name="classifier")(features)
    model = keras.Model(inputs, logits)
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# %%
nb.init()
model = classifier()
plan = nb.plan(model, rows[:BATCH], labels[:BATCH])
plan  # a notebook shows it as a picture

# %% [markdown]
# ## Layouts of tensors, and what is sent
#
# The layouts of logits, of their gradients and of Adam's moments follow from those of the classifier's weights. No
# device ever has all logits. Only a few numbers per row and the gradient of the features are sent.

# %%
print(plan)

# %%
for name, layout in list(plan.layouts.items())[:12]:
    print(f"{layout:10} {name}")

# %% [markdown]
# ## Comparison with the uncut model

# %%
print(nb.verify(model, rows[:BATCH], labels[:BATCH]))

# %% [markdown]
# ## Memory of a device
#
# Weights and optimizer slots of the classifier on each device, by the number of devices.

# %%
sizes = []
for devices in (2, 3, 4, 8):
    stage = nb.plan(classifier(devices=devices), rows[:BATCH], labels[:BATCH]).stages["split"]
    sizes.append((devices, stage.shard_bytes / 1e6))
whole = 3 * 4 * (128 * CLASSES + CLASSES) / 1e6
figure, axes = plt.subplots(figsize=(5, 3))
axes.bar(["1", *(str(devices) for devices, _ in sizes)], [whole, *(size for _, size in sizes)])
axes.set_xlabel("devices")
axes.set_ylabel("weights and slots of the classifier, MB")
plt.show()

# %% [markdown]
# ## Experts
#
# Axis 0 of the weights of `SwitchFeedForward` are its experts, so `nb.split(axis=0)` distributes them. The metrics show
# the load of the experts: an entropy of one means that all have the same load.

# %%
tokens = random.normal(size=(512, 16, 24)).astype("float32")
targets = np.sin(3 * tokens[..., :1] * np.sign(tokens[..., 1:2]))
inputs = keras.Input((16, 24))
with nb.cluster(["gpu"]), nb.stage(cluster="gpu"):
    with nb.split(2, axis=0):
        hidden = inputs + SwitchFeedForward(8, 48, seed=1, aux=0.05)(inputs)
    outputs = keras.layers.Dense(1)(hidden)
experts = keras.Model(inputs, outputs)
experts.compile(keras.optimizers.Adam(3e-3), "mse")
history = experts.fit(tokens, targets, batch_size=64, epochs=12, verbose=0).history

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(history["loss"])
left.set_xlabel("epoch")
left.set_ylabel("loss")
for name in ("load_entropy", "share_dropped", "busiest_expert"):
    right.plot(history[name], label=name)
right.set_xlabel("epoch")
right.set_ylim(0, 1.05)
right.legend()
plt.show()
