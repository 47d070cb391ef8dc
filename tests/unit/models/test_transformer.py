"""The benchmark transformer: shapes, causality, learning, and positions of its scopes."""

import contextlib

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes
from whale_nebula.errors import OptionError
from whale_nebula.models import Sizes, transformer

SMALL = Sizes(vocabulary=11, length=6, width=8, heads=2, blocks=3)


@pytest.fixture(autouse=True)
def random_seed() -> None:
    keras.utils.set_random_seed(0)


def tokens(rows: int = 4) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SMALL.vocabulary, (rows, SMALL.length), dtype=np.int32)


def test_transformer_layers_are_in_order() -> None:
    names = [layer.name for layer in transformer(SMALL).layers]
    assert names == ["tokens", "embedding", "block0", "block1", "block2", "norm", "output"]


def test_transformer_parameter_count_matches_the_formula() -> None:
    width, inner, vocabulary = 8, 32, 11
    embedding = (vocabulary + SMALL.length) * width
    block = 4 * (width * width + width) + 2 * (2 * width) + (width * inner + inner) + (inner * width + width)
    output = 2 * width + width * vocabulary + vocabulary
    assert transformer(SMALL).count_params() == embedding + 3 * block + output


def test_transformer_is_causal() -> None:
    model, first = transformer(SMALL), tokens()
    second = first.copy()
    second[:, 4] = (second[:, 4] + 1) % SMALL.vocabulary
    before, after = model(first).numpy(), model(second).numpy()
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert np.abs(before[:, 4:] - after[:, 4:]).max(axis=(0, 2)).min() > 1e-3


def test_transformer_layer_is_restored_from_its_config() -> None:
    for name in ("embedding", "block0"):
        layer = transformer(SMALL).get_layer(name)
        restored = type(layer).from_config(layer.get_config())
        restored.build((None, 6) if name == "embedding" else (None, 6, 8))
        assert [v.shape for v in restored.variables] == [v.shape for v in layer.variables]


def test_around_scopes_cover_the_blocks() -> None:
    def around(block: int) -> contextlib.AbstractContextManager:
        return nb.stage(cluster="gpu" if block < 2 else "npu")

    with record_scopes() as tree, nb.cluster():
        transformer(SMALL, around=around)
    stages = str(tree).splitlines()[1:]
    # the embedding and two blocks; the third block, and norm and output
    assert stages == ["  stage gpu on gpu"] * 3 + ["  stage npu on npu"] * 2


@pytest.mark.parametrize(
    ("wrong", "mend"), [({"width": 10, "heads": 4}, "width=12"), ({"blocks": 0}, ""), ({"vocabulary": -1}, "")]
)
def test_invalid_transformer_sizes_are_refused_with_a_fix(wrong: dict, mend: str) -> None:
    with pytest.raises(OptionError) as caught:
        Sizes(**wrong)
    assert caught.value.mend.startswith(mend) and caught.value.mend
