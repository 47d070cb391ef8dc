"""A learned basis is a part of the model: its results equal a manual projection, number by number."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.bottlenecks import make_orthonormal
from whale_nebula.errors import GradientError, NebulaWarning, NotYetError, PlanError, UnsupportedError

RANK, WIDTH = 3, 8
DRAWN = np.random.default_rng(0)
X, Y = DRAWN.standard_normal((7, 4, 5)).astype("float32"), DRAWN.standard_normal((7, 4, 2)).astype("float32")


def learned(rank: int = RANK, **options: Any) -> Any:
    return nb.compress(rank=rank, basis="learned", backward=None, **options)


class Multiplication(keras.layers.Layer):
    """A projection written by hand."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=values.shape, initializer="zeros", name="kernel")
        self.kernel.assign(values)

    def call(self, x: Any) -> Any:
        return tf.tensordot(x, self.kernel.value, 1)


def encoder() -> Any:
    return keras.layers.Dense(WIDTH, activation="tanh", name="encoder")


def decoder() -> Any:
    return keras.layers.Dense(2, name="decoder")


def by_hand() -> list[Any]:
    basis = make_orthonormal("bottleneck_gpu", WIDTH, RANK)
    return [Multiplication(basis), Multiplication(basis.T)]


def two_stages(scope: Any, first: Any = None, second: Any = None) -> Any:
    """Encoder and decoder in two stages, with a compress scope around both."""
    inputs = keras.Input((4, 5))
    with nb.cluster(), scope:
        with nb.stage(cluster="gpu"):
            hidden = (first or encoder())(inputs)
        with nb.stage(cluster="npu"):
            return keras.Model(inputs, (second or decoder())(hidden))


def functional(micro_batch: int) -> Any:
    inputs = keras.Input((4, 5))
    if not micro_batch:
        hidden = encoder()(inputs)
        for layer in by_hand():
            hidden = layer(hidden)
        return keras.Model(inputs, decoder()(hidden))
    with nb.cluster(), nb.pipeline(micro_batch):
        with nb.stage(cluster="gpu"):
            hidden = encoder()(inputs)
        with nb.stage(cluster="npu"), learned():
            return keras.Model(inputs, decoder()(hidden))


def sequential(micro_batch: int) -> Any:
    model = keras.Sequential([keras.Input((4, 5))])
    if not micro_batch:
        for layer in (encoder(), *by_hand(), decoder()):
            model.add(layer)
        return model
    with nb.cluster(), nb.pipeline(micro_batch), learned():
        with nb.stage(cluster="gpu"):
            model.add(encoder())
        with nb.stage(cluster="npu"):
            model.add(decoder())
    return model


class Subclassed(keras.Model):
    """Its scopes lie in its call. What stands between the stages goes with the producer."""

    def __init__(self, micro_batch: int) -> None:
        super().__init__()
        self.micro_batch = micro_batch
        self.encoder, self.decoder = encoder(), decoder()
        self.hand = [] if micro_batch else by_hand()

    def call(self, x: Any) -> Any:
        if not self.micro_batch:
            hidden = tf.nn.relu(self.encoder(x))
            for layer in self.hand:
                hidden = layer(hidden)
            return self.decoder(hidden)
        with nb.cluster(), nb.pipeline(self.micro_batch):
            with nb.stage(cluster="gpu"), learned():
                hidden = self.encoder(x)
            hidden = tf.nn.relu(hidden)
            with nb.stage(cluster="npu"):
                return self.decoder(hidden)


@functools.cache
def trained(make: Any, micro_batch: int) -> Any:
    """A model, its losses and its variables; tests look at it, and none of them changes it."""
    keras.utils.set_random_seed(1)
    model = make(micro_batch)
    model.compile(keras.optimizers.Adam(1e-2), "mse", run_eagerly=not micro_batch)
    history = model.fit(X, Y, epochs=2, batch_size=4, verbose=0, shuffle=False).history["loss"]
    return model, history, {tuple(v.shape): v.numpy() for v in model.trainable_variables}


