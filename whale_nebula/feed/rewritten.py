"""Rebuild a tf.data pipeline so that it processes only the wanted rows of each batch.

The supported form is `source.map(parse).batch(size)`, with transformations that do not depend on the elements:
shuffle, repeat, take, skip, prefetch, options. The source is read completely, which is cheap; its elements are counted
in batches, and `parse` is called for the wanted ones. The order is that of the user's pipeline, with the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import tensorflow as tf

from whale_nebula.feed.rows import Mask
from whale_nebula.tf import datasets as tf_datasets

Wanted: TypeAlias = Callable[[int], Mask]
"""A function from the number of rows in a batch to the mask of the wanted ones."""
Made: TypeAlias = MutableMapping[Any, Any]
"""The rebuilt datasets by the steps of a pipeline. A dataset that is reshuffled in each epoch counts epochs: so one
rebuilt dataset is shared by all iterators.
"""
_MADE: Made = WeakKeyDictionary()
_OF_ROWS = frozenset({"map", "prefetch", "options"})
_SAMPLE = 256


class NotUnderstoodError(Exception):
    """The reason why a pipeline is left unchanged, and how to change it."""

    def __init__(self, why: str, mend: str) -> None:
        super().__init__(why)
        self.why, self.mend = why, mend


@dataclass(frozen=True)
class Pipeline:
    """A decomposed tf.data pipeline: transformations after batching, the batching, those before, and the source.

    `after` and `before` begin with the last transformation.
    """

    after: Sequence[Any]
    batches: Any
    before: Sequence[Any]
    source: Any

    def rebuild(self, wanted: Wanted, made: Made) -> tf.data.Dataset:
        """The pipeline restricted to `wanted` rows. It yields the tensors of each batch, a mark of each row, and a mask
        of the rows that are here. Datasets in `made` are reused.
        """
        if self.batches not in made:
            made[self.batches] = self._rebuild_batches(wanted)
        found = made[self.batches]
        for step in reversed(self.after):
            found = _repeat_step(step, found, made)
        return found

    def _rebuild_batches(self, wanted: Wanted) -> tf.data.Dataset:
        rows = self.source
        for step in reversed(self.before):
            rows = rows if tf_datasets.kind(step) in _OF_ROWS else _repeat_step(step, rows, _MADE)
        batching = tf_datasets.batching(self.batches)
        rows = _flag_wanted_rows(rows.map(_mark_element), batching, wanted)
        for step in reversed(self.before):
            if tf_datasets.kind(step) == "map":
                rows = _map_wanted_rows(step, rows)
            elif tf_datasets.kind(step) in _OF_ROWS:
                rows = tf_datasets.apply_again(step, rows)
        if not batching.shapes:
            return rows.batch(batching.size, **batching.options)
        values = (*batching.values, tf.constant(0, tf.int64), tf.constant(False))
        return rows.padded_batch(batching.size, (*batching.shapes, [], []), values, **batching.options)


def _repeat_step(step: Any, source: Any, made: Made) -> Any:
    if step not in made or tf_datasets.below(made[step]) is not source:
        made[step] = tf_datasets.apply_again(step, source)
    return made[step]


# ---------------------------------------------------------------------- supported pipelines
def take_apart(dataset: tf.data.Dataset) -> Pipeline:
    """Decompose a pipeline; None if it cannot be rebuilt."""
    after, batches = [], dataset
    while tf_datasets.kind(batches) in tf_datasets.MOVES:
        after.append(batches)
        batches = tf_datasets.below(batches)
    if tf_datasets.kind(batches) not in ("batch", "padded_batch"):
        raise NotUnderstoodError(
            f"it ends in {_name_of_op(batches)}, and what is looked for is .batch(...)",
            "end it with .map(parse).batch(size); what changes rows goes before .batch",
        )
    before, source, refused = [], tf_datasets.below(batches), None
    while refused is None and tf_datasets.kind(source) in tf_datasets.MOVES | {"map"}:
        refused = _refuse_map(source) if tf_datasets.kind(source) == "map" else None
        if refused is None:
            before.append(source)
            source = tf_datasets.below(source)
    while before and tf_datasets.kind(before[-1]) != "map":
        source = before.pop()
    if not before:
        raise refused or NotUnderstoodError(
            "there is no .map(...) right before .batch(...), so nothing is saved by reading fewer rows",
            "read what is dear in .map(parse), and begin with names or numbers of rows",
        )
    _check_rows(dataset, batches, before, source)
    return Pipeline(after, batches, before, source)


def _check_rows(dataset: tf.data.Dataset, batches: Any, before: Sequence[Any], source: Any) -> None:
    """Raise if rows cannot be left out of a pipeline with these transformations."""
    if not all(map(can_be_blank, _tensors(source.element_spec))):
        raise NotUnderstoodError(
            f"{_name_of_op(source)} yields more than dense tensors", "map before .batch from dense ones"
        )
    maps = [step for step in before if tf_datasets.kind(step) == "map"]
    told = {mapping.options.get("deterministic") for step in maps if (mapping := tf_datasets.mapping(step)) is not None}
    if False in told or (None in told and dataset.options().deterministic is False):
        raise NotUnderstoodError(
            "deterministic=False: each process would have rows in an order of its own", "leave deterministic=False out"
        )
    parts = _tensors(maps[0].element_spec)
    shapes = tf_datasets.batching(batches).shapes or [None] * len(parts)
    if not all(_is_fixed_shape(part.shape, padded) for part, padded in zip(parts, shapes, strict=True)):
        raise NotUnderstoodError(
            f"the sizes of a row are not known before it is read: {maps[0].element_spec}",
            "tf.ensure_shape(...) in the function of .map, or .padded_batch(padded_shapes=...) with numbers",
        )


def _refuse_map(dataset: Any) -> NotUnderstoodError | None:
    """The reason why the function of a map cannot be skipped for some rows, if any."""
    mapping = tf_datasets.mapping(dataset)
    if mapping is None or not all(map(can_be_blank, _tensors(mapping.gives))):
        why = "the function of .map gives more than dense tensors"
        return NotUnderstoodError(why, ".to_tensor() or tf.sparse.to_dense")
    lasting = tf_datasets.lasting(mapping.function)
    if lasting:
        return NotUnderstoodError(
            f"the function of .map draws or writes ({lasting}), so each call changes those that follow",
            "tf.random.stateless_uniform(..., seed=[row, epoch]) and its like: numbers that are made of the row",
        )
    return None


def _tensors(spec: Any) -> list[Any]:
    """The parts of an element that are not None."""
    return [part for part in tf_datasets.leaves(spec) if not tf_datasets.nothing(part)]


def _is_fixed_shape(shape: tf.TensorShape, padded: Any) -> bool:
    """Whether rows have the same sizes in every batch, independent of which are read."""
    if padded is None or shape.rank is None:
        return bool(shape.is_fully_defined())
    sizes = tf.get_static_value(padded)
    return sizes is not None and all(size >= 0 or own is not None for size, own in zip(sizes, shape, strict=True))


def _name_of_op(dataset: Any) -> str:
    return f".{tf_datasets.kind(dataset)}(...)" if tf_datasets.kind(dataset) else type(dataset).__name__.strip("_")


# ---------------------------------------------------------------------- rows: their tensors, a mark, and whether wanted
def blank(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of a spec with a placeholder value: NaN, the most extreme integer, "" or False. Open sizes are 0.

    >>> blank(tf.TensorSpec([2], tf.float32)).numpy().tolist(), int(blank(tf.TensorSpec([], tf.int32)))
    ([nan, nan], -2147483648)
    >>> blank(tf.TensorSpec([None, 3], tf.string)).shape.as_list()
    [0, 3]
    """
    dtype = spec.dtype
    value: Any = "" if dtype == tf.string else False
    if dtype.is_floating or dtype.is_complex:
        value = float("nan")
    elif dtype.is_integer:
        value = dtype.max if dtype.is_unsigned else dtype.min
    shape = [size or 0 for size in spec.shape] if spec.shape.rank else []
    return tf.fill(shape, tf.constant(value, dtype))


