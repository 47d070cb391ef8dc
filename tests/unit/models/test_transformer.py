"""The benchmark transformer: shapes, that it looks only backward, that it learns, where its scopes lie."""

import contextlib

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.errors import OptionError
from whale_nebula.models import Sizes, transformer
from whale_nebula.models.transformer import Around, nowhere
from whale_nebula.scopes import parsing

SMALL = Sizes(vocabulary=11, length=6, width=8, heads=2, blocks=3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.set_random_seed(0)


def tokens(rows: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SMALL.vocabulary, (rows, SMALL.length), dtype=np.int32)


def test_its_layers_lie_in_a_sequence() -> None:
    names = [layer.name for layer in transformer(SMALL).layers]
    assert names == ["tokens", "embedding", "block0", "block1", "block2", "norm", "output"]


def test_the_number_of_parameters_is_that_of_the_formula() -> None:
    width, inner, vocabulary = 8, 32, 11
    embedding = (vocabulary + SMALL.length) * width
    block = 4 * (width * width + width) + 2 * (2 * width) + (width * inner + inner) + (inner * width + width)
    output = 2 * width + width * vocabulary + vocabulary
    assert transformer(SMALL).count_params() == embedding + 3 * block + output


def test_a_token_changes_nothing_before_it() -> None:
    model, first = transformer(SMALL), tokens()
    second = first.copy()
    second[:, 4] = (second[:, 4] + 1) % SMALL.vocabulary
    before, after = model(first).numpy(), model(second).numpy()
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert np.abs(before[:, 4:] - after[:, 4:]).max(axis=(0, 2)).min() > 1e-3


def test_the_same_token_means_another_thing_at_another_place() -> None:
    model = transformer(SMALL)
    logits = model(np.full((1, SMALL.length), 3, np.int32)).numpy()[0]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.grid
def test_it_learns_to_repeat() -> None:
    model = transformer(SMALL)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = tokens(32)
    history = model.fit(x, x, epochs=20, batch_size=32, verbose=0).history["loss"]
    assert history[-1] < 0.6 * history[0]


def test_dropout_works_in_training_only() -> None:
    model = transformer(Sizes(**{**vars(SMALL), "dropout": 0.5}))
    x = tokens()
    assert np.array_equal(model(x).numpy(), model(x).numpy())
    assert not np.array_equal(model(x, training=True).numpy(), model(x, training=True).numpy())


def test_a_layer_can_be_made_again_from_its_config() -> None:
    for name in ("embedding", "block0"):
        layer = transformer(SMALL).get_layer(name)
        again = type(layer).from_config(layer.get_config())
        again.build((None, 6) if name == "embedding" else (None, 6, 8))
        assert [v.shape for v in again.variables] == [v.shape for v in layer.variables]


def test_scopes_lie_around_the_blocks() -> None:
    def around(block: int) -> contextlib.AbstractContextManager:
        return nb.stage(cluster="gpu" if block < 2 else "npu")

    with parsing() as tree, nb.cluster():
        transformer(SMALL, around=around)
    stages = str(tree).splitlines()[1:]
    # the embedding and two blocks; the third block, and norm and output
    assert stages == ["  stage gpu on gpu"] * 3 + ["  stage npu on npu"] * 2


def losses(around: Around) -> list[float]:
    """With Adam, which squares slices: positions have one slice each, however the batch is cut."""
    keras.utils.set_random_seed(1)
    model = transformer(Sizes(**{**vars(SMALL), "blocks": 2}), around=around)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = tokens(5)
    return model.fit(x, x, epochs=8, batch_size=5, shuffle=False, verbose=0).history["loss"]


@pytest.fixture(scope="module")
def uncut() -> list[float]:
    nb.shutdown()
    return losses(nowhere)


@pytest.mark.grid
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_trains_in_two_stages_as_in_one(uncut: list[float], micro_batches: int) -> None:
    """Three micro-batches do not divide five rows."""
    nb.shutdown()
    with nb.cluster(), nb.pipeline(micro_batches):
        cut = losses(lambda block: nb.stage(cluster="gpu" if block == 0 else "npu"))
    assert tuple(nb.last_report().stages) == ("gpu", "npu")
    np.testing.assert_allclose(cut, uncut, rtol=1e-5)
    nb.shutdown()


@pytest.mark.parametrize("wrong", [{"width": 10, "heads": 4}, {"blocks": 0}, {"vocabulary": -1}])
def test_impossible_sizes_are_refused_with_a_mend(wrong: dict) -> None:
    with pytest.raises(OptionError) as caught:
        Sizes(**wrong)
    assert caught.value.mend


def test_the_mend_for_a_width_divides() -> None:
    with pytest.raises(OptionError) as caught:
        Sizes(width=10, heads=4)
    assert caught.value.mend == "width=12"
