"""Random programs: the folds of all values must hold."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.passes.rules.harness import check_values, trace

Tensor = Any
OPS = 40


class RandomProgram:
    """Draws an op and its operands among the tensors made so far; operands that do not fit are drawn again.

    Each op is also run at once on the whole batch and on its pieces, to see whether it fits.
    """

    def __init__(self, seed: int, batches: list[list[np.ndarray]]) -> None:
        self.draw = random.Random(seed)
        self.weight = tf.Variable(np.random.default_rng(seed).normal(size=(4, 4)).astype("float32"))
        self.batches = batches

    def program(self, *inputs: Tensor) -> Tensor:
        row = np.array([[1.0, 2.0, 0.5, -1.0]], "float32")
        made = [*inputs, tf.identity(self.weight), tf.constant(row)]
        with tf.init_scope():
            tried = [[*map(tf.constant, batch), tf.identity(self.weight), tf.constant(row)] for batch in self.batches]
        for _ in range(20 * OPS):
            if len(made) < OPS:
                self.step(made, tried)
        return made[-1]

    def step(self, made: list[Tensor], tried: list[list[Tensor]]) -> None:
        step, places = self.draw.choice(STEPS), self.draw.choices(range(len(made)), k=2)
        state = self.draw.getstate()
        try:
            with tf.init_scope():
                results = [self.once(step, each, places, state) for each in tried]
            found = self.once(step, made, places, state)
        except (ValueError, tf.errors.InvalidArgumentError, TypeError, IndexError, ZeroDivisionError):
            return
        if found.shape.rank is not None and found.shape.rank <= 4 and found.dtype == tf.float32:
            made.append(found)
            for each, result in zip(tried, results, strict=True):
                each.append(result)

    def once(self, step: Callable[..., Tensor], tensors: list[Tensor], places: list[int], state: Any) -> Tensor:
        self.draw.setstate(state)
        return step(self, *(tensors[place] for place in places))

    def axis(self, tensor: Tensor) -> int:
        return self.draw.randrange(tensor.shape.rank)

    def one_axis(self, tensor: Tensor) -> Tensor:
        return self.draw.choice([tf.reduce_sum, tf.reduce_mean, tf.reduce_max])(
            tensor, self.axis(tensor), keepdims=self.draw.random() < 0.5
        )

    def order(self, tensor: Tensor) -> Tensor:
        axes = list(range(tensor.shape.rank))
        self.draw.shuffle(axes)
        return tf.transpose(tensor, axes)

    def shape(self, tensor: Tensor) -> Tensor:
        sizes = tf.shape(tensor)
        first, last = self.axis(tensor), self.axis(tensor)
        wanted = self.draw.choice([[-1], [-1, 4], [4, -1], [sizes[first], -1], [-1, sizes[last]], [-1, 2, 2], [2, -1]])
        return tf.reshape(tensor, wanted)

    def slice(self, tensor: Tensor) -> Tensor:
        parts: list[Any] = [slice(None)] * tensor.shape.rank
        parts[self.axis(tensor)] = self.draw.choice([0, slice(0, 1), slice(None, None, -1), tf.newaxis, slice(0, 2)])
        return tensor[tuple(parts)]


STEPS: list[Callable[..., Tensor]] = [
    lambda self, a, b: a + b,
    lambda self, a, b: a - b,
    lambda self, a, b: a * b,
    lambda self, a, b: tf.tanh(a),
    lambda self, a, b: a / (2.0 + tf.abs(b)),
    lambda self, a, b: tf.maximum(a, b),
    lambda self, a, b: tf.matmul(a, self.weight),
    lambda self, a, b: tf.matmul(a, b, transpose_b=True),
    lambda self, a, b: tf.matmul(a, b, transpose_a=True),
    lambda self, a, b: tf.tensordot(a, self.weight, [[self.axis(a)], [0]]),
    lambda self, a, b: tf.nn.softmax(a, self.axis(a)),
    lambda self, a, b: tf.cumsum(a, self.axis(a)),
    lambda self, a, b: tf.concat([a, b], self.axis(a)),
    lambda self, a, b: tf.stack([a, b], self.axis(a)),
    lambda self, a, b: tf.split(a, 2, self.axis(a))[0],
    lambda self, a, b: tf.expand_dims(a, self.axis(a)),
    lambda self, a, b: tf.squeeze(a, self.axis(a)),
    lambda self, a, b: tf.tile(a, [self.draw.choice([1, 1, 2]) for _ in a.shape]),
    lambda self, a, b: tf.repeat(a, 2, self.axis(a)),
    lambda self, a, b: tf.broadcast_to(a, tf.shape(b)),
    lambda self, a, b: tf.where(a > 0, a, b),
    lambda self, a, b: tf.gather(a, [0, 1], axis=self.axis(a)),
    lambda self, a, b: tf.reduce_sum(a) / tf.cast(tf.size(b), "float32"),
    lambda self, a, b: a / tf.cast(tf.shape(b)[0], "float32"),
    lambda self, a, b: tf.reduce_mean(a, [0, 1]),
    lambda self, a, b: tf.one_hot(tf.argmax(a, self.axis(a)), 4),
    lambda self, a, b: tf.boolean_mask(a, tf.reduce_sum(a, list(range(1, a.shape.rank))) > 0),
    lambda self, a, b: tf.pad(a, [[0, self.draw.choice([0, 0, 1])] for _ in a.shape]),
    *[lambda self, a, b: self.one_axis(a)] * 4,
    *[lambda self, a, b: self.order(a)] * 2,
    *[lambda self, a, b: self.shape(a)] * 4,
    *[lambda self, a, b: self.slice(a)] * 2,
]


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(2, 8))])
def test_folds_of_a_random_program_hold(seed: int) -> None:
    draw = np.random.default_rng(seed)
    arrays = [draw.normal(size=size).astype("float32") for size in ((6, 4), (6, 4, 4), (6,))]
    batches = [arrays] + [[array[:size] for array in arrays] for size in (2, 3, 4)]
    traced = trace(RandomProgram(seed, batches).program, arrays)
    assert check_values(traced, arrays, cuts=((3, 3), (2, 4)), tolerance=3e-4) > OPS / 2
