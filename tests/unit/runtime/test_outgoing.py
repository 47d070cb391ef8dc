"""The error of a boundary, as the sending side measures it: compared with the values of the other side."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.runtime.ends import Pair
from whale_nebula.codec import blocks
from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.errors import NonFiniteError
from whale_nebula.runtime.exchange import ends as channel_ends
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import Residue, States, Tally, TensorPosition
from whale_nebula.transport.protocol import Packed

ROWS, COLUMNS = 48, 64


def draw_low_rank(seed: int = 0) -> Any:
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
def test_reported_error_is_that_of_the_received_tensor(way: str) -> None:
    x = draw_low_rank()
    report, made = Pair(way, "none").measure(x)
    assert report.error == pytest.approx(error(x, made), rel=1e-4)
    assert report.error is not None and 0 < report.error < 0.9


@pytest.mark.parametrize(("forward", "backward"), [("rank(8) >> int8",) * 2, ("topk(0.2)",) * 2, ("int8", "int4")])
def test_gradient_error_is_that_of_the_received_gradient(forward: str, backward: str) -> None:
    gradient = draw_low_rank(1)
    report, made = Pair(forward, backward).measure(draw_low_rank(), gradient=gradient)
    assert report.error == pytest.approx(error(gradient, made), rel=1e-4)


def test_masked_rows_do_not_count_as_error() -> None:
    x, rows = draw_low_rank(), np.arange(ROWS) % 4 > 0
    report, made = Pair("int8, mask tokens").measure(x, rows)
    kept = np.asarray(x)[rows]
    assert report.error == pytest.approx(error(kept, np.asarray(made)[rows]), rel=1e-4)
    assert report.error is not None and report.error < 0.02 and not np.asarray(made)[~rows].any()


def test_uncompressed_tensor_has_no_error() -> None:
    assert Pair("none, zstd").measure(draw_low_rank())[0].error == 0.0
    assert Pair("int8, from step 5").measure(draw_low_rank())[0].error == 0.0
    assert Pair("fp16").measure(tf.zeros([0, 4]))[0].error == 0.0


def test_last_measured_error_is_reported_between_measurements() -> None:
    ends = Pair("int4")
    first = [ends.measure((step + 1.0) * draw_low_rank(step))[0].error for step in range(9)]
    measured = [channel_ends.is_due(step + 1) for step in range(9)]
    assert measured == [True, True, False, True, False, False, False, True, False]
    for step in range(1, 9):
        assert (first[step] != first[step - 1]) == measured[step]


def test_error_is_measured_at_once_when_the_codec_changes() -> None:
    ends = Pair("int4, from step 2")
    found = [ends.measure(draw_low_rank())[0] for _ in range(4)]
    assert [each.error == 0.0 for each in found] == [True, True, False, False]
    assert [each.codec for each in found] == ["none", "none", "int4", "int4"]
    assert [each.notes for each in found] == [(), (), ("none -> int4",), ()]


def test_evaluation_reports_the_error_that_training_measured() -> None:
    ends = Pair("int8")
    ends.training = False
    assert ends.measure(draw_low_rank())[0].error is None
    ends.training = True
    measured = ends.measure(draw_low_rank())[0].error
    ends.training = False
    assert ends.measure(draw_low_rank(5))[0].error == measured


def test_error_is_measured_for_the_first_micro_batch_only() -> None:
    tally, way = Tally(), parse_encoding("int4")
    out = Outgoing("b0 a->b", "x at a", way, States())
    out.encode(draw_low_rank(), TensorPosition(0, 0, True), tally)
    first = tally.reports()["b0 a->b"].error
    out.encode(draw_low_rank(1), TensorPosition(0, 1, True), tally)
    assert tally.reports()["b0 a->b"].error == first


def test_measuring_does_not_change_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, others = Pair("rank(8) >> int8"), Pair("rank(8) >> int8")
    made = [ends.measure(draw_low_rank(step))[1] for step in range(4)]
    monkeypatch.setattr(channel_ends, "is_due", lambda step: False)
    for step in range(4):
        np.testing.assert_array_equal(made[step], others.measure(draw_low_rank(step))[1])
    assert (
        ends.states_b.find_state(ends.incoming.key).version == ends.states_a.find_state(ends.outgoing.key).version == 1
    )


# ------------------------------------------------------------------------------------ fp16
@pytest.mark.parametrize("way", ["fp16", "fp16, zstd", "topk(0.5) >> fp16"])
def test_numbers_clamped_by_fp16_are_counted_in_every_micro_batch(way: str) -> None:
    x = np.ones((ROWS, COLUMNS), np.float32)
    x[3, 5], x[7, 1], x[9, 9] = 1e6, -7e4, 65504.0
    tally, out = Tally(), Outgoing("b0 a->b", "x at a", parse_encoding(way), States())
    for micro_batch in range(2):
        out.encode(tf.constant(x), TensorPosition(2, micro_batch, True), tally)
    found = tally.reports()["b0 a->b"]
    assert found.clamped == 4
    assert found.notes == ("numbers beyond 65504 are clamped by fp16",)


def test_bf16_and_int8_clamp_no_numbers() -> None:
    for way in ("bf16", "int8"):
        found, _ = Pair(way, "none").measure(1e6 * draw_low_rank())
        assert found.clamped == 0 and found.notes == ()


def test_clamped_gradient_is_counted() -> None:
    found, _ = Pair("int8", "fp16, zstd").measure(draw_low_rank(), gradient=tf.fill([ROWS, COLUMNS], 1e9))
    assert found.clamped == ROWS * COLUMNS


def test_infinities_are_not_counted_as_clamped() -> None:
    x = tf.constant([[np.inf, 1.0, -np.inf, np.nan]])
    assert blocks.count_clamped(x) == 0
    assert blocks.count_clamped(tf.concat([x, x + 1e6], axis=0)) == 1


# -------------------- NaN and infinity at the sending end of a boundary
BAD = [np.nan, np.inf, -np.inf]
STATEFUL = ["rank(4)", "rank(4) >> int8", "int8, delta ids", "int4, delta ids"]
STATELESS = ["fp16", "bf16", "int8", "int4", "topk(0.5) >> fp16", "svd(0.5) >> fp16", "none, zstd"]


def draw_rows(bad: float | None = None) -> Any:
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    if bad is not None:
        x[3, 7] = bad
    return tf.constant(x)


def send_once(
    way: str, x: Any, *, step: int = 2, micro_batch: int = 0, training: bool = True, back: bool = False,
    states: States | None = None, rows: Any = None,
) -> tuple[Any, Tally, States]:  # fmt: skip
    tally, states = Tally(), States() if states is None else states
    out = Outgoing("b0 a->b", "x at a", parse_encoding(way), states, back, stage="a")
    at = TensorPosition(step, micro_batch, training)
    payload, _ = out.encode(x, at, tally, Residue(dims=tuple(x.shape)) if back else None, rows, np.arange(16))
    return payload, tally, states


def list_state_bytes(states: States) -> list[bytes]:
    state = states.find_state("x at a")
    arrays = state.structure if state.cache is None else state.cache.as_arrays().values()
    return [np.asarray(each).tobytes() for each in arrays]


@pytest.mark.parametrize("way", STATEFUL)
@pytest.mark.parametrize("bad", BAD)
def test_nan_is_refused_by_codecs_with_state(way: str, bad: float) -> None:
    *_, states = send_once(way, draw_rows())
    before = list_state_bytes(states)
    with pytest.raises(NonFiniteError, match="b0 a->b contains a NaN or an infinity") as caught:
        send_once(way, draw_rows(bad), micro_batch=1, states=states)
    error = caught.value
    assert (error.boundary, error.stage, error.step, error.micro_batch) == ("b0 a->b", "a", 3, 1)
    assert error.where == "step 3, micro-batch 1 of stage 'a'"
    assert 'nonfinite="skip"' in error.mend
    assert list_state_bytes(states) == before


@pytest.mark.parametrize("way", STATELESS)
@pytest.mark.parametrize("bad", BAD)
def test_nan_passes_codecs_without_state(way: str, bad: float) -> None:
    payload, tally, _ = send_once(way, draw_rows(bad))
    made, _ = Incoming("b0", "x at b", parse_encoding(way), States()).decode(payload, Tally())
    made = np.asarray(tf.cast(made, tf.float32))
    assert not np.isfinite(made[3, 7]) and tally.skip_reason == ""
    if way in ("fp16", "bf16", "none, zstd"):
        np.testing.assert_array_equal(made[3, 7], bad)


@pytest.mark.parametrize("way", ["int8", "int4"])
def test_infinity_makes_its_integer_block_nan_and_no_other(way: str) -> None:
    payload, *_ = send_once(way, draw_rows(np.inf))
    made, _ = Incoming("b0", "x at b", parse_encoding(way), States()).decode(payload, Tally())
    assert np.isnan(np.asarray(made)[3]).all() and np.isfinite(np.delete(np.asarray(made), 3, axis=0)).all()


@pytest.mark.parametrize("way", ["rank(4) >> int8", "int8, delta ids", "int8", "fp16", "none"])
def test_nan_skips_the_step_with_nonfinite_skip(way: str) -> None:
    x = draw_rows(np.nan)
    payload, tally, states = send_once(f"{way}, nonfinite skip", x, micro_batch=2)
    assert payload is x
    assert tally.skip_reason == "b0 a->b contains a NaN or an infinity in micro-batch 2 of stage 'a'"
    assert states.find_state("x at a").structure is None and states.find_state("x at a").cache is None


def test_nan_in_a_gradient_passes_or_skips_the_step() -> None:
    payload, tally, _ = send_once("int8", draw_rows(np.nan), back=True)
    assert isinstance(payload, Packed) and tally.skip_reason == ""
    x = draw_rows(np.nan)
    payload, tally, _ = send_once("int8, nonfinite skip", x, back=True)
    assert payload is x and "b0 a->b" in tally.skip_reason


def test_nan_in_an_evaluation_passes_and_leaves_no_state() -> None:
    for more in ("", ", nonfinite skip"):
        x = draw_rows(np.nan)
        payload, tally, states = send_once("rank(4) >> int8" + more, x, training=False)
        assert payload is x and tally.skip_reason == ""
        assert states.find_state("x at a").structure is None


def test_nan_passes_before_the_first_step_of_the_codec() -> None:
    x = draw_rows(np.nan)
    assert send_once("rank(4), from step 9", x)[0] is x
    assert send_once("rank(4), from step 9, nonfinite skip", x)[1].skip_reason


def test_nan_in_a_masked_row_is_ignored() -> None:
    rows = np.arange(16) != 3
    payload, tally, _ = send_once("rank(4) >> int8, mask tokens", draw_rows(np.nan), rows=rows)
    assert isinstance(payload, Packed) and tally.skip_reason == ""
