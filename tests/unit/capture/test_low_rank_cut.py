"""`basis="svd"`: the cut in the basis of a linear layer's singular vectors equals a truncated kernel."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.bottlenecks import singular_vectors
from whale_nebula.errors import NebulaWarning, OptionError, UnsupportedError
from whale_nebula.models import Bert, BertSizes, load_bert, save_bert
from whale_nebula.models.text import SPECIAL, Vocabulary
from whale_nebula.strategies import low_rank_cut

ROWS, TIME, WIDTH, WIDE, RANK = 6, 5, 8, 12, 3
DRAWN = np.random.default_rng(0)
X = DRAWN.standard_normal((ROWS, TIME, WIDTH)).astype("float32")
Y = DRAWN.standard_normal((ROWS, TIME, 2)).astype("float32")
TOKENS = DRAWN.integers(1, 11, (ROWS, TIME)).astype("int32")


def svd_compress(rank: int = RANK, **options: Any) -> Any:
    return nb.compress(rank=rank, basis="svd", **{"backward": None, **options})


def randomize(layer: Any) -> Any:
    """The layer with a bias that is not zero, or its cut would not be seen."""
    layer.set_weights([np.random.default_rng(len(each)).standard_normal(each.shape) for each in layer.get_weights()])
    return layer


def truncate(kernel: np.ndarray, rank: int) -> np.ndarray:
    """The best approximation of a matrix, by NumPy alone."""
    u, s, v = np.linalg.svd(kernel.reshape(-1, kernel.shape[-1]).astype(np.float64), full_matrices=False)
    return np.asarray((u[:, :rank] * s[:rank]) @ v[:rank], np.float32).reshape(kernel.shape)


def run_uncut(model: Any) -> Any:
    """What the model gives without its cut, which it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NebulaWarning)
        return model(X).numpy()


LINEAR = {
    "dense": lambda: keras.layers.Dense(WIDE),
    "no bias": lambda: keras.layers.Dense(WIDE, use_bias=False),
    "einsum": lambda: keras.layers.EinsumDense("btd,de->bte", output_shape=(None, WIDE), bias_axes="e"),
}


