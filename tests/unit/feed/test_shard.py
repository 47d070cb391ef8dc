"""`nb.shard`: the same batches, of which only the needed rows are parsed; unknown datasets are read whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import AbsentInputError, OptionError, UnsupportedError
from whale_nebula.feed.inputs import Partial
from whale_nebula.feed.rows import WorkerRows, rows_of
from whale_nebula.feed.shard import Sharded, shard_rows
from whale_nebula.ir.routing import Routing

ROWS, WIDE = 22, 3
TWO = Routing((("gpu/0", "gpu/1"),))
SECOND = WorkerRows(4, TWO, "gpu/1", frozenset({0}))
HERE = {8: [0, 0, 1, 1, 0, 0, 1, 1], 6: [0, 0, 1, 1, 0, 1]}
"""The rows of its two micro-batches, in a batch of so many."""
parsed: list[int] = []

Row = Callable[[Any], Any]
Chain = Callable[[tf.data.Dataset], tf.data.Dataset]


def read_row(number: Any) -> Any:
    parsed.append(int(number))
    return np.full(WIDE, number, np.float32)


def parse(number: Any) -> Any:
    """What is dear to read."""
    return tf.ensure_shape(tf.numpy_function(read_row, [number], tf.float32), [WIDE])


def pair(number: Any) -> Any:
    return {"x": parse(number), "name": tf.strings.as_string(number)}, tf.cast(number, tf.uint8)


def ragged(number: Any) -> Any:
    return tf.range(number % 3 + 1)


CHAINS: dict[str, Chain] = {
    "plain": lambda rows: rows.map(parse).batch(8),
    "parallel": lambda rows: rows.map(parse, num_parallel_calls=2, deterministic=True, name="p").batch(8),
    "parallel batches": lambda rows: rows.map(parse).batch(8, num_parallel_calls=2),
    "nested": lambda rows: rows.map(pair).batch(8),
    "no remainder": lambda rows: rows.map(parse).batch(8, drop_remainder=True),
    "two maps": lambda rows: rows.map(parse).map(lambda x: (x * 2.0, x + 1.0)).batch(8),
    "None": lambda rows: rows.map(lambda number: (parse(number), None)).batch(8),
    "shuffled before": lambda rows: rows.shuffle(ROWS, seed=1).map(parse).batch(8),
    "shuffled after": lambda rows: rows.map(parse).shuffle(ROWS, seed=1).batch(8),
    "batches shuffled": lambda rows: rows.map(parse).batch(8).shuffle(3, seed=1),
    "repeated": lambda rows: rows.map(parse).repeat(2).batch(8),
    "batches repeated": lambda rows: rows.map(parse).batch(8).repeat(2),
    "some": lambda rows: rows.map(parse).skip(2).take(14).batch(8).skip(1),
    "ahead": lambda rows: rows.map(parse).prefetch(2).batch(8).prefetch(tf.data.AUTOTUNE),
    "padded": lambda rows: rows.map(ragged).padded_batch(8, [5], padding_values=tf.constant(-1, tf.int64)),
    "numbered": lambda rows: rows.enumerate().map(lambda place, number: (place, parse(number))).batch(8),
    "zipped": lambda rows: tf.data.Dataset.zip((rows, rows.skip(1))).map(lambda a, b: parse(a + b)).batch(8),
    "interleaved": lambda rows: rows.interleave(lambda n: tf.data.Dataset.range(n, n + 2)).map(parse).batch(8),
    "generated": lambda rows: tf.data.Dataset.from_generator(
        lambda: iter(range(ROWS)), output_signature=tf.TensorSpec([], tf.int64)
    ).map(parse).batch(8),
    "open between": lambda rows: rows.map(ragged).map(lambda x: tf.reduce_sum(x)).batch(8),
    "random below": lambda rows: rows.map(lambda n: n + tf.random.uniform([], 0, 1, tf.int64)).map(parse).batch(8),
    "cached below": lambda rows: rows.map(lambda n: n + 1).cache().map(parse).batch(8),
}  # fmt: skip

RARE = {
    "plain", "parallel batches", "nested", "no remainder", "two maps", "shuffled before", "batches shuffled",
    "repeated", "batches repeated", "zipped", "interleaved", "random below",
}  # fmt: skip
"""Chains of the grid: what is in them, others have, too."""

UNSUPPORTED: dict[str, tuple[Chain, str]] = {
    "no map": (lambda rows: rows.batch(8), "no .map"),
    "mapped after": (lambda rows: rows.map(parse).batch(8).map(lambda x: x * 2.0), r"the dataset ends in .map\(...\)"),
    "cached": (lambda rows: rows.map(parse).batch(8).cache(), "the dataset ends in Cache"),
    "random": (
        lambda rows: rows.map(lambda n: tf.random.uniform([2])).batch(8),
        "draws random numbers or writes state .RandomUniform",
    ),
    "open": (lambda rows: rows.map(ragged).take(1).batch(8), "shape of a row is not known"),
    "padded open": (lambda rows: rows.map(ragged).padded_batch(8), "shape of a row is not known"),
    "ragged": (lambda rows: rows.map(lambda n: tf.ragged.constant([[1], []])).batch(8), "not dense"),
    "ragged source": (lambda rows: rows.map(ragged).ragged_batch(2).map(lambda x: 1).batch(8), "not dense"),
    "any order": (lambda rows: rows.map(parse, num_parallel_calls=2, deterministic=False).batch(8), "different order"),
    "any order at all": (lambda rows: unordered(rows.map(parse, num_parallel_calls=2).batch(8)), "different order"),
}


def unordered(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def create_dataset(chain: str) -> tf.data.Dataset:
    tf.random.set_seed(7)
    return CHAINS[chain](tf.data.Dataset.range(ROWS))


def flatten(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


@pytest.fixture(autouse=True)
def clear_parsed() -> Iterator[None]:
    parsed.clear()
    yield


@pytest.fixture
def bind_dataset() -> Callable[[tf.data.Dataset], Sharded]:
    """A dataset by rows of which a step has taken a batch."""

    def bind(dataset: tf.data.Dataset) -> Sharded:
        found = shard_rows(dataset)
        assert isinstance(found, Sharded)
        found.feed.record_read(SECOND)
        return found

    return bind


class TestSupportedPipelines:
    @pytest.mark.parametrize(
        "chain", [pytest.param(name, marks=pytest.mark.grid if name in RARE else ()) for name in CHAINS]
    )
    def test_batches_equal_the_unsharded_ones_in_present_rows(
        self, chain: str, bind_dataset: Callable[..., Sharded]
    ) -> None:
        """All, as long as nothing is known of a step."""
        dataset, all_rows, some = (
            create_dataset(chain),
            shard_rows(create_dataset(chain)),
            bind_dataset(create_dataset(chain)),
        )
        assert isinstance(all_rows, Sharded) and all_rows.element_spec == dataset.element_spec
        for _ in range(2):
            epoch, batches = [flatten(batch) for batch in dataset], list(all_rows)
            tf.nest.assert_same_structure(batches[0], all_rows.element_spec)
            assert_same_batches([flatten(batch) for batch in batches], epoch)
            for batch, expected in zip(some, epoch, strict=True):
                for part, whole in zip(flatten(batch), expected, strict=True):
                    rows = rows_of(part)
                    assert rows is not None and isinstance(part, Partial)
                    assert rows.present.astype(int).tolist() == expected_rows(len(whole))
                    np.testing.assert_array_equal(part.tensor.numpy()[rows.present], whole.numpy()[rows.present])

    @pytest.mark.parametrize("chain", ["plain", "parallel", "shuffled after", "two maps", "numbered"])
    def test_only_wanted_rows_are_parsed(self, chain: str, bind_dataset: Callable[..., Sharded]) -> None:
        here = [rows_of(flatten(batch)[-1]).present for batch in bind_dataset(create_dataset(chain))]
        assert len(parsed) == sum(int(each.sum()) for each in here) == 4 + 4 + 3

    def test_marks_identify_present_and_absent_rows(self, bind_dataset: Callable[..., Sharded]) -> None:
        own, all_rows = bind_dataset(create_dataset("shuffled before")), shard_rows(create_dataset("shuffled before"))
        marks = [[rows_of(batch).marks.tolist() for batch in dataset] for dataset in (own, all_rows)]
        assert marks[0] == marks[1]
        assert len({mark for batch in marks[0] for mark in batch}) == ROWS

    def test_marks_of_large_elements_are_distinct(self) -> None:
        rows = np.random.default_rng(0).normal(size=(6, 40, 40)).astype("float32")
        found = shard_rows(tf.data.Dataset.from_tensor_slices(rows).map(tf.reduce_sum).batch(6))
        assert len(set(rows_of(next(iter(found))).marks.tolist())) == 6

    def test_dataset_options_are_kept(self) -> None:
        options = tf.data.Options()
        options.threading.private_threadpool_size = 3
        found = shard_rows(create_dataset("plain").with_options(options))
        assert isinstance(found, Sharded)
        assert found.options().threading.private_threadpool_size == 3
        assert found._rows.options().threading.private_threadpool_size == 3

    def test_sharding_draws_no_random_numbers(self) -> None:
        def drawn(make: Callable[[tf.data.Dataset], tf.data.Dataset]) -> Any:
            tf.random.set_seed(1)
            list(make(tf.data.Dataset.range(9).map(parse).shuffle(9).batch(4)))
            return tf.random.uniform([2]).numpy().tolist()

        assert drawn(shard_rows) == drawn(lambda dataset: dataset)


class TestUnsupportedInputs:
    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_unsupported_pipeline_is_read_whole_with_a_logged_reason(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        chain, why = UNSUPPORTED[name]
        dataset = chain(tf.data.Dataset.range(ROWS))
        with caplog.at_level(logging.WARNING, "whale_nebula.feed"):
            assert shard_rows(dataset) is dataset
        assert "nb.shard reads whole batches" in caplog.text and "mend: " in caplog.text
        assert re.search(why, caplog.text)

    @pytest.mark.parametrize("given", [np.zeros(4), (np.zeros(4), np.zeros(4)), {"x": [1]}, iter([1])])
    def test_arrays_and_iterators_are_refused_with_a_fix(self, given: Any) -> None:
        with pytest.raises(OptionError, match=r"takes a tf.data.Dataset of batches(.|\n)*nb.shard\(tf.data.Dataset"):
            nb.shard(given)

    def test_keras_dataset_is_refused(self) -> None:
        class Rows(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 1

        with pytest.raises(OptionError, match="not a Rows"):
            nb.shard(Rows())

    def test_dataset_is_unchanged_in_one_process(self) -> None:
        dataset = create_dataset("plain")
        assert nb.shard(dataset) is dataset


class TestLaterTransformations:
    @pytest.mark.parametrize(
        "transform",
        [
            lambda dataset: dataset.prefetch(1).repeat(2).take(5).skip(1),
            lambda dataset: dataset.shuffle(3, seed=1),
            lambda dataset: dataset.with_options(tf.data.Options()),
        ],
    )
    def test_row_independent_transformations_stay_sharded(
        self, transform: Chain, bind_dataset: Callable[..., Sharded]
    ) -> None:
        own, whole = bind_dataset(create_dataset("shuffled after")), create_dataset("shuffled after")
        list(own), list(whole)  # an epoch: the next one is shuffled otherwise
        found = transform(own)
        assert isinstance(found, Sharded) and found.feed is own.feed
        for batch, expected in zip(found, transform(whole), strict=True):
            here = rows_of(batch).present
            np.testing.assert_array_equal(batch.tensor.numpy()[here], expected.numpy()[here])

    def test_attributes_of_the_dataset_are_kept(self) -> None:
        dataset = create_dataset("plain")
        dataset.class_names = ["a", "b"]  # type: ignore[attr-defined]
        found = shard_rows(dataset)
        assert isinstance(found, Sharded) and found.class_names == ["a", "b"]
        with pytest.raises(AttributeError):
            _ = found.no_such_thing

    def test_other_transformations_read_all_rows_and_log_it(
        self, bind_dataset: Callable[..., Sharded], caplog: pytest.LogCaptureFixture
    ) -> None:
        found = bind_dataset(create_dataset("plain"))
        with caplog.at_level(logging.WARNING, "whale_nebula.feed"):
            sums = [float(batch) for batch in found.map(tf.reduce_sum)]
        assert sums == [float(tf.reduce_sum(batch)) for batch in create_dataset("plain")]
        assert ".map(...) follows it" in caplog.text

    def test_tf_function_reads_all_rows(self, bind_dataset: Callable[..., Sharded]) -> None:
        @tf.function
        def total(rows: Any) -> Any:
            found = tf.zeros([])
            for batch in rows:
                found += tf.reduce_sum(batch)
            return found

        expected = float(sum(tf.reduce_sum(batch) for batch in create_dataset("plain")))
        assert float(total(bind_dataset(create_dataset("plain")))) == expected
        assert float(total(iter(bind_dataset(create_dataset("plain"))))) == expected

    def test_iterator_read_in_python_and_tf_function_is_refused(self, bind_dataset: Callable[..., Sharded]) -> None:
        @tf.function
        def first(batches: Any) -> Any:
            return tf.reduce_sum(next(batches))

        read = iter(bind_dataset(create_dataset("plain")))
        next(read)
        with pytest.raises(nb.errors.UnsupportedError, match="is passed to a TensorFlow function after it was read"):
            first(read)
        given = iter(bind_dataset(create_dataset("plain")))
        first(given)
        with pytest.raises(nb.errors.UnsupportedError, match="is read in Python after it was passed"):
            next(given)

    def test_unscoped_keras_model_trains_on_all_rows(self, bind_dataset: Callable[..., Sharded]) -> None:
        def trained(dataset: tf.data.Dataset) -> list[float]:
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model.fit(dataset, epochs=2, verbose=0).history["loss"]

        def rows() -> tf.data.Dataset:
            return tf.data.Dataset.range(ROWS).map(lambda n: (parse(n) / 22.0, tf.ones([1]))).batch(8)

        assert trained(bind_dataset(rows())) == trained(rows())


class TestIterator:
    def test_iterator_ends_with_out_of_range(self) -> None:
        batches = iter(shard_rows(create_dataset("plain")))
        assert isinstance(batches, tf.data.Iterator) and iter(batches) is batches
        assert [batches.get_next().shape[0] for _ in range(3)] == [8, 8, 6]
        with pytest.raises(tf.errors.OutOfRangeError):
            batches.get_next()
        assert not bool(batches.get_next_as_optional().has_value())

    def test_get_next_as_optional_requires_whole_batches(self, bind_dataset: Callable[..., Sharded]) -> None:
        whole = iter(shard_rows(create_dataset("plain"))).get_next_as_optional()
        assert bool(whole.has_value()) and whole.get_value().shape[0] == 8
        with pytest.raises(AbsentInputError):
            iter(bind_dataset(create_dataset("plain"))).get_next_as_optional()

    def test_saving_an_iterator_is_refused(self, tmp_path: Any) -> None:
        with pytest.raises(UnsupportedError, match="cannot be saved in a checkpoint"):
            tf.train.Checkpoint(batches=iter(shard_rows(create_dataset("plain")))).save(str(tmp_path / "checkpoint"))


def expected_rows(rows: int) -> list[int]:
    return HERE[rows] if rows in HERE else SECOND.select(rows).astype(int).tolist()


def assert_same_batches(found: list[list[Any]], expected: list[list[Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
