"""Differences of samples between two ends of a boundary, without a model: bytes, and caches of both sides."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import whale_nebula as nb
from tests.unit.runtime.ends import Pair
from whale_nebula.codec import INT4, INT8, deltas
from whale_nebula.codec.deltas import LIMIT, Cache, most_bytes
from whale_nebula.codec.encoding import Encoding
from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.runtime.exchange.state import States, Tally, TensorPosition
from whale_nebula.runtime.run import current_run
from whale_nebula.transport.protocol import Packed

EVERY_WAY = INT8_WAY, INT4_WAY = [Encoding(codec(), delta="ids") for codec in (INT8, INT4)]
SAMPLES, LENGTH, COLUMNS = 12, 3, 128
FULL = LENGTH * COLUMNS * 2  # bytes of a sample that crosses whole
OUT, IN = "a->b at a", "a->b at b, incoming"


class Ends(Pair):
    """A boundary whose samples have ids."""

    def send(self, x: np.ndarray, ids: Any, rows: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        return super().send(x, TensorPosition(self.steps, 0, True), rows, to_ids(ids))

    def take(self, payload: Any, ids: Any) -> np.ndarray:
        made, _ = self.incoming.decode(payload, self.tally, None, to_ids(ids))
        return np.asarray(made)

    def cross(self, x: np.ndarray, ids: Any, rows: Any = None) -> tuple[np.ndarray, int]:  # type: ignore[override]
        """The tensor as the reader has it, and the bytes that crossed."""
        made = self.take(self.send(x, ids, rows), ids)
        assert list_cache_bytes(self.states_a, OUT) == list_cache_bytes(self.states_b, IN)
        return made, self.payload.nbytes


def to_ids(ids: Any) -> np.ndarray:
    return np.asarray(ids, np.int64)


def held(states: States, name: str) -> Cache:
    found = states.find_state(name).cache
    assert isinstance(found, Cache) and found.version == states.find_state(name).version
    return found


def list_cache_bytes(states: States, name: str) -> dict[str, bytes]:
    return {what: each.tobytes() for what, each in held(states, name).as_arrays().items()}


def draw_samples(seed: int = 0, samples: int = SAMPLES, scale: float = 1.0, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((samples, length, COLUMNS)).astype(np.float32) * scale


def to_float32(x: Any) -> np.ndarray:
    return np.asarray(tf.cast(x, tf.float32))


def relative_error(made: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(made - x) / np.linalg.norm(x))


def count_whole_bytes(samples: int, marks: int = SAMPLES) -> int:
    """Bytes of so many samples that cross whole."""
    return 4 + -(-marks // 8) + samples * FULL


@pytest.mark.parametrize(("way", "coarse"), [(INT8_WAY, 0.005), (INT4_WAY, 0.08)])
def test_bytes_and_errors_fall_after_the_first_epoch(way: Encoding, coarse: float) -> None:
    ends, x, order = Ends(way), draw_samples(), np.random.default_rng(1)
    errors, sizes = [], []
    for epoch in range(5):
        moved = x + draw_samples(7 + epoch, scale=0.2 / 4**epoch)
        epoch_sizes, made = [], np.empty_like(x)
        for batch in np.split(order.permutation(SAMPLES), 3):
            made[batch], size = ends.cross(moved[batch], batch)
            epoch_sizes.append(size)
        errors.append(relative_error(made, moved))
        sizes.append(epoch_sizes)
    assert sizes[0] == [count_whole_bytes(4, marks=4)] * 3
    due = payload_bytes(str(way), "float32", (4, LENGTH, COLUMNS))
    assert sizes[1:] == [[due] * 3] * 4
    assert errors[2] < errors[1] / 2 < coarse / 2
    direct = np.asarray(way.codec.decode(way.codec.encode(tf.constant(x)), x.shape, "float32"))
    assert errors[-1] < relative_error(direct, x) / 10


def test_first_sample_is_sent_as_clamped_float16() -> None:
    x = draw_samples()
    x[3, 0, :2] = 1e9, -1e9
    made, size = Ends(INT8_WAY).cross(x, range(SAMPLES))
    assert size == count_whole_bytes(SAMPLES)
    np.testing.assert_array_equal(made, np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32))


def test_micro_batch_can_mix_cached_and_new_samples() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    ends.cross(x[:5], range(5))
    made, size = ends.cross(x, [3, 20, 4, 21, 22, 0, 23, 24, 25, 26, 27, 28])
    three = payload_bytes("int8", "float32", (3, LENGTH, COLUMNS)) - 4
    assert size == count_whole_bytes(9) + three
    unknown = [1, 3, 4, *range(6, SAMPLES)]
    np.testing.assert_array_equal(made[unknown], x[unknown].astype(np.float16).astype(np.float32))
    assert 0 < relative_error(made[[0, 2, 5]], x[[0, 2, 5]]) < 0.02
    assert len(held(ends.states_a, OUT)) == 5 + 9


def test_decoded_tensor_equals_the_cached_samples() -> None:
    ends, x = Ends(INT4_WAY), draw_samples()
    ends.cross(x, range(SAMPLES))
    made, _ = ends.cross(x + 0.1, range(SAMPLES))
    np.testing.assert_array_equal(made, held(ends.states_a, OUT).get(to_ids(range(SAMPLES))).astype(np.float32))


def test_ragged_and_empty_batches_are_sent() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    ends.cross(x, range(SAMPLES))
    made, size = ends.cross(x[:1], [11])
    assert made.shape == (1, LENGTH, COLUMNS) and size < count_whole_bytes(1)
    before = list_cache_bytes(ends.states_a, OUT)
    payload = ends.send(x[:0], [])
    assert ends.take(payload, []).shape == (0, LENGTH, COLUMNS)
    assert list_cache_bytes(ends.states_a, OUT) == before == list_cache_bytes(ends.states_b, IN)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sample_with_nan_is_sent_whole_and_not_cached(bad: float) -> None:
    """The ends refuse it before it comes here; what they hold stays sound all the same."""
    here, there, x, ids = Cache(LIMIT), Cache(LIMIT), draw_samples(), to_ids(range(SAMPLES))

    def cross(x: np.ndarray) -> tuple[np.ndarray, int]:
        data, made = deltas.encode(INT8(), tf.constant(x), ids, here)
        np.testing.assert_array_equal(deltas.decode(INT8(), data, x.shape, ids, there), made)
        assert here.version == there.version and np.isfinite(here.get(ids)).all()
        return made, data.size

    cross(x)
    x[2, 1, 5] = bad
    made, size = cross(x)
    assert size == count_whole_bytes(1) + payload_bytes("int8", "float32", (11, LENGTH, COLUMNS)) - 2 * 4
    assert np.array_equal(made[2, 1, 5], bad, equal_nan=True) and np.isfinite(np.delete(made, 2, axis=0)).all()
    x[2, 1, 5] = 0.5
    assert np.isfinite(cross(x)[0]).all()


def find_cache_limit(samples: int) -> int:
    one = Cache(LIMIT)
    one.put(to_ids([0]), np.zeros((1, LENGTH, COLUMNS)))
    return samples * one.nbytes


def test_samples_beyond_the_cache_limit_are_sent_whole_and_noted() -> None:
    ends, x = Ends(INT8_WAY, limit=find_cache_limit(7)), draw_samples()
    alone = payload_bytes(str(INT8_WAY), "float32", (4, LENGTH, COLUMNS))
    sizes, errors = [], []
    for first in [0, 4, 8] * 3:
        made, size = ends.cross(x[first : first + 4], range(first, first + 4))
        sizes.append(size)
        errors.append([relative_error(made[each], x[first + each]) for each in range(4)])
        assert held(ends.states_b, IN).nbytes <= find_cache_limit(7)
    assert sizes[0] == count_whole_bytes(4, marks=4) and alone < sizes[1] < sizes[0] and sizes[2:] == [alone] * 7
    assert max(errors[3] + errors[4][:3]) < 0.001 < 0.004 < min(errors[5]) <= max(errors[5]) < 0.01
    direct = np.asarray(INT8().decode(INT8().encode(tf.constant(x[8:])), x[8:].shape, "float32"))
    np.testing.assert_allclose(made, direct, rtol=1e-3, atol=1e-6)
    assert "the cache has no room" in ends.tally.reports()["b0 a->b"].notes[0]


def test_unused_samples_are_evicted_for_new_ones() -> None:
    ends, x = Ends(INT8_WAY, limit=find_cache_limit(4)), draw_samples(samples=4)
    ends.cross(x, range(4))
    for _ in range(15):
        assert ends.cross(x, range(10, 14))[1] < count_whole_bytes(4, marks=4)
    assert held(ends.states_a, OUT).contains(to_ids([0, 10])).tolist() == [True, False]
    assert ends.cross(x, range(10, 14))[1] == count_whole_bytes(4, marks=4)
    assert held(ends.states_b, IN).contains(to_ids([0, 10])).tolist() == [False, True]


def test_samples_of_another_shape_use_the_codec_alone_and_are_noted() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    ends.cross(x, range(SAMPLES))
    longer = draw_samples(length=LENGTH + 1)
    version = held(ends.states_a, OUT).version
    made, size = ends.cross(longer, range(SAMPLES))
    assert size == payload_bytes(str(INT8_WAY), "float32", longer.shape) and relative_error(made, longer) < 0.01
    assert held(ends.states_a, OUT).version == version
    assert "pad to one length" in ends.tally.reports()["b0 a->b"].notes[0]
    assert relative_error(ends.cross(x, range(SAMPLES))[0], x) < 0.001


@pytest.mark.parametrize("way", EVERY_WAY)
def test_masked_rows_are_not_sent_and_are_read_as_zeros(way: Encoding) -> None:
    ends, x = Ends(way), draw_samples()
    marks = np.random.default_rng(3).random((SAMPLES, LENGTH)) < 0.6
    kept = int(marks.sum())
    made, size = ends.cross(x, range(SAMPLES), marks)
    rows = -(-SAMPLES * LENGTH // 8)
    assert size == 4 + 2 + rows + kept * COLUMNS * 2
    np.testing.assert_array_equal(made, (x * marks[:, :, None]).astype(np.float16).astype(np.float32))
    other = marks.copy()
    other[0] = True, False, True
    made, size = ends.cross(x, range(SAMPLES), other)
    kept = int(other.sum())
    assert size == 4 + 2 + rows + payload_bytes(str(way.codec), "float32", (kept, COLUMNS)) - 4
    assert not made[~other].any() and relative_error(made[other], x[other]) < 0.1


def test_zstd_compresses_changes() -> None:
    ends, x = Ends(Encoding(INT8(), delta="ids", zstd=True)), draw_samples()
    x = x.astype(np.float16).astype(np.float32)
    ends.cross(x, range(SAMPLES))
    made, size = ends.cross(x, range(SAMPLES))
    assert size < payload_bytes("int8", "float32", x.shape) / 2 and relative_error(made, x) < 0.001


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_decoded_tensors_have_their_original_dtype(dtype: str) -> None:
    ends, x = Ends(INT8_WAY), tf.cast(draw_samples(), dtype)
    for _ in range(2):
        payload, _ = ends.outgoing.encode(x, TensorPosition(0, 0, True), ends.tally, None, None, to_ids(range(SAMPLES)))
        made, _ = ends.incoming.decode(payload, ends.tally, None, to_ids(range(SAMPLES)))
        assert made.dtype == x.dtype and relative_error(to_float32(made), to_float32(x)) < 0.01


def test_codec_alone_is_used_without_matching_ids() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    for ids in (None, range(SAMPLES - 1)):
        payload, _ = ends.outgoing.encode(
            tf.constant(x), TensorPosition(0, 0, True), ends.tally, None, None, None if ids is None else to_ids(ids)
        )
        made, _ = ends.incoming.decode(payload, ends.tally)
        assert (
            payload.nbytes == payload_bytes("int8", "float32", x.shape) and relative_error(np.asarray(made), x) < 0.01
        )
    assert ends.states_a.find_state(OUT).cache is None and ends.states_b.find_state(IN).cache is None


def test_different_caches_are_refused_with_the_name_of_the_boundary() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    ends.cross(x, range(SAMPLES))
    lost = ends.send(x[:4], range(4))
    assert isinstance(lost, Packed)
    payload = ends.send(x, range(SAMPLES))
    before = list_cache_bytes(ends.states_b, IN)
    with pytest.raises(RemoteProtocolError, match="the two sides of b0 a->b have different states") as caught:
        ends.take(payload, range(SAMPLES))
    assert "the same checkpoint" in caught.value.mend
    assert list_cache_bytes(ends.states_b, IN) == before


def test_different_ids_at_the_other_end_are_refused() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    ends.cross(x, range(SAMPLES))
    with pytest.raises(RemoteProtocolError, match="or different samples"):
        ends.take(ends.send(x, range(SAMPLES)), range(100, 100 + SAMPLES))
    with pytest.raises(RemoteProtocolError, match="whose samples are not cached"):
        Ends(INT8_WAY).incoming.decode(Ends(INT8_WAY).send(x, range(SAMPLES)), Tally())


def test_truncated_payload_is_refused() -> None:
    x = draw_samples()
    payload = Ends(INT8_WAY).send(x, range(SAMPLES))
    for size in (4, 5, payload.nbytes - 1):
        with pytest.raises(RemoteProtocolError):
            Ends(INT8_WAY).take(payload._replace(data=payload.data[:size]), range(SAMPLES))


@pytest.mark.parametrize("dims", [(1, 1), (9, 2), (3, 2, 65)])
def test_most_bytes_bounds_every_payload(dims: tuple[int, ...]) -> None:
    assert most_bytes(dims) >= -(-dims[0] // 8) + 2 * np.prod(dims)
    assert most_bytes(dims) >= -(-dims[0] // 8) + payload_bytes("int8", "float64", dims) - 4


def test_restored_states_have_their_former_caches() -> None:
    ends, x = Ends(INT8_WAY), draw_samples()
    ends.cross(x, range(SAMPLES))
    here, there = list_cache_bytes(ends.states_a, OUT), list_cache_bytes(ends.states_b, IN)
    before = ends.states_a.copy(), ends.states_b.copy()
    ends.cross(x[:4] + 1, range(4))
    ends.send(x[4:8], range(20, 24))
    assert list_cache_bytes(ends.states_a, OUT) != here and list_cache_bytes(ends.states_b, IN) != there
    ends.states_a.restore(before[0])
    ends.states_b.restore(before[1])
    assert (list_cache_bytes(ends.states_a, OUT), list_cache_bytes(ends.states_b, IN)) == (here, there)
    assert ends.cross(x, range(SAMPLES))[1] < count_whole_bytes(SAMPLES)


MICRO_BATCHES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=12)


@settings(deadline=None, max_examples=25)
@given(MICRO_BATCHES, st.integers(0, 5), st.sampled_from(EVERY_WAY), st.booleans())
def test_caches_of_both_ends_stay_identical(
    batches: list[list[int]], held_rows: int, way: Encoding, masked: bool
) -> None:
    ends, draw = Ends(way, limit=held_rows * (2 * 64 * 2 + 160)), np.random.default_rng(0)
    for ids in batches:
        x = draw.standard_normal((len(ids), 2, 64)).astype(np.float32)
        marks = draw.random((len(ids), 2)) < 0.7 if masked else np.ones((len(ids), 2), np.bool_)
        made, size = ends.cross(x, ids, marks if masked else None)
        assert size <= x.nbytes and held(ends.states_a, OUT).nbytes <= ends.limit
        assert not marks.any() or relative_error(made[marks], x[marks]) < 1


# -------------------- Training with differences in one process: bytes, caches of both sides, and excluded cases
TRAINED_SAMPLES, BATCH, PARTS, WIDTH, EPOCHS = 24, 8, 2, 64, 3
ROWS = BATCH // PARTS
WHOLE = PARTS * (4 + 1 + ROWS * WIDTH * 2)
CHANGES = PARTS * payload_bytes("int8, delta ids", "float32", (ROWS, WIDTH))
THERE = "b0 a->b"
DRAWN = np.random.default_rng(0)
X, TRUE = DRAWN.standard_normal((TRAINED_SAMPLES, 6)).astype("float32"), DRAWN.standard_normal((6, 2)).astype("float32")
Y = np.tanh(X @ TRUE)
DATA = {"x": X, "ids": np.arange(100, 100 + TRAINED_SAMPLES)}


@pytest.fixture(autouse=True)
def run() -> Iterator[None]:
    with nb.init(seed=1):
        yield


def list_training_caches() -> list[dict[str, bytes]]:
    """What each side holds of samples."""
    states = current_run().channels.values()
    return [{k: v.tobytes() for k, v in s.cache.as_arrays().items()} for s in states if s.cache is not None]


def count_payload_bytes() -> int:
    return nb.last_report().boundaries[THERE].payload_bytes


class TestKeras:
    def model(self, **options: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        x, ids = keras.Input((6,), name="x"), keras.Input((), dtype="int64", name="ids")
        with nb.cluster(), nb.pipeline(PARTS), nb.compress(**options):
            with nb.stage(cluster="a"):
                hidden = keras.layers.Dense(WIDTH, activation="tanh")(x)
            with nb.stage(cluster="b"):
                model = keras.Model({"x": x, "ids": ids}, keras.layers.Dense(2)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def fit(self, model: keras.Model) -> tuple[list[float], list[int]]:
        sizes: list[int] = []
        seen = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: sizes.append(count_payload_bytes())
        )
        done = model.fit(DATA, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[seen])
        return done.history["loss"], sizes

    @pytest.mark.grid
    def test_training_with_differences_and_evaluation(self) -> None:
        model = self.model(int8=True, delta="x/ids")
        losses, sizes = self.fit(model)
        steps = TRAINED_SAMPLES // BATCH
        assert sizes == [WHOLE] * steps + [CHANGES] * (EPOCHS - 1) * steps
        first, second = list_training_caches()
        assert first == second and len(first["ids"]) == TRAINED_SAMPLES * 8
        model.evaluate(DATA, Y, batch_size=BATCH, verbose=0)
        assert count_payload_bytes() == PARTS * payload_bytes("int8", "float32", (ROWS, WIDTH))
        model.predict({**DATA, "ids": np.arange(TRAINED_SAMPLES)}, batch_size=BATCH, verbose=0)
        assert list_training_caches() == [first, second]
        exact, _ = self.fit(self.model(fp16=True, backward=None))
        np.testing.assert_allclose(losses, exact, rtol=0.02)
        assert losses[-1] < losses[0]
