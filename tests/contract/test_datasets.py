"""tf.data: the private attributes of datasets that this package reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.tf import datasets as tf_datasets

ROWS = tf.data.Dataset.range(6)
TRANSFORMATIONS = {
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


def list_values(dataset: Any) -> list[Any]:
    return [tf.nest.map_structure(lambda part: part.numpy().tolist(), batch) for batch in dataset]


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_find_kind_and_find_input_of_each_transformation(transformation: str) -> None:
    dataset = TRANSFORMATIONS[transformation](ROWS)
    assert tf_datasets.find_kind(dataset) == transformation.strip() and tf_datasets.find_input(dataset) is ROWS


def test_find_kind_of_other_datasets_is_empty() -> None:
    assert {tf_datasets.find_kind(each) for each in (ROWS, ROWS.cache(), ROWS.filter(lambda n: n > 1), 3)} == {""}


@pytest.mark.parametrize("kind", sorted(tf_datasets.CONTENT_INDEPENDENT_KINDS - {"shuffle"}))
def test_reapply_applies_the_same_to_another_dataset(kind: str) -> None:
    moved = tf_datasets.reapply(TRANSFORMATIONS[kind](ROWS), ROWS.map(lambda n: 10 * n))
    for _ in range(2):
        assert list_values(moved) == [10 * n for n in list_values(TRANSFORMATIONS[kind](ROWS))]


def test_reapply_shuffles_alike_and_draws_no_seed() -> None:
    tf.random.set_seed(1)
    shuffled = ROWS.shuffle(6)
    moved = tf_datasets.reapply(shuffled, ROWS.map(lambda n: 10 * n))
    drawn = tf.random.uniform([]).numpy()
    epochs = [[10 * n for n in list_values(shuffled)] for _ in range(3)]
    assert [list_values(moved) for _ in range(3)] == epochs and epochs[0] != epochs[1]
    tf.random.set_seed(1)
    ROWS.shuffle(6)
    assert tf.random.uniform([]).numpy() == drawn


def test_read_mapping_returns_function_and_options() -> None:
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
    assert list_values(again) == list_values(ROWS)


def test_read_batching_returns_sizes_shapes_and_options() -> None:
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
def test_find_lasting_op_finds_draws_and_writes(function: Any, expected: str) -> None:
    mapping = tf_datasets.read_mapping(ROWS.map(function))
    assert mapping is not None and tf_datasets.find_lasting_op(mapping.function) == expected


COUNTER = tf.Variable(0, dtype=tf.int64)


def test_flatten_structure_and_pack_structure_and_is_none_spec() -> None:
    spec = ROWS.map(lambda n: {"b": (n, None), "a": [n, n]}).element_spec
    parts = tf_datasets.flatten_structure(spec)
    assert [tf_datasets.is_none_spec(part) for part in parts] == [False, False, True]
    assert tf_datasets.pack_structure(spec, [1, 2, None]) == {"a": 1, "b": (2, None)}


def test_describe_iterator_returns_spec_and_handle() -> None:
    spec, handle = tf_datasets.describe_iterator(iter(ROWS))
    assert isinstance(spec, tf.TypeSpec) and handle.dtype == tf.resource


def test_IdentityDataset_is_a_dataset_with_the_same_elements() -> None:
    same = tf_datasets.IdentityDataset(ROWS.map(lambda n: n + 1))
    assert (
        isinstance(same, tf.data.Dataset) and list_values(same) == [1, 2, 3, 4, 5, 6] and int(same.cardinality()) == 6
    )
