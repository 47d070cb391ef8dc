"""What Keras's own train step does before its gradients: private parts of Keras's trainer, one function each."""

from __future__ import annotations

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


def create_variables(model: Any, data: Any, lifted: bool) -> None:
    """Do all that makes variables in Keras's own train step: forward, loss, optimizer and metrics, in this order.

    Those of the optimizer are made at once, or `lifted`: by the tf.function that is traced, which gives them values.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    outputs = model(x, training=True) if model._call_has_training_arg else model(x)
    model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=True)
    trained = model.trainable_variables
    if trained and lifted:
        model.optimizer.build(trained)
    elif trained:
        with tf.init_scope():
            model.optimizer.build(trained)
    model.compute_metrics(x, y, outputs, sample_weight=weights)
