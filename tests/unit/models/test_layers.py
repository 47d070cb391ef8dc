"""The sub-layers: position of the norm, masks, decoding token by token, saved and loaded."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.attention import Cache
from whale_nebula.models.embedding import TokenEmbedding
from whale_nebula.models.layers import FeedForward, SelfAttention, SubLayer

WIDTH = 8
BOTH_NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def sub_layers(norm: str = "post", **options: Any) -> list[SubLayer]:
    made = [
        SelfAttention(WIDTH, 2, norm=norm, spread=0.5, **options),
        FeedForward(WIDTH, 16, norm=norm, spread=0.5, **options),
    ]
    for layer in made:
        layer.build((None, None, WIDTH))
    return made


def test_post_norm_output_is_normalised() -> None:
    for layer in sub_layers("post"):
        out = layer(7 + 3 * normal(2, 5, WIDTH)).numpy()
        np.testing.assert_allclose(out.mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(out.std(-1), 1, atol=1e-4)


def test_pre_norm_adds_to_the_unnormalised_input() -> None:
    for layer in sub_layers("pre"):
        hidden = normal(2, 5, WIDTH)
        added = layer(hidden).numpy() - hidden
        # what is read has neither the input's size nor its mean
        np.testing.assert_allclose(layer(7 + 3 * hidden).numpy() - (7 + 3 * hidden), added, rtol=1e-3, atol=1e-4)
        assert np.abs(added).max() > 0.1


def test_invisible_token_does_not_affect_other_tokens() -> None:
    layer, first = sub_layers()[0], normal(1, 5, WIDTH)
    second, visible = first.copy(), np.array([[True, True, True, True, False]])
    second[:, 4] += 1
    before, after = layer(first, visible).numpy(), layer(second, visible).numpy()
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(layer(first).numpy() - layer(second).numpy())[:, :4].max() > 1e-3


def test_causal_attention_does_not_see_later_tokens() -> None:
    layer, first = sub_layers()[0], normal(1, 5, WIDTH)
    second = first.copy()
    second[:, 3] += 1
    changed = np.abs(layer(first, causal=True).numpy() - layer(second, causal=True).numpy()).max(axis=(0, 2))
    assert changed[:3].max() == 0 < changed[3:].min()


@BOTH_NORMS
def test_cached_attention_equals_whole_sequence(norm: str) -> None:
    layer, hidden = sub_layers(norm)[0], normal(3, 6, WIDTH)
    visible = np.array([[True] * 6, [True] * 4 + [False] * 2, [True, False, True, True, True, True]])
    cache, found = layer.empty(3, 6), []
    for position in range(6):
        out, cache = layer(hidden[:, position : position + 1], visible, cache=cache, position=position)
        found.append(out.numpy())
    expected = layer(hidden, visible, causal=True).numpy()
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


def test_dropout_is_active_only_in_training() -> None:
    for layer in [*sub_layers(dropout=0.5), SelfAttention(WIDTH, 2, attention_dropout=0.5, spread=0.5)]:
        hidden = normal(2, 5, WIDTH)
        np.testing.assert_array_equal(layer(hidden), layer(hidden))
        assert np.abs(layer(hidden, training=True) - layer(hidden, training=True)).max() > 1e-3


def test_sub_layers_propagate_the_keras_mask() -> None:
    tokens = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Embedding(9, WIDTH, mask_zero=True)(tokens)
    for layer in sub_layers():
        hidden = layer(hidden)
    assert hidden._keras_mask is not None


@pytest.mark.parametrize(
    "layer",
    [
        SelfAttention(WIDTH, 2, norm="pre", dropout=0.1, attention_dropout=0.2, epsilon=1e-6, spread=0.3, name="a"),
        FeedForward(WIDTH, 12, activation="gelu_new", norm="pre", dropout=0.1, epsilon=1e-6, spread=0.3, name="b"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_sub_layer_is_restored_from_its_config(layer: SubLayer) -> None:
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(restored) is type(layer)
    assert restored.get_config() == layer.get_config()
    layer.build((None, None, WIDTH))
    restored.build((None, None, WIDTH))
    restored.set_weights(layer.get_weights())
    hidden = normal(2, 3, WIDTH)
    np.testing.assert_array_equal(restored(hidden), layer(hidden))


def test_compute_output_spec_matches_outputs() -> None:
    """Layers are not traced to know it, so it could be wrong."""
    tokens, hidden = keras.Input((5,), dtype="int32"), keras.Input((5, WIDTH))
    embedding, (attention, inner) = TokenEmbedding(11, 6, WIDTH), sub_layers()
    cache = Cache(*(keras.KerasTensor((None, 2, 6, 4)) for _ in range(2)))
    declared = [embedding(tokens), embedding(hidden, reverse=True), attention(hidden), inner(hidden)]
    declared += [attention(hidden[:, :1], cache=cache, position=0)[0]]
    ids, states = np.zeros((1, 5), "int32"), normal(1, 5, WIDTH)
    computed = [embedding(ids), embedding(states, reverse=True), attention(states), inner(states)]
    computed += [attention(states[:, :1], cache=attention.empty(1, 6), position=0)[0]]
    assert [(each.shape[1:], each.dtype) for each in declared] == [(tuple(x.shape[1:]), x.dtype.name) for x in computed]


@pytest.mark.parametrize("wrong", [{"norm": "before"}, {"activation": "swish"}])
def test_invalid_layer_option_error_lists_valid_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is not a valid value") as caught:
        FeedForward(WIDTH, 16, **wrong)
    assert "valid values are" in caught.value.mend


class TestTokenEmbedding:
    def made(self, **options: Any) -> TokenEmbedding:
        layer = TokenEmbedding(11, 6, WIDTH, spread=0.5, **options)
        layer.build((None, None))
        return layer

    def test_output_is_the_normalised_sum_of_three_tables(self) -> None:
        layer, tokens, types = self.made(), np.array([[3, 9, 0]]), np.array([[0, 1, 1]])
        words, places, kinds = (table.embeddings.numpy() for table in (layer.tokens, layer.positions, layer.types))
        summed = words[tokens] + places[:3] + kinds[types]
        expected = (summed - summed.mean(-1, keepdims=True)) / summed.std(-1, keepdims=True)
        np.testing.assert_allclose(layer(tokens, types), expected, atol=1e-5)

    def test_single_token_with_position_equals_its_row(self) -> None:
        layer, tokens = self.made(), np.array([[3, 9, 0, 4]])
        np.testing.assert_allclose(layer(tokens[:, 2:3], position=2), layer(tokens)[:, 2:3], atol=1e-6)

    def test_reverse_scores_by_the_same_table(self) -> None:
        layer, hidden = self.made(), normal(2, 3, WIDTH)
        np.testing.assert_allclose(layer(hidden, reverse=True), hidden @ layer.tokens.embeddings.numpy().T, atol=1e-5)

    def test_too_long_row_is_refused(self) -> None:
        with pytest.raises(OptionError, match="7 tokens exceed the 6 positions"):
            self.made()(np.zeros((1, 7), "int32"))

    def test_layer_is_saved_and_loaded(self, tmp_path: Path) -> None:
        tokens = keras.Input((None,), dtype="int32")
        layer = TokenEmbedding(11, 6, WIDTH, types=1, norm=False, dropout=0.1, spread=0.5)
        model = keras.Model(tokens, layer(layer(tokens), reverse=True))
        model.save(tmp_path / "model.keras")
        restored = keras.models.load_model(tmp_path / "model.keras")
        rows = np.array([[1, 2, 3]])
        np.testing.assert_array_equal(restored(rows), model(rows))
        assert len(restored.weights) == 3  # one table for both ways, positions, types
