"""Orders: each row once an epoch, grouped by length, deterministic, and without content of the text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.text import Order, make_order

LENGTHS = np.random.default_rng(0).integers(3, 60, (2, 500))


def padding_share(order: Order, lengths: np.ndarray) -> float:
    """The share of padding in the padded batches."""
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in order.batches)
    return 1.0 - order.epochs * lengths.sum() / padded


@given(
    rows=st.integers(1, 60), batch=st.integers(1, 20), epochs=st.integers(1, 3), seed=st.integers(0, 9),
    sides=st.integers(0, 2), shuffle=st.booleans(),
)  # fmt: skip
def test_order_has_each_row_once_per_epoch(
    rows: int, batch: int, epochs: int, seed: int, sides: int, shuffle: bool
) -> None:
    order = make_order(rows, batch=batch, epochs=epochs, seed=seed, shuffle=shuffle, lengths=LENGTHS[:sides, :rows])
    assert order.steps_per_epoch == -(-rows // batch)
    for number in range(epochs):
        batches = order.epoch(number).batches
        assert sorted(row for each in batches for row in each) == list(range(rows))
        assert sorted(len(each) for each in batches)[1:] == [batch] * (len(batches) - 1)


def test_order_is_stable() -> None:
    assert make_order(6, batch=2, seed=3).batches == GOLDEN


def test_epochs_differ_and_do_not_depend_on_the_epoch_count() -> None:
    three = make_order(500, batch=16, epochs=3, seed=1)
    assert three.epoch(0) != three.epoch(1)
    assert three.epoch(0) == make_order(500, batch=16, seed=1)


def test_lengths_group_similar_sentences() -> None:
    plain = make_order(500, batch=16)
    one = make_order(500, batch=16, lengths=LENGTHS[:1])
    assert padding_share(plain, LENGTHS[0]) > 0.4
    assert padding_share(one, LENGTHS[0]) < 0.15
    long = np.stack([LENGTHS[0], LENGTHS[0] + 4])  # as translations are
    both = make_order(500, batch=16, lengths=long)
    assert max(padding_share(both, each) for each in long) < 0.2


def test_unshuffled_order_is_by_row_or_length() -> None:
    assert make_order(5, batch=2, shuffle=False).batches == ((0, 1), (2, 3), (4,))
    assert make_order(3, batch=1, lengths=[[30, 3, 20]], shuffle=False).batches == ((1,), (2,), (0,))


def test_restored_results_follow_row_numbers() -> None:
    order = make_order(9, batch=4, seed=5)
    made = [f"of row {row}" for batch in order.batches for row in batch]
    assert order.restored(made) == [f"of row {row}" for row in range(9)]


@pytest.mark.parametrize(("epochs", "count"), [(1, 8), (2, 18)])
def test_wrong_number_of_results_is_refused(epochs: int, count: int) -> None:
    with pytest.raises(OptionError, match=f"{count} results do not match an order"):
        make_order(9, batch=4, epochs=epochs).restored(["x"] * count)


@pytest.mark.parametrize("options", [{"batch": 0}, {"epochs": 0}, {"multiple": 0}, {"lengths": [[1, 2]]}])
def test_invalid_order_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        make_order(5, **{"batch": 2, **options})  # type: ignore[arg-type]


class TestFiles:
    def test_saved_order_round_trips_and_contains_only_row_numbers(self, tmp_path: Path) -> None:
        order = make_order(500, batch=16, epochs=2, lengths=LENGTHS)
        order.save(tmp_path / "order.json")
        assert Order.load(tmp_path / "order.json") == order
        assert set(json.loads((tmp_path / "order.json").read_text())) == {"rows", "epochs", "batches"}

    @pytest.mark.parametrize(
        "text",
        [
            "no json", "[]", "{}", '{"rows": 2, "epochs": 1, "batches": [[0], [0]]}',
            '{"rows": 2, "epochs": 1, "batches": [[0, 1, 2]]}', '{"rows": 2, "epochs": 0, "batches": []}',
            '{"rows": 1, "epochs": 2, "batches": [[0], [0], [0]]}', '{"rows": 1, "epochs": 1, "batches": 3}',
        ],
    )  # fmt: skip
    def test_invalid_order_file_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "order.json").write_text(text)
        with pytest.raises(DataError, match="does not contain an order of rows"):
            Order.load(tmp_path / "order.json")


GOLDEN = ((2, 1), (0, 4), (5, 3))
