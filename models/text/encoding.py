"""A corpus as ids, and its batches: each local side is tokenized once, and stored as NumPy arrays."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import DataError, OptionError
from whale_nebula.errors.text import did_you_mean

from .corpus import Pairs, Side
from .order import MULTIPLE, Order
from .tokenizer import Tokenizer

log = logging.getLogger("whale_nebula.models.text")
Ints = npt.NDArray[np.int32]
TooLong = Literal["cut", "refuse"]
_LINES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of a side's sentences, concatenated; `cut` is the number of truncated sentences.

    No row has more than `longest` ids, or is padded to more, because that is a model's number of positions.

    >>> ids = Ids.of_rows([[2, 7, 3], [2, 8, 9, 3]])
    >>> len(ids), ids.lengths, ids.row(1)
    (2, array([3, 4], dtype=int32), array([2, 8, 9, 3], dtype=int32))
    """

    flat: Ints
    lengths: Ints
    cut: int = 0
    longest: int | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], *, cut: int = 0, longest: int | None = None) -> Ids:
        """Create from a list for each sentence."""
        lengths = np.asarray([len(row) for row in rows], np.int32)
        return cls(np.asarray([each for row in rows for each in row], np.int32), lengths, cut, longest)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> Ints:
        """The ids of one sentence."""
        start = int(self.lengths[:number].sum())
        return self.flat[start : start + self.lengths[number]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Both sides as ids; a side that is not local is None."""

    source: Ids | None = None
    target: Ids | None = None

    def __len__(self) -> int:
        return len(next(each for each in (self.source, self.target) if each is not None))

    @property
    def lengths(self) -> tuple[Ints, ...]:
        """The lengths of each local side's sentences, by which `make_order` groups them."""
        return tuple(each.lengths for each in (self.source, self.target) if each is not None)

    @property
    def cut(self) -> int:
        """The number of truncated sentences."""
        return sum(each.cut for each in (self.source, self.target) if each is not None)


def encode_pairs(
    pairs: Pairs,
    *,
    source: Tokenizer | None = None,
    target: Tokenizer | None = None,
    longest: int | Mapping[Side, int] = 128,
    too_long: TooLong = "cut",
) -> Encoded:
    """Tokenize the local sides of sentence pairs.

    Args:
        pairs: the sentences.
        source: tokenizer of the source side; needed only if that side is local.
        target: tokenizer of the target side, likewise.
        longest: maximum number of tokens including `[CLS]` and `[SEP]`, for both sides or by side.
        too_long: "cut" truncates longer sentences, counts them and logs the count; "refuse" raises an error.
    """
    if too_long not in ("cut", "refuse"):
        raise OptionError(f"too_long={too_long!r} is not a valid value", mend=did_you_mean(too_long, ["cut", "refuse"]))
    tokenizers = {"source": source, "target": target}
    found = {}
    for side in pairs.sides:
        tokenizer = tokenizers[side]
        if tokenizer is None:
            raise OptionError(f"the {side} side is loaded, but has no tokenizer", mend=f"{side}=Tokenizer(vocabulary)")
        most = longest if isinstance(longest, int) else longest[side]
        found[side] = _encode_side(pairs.of(side), tokenizer, side, most, too_long)
    return Encoded(**found)


def _encode_side(sentences: Sequence[str], tokenizer: Tokenizer, side: Side, most: int, too_long: TooLong) -> Ids:
    if most < 3:
        raise OptionError(f"longest={most} is too short for any word", mend="longest=3, or more")
    rows: list[list[int]] = []
    for start in range(0, len(sentences), _LINES_AT_ONCE):
        rows += tokenizer.encode(list(sentences[start : start + _LINES_AT_ONCE])).to_list()
    long = [number for number, row in enumerate(rows) if len(row) > most]
    if long:
        _report_too_long(long, len(rows[long[0]]), len(rows), side, most, too_long)
    for number in long:
        rows[number] = [*rows[number][: most - 1], tokenizer.end]
    return Ids.of_rows(rows, cut=len(long), longest=most)


def _report_too_long(rows: list[int], first: int, all_rows: int, side: Side, most: int, too_long: TooLong) -> None:
    what = f"{len(rows)} of {all_rows} {side} sentences are longer than {most} tokens"
    if too_long == "cut":
        log.warning("%s: they are truncated", what)
        return
    raise DataError(
        what,
        where=f"row {rows[0]} has {first} tokens",
        why="the model has no positions for more tokens",
        mend=f'too_long="cut", or longest={first} or more',
    )


def batches(
    encoded: Encoded,
    order: Order,
    *,
    multiple: int = MULTIPLE,
    weights: bool = False,
) -> Any:
    """Create a `tf.data.Dataset` of `({"source": ids, "target": shown ids}, labels)`, with one element for each batch.

    The label of each position of a target is the next id: the shown ids omit the last one, the labels the first.

    Each side is padded with 0 to the next multiple of its own longest row, so no cluster needs the other side's
    lengths. The leaves of a side that is not local are None; declare their shapes in the config's `inputs`: `x/source`
    and `x/target`, `y`, and, with `weights`, `sample_weight`.

    An order of several epochs is one dataset: `fit(..., epochs=order.epochs, steps_per_epoch=order.steps_per_epoch)`.

    Args:
        encoded: the ids.
        order: the order of rows.
        multiple: multiple to which lengths are padded.
        weights: whether elements have sample weights: 1 for labels other than 0.

    >>> from .order import make_order
    >>> pairs = Encoded(Ids.of_rows([[2, 7, 3]]), Ids.of_rows([[2, 8, 9, 3]]))
    >>> for inputs, labels in batches(pairs, make_order(1, batch=1), multiple=4):
    ...     print(inputs["source"].numpy(), inputs["target"].numpy(), labels.numpy())
    [[2 7 3 0]] [[2 8 9 3]] [[8 9 3 0]]
    """
    _check(encoded, order, multiple)
    import tensorflow as tf

    rows = tf.RaggedTensor.from_row_lengths(
        np.concatenate([np.asarray(each, np.int32) for each in order.batches]), [len(each) for each in order.batches]
    )

    def batch(rows: Any) -> tuple[Any, ...]:
        source = None if encoded.source is None else _pad_rows(encoded.source, rows, multiple)
        if encoded.target is None:
            return ({"source": source, "target": None}, None, *([None] if weights else []))
        ids = _pad_rows(encoded.target, rows, multiple, extra=1)
        shown, labels = ids[:, :-1], ids[:, 1:]
        weight = [tf.cast(labels != 0, tf.float32)] if weights else []
        return ({"source": source, "target": shown}, labels, *weight)

    dataset = tf.data.Dataset.from_tensor_slices(rows)
    plain = tf.autograph.experimental.do_not_convert(batch)  # nothing in it needs conversion
    return dataset.map(plain, num_parallel_calls=1).prefetch(2)


def _check(encoded: Encoded, order: Order, multiple: int) -> None:
    if multiple < 1:
        raise OptionError(f"multiple={multiple!r} is not a valid length", mend="multiple=8")
    for side, ids in (("source", encoded.source), ("target", encoded.target)):
        if ids is not None and len(ids) != order.rows:
            raise DataError(
                f"an order of {order.rows} rows does not match {len(ids)} {side} sentences",
                why="all clusters must have the same rows in the same order, each its own side",
                mend="create the order again, or use files from the same release of the text in all clusters",
            )


def _pad_rows(ids: Ids, rows: Any, multiple: int, extra: int = 0) -> Any:
    """The rows of a side as one tensor, padded to the next multiple of the longest, plus `extra`."""
    import tensorflow as tf

    found = tf.gather(tf.RaggedTensor.from_row_lengths(ids.flat, ids.lengths), rows)
    need = tf.maximum(tf.cast(tf.reduce_max(found.row_lengths()), tf.int32) - extra, 1)
    length = (need + multiple - 1) // multiple * multiple
    length = (length if ids.longest is None else tf.minimum(length, ids.longest)) + extra
    filled = found.to_tensor(0)
    return tf.pad(filled, [[0, 0], [0, length - tf.shape(filled)[1]]])
