"""Hugging Face folders: small generated ones give NumPy's numbers; invalid ones are refused with distinct errors.

Tensors, names and shapes are those of their files (dense kernels transposed, norms with `weight` and `bias`).
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from tests.unit.models.numpy_bert import Tensors, bert_tensors, head_tensors, hidden_states, logits
from whale_nebula.errors import ConfigError, DataError, WeightsError
from whale_nebula.models.bert import Bert, BertSizes
from whale_nebula.models.bert_folder import load_bert, load_masked_lm, save_bert
from whale_nebula.models.masked_lm import masked_lm
from whale_nebula.models.text.vocabulary import SPECIAL, Vocabulary

CONFIG = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 23,
    "max_position_embeddings": 10,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "transformers_version": "4.40.0",
}
TOKENS = np.array([[2, 9, 17, 3, 0, 0], [2, 22, 5, 6, 7, 3]], "int32")
WORDS = Vocabulary((*SPECIAL, *(f"word{number}" for number in range(18))))
BOTH = pytest.mark.parametrize("pre", [False, True], ids=["bert", "megatron-bert"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def write_folder(folder: Path, tensors: Tensors | None = None, words: int | None = 23, **changed: Any) -> Path:
    """A folder as they are downloaded; `changed` of its configuration, None leaves a name out."""
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in {**CONFIG, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(bert_tensors() if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if words is not None:
        (folder / "vocab.txt").write_text("".join(f"word{number}\n" for number in range(words)))
    return folder


def add_prefix(tensors: Tensors) -> Tensors:
    return {f"bert.{name}": tensor for name, tensor in tensors.items()}


@BOTH
def test_loaded_bert_equals_the_numpy_reference(folder: Path, pre: bool) -> None:
    tensors = bert_tensors(pre=pre)
    bert = load_bert(write_folder(folder, tensors, model_type="megatron-bert" if pre else "bert"))
    expected = hidden_states(tensors, TOKENS, heads=2, pre=pre)
    there = TOKENS != 0
    np.testing.assert_allclose(bert(TOKENS).numpy()[there], expected[there], rtol=1e-4, atol=1e-4)


def test_loaded_sizes_come_from_config_json(folder: Path) -> None:
    bert = load_bert(write_folder(folder, layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh"), name="es")
    expected = BertSizes(23, 10, 8, 2, 2, 12, dropout=0.1, attention_dropout=0.2, epsilon=1e-6, activation="gelu_new")
    assert (bert.name, bert.sizes) == ("es", expected)


def test_load_without_weights_needs_no_tensors(folder: Path) -> None:
    there = load_bert(write_folder(folder))
    (folder / "model.safetensors").unlink()
    form = load_bert(folder, weights=False)
    assert form.sizes == there.sizes
    assert [weight.path for weight in form.weights] == [weight.path for weight in there.weights]


def test_missing_config_json_fields_have_defaults(folder: Path) -> None:
    usual = ("model_type", "hidden_act", "layer_norm_eps", "initializer_range", "pad_token_id")
    assert load_bert(write_folder(folder, **dict.fromkeys(usual))).sizes == BertSizes(
        23, 10, 8, 2, 2, 12, dropout=0.1, attention_dropout=0.2
    )


def test_tensor_prefix_and_other_heads_are_accepted(folder: Path) -> None:
    plain = load_bert(write_folder(folder))(TOKENS)
    beside = {
        "bert.pooler.dense.weight": np.zeros((8, 8), "float32"),
        "bert.embeddings.position_ids": np.arange(10)[None],
        "classifier.weight": np.zeros((2, 8), "float32"),
    }
    np.testing.assert_array_equal(load_bert(write_folder(folder, add_prefix(bert_tensors()) | beside))(TOKENS), plain)


def test_old_layer_norm_names_are_accepted(folder: Path) -> None:
    plain, old = load_bert(write_folder(folder))(TOKENS), {}
    for name, tensor in bert_tensors().items():
        if "LayerNorm" in name:
            name = name.replace("weight", "gamma").replace("bias", "beta")
        old[name] = tensor
    np.testing.assert_array_equal(load_bert(write_folder(folder, old))(TOKENS), plain)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float16", marks=pytest.mark.grid),
        ml_dtypes.bfloat16,
        pytest.param("float64", marks=pytest.mark.grid),
    ],
)
def test_tensors_of_other_dtypes_are_converted(folder: Path, dtype: Any) -> None:
    plain = load_bert(write_folder(folder))(TOKENS)
    found = load_bert(write_folder(folder, {name: each.astype(dtype) for name, each in bert_tensors().items()}))
    assert found.dtype == "float32"
    np.testing.assert_allclose(found(TOKENS), plain, atol=0.1)


def test_load_masked_lm_includes_the_head(folder: Path) -> None:
    tensors, places = bert_tensors() | head_tensors(), np.array([[1], [4]], "int32")
    file = add_prefix(bert_tensors()) | head_tensors()
    file["cls.predictions.decoder.weight"] = tensors["embeddings.word_embeddings.weight"].copy()
    model = load_masked_lm(write_folder(folder, file))
    expected = logits(tensors, hidden_states(tensors, TOKENS, heads=2))
    found = model({"tokens": TOKENS, "places": places}).numpy()[:, 0]
    np.testing.assert_allclose(found, expected[[0, 1], [1, 4]], rtol=1e-4, atol=1e-3)


@BOTH
def test_saved_bert_folder_loads_again(folder: Path, pre: bool) -> None:
    sizes = BertSizes(23, 10, 8, 2, 2, 12, norm="pre" if pre else "post", dropout=0.1, activation="relu")
    bert = Bert(sizes)
    save_bert(bert, folder, WORDS)
    file = load_file(folder / "model.safetensors")
    assert {name: each.shape for name, each in file.items()} == {
        name: each.shape for name, each in bert_tensors(pre=pre).items()
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == ("megatron-bert" if pre else "bert")
    assert config.keys() >= CONFIG.keys() - {"transformers_version"}
    assert (folder / "vocab.txt").read_text().splitlines()[:6] == [*SPECIAL, "word0"]
    again = load_bert(folder)
    np.testing.assert_array_equal(again(TOKENS), bert(TOKENS))
    assert again.sizes == BertSizes(23, 10, 8, 2, 2, 12, norm=sizes.norm, attention_dropout=0.1, activation="relu")


def test_saved_masked_lm_loads_again(folder: Path) -> None:
    model = masked_lm(Bert(BertSizes(23, 10, 8, 2, 1, 12, spread=0.5)))
    model.bias.bias.assign(np.arange(23.0))
    save_bert(model, folder, WORDS)
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(add_prefix(bert_tensors(layers=1)) | head_tensors())
    inputs = {"tokens": TOKENS, "places": np.array([[1], [4]], "int32")}
    np.testing.assert_array_equal(load_masked_lm(folder)(inputs), model(inputs))
    np.testing.assert_array_equal(load_bert(folder)(TOKENS), model.bert(TOKENS))


def test_save_refuses_a_vocabulary_larger_than_the_table(folder: Path) -> None:
    with pytest.raises(DataError, match="23 tokens does not match a model with 20"):
        save_bert(Bert(BertSizes(20, 10, 8, 2, 1, 12)), folder, WORDS)
    assert not folder.exists()


def drop_tensors(name: str) -> Tensors:
    return {each: tensor for each, tensor in bert_tensors().items() if name not in each}


WRONG_TENSORS = {
    "one is missing": (drop_tensors("layer.1.output.dense.bias"), r"lacks encoder\.layer\.1\.output\.dense\.bias$"),
    "many are missing": (drop_tensors("layer.1"), r"lacks encoder\.layer\.1\..* and 13 more"),
    "some are left over": (bert_tensors(layers=3), r"tensors that config.json does not imply: encoder\.layer\.2"),
    "one is misshapen": (
        bert_tensors() | {"encoder.layer.0.output.dense.weight": np.zeros((12, 8), "float32")},
        r"do not match config.json: encoder\.layer\.0\.output\.dense\.weight \(12, 8\), not \(8, 12\)",
    ),
    "a bert in a megatron's place": (bert_tensors(pre=True), r"lacks embeddings\.LayerNorm\.weight"),
    "no bert at all": ({"a": np.zeros(3, "float32")}, r"lacks embeddings\.word_embeddings\.weight"),
}


@pytest.mark.parametrize("why", WRONG_TENSORS)
def test_mismatched_tensors_are_reported_by_name(folder: Path, why: str) -> None:
    tensors, said = WRONG_TENSORS[why]
    with pytest.raises(WeightsError) as caught:
        load_bert(write_folder(folder, tensors))
    assert_error_matches(caught.value, said)
    assert caught.value.where.endswith("model.safetensors")


WRONG_CONFIGS = {
    "another kind": ({"model_type": "roberta"}, "'roberta', not a BERT"),
    "relative positions": ({"position_embedding_type": "relative_key"}, "'relative_key'"),
    "no width": ({"hidden_size": None}, "lacks hidden_size"),
    "a width in words": ({"hidden_size": "eight"}, "hidden_size: 'eight', which is not an integer"),
    "heads that cannot share": ({"num_attention_heads": 3}, "is not divisible by 3 heads"),
    "an activation that is not known": ({"hidden_act": "mish"}, "activation='mish'"),
    "fewer rows than words": ({"vocab_size": 22}, "vocab.txt has 23 words, but config.json specifies 22"),
}


@pytest.mark.parametrize("why", WRONG_CONFIGS)
def test_unsupported_config_json_is_refused(folder: Path, why: str) -> None:
    changed, said = WRONG_CONFIGS[why]
    with pytest.raises(WeightsError) as caught:
        load_bert(write_folder(folder, **changed))
    assert_error_matches(caught.value, said)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_unreadable_config_json_is_refused(folder: Path, text: str) -> None:
    (write_folder(folder) / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json (cannot be read|is not a JSON object)"):
        load_bert(folder)


def test_missing_file_error_lists_existing_files(folder: Path) -> None:
    with pytest.raises(WeightsError, match="there is no folder"):
        load_bert(folder)
    folder.mkdir()
    with pytest.raises(WeightsError, match=r"does not contain config\.json") as caught:
        load_bert(folder)
    assert "nothing" in caught.value.why
    (write_folder(folder) / "model.safetensors").rename(folder / "model.bin")
    with pytest.raises(WeightsError, match=r"does not contain model\.safetensors") as caught:
        load_bert(folder)
    assert "model.bin" in caught.value.why


def test_pickle_weights_are_refused(folder: Path) -> None:
    (write_folder(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"does not contain model\.safetensors") as caught:
        load_bert(folder)
    assert "pickle file, which can execute code" in caught.value.why
    assert "save_pretrained" in caught.value.mend


def test_damaged_safetensors_file_is_refused(folder: Path) -> None:
    file = write_folder(folder) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"version https://git-lfs.github.com/spec/v1\n", whole[: len(whole) // 2], b""):
        file.write_bytes(damaged)
        with pytest.raises(WeightsError, match="cannot be read"):
            load_bert(folder)


def test_missing_safetensors_package_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(folder)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ConfigError, match="package safetensors, which is not installed") as caught:
        load_bert(folder)
    assert caught.value.mend == "pip install 'whale-nebula[bert]'"


def assert_error_matches(error: WeightsError, said: str) -> None:
    assert re.search(said, error.what), error.what
    assert error.mend
