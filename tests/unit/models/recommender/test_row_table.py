"""The table of rows: its index, its memory, and its optimizers compared with Keras's own, a row at a time."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

from whale_nebula.errors import DataError, OptionError, WeightsError
from whale_nebula.models.recommender import RowTable
from whale_nebula.models.recommender.hashing import IdIndex
from whale_nebula.models.recommender.row_optimizers import make_row_optimizer
from whale_nebula.models.recommender.segments import Segments

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.1, l1_regularization_strength=0.02, l2_regularization_strength=0.1, beta=0.1,
        l2_shrinkage_regularization_strength=0.01,
    ),
    "adam": lambda: keras.optimizers.Adam(0.05, beta_2=0.99),
}  # fmt: skip


def make_table(optimizer: str | keras.optimizers.Optimizer = "sgd", **options: int) -> RowTable:
    return RowTable(3, make_row_optimizer(optimizer), **options)  # type: ignore[arg-type]


def train(table: RowTable, *ids: int, times: int = 1) -> None:
    given = np.array(ids)
    table.pull(given, np.full(len(given), times))
    table.push(given, np.ones((len(given), 3), np.float32))


@pytest.mark.parametrize("seed", range(3))
def test_id_index_equals_a_dictionary(seed: int) -> None:
    drawn, index, expected = np.random.default_rng(seed), IdIndex(), dict[int, int]()
    for _ in range(30):
        ids = np.unique(drawn.integers(-400, 400, 60)) << drawn.integers(0, 50)
        new = np.array([each for each in ids.tolist() if each not in expected], np.int64)
        index.add(new, np.arange(len(expected), len(expected) + len(new)))
        expected.update({each: len(expected) + at for at, each in enumerate(new.tolist())})
        requested_ids = np.concatenate([ids, ids[:5], drawn.integers(-(2**63), 2**63 - 1, 40)])
        np.testing.assert_array_equal(
            index.find(requested_ids), [expected.get(each, -1) for each in requested_ids.tolist()]
        )
        assert len(index) == len(expected)


def test_segments_return_written_values() -> None:
    segments, drawn = Segments(2, np.float32), np.random.default_rng(0)
    segments.reserve(40_000)
    values = drawn.standard_normal((40_000, 2)).astype(np.float32)
    order = drawn.permutation(40_000)
    segments.write(order, values)
    segments.reserve(200_000)
    some = drawn.integers(0, 40_000, 500)
    np.testing.assert_array_equal(segments.read(order[some]), values[some])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_row_optimizer_equals_keras_optimizer(name: str) -> None:
    """One Keras variable for each id, given to Keras's optimizer in the steps that have the id, and in no others."""
    drawn, ids = np.random.default_rng(1), np.array([5, -3, 2**50, 17])
    table = make_table(OPTIMIZERS[name](), seed=4)
    rows = [keras.Variable(each) for each in table.pull(ids)]
    rules = [OPTIMIZERS[name]() for _ in ids]
    for rule, row in zip(rules, rows, strict=True):
        rule.build([row])
    for step in range(12):
        chosen = np.flatnonzero(drawn.random(4) < 0.6) if step else np.arange(4)
        gradients = drawn.standard_normal((len(chosen), 3)).astype(np.float32)
        table.pull(ids[chosen], np.ones(len(chosen), np.int64))
        table.push(ids[chosen], gradients)
        for at, gradient in zip(chosen, gradients, strict=True):
            rules[at].iterations.assign(step)  # Adam counts the steps of all
            rules[at].apply([keras.ops.convert_to_tensor(gradient)])
        np.testing.assert_allclose(table.pull(ids), np.stack([each.numpy() for each in rows]), rtol=2e-6, atol=1e-7)
    assert table.steps == 12


def test_new_rows_depend_only_on_id_and_seed() -> None:
    ids = np.array([1, 2, 3])
    one, other = make_table(seed=1), make_table(seed=1)
    train(other, 9, 8, 7)
    np.testing.assert_array_equal(one.pull(ids), other.pull(ids[::-1])[::-1])
    np.testing.assert_array_equal(one.pull(ids), one.pull(ids, np.ones(3, np.int64)))
    assert (len(one), len(other)) == (3, 3)
    assert not np.array_equal(one.pull(ids), make_table(seed=2).pull(ids))
    many = one.pull(np.arange(20_000))
    assert abs(many.mean()) < 1e-3
    assert 0.049 < np.abs(many).max() <= 0.05
    assert many.std() == pytest.approx(0.05 / 3**0.5, rel=0.02)


