"""Causal ABNet: frozen parts, visibility, initial output, and its two stages."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.models.small_translators import (
    PAD,
    SOURCE,
    TARGET,
    VOCABULARY,
    causal,
    cmlm,
    pairs,
    randomize_weights,
    sources,
    stage_of_side,
    translator,
)
from whale_nebula.errors import OptionError
from whale_nebula.models.abnet import CausalABNet
from whale_nebula.models.bert import Bert
from whale_nebula.models.masked_lm import masked_lm
from whale_nebula.models.smoothing import SmoothedCrossentropy


def compile_model(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.5), SmoothedCrossentropy())
    return model


def test_only_adapters_and_output_are_trainable() -> None:
    trained = {weight.path.split("/")[0] for weight in causal().trainable_variables}
    adapters = {f"{side}_{part}0_adapter" for side in ("es", "en") for part in ("attention", "inner")}
    assert trained == adapters | {"en_output_norm", "en_output_bias"}


def test_only_adapters_are_trainable_with_a_pretrained_head() -> None:
    model = CausalABNet(Bert(SOURCE, name="es"), masked_lm(Bert(TARGET, name="en")), inner=4)
    assert all("_adapter/" in weight.path for weight in model.trainable_variables)
    assert model(pairs()[0]).shape == (5, 7, VOCABULARY)


def test_new_encoder_output_is_close_to_its_bert() -> None:
    source = Bert(SOURCE, name="es")
    encoder = CausalABNet(source, Bert(TARGET, name="en"), inner=4).sides.encoder
    ids = sources()
    hidden, visible = encoder(ids)
    np.testing.assert_array_equal(visible, ids != PAD)
    expected = np.where(visible[..., None], source(ids), 0.0)
    np.testing.assert_allclose(hidden, expected, atol=0.05)


def test_new_decoder_output_is_close_to_its_masked_lm() -> None:
    target = masked_lm(Bert(TARGET, name="en"))
    model = CausalABNet(Bert(SOURCE, name="es"), target, inner=4)
    (x, _), last = pairs(), 6
    expected = target({"tokens": x["target"], "places": np.full((5, 1), last)})[:, 0]
    whole_rows = (x["target"] != PAD).all(axis=1)  # from the last place everything is visible, padding too
    assert whole_rows.any()
    np.testing.assert_allclose(model(x)[:, last][whole_rows], expected[whole_rows], atol=0.05)


@pytest.mark.parametrize("make", [causal, pytest.param(translator, marks=pytest.mark.grid)])
def test_target_words_do_not_affect_earlier_positions(make: Any) -> None:
    model, (x, _) = make(), pairs()
    randomize_weights(model)
    other = {**x, "target": np.where(np.arange(7) == 4, 5 + (x["target"] - 4) % 5, x["target"])}
    before, after = model(x).numpy(), model(other).numpy()
    np.testing.assert_allclose(before[:, :4], after[:, :4], rtol=1e-5, atol=1e-5)
    assert np.abs(before[:, 4:] - after[:, 4:]).max(axis=(1, 2)).min() > 1e-4


@pytest.mark.parametrize("make", [causal, pytest.param(translator, marks=pytest.mark.grid)])
def test_source_words_affect_the_output_and_padding_does_not(make: Any) -> None:
    model, (x, _) = make(), pairs()
    randomize_weights(model)
    expected = model(x).numpy()
    longer = {**x, "source": np.pad(x["source"][:, :8], ((0, 0), (0, 0)))}
    shorter = {"source": x["source"][:1, : int((x["source"][0] > 0).sum())], "target": x["target"][:1]}
    np.testing.assert_allclose(model(longer), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(model(shorter), expected[:1], rtol=1e-4, atol=1e-4)
    for place in range(2):
        changed = np.where(np.arange(8) == place, 11, x["source"])
        assert np.abs(model({**x, "source": changed}).numpy() - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (causal, {"tied": True}),
        pytest.param(causal, {"tied": False}, marks=pytest.mark.grid),
        pytest.param(translator, {"tied": True}, marks=pytest.mark.grid),
        pytest.param(translator, {"tied": False}, marks=pytest.mark.grid),
        (cmlm, {"longest": 5}),
    ],
)
def test_translation_model_is_saved_and_loaded(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    model, (x, _) = make(**options), pairs()
    randomize_weights(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one, other in zip(tf.nest.flatten(loaded(x)), tf.nest.flatten(model(x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert [w.path for w in loaded.trainable_variables] == [w.path for w in model.trainable_variables]


def test_pre_norm_berts_end_in_their_norm() -> None:
    source, target = (Bert(replace(sizes, norm="pre"), name=n) for sizes, n in ((SOURCE, "es"), (TARGET, "en")))
    model = CausalABNet(source, target, inner=4)
    hidden, _ = model.sides.encoder(sources())
    np.testing.assert_allclose(tf.reduce_mean(hidden, axis=-1), 0, atol=1e-5)
    assert model(pairs()[0]).shape == (5, 7, VOCABULARY)


def test_berts_of_equal_name_are_refused_with_a_fix() -> None:
    with pytest.raises(OptionError) as caught:
        CausalABNet(Bert(SOURCE), Bert(TARGET))
    assert "name=" in caught.value.mend


# ---------------------------------------------------------------------- in two stages
@pytest.mark.grid
def test_two_stage_abnet_equals_the_uncut_model() -> None:
    with nb.cluster(), nb.pipeline(micro_batch=2):
        model = causal(stage_of_side)
    randomize_weights(model, 0.2)
    verification = nb.verify(compile_model(model), *pairs(4))
    assert verification.ok, verification
    assert verification.stages == ("source", "target")


@contextlib.contextmanager
def compress_side(side: str) -> Iterator[None]:
    with stage_of_side(side), nb.compress(int8=True, mask=True) if side == "source" else contextlib.nullcontext():
        yield


@pytest.mark.grid
def test_abnet_trained_over_a_codec_loads_uncut(tmp_path) -> None:
    """Between processes, in every run: tests/processes/test_frame_contents.py and tests/examples/test_translate.py."""
    source, target = Bert(SOURCE, name="es"), Bert(TARGET, name="en")
    frozen = [*source.get_weights(), *target.get_weights()]
    with nb.cluster(), nb.pipeline(micro_batch=2):
        model = compile_model(CausalABNet(source, target, inner=4, around=compress_side))
    x, y = pairs(4)
    losses = model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[1] < losses[0]

    report = nb.last_report()
    crossed = sorted((boundary.codec, name) for name, boundary in report.boundaries.items())
    assert [codec for codec, _ in crossed] == ["bits", "int8", "int8"]  # the mask; hidden states, and their gradient
    for old, new in zip(frozen, [*source.get_weights(), *target.get_weights()], strict=True):
        np.testing.assert_array_equal(old, new)

    model.save_weights(tmp_path / "it.weights.h5")
    uncut = causal()
    uncut.load_weights(tmp_path / "it.weights.h5")
    loss = SmoothedCrossentropy()(y, uncut(x))
    assert float(loss) < losses[2]
