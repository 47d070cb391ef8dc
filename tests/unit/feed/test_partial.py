"""Tensors of which some rows are absent: only steps compute with them, and know their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.capture.step import signature
from whale_nebula.errors import AbsentInputError
from whale_nebula.feed.checks import compute_fingerprints, is_same
from whale_nebula.feed.inputs import Partial, slice_rows, unwrap_inputs, unwrap_whole
from whale_nebula.feed.rows import AllRows, Feed, Rows, Within, WorkerRows, rows_of, tag_rows
from whale_nebula.feed.shard import create_blank
from whale_nebula.ir.program import Leaf
from whale_nebula.ir.routing import Routing
from whale_nebula.spec import Spec

LEAF = Leaf(0, "x", Spec("float32", (None, 2)))
READ = WorkerRows(2, Routing((("a/0", "a/1"),)), "a/1", frozenset({0}))
"""The second half."""
READS = {
    "numpy": np.asarray,
    "tensor": tf.convert_to_tensor,
    "add": lambda part: part + 1.0,
    "added": lambda part: 1.0 + part,
    "less": lambda part: part < 1.0,
    "equal": lambda part: part == 1.0,
    "slice": lambda part: part[:2],
    "rows": list,
    "cast": lambda part: tf.cast(part, tf.float64),
    "function": lambda part: tf.function(lambda x: x)(part) + 1.0,
    "truth": bool,
    "power": lambda part: part**2,
    "mean": tf.reduce_mean,
    "value": lambda part: part.numpy(),
}


def create_rows(here: list[int], feed: Feed | None = None) -> Rows:
    return Rows(feed or Feed(), np.array(here, bool), np.arange(len(here)))


def create_partial(here: list[int], feed: Feed | None = None) -> Partial:
    return Partial(tf.reshape(tf.range(2.0 * len(here)), [-1, 2]), create_rows(here, feed))


@pytest.mark.parametrize("read", READS)
def test_reading_a_partial_tensor_raises(read: str) -> None:
    with pytest.raises((AbsentInputError, TypeError), match="2 of 4 rows of float32"):
        READS[read](create_partial([1, 1, 0, 0]))


def test_partial_tensor_has_length_shape_and_dtype() -> None:
    tensor = create_partial([1, 1, 0, 0])
    assert (len(tensor), tensor.shape.as_list(), tensor.dtype) == (4, [4, 2], tf.float32)
    assert tf.shape(tensor).numpy().tolist() == [4, 2]
    assert tf.shape(tensor, tf.int64).dtype == tf.int64


def test_signature_keeps_partial_tensors() -> None:
    tensor = create_partial([1, 1, 0, 0])
    layout, tensors = signature([("x", {"a": tensor})])
    assert tensors[0] is tensor
    assert layout.specs == (tf.TensorSpec([None, 2], tf.float32),) and layout.names == ("x/a",)


def test_step_that_reads_present_rows_is_recorded() -> None:
    feed = Feed()
    found = unwrap_inputs([LEAF], [create_partial([0, 0, 1, 1], feed)], [READ])
    assert isinstance(found.tensors[0], tf.Tensor) and found.present_rows(0).tolist() == [False, False, True, True]
    assert feed.new_reads == {READ} and feed.select_rows(4).all()
    feed.conclude_batch()
    assert feed.select_rows(4).tolist() == [False, False, True, True]


def test_step_that_reads_absent_rows_is_refused_and_recorded() -> None:
    feed = Feed()
    with pytest.raises(AbsentInputError, match="reads 1 rows of input 'x' that this process lacks, first row 2"):
        unwrap_inputs([LEAF], [create_partial([1, 1, 0, 1], feed)], [READ])
    with pytest.raises(AbsentInputError, match="reads 2 rows"):
        unwrap_whole([LEAF], [create_partial([0, 0, 1, 1], feed)])
    assert feed.new_reads == {READ, AllRows()}


def test_read_of_a_whole_tensor_is_recorded() -> None:
    feed = Feed()
    tensor = tag_rows(tf.zeros([4, 2]), create_rows([1, 1, 1, 1], feed))
    assert unwrap_inputs([LEAF], [tensor], [READ]).tensors[0] is tensor
    assert feed.new_reads == {READ}


def test_untagged_tensors_are_unchanged() -> None:
    tensor = tf.zeros([4, 2])
    found = unwrap_inputs([LEAF], [tensor], [READ])
    assert found.tensors[0] is tensor and found.rows == {} and found.present_rows(0) is None and found.mark == 0


def test_mark_of_rows_is_independent_of_their_presence() -> None:
    one, other = create_partial([1, 1, 1, 1]), create_partial([0, 0, 1, 1])
    assert unwrap_inputs([LEAF], [one], [READ]).mark == unwrap_inputs([LEAF], [other], [READ]).mark != 0
    moved = Partial(other.tensor, Rows(Feed(), rows_of(other).present, np.array([1, 0, 2, 3])))
    assert unwrap_inputs([LEAF], [moved], [READ]).mark != unwrap_inputs([LEAF], [other], [READ]).mark


def test_fingerprint_covers_present_micro_batches() -> None:
    def of(here: list[int], tensor: Any) -> Any:
        return compute_fingerprints([LEAF], [tensor], rows={0: create_rows(here)}, counts=[2, 1, 1])["x"]

    tensor = np.arange(8.0, dtype="float32").reshape(4, 2)
    spoilt = np.where([[False], [False], [True], [True]], np.nan, tensor).astype("float32")
    whole_of, half = of([1, 1, 1, 1], tensor), of([1, 1, 0, 0], spoilt)
    assert half == [whole_of[0], None, None] and None not in whole_of
    assert is_same(whole_of, half) and is_same(half, of([0, 0, 1, 1], tensor))
    assert not is_same(whole_of, of([1, 1, 1, 1], tensor + 1)) and not is_same(half, of([1, 1, 1, 1], tensor + 1))


def test_unbatched_input_has_a_single_fingerprint() -> None:
    uncut = Leaf(0, "table", Spec("float32", (4, 2)), batched=False)
    tensor = np.ones((4, 2), "float32")
    found = compute_fingerprints([uncut], [tensor], rows={0: create_rows([1, 1, 1, 1])}, counts=[1, 1])
    assert found == compute_fingerprints([uncut], [tensor])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64", "int8", "uint16", "bool", "string"])
def test_blank_rows_have_nan_or_extreme_values(dtype: str) -> None:
    value = create_blank(tf.TensorSpec([2, None], dtype))
    assert (value.shape.as_list(), value.dtype.name) == ([2, 0], dtype)
    number = create_blank(tf.TensorSpec([], dtype)).numpy()
    expected = {"int8": -128, "uint16": 65535, "bool": False, "string": b""}
    assert number == expected[dtype] if dtype in expected else np.isnan(number.astype("complex64"))


class TestSliceRows:
    @staticmethod
    def select_half(name: str, count: int) -> tuple[int, int]:
        return (0, count // 2) if name == "first" else (count // 2, count)

    def test_untagged_tensor_is_sliced(self) -> None:
        assert slice_rows(tf.range(4), self.select_half, "second").numpy().tolist() == [2, 3]

    def test_reads_of_a_slice_are_recorded_for_the_batch(self) -> None:
        feed = Feed()
        found = slice_rows(create_partial([0, 0, 0, 1], feed), self.select_half, "second")
        assert isinstance(found, Partial) and rows_of(found).present.tolist() == [False, True]
        unwrap_inputs([LEAF], [found], [READ])
        assert feed.new_reads == {Within(READ, self.select_half, "second")}
        feed.conclude_batch()
        assert feed.select_rows(8).astype(int).tolist() == [0, 0, 0, 0, 0, 0, 1, 1]

    def test_slice_with_all_rows_is_a_tensor(self) -> None:
        found = slice_rows(create_partial([0, 0, 1, 1]), self.select_half, "second")
        assert (
            isinstance(found, tf.Tensor) and rows_of(found).is_complete and found.numpy().tolist() == [[4, 5], [6, 7]]
        )
        again = slice_rows(tag_rows(tf.range(4), create_rows([1, 1, 1, 1])), self.select_half, "first")
        assert again.numpy().tolist() == [0, 1] and rows_of(again).marks.tolist() == [0, 1]