def test_evict_drops_rarely_seen_ids() -> None:
    table = make_table("adagrad")
    train(table, 1, 2, times=1)
    train(table, 2, 3, times=5)
    kept = table.pull(np.array([2, 3]))
    assert table.evict(fewer_than=5) == 1
    assert len(table) == 2
    np.testing.assert_array_equal(table.pull(np.array([2, 3])), kept)
    np.testing.assert_array_equal(table.pull(np.array([1])), make_table().pull(np.array([1])))
    train(table, 1)
    assert len(table) == 3
    np.testing.assert_array_equal(table.pull(np.array([2, 3])), kept)


def test_full_table_evicts_rarely_seen_rows() -> None:
    table = make_table(most_rows=20)
    train(table, *range(10), times=6)
    train(table, *range(10, 20), times=1)
    train(table, 100, 101, 0)
    assert len(table) == 20
    held = set(table.state_dict()["ids"].tolist())
    assert {*range(10), 100, 101} <= held
    for at in range(40):  # what was frequent long ago goes in the end
        train(table, *range(1000 + 5 * at, 1005 + 5 * at), times=3)
        assert len(table) <= 20
    assert not held & set(table.state_dict()["ids"].tolist())
    with pytest.raises(DataError, match="21 distinct ids"):
        train(table, *range(21))


def test_state_dict_moves_to_another_table() -> None:
    one, other = make_table("adam", seed=3), make_table("adam", seed=3)
    train(one, *range(50))
    train(one, *range(25, 60))
    one.evict(fewer_than=2)
    train(other, 999)
    other.load_state_dict(one.state_dict())
    train(one, 30, 70)
    train(other, 30, 70)
    for name, value in one.state_dict().items():
        np.testing.assert_array_equal(value, other.state_dict()[name])
    with pytest.raises(WeightsError, match="optimizer 'adam'"):
        make_table("sgd").load_state_dict(one.state_dict())


def test_loaded_table_evicts_the_same_rows() -> None:
    """Of many rows that were seen as often, the same make room as without the break."""
    drawn = np.random.default_rng(7)
    one, other = make_table(most_rows=40), make_table(most_rows=40)
    for _ in range(12):
        train(one, *np.unique(drawn.integers(-300, 300, 15)).tolist())
    other.load_state_dict(one.state_dict())
    for _ in range(12):
        ids = np.unique(drawn.integers(-300, 300, 15)).tolist()
        train(one, *ids)
        train(other, *ids)
    for name, value in one.state_dict().items():
        np.testing.assert_array_equal(value, other.state_dict()[name])


@pytest.mark.parametrize(
    ("options", "said"), [({"scale": "x"}, "scale='x'"), ({"scale": -1}, "scale=-1"), ({"seed": -1}, "seed=-1")]
)
def test_invalid_row_initializer_is_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        make_table(**options)


def test_invalid_table_state_is_refused() -> None:
    with pytest.raises(WeightsError, match="'ids' is missing"):
        make_table().load_state_dict({})
    with pytest.raises(OptionError, match="fewer_than='3' is not an integer"):
        make_table().evict(fewer_than="3")  # type: ignore[arg-type]


def test_non_finite_gradient_changes_no_row() -> None:
    table = make_table("adam")
    train(table, 1, 2)
    before = table.state_dict()
    table.push(np.array([1, 2]), np.array([[1, 1, 1], [1, np.nan, 1]], np.float32))
    for name, value in before.items():
        np.testing.assert_array_equal(value, table.state_dict()[name])
    assert table.left_out == 1


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: keras.optimizers.RMSprop(), "RMSprop is not supported for embedding tables"),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "momentum=0.9"),
        (lambda: keras.optimizers.Adam(amsgrad=True), "amsgrad=True"),
        (lambda: keras.optimizers.Adagrad(clipnorm=1.0), "clipnorm=1.0"),
        (lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)), "schedules are not supported"),
    ],
)
def test_unsupported_row_optimizer_is_refused(optimizer: Callable[[], keras.optimizers.Optimizer], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_row_optimizer(optimizer())
    assert said in str(caught.value)


def test_expected_bytes_of_a_table() -> None:
    tables = [
        RowTable(4, make_row_optimizer(keras.optimizers.Adam()), **given)
        for given in ({}, {"most_rows": 3000}, {"most_rows": 3000, "expected_rows": 5000})
    ]
    said = [each.expect_bytes().assumption for each in tables]
    assert said[0].startswith("0 rows that it has") and said[1:] == [
        "3,000 rows from most_rows=",
        "5,000 rows from expected_rows=",
    ]
    table, ids = tables[0], np.arange(3000)
    table.pull(ids, np.ones(3000, np.int64))
    assert table.expect_bytes().bytes == tables[1].expect_bytes().bytes
    index = table._index._ids.nbytes + table._index._rows.nbytes
    assert table.expect_bytes().bytes == 3000 * (4 * 4 * 3 + 3 * 8) + index
