"""BERT as a model: its parts, its mask, its sizes; saved, nested, decomposed, cut into stages."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.bert import Bert, BertSizes

SIZES = {"vocabulary": 11, "length": 6, "width": 8, "heads": 2, "layers": 2, "inner": 16, "spread": 0.5}
TOKENS = np.array([[2, 5, 3, 0], [2, 7, 9, 3]], "int32")
BOTH_NORMS = pytest.mark.parametrize("norm", ["post", pytest.param("pre", marks=pytest.mark.grid)])


def make_bert(name: str = "bert", **options: Any) -> Bert:
    return Bert(BertSizes(**{**SIZES, "dropout": 0.0, **options}), name=name)


def test_bert_parameter_count_matches_the_formula() -> None:
    """The published count of the encoder without its pooler, by formula: nothing is built at that size here."""

    def formula(s: BertSizes) -> int:
        embedding = (s.vocabulary + s.length + s.types + 2) * s.width
        layer = 4 * (s.width + 1) * s.width + (s.width + 1) * s.inner + (s.inner + 1) * s.width + 4 * s.width
        return embedding + s.layers * layer

    assert formula(BertSizes()) == 108_891_648
    assert make_bert().count_params() == formula(make_bert().sizes)


@BOTH_NORMS
def test_padding_does_not_affect_bert_output(norm: str) -> None:
    bert = make_bert(norm=norm)
    np.testing.assert_allclose(bert(TOKENS[:1])[:, :3], bert(TOKENS[:1, :3]), atol=1e-5)


def test_bert_padding_token_is_configurable() -> None:
    bert, row = make_bert(padding=9), np.array([[2, 5, 0]])
    np.testing.assert_allclose(bert(np.array([[2, 5, 0, 9]]))[:, :3], bert(row), atol=1e-5)
    assert np.abs(bert(np.array([[2, 5, 0, 0]]))[:, :3] - bert(row)).max() > 1e-3


@BOTH_NORMS
def test_bert_equals_its_composed_parts(norm: str) -> None:
    bert = make_bert(norm=norm)
    visible, hidden = bert.visible(TOKENS), bert.embedding(TOKENS)
    for attention, inner in bert.sub_layers:
        hidden = inner(attention(hidden, visible))
    hidden = hidden if bert.ending is None else bert.ending(hidden)
    np.testing.assert_allclose(hidden, bert(TOKENS), atol=1e-6)
    assert (bert.ending is None) == (norm == "post")


@BOTH_NORMS
def test_bert_is_saved_and_loaded(norm: str, tmp_path: Path) -> None:
    bert = make_bert(norm=norm, activation="relu", dropout=0.1)
    bert.save(tmp_path / "bert.keras")
    loaded = keras.models.load_model(tmp_path / "bert.keras")
    assert isinstance(loaded, Bert)
    assert loaded.sizes == bert.sizes
    np.testing.assert_array_equal(loaded(TOKENS), bert(TOKENS))


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"vocabulary": -1}, {"width": 10, "heads": 4}, {"norm": "both"}, {"activation": "tanh"}]
)
def test_invalid_bert_sizes_are_refused_with_a_fix(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        BertSizes(**wrong)
    assert caught.value.mend != OptionError.usual_mend


def test_frozen_bert_stays_frozen_after_from_config() -> None:
    sizes = BertSizes(**SIZES)
    bert = Bert(sizes)
    bert.trainable = False
    loaded = Bert.from_config(bert.get_config())
    assert not loaded.trainable_variables and not Bert(sizes, trainable=False).trainable_variables
    loaded.trainable = True
    assert len(loaded.trainable_variables) == len(Bert(sizes).trainable_variables)
