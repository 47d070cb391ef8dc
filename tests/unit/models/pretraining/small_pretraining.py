"""A small generator and discriminator, rows for them, and a step of both."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.models import Bert, BertSizes, masked_lm
from whale_nebula.models.pretraining import DISCRIMINATOR, Corruption, Discriminator, Objectives, Pretraining, make_adam

PAD, START, END, MASK, FIRST = 0, 2, 3, 4, 5
VOCABULARY, LENGTH, STEPS = 32, 16, 12
HOW = Corruption(mask=MASK, end=END, special=(PAD, START, END), share=0.25, seed=3)
SIZES = BertSizes(vocabulary=VOCABULARY, length=LENGTH, width=8, heads=2, layers=1, inner=16, dropout=0.0)
Batch = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def rows(count: int, seed: int = 0, *, pairs: bool = True) -> np.ndarray:
    """Sentences, and every second row a pair."""
    draw, found = np.random.default_rng(seed), np.full((count, LENGTH), PAD, np.int32)
    for number, row in enumerate(found):
        lengths = draw.integers(2, 7, 1 + (pairs and number % 2))
        ids = [START]
        for length in lengths:
            ids += [*draw.integers(FIRST, VOCABULARY, length), END]
        row[: len(ids)] = ids
    return found


def pretraining(
    names: tuple[str, ...] = ("all",), objectives: Objectives | None = None, sizes: BertSizes = SIZES, adam: bool = True
) -> Pretraining:
    """Networks with optimizers, the same each time; what is not about updates is traced sooner without Adam."""
    keras.utils.set_random_seed(1)
    generators = {name: masked_lm(Bert(sizes, name=f"generator_{name}")) for name in names}
    objectives = objectives or Objectives()
    discriminator = Discriminator(Bert(sizes, name="kept"), corrects=objectives.originals)
    networks = {**generators, DISCRIMINATOR: discriminator}
    rules = {name: make_adam(e, 0.01, steps=STEPS) if adam else keras.optimizers.SGD() for name, e in networks.items()}
    return Pretraining(generators, discriminator, HOW, objectives, rules)


def batches(names: tuple[str, ...], counts: tuple[int, ...], steps: int) -> list[Batch]:
    """So many rows for each generator in each step: their numbers, and the texts."""
    whole = sum(counts)
    found = []
    for step in range(steps):
        texts = {name: rows(count, step * 10 + at) for at, (name, count) in enumerate(zip(names, counts, strict=True))}
        firsts = np.cumsum([0, *counts[:-1]])
        numbers = {
            name: (step * whole + first + np.arange(count)).astype(np.int32)
            for name, count, first in zip(names, counts, firsts, strict=True)
        }
        found.append((numbers, texts))
    return found


def stages(names: Mapping[str, int] | None = None, micro_batch: int = 1) -> Callable[[str], Any]:
    """A cluster for each network, in as many replicas as `names` says."""

    def around(name: str) -> ExitStack:
        stack = ExitStack()
        if names is not None:
            stack.enter_context(nb.replica(names.get(name, 1)))
        if micro_batch > 1:
            stack.enter_context(nb.pipeline(micro_batch))
        stack.enter_context(nb.stage(cluster=name))
        return stack

    return around


def make_step(model: Pretraining, around: Callable[[str], Any] | None = None) -> Any:
    """The step of a training: under scopes, or as plain TensorFlow."""
    if around is None:

        @tf.function
        def plain(numbers: Any, texts: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                losses = model.losses(texts, numbers)
            model.update(tape, losses)
            return losses

        return plain

    @nb.function
    def step(numbers: Any, texts: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape, nb.cluster(), nb.compress(fp16=True):
            losses = model.losses(texts, numbers, around)
        model.update(tape, losses)
        return losses

    return step
