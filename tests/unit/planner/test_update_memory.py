"""The number of temporary tensors of an update: the peaks that two workers had with a variable of 41 MB each."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from keras import optimizers

from tests.unit.runtime.split.test_lowering import trace
from whale_nebula.planner.update_memory import count_temporaries
from whale_nebula.spec import Spec


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optimizers.SGD(0.1), 0),
        (optimizers.SGD(0.1, momentum=0.9), 1),
        (optimizers.Adam(), 2),
        (optimizers.RMSprop(), 3),
        (optimizers.Adagrad(), 2),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_update_temporaries_of_an_optimizer(optimizer: Any, expected: int) -> None:
    weight = tf.Variable(tf.zeros([5, 3]))
    optimizer.build([weight])

    def update(gradient: Any) -> None:
        optimizer.apply([gradient], [weight])

    graph, _, feeds, _, handles = trace(tf.function(update, autograph=False), [tf.TensorSpec([5, 3])])
    variable = next(number for number, handle in handles.items() if handle is weight.handle)
    assert count_temporaries(graph, feeds[0], variable, Spec("float32", (5, 3))) == expected
