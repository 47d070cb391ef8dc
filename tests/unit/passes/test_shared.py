"""A seed generator in two stages: correct with one micro-batch in one place, refused where the order would vary."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import PlacementError

ROWS = np.ones((4, 3), "float32")


def noisy(micro_batches: int, *, shared: bool, draw: Any) -> Any:
    """A step whose two stages draw from one generator, or from one each."""
    one, other = (keras.random.SeedGenerator(3) for _ in range(2))

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = draw(x, one)
            with nb.stage(cluster="b"):
                return draw(x, one if shared else other)

    return step


def added(x: Any, seed: Any) -> Any:
    return x + keras.random.normal(tf.shape(x), seed=seed)


def test_two_stages_cannot_share_one_with_micro_batches() -> None:
    with pytest.raises(PlacementError, match="seed_generator") as caught:
        noisy(2, shared=True, draw=added)(ROWS)
    assert "test_shared.py" in caught.value.where
    assert "SeedGenerator" in caught.value.mend


@pytest.mark.parametrize(("micro_batches", "shared"), [(1, True), (2, False)])
def test_elsewhere_they_can(micro_batches: int, shared: bool) -> None:
    assert noisy(micro_batches, shared=shared, draw=added)(ROWS).shape == (4, 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_metric_fed_by_two_stages_is_read_before_it_is_added_to(micro_batches: int) -> None:
    mean = keras.metrics.Mean()

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = tf.sin(x)
                mean.update_state(x)
            with nb.stage(cluster="b"):
                x = tf.sin(x)
                mean.update_state(x)
        return mean.result()

    if micro_batches > 1:
        with pytest.raises(PlacementError, match="mean/total"):
            step(ROWS)
    else:
        assert float(step(ROWS)) == pytest.approx((np.sin(1.0) + np.sin(np.sin(1.0))) / 2.0)


@pytest.mark.parametrize("links", [None, "100mbit,1ms"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_draw_between_two_stages_is_at_home_in_one(micro_batches: int, links: str | None) -> None:
    seed = keras.random.SeedGenerator(3)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                x = tf.sin(x)
            x = added(x, seed)
            with nb.stage(cluster="b"):
                return tf.identity(x)

    nb.shutdown()
    with nb.init(links=links):
        before = seed.state.numpy()
        first, second = step(ROWS), step(ROWS)
        assert not np.allclose(first, second)
        np.testing.assert_array_equal(seed.state.numpy() - before, [0, 2 * micro_batches])