def can_be_blank(spec: Any) -> bool:
    """Whether a spec has such a placeholder.

    >>> can_be_blank(tf.TensorSpec([], tf.bool)), can_be_blank(tf.RaggedTensorSpec([None, None], tf.int32))
    (True, False)
    """
    if not isinstance(spec, tf.TensorSpec):
        return False
    dtype = spec.dtype
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype in (tf.bool, tf.string))


@tf.autograph.experimental.do_not_convert
def _mark_element(*element: Any) -> tuple[Any, ...]:
    """The tensors of an element, and a number that identifies its content."""
    tensors = [part for part in tf_datasets.leaves(element) if part is not None]
    text = tf.strings.join([tf.io.serialize_tensor(_sample(tensor)) for tensor in tensors])
    return (*tensors, tf.strings.to_hash_bucket_fast(text, 2**62))


def _sample(tensor: Any) -> Any:
    """A sample of a tensor's bytes that distinguishes it from others."""
    if tensor.shape.rank == 0:
        return tensor
    flat = tf.reshape(tensor, [-1])
    return flat[:: tf.maximum(1, tf.size(flat) // _SAMPLE)]


def _flag_wanted_rows(rows: tf.data.Dataset, batching: tf_datasets.Batching, wanted: Wanted) -> tf.data.Dataset:
    """Pair each row with a flag for whether it is wanted, which depends on the number of rows of its batch."""

    @tf.autograph.experimental.do_not_convert
    def flag(*parts: Any) -> tf.data.Dataset:
        count = tf.size(parts[-1].batch(batching.size).get_single_element())
        here = tf.numpy_function(lambda count: wanted(int(count)), [count], tf.bool)
        return tf.data.Dataset.zip((*parts, tf.data.Dataset.from_tensor_slices(tf.ensure_shape(here, [None]))))

    return rows.window(batching.size, drop_remainder=batching.options["drop_remainder"]).flat_map(flag)


def _map_wanted_rows(step: Any, rows: tf.data.Dataset) -> tf.data.Dataset:
    """Apply a map of the pipeline to the wanted rows only."""
    mapping = tf_datasets.mapping(step)
    if mapping is None:
        raise TypeError(step)
    function, specs = mapping.function, _tensors(mapping.gives)

    @tf.autograph.experimental.do_not_convert
    def apply(*row: Any) -> tuple[Any, ...]:
        *tensors, mark, here = row
        found = tf.cond(here, lambda: list(function(*tensors)), lambda: [blank(spec) for spec in specs])
        return (*(tf.ensure_shape(each, spec.shape) for each, spec in zip(found, specs, strict=True)), mark, here)

    return rows.map(apply, **mapping.options)
