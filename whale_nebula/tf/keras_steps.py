"""What Keras's own train step does before its gradients: private parts of Keras's trainer, one function each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.tf.private import TensorFlowTrainer


def trains_as_keras(model: Any) -> bool:
    """Whether `model.train_step` is Keras's own."""
    return isinstance(model, keras.Model) and type(model).train_step is TensorFlowTrainer.train_step


def lacks_variables(model: Any) -> bool:
    """Whether the first call of a compiled model's own train step makes variables: its optimizer has none yet."""
    optimizer = model.optimizer
    return isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built


def create_variables(model: Any, data: Any, later: bool) -> None:
    """Do all that makes variables in Keras's own train step: forward, loss, optimizer and metrics, in this order.

    They get their values at once; or, but for those of metrics, `later`: from the tf.function that is traced.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    with contextlib.nullcontext() if later else tf.variable_creator_scope(_create_at_once):
        outputs = model(x, training=True) if model._call_has_training_arg else model(x)
        model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=True)
        if trained := model.trainable_variables:
            with contextlib.nullcontext() if later else tf.init_scope():
                model.optimizer.build(trained)
    with tf.variable_creator_scope(_create_at_once):
        model.compute_metrics(x, y, outputs, sample_weight=weights)


def _create_at_once(create: Callable[..., Any], **options: Any) -> Any:
    """Outside of the function that is traced, which would make a condition for each; but for one whose value is made
    inside.
    """
    inside = tf.is_symbolic_tensor(options.get("initial_value"))
    with contextlib.nullcontext() if inside else tf.init_scope():
        return create(**options)
