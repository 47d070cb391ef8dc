"""Click logs, generated and read, and AUC compared with a count of all pairs."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models.recommender import auc, cross_fields, generated_clicks, iterate_criteo

LINE = "\t".join(["1", *(str(each) for each in range(13)), *(f"{each:08x}" for each in range(26))])


@pytest.mark.parametrize("levels", [3, 50, 10**9])
def test_auc_equals_the_share_of_ordered_pairs(levels: int) -> None:
    drawn = np.random.default_rng(levels)
    scores, labels = drawn.integers(0, levels, 80), drawn.integers(0, 2, 80)
    pairs = [
        1.0 if one > other else 0.5 if one == other else 0.0
        for one, hit in zip(scores, labels, strict=True)
        for other, missed in zip(scores, labels, strict=True)
        if hit and not missed
    ]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "labels"), [([1.0], [1]), ([1.0, 2.0], [1]), ([1.0, np.nan], [0, 1]), ([1.0, 2.0, 3.0], [0, 1, 2])]
)
def test_auc_refuses_invalid_scores_and_labels(scores: list[float], labels: list[int]) -> None:
    with pytest.raises(DataError):
        auc(scores, labels)


def test_generated_rows_depend_only_on_index_and_seed() -> None:
    whole, part = generated_clicks(9000, seed=3), generated_clicks(100, start=4050, seed=3)
    for name in ("numbers", "ids", "clicked", "chances"):
        np.testing.assert_array_equal(getattr(whole, name)[4050:4150], getattr(part, name))
    assert not np.array_equal(whole.ids[:100], generated_clicks(100, seed=4).ids)


@pytest.mark.parametrize("exponent", [1.0, 1.3])
def test_generated_ids_follow_a_power_law(exponent: float) -> None:
    log = generated_clicks(60_000, fields=2, vocabulary=1000, exponent=exponent)
    counts = np.sort(np.unique(log.ids[:, 0], return_counts=True)[1])[::-1]
    ranks = np.arange(1, len(counts) + 1)
    assert counts.sum() == 60_000
    slope = np.polyfit(np.log(ranks[4:60]), np.log(counts[4:60]), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.1)


def test_generated_clicks_depend_on_features() -> None:
    log = generated_clicks(20_000)
    assert log.chances is not None
    assert 0.15 < log.clicked.mean() < 0.45
    assert auc(log.chances, log.clicked) > 0.78
    assert log.clicked.mean() == pytest.approx(log.chances.mean(), abs=0.02)


def test_cross_fields_adds_a_column_per_pair() -> None:
    ids = generated_clicks(500, fields=3, vocabulary=20).ids
    crossed = cross_fields(ids, [(0, 1), (2, 0)])
    np.testing.assert_array_equal(crossed[:, :3], ids)
    assert len(np.unique(crossed[:, 3])) == len(np.unique(ids[:, :2], axis=0))
    with pytest.raises(OptionError, match="the fields 0 cannot be crossed"):
        cross_fields(np.zeros((2, 2), np.int64), [0, 1])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="cannot be crossed"):
        cross_fields(ids, [(0, 3)])


@pytest.mark.parametrize(
    "option", [{"fields": 1}, {"start": -1}, {"exponent": 0.0}, {"vocabulary": 1}, {"numbers": 2.5}]
)
def test_invalid_click_log_option_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(option))):
        generated_clicks(10, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("zipped", [False, True])
def test_criteo_file_is_read_in_batches(tmp_path: Path, zipped: bool) -> None:
    columns = LINE.split("\t")
    columns[0], columns[2], columns[3], columns[20] = "0", "", "-2", ""
    text = "".join(f"{each}\n" for each in (LINE, "\t".join(columns), LINE)).encode()
    path = tmp_path / ("day.gz" if zipped else "day.txt")
    path.write_bytes(gzip.compress(text) if zipped else text)
    first, second = iterate_criteo(path, rows=2)
    assert (len(first), len(second)) == (2, 1)
    np.testing.assert_array_equal(first.clicked, [[1], [0]])
    np.testing.assert_allclose(first.numbers[0], np.log1p(np.arange(13)), rtol=1e-6)
    assert first.numbers[1, 1] == 0
    assert first.numbers[1, 2] == pytest.approx(-np.log(3))
    np.testing.assert_array_equal(first.ids[0], second.ids[0])
    assert np.flatnonzero(first.ids[0] != first.ids[1]).tolist() == [6]
    assert len(np.unique(first.ids)) == 27


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda line: line + "\t", "41 columns"),
        (lambda line: line.split("\t", 1)[1], "has no labels"),
        (lambda line: "2" + line[1:], "label '2'"),
        (lambda line: line.replace("\t7\t", "\t7.5\t"), "column 9 is '7.5'"),
        (lambda line: line.replace("00000003", "xyz"), "column 18 is 'xyz'"),
        (lambda line: line.replace("00000003", "100000000"), "column 18"),
        (lambda line: line + "ä", "ASCII"),
    ],
)
def test_invalid_criteo_row_is_reported_with_its_line(tmp_path: Path, changed, said: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "day.txt"
    path.write_text(f"{LINE}\n{changed(LINE)}\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(iterate_criteo(path))
    assert said in str(caught.value)
    assert "day.txt:2" in str(caught.value) or said == "ASCII"


def test_unreadable_criteo_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(iterate_criteo(tmp_path / "none.txt"))
    (tmp_path / "day.gz").write_bytes(gzip.compress(LINE.encode())[:-9])
    with pytest.raises(DataError, match="damaged"):
        list(iterate_criteo(tmp_path / "day.gz"))
