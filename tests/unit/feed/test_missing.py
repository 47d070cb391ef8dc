"""An input that is not here: rows come from the others, it is never cut, and whatever reads it raises."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import AbsentInputError
from whale_nebula.feed.batch import cut, micro_batches
from whale_nebula.feed.checks import Missing, fingerprints
from whale_nebula.ir.program import Leaf
from whale_nebula.spec import Spec

LEAVES = [Leaf(0, "x/source", Spec("float32", (None, 2))), Leaf(1, "x/target", Spec("int32", (None, None)))]
GONE = Missing("x/target", tf.TensorSpec([None, None], tf.int32))
TENSORS = [tf.reshape(tf.range(10.0), [5, 2]), GONE]
READS = {
    "numpy": np.asarray,
    "tensor": tf.convert_to_tensor,
    "add": lambda gone: tf.add(gone, 1),
    "split": lambda gone: tf.split(gone, 2),
    "cast": lambda gone: tf.cast(gone, tf.float32),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_reads_it_raises(read: Any) -> None:
    with pytest.raises(AbsentInputError, match="'x/target' is None in this process"):
        read(GONE)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_are_those_of_what_is_here(count: int) -> None:
    counts = micro_batches(LEAVES, TENSORS, count)
    batch = cut(LEAVES, TENSORS, counts)
    assert counts == {1: [5], 2: [3, 2]}[count]
    assert all(each[1] is GONE for each in batch.slices)
    assert batch.in_rows().whole[1].shape[0] == 5
    assert [each[1].shape[0] for each in batch.in_rows().slices] == counts
    assert all(each[0] is again[0] for each, again in zip(batch.slices, batch.in_rows().slices, strict=True))


def test_a_whole_batch_is_left_as_it_is() -> None:
    batch = cut(LEAVES[:1], TENSORS[:1], [5])
    assert batch.in_rows() is batch


@pytest.mark.parametrize("count", [1, 2])
def test_something_must_be_here(count: int) -> None:
    with pytest.raises(AbsentInputError, match="all inputs of this step are None in this process: 'x/target'"):
        micro_batches(LEAVES[1:], TENSORS[1:], count)


def test_what_is_not_here_and_what_is_secret_have_no_fingerprint() -> None:
    assert set(fingerprints(LEAVES, TENSORS)) == {"x/source"}
    assert set(fingerprints(LEAVES, TENSORS, secret=["x/source"])) == set()
    assert set(fingerprints(LEAVES, TENSORS, only=["x/target"])) == set()
