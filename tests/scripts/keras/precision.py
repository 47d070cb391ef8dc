"""Mixed precision, and other element types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import layers

from tests.parity_harness import Cut
from tests.scripts.keras.script import adam, add, dense, labels, rows, script, two_parts


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    """Keras's global policy, for a while."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def mixed(name: str, dtype: str, optimizer: Any, *, tolerance: str = "mixed", **options: Any) -> None:
    """A classifier under a policy; its last layer computes in float32, as Keras's guide says."""

    def build(cut: Cut) -> Any:
        with policy(dtype):
            inputs = keras.Input((6,))
            with cut.program():
                with cut.at(0):
                    hidden = layers.Dense(8, activation="tanh")(inputs)
                with cut.at(1):
                    hidden = layers.LayerNormalization()(layers.Dense(8, activation="gelu")(hidden))
                    outputs = layers.Dense(4, activation="softmax", dtype="float32")(hidden)
            model = keras.Model(inputs, outputs)
            model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    add(f"mixed_{name}", build, labels(), tolerance=tolerance, **options)


mixed(
    "bfloat16",
    "mixed_bfloat16",
    adam,
    tolerance="bfloat16",  # gradients of three pieces that are added by hand differ by 3e-3 in the first step
)
mixed("float16", "mixed_float16", adam)  # LossScaleOptimizer: all gradients pass one tf.cond
mixed(
    "float16_dynamic",
    "mixed_float16",
    lambda: keras.optimizers.LossScaleOptimizer(
        adam(global_clipnorm=0.5), initial_scale=2.0**15, dynamic_growth_steps=2
    ),  # the scale grows after two steps
)
mixed(
    "float16_overflows",
    "mixed_float16",
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-2), initial_scale=2.0**40),
)


@script(rows())
def float64(cut: Cut) -> Any:
    """Everything in double precision."""
    with policy("float64"):
        model = dense(cut)
        model.compile(adam(), "mse", metrics=["mae"])
    return model


@script(rows(), tolerance="mixed")
def one_stage_in_bfloat16(cut: Cut) -> Any:
    """A policy for single layers: what crosses is bfloat16."""
    first = layers.Dense(8, activation="tanh", dtype="mixed_bfloat16")
    return two_parts(cut, keras.Input((6,)), first, layers.Dense(3))


@script(rows(), tolerance="mixed", micro=(1,))
def scales_of_float8(cut: Cut) -> Any:
    """The optimizer overwrites scales with their gradients, so there is one micro-batch."""
    first, second = layers.Dense(8, activation="tanh"), layers.Dense(3)
    model = two_parts(cut, keras.Input((6,)), first, second)
    for layer in (first, second):
        layer.quantize("float8")
    model.compile(adam(), "mse")
    return model
