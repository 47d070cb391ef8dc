"""HashedEmbedding: the numbers of keras.layers.Embedding, cut and uncut; saving; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.errors import BatchCoupledError, DataError, OptionError, StageFailedError, WeightsError
from whale_nebula.models.recommender import HashedEmbedding, RowTable, dlrm, generated_clicks

VALUES, ROWS = 40, 192


def load_clicks() -> tuple[dict[str, Any], np.ndarray]:
    drawn = generated_clicks(ROWS, fields=3, numbers=2)
    return {"numbers": drawn.numbers, "ids": drawn.ids % VALUES}, drawn.clicked


def make_model(layer: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(2)
    return dlrm(layer, fields=3, numbers=2, width=4, bottom=(), top=(6,))


def train(model: keras.Model, optimizer: str, *, cut: bool) -> list[float]:
    if cut:
        nb.place(model, {"table": "cpu", "(?!table$).*": "gpu"})
    model.compile(
        keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.1}}),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    inputs, clicked = load_clicks()
    return model.fit(inputs, clicked, batch_size=48, epochs=2, verbose=0, shuffle=False).history["loss"]


def make_hashed(optimizer: str, **options: Any) -> HashedEmbedding:
    chosen = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.1}})
    return HashedEmbedding(4, optimizer=chosen, name="table", **options)


class OneHot(keras.layers.Embedding):
    """The same look-up with a dense gradient: Keras's Adagrad adds the squares of a sparse one for each occurrence."""

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(keras.ops.one_hot(inputs, VALUES), self.embeddings)


@pytest.mark.parametrize(
    ("optimizer", "kind"), [pytest.param("sgd", keras.layers.Embedding, marks=pytest.mark.grid), ("adagrad", OneHot)]
)
def test_hashed_embedding_trains_like_a_dense_embedding(optimizer: str, kind: type[keras.layers.Embedding]) -> None:
    """The dense table is in a model without scopes; both begin with the same rows."""
    layer = make_hashed(optimizer)
    begin = layer.table.pull(np.arange(VALUES))
    dense = kind(
        VALUES, 4, name="table", embeddings_initializer=lambda shape, dtype=None: keras.ops.convert_to_tensor(begin)
    )
    losses = train(make_model(dense), optimizer, cut=False)
    np.testing.assert_allclose(train(make_model(layer), optimizer, cut=True), losses, rtol=1e-5)
    np.testing.assert_allclose(layer.table.pull(np.arange(VALUES)), dense.get_weights()[0], rtol=1e-4, atol=1e-6)
    assert len(layer.table) == len(np.unique(load_clicks()[0]["ids"]))
    assert layer.table.steps == 8


