"""Pretraining in clusters equals pretraining in one process, bit for bit, with one generator and with three."""

from typing import Any

import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.models.pretraining.small_pretraining import batches, make_step, pretraining, stages
from whale_nebula.models.pretraining import Objectives

STEPS = 3
THREE = ("romance", "slavic", "germanic")


def train(names: tuple[str, ...], counts: tuple[int, ...], scopes: Any, objectives: Any = None) -> tuple[Any, Any]:
    """All losses, and all variables at the end."""
    model = pretraining(names, objectives, adam=False)
    step = make_step(model, scopes)
    losses = [
        {name: float(each) for name, each in step(numbers, texts).items()}
        for numbers, texts in batches(names, counts, STEPS)
    ]
    updated = (*model.networks.values(), *model.optimizers.values())
    return losses, [each.numpy() for network_or_optimizer in updated for each in network_or_optimizer.variables]


@pytest.mark.parametrize(
    ("names", "counts", "objectives"),
    [
        (("all",), (6,), Objectives(correction=0)),
        pytest.param(THREE, (2, 4, 3), Objectives(), marks=pytest.mark.grid),
        pytest.param(("all",), (6,), Objectives(), marks=pytest.mark.grid),
    ],
)
def test_clusters_train_with_the_bits_of_the_uncut_step(names: Any, counts: Any, objectives: Any) -> None:
    expected, weights = train(names, counts, None, objectives)
    found, others = train(names, counts, stages(), objectives)
    assert set(nb.last_report().stages) == {*names, "discriminator"}
    assert found == expected
    for one, other in zip(weights, others, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.grid
@pytest.mark.parametrize(
    "scopes",
    [
        stages(micro_batch=3),
        stages({"discriminator": 3}, micro_batch=3),
        stages({"all": 2, "discriminator": 6}, micro_batch=6),
    ],
    ids=["micro-batches", "one generator, three discriminators", "two generators, six discriminators"],
)
def test_micro_batches_and_replicas_train_as_the_uncut_step(scopes: Any) -> None:
    expected, weights = train(("all",), (6,), None)
    found, others = train(("all",), (6,), scopes)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    for one, other in zip(weights, others, strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-5)
