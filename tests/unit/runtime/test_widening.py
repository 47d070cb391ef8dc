"""Batches of many lengths run by one program, if the step does not depend on sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.step import signature
from whale_nebula.runtime.step.step import Step, takes, widen_signature


def _form(*shape: int, dtype: str = "float32", **plain: Any) -> Any:
    return signature([("x", np.zeros(shape, dtype)), *plain.items()])[0]


def test_axes_that_differ_are_free_and_others_stay() -> None:
    wide = widen_signature(_form(2, 5, 3), [_form(4, 7, 3)])
    assert wide is not None
    assert wide.specs == (tf.TensorSpec([None, None, 3], tf.float32),)
    assert takes(wide, _form(8, 9, 3))
    assert not takes(wide, _form(8, 9, 4))


@pytest.mark.parametrize("other", [_form(4, 7, dtype="int32"), _form(4, 7, 3), _form(4, 7, flag=True)])
def test_forms_that_differ_in_more_than_sizes_are_not_widened(other: Any) -> None:
    assert widen_signature(_form(4, 5), [other]) is None
    assert not takes(other, _form(4, 5))


def _ran(fn: Callable[[Any], Any], *, widens: bool) -> tuple[Step, list[np.ndarray]]:
    step = Step(fn, name="step", widens=widens)
    lengths = (3, 5, 4, 6, 5)
    return step, [np.array(step.run([("x", tf.ones((4, n)) * n)])) for n in lengths]


def _sums(x: Any) -> Any:
    with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
        hidden = tf.cumsum(x, axis=1)
    with nb.stage(cluster="b"):
        return tf.reduce_sum(hidden, axis=1)


def _counted(x: Any) -> Any:
    """Needs to know how long its rows are while it is traced."""
    with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
        hidden = tf.add_n([x[:, n] * (n + 1) for n in range(x.shape[1])])
    with nb.stage(cluster="b"):
        return hidden * 2.0


@pytest.mark.parametrize(("fn", "widens", "programs"), [(_sums, True, 2), (_sums, False, 4), (_counted, True, 4)])
def test_many_lengths(fn: Callable[[Any], Any], widens: bool, programs: int) -> None:
    """A step is captured for its first length and then once more, or for each length if it must be."""
    step, found = _ran(fn, widens=widens)
    assert len(step.forms) == programs
    rows = {_sums: lambda n: n * n * (n + 1) / 2, _counted: lambda n: n * n * (n + 1)}[fn]
    np.testing.assert_allclose(np.stack(found), [[rows(n)] * 4 for n in (3, 5, 4, 6, 5)])
