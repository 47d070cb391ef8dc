"""tf.data: the private attributes of datasets that this package reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.tf import datasets as tf_datasets

ROWS = tf.data.Dataset.range(6)
MADE = {
    "map": lambda rows: rows.map(lambda n: n),
    "map ": lambda rows: rows.map(lambda n: n, num_parallel_calls=2),
    "batch": lambda rows: rows.batch(2),
    "batch ": lambda rows: rows.batch(2, num_parallel_calls=2),
    "padded_batch": lambda rows: rows.padded_batch(2),
    "prefetch": lambda rows: rows.prefetch(2),
    "repeat": lambda rows: rows.repeat(2),
    "shuffle": lambda rows: rows.shuffle(6, seed=3),
    "skip": lambda rows: rows.skip(2),
    "take": lambda rows: rows.take(2),
    "options": lambda rows: rows.with_options(tf.data.Options()),
}


def values(dataset: Any) -> list[Any]:
    return [tf.nest.map_structure(lambda part: part.numpy().tolist(), batch) for batch in dataset]


@pytest.mark.parametrize("made", MADE)
def test_kind_and_below_of_each(made: str) -> None:
    dataset = MADE[made](ROWS)
    assert tf_datasets.find_kind(dataset) == made.strip() and tf_datasets.find_input(dataset) is ROWS


def test_kind_of_others_is_none() -> None:
    assert {tf_datasets.find_kind(each) for each in (ROWS, ROWS.cache(), ROWS.filter(lambda n: n > 1), 3)} == {""}


@pytest.mark.parametrize("kind", sorted(tf_datasets.CONTENT_INDEPENDENT_KINDS - {"shuffle"}))
def test_apply_again_does_the_same_to_others(kind: str) -> None:
    moved = tf_datasets.reapply(MADE[kind](ROWS), ROWS.map(lambda n: 10 * n))
    for _ in range(2):
        assert values(moved) == [10 * n for n in values(MADE[kind](ROWS))]


def test_apply_again_shuffles_as_before_in_each_epoch_and_draws_no_seed() -> None:
    tf.random.set_seed(1)
    shuffled = ROWS.shuffle(6)
    moved = tf_datasets.reapply(shuffled, ROWS.map(lambda n: 10 * n))
    drawn = tf.random.uniform([]).numpy()
    epochs = [[10 * n for n in values(shuffled)] for _ in range(3)]
    assert [values(moved) for _ in range(3)] == epochs and epochs[0] != epochs[1]
    tf.random.set_seed(1)
    ROWS.shuffle(6)
    assert tf.random.uniform([]).numpy() == drawn


def test_mapping_gives_the_function_and_its_options() -> None:
    plain = tf_datasets.read_mapping(ROWS.map(lambda n: {"a": n, "b": (n, None)}, name="n"))
    assert plain is not None and plain.options == {"name": "n"}
    assert [part.numpy() for part in plain.function(tf.constant(3, tf.int64))] == [3, 3]
    assert plain.output_spec["a"] == tf.TensorSpec([], tf.int64)
    parallel = tf_datasets.read_mapping(ROWS.map(lambda n: n, num_parallel_calls=2, deterministic=False))
    assert parallel is not None and int(parallel.options["num_parallel_calls"]) == 2
    assert parallel.options["deterministic"] is False
    in_step = tf_datasets.read_mapping(ROWS.map(lambda n: n, synchronous=True))
    assert in_step is not None and in_step.options["synchronous"] is True
    again = ROWS.map(lambda n: n, **parallel.options)
    assert values(again) == values(ROWS)


def test_batching_gives_sizes_shapes_and_options() -> None:
    plain = tf_datasets.read_batching(ROWS.batch(4, drop_remainder=True))
    assert (int(plain.size), bool(plain.options["drop_remainder"]), plain.shapes) == (4, True, ())
    parallel = tf_datasets.read_batching(ROWS.batch(4, num_parallel_calls=2, deterministic=True))
    assert int(parallel.options["num_parallel_calls"]) == 2 and parallel.options["deterministic"] is True
    rows = ROWS.map(lambda n: (tf.ones([2]), n))
    padded = tf_datasets.read_batching(rows.padded_batch(4, ([3], []), (tf.constant(7.0), tf.constant(1, tf.int64))))
    assert [shape.numpy().tolist() for shape in padded.shapes] == [[3], []]
    assert [value.numpy() for value in padded.values] == [7.0, 1]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda n: tf.random.uniform([]), "RandomUniform"),
        (lambda n: tf.cond(n > 1, lambda: tf.random.normal([]), lambda: 0.0), "RandomStandardNormal"),
        (lambda n: tf.random.stateless_uniform([], [n, n]), ""),
        (lambda n: tf.numpy_function(np.sin, [tf.cast(n, tf.float32)], tf.float32), ""),
        (lambda n: tf.io.decode_raw(tf.strings.as_string(n), tf.uint8), ""),
        (lambda n: COUNTER.assign_add(n), "AssignAddVariableOp"),
        (lambda n: COUNTER + n, ""),
        (lambda n: tf.while_loop(lambda k: k < n, lambda k: k + 1, [n]), ""),
    ],
)
def test_lasting_finds_what_draws_or_writes(function: Any, expected: str) -> None:
    mapping = tf_datasets.read_mapping(ROWS.map(function))
    assert mapping is not None and tf_datasets.find_lasting_op(mapping.function) == expected


COUNTER = tf.Variable(0, dtype=tf.int64)


def test_leaves_and_pack_structure_and_nothing_are_those_of_an_element() -> None:
    spec = ROWS.map(lambda n: {"b": (n, None), "a": [n, n]}).element_spec
    parts = tf_datasets.flatten_structure(spec)
    assert [tf_datasets.is_none_spec(part) for part in parts] == [False, False, True]
    assert tf_datasets.pack_structure(spec, [1, 2, None]) == {"a": 1, "b": (2, None)}


def test_describe_iterator_is_what_a_function_takes() -> None:
    spec, handle = tf_datasets.describe_iterator(iter(ROWS))
    assert isinstance(spec, tf.TypeSpec) and handle.dtype == tf.resource


def test_a_dataset_can_stand_for_another() -> None:
    same = tf_datasets.IdentityDataset(ROWS.map(lambda n: n + 1))
    assert isinstance(same, tf.data.Dataset) and values(same) == [1, 2, 3, 4, 5, 6] and int(same.cardinality()) == 6
