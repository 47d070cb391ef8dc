"""Objects of `nb.state` and their states as documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.runtime.checkpoint.objects import (
    check_object,
    copy_state,
    decode_value,
    encode_value,
    read_object,
    write_object,
)


class Counts(tf.Module):
    """A module with a variable."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.counts = tf.Variable(numbers)


class NumberList(list[Any]):
    """A subclass of list."""


def copy_by_document(value: Any) -> Any:
    arrays: dict[str, Any] = {}

    def put(array: Any) -> str:
        arrays[str(len(arrays))] = tf.convert_to_tensor(array)
        return str(len(arrays) - 1)

    return decode_value(json.loads(json.dumps(encode_value(value, put))), arrays.__getitem__)


def test_variables_of_a_module_are_restored() -> None:
    saved, fresh = Counts([1.0, 2.0]), Counts([0.0, 0.0])
    write_object(fresh, copy_by_document(read_object(saved)))
    assert fresh.counts.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("make", [tf.random.Generator.from_seed, keras.random.SeedGenerator])
def test_generators_of_random_numbers_are_restored(make: Callable[[int], Any]) -> None:
    saved, fresh = make(1), make(2)
    check_object("noise", fresh)
    write_object(fresh, copy_by_document(read_object(saved)))
    assert np.array_equal(fresh.state, saved.state)


def test_keys_may_be_numbers_of_numpy() -> None:
    state = Counter(np.int64([3, 5, 3]))
    assert copy_by_document(copy_state(state)) == {3: 2, 5: 1}


def test_lists_of_other_classes_stay_lists() -> None:
    assert copy_by_document(copy_state({"seen": NumberList([1, 2])})) == {"seen": [1, 2]}
