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
# # One-way pretraining
#
# Two small generators, one for Germanic and one for Romance languages, run where their text is. They hide words, fill
# in predictions, and send the result to one discriminator, which learns to detect replaced words and to predict the
# originals. Nothing is sent back. All clusters are emulated in this notebook's process; `whale-nebula run` starts a
# process for each, with equal results. `examples/pretrain.py` is the full program.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models import Bert, BertSizes, masked_lm, text
from whale_nebula.models.pretraining import (
    DISCRIMINATOR,
    Corpus,
    Corruption,
    Discriminator,
    Objectives,
    Pretraining,
    encode_alone,
    encode_with_pivot,
    make_adam,
    mix_families,
)

LENGTH, WORDS, STEPS = 32, 512, 400
FAMILIES = {"germanic": ["en", "de"], "romance": ["es", "fr"]}
corpus = Corpus.by_rule(["en", "de", "es", "fr"], 2000)
words = text.Tokenizer(text.learn_vocabulary(corpus.lines(), WORDS, fill=True))
for language, lines in corpus.pairs.items():
    print(language, lines[0])

# %% [markdown]
# Each generator gets its own languages, and pairs of translations that start with one of them. Languages are mixed by
# temperature, so that languages with little text are learned, too.

# %%
alone = {name: encode_alone(corpus, words, own, LENGTH) for name, own in FAMILIES.items()}
pairs = {name: encode_with_pivot(corpus, words, own, "en", LENGTH) for name, own in FAMILIES.items()}
mixtures = mix_families(alone, batch=64, pairs=pairs, temperature=2.0)
{name: (mixture.rows, mixture.shares) for name, mixture in mixtures.items()}


# %%
def bert(name, width, layers):
    return Bert(
        BertSizes(
            vocabulary=WORDS, length=LENGTH, width=width, heads=4, layers=layers, inner=2 * width, dropout=0.0,
            norm="pre", spread=0.1,
        ),
        name=name,
    )  # fmt: skip


keras.utils.set_random_seed(1)
networks = {name: masked_lm(bert(name, 64, 1)) for name in FAMILIES}
networks[DISCRIMINATOR] = Discriminator(bert("kept", 96, 2))
optimizers = {name: make_adam(network, 2e-3, steps=STEPS) for name, network in networks.items()}
generators = {name: networks[name] for name in FAMILIES}
pretraining = Pretraining(generators, networks[DISCRIMINATOR], Corruption.of(words), Objectives(10.0, 50.0), optimizers)


@nb.function
def step(numbers, texts):
    with tf.GradientTape(persistent=True) as tape, nb.cluster(), nb.compress(fp16=True):
        losses = pretraining.losses(texts, numbers, around=lambda name: nb.stage(cluster=name))
    pretraining.update(tape, losses)
    return losses


def batch(number):
    drawn = {name: mixture.batch(number) for name, mixture in mixtures.items()}
    return {name: each[1] for name, each in drawn.items()}, {name: each[0] for name, each in drawn.items()}


# %% [markdown]
# The plan has three stages. Ids, bits and hidden originals are sent to the discriminator, and no gradient is sent back.

# %%
nb.plan(step, *batch(0))

# %%
curves = {}
for number in range(STEPS):
    losses = step(*batch(number))
    if number % 10 == 9:
        for name, loss in losses.items():
            curves.setdefault(name, []).append(float(loss))
for name in ("germanic", "romance", "corrected", "detected"):
    plt.plot(np.arange(1, 1 + len(curves[name])) * 10, curves[name], label=name)
plt.xlabel("step")
plt.ylabel("loss")
plt.legend()
plt.show()

# %%
link = nb.last_report().links["germanic->discriminator"]
bits = 8 * link.payload_bytes / (mixtures["germanic"].rows * LENGTH)
print(f"{bits:.2f} bits a token, {np.log2(WORDS):.0f} of them an id")