def two_stages(layer: Any, scope: Any, *, residual: bool = False, dropout: bool = False) -> Any:
    inputs = keras.Input((TIME, WIDTH))
    with nb.cluster(), scope:
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(WIDE, activation="tanh")(inputs) if residual else inputs
            made = layer(hidden)
            made = keras.layers.Dropout(0.2, seed=1)(made) if dropout else made
            hidden = made + hidden if residual else made
        with nb.stage(cluster="npu"):
            model = keras.Model(inputs, keras.layers.Dense(2)(keras.activations.tanh(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("kind", ["dense", pytest.param("no bias", marks=pytest.mark.grid), "einsum"])
def test_svd_basis_equals_a_truncated_kernel(kind: str) -> None:
    keras.utils.set_random_seed(1)
    layer = LINEAR[kind]()
    model = two_stages(layer, svd_compress())
    randomize(layer)
    plain = run_uncut(model)
    found = model.predict(X, verbose=0)
    assert np.abs(found - plain).max() > 1e-2
    layer.kernel.assign(truncate(layer.kernel.numpy(), RANK))
    np.testing.assert_allclose(found, run_uncut(model), atol=1e-5)


def test_svd_basis_projects_a_residual_too() -> None:
    """With its residual the layer is the map [W; 1], whose right singular vectors are those of W."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(WIDE)
    model = two_stages(layer, svd_compress(), residual=True)
    randomize(layer)
    found = model.predict(X, verbose=0)
    (first, _, *_), kernel = [each for each in model.layers if isinstance(each, keras.layers.Dense)], layer.kernel
    hidden = first(X).numpy()
    joint = truncate(np.concatenate([kernel.numpy(), np.eye(WIDE)]), RANK)
    made = np.concatenate([hidden, hidden], -1) @ joint + layer.bias.numpy()
    np.testing.assert_allclose(found, model.layers[-1](np.tanh(made)).numpy(), atol=1e-5)


def test_svd_basis_gradients_equal_three_layers_and_rank_numbers_cross() -> None:
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(WIDE)
    model = two_stages(layer, svd_compress())
    randomize(layer)
    kernel, bias, (out, out_bias) = layer.kernel.numpy(), layer.bias.numpy(), model.layers[-1].get_weights()
    v = singular_vectors(kernel, RANK)
    by_hand = [tf.Variable(each) for each in (kernel, v.T, v, bias - bias @ v.T @ v, bias, out, out_bias)]
    with tf.GradientTape() as tape:
        w, down, up, offset, b, last, last_bias = by_hand
        z = tf.tensordot(tf.tensordot(X, w, 1) + b, down, 1)
        made = tf.tensordot(tf.tanh(tf.tensordot(z, up, 1) + offset), last, 1) + last_bias
        loss = tf.reduce_mean((made - Y) ** 2)
    gradients = dict(
        zip(["w", "down", "up", "offset", "b", "last", "last_bias"], tape.gradient(loss, by_hand), strict=True)
    )
    nb.plan(model, X, Y)
    before = {each.path: each.numpy() for each in model.trainable_variables}
    assert model.train_on_batch(X, Y) == pytest.approx(float(loss), rel=1e-5)
    moved = {each.path: (before[each.path] - each.numpy()) / 0.1 for each in model.trainable_variables}
    for end, name in (("gpu_down", "down"), ("npu_up", "up"), ("npu_offset", "offset"), (layer.kernel.path, "w")):
        (value,) = [each for path, each in moved.items() if path.endswith(end)]
        np.testing.assert_allclose(value, gradients[name], atol=1e-5, err_msg=name)
    links = nb.last_report().links
    assert {name: link.payload_bytes for name, link in links.items()} == {
        "gpu->npu": ROWS * TIME * RANK * 4,
        "npu->gpu": ROWS * TIME * RANK * 4 + 4,  # and the loss
    }


@pytest.mark.grid
def test_svd_basis_above_the_kernel_rank_is_exact() -> None:
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(WIDE)  # 8 x 12: its rank is 8
    model = two_stages(layer, svd_compress(WIDTH))
    randomize(layer)
    np.testing.assert_allclose(model.predict(X, verbose=0), run_uncut(model), atol=1e-5)


def test_svd_basis_of_full_rank_adds_no_projection() -> None:
    keras.utils.set_random_seed(1)
    model = two_stages(keras.layers.Dense(WIDE), svd_compress(WIDE))
    np.testing.assert_allclose(model.predict(X, verbose=0), run_uncut(model), atol=1e-6)
    assert len(model.trainable_variables) == 4


def test_svd_basis_with_precision_and_dropout() -> None:
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(WIDE)
    model = two_stages(layer, svd_compress(8, int8=True, backward="int8"), residual=True, dropout=True)
    model.train_on_batch(X, Y)
    assert nb.last_report().links["gpu->npu"].payload_bytes < ROWS * TIME * 8 * 2
    (down,) = [each for each in model.trainable_variables if each.path.endswith("_down")]
    assert down.shape == (WIDE, 8)


def bert(norm: Any) -> Bert:
    keras.utils.set_random_seed(1)
    sizes = BertSizes(vocabulary=11, length=TIME, width=8, heads=2, layers=2, inner=16, norm=norm, dropout=0.0)
    return Bert(sizes)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("norm", "layer", "sub_layer"),
    [("post", 0, "attention"), ("post", 1, "inner"), ("pre", 0, "inner"), ("pre", 1, "inner")],
)
def test_low_rank_cut_at_every_depth_of_a_bert(norm: str, layer: int, sub_layer: str) -> None:
    model = bert(norm)
    whole = model(TOKENS).numpy()
    pair = model.sub_layers[layer]
    linear = pair.inner.narrow if sub_layer == "inner" else pair.attention.attention.out
    with svd_compress(7):
        nb.place(model, low_rank_cut(model, layer, ["gpu", "npu"], sub_layer=sub_layer))
    found = model.predict(TOKENS, verbose=0)
    assert list(nb.plan(model, TOKENS).stages) == ["gpu", "npu"]
    (down,) = [each for each in model.variables if each.path.endswith("_down")]
    np.testing.assert_array_equal(down.numpy(), singular_vectors(linear.kernel.numpy(), 7).T)
    assert np.abs(found - whole).max() > 1e-3 and np.corrcoef(found.ravel(), whole.ravel())[0, 1] > 0.8
    nb.place(model, {})


def test_svd_basis_without_a_linear_layer_is_refused() -> None:
    model = two_stages(keras.layers.Dense(WIDE, activation="relu"), svd_compress())
    with pytest.raises(UnsupportedError, match=r"basis='svd' for .* output of Relu .*low_rank_cut"):
        model.predict(X, verbose=0)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"layers": 2}, r"layers=\[2\] is not valid for a BERT with 2"),
        ({"layers": "1"}, r"layers=\['1'\] is not valid for a BERT"),
        ({"layers": 1.5}, r"layers=\[1.5\] is not valid for a BERT"),
        ({"layers": 0, "clusters": "ab"}, "clusters='ab'"),
        ({"layers": [1, 0], "clusters": ["a", "b", "c"]}, "must be distinct and in ascending order"),
        ({"layers": 0, "sub_layer": "iner"}, "no sub-layer is called 'iner'"),
        ({"layers": 0, "clusters": ["gpu"]}, "is not a list of 2 clusters"),
    ],
)
def test_invalid_low_rank_cut_is_refused(options: Any, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        low_rank_cut(bert("post"), **{"clusters": ["gpu", "npu"], **options})
    with pytest.raises(OptionError, match="Sequential is not a Bert"):
        low_rank_cut(keras.Sequential(), 0, ["gpu", "npu"])
    with pytest.raises(OptionError, match="norm=True with basis='svd'"):
        nb.codec.Rank(3, basis="svd", norm=True)


@pytest.mark.grid
def test_low_rank_cut_of_a_loaded_bert(tmp_path: Path) -> None:
    save_bert(bert("post"), tmp_path, Vocabulary((*SPECIAL, *"abcdef")))
    model = load_bert(tmp_path)
    with svd_compress():
        nb.place(model, low_rank_cut(model, 1, ["gpu", "npu"]))
    model.predict(TOKENS, verbose=0)
    (down,) = [each for each in model.variables if each.path.endswith("_down")]
    kernel = model.sub_layers[1].inner.narrow.kernel.numpy()
    np.testing.assert_array_equal(down.numpy(), singular_vectors(kernel, RANK).T)
    nb.place(model, {})


@pytest.mark.parametrize("last", [0, *(pytest.param(last, marks=pytest.mark.grid) for last in (1, 2))])
def test_svd_basis_of_a_placed_dense_layer(last: int) -> None:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((TIME, WIDTH))
    hidden = inputs
    for number in range(4):
        hidden = keras.layers.Dense(WIDTH, name=f"dense{number}")(hidden)
    model = keras.Model(inputs, hidden)
    near, far = ("|".join(f"dense{n}" for n in numbers) for numbers in (range(last + 1), range(last + 1, 4)))
    with svd_compress():
        nb.place(model, {near: "gpu", far: "npu"})
    found, layer = model.predict(X, verbose=0), model.get_layer(f"dense{last}")
    layer.kernel.assign(truncate(layer.kernel.numpy(), RANK))
    np.testing.assert_allclose(found, run_uncut(model), atol=1e-5)
    nb.place(model, {})


@pytest.mark.grid
def test_low_rank_bypass_equals_the_uncut_model() -> None:
    """The LoRA cut: down-projection near, up-projection far, and the frozen kernel near, in what the by-pass reads."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((TIME, WIDTH))
    with nb.cluster():
        with nb.stage(cluster="gpu"):
            frozen = keras.layers.Dense(WIDE, activation="tanh", trainable=False)(inputs)
            down = keras.layers.Dense(RANK, use_bias=False)(frozen)
        with nb.stage(cluster="npu"):
            model = keras.Model(inputs, keras.layers.Dense(2)(keras.activations.tanh(keras.layers.Dense(WIDE)(down))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert nb.verify(model, X, Y).ok
    model.train_on_batch(X, Y)
    assert nb.last_report().links["gpu->npu"].payload_bytes == ROWS * TIME * RANK * 4
