"""Steps of a table: micro-batches are one update, look-ups ahead change no bit, updates can be deferred."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import OptionError
from whale_nebula.models.recommender import (
    HashedEmbedding,
    RowTable,
    SplitEmbedding,
    dlrm,
    generated_clicks,
    look_ahead,
    most_frequent,
)
from whale_nebula.models.recommender.row_optimizers import make_row_optimizer
from whale_nebula.strategies import OneBitAdam

LOG = generated_clicks(240, fields=3, numbers=2, vocabulary=60)
HOT = most_frequent(LOG.ids, 8)
EPOCHS, BATCH = 2, 48


def make_embedding(kind: str, **options: Any) -> Any:
    options = {"optimizer": "adam", **options}
    return HashedEmbedding(4, name="table0", **options) if kind == "whole" else SplitEmbedding(4, hot=HOT, **options)


def list_layers(embedding: Any) -> list[HashedEmbedding]:
    return embedding.layers if isinstance(embedding, SplitEmbedding) else [embedding]


def train(
    embedding: Any, *, micro_batch: int = 1, ahead: bool = False, cut: bool = True, devices: int = 1
) -> list[float]:
    keras.utils.set_random_seed(2)
    model = dlrm(embedding, fields=3, numbers=2, width=4, bottom=(), top=(6,))
    if cut:
        split = {"(table0)": nb.split(devices)} if devices > 1 else {}
        nb.place(model, {"table0": "cpu", "(?!table0$).*": "gpu", **split})
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices((LOG.inputs, LOG.clicked)).batch(BATCH)
    if ahead:
        data = look_ahead(data, embedding, steps=2)
    with nb.pipeline(micro_batch, coupled="allow") if cut else contextlib.nullcontext():
        return model.fit(data, epochs=EPOCHS, verbose=0).history["loss"]


def states(embedding: Any) -> list[dict[str, Any]]:
    return [layer.table.state_dict() for layer in list_layers(embedding)]


@pytest.mark.parametrize(
    ("kind", "links"),
    [
        ("split", "10gbit,0ms"),
        *(pytest.param("whole", links, marks=pytest.mark.grid) for links in (None, "10gbit,0ms")),
    ],
)
def test_micro_batches_are_one_table_update(kind: str, links: str | None) -> None:
    nb.init(links=links)
    one, four = make_embedding(kind), make_embedding(kind)
    np.testing.assert_allclose(train(one), train(four, micro_batch=4), rtol=1e-5)
    for expected, found in zip(states(one), states(four), strict=True):
        assert expected["steps"] == found["steps"] == EPOCHS * len(LOG) / BATCH
        np.testing.assert_array_equal(expected["counts"], found["counts"])
        np.testing.assert_allclose(expected["values"], found["values"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "staleness", "cut"),
    [("split", 0, True), *(pytest.param("whole", *each, marks=pytest.mark.grid) for each in ((2, True), (0, False)))],
)
def test_look_ahead_does_not_change_training(kind: str, staleness: int, cut: bool) -> None:
    nb.init()
    plain, early = (make_embedding(kind, staleness=staleness) for _ in range(2))
    assert train(plain, cut=cut) == train(early, ahead=True, cut=cut)
    for expected, found in zip(states(plain), states(early), strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(value, found[name])
    for layer in list_layers(early):
        assert layer.steps.looked_ahead > 4
        assert not (staleness and layer.table.fetched_again)  # late updates are applied before the look-up
    assert all(not layer.steps.looked_ahead for layer in list_layers(plain))


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "devices", "micro_batch"), [("whole", 3, 4), ("whole", 2, 1), ("split", 2, 1)])
def test_split_over_devices_equals_one_device(kind: str, devices: int, micro_batch: int) -> None:
    """In one process; between processes, in every run: tests/processes/test_recommender.py."""
    nb.init()
    one, several = make_embedding(kind), make_embedding(kind)
    expected = train(one, micro_batch=micro_batch)
    assert train(several, micro_batch=micro_batch, devices=devices) == expected
    for state, found in zip(states(one), states(several), strict=True):
        for name, value in state.items():
            np.testing.assert_array_equal(value, found[name])


def make_table(staleness: int = 0, **options: Any) -> RowTable:
    return RowTable(3, make_row_optimizer("adagrad"), staleness=staleness, **options)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_stale_updates_are_late_by_the_given_steps(staleness: int) -> None:
    """Against a table whose updates are late because they are given to it late; also after a resumption."""
    drawn, late, expected = np.random.default_rng(0), make_table(staleness), make_table()
    given: list[tuple[np.ndarray, np.ndarray]] = []
    ahead, following = None, np.unique(drawn.integers(0, 30, 12))
    for step in range(12):
        ids, following = following, np.unique(drawn.integers(0, 30, 12))
        if step > staleness:
            expected.push(*given[step - staleness - 1])
        seen = np.ones(len(ids), np.int64)
        np.testing.assert_array_equal(late.pull(ids, seen, ahead), expected.pull(ids, seen))
        if step % 4 == 1:  # as the layer does it, beside the step
            late.update(late.pushes - max(staleness - 1, 0))
        ahead = late.look_ahead(following) if step % 3 else None
        given.append((ids, drawn.standard_normal((len(ids), 3)).astype(np.float32)))
        late.push(*given[-1])
        if step == 7:
            assert late.fetched_again  # rows that an update changed after the look-up
            saved, late, ahead = late.state_dict(), make_table(staleness), None
            late.load_state_dict(saved)
    late.update()
    for each in given[-staleness - 1 :]:
        expected.push(*each)
    for name, value in late.state_dict().items():
        np.testing.assert_array_equal(value, expected.state_dict()[name])


def test_look_ahead_is_discarded_after_eviction() -> None:
    """What was looked up before rows were dropped is not used."""
    plain, early, drawn = make_table(most_rows=20), make_table(most_rows=20), np.random.default_rng(1)
    for _ in range(30):
        ids = np.unique(drawn.integers(0, 60, 10))
        ahead, seen = early.look_ahead(ids), np.ones(len(ids), np.int64)
        other = np.unique(drawn.integers(0, 60, 10))
        for table in (plain, early):  # another step in between
            table.pull(other, np.ones(len(other), np.int64))
            table.push(other, np.ones((len(other), 3), np.float32))
        np.testing.assert_array_equal(plain.pull(ids, seen), early.pull(ids, seen, ahead))
    for name, value in plain.state_dict().items():
        np.testing.assert_array_equal(value, early.state_dict()[name])


@pytest.mark.parametrize("staleness", [-1, 1.5, "two"])
def test_invalid_staleness_is_refused(staleness: Any) -> None:
    with pytest.raises(OptionError, match="staleness="):
        HashedEmbedding(4, staleness=staleness)


@pytest.mark.parametrize(
    "how", [{"sync_every": 2}, pytest.param({"exchange": "1bit"}, marks=pytest.mark.grid)], ids=str
)
def test_table_copied_by_clusters_is_refused(how: dict[str, Any]) -> None:
    with nb.init({"clusters": {"gpu": {}, "npu": {}}}), nb.cluster(["gpu", "npu"]), nb.replica(**how):
        model = dlrm(make_embedding("whole"), fields=3, numbers=2, width=4)
        model.compile(OneBitAdam(1e-3), "binary_crossentropy")
        with pytest.raises(Exception, match="an embedding table of which each cluster trains a copy"):
            model.fit(LOG.inputs, LOG.clicked, BATCH, verbose=0)
