"""The three networks: shapes, learning, saving, and equality under a cut."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.recommender import (
    HashedEmbedding,
    auc,
    dlrm,
    generated_clicks,
    multi_view,
    wide_and_deep,
)
from whale_nebula.models.recommender.networks import PairProducts

ROWS, FIELDS, NUMBERS, VALUES = 256, 4, 3, 64


def embedding(width: int, name: str) -> keras.layers.Layer:
    return keras.layers.Embedding(VALUES, width, name=name)


NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "wide_and_deep": lambda: wide_and_deep(
        embedding(4, "embedding"), embedding(1, "embedding_wide"), fields=FIELDS, numbers=NUMBERS, deep=(8,)
    ),
    "dlrm": lambda: dlrm(embedding(4, "embedding"), fields=FIELDS, numbers=NUMBERS, width=4, bottom=(), top=(8,)),
    "multi_view": lambda: multi_view(
        embedding(4, "embedding"), views=[[0, 2], [1], [3]], fields=FIELDS, numbers=NUMBERS, tower=(8, 4)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_recommender_network_is_saved_and_loaded(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = NETWORKS[name]()
    log = generated_clicks(8, fields=FIELDS, numbers=NUMBERS, vocabulary=VALUES)
    inputs = {"numbers": log.numbers, "ids": log.ids % VALUES}
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(inputs), loaded(inputs))


def test_pair_products_match_numpy() -> None:
    vectors = np.random.default_rng(0).standard_normal((5, 3, 4)).astype("float32")
    pairs = [(1, 0), (2, 0), (2, 1)]
    expected = np.stack([(vectors[:, one] * vectors[:, other]).sum(-1) for one, other in pairs], 1)
    np.testing.assert_allclose(PairProducts()(vectors), expected, rtol=1e-5)


@pytest.mark.parametrize("views", [[[0]], [[0], []], [[0], [9]]])
def test_invalid_views_are_refused(views: list[list[int]]) -> None:
    with pytest.raises(OptionError, match="view"):
        multi_view(embedding(4, "embedding"), views=views, fields=FIELDS, numbers=NUMBERS)


@pytest.mark.grid
def test_vectors_of_a_wrong_width_are_refused() -> None:
    with pytest.raises(OptionError, match="does not match vectors of width 4"):
        dlrm(HashedEmbedding(4), fields=2, numbers=2, width=8)


@pytest.mark.grid
def test_wide_and_deep_learns_the_generated_signal() -> None:
    """A network that learns finds a good part of what the chances of the log say; held-out rows. In every run, the
    example does: tests/examples/test_recommend.py.
    """
    log = generated_clicks(12_000, fields=2, numbers=2, vocabulary=30)
    _, ids = np.unique(log.ids, return_inverse=True)
    ids = ids.reshape(log.ids.shape)
    keras.utils.set_random_seed(1)
    wide = keras.layers.Embedding(61, 1)
    model = wide_and_deep(keras.layers.Embedding(61, 8), wide, fields=2, numbers=2, deep=(32,))
    model.compile(keras.optimizers.Adam(0.02), keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit({"numbers": log.numbers[:10_000], "ids": ids[:10_000]}, log.clicked[:10_000], 250, 8, verbose=0)
    held = {"numbers": log.numbers[10_000:], "ids": ids[10_000:]}
    assert log.chances is not None
    best = auc(log.chances[10_000:], log.clicked[10_000:])
    assert auc(model.predict(held, verbose=0), log.clicked[10_000:]) > best - 0.04
