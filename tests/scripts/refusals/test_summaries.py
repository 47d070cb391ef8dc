"""`tf.summary` in a stage writes exactly what the uncut step writes, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.telling import fit, marked, sub, told
from whale_nebula.errors import BatchCoupledError


def noted(x: Any) -> Any:
    tf.summary.scalar("mean", tf.reduce_mean(x), step=7)
    return x


def drawn(x: Any) -> Any:
    tf.summary.histogram("rows", x, step=7)  # mark: histogram
    return x


def written(folder: Path) -> list[tuple[int, str, Any]]:
    """Step, tag and value of all summaries in a folder."""
    found = []
    for file in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [(event.step, each.tag, tf.make_ndarray(each.tensor)) for each in event.summary.value]
    return found


def trained(folder: Path, middle: Any, micro: int = 1, scoped: bool = True) -> list[tuple[int, str, Any]]:
    with tf.summary.create_file_writer(str(folder)).as_default():
        fit(sub(middle, micro, scoped))
        tf.summary.flush()
    return written(folder)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_scalar_is_written_once_and_of_the_whole_batch(tmp_path: Path, micro: int) -> None:
    uncut = trained(tmp_path / "uncut", noted, scoped=False)
    found = trained(tmp_path / "cut", noted, micro)
    assert len(nb.last_report().stages) == 2
    assert [(step, tag.split("/")[-1]) for step, tag, _ in found] == [(7, "mean")]
    np.testing.assert_allclose(found[0][2], uncut[0][2], rtol=1e-5)


def test_a_histogram_is_written_uncut(tmp_path: Path) -> None:
    uncut, found = trained(tmp_path / "uncut", drawn, scoped=False), trained(tmp_path / "cut", drawn)
    assert len(found) == len(uncut) == 1
    np.testing.assert_allclose(found[0][2], uncut[0][2], rtol=1e-5, atol=1e-6)


def test_a_histogram_of_rows_cannot_be_put_together_from_micro_batches(tmp_path: Path) -> None:
    said = ("what the step writes", "micro_batch=1")
    told(BatchCoupledError, lambda: trained(tmp_path, drawn, micro=2), *said, at=marked("histogram"))


def test_steps_that_a_variable_counts(tmp_path: Path) -> None:
    count = tf.Variable(0, dtype=tf.int64)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                x = x * 2.0
                tf.summary.scalar("twice", tf.reduce_mean(x), step=count)
            with nb.stage(cluster="b"):
                x = x + 1.0
        count.assign_add(1)
        return x

    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        step(tf.ones([2]))
        step(tf.ones([2]) * 2.0)
        tf.summary.flush()
    assert [(number, float(value)) for number, _, value in written(tmp_path)] == [(0, 2.0), (1, 4.0)]
