"""The counter-based generator: uniform, without ties between places or keys, and the same bits everywhere."""

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.codec import blocks

COUNT = 1 << 18
PLACES = tf.constant(np.arange(COUNT, dtype="uint32"))
NEIGHBOURS = [(1, 3), (2, 2), (0, 2), (2, 1), (1, 2 + 2**31), (1 + 2**31, 2), (0, 0)]


def key(*words: int) -> tf.Tensor:
    return tf.constant(words, tf.uint32)


def drawn(*words: int) -> np.ndarray:
    return blocks.uniform(key(*words), PLACES).numpy()


def surprise(counts: np.ndarray) -> float:
    """How many standard deviations chi-squared lies from what equal chances give."""
    expected = counts.sum() / counts.size
    chi = ((counts - expected) ** 2 / expected).sum()
    return float((chi - counts.size) / np.sqrt(2 * counts.size))


def mixed(x: int) -> int:
    """The finaliser once more, on Python's integers."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = ((x ^ x >> shift) * factor) % 2**32
    return x ^ x >> 15


def test_bits_are_those_of_the_definition() -> None:
    first = mixed((7 + 0x9E3779B9) % 2**32)
    second = mixed(first ^ 9)
    first = mixed((first + second) % 2**32)
    expected = [mixed((mixed(place ^ first) + second) % 2**32) for place in (0, 1, 2**32 - 1)]
    assert blocks.bits(key(7, 9), tf.constant([0, 1, 2**32 - 1], tf.uint32)).numpy().tolist() == expected


def test_numbers_lie_below_one_and_are_spread_evenly() -> None:
    numbers = drawn(1, 2)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(surprise(np.bincount((numbers * 1024).astype(int), minlength=1024))) < 5


@pytest.mark.parametrize("distance", [1, 2, 32, 64, 768])
def test_a_number_says_nothing_about_another_place(distance: int) -> None:
    numbers = drawn(1, 2)
    together = np.histogram2d(numbers[:-distance], numbers[distance:], 32, [[0, 1], [0, 1]])[0]
    assert abs(surprise(together)) < 5


@pytest.mark.parametrize("words", NEIGHBOURS)
def test_a_key_says_nothing_about_its_neighbours(words: tuple[int, int]) -> None:
    one, other = drawn(1, 2), drawn(*words)
    assert abs(surprise(np.histogram2d(one, other, 32, [[0, 1], [0, 1]])[0])) < 5
