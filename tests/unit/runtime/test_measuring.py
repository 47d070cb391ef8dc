"""How exact a boundary is, as the side that sends it measures it: against what the other side really has."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.codec import blocks
from whale_nebula.codec.way import parse_way
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange import ends as channel_ends
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import At, States, Tally

ROWS, COLUMNS = 48, 64


def drawn(seed: int = 0) -> Any:
    """Numbers of a low rank, and some noise."""
    drawer = np.random.default_rng(seed)
    low = drawer.standard_normal((ROWS, 6)) @ drawer.standard_normal((6, COLUMNS))
    return tf.constant(low + 0.1 * drawer.standard_normal((ROWS, COLUMNS)), tf.float32)


@dataclass
class Ends:
    """Both ends of a boundary and of its gradient, each with its own states."""

    forward: str
    backward: str = "none"
    here: States = field(default_factory=States)
    there: States = field(default_factory=States)
    step: int = 0
    training: bool = True

    def __post_init__(self) -> None:
        there, back = parse_way(self.forward), parse_way(self.backward).returned
        self.out = Outgoing("b0 a->b", "x at a", there, self.here)
        self.into = Incoming("b0 a->b", "x at b", there, self.there, dtype="float32")
        self.up = Outgoing("b0 b->a", "g at b", back, self.there, back=True)
        self.down = Incoming("b0 b->a", "g at a", back, self.here, back=True)

    def cross(self, x: Any, rows: Any = None, gradient: Any = None) -> tuple[BoundaryReport, Any]:
        """A step of one micro-batch: what is told of what was sent last, and what the other side has."""
        tally, at = Tally(), At(self.step, 0, self.training)
        self.step += 1
        payload, residue = self.out.send(x, at, tally, None, rows)
        made, there = self.into.take(payload, Tally())
        if gradient is None:
            return tally.reports()["b0 a->b"], made
        payload, _ = self.up.send(gradient, at, tally, there)
        made, _ = self.down.take(payload, Tally(), residue)
        return tally.reports()["b0 b->a"], made


def error(x: Any, again: Any) -> float:
    x, again = np.asarray(x), np.asarray(again)
    return float(np.linalg.norm(x - again) / np.linalg.norm(x))


WAYS = ["fp16", "bf16", "int8", "int4", "svd(0.5) >> int8", "rank(8) >> int8", "topk(0.2) >> fp16"]
WAYS += ["int8, zstd"]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_error_of_what_the_other_side_has(way: str) -> None:
    x = drawn()
    told, made = Ends(way).cross(x)
    assert told.error == pytest.approx(error(x, made), rel=1e-4)
    assert told.error is not None and 0 < told.error < 0.9


@pytest.mark.parametrize(("forward", "backward"), [("rank(8) >> int8",) * 2, ("topk(0.2)",) * 2, ("int8", "int4")])
def test_a_gradient_is_measured_in_the_form_in_which_it_crosses(forward: str, backward: str) -> None:
    gradient = drawn(1)
    told, made = Ends(forward, backward).cross(drawn(), gradient=gradient)
    assert told.error == pytest.approx(error(gradient, made), rel=1e-4)


def test_rows_that_are_not_sent_are_no_error() -> None:
    x, rows = drawn(), np.arange(ROWS) % 4 > 0
    told, made = Ends("int8, mask tokens").cross(x, rows)
    kept = np.asarray(x)[rows]
    assert told.error == pytest.approx(error(kept, np.asarray(made)[rows]), rel=1e-4)
    assert told.error is not None and told.error < 0.02 and not np.asarray(made)[~rows].any()


def test_what_crosses_as_it_is_has_none() -> None:
    assert Ends("none, zstd").cross(drawn())[0].error == 0.0
    assert Ends("int8, from step 5").cross(drawn())[0].error == 0.0
    assert Ends("fp16").cross(tf.zeros([0, 4]))[0].error == 0.0


def test_between_measurements_the_last_is_told() -> None:
    ends = Ends("int4")
    first = [ends.cross((step + 1.0) * drawn(step))[0].error for step in range(9)]
    measured = [channel_ends.is_due(step + 1) for step in range(9)]
    assert measured == [True, True, False, True, False, False, False, True, False]
    for step in range(1, 9):
        assert (first[step] != first[step - 1]) == measured[step]


def test_it_is_measured_at_once_where_the_codec_changes() -> None:
    ends = Ends("int4, from step 2")
    found = [ends.cross(drawn())[0] for _ in range(4)]
    assert [each.error == 0.0 for each in found] == [True, True, False, False]
    assert [each.codec for each in found] == ["none", "none", "int4", "int4"]
    assert [each.notes for each in found] == [(), (), ("none -> int4",), ()]


def test_an_evaluation_tells_what_training_measured_and_measures_nothing() -> None:
    ends = Ends("int8")
    ends.training = False
    assert ends.cross(drawn())[0].error is None
    ends.training = True
    measured = ends.cross(drawn())[0].error
    ends.training = False
    assert ends.cross(drawn(5))[0].error == measured


def test_further_micro_batches_are_not_measured() -> None:
    tally, way = Tally(), parse_way("int4")
    out = Outgoing("b0 a->b", "x at a", way, States())
    out.send(drawn(), At(0, 0, True), tally)
    first = tally.reports()["b0 a->b"].error
    out.send(drawn(1), At(0, 1, True), tally)
    assert tally.reports()["b0 a->b"].error == first


def test_measuring_leaves_what_both_sides_remember_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, others = Ends("rank(8) >> int8"), Ends("rank(8) >> int8")
    made = [ends.cross(drawn(step))[1] for step in range(4)]
    monkeypatch.setattr(channel_ends, "is_due", lambda step: False)
    for step in range(4):
        np.testing.assert_array_equal(made[step], others.cross(drawn(step))[1])
    assert ends.there.of("x at b").version == ends.here.of("x at a").version == 1


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
        found, _ = Ends(way).cross(1e6 * drawn())
        assert found.clamped == 0 and found.notes == ()


def test_a_gradient_that_is_clamped_is_counted() -> None:
    found, _ = Ends("int8", "fp16, zstd").cross(drawn(), gradient=tf.fill([ROWS, COLUMNS], 1e9))
    assert found.clamped == ROWS * COLUMNS


def test_infinities_are_nothing_to_clamp() -> None:
    x = tf.constant([[np.inf, 1.0, -np.inf, np.nan]])
    assert blocks.count_clamped(x) == 0
    assert blocks.count_clamped(tf.concat([x, x + 1e6], axis=0)) == 1


# ----------------------------------------------------------------------------------- smaller
def test_a_structure_that_would_not_shrink_says_so_in_every_step() -> None:
    ends = Ends("svd(0.02) >> fp16")
    for _ in range(2):
        found, _ = ends.cross(drawn()[:8])
        assert found.codec == "fp16"
        assert found.notes == ("svd(0.02) >> fp16 would not make float32[8, 64] smaller, so it crosses as fp16",)