@pytest.mark.grid
@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_cut_hashed_embedding_equals_the_uncut_one(optimizer: str) -> None:
    layers = [make_hashed(optimizer), make_hashed(optimizer)]
    losses = [train(make_model(layer), optimizer, cut=cut) for layer, cut in zip(layers, (False, True), strict=True)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    one, other = (layer.table.state_dict() for layer in layers)
    np.testing.assert_array_equal(one["ids"], other["ids"])
    np.testing.assert_array_equal(one["counts"], other["counts"])
    np.testing.assert_allclose(one["values"], other["values"], rtol=1e-4, atol=1e-6)
    assert not layers[0].anchor.numpy().any()


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:.*that nb.auto_parallel predicted:whale_nebula.errors.NebulaWarning")
def test_planned_hashed_embedding_trains_the_same_rows() -> None:
    """Blocks of the step are measured before it, which updates no row."""
    uncut, planned = make_hashed("adagrad"), make_hashed("adagrad")
    losses = train(make_model(uncut), "sgd", cut=False)
    with nb.init({"clusters": {"cpu": {}, "gpu": {}}}), nb.auto_parallel():
        model = make_model(planned)
        nb.place(model, {"table": "cpu", "click": "gpu"})
        np.testing.assert_allclose(train(model, "sgd", cut=False), losses, rtol=1e-6)
    assert planned.table.pushes == uncut.table.pushes
    ids = np.arange(VALUES)
    np.testing.assert_allclose(planned.table.pull(ids), uncut.table.pull(ids), rtol=1e-5, atol=1e-7)


def test_only_training_creates_rows() -> None:
    layer = make_hashed("sgd")
    model = make_model(layer)
    inputs, clicked = load_clicks()
    before = model.predict(inputs, verbose=0)
    model.compile("sgd", "mse")
    model.evaluate(inputs, clicked, verbose=0)
    assert len(layer.table) == 0
    model.train_on_batch(inputs, clicked)
    assert len(layer.table) == len(np.unique(inputs["ids"]))
    assert not np.array_equal(model.predict(inputs, verbose=0), before)


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_hashed_embedding_rows_are_saved_with_the_model(tmp_path: Path, whole: bool) -> None:
    layer = make_hashed("adam")
    model = make_model(layer)
    train(model, "adam", cut=False)
    if whole:
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    else:
        model.save_weights(tmp_path / "model.weights.h5")
        loaded = make_model(make_hashed("adam"))
        loaded.load_weights(tmp_path / "model.weights.h5")
    inputs, _ = load_clicks()
    np.testing.assert_array_equal(model(inputs), loaded(inputs))
    for name, value in layer.table.state_dict().items():
        np.testing.assert_array_equal(value, loaded.get_layer("table").table.state_dict()[name])


def test_checkpoint_reads_the_table_only_when_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have most of the memory of its host."""
    read, found = RowTable.state_dict, list[RowTable]()
    monkeypatch.setattr(RowTable, "state_dict", lambda table: found.append(table) or read(table))
    with nb.init(checkpoint={"folder": str(tmp_path), "every": 4}):
        layer = make_hashed("adam")
        model = make_model(layer)
        nb.state(table=layer.table)
        train(model, "adam", cut=True)  # 8 steps
    assert 1 <= len(found) <= 2
    with nb.init(checkpoint=str(tmp_path)):
        loaded = make_hashed("adam")
        nb.state(table=loaded.table)
    for name, value in read(layer.table).items():
        np.testing.assert_array_equal(value, read(loaded.table)[name])


@pytest.mark.parametrize("kept", [True, False])
def test_table_outside_checkpoints_logs_a_warning(kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with nb.init(checkpoint=str(tmp_path)):
        layer = make_hashed("sgd")
        model = make_model(layer)
        if kept:
            nb.state(table=layer.table)
        model.compile("sgd", "mse")
        inputs, clicked = load_clicks()
        model.train_on_batch(inputs, clicked)
    said = [each.message for each in caplog.records if each.name != "tensorflow"]  # that one counts what ran before
    assert ["are not saved with the checkpoints" in each for each in said] == [True] * (not kept)


def test_saved_rows_of_another_optimizer_are_refused() -> None:
    layer, other = make_hashed("adam"), make_hashed("sgd")
    for each in (layer, other):
        each.build((None, 3))
    saved: dict[str, Any] = {}
    layer.save_own_variables(saved)
    with pytest.raises(WeightsError, match="rows in the file have 12 numbers"):
        other.load_own_variables(saved)


def test_hashed_embedding_refuses_micro_batches() -> None:
    """Each would push for itself, and the next would look up rows of another step."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    with nb.cluster(), nb.pipeline(micro_batch=2):
        with nb.stage(cluster="cpu"):
            vectors = keras.layers.Flatten()(make_hashed("sgd")(ids))
        with nb.stage(cluster="gpu"):
            click = keras.layers.Dense(1)(vectors)
    model = keras.Model(ids, click)
    model.compile("sgd", "mse")
    inputs, clicked = load_clicks()
    with pytest.raises(BatchCoupledError, match="numpy_function"):
        model.train_on_batch(inputs["ids"][:48], clicked[:48])


def test_invalid_hashed_embedding_options_and_ids_are_refused() -> None:
    with pytest.raises(OptionError, match="ids of type float32"):
        HashedEmbedding(4)(np.zeros((2, 3), np.float32))
    with pytest.raises(OptionError, match="float16"):
        HashedEmbedding(4, dtype="mixed_float16")
    for width in (0, "8", 2.5):
        with pytest.raises(OptionError, match="width="):
            HashedEmbedding(width)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="most_rows=0"):
        HashedEmbedding(4, most_rows=0)
    with pytest.raises(OptionError, match="'adagard' is not an optimizer of rows"):
        HashedEmbedding(4, optimizer="adagard")


def test_too_small_table_is_reported_by_fit() -> None:
    """The error as it is in a model without scopes; what runs it says where, with scopes."""
    for cut, error in ((False, DataError), (True, StageFailedError)):
        with pytest.raises(error, match="distinct ids, but the table is limited to 2 rows") as raised:
            train(make_model(HashedEmbedding(4, name="table", most_rows=2)), "sgd", cut=cut)
        assert "mend: most_rows=" in str(raised.value)


def test_planner_counts_row_memory_and_keeps_the_batch_whole() -> None:
    """A million rows fit into one of two clusters, and one more worker is no reason for micro-batches."""
    config = {"clusters": {"gpu": {"memory": "64MiB", "flops": "1T"}, "cpu": {"flops": "1G"}}, "measure": "0s"}
    with nb.init(config):
        nb.auto_parallel()
        layer = HashedEmbedding(8, optimizer="adagrad", expected_rows=1_000_000, name="rows")
        ids = keras.Input((2,), dtype="int64")
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
        model.compile("sgd", "mse")
        plan = nb.plan(model, np.zeros((8, 2), "int64"), np.zeros((8, 1), "float32"))
    expected = layer.table.expect_bytes()
    assert plan.stages[next(iter(plan.stages))].cluster == "cpu"
    assert max(plan.predicted.memory.values()) > expected.bytes > 1e6 * 8 * (2 * 4 + 3)
    said = " ".join(plan.explain().split())
    assert "1,000,000 rows from expected_rows=" in said
    assert "rows depend on each other" in said and "micro-batches, " not in said.partition("what if")[2]
