"""Gradients that are handed over to the update that reads them: it writes into their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data
from whale_nebula.runtime.step.compiled import Handover

WIDTH = 512
"""Of a square weight of 1 MiB, which counts as a large one."""


def find_address(tensor: Any) -> int:
    """Where a tensor lies in memory."""
    return int(np.asarray(memoryview(tensor)).ctypes.data)


def test_function_writes_into_the_memory_of_a_handed_over_tensor() -> None:
    slot = Handover(tf.float32)
    double = tf.function(lambda: 2.0 * slot.take([WIDTH, WIDTH]))
    tensor_given = tf.random.normal([WIDTH, WIDTH])  # in memory of TensorFlow's own
    place, whole = find_address(tensor_given), tensor_given.numpy()
    slot.put(tensor_given)
    del tensor_given
    found = double()
    assert find_address(found) == place
    np.testing.assert_array_equal(found, 2.0 * whole)


def test_tensor_with_another_reference_is_not_overwritten() -> None:
    slot = Handover(tf.float32)
    tensor_given = tf.random.normal([WIDTH, WIDTH])
    whole = tensor_given.numpy()
    slot.put(tensor_given)
    found = tf.function(lambda: 2.0 * slot.take([WIDTH, WIDTH]))()
    assert find_address(found) != find_address(tensor_given)
    np.testing.assert_array_equal(tensor_given, whole)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_large_gradient_is_handed_over_to_its_update(micro_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    places, put = [], Handover.put

    def record(self: Handover, tensor: Any) -> None:
        places.append(find_address(tensor))
        put(self, tensor)

    monkeypatch.setattr(Handover, "put", record)
    nb.init(links="10gbit,0ms")
    weight = tf.Variable(data(WIDTH, WIDTH), name="weight")

    def train(x: Any, cut: bool = True) -> Any:
        with nb.cluster(), nb.pipeline(micro_batch=micro_batch), tf.GradientTape() as tape:
            with nb.stage(cluster="a"):
                hidden = x @ weight
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(hidden**2)
        weight.assign(weight - 0.1 * tape.gradient(loss, weight))
        return loss

    nb.function(train)(tf.constant(data(8, WIDTH)))
    assert places == [find_address(weight.read_value())]
