"""Both ends of a boundary without a model: round trips in both directions, and the states of both."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.passes.examples import DESCENT, TWO_STAGES
from tests.unit.passes.programs import assign_worker_per_stage, compile_text, parse_program
from tests.unit.runtime.ends import Pair
from whale_nebula.codec import packing
from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.codec.sizes import extra_bytes, payload_bytes
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.passes.batch import count_entries_per_row
from whale_nebula.runtime.exchange.crossing import Channels
from whale_nebula.runtime.exchange.link_exchange import LinkExchange
from whale_nebula.runtime.exchange.state import HOST_SEPARATOR, ChannelState, Models, Residue, States, Tally
from whale_nebula.spec import Value
from whale_nebula.transport.protocol import Packed

COLUMNS = 48
# forward, backward, and the largest relative errors of both on normal numbers
CODECS = [
    ("int8", "int8", 0.01, 0.012),
    ("int4", "int4", 0.12, 0.2),
    ("axes >> coded(3)", "axes >> coded(2)", 0.25, 0.4),
    ("coded(3)", "axes >> int4", 0.25, 0.2),
    ("bf16, zstd", "fp16, zstd", 0.003, 0.0005),
    ("svd(0.6)", "svd(0.6) >> int8", 0.7, 0.7),
    ("svd(0.6) >> fp16", "int8", 0.7, 0.012),
    ("rank(12)", "rank(12)", 0.9, 0.9),
    ("rank(12) >> int8", "rank(12) >> int4", 0.9, 0.95),
    ("topk(0.25)", "topk(0.25)", 0.7, 0.95),
    ("topk(0.25) >> int4", "topk(0.25) >> int8", 0.75, 0.95),
    ("none, mask", "none, mask", 0.0, 0.0),
    ("none, zstd", "none, zstd", 0.0, 0.0),
]
GRID_CODECS = ("int4", "coded(3)", "svd(0.6)", "rank(12)", "topk(0.25)", "none, zstd")  # like one that is tried besides
WAYS = [
    pytest.param(forward, backward, marks=pytest.mark.grid if forward in GRID_CODECS else ())
    for forward, backward, *_ in CODECS
]


def draw_normal(*dims: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims).astype(dtype)


def nbytes(payload: Any) -> int:
    return int(payload.nbytes if isinstance(payload, Packed) else payload.numpy().nbytes)


def relative_error(x: np.ndarray, again: np.ndarray) -> float:
    """The relative error."""
    return float(np.linalg.norm(again - x) / (np.linalg.norm(x) or 1.0))


# ---------------------------------------------------------------------- there and back
@pytest.mark.parametrize(("forward", "backward", "error", "gradient_error"), CODECS)
def test_codec_round_trip_is_within_its_error(forward: str, backward: str, error: float, gradient_error: float) -> None:
    pair = Pair(forward, backward)
    x, gradient = draw_normal(6, 10, COLUMNS), draw_normal(6, 10, COLUMNS, seed=1)
    again, returned = pair.cross(x), pair.cross_back(gradient)
    assert again.dtype == returned.dtype == x.dtype and again.shape == returned.shape == x.shape
    assert relative_error(x, again) <= error
    assert relative_error(gradient, returned) <= gradient_error


@pytest.mark.parametrize(("forward", "backward"), WAYS)
@given(dims=st.lists(st.integers(0, 9), min_size=1, max_size=3), scale=st.sampled_from([0.0, 1e-42, 1e-8, 1.0, 1e30]))
@settings(max_examples=4, deadline=None)
def test_arbitrary_shapes_and_magnitudes_round_trip(forward: str, backward: str, dims: list[int], scale: float) -> None:
    pair = Pair(forward, backward)
    x = draw_normal(*dims) * np.float32(scale)
    for micro_batch in range(2):
        again, returned = pair.cross(x, micro_batch=micro_batch), pair.cross_back(x, micro_batch=micro_batch)
        assert again.shape == returned.shape == x.shape
        assert np.isfinite(again).all() and np.isfinite(returned).all()
        if scale == 0.0:
            assert not again.any() and not returned.any()


@pytest.mark.parametrize(("forward", "backward"), WAYS)
def test_payload_sizes_equal_the_planned_bytes(forward: str, backward: str) -> None:
    pair, dims = Pair(forward, backward), (6, 10, COLUMNS)
    for micro_batch in range(2):  # the second has no news of a basis
        pair.cross(draw_normal(*dims), micro_batch=micro_batch)
        size = nbytes(pair.payload)
        assert size <= 6 * 10 * COLUMNS * 4 + extra_bytes(parse_encoding(forward), dims)
        pair.cross_back(draw_normal(*dims), micro_batch=micro_batch)
    for found, expected in (
        (size, payload_bytes(forward, "float32", dims)),
        (nbytes(pair.payload), payload_bytes(backward, "float32", dims, forward)),
    ):
        assert found <= expected if "zstd" in forward or "mask" in forward else found == expected


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("change", [{}, {"seed": 1}, {"step": 1}, {"micro_batch": 1}], ids=str)
def test_stochastic_rounding_depends_on_the_key_only(change: dict[str, int]) -> None:
    payloads = []
    for key in ({}, change):
        pair = Pair(seed=key.get("seed", 0))
        for micro_batch in range(1 + key.get("micro_batch", 0)):
            pair.cross(draw_normal(9, COLUMNS), key.get("step", 0), micro_batch)
            pair.cross_back(draw_normal(9, COLUMNS), key.get("step", 0), micro_batch)
        payloads.append(pair.payload.data.tobytes())
    assert (payloads[0] == payloads[1]) is (change == {})


def test_gradient_rounding_does_not_depend_on_host_names() -> None:
    one, other = Pair(), Pair()
    other.outgoing_gradient.key = other.outgoing_gradient.key.replace(f"{HOST_SEPARATOR}b", f"{HOST_SEPARATOR}c1/0")
    for pair in (one, other):
        pair.cross(draw_normal(9, COLUMNS))
        pair.cross_back(draw_normal(9, COLUMNS))
    assert one.payload.data.tobytes() == other.payload.data.tobytes()


# ---------------------------------------------------------------------- rows that are left out
@pytest.mark.parametrize(
    ("codec", "kept"),
    [
        pytest.param(codec, kept, marks=() if (a + b) % 2 else pytest.mark.grid)
        for a, codec in enumerate(["none", "int8", "svd(0.6)", "rank(12) >> int8", "topk(0.25)"])
        for b, kept in enumerate([0, 1, 7, 12])
    ],
)
def test_masked_rows_are_sent_in_neither_direction(codec: str, kept: int) -> None:
    pair, marks = Pair(f"{codec}, mask", f"{'int8' if codec == 'svd(0.6)' else codec}, mask"), np.arange(12) < kept
    x, gradient = draw_normal(3, 4, COLUMNS), draw_normal(3, 4, COLUMNS, seed=1)
    again, returned = pair.cross(x, rows=marks.reshape(3, 4)), pair.cross_back(gradient)
    for full, made in ((x, again), (gradient, returned)):
        rows = made.reshape(12, COLUMNS)
        assert not rows[~marks].any()
        if codec == "none":
            assert np.array_equal(rows[marks], full.reshape(12, COLUMNS)[marks])
        elif kept:
            assert rows[marks].any()


@pytest.mark.parametrize("marks", [np.ones(800), np.arange(800) > 0, np.ones(3)], ids=["all", "all but one", "others"])
def test_mask_without_savings_is_not_sent(marks: Any) -> None:
    pair, x = Pair("none, mask", "none, mask"), draw_normal(800, 4)
    assert np.array_equal(pair.cross(x, rows=marks), x)
    assert pair.payload is not None and not isinstance(pair.payload, Packed)


# ---------------------------------------------------------------------- what both sides remember
def test_both_ends_have_the_same_basis() -> None:
    pair = Pair("rank(12) >> int8", "rank(12) >> int8")
    for step in range(52):
        pair.cross(draw_normal(20, COLUMNS, seed=step), step)
        if step in (0, 50):
            assert pair.payload.state == (2 if step else 1)
            first = pair.sent_residue.structure.tobytes()
        assert pair.sent_residue.structure.tobytes() == np.asarray(pair.received_residue.structure).tobytes() == first
    news = 2 * 12 * COLUMNS
    size = pair.payload.nbytes
    pair = Pair("rank(12) >> int8", "rank(12) >> int8")
    pair.cross(draw_normal(20, COLUMNS))
    assert pair.payload.nbytes == size + news


def test_basis_exists_before_the_first_training_step() -> None:
    """A model that is asked before it has learned anything."""
    pair = Pair("rank(12)", "rank(12)")
    asked = pair.cross(draw_normal(20, COLUMNS), training=False)
    again = pair.cross(draw_normal(20, COLUMNS), micro_batch=1, training=False)
    assert np.array_equal(asked, again)
    assert pair.payload.state == 1
    pair.cross(draw_normal(20, COLUMNS))
    assert pair.payload.state == 1


def test_basis_exists_for_the_first_unmasked_rows() -> None:
    """Whichever micro-batch of the step has them."""
    pair, x = Pair("rank(12), mask", "rank(12), mask"), draw_normal(20, COLUMNS)
    assert not pair.cross(x, rows=np.zeros(20)).any()
    assert not pair.cross_back(x).any()
    assert pair.cross(x, micro_batch=1, rows=np.arange(20) < 15).any()
    assert pair.cross_back(x, micro_batch=1).any()
    assert pair.payload is not None and pair.states_a.find_state(pair.outgoing.key).version == 1


def test_different_states_are_refused_with_the_name_of_the_boundary() -> None:
    pair = Pair("rank(12)", "rank(12)")
    pair.cross(draw_normal(20, COLUMNS))
    pair.incoming.states = States()
    with pytest.raises(RemoteProtocolError, match="the two sides of b0 a->b have different states") as caught:
        pair.cross(draw_normal(20, COLUMNS), step=1)
    assert "the other side has version 1, and this one 0" in caught.value.why
    assert "start all workers again" in caught.value.mend


def test_payload_of_another_codec_is_refused() -> None:
    one, other = Pair("int8"), Pair("int4")
    one.cross(draw_normal(9, COLUMNS))
    with pytest.raises(RemoteProtocolError, match="is not one of 'int4'"):
        other.incoming.decode(one.payload, other.tally)


def test_payload_that_does_not_shrink_the_tensor_is_refused() -> None:
    pair = Pair("topk(0.25)", "topk(0.25)")
    pair.cross(draw_normal(9, COLUMNS))
    with pytest.raises(RemoteProtocolError, match="does not make it smaller"):
        pair.incoming.decode(pair.payload._replace(dims=(9, 1)), pair.tally)


def test_gradient_of_another_shape_is_refused() -> None:
    pair = Pair("topk(0.25)", "topk(0.25)")
    pair.cross(draw_normal(9, COLUMNS))
    pair.cross_back(draw_normal(9, COLUMNS))
    with pytest.raises(RemoteProtocolError, match=r"a gradient of shape \(8, 48\) for a tensor of shape \(9, 48\)"):
        pair.incoming_gradient.decode(pair.payload._replace(dims=(8, COLUMNS)), pair.tally, pair.sent_residue)
    with pytest.raises(RemoteProtocolError, match="but the tensor was not sent with it"):
        pair.incoming_gradient.decode(pair.payload, pair.tally, Residue())


@pytest.mark.parametrize(("forward", "backward"), WAYS)
@given(data=st.binary(max_size=200), dims=st.lists(st.integers(0, 9), min_size=1, max_size=3), cut=st.booleans())
@settings(max_examples=8, deadline=None)
def test_arbitrary_payloads_are_decoded_or_refused(
    forward: str, backward: str, data: bytes, dims: list[int], cut: bool
) -> None:
    pair = Pair(forward, backward)
    pair.cross(draw_normal(5, COLUMNS))
    if not isinstance(pair.payload, Packed):
        return
    bad = pair.payload.data[: len(data)] if cut else np.frombuffer(data, np.uint8)
    try:
        made, _ = pair.incoming.decode(pair.payload._replace(data=bad, dims=tuple(dims)), pair.tally)
    except RemoteProtocolError:
        return
    assert tuple(made.shape) == tuple(dims)


# ---------------------------------------------------------------------- when it is used


def test_evaluation_uses_the_codec_of_the_training_step() -> None:
    pair = Pair("int8, from step 2", "int8, from step 2")
    used = []
    for step in range(4):
        pair.cross(draw_normal(9, COLUMNS), step, training=False)
        used.append(isinstance(pair.payload, Packed))
        pair.cross(draw_normal(9, COLUMNS), step)
    assert used == [False, False, True, True]


def test_integers_are_packed_into_the_bits_they_need() -> None:
    pair = Pair("bits", "none")
    tokens = np.random.default_rng(0).integers(0, 1000, (7, 30)).astype("int32")
    assert np.array_equal(pair.cross(tokens), tokens)
    assert pair.payload.nbytes < 7 * 30 * 10 / 8 + 20
    flags = tokens > 500
    assert np.array_equal(pair.cross(flags), flags)
    assert pair.payload.nbytes <= 7 * 30 / 8 + 5


def test_integers_of_full_width_are_sent_uncompressed() -> None:
    pair = Pair("bits", "none")
    numbers = np.array([-(2**31), 2**31 - 1], "int32")
    assert np.array_equal(pair.cross(numbers), numbers)
    assert not isinstance(pair.payload, Packed)


# ---------------------------------------------------------------------- a step that fails
@pytest.mark.parametrize(("forward", "backward"), WAYS)
def test_restored_states_continue_bit_identically(forward: str, backward: str) -> None:
    def step(pair: Pair, number: int) -> bytes:
        pair.cross(draw_normal(9, COLUMNS, seed=number), number)
        crossed = pair.payload
        pair.cross_back(draw_normal(9, COLUMNS, seed=number), number)
        data = crossed.data if isinstance(crossed, Packed) else crossed.numpy()
        return data.tobytes()

    pair, other = Pair(forward, backward), Pair(forward, backward)
    assert step(pair, 0) == step(other, 0)
    here, away = other.states_a.copy(), other.states_b.copy()
    step(other, 7)
    other.states_a.restore(here)
    other.states_b.restore(away)
    assert [step(pair, number) for number in (1, 2)] == [step(other, number) for number in (1, 2)]


# ---------------------------------------------------------------------- whose states they are
class Variable:
    """Stands for a variable: it is distinct from others and can be deleted."""


def test_programs_with_a_common_variable_share_states() -> None:
    models, ours, theirs = Models(), [Variable(), Variable()], [Variable()]
    numbers = [models.number(variables) for variables in (ours, theirs, [ours[1], Variable()])]
    assert numbers == [0, 1, 0]
    held: dict[str, ChannelState] = {}
    States(held, 0).put("a->b", ChannelState(steps=3))
    assert (States(held, 0).find_state("a->b").steps, States(held, 1).find_state("a->b").steps) == (3, 0)


def test_states_of_a_deleted_model_are_dropped() -> None:
    models, ours, theirs, held = Models(), [Variable()], [Variable()], {}
    for number in (models.number(ours), models.number(theirs)):
        States(held, number).put("a->b", ChannelState(steps=number + 1))
    assert models.find_deleted() == set()
    ours.clear()
    gc.collect()
    assert models.find_deleted() == {0}
    States(held).forget(models.find_deleted())
    assert [States(held, number).find_state("a->b").steps for number in (0, 1)] == [0, 2]
    assert models.number([Variable()]) == 2


# ---------------------------------------------------------------------- axes
AXES = "axes >> coded(3)"


@pytest.mark.parametrize("back", [False, True])
def test_axes_codec_keeps_large_float16_numbers_finite(back: bool) -> None:
    pair, x = Pair(AXES, AXES), (np.clip(draw_normal(60, COLUMNS), -1.5, 1.5) * 4e4).astype("float16")
    found = pair.cross(x)
    found = pair.cross_back(x) if back else found
    assert np.isfinite(found).all() and relative_error(x.astype("float32"), found.astype("float32")) < 0.3


def test_basis_is_renewed_for_another_number_of_columns() -> None:
    for way in (AXES, "rank(12)"):
        pair = Pair(way, AXES)
        for columns in (COLUMNS, 24, 24, COLUMNS):
            x = draw_normal(60, columns)
            assert relative_error(x, pair.cross(x)) < 0.95
            assert relative_error(x, pair.cross_back(x)) < 0.3


def test_axes_payload_of_another_shape_is_refused() -> None:
    pair = Pair(AXES, AXES)
    pair.cross(draw_normal(60, COLUMNS))
    received = pair.payload
    for dims in ((), (1, 3000), (60, 24), (20, 3 * COLUMNS)):
        with pytest.raises(RemoteProtocolError):
            pair.incoming.decode(received._replace(dims=dims), Tally())


def test_unexpected_zstd_payload_is_refused() -> None:
    sent, plain = Pair("int8, zstd", "int8"), Pair("int8", "int8")
    sent.cross(np.zeros((60, COLUMNS), "float32"))
    with pytest.raises(RemoteProtocolError, match="never sends"):
        plain.incoming.decode(
            sent.payload._replace(codec=plain.outgoing.encoding.numbers[plain.outgoing.encoding.codec]), Tally()
        )


# -------------------- Decoded tensors must have the rows of their micro-batch; others are refused before memory
ROWS = (4, 3)
MEBIBYTE = 1 << 20


def make_post(micro_batches: int) -> tuple[LinkExchange, Value]:
    """The exchange of a step whose one boundary has 8 columns, and as many rows as the batch."""
    head = f"codecs int8 none\nmicro {micro_batches}\n"
    plan = compile_text(head + TWO_STAGES.replace("@a\n%6", "@a compress=0\n%6") + DESCENT, assign_worker_per_stage)
    channels = Channels(plan, plan.routing, States())
    return LinkExchange(channels, {}, 0, 0, 1.0, rows=ROWS[:micro_batches]), plan.boundaries[0].value


def pack_tensor(post: LinkExchange, value: Value, rows: int, micro_batch: int) -> Any:
    crossing = post.crossings.by_value[value]
    route = post.crossings.routes[value, micro_batch]._replace(previous_micro_batch=None)
    return post._pack(crossing, route, micro_batch, tf.ones((rows, 8)), None)


def unpack_tensor(post: LinkExchange, value: Value, received: Any, micro_batch: int) -> Any:
    crossing = post.crossings.by_value[value]
    return post._unpack(
        crossing,
        post.crossings.routes[value, micro_batch]._replace(previous_micro_batch=None),
        ("b/0", value, micro_batch),
        1,
        received,
    )


@pytest.mark.parametrize(("micro_batches", "micro_batch"), [(1, 0), (2, 0), (2, 1)])
def test_tensor_with_the_rows_of_its_micro_batch_is_accepted(micro_batches: int, micro_batch: int) -> None:
    post, value = make_post(micro_batches)
    rows = ROWS[micro_batch]
    received = unpack_tensor(post, value, pack_tensor(post, value, rows, micro_batch), micro_batch)
    assert received.shape == (rows, 8)


@pytest.mark.parametrize("rows", [0, 1, 5, 1 << 24])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_wrong_row_count_is_refused_before_allocation(micro_batches: int, rows: int) -> None:
    post, value = make_post(micro_batches)
    packed = pack_tensor(post, value, ROWS[0], 0)
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match=f"with {rows} rows instead of 4"):
        unpack_tensor(post, value, packed._replace(dims=(rows, 8)), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEBIBYTE


def test_wrong_row_count_of_constant_integers_is_refused() -> None:
    post, value = make_post(1)
    data = np.concatenate([np.zeros(4, np.uint8), packing.pack(np.zeros(1 << 20, np.int64))])
    with pytest.raises(RemoteProtocolError, match="rows instead of 4"):
        unpack_tensor(post, value, Packed(data, 1, 0, "int64", (1 << 27, 8)), 0)


SHAPES = """
stages a b
%0 = input x int32[?,6]
%1 = input y int32[?,?]
%2 = Const {value=(-1,)} int32[1]
%3 = Neg(%0) int32[?,6] @a
%4 = Reshape(%0, %2) int32[?] @a
%5 = Reshape(%1, %2) int32[?] @a
%6 = Const {value=(0, 1)} int32[2]
%7 = Sum(%0, %6) int32[] @a
returns %7
"""


def test_entries_per_row_are_known_from_shapes() -> None:
    values = [Value(number) for number in (0, 3, 4, 5, 7)]
    found = {value.op: count for value, count in count_entries_per_row(parse_program(SHAPES), values).items()}
    assert {number: found.get(number) for number in (0, 3, 4, 7)} == {0: 1, 3: 1, 4: 6, 7: None}
    assert found.get(5) is None, "sentences have as many words as they have"
