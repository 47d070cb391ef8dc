"""The error of a boundary, as the sending side measures it: compared with the values of the other side."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.runtime.ends import Pair
from whale_nebula.codec import blocks
from whale_nebula.codec.way import parse_way
from whale_nebula.runtime.exchange import ends as channel_ends
from whale_nebula.runtime.exchange.ends import Outgoing
from whale_nebula.runtime.exchange.state import At, States, Tally

ROWS, COLUMNS = 48, 64


def drawn(seed: int = 0) -> Any:
    """Numbers of a low rank, and some noise."""
    drawer = np.random.default_rng(seed)
    low = drawer.standard_normal((ROWS, 6)) @ drawer.standard_normal((6, COLUMNS))
    return tf.constant(low + 0.1 * drawer.standard_normal((ROWS, COLUMNS)), tf.float32)


def error(x: Any, again: Any) -> float:
    x, again = np.asarray(x), np.asarray(again)
    return float(np.linalg.norm(x - again) / np.linalg.norm(x))


WAYS = ["fp16", "bf16", "int8", "int4", "svd(0.5) >> int8", "rank(8) >> int8", "topk(0.2) >> fp16"]
WAYS += ["int8, zstd"]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_error_of_what_the_other_side_has(way: str) -> None:
    x = drawn()
    told, made = Pair(way, "none").measure(x)
    assert told.error == pytest.approx(error(x, made), rel=1e-4)
    assert told.error is not None and 0 < told.error < 0.9


@pytest.mark.parametrize(("forward", "backward"), [("rank(8) >> int8",) * 2, ("topk(0.2)",) * 2, ("int8", "int4")])
def test_a_gradient_is_measured_in_the_form_in_which_it_crosses(forward: str, backward: str) -> None:
    gradient = drawn(1)
    told, made = Pair(forward, backward).measure(drawn(), gradient=gradient)
    assert told.error == pytest.approx(error(gradient, made), rel=1e-4)


def test_rows_that_are_not_sent_are_no_error() -> None:
    x, rows = drawn(), np.arange(ROWS) % 4 > 0
    told, made = Pair("int8, mask tokens").measure(x, rows)
    kept = np.asarray(x)[rows]
    assert told.error == pytest.approx(error(kept, np.asarray(made)[rows]), rel=1e-4)
    assert told.error is not None and told.error < 0.02 and not np.asarray(made)[~rows].any()


def test_what_crosses_as_it_is_has_none() -> None:
    assert Pair("none, zstd").measure(drawn())[0].error == 0.0
    assert Pair("int8, from step 5").measure(drawn())[0].error == 0.0
    assert Pair("fp16").measure(tf.zeros([0, 4]))[0].error == 0.0


def test_between_measurements_the_last_is_told() -> None:
    ends = Pair("int4")
    first = [ends.measure((step + 1.0) * drawn(step))[0].error for step in range(9)]
    measured = [channel_ends.is_due(step + 1) for step in range(9)]
    assert measured == [True, True, False, True, False, False, False, True, False]
    for step in range(1, 9):
        assert (first[step] != first[step - 1]) == measured[step]


def test_it_is_measured_at_once_where_the_codec_changes() -> None:
    ends = Pair("int4, from step 2")
    found = [ends.measure(drawn())[0] for _ in range(4)]
    assert [each.error == 0.0 for each in found] == [True, True, False, False]
    assert [each.codec for each in found] == ["none", "none", "int4", "int4"]
    assert [each.notes for each in found] == [(), (), ("none -> int4",), ()]


def test_an_evaluation_tells_what_training_measured_and_measures_nothing() -> None:
    ends = Pair("int8")
    ends.training = False
    assert ends.measure(drawn())[0].error is None
    ends.training = True
    measured = ends.measure(drawn())[0].error
    ends.training = False
    assert ends.measure(drawn(5))[0].error == measured


def test_further_micro_batches_are_not_measured() -> None:
    tally, way = Tally(), parse_way("int4")
    out = Outgoing("b0 a->b", "x at a", way, States())
    out.send(drawn(), At(0, 0, True), tally)
    first = tally.reports()["b0 a->b"].error
    out.send(drawn(1), At(0, 1, True), tally)
    assert tally.reports()["b0 a->b"].error == first


def test_measuring_leaves_what_both_sides_remember_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, others = Pair("rank(8) >> int8"), Pair("rank(8) >> int8")
    made = [ends.measure(drawn(step))[1] for step in range(4)]
    monkeypatch.setattr(channel_ends, "is_due", lambda step: False)
    for step in range(4):
        np.testing.assert_array_equal(made[step], others.measure(drawn(step))[1])
    assert ends.away.of(ends.into.key).version == ends.here.of(ends.out.key).version == 1


# ------------------------------------------------------------------------------------ fp16
@pytest.mark.parametrize("way", ["fp16", "fp16, zstd", "topk(0.5) >> fp16"])
def test_numbers_that_fp16_clamps_are_counted_in_every_micro_batch(way: str) -> None:
    x = np.ones((ROWS, COLUMNS), np.float32)
    x[3, 5], x[7, 1], x[9, 9] = 1e6, -7e4, 65504.0
    tally, out = Tally(), Outgoing("b0 a->b", "x at a", parse_way(way), States())
    for micro_batch in range(2):
        out.send(tf.constant(x), At(2, micro_batch, True), tally)
    found = tally.reports()["b0 a->b"]
    assert found.clamped == 4
    assert found.notes == ("numbers beyond 65504 are clamped by fp16",)


def test_other_codecs_clamp_nothing() -> None:
    for way in ("bf16", "int8"):
        found, _ = Pair(way, "none").measure(1e6 * drawn())
        assert found.clamped == 0 and found.notes == ()


def test_a_gradient_that_is_clamped_is_counted() -> None:
    found, _ = Pair("int8", "fp16, zstd").measure(drawn(), gradient=tf.fill([ROWS, COLUMNS], 1e9))
    assert found.clamped == ROWS * COLUMNS


def test_infinities_are_nothing_to_clamp() -> None:
    x = tf.constant([[np.inf, 1.0, -np.inf, np.nan]])
    assert blocks.count_clamped(x) == 0
    assert blocks.count_clamped(tf.concat([x, x + 1e6], axis=0)) == 1
