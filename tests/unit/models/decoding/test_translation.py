"""Translating across two clusters: the encoder in one stage, the whole search in the other."""

import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.models.small_translators import END, MASK, MODELS, PAD, START, randomize_weights, sources, stage_of_side
from whale_nebula.models.decoding import Beam, MaskPredict, translation
from whale_nebula.models.sides import nowhere

BEAM = Beam(START, END, longest=4, width=3, never=(PAD, START, MASK))
FILL = MaskPredict(START, END, MASK, longest=4, candidates=2, rounds=2)


def build_model(name: str, around=nowhere):
    model = MODELS[name](around)
    randomize_weights(model)
    return model


@pytest.mark.grid
@pytest.mark.parametrize("name", ["causal", "translator", "cmlm"])
def test_two_cluster_translation_equals_local_translation(name: str) -> None:
    search = FILL if name == "cmlm" else BEAM
    expected = build_model(name)(sources(4), search=search)
    found = translation(build_model(name, stage_of_side), search)(sources(4))
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
    report = nb.last_report()
    assert tuple(report.stages) == ("source", "target")
    assert report.links["source->target"].raw_bytes == 4 * 8 * (12 * 4 + 1)  # 12 numbers a place, and the mask


@pytest.mark.grid
def test_translation_uses_the_codec_around_the_model() -> None:
    """A learned basis belongs to the model: a search that knew nothing of it would translate from other numbers."""
    with nb.cluster(), nb.compress(rank=6, basis="learned", int8=True):
        model = build_model("causal", stage_of_side)
    translate = translation(model, BEAM)
    first = translate(sources(4))
    assert any("int8" in boundary.codec for boundary in nb.last_report().boundaries.values())
    bases = [weight for weight in model.variables if "bottleneck" in weight.path]
    assert [tuple(basis.shape) for basis in bases] == [(12, 6), (6, 12)]
    for basis in bases:
        basis.assign(0.0 * basis)
    assert not np.allclose(translate(sources(4)).scores, first.scores)
