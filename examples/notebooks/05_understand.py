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
# # Fine-tuning on private sentences
#
# A BERT is fine-tuned to classify sentences. Sentences and labels are in cluster `home`, with the first layers and the
# head; the layers between run in cluster `away`. At each cut the output of a linear layer is sent in the basis of the
# layer's singular vectors: 8 numbers per token instead of 64. Both clusters are emulated in this notebook's process;
# `whale-nebula run` starts a process for each, with equal results. `examples/understand.py` is the full program.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models import Bert, BertSizes, text
from whale_nebula.models.masking import Masking, pretrain
from whale_nebula.models.understanding import (
    TASKS,
    Encoder,
    Examples,
    generated_task,
    generated_text,
    loss_of,
    understanding,
)
from whale_nebula.strategies import low_rank_cut

TASK, LENGTH, WORDS, WIDTH = "opinion", 20, 160, 64
lines = generated_text(4000)
words = text.Tokenizer(text.learn_vocabulary(lines, WORDS, fill=True))
encoder = Encoder(words, LENGTH)
examples = generated_task(TASK, "train", 1024)
for sentence, label in list(zip(examples.first, examples.labels, strict=True))[:4]:
    print(int(label), sentence)

# %% [markdown]
# ## A language model, pretrained on public text

# %%
keras.utils.set_random_seed(1)
sizes = BertSizes(
    vocabulary=WORDS, length=LENGTH, width=WIDTH, heads=4, layers=4, inner=2 * WIDTH, dropout=0.0
)  # fmt: skip
bert = Bert(sizes)
ids = encoder.examples(Examples(lines, [0.0] * len(lines))).ids
rows = tf.data.Dataset.from_tensor_slices(ids).batch(32, drop_remainder=True)
learned = pretrain(bert, rows, Masking.of(words), steps=400, learning_rate=2e-3, epochs=4, verbose=0)
weights = bert.get_weights()
[round(loss, 2) for loss in learned.history["loss"]]

# %% [markdown]
# ## Two cuts inside layers
#
# Cluster `home` occurs twice, so its second stage needs its own name.

# %%
nb.init(links="60mbit,10ms")
train = encoder.examples(examples)


def cut(rank):
    keras.utils.set_random_seed(1)
    bert = Bert(sizes)
    bert.set_weights(weights)
    model = understanding(bert, TASKS[TASK])
    places = low_rank_cut(bert, [1, 3], ["home", "away", nb.stage(cluster="home", name="head")], after="head(/.*)?")
    if rank is None:
        nb.place(model, places)
    else:
        with nb.compress(rank=rank, basis="svd", backward=None):
            nb.place(model, places)
    model.compile(keras.optimizers.Adam(1e-3), loss_of(TASKS[TASK]))
    return model


nb.plan(cut(8), train.ids[:32], train.labels[:32])

# %% [markdown]
# ## Bytes and loss by rank

# %%
curves, sent = {}, {}
for name, rank in {"whole": None, "rank 8": 8, "rank 2": 2}.items():
    model = cut(rank)
    curves[name] = model.fit(train.ids, train.labels, batch_size=32, epochs=6, verbose=0).history["loss"]
    sent[name] = sum(link.payload_bytes for link in nb.last_report("train_step").links.values()) / 1e3
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, losses in curves.items():
    left.plot(np.arange(1, len(losses) + 1), losses, label=name)
left.set_xlabel("epoch")
left.set_ylabel("loss")
left.legend()
right.bar(list(sent), list(sent.values()))
right.set_ylabel("kB a step, all ways")
plt.show()
