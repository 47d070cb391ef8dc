"""A structure for gradients: the rows of the largest norms, which are few that hold nearly all.

Tokens that a model knows already have gradients that are nearly zero, so half of the rows of a language model's
gradient hold more than nine tenths of its energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whale_nebula.codec.low_rank import kept_count
from whale_nebula.codec.objects import Dims, Part, Precision, Reduced, Structure
from whale_nebula.codec.packing import Mask
from whale_nebula.codec.precisions import INT1, INT2
from whale_nebula.codec.structures import check_share, matrix, reshape
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.tf.lazy import tf


@dataclass(frozen=True)
class Rows(Structure):
    """The `fraction` of all rows whose norms are largest; the others arrive as zeros. It is meant for gradients.

    >>> from whale_nebula.codec import INT2
    >>> str(Rows(0.5) >> INT2())
    'rows(0.5) >> int2'
    """

    name = "rows"
    fraction: float

    def __post_init__(self) -> None:
        check_share("Rows", "fraction", self.fraction)

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The kept rows."""
        m, n = matrix(dims)
        return ((self._kept_count(m), n),) if self._kept_count(m) < m else None

    def extras(self, dims: Dims) -> tuple[Part, ...]:
        """A bit for each row: whether it is kept."""
        return (Part("uint8", (-(-matrix(dims)[0] // 8),)),)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """The rows, and which they are."""
        from whale_nebula.codec.packing import pack_mask
        m, n = matrix(x.shape)
        rows = reshape(x, (m, n))
        marks = strongest(rows, self._kept_count(m))
        return Reduced((take_rows(rows, marks),), (pack_mask(marks),))

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Zeros but for them."""
        from whale_nebula.codec.packing import unpack_mask
        return reshape(place_rows(numbers[0], unpack_mask(extras[0], matrix(dims)[0])), dims), None

    def _kept_count(self, m: int) -> int:
        return kept_count(m, self.fraction)


def strongest(x: Any, k: int) -> Mask:
    """Which `k` rows of `x` [m, n] have the largest norms. Of equal ones the first; what is not finite is larger still.

    >>> strongest(tf.constant([[3.0, 4.0], [1.0, 1.0], [0.0, 6.0]]), 2).tolist()
    [True, False, True]
    """
    wide = np.asarray(x).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.einsum("ij,ij->i", wide, wide)
    order = np.argsort(-np.where(np.isnan(norms), np.inf, norms), kind="stable")
    marks = np.zeros(len(wide), np.bool_)
    marks[order[:k]] = True
    return marks


def take_rows(x: Any, marks: Mask) -> Any:
    """These rows, in their order.

    >>> take_rows(tf.constant([[1.0], [2.0], [3.0]]), np.array([True, False, True])).numpy().tolist()
    [[1.0], [3.0]]
    """
    return tf.gather(x, np.flatnonzero(marks))


def place_rows(rows: Any, marks: Mask) -> Any:
    """The matrix that is zero but for these rows.

    >>> place_rows(tf.constant([[1.0], [3.0]]), np.array([True, False, True])).numpy().tolist()
    [[1.0], [0.0], [3.0]]
    """
    places = np.flatnonzero(marks)
    if len(places) != rows.shape[0]:
        raise RemoteProtocolError(f"{rows.shape[0]} rows came under a mask that marks {len(places)}")
    return tf.scatter_nd(places[:, None], rows, [len(marks), rows.shape[1]])


def merge_rows(strong: Any, weak: Any, marks: Mask) -> Any:
    """The matrix of which these are the marked rows and the others.

    >>> merge_rows(tf.constant([[1.0], [3.0]]), tf.constant([[2.0]]), np.array([True, False, True])).numpy().tolist()
    [[1.0], [2.0], [3.0]]
    """
    places = np.concatenate([np.flatnonzero(marks), np.flatnonzero(~marks)])
    return tf.gather(tf.concat([strong, weak], axis=0), np.argsort(places))


@dataclass(frozen=True)
class Mixed(Precision):
    """int2 for the `fraction` of all rows whose norms are largest, int1 for the others.

    >>> str(Mixed(0.4)), sum(part.nbytes for part in Mixed(0.5).parts((64, 128), "float32"))
    ('mixed(0.4)', 1688)
    """

    name = "mixed"
    fraction: float

    def __post_init__(self) -> None:
        check_share("Mixed", "fraction", self.fraction)

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """A bit for each row that says which it is, then the strong rows, then the others."""
        strong, weak = self._sizes(dims)
        marks = Part("uint8", (-(-(strong[0] + weak[0]) // 8),))
        return marks, *INT2().parts(strong, dtype), *INT1().parts(weak, dtype)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """Both by their own precision."""
        from whale_nebula.codec.packing import pack_mask
        dims = tuple(int(size) for size in x.shape)
        rows = reshape(x, matrix(dims))
        marks = strongest(rows, self._sizes(dims)[0][0])
        pieces = INT2().encode(take_rows(rows, marks), key), INT1().encode(take_rows(rows, ~marks), key)
        return pack_mask(marks), *pieces[0], *pieces[1]

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Each row in its place."""
        from whale_nebula.codec.packing import unpack_mask
        packed, *encoded = parts
        strong, weak = self._sizes(dims)
        marks = unpack_mask(packed, strong[0] + weak[0])
        if int(marks.sum()) != strong[0]:
            raise RemoteProtocolError(f"{int(marks.sum())} of {len(marks)} rows are marked, where {strong[0]} were due")
        rows = INT2().decode(encoded[:3], strong, dtype), INT1().decode(encoded[3:], weak, dtype)
        return reshape(merge_rows(*rows, marks), dims)

    def _sizes(self, dims: Dims) -> tuple[Dims, Dims]:
        """Of the strong rows, and of the others."""
        rows, columns = matrix(dims)
        strong = kept_count(rows, self.fraction)
        return (strong, columns), (rows - strong, columns)