@pytest.mark.parametrize(
    ("make", "micro_batch", "error"),
    [
        pytest.param(functional, 1, 0.0, marks=pytest.mark.grid),
        pytest.param(sequential, 3, 1e-6, marks=pytest.mark.grid),
        (Subclassed, 3, 1e-6),
    ],
)
def test_learned_basis_equals_a_projection_by_hand(make: Any, micro_batch: int, error: float) -> None:
    plain, losses, weights = trained(make, 0)
    cut, found, values = trained(make, micro_batch)
    np.testing.assert_allclose(found, losses, rtol=error)
    np.testing.assert_allclose(cut.predict(X, verbose=0), plain.predict(X, verbose=0), atol=error)
    assert values.keys() == weights.keys()
    for shape, each in values.items():
        np.testing.assert_allclose(each, weights[shape], atol=10 * error)
    moved = values[WIDTH, RANK] - make_orthonormal("bottleneck_gpu", WIDTH, RANK)
    assert np.abs(moved).min() > 1e-4, "the basis is trained"


@pytest.mark.grid
def test_learned_basis_is_used_in_evaluation() -> None:
    model, _, _ = trained(Subclassed, 3)
    expected = np.mean((model.predict(X, verbose=0) - Y) ** 2)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), expected, rtol=1e-6)
    assert len(model.variables) == 6, "with the same two variables"


def test_learned_basis_sends_rank_numbers_and_splits_its_variables() -> None:
    model = functional(2)
    model.compile("sgd", "mse")
    plan = nb.plan(model, X, Y)
    (boundary,) = plan.boundaries
    assert (boundary.shape, boundary.bytes, boundary.backward_bytes) == ((None, 4, RANK), *[4 * 4 * RANK * 4] * 2)
    assert plan.stages["gpu"].parameters - plan.stages["npu"].parameters == 5 * WIDTH + WIDTH - (WIDTH * 2 + 2)
    assert not plan.tied, "neither variable is in two stages"
    (note,) = plan.notes
    assert note == f"3 numbers cross for every 8 of a row, on the learned basis '{model.name}/bottleneck_gpu_down'"
    assert [v.path for v in model.trainable_variables][:2] == [
        f"{model.name}/bottleneck_gpu_down", f"{model.name}/bottleneck_gpu_npu_up"
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [WIDTH, WIDTH + 1])
def test_learned_basis_of_full_rank_is_not_used(rank: int) -> None:
    model = two_stages(learned(rank))
    plan = nb.plan(model, X)
    assert plan.boundaries[0].shape == (None, 4, WIDTH)
    assert plan.notes == (
        f"float32[?, 4, 8] of stage 'gpu' is sent without a basis: a rank of {rank} would not make it smaller",
    )
    assert len(model.variables) == 4


