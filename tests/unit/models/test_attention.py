"""Attention: compared with its formula, its masks, other memories, caches."""

import keras
import numpy as np
import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.attention import Attention, expand_mask

WIDTH, HEADS = 8, 2


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def attend_by_formula(layer: Attention, hidden: np.ndarray, memory: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Head by head, place by place."""
    query, key, value = (
        x @ dense.kernel.numpy() + dense.bias.numpy()
        for x, dense in ((hidden, layer.query), (memory, layer.key), (memory, layer.value))
    )
    size, taken = WIDTH // HEADS, np.zeros_like(query)
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        for place in range(len(hidden)):
            scores = np.exp(key[:, part] @ query[place, part] / np.sqrt(size)) * allowed[place]
            taken[place, part] = scores / scores.sum() @ value[:, part]
    return taken @ layer.out.kernel.numpy() + layer.out.bias.numpy()


@pytest.fixture
def layer() -> Attention:
    made = Attention(WIDTH, HEADS, spread=0.7)
    made.build((None, None, WIDTH), (None, None, 6))
    return made


def test_attention_equals_its_formula(layer: Attention) -> None:
    hidden, memory = normal(3, 5, WIDTH), normal(3, 4, 6, seed=1)
    visible = np.array([[True] * 4, [True, False, True, False], [False, False, False, True]])
    found = layer(hidden, memory, allowed=expand_mask(visible)).numpy()
    for row in range(3):
        expected = attend_by_formula(layer, hidden[row], memory[row], np.tile(visible[row], (5, 1)))
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-5)


def test_attention_without_visible_tokens_is_finite(layer: Attention) -> None:
    output = layer(normal(1, 2, WIDTH), normal(1, 4, 6), allowed=expand_mask(np.zeros((1, 4), bool))).numpy()
    assert np.isfinite(output).all()


def test_remembered_memory_gives_the_same_attention(layer: Attention) -> None:
    memory, cache = normal(2, 4, 6), layer.make_cache(normal(2, 4, 6))
    for seed in range(2):
        hidden = normal(2, 3, WIDTH, seed=seed)
        np.testing.assert_allclose(layer.attend_cache(hidden, cache), layer(hidden, memory), atol=1e-6)


def test_float16_attention_accumulates_in_float32() -> None:
    keras.utils.set_random_seed(0)
    half, hidden = Attention(WIDTH, HEADS, spread=0.7, dtype="mixed_float16"), normal(2, 5, WIDTH)
    single = Attention(WIDTH, HEADS)
    single.build(hidden.shape)
    found = half(hidden, allowed=expand_mask(np.array([[True] * 4 + [False]] * 2)))
    single.set_weights(half.get_weights())
    expected = single(hidden, allowed=expand_mask(np.array([[True] * 4 + [False]] * 2)))
    assert found.dtype == "float16"
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_width_not_divisible_by_heads_is_refused_with_a_fix() -> None:
    with pytest.raises(OptionError) as caught:
        Attention(10, 4)
    assert "width=12" in caught.value.mend
