"""SplitEmbedding: the bits of HashedEmbedding for any partition of ids, with fewer bytes; saving; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.errors import OptionError
from whale_nebula.models.recommender import (
    DistinctRows,
    HashedEmbedding,
    SplitEmbedding,
    dlrm,
    generated_clicks,
    most_frequent,
)
from whale_nebula.models.recommender.distinct import Partition, find_distinct

LOG = generated_clicks(192, fields=3, numbers=2, vocabulary=300)
HOT = most_frequent(LOG.ids, 12)
PLACES = {r"table\d?": "cpu", r"(?!table\d?$).*": "gpu"}
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "three": {"tables": 3},
    "hot": {"tables": 2, "hot": HOT},
    "all hot": {"hot": np.unique(LOG.ids)},  # nothing is left for the other table
}


def train(embedding: Any, optimizer: str, *, cut: bool) -> tuple[keras.Model, list[float], int]:
    """The model, its losses, and how many bytes the last step took across."""
    keras.utils.set_random_seed(2)
    model = dlrm(embedding, fields=3, numbers=2, width=4, bottom=(), top=(6,))
    if cut:
        nb.place(model, PLACES)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    losses = model.fit(LOG.inputs, LOG.clicked, batch_size=48, epochs=2, verbose=0, shuffle=False).history["loss"]
    return model, losses, sum(link.payload_bytes for link in nb.last_report().links.values()) if cut else 0


def join_rows(layers: Any) -> dict[str, np.ndarray]:
    """The rows of several tables, in the order of ids."""
    states = [layer.table.state_dict() for layer in layers]
    order = np.argsort(np.concatenate([each["ids"] for each in states]))
    return {name: np.concatenate([each[name] for each in states])[order] for name in ("ids", "counts", "values")}


@pytest.fixture(scope="module")
def one_table_result() -> tuple[dict[str, np.ndarray], list[float], int]:
    """What one table with all vectors across gives."""
    with nb.init(links="10gbit,0ms"):
        layer = HashedEmbedding(4, optimizer="adagrad", name="table")
        _, losses, crossed = train(layer, "adagrad", cut=True)
        return join_rows([layer]), losses, crossed


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "hot" else pytest.mark.grid) for kind in KINDS]
)
def test_split_embedding_equals_one_table(
    kind: str, one_table_result: tuple[dict[str, np.ndarray], list[float], int]
) -> None:
    nb.init(links="10gbit,0ms")
    embedding = SplitEmbedding(4, optimizer="adagrad", **KINDS[kind])
    _, losses, crossed = train(embedding, "adagrad", cut=True)
    rows, expected, most = one_table_result
    assert losses == expected
    for name, value in join_rows(embedding.layers).items():
        np.testing.assert_array_equal(value, rows[name])
    if kind == "all hot":
        assert crossed < 64
        assert len(embedding.layers[1].table) == 0
    else:
        assert crossed < 0.9 * most
        assert all(len(layer.table) for layer in embedding.layers)


@pytest.mark.grid
def test_model_with_split_embedding_is_saved_and_loaded(tmp_path: Path) -> None:
    model, _, _ = train(SplitEmbedding(4, optimizer="adam", tables=2, hot=HOT), "adam", cut=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(LOG.inputs), loaded(LOG.inputs))
    assert len(loaded.get_layer("table_near").table) == len(HOT)


@pytest.mark.parametrize("partition", [Partition(), Partition(3), Partition(3, tuple(range(0, 40, 4)))])
def test_distinct_places_index_concatenated_parts(partition: Partition) -> None:
    flat = np.random.default_rng(0).integers(-50, 50, 400)
    found = [find_distinct(flat, partition, table) for table in range(partition.count)]
    ids = np.concatenate([each.ids for each in found])
    np.testing.assert_array_equal(ids[found[0].places], flat)
    assert len(ids) == len(np.unique(flat))
    for each in found:
        np.testing.assert_array_equal(each.seen, [(flat == value).sum() for value in each.ids])
    if partition.hot:
        assert set(found[0].ids) == {*partition.hot} & {*flat.tolist()}
        assert min(len(each.ids) for each in found[1:]) > 20


def test_invalid_split_embedding_options_are_refused() -> None:
    for options in ({"part": 1}, {"part": -1, "parts": 2}, {"hot": [1]}):
        with pytest.raises(OptionError, match="is not a valid part of a table"):
            DistinctRows(4, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tables=0"):
        SplitEmbedding(4, tables=0)
    with pytest.raises(OptionError, match="DistinctRows got ids of type float32"):
        SplitEmbedding(4)(keras.Input((3,)))
