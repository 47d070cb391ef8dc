"""`nb.shard`: read only this process's rows of the user's batches, by rebuilding a tf.data pipeline.

The supported form is `source.map(parse).batch(size)`, with transformations that do not depend on the elements: shuffle,
repeat, take, skip, prefetch, options. The source is read completely, which is cheap; its elements are counted in
batches, and `parse` is called only for the wanted ones. The order is that of the user's pipeline, with the same seeds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import tensorflow as tf

from whale_nebula.errors import OptionError, UnsupportedError
from whale_nebula.feed.inputs import Partial
from whale_nebula.feed.rows import Feed, Mask, Rows, tag_rows
from whale_nebula.launch.attach import attach
from whale_nebula.scopes.options import check_signature, option_error
from whale_nebula.site import calling_site
from whale_nebula.tf import datasets as tf_datasets

_LOG = logging.getLogger("whale_nebula.feed")


@check_signature
def shard(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset with the same batches, of which each process reads only the rows of its own micro-batches.

    Apply it last, to a pipeline that ends in `.map(parse).batch(size)`: `parse` is then called only for those rows. The
    batches are unchanged, and so are results, bit for bit. The plan determines these rows for each cluster and worker;
    before the first step all are read. A pipeline that cannot be read by rows is read completely, and the reason is
    logged. In one process the result is the dataset itself.

    >>> import whale_nebula as nb
    >>> rows = tf.data.Dataset.range(6).map(lambda row: 2 * row).batch(4)
    >>> [batch.numpy().tolist() for batch in nb.shard(rows)]
    [[0, 2, 4, 6], [8, 10]]
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise _no_dataset_error(dataset)
    if attach() is None or isinstance(dataset, Sharded) or not tf.executing_eagerly():
        return dataset
    return shard_rows(dataset)


def shard_rows(dataset: tf.data.Dataset, before: Sharded | None = None) -> tf.data.Dataset:
    """The dataset restricted to own rows, or unchanged if that is not possible; `before` is the dataset before its
    last transformation.
    """
    try:
        return Sharded(dataset, decompose(dataset), before)
    except UnsupportedPipelineError as found:
        _LOG.warning("nb.shard reads whole batches: %s\n  mend: %s", found.why, found.mend)
        return dataset


class Sharded(tf_datasets.IdentityDataset):
    """The result of `nb.shard`: a dataset that yields own rows when Python iterates over it, and all rows otherwise."""

    def __init__(self, dataset: tf.data.Dataset, pipeline: Pipeline, before: Sharded | None = None) -> None:
        super().__init__(dataset)
        self.feed: Feed = Feed() if before is None else before.feed
        self._cache: DatasetCache = {} if before is None else before._cache
        self._dataset = dataset
        self._rows = pipeline.rebuild(self.feed.select_rows, self._cache)

    def __getattr__(self, name: str) -> Any:
        """Attributes that were set on the dataset, such as class names by Keras."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        """The batches, with the rows that this process reads."""
        if not tf.executing_eagerly():
            return iter(self._dataset)
        return Batches(self._dataset, self._rows, self.feed)


def _derive(name: str, *, by_rows: bool) -> Callable[..., Any]:
    """Wrap a method of datasets: the result is restricted to own rows if possible, and has all rows otherwise."""
    plain = getattr(tf.data.Dataset, name)

    @functools.wraps(plain)
    def method(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        found = plain(self._dataset, *args, **kwargs)
        if by_rows:
            return shard_rows(found, self)
        _LOG.warning("nb.shard reads whole batches: .%s(...) follows it\n  mend: apply nb.shard(dataset) last", name)
        return found

    return method


for _name in ("prefetch", "repeat", "take", "skip", "shuffle", "with_options"):
    setattr(Sharded, _name, _derive(_name, by_rows=True))
for _name in ("batch", "cache", "enumerate", "filter", "flat_map", "interleave", "map", "rebatch", "unbatch"):
    setattr(Sharded, _name, _derive(_name, by_rows=False))


class Batches(tf.data.Iterator):
    """Iterates over batches by rows, or inside a TensorFlow function over all rows; not both."""

    def __init__(self, dataset: tf.data.Dataset, rows: tf.data.Dataset, feed: Feed) -> None:
        self._dataset, self._feed = dataset, feed
        self._inner = iter(rows)
        self._graph_iterator: Any = None
        self._is_read_in_python = False

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self._dataset.element_spec

    def __next__(self) -> Any:
        if self._graph_iterator is not None:
            raise _mixed_error("is read in Python after it was passed to a TensorFlow function")
        self._is_read_in_python = True
        self._feed.conclude_batch()
        *tensors, marks, here = next(self._inner)
        rows = Rows(self._feed, here.numpy(), marks.numpy())
        found = iter(tag_rows(tensor, rows) if rows.is_complete else Partial(tensor, rows) for tensor in tensors)
        specs = tf_datasets.flatten_structure(self.element_spec)
        return tf_datasets.pack_structure(
            self.element_spec, [None if tf_datasets.is_none_spec(spec) else next(found) for spec in specs]
        )

    def get_next(self) -> Any:
        """The next batch."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """The next batch as an optional, empty at the end."""
        optional = tf.experimental.Optional
        found = next(self, None)
        for part in tf_datasets.flatten_structure(found):
            if isinstance(part, Partial):
                part.refuse()
        return optional.empty(self.element_spec) if found is None else optional.from_value(found)

    @property
    def _type_spec(self) -> Any:
        return tf_datasets.describe_iterator(self._iterate_rows())[0]

    @property
    def _iterator_resource(self) -> Any:
        return tf_datasets.describe_iterator(self._iterate_rows())[1]

    def _iterate_rows(self) -> Any:
        if self._is_read_in_python:
            raise _mixed_error("is passed to a TensorFlow function after it was read in Python")
        if self._graph_iterator is None:
            self._graph_iterator = iter(self._dataset)
        return self._graph_iterator

    def _serialize_to_tensors(self) -> NoReturn:
        what = "an iterator of nb.shard cannot be saved in a checkpoint"
        why = "it reads different rows in each process"
        mend = "save the number of the step, and start with nb.shard(dataset.skip(step))"
        raise UnsupportedError(what, where=str(calling_site()), why=why, mend=mend)


def _mixed_error(what: str) -> UnsupportedError:
    why = "in Python it yields this process's rows, in a function all rows, so it would start again"
    mend = "use a separate iterator for the function: iter(dataset)\nor pass batches to the function"
    return UnsupportedError(f"an iterator of nb.shard {what}", where=str(calling_site()), why=why, mend=mend)


def _no_dataset_error(value: Any) -> OptionError:
    """The error for an argument that has rows but is not a dataset; it states what to write."""
    name, why = type(value).__name__, "a generator yields its rows one after the other, and none can be skipped"
    mend = "nb.shard(tf.data.Dataset.range(count).map(read_row).batch(32))"
    if hasattr(value, "__array__") or isinstance(value, tuple | list | dict):
        why = "with arrays nothing is saved: each process slices the arrays that it already has"
        mend = "remove nb.shard, or use nb.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(32))"
    article = "an" if name[:1].lower() in "aeiou" else "a"
    return option_error(f"nb.shard takes a tf.data.Dataset of batches, not {article} {name}", why=why, mend=mend)


# ---------------------------------------------------------------------- pipelines, rebuilt
RowSelector: TypeAlias = Callable[[int], Mask]
"""A function from the number of rows in a batch to the mask of the wanted ones."""
DatasetCache: TypeAlias = MutableMapping[Any, Any]
"""The rebuilt datasets by the steps of a pipeline. A dataset that is reshuffled in each epoch counts epochs, so one
rebuilt dataset is shared by all iterators.
"""
_CACHE: DatasetCache = WeakKeyDictionary()
_OF_ROWS = frozenset({"map", "prefetch", "options"})
_SAMPLE = 256


class UnsupportedPipelineError(Exception):
    """The reason why a pipeline is left unchanged, and how to change it."""

    def __init__(self, why: str, mend: str) -> None:
        super().__init__(why)
        self.why, self.mend = why, mend


@dataclass(frozen=True)
class Pipeline:
    """A decomposed tf.data pipeline: transformations after batching, the batching, those before, and the source.

    `after` and `before` start with the last transformation.
    """

    after: Sequence[Any]
    batches: Any
    before: Sequence[Any]
    source: Any

    def rebuild(self, selector: RowSelector, cache: DatasetCache) -> tf.data.Dataset:
        """The pipeline restricted to the rows of `selector`. It yields the tensors of each batch, a mark of each row,
        and a mask of the rows that are here. Datasets in `cache` are reused.
        """
        if self.batches not in cache:
            cache[self.batches] = self._rebuild_batches(selector)
        found = cache[self.batches]
        for step in reversed(self.after):
            found = _repeat_step(step, found, cache)
        return found

    def _rebuild_batches(self, selector: RowSelector) -> tf.data.Dataset:
        rows = self.source
        for step in reversed(self.before):
            rows = rows if tf_datasets.find_kind(step) in _OF_ROWS else _repeat_step(step, rows, _CACHE)
        batching = tf_datasets.read_batching(self.batches)
        rows = _flag_wanted_rows(rows.map(_mark_element), batching, selector)
        for step in reversed(self.before):
            if tf_datasets.find_kind(step) == "map":
                rows = _map_wanted_rows(step, rows)
            elif tf_datasets.find_kind(step) in _OF_ROWS:
                rows = tf_datasets.reapply(step, rows)
        if not batching.shapes:
            return rows.batch(batching.size, **batching.options)
        values = (*batching.values, tf.constant(0, tf.int64), tf.constant(False))
        return rows.padded_batch(batching.size, (*batching.shapes, [], []), values, **batching.options)


def _repeat_step(step: Any, source: Any, cache: DatasetCache) -> Any:
    if step not in cache or tf_datasets.find_input(cache[step]) is not source:
        cache[step] = tf_datasets.reapply(step, source)
    return cache[step]


# ---------------------------------------------------------------------- supported pipelines
def decompose(dataset: tf.data.Dataset) -> Pipeline:
    """Decompose a pipeline; raises `UnsupportedPipelineError` if it cannot be rebuilt."""
    after, batches = [], dataset
    while tf_datasets.find_kind(batches) in tf_datasets.CONTENT_INDEPENDENT_KINDS:
        after.append(batches)
        batches = tf_datasets.find_input(batches)
    if tf_datasets.find_kind(batches) not in ("batch", "padded_batch"):
        raise UnsupportedPipelineError(
            f"the dataset ends in {_name_of_op(batches)}, not in .batch(...)",
            "end it with .map(parse).batch(size); apply ops that change rows before .batch",
        )
    before, source, refused = [], tf_datasets.find_input(batches), None
    while refused is None and tf_datasets.find_kind(source) in tf_datasets.CONTENT_INDEPENDENT_KINDS | {"map"}:
        refused = _refuse_map(source) if tf_datasets.find_kind(source) == "map" else None
        if refused is None:
            before.append(source)
            source = tf_datasets.find_input(source)
    while before and tf_datasets.find_kind(before[-1]) != "map":
        source = before.pop()
    if not before:
        raise refused or UnsupportedPipelineError(
            "there is no .map(...) directly before .batch(...), so reading fewer rows saves nothing",
            "do the expensive reads in .map(parse), and start from the names or indices of rows",
        )
    _check_rows(dataset, batches, before, source)
    return Pipeline(after, batches, before, source)


def _check_rows(dataset: tf.data.Dataset, batches: Any, before: Sequence[Any], source: Any) -> None:
    """Raise if rows cannot be skipped in a pipeline with these transformations."""
    if not all(map(has_blank, _tensors(source.element_spec))):
        raise UnsupportedPipelineError(
            f"{_name_of_op(source)} yields tensors that are not dense", "apply .map before .batch to dense tensors"
        )
    maps = [step for step in before if tf_datasets.find_kind(step) == "map"]
    deterministic = {
        mapping.options.get("deterministic") for step in maps if (mapping := tf_datasets.read_mapping(step)) is not None
    }
    if False in deterministic or (None in deterministic and dataset.options().deterministic is False):
        raise UnsupportedPipelineError(
            "deterministic=False: each process would read the rows in a different order", "remove deterministic=False"
        )
    parts = _tensors(maps[0].element_spec)
    shapes = tf_datasets.read_batching(batches).shapes or [None] * len(parts)
    if not all(_is_fixed_shape(part.shape, padded) for part, padded in zip(parts, shapes, strict=True)):
        raise UnsupportedPipelineError(
            f"the shape of a row is not known before it is read: {maps[0].element_spec}",
            "use tf.ensure_shape(...) in the function of .map, or .padded_batch(padded_shapes=...) with fixed sizes",
        )


def _refuse_map(dataset: Any) -> UnsupportedPipelineError | None:
    """The reason why the function of a map cannot be skipped for some rows, if any."""
    mapping = tf_datasets.read_mapping(dataset)
    if mapping is None or not all(map(has_blank, _tensors(mapping.output_spec))):
        why = "the function of .map returns tensors that are not dense"
        return UnsupportedPipelineError(why, "use .to_tensor() or tf.sparse.to_dense")
    lasting = tf_datasets.find_lasting_op(mapping.function)
    if lasting:
        return UnsupportedPipelineError(
            f"the function of .map draws random numbers or writes state ({lasting}), so calls depend on earlier ones",
            "use tf.random.stateless_uniform(..., seed=[row, epoch]) or similar, with a seed computed from the row",
        )
    return None


def _tensors(spec: Any) -> list[Any]:
    """The parts of an element that are not None."""
    return [part for part in tf_datasets.flatten_structure(spec) if not tf_datasets.is_none_spec(part)]


def _is_fixed_shape(shape: tf.TensorShape, padded: Any) -> bool:
    """Whether rows have the same sizes in every batch, independent of which are read."""
    if padded is None or shape.rank is None:
        return bool(shape.is_fully_defined())
    sizes = tf.get_static_value(padded)
    return sizes is not None and all(size >= 0 or own is not None for size, own in zip(sizes, shape, strict=True))


def _name_of_op(dataset: Any) -> str:
    return (
        f".{tf_datasets.find_kind(dataset)}(...)"
        if tf_datasets.find_kind(dataset)
        else type(dataset).__name__.strip("_")
    )


# ---------------------------------------------------------------------- rows: their tensors, a mark, and whether wanted
def create_blank(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of a spec with a placeholder value: NaN, the most extreme integer, "" or False. Unknown sizes are 0.

    >>> create_blank(tf.TensorSpec([2], tf.float32)).numpy().tolist(), int(create_blank(tf.TensorSpec([], tf.int32)))
    ([nan, nan], -2147483648)
    >>> create_blank(tf.TensorSpec([None, 3], tf.string)).shape.as_list()
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


def has_blank(spec: Any) -> bool:
    """Whether a spec has such a placeholder.

    >>> has_blank(tf.TensorSpec([], tf.bool)), has_blank(tf.RaggedTensorSpec([None, None], tf.int32))
    (True, False)
    """
    if not isinstance(spec, tf.TensorSpec):
        return False
    dtype = spec.dtype
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype in (tf.bool, tf.string))


@tf.autograph.experimental.do_not_convert
def _mark_element(*element: Any) -> tuple[Any, ...]:
    """The tensors of an element, and a number that identifies its content."""
    tensors = [part for part in tf_datasets.flatten_structure(element) if part is not None]
    text = tf.strings.join([tf.io.serialize_tensor(_sample(tensor)) for tensor in tensors])
    return (*tensors, tf.strings.to_hash_bucket_fast(text, 2**62))


def _sample(tensor: Any) -> Any:
    """A sample of a tensor's bytes that distinguishes it from others."""
    if tensor.shape.rank == 0:
        return tensor
    flat = tf.reshape(tensor, [-1])
    return flat[:: tf.maximum(1, tf.size(flat) // _SAMPLE)]


def _flag_wanted_rows(rows: tf.data.Dataset, batching: tf_datasets.Batching, selector: RowSelector) -> tf.data.Dataset:
    """Pair each row with a flag for whether it is wanted, which depends on the number of rows of its batch."""

    @tf.autograph.experimental.do_not_convert
    def flag(*parts: Any) -> tf.data.Dataset:
        count = tf.size(parts[-1].batch(batching.size).get_single_element())
        here = tf.numpy_function(lambda count: selector(int(count)), [count], tf.bool)
        return tf.data.Dataset.zip((*parts, tf.data.Dataset.from_tensor_slices(tf.ensure_shape(here, [None]))))

    return rows.window(batching.size, drop_remainder=batching.options["drop_remainder"]).flat_map(flag)


def _map_wanted_rows(step: Any, rows: tf.data.Dataset) -> tf.data.Dataset:
    """Apply a map of the pipeline to the wanted rows only."""
    mapping = tf_datasets.read_mapping(step)
    if mapping is None:
        raise TypeError(step)
    function, specs = mapping.function, _tensors(mapping.output_spec)

    @tf.autograph.experimental.do_not_convert
    def apply(*row: Any) -> tuple[Any, ...]:
        *tensors, mark, here = row
        found = tf.cond(here, lambda: list(function(*tensors)), lambda: [create_blank(spec) for spec in specs])
        return (*(tf.ensure_shape(each, spec.shape) for each, spec in zip(found, specs, strict=True)), mark, here)

    return rows.map(apply, **mapping.options)
