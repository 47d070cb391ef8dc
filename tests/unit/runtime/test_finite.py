"""NaN and infinity at the sending end of a boundary."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.codec.way import parse_way
from whale_nebula.errors import NonFiniteError
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import At, Residue, States, Tally
from whale_nebula.transport.protocol import Packed

BAD = [np.nan, np.inf, -np.inf]
REMEMBERING = ["rank(4)", "rank(4) >> int8", "int8, delta ids", "int4, delta ids"]
FORGETFUL = ["fp16", "bf16", "int8", "int4", "topk(0.5) >> fp16", "svd(0.5) >> fp16", "none, zstd"]


def drawn(bad: float | None = None) -> Any:
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    if bad is not None:
        x[3, 7] = bad
    return tf.constant(x)


def sent(
    way: str, x: Any, *, step: int = 2, micro_batch: int = 0, training: bool = True, back: bool = False,
    states: States | None = None, rows: Any = None,
) -> tuple[Any, Tally, States]:  # fmt: skip
    tally, states = Tally(), States() if states is None else states
    out = Outgoing("b0 a->b", "x at a", parse_way(way), states, back, stage="a")
    at = At(step, micro_batch, training)
    payload, _ = out.send(x, at, tally, Residue(dims=tuple(x.shape)) if back else None, rows, np.arange(16))
    return payload, tally, states


def remembered(states: States) -> list[bytes]:
    state = states.of("x at a")
    arrays = state.structure if state.held is None else state.held.as_arrays().values()
    return [np.asarray(each).tobytes() for each in arrays]


@pytest.mark.parametrize("way", REMEMBERING)
@pytest.mark.parametrize("bad", BAD)
def test_it_is_refused_where_it_would_stay(way: str, bad: float) -> None:
    *_, states = sent(way, drawn())
    before = remembered(states)
    with pytest.raises(NonFiniteError, match="b0 a->b has a NaN or an infinity") as caught:
        sent(way, drawn(bad), micro_batch=1, states=states)
    error = caught.value
    assert (error.boundary, error.stage, error.step, error.micro_batch) == ("b0 a->b", "a", 3, 1)
    assert error.where == "step 3, micro-batch 1 of stage 'a'"
    assert 'nonfinite="skip"' in error.mend
    assert remembered(states) == before


@pytest.mark.parametrize("way", FORGETFUL)
@pytest.mark.parametrize("bad", BAD)
def test_what_remembers_nothing_lets_it_pass(way: str, bad: float) -> None:
    payload, tally, _ = sent(way, drawn(bad))
    made, _ = Incoming("b0", "x at b", parse_way(way), States()).take(payload, Tally())
    made = np.asarray(tf.cast(made, tf.float32))
    assert not np.isfinite(made[3, 7]) and tally.left_out == ""
    if way in ("fp16", "bf16", "none, zstd"):
        np.testing.assert_array_equal(made[3, 7], bad)


@pytest.mark.parametrize("way", ["int8", "int4"])
def test_a_block_of_integers_is_no_number_as_a_whole_and_the_others_are_sound(way: str) -> None:
    payload, *_ = sent(way, drawn(np.inf))
    made, _ = Incoming("b0", "x at b", parse_way(way), States()).take(payload, Tally())
    assert np.isnan(np.asarray(made)[3]).all() and np.isfinite(np.delete(np.asarray(made), 3, axis=0)).all()


@pytest.mark.parametrize("way", ["rank(4) >> int8", "int8, delta ids", "int8", "fp16", "none"])
def test_a_step_is_left_out_where_the_user_says_so(way: str) -> None:
    x = drawn(np.nan)
    payload, tally, states = sent(f"{way}, nonfinite skip", x, micro_batch=2)
    assert payload is x
    assert tally.left_out == "b0 a->b has a NaN or an infinity in micro-batch 2 of stage 'a'"
    assert states.of("x at a").structure is None and states.of("x at a").held is None


def test_a_gradient_enters_nothing() -> None:
    payload, tally, _ = sent("int8", drawn(np.nan), back=True)
    assert isinstance(payload, Packed) and tally.left_out == ""
    x = drawn(np.nan)
    payload, tally, _ = sent("int8, nonfinite skip", x, back=True)
    assert payload is x and "b0 a->b" in tally.left_out


def test_an_evaluation_is_never_refused_and_remembers_nothing_of_it() -> None:
    for more in ("", ", nonfinite skip"):
        x = drawn(np.nan)
        payload, tally, states = sent("rank(4) >> int8" + more, x, training=False)
        assert payload is x and tally.left_out == ""
        assert states.of("x at a").structure is None


def test_before_the_codec_begins_nothing_is_refused() -> None:
    x = drawn(np.nan)
    assert sent("rank(4), from step 9", x)[0] is x
    assert sent("rank(4), from step 9, nonfinite skip", x)[1].left_out


def test_what_stands_in_rows_that_are_not_sent_does_not_matter() -> None:
    rows = np.arange(16) != 3
    payload, tally, _ = sent("rank(4) >> int8, mask tokens", drawn(np.nan), rows=rows)
    assert isinstance(payload, Packed) and tally.left_out == ""
