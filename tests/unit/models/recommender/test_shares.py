"""Sharded tables: each worker has the rows of its share, equal together to one table; resharding of states."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import CheckpointError, DataError, StateError
from whale_nebula.ir.layout import divide
from whale_nebula.models.recommender import RowTable, row_table
from whale_nebula.models.recommender.row_optimizers import make_row_optimizer
from whale_nebula.models.recommender.shares import BUCKETS, WHOLE, Share
from whale_nebula.runtime.checkpoint.objects import SavedState, encode_value


@pytest.fixture
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "find_open_run", lambda: SimpleNamespace(alone=False))


def make_table(**options: Any) -> RowTable:
    return RowTable(3, make_row_optimizer("adam"), **options)


def make_shares(count: int) -> list[Share]:
    sizes = divide(BUCKETS, count)
    return [Share(sum(sizes[:at]), size) for at, size in enumerate(sizes)]


def make_tables(count: int, **options: Any) -> list[RowTable]:
    """As the workers of a stage have them."""
    tables = [make_table(**options) for _ in range(count)]
    for table, share in zip(tables, make_shares(count), strict=True):
        table.hold(share)
    return tables


def save_state(table: RowTable) -> SavedState:
    """Its state as a checkpoint has it."""
    arrays: dict[str, Any] = {}

    def put(array: Any) -> str:
        arrays[str(len(arrays))] = tf.constant(array)
        return str(len(arrays) - 1)

    return SavedState(encode_value(table.state_dict(), put), arrays.__getitem__)


def train(tables: Sequence[RowTable], seed: int, steps: int = 6) -> np.ndarray:
    """Every worker is asked for all ids of a step, and given all gradients; what they look up is added up."""
    drawn, found = np.random.default_rng(seed), []
    for step in range(steps):
        ids = np.unique(drawn.integers(-500, 500, 40))
        seen, gradients = drawn.integers(1, 4, len(ids)), drawn.standard_normal((len(ids), 3)).astype(np.float32)
        ahead = [table.look_ahead(ids) if step % 2 else None for table in tables]
        pulled = [table.pull(ids, seen, early) for table, early in zip(tables, ahead, strict=True)]
        found.append(np.sum(pulled, axis=0, dtype=np.float32))
        for table in tables:
            table.push(ids, gradients)
    return np.concatenate(found)


def assert_equal_rows(tables: Sequence[RowTable], one: RowTable) -> None:
    expected, states = one.state_dict(), [table.state_dict() for table in tables]
    order = np.argsort(np.concatenate([state["ids"] for state in states]))
    for name in ("ids", "counts", "values"):
        np.testing.assert_array_equal(np.concatenate([state[name] for state in states])[order], expected[name])
    assert all(len(state["ids"]) > len(expected["ids"]) / (2 * len(tables)) for state in states)
    assert {state["steps"] for state in states} == {expected["steps"]}


@pytest.mark.usefixtures("several_processes")
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (3, 1)])
def test_table_shares_equal_one_table_after_resharding(staleness: int, before: int, after: int) -> None:
    one, tables = make_table(staleness=staleness), make_tables(before, staleness=staleness)
    np.testing.assert_array_equal(train([one], 1), train(tables, 1))
    assert_equal_rows(tables, one)
    assert sum(table.evict(fewer_than=2) for table in tables) == one.evict(fewer_than=2)
    parts = {f"cpu/{at}": save_state(table) for at, table in enumerate(tables)}
    parts["gpu/0"] = save_state(make_table())
    resharded = [make_table(staleness=staleness) for _ in range(after)]
    for at, (table, share) in enumerate(zip(resharded, make_shares(after), strict=True)):
        table.load_parts(parts, f"cpu/{at}", complete=True)
        assert len(table) == (len(tables[at]) if at < before else 0)  # until it is known what is its own
        table.hold(share)
    np.testing.assert_array_equal(train([one], 2), train(resharded, 2))
    assert_equal_rows(resharded, one)


@pytest.mark.usefixtures("several_processes")
def test_stale_rows_of_a_former_worker_are_discarded() -> None:
    """The table was on one worker, then on another, and comes back: what the first one still had is old."""
    (first,), one = make_tables(1), make_table()
    train([first], 1)
    train([one], 1)
    parts = {"cpu/0": save_state(first), "cpu/1": save_state(make_table())}
    tables = {name: make_table() for name in parts}
    for name, table in tables.items():
        table.load_parts(parts, name, complete=True)
    tables["cpu/1"].hold(WHOLE)
    train([tables["cpu/1"]], 2)
    train([one], 2)
    resharded = make_table()
    resharded.load_parts({name: save_state(table) for name, table in tables.items()}, "cpu/0", complete=True)
    resharded.hold(WHOLE)
    assert_equal_rows([resharded], one)


def test_one_process_loads_all_shares() -> None:
    tables = make_tables(2)
    train(tables, 1)
    one = make_table()
    one.load_parts({f"cpu/{at}": save_state(table) for at, table in enumerate(tables)}, "local/0", complete=True)
    assert_equal_rows(tables, one)
    assert one.share == WHOLE


@pytest.mark.usefixtures("several_processes")
def test_missing_share_is_refused() -> None:
    first, _ = tables = make_tables(2)
    train(tables, 1)
    for parts, worker in (({"cpu/0": save_state(first)}, "cpu/0"), ({"gpu/0": save_state(make_table())}, "cpu/1")):
        table = make_table()
        table.load_parts(parts, worker, complete=False)
        with pytest.raises(CheckpointError, match="not in the checkpoint's files on this host"):
            table.hold(make_shares(3)[1])
    table = make_table()
    table.load_parts({"cpu/0": save_state(first)}, "cpu/0", complete=False)
    table.hold(make_shares(2)[0])  # the same rows as before: nobody else is asked
    assert len(table) == len(first)


def test_changing_the_share_is_refused() -> None:
    table, _ = make_tables(2)
    with pytest.raises(StateError, match="divide the table in different ways"):
        table.hold(WHOLE)


def test_row_limit_is_divided_by_workers() -> None:
    tables = make_tables(2, most_rows=100)
    ids = np.arange(70)
    for start in range(0, 700, 70):
        for table in tables:
            table.pull(ids + start, np.ones(70, np.int64))
            assert len(table) <= 50
    with pytest.raises(DataError, match=r"the table is limited to 50 rows(.|\n)*most_rows="):
        tables[0].pull(np.arange(200), np.ones(200, np.int64))


def test_non_finite_gradient_is_skipped_by_all_shares() -> None:
    one, tables = make_table(), make_tables(3)
    for table in (one, *tables):
        train([table], 1)
        table.push(np.arange(9), np.where(np.arange(27) == 4, np.nan, 1).reshape(9, 3).astype(np.float32))
        assert table.left_out == 1
    train([one], 2)
    train(tables, 2)
    assert_equal_rows(tables, one)