class Skips(keras.Model):
    """A skip over a stage, a branch inside one, and half precision: what `nb.verify` compares."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoder, self.middle, self.decoder = encoder(), keras.layers.Dense(WIDTH), decoder()

    def call(self, x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2), nb.compress(nb.codec.Rank(RANK, basis="learned", norm=True), backward=None):
            with nb.stage(cluster="a"):
                first = self.encoder(x)
            with nb.stage(cluster="b"):
                second = tf.cond(tf.size(x) > 0, lambda: tf.nn.relu(first * first), lambda: first)
                second = self.middle(second)
            with nb.stage(cluster="c"):
                return self.decoder(first + second)


@pytest.mark.grid
def test_learned_basis_with_skips_branches_and_norms() -> None:
    model = Skips()
    model.compile("sgd", "mse")
    found = nb.verify(model, X, Y)
    assert found.ok, str(found)
    names = sorted(v.name for v in model.trainable_variables if "bottleneck" in v.name)
    assert names == [
        "bottleneck_a_b_up", "bottleneck_a_c_up", "bottleneck_a_down", "bottleneck_b_c_up", "bottleneck_b_down"
    ]  # fmt: skip
    assert [boundary.shape for boundary in nb.plan(model, X, Y).boundaries] == [(None, 4, RANK)] * 2


def test_learned_basis_with_a_precision() -> None:
    nb.init(links="10gbit,0ms")
    model = two_stages(nb.compress(rank=RANK, basis="learned", int8=True))
    model.compile("sgd", "mse")
    (boundary,) = nb.plan(model, X, Y).boundaries
    assert (boundary.shape, boundary.codec, boundary.backward_codec) == ((None, 4, RANK), "int8", "int8")


def test_learned_basis_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model, file = functional(1), tmp_path / "of.weights.h5"
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    model.save_weights(file)
    again = functional(1)
    with pytest.raises(ValueError, match="expected 0 variables, but received 2"):
        again.load_weights(file)
    nb.plan(again, X)
    again.load_weights(file)
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


# ---------------------------------------------------------------------- custom loops
def make_step(model: Any, variables: Any) -> Any:
    optimizer = keras.optimizers.SGD(0.1)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        listed = variables()
        optimizer.apply_gradients(zip(tape.gradient(loss, listed), listed, strict=True))
        return loss

    return step


def test_variable_list_created_before_the_basis_is_refused() -> None:
    model = functional(1)
    before = model.trainable_variables
    with pytest.raises(GradientError, match=r"but not for '.*/bottleneck_gpu_down'"):
        make_step(model, lambda: before)(X, Y)


@pytest.mark.parametrize("part", [pytest.param(slice(0), marks=pytest.mark.grid), slice(2)])
def test_gradients_of_some_variables_leave_others_unchanged(part: slice) -> None:
    model, other = functional(1), tf.Variable(1.0)
    listed = [*(v.value for v in model.trainable_variables[part]), other]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) * other)
        return tape.gradient(loss, listed)

    assert nb.verify(step, X).ok


@pytest.mark.parametrize("inner", [False, True])
def test_learned_basis_outside_a_layer_call_is_refused(inner: bool) -> None:
    first, second = encoder(), decoder()

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), learned():
            with nb.stage(cluster="gpu"):
                hidden = first(x)
            with nb.stage(cluster="npu"):
                return second(hidden) if inner else tf.reduce_mean(hidden**2)

    with contextlib.nullcontext() if inner else pytest.raises(NotYetError, match="outside the call of a Keras lay"):
        step(X)
    assert len(second.variables) == 4 * inner, "the layer that reads it has both"


def test_learned_basis_belongs_to_the_model_of_the_step() -> None:
    class ModelWithOwnStep(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def call(self, x: Any) -> Any:
            return self.encoder(x)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape, nb.cluster(), learned():
                with nb.stage(cluster="gpu"):
                    hidden = self(data[0])
                with nb.stage(cluster="npu"):
                    loss = tf.reduce_mean(hidden**2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    model = ModelWithOwnStep()
    model.compile("sgd", "mse")
    assert nb.verify(model, X, Y).ok
    assert [v.name for v in model.trainable_variables][:2] == ["bottleneck_gpu_down", "bottleneck_gpu_npu_up"]


def test_frozen_model_has_a_frozen_basis() -> None:
    model = functional(1)
    model.trainable = False
    head = keras.Sequential([model, keras.layers.Dense(1)])
    head.compile("sgd", "mse")
    with tf.name_scope("around"):
        head.fit(X, Y[..., :1], verbose=0)
    assert [tuple(v.shape) for v in head.trainable_variables] == [(2, 1), (1,)]
    assert len(model.non_trainable_variables) == 6, "what crosses inside it is its own"


def test_eager_call_warns_that_the_basis_is_not_used() -> None:
    model = functional(1)
    with pytest.warns(NebulaWarning, match="no tensor is projected on its learned basis"):
        model(X)


# ---------------------------------------------------------------------- refusals
def test_second_order_gradient_through_a_basis_is_refused() -> None:
    model = functional(1)

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = tf.reduce_sum(model(x))
            penalty = tf.reduce_mean(inner.gradient(score, x) ** 2)
        return outer.gradient(penalty, model.trainable_variables)

    with pytest.raises(NotYetError, match="a second-order gradient through a learned basis"):
        step(tf.constant(X))


def test_built_optimizer_with_a_new_basis_is_refused() -> None:
    model = functional(1)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(UnsupportedError, match="is built before the variables of its learned basis exist"):
        model.fit(X, Y, verbose=0)


def test_crossings_in_another_order_are_refused() -> None:
    model = Skips()
    model.compile("sgd", "mse")
    nb.plan(model, X, Y)
    model._tracker.unlock()  # Keras forbids it from here on; a model that is loaded again may have been changed
    model.encoder = keras.layers.Dense(WIDTH + 1)
    model.decoder, model.middle = keras.layers.Dense(2), keras.layers.Dense(WIDTH + 1)
    with pytest.raises(PlanError, match=r"is \[8, 3\], but the tensor that crosses needs \[9, 3\]"):
        nb.plan(model, X, Y)


def make_reading_step(read: Any) -> Any:
    first, second = encoder(), decoder()

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="gpu"):
                hidden = first(x)
            with nb.stage(cluster="npu"):
                return read(hidden, second)

    return step


def test_tensor_read_outside_compress_crosses_whole() -> None:
    def read(hidden: Any, second: Any) -> Any:
        whole = tf.reduce_mean(hidden)
        with learned():
            return second(hidden), whole

    plan = nb.plan(make_reading_step(read), X)
    assert [boundary.shape for boundary in plan.boundaries] == [(None, 4, WIDTH), (None, 4, RANK)]


def test_reader_without_a_stage_of_a_projected_tensor_is_refused() -> None:
    def read(hidden: Any, second: Any) -> Any:
        with learned():
            return tf.vectorized_map(lambda number: tf.reduce_mean(hidden) * number, tf.range(3.0)), second(hidden)

    with pytest.raises(NotYetError, match="a learned basis for 'encoder"):
        make_reading_step(read)(X)


def test_gradient_inside_a_stage_with_a_basis_is_allowed() -> None:
    model = functional(1)

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                output = model(x)
                inner.watch(output)
                score = tf.reduce_sum(output**3)
            penalty = tf.reduce_mean(inner.gradient(score, output) ** 2)
        return outer.gradient(penalty, model.trainable_variables)

    assert nb.verify(step, X).ok


# ---------------------------------------------------------------------- values


# ---------------------------------------------------------------------- custom gradients
@tf.custom_gradient
def triple(x: Any) -> Any:
    """The same forward, and three times the gradient."""
    return x * 1.0, lambda upstream: 3.0 * upstream


class Custom(keras.layers.Layer):
    """Two stages with a custom gradient at the boundary: behind what is `sent`, or before what is `read`."""

    def __init__(self, *, sent: bool = False, read: str = "", scope: Any = learned) -> None:
        super().__init__()
        self.sent, self.read, self.scope = sent, read, scope
        self.encoder, self.decoder = encoder(), decoder()

    def build(self, shape: Any) -> None:
        self.encoder.build(shape)
        self.decoder.build((*shape[:-1], WIDTH))

    def call(self, x: Any) -> Any:
        with nb.cluster(), self.scope():
            with nb.stage(cluster="gpu"):
                hidden = self.encoder(x)
                hidden = triple(hidden) if self.sent else hidden
            with nb.stage(cluster="npu"):
                if self.read:
                    hidden = triple(tf.identity(hidden) if self.read == "identity" else hidden)
                return self.decoder(hidden)


def custom(**how: Any) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4, 5))
    model = keras.Model(inputs, Custom(**how)(inputs))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("how", [pytest.param({"sent": True}, marks=pytest.mark.grid), {"read": "identity"}], ids=str)
def test_custom_gradient_on_a_projected_tensor_is_applied(how: dict[str, Any]) -> None:
    model, plain = custom(**how), custom()
    kernels = [each.layers[-1].encoder.kernel for each in (model, plain)]
    first = np.array(kernels[0])
    assert nb.verify(model, X, Y).ok
    for each in (model, plain):
        each.train_on_batch(X, Y)
    ours, others = (np.array(kernel) - first for kernel in kernels)
    np.testing.assert_allclose(ours, 3.0 * others, atol=1e-6)
    assert np.abs(others).max() > 1e-3


def test_custom_gradient_as_first_reader_is_refused_with_a_fix() -> None:
    with pytest.raises(NotYetError, match=r"first read by a tf\.custom_gradient") as caught:
        nb.verify(custom(read="itself"), X, Y)
    assert "function(tf.identity(x))" in str(caught.value) and Path(__file__).name in str(caught.value)


@pytest.mark.grid
def test_projected_half_precision_stays_half_precision() -> None:
    model = two_stages(learned(), *(keras.layers.Dense(units, dtype="mixed_bfloat16") for units in (WIDTH, 2)))
    model.compile("sgd", "mse")
    assert nb.verify(model, X, Y).ok
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    assert [boundary.dtype for boundary in nb.plan(model, X, Y).boundaries] == ["bfloat16"]


@pytest.mark.grid
def test_model_called_twice_in_a_step_has_one_basis() -> None:
    model = functional(2)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - model(-x) - y) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    assert nb.verify(step, X, Y).ok
    assert len(model.variables) == 6
    assert [boundary.shape for boundary in nb.plan(step, X, Y).boundaries] == [(None, 4, RANK)] * 2
