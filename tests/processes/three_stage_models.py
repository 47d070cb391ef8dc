"""Small models over three clusters, each with a special feature in one stage, and Keras's results for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb

STAGES = ("front", "middle", "last")
ROWS = 12
X = np.random.default_rng(0).integers(0, 5, (ROWS, 4)).astype("int32")
Y = np.random.default_rng(1).random((ROWS, 4, 1)).astype("float32")


@keras.saving.register_keras_serializable("results")
class ActivityLoss(keras.layers.Layer):
    """Adds the mean square of its input as a loss."""

    supports_masking = True

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class RawLoss(keras.Model):
    """Its train step returns the loss of the batch under the name of a metric that counts another number."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.metrics[0].update_state(2.0 * loss)
        return {**self.get_metrics_result(), "loss": loss}


def build_model(feature: str, stage_name: str, *, cut: bool, replicated: str = "") -> keras.Model:
    """Three stages; the one at `stage_name` has the `feature`, and the one at `replicated` has two replicas."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    regularizers = {each: "l2" if (feature, each) == ("regularizer", stage_name) else None for each in STAGES}

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        with contextlib.ExitStack() as scopes:
            if cut and replicated:
                scopes.enter_context(nb.replica(2 if name == replicated else 1))
            if cut:
                scopes.enter_context(nb.stage(cluster=f"c{STAGES.index(name)}"))
            yield

    def added(name: str, x: Any) -> Any:
        return ActivityLoss()(x) if (feature, name) == ("add_loss", stage_name) else x

    outputs: dict[str, Any] = {}
    inputs = keras.Input((4,), dtype="int32")
    with nb.cluster() if cut else contextlib.nullcontext(), nb.pipeline(2) if cut else contextlib.nullcontext():
        with stage("front"):
            table = keras.layers.Embedding(
                5, 6, mask_zero=feature == "mask", embeddings_regularizer=regularizers["front"]
            )
            x = added("front", table(inputs))
            if feature == "output" and stage_name == "front":
                outputs["second"] = keras.layers.Dense(1, name="second")(x)
        with stage("middle"):
            x = added("middle", keras.layers.Dense(6, "tanh", kernel_regularizer=regularizers["middle"])(x))
            if feature == "output" and stage_name == "middle":
                outputs["second"] = keras.layers.Dense(1, name="second")(x)
        with stage("last"):
            x = added("last", keras.layers.Dense(1, kernel_regularizer=regularizers["last"], name="first")(x))
            outputs["first"] = x
    kind = RawLoss if feature == "raw loss" else keras.Model
    model = kind(inputs, outputs if "second" in outputs else x)
    names = list(outputs) if "second" in outputs else None
    model.compile(
        "sgd",
        dict.fromkeys(names, "mse") if names else "mse",
        metrics={each: ["mae"] for each in names} if names else ["mae"],
        weighted_metrics=None if names else [keras.metrics.MeanSquaredError(name="square")],
    )
    return model


def collect_results(model: keras.Model, two: bool) -> dict[str, Any]:
    """All results of Keras for a model, as numbers."""
    y = {"first": Y, "second": Y} if two else Y
    found: dict[str, Any] = {}
    found["evaluate first"] = model.evaluate(X, y, batch_size=5, verbose=0, return_dict=True)
    validation = (X[:7], {name: part[:7] for name, part in y.items()} if two else Y[:7])
    found["history"] = model.fit(
        X, y, batch_size=5, epochs=2, validation_data=validation, shuffle=False, verbose=0
    ).history
    found["evaluate"] = model.evaluate(X, y, batch_size=5, verbose=0, return_dict=True)
    found["metrics"] = {each.name: to_numbers(each.result()) for each in model.metrics}
    found["test_on_batch"] = model.test_on_batch(X, y, return_dict=True)
    found["train_on_batch"] = model.train_on_batch(X, y, return_dict=True)
    found["predict"] = model.predict(X, verbose=0)
    return {name: to_numbers(part) for name, part in found.items()}


def to_numbers(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: to_numbers(each) for name, each in part.items()}
    return np.asarray(part, "float64").tolist()


def run_case(feature: str, stage_name: str, *, cut: bool, replicated: str = "") -> dict[str, Any]:
    """The results of one of these models."""
    return collect_results(
        build_model(feature, stage_name, cut=cut, replicated=replicated), feature == "output" and stage_name != "last"
    )
