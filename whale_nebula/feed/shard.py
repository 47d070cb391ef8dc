"""`nb.shard`: read only this process's rows of the user's batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from whale_nebula.errors import OptionError, UnsupportedError
from whale_nebula.feed.inputs import Partial
from whale_nebula.feed.rewritten import Made, NotUnderstoodError, Pipeline, take_apart
from whale_nebula.feed.rows import Feed, Rows, tag_rows
from whale_nebula.launch.attach import attach
from whale_nebula.scopes.options import check_signature, refuse
from whale_nebula.site import calling_site
from whale_nebula.tf import datasets as tf_datasets

_LOG = logging.getLogger("whale_nebula.feed")


@check_signature
def shard(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset with the same batches, of which each process reads only the rows of its own micro-batches.

    Apply it last, to a pipeline that ends in `.map(parse).batch(size)`: `parse` is then called only for those rows. The
    batches are unchanged, and so are results, bit for bit. Which rows these are follows from the plan, by cluster and
    worker; before the first step all are read. A pipeline that cannot be read by rows is read whole, and the reason is
    logged. In one process the result is the dataset itself.

    >>> import whale_nebula as nb
    >>> rows = tf.data.Dataset.range(6).map(lambda row: 2 * row).batch(4)
    >>> [batch.numpy().tolist() for batch in nb.shard(rows)]
    [[0, 2, 4, 6], [8, 10]]
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise _no_dataset(dataset)
    if attach() is None or isinstance(dataset, Sharded) or not tf.executing_eagerly():
        return dataset
    return shard_rows(dataset)


def shard_rows(dataset: tf.data.Dataset, before: Sharded | None = None) -> tf.data.Dataset:
    """The dataset restricted to own rows, or unchanged if that is not possible; `before` is the dataset before its
    last transformation.
    """
    try:
        return Sharded(dataset, take_apart(dataset), before)
    except NotUnderstoodError as found:
        _LOG.warning("nb.shard reads whole batches: %s\n  mend: %s", found.why, found.mend)
        return dataset


class Sharded(tf_datasets.Same):
    """The result of `nb.shard`: a dataset that yields own rows when Python iterates over it, and all rows otherwise."""

    def __init__(self, dataset: tf.data.Dataset, pipeline: Pipeline, before: Sharded | None = None) -> None:
        super().__init__(dataset)
        self.feed: Feed = Feed() if before is None else before.feed
        self._made: Made = {} if before is None else before._made
        self._dataset = dataset
        self._rows = pipeline.rebuild(self.feed.own, self._made)

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
        _LOG.warning("nb.shard reads whole batches: .%s(...) comes after it\n  mend: nb.shard(dataset) last", name)
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
        self._whole: Any = None
        self._begun = False

    @property
    def element_spec(self) -> Any:
        """The form of a batch."""
        return self._dataset.element_spec

    def __next__(self) -> Any:
        if self._whole is not None:
            raise _mixed_error("is read here, and was given to a function of TensorFlow's before")
        self._begun = True
        self._feed.settle()
        *tensors, marks, here = next(self._inner)
        rows = Rows(self._feed, here.numpy(), marks.numpy())
        found = iter(tag_rows(tensor, rows) if rows.whole else Partial(tensor, rows) for tensor in tensors)
        specs = tf_datasets.leaves(self.element_spec)
        return tf_datasets.pack_structure(
            self.element_spec, [None if tf_datasets.nothing(spec) else next(found) for spec in specs]
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
        for part in tf_datasets.leaves(found):
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
        if self._begun:
            raise _mixed_error("has given batches, and is now given to a function of TensorFlow's")
        if self._whole is None:
            self._whole = iter(self._dataset)
        return self._whole

    def _serialize_to_tensors(self) -> NoReturn:
        what = "an iterator of nb.shard cannot be saved in a checkpoint"
        why = "it reads other rows in each process"
        mend = "save the number of the step, and begin with nb.shard(dataset.skip(step))"
        raise UnsupportedError(what, where=str(calling_site()), why=why, mend=mend)


def _mixed_error(what: str) -> UnsupportedError:
    why = "outside of functions it goes through its own rows, inside through all rows: it would begin anew"
    mend = "an iterator of its own for the function: iter(dataset)\nor give the function batches"
    return UnsupportedError(f"an iterator of nb.shard {what}", where=str(calling_site()), why=why, mend=mend)


def _no_dataset(given: Any) -> OptionError:
    """The error for an argument that has rows but is no dataset; it states what to write."""
    name, why = type(given).__name__, "rows that a generator makes come one after the other: none can be left out"
    mend = "nb.shard(tf.data.Dataset.range(count).map(read_row).batch(32))"
    if hasattr(given, "__array__") or isinstance(given, tuple | list | dict):
        why = "of arrays nothing is to be saved, each process slices those that it has"
        mend = "leave nb.shard out, or nb.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(32))"
    article = "an" if name[:1].lower() in "aeiou" else "a"
    return refuse(f"nb.shard takes a tf.data.Dataset of batches, not {article} {name}", why=why, mend=mend)
