"""The built-in structures: codecs that send fewer numbers. A tensor is viewed as a matrix with its last axis as
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whale_nebula.codec import low_rank, sparse
from whale_nebula.codec.blocks import rows_and_columns
from whale_nebula.codec.low_rank import kept_count, rank_of
from whale_nebula.codec.objects import COPY, EIGEN, SPEED, Cost, Reduced, Structure, gram_seconds
from whale_nebula.codec.packing import Dims, Part
from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.tf import tf

BASES = ("shared", "learned", "svd")
RENEWED = 50  # steps, after which a shared basis is renewed
LOOKED_AT = 256  # rows of a step that enter the running Gram matrix
_ITERATIONS, _SVD = 2, 20  # steps of subspace iteration in float64; a singular value decomposition, by eigenvectors
_TOP = Cost(8.8e-9, 7.3e-9)  # to find the largest numbers of each row, and to put them back


class Shared(NamedTuple):
    """A basis [n, r] in float16, and on the encoding side the running Gram matrix of sent tensors."""

    q: Any = None
    gram: Any = None


@dataclass(frozen=True)
class SVD(Structure):
    """Truncated SVD: the best low-rank approximation whose factors have at most `ratio` of the tensor's numbers.

    >>> from whale_nebula.codec import INT8
    >>> str(SVD(0.6) >> INT8())
    'svd(0.6) >> int8'
    """

    name = "svd"
    ratio: float

    def __post_init__(self) -> None:
        check_share("SVD", "ratio", self.ratio)

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The sizes of the two thin factors."""
        m, n = rows_and_columns(dims)
        k = rank_of(m, n, self.ratio)
        return ((m, k), (n, k)) if k else None

    def cost(self, m: int, n: int) -> Cost:
        """The Gram matrix of the shorter side (it is symmetric: half a product), its eigenvectors, and a product."""
        short = min(m, n)
        product = 2.0 * m * n * rank_of(m, n, self.ratio) / SPEED
        return Cost(m * n * short / SPEED + EIGEN * short**3 + product, product + COPY * m * n)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """Compute the two factors."""
        m, n = rows_and_columns(x.shape)
        return Reduced(tuple(low_rank.factor(tf.reshape(x, (m, n)), rank_of(m, n, self.ratio))))

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Multiply the factors."""
        return tf.reshape(low_rank.restore(*numbers), dims), None


@dataclass(frozen=True)
class Rank(Structure):
    """Projection of each row on `r` directions: a basis that both sides hold ("shared"), or one that is trained as a
    part of the model from a random start ("learned") or from the singular vectors of the layer whose output is sent
    ("svd").

    With a learned basis `norm` adds a LayerNorm before it.

    >>> str(Rank(96)), str(Rank(96, basis="svd"))
    ('rank(96)', 'rank(96, svd)')
    """

    name = "rank"
    returns = True
    r: int
    basis: str = "shared"
    norm: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise OptionError(f"Rank({self.r!r}) is no rank", why="a rank counts columns", mend="Rank(96)")
        if self.basis not in BASES:
            raise OptionError(f"no basis is called {self.basis!r}", mend=did_you_mean(self.basis, BASES))
        if self.norm and self.basis != "learned":
            why = "a norm before the basis is trained with it, and a kernel's singular vectors are of rows as they are"
            raise OptionError(f"norm=True with basis={self.basis!r}", why=why, mend='basis="learned"')

    @property
    def trained(self) -> bool:
        """Whether the basis is a trained part of the model."""
        return self.basis != "shared"

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The sizes of the coordinates, row by row."""
        return ((*dims[:-1], self.r),) if self.r < dims[-1] else None

    def cost(self, m: int, n: int) -> Cost:
        """A product with the basis each way."""
        product = 2.0 * m * n * self.r / SPEED
        return Cost(product + COPY * m * self.r, product + COPY * m * n)

    def renewal_seconds(self, m: int, n: int) -> float:
        """Seconds a step of sampling rows, and of renewing the basis every `RENEWED` steps."""
        made = _ITERATIONS * (2 * n * n * self.r + 6 * n * self.r**2) / (SPEED / 2) + _SVD * EIGEN * self.r**3
        return gram_seconds(min(m, LOOKED_AT), n) + made / RENEWED

    def init(self, dims: Dims) -> Shared:
        """The initial state, without a basis."""
        return Shared()

    def fits(self, state: Shared, dims: Dims) -> bool:
        """Whether the basis has the tensor's number of columns, and the rank's number of directions."""
        return state.q is None or tuple(state.q.shape) == (dims[-1], self.r)

    def news(self, dims: Dims) -> tuple[Part, ...]:
        """The array of the basis."""
        return (Part("float16", (dims[-1], self.r)),)

    def refresh(self, state: Shared, x: Any, step: int) -> tuple[Shared, tuple[Any, ...] | None]:
        """Update the statistics; the basis is sent with the first step and every fiftieth step."""
        rows = tf.reshape(x, rows_and_columns(x.shape))
        if state.q is None:
            gram = low_rank.gram_of(rows)
            made = Shared(low_rank.first(gram.numpy(), self.r), gram)
            return made, (made.q,)
        gram = low_rank.running(state.gram, low_rank.gram_of(rows, rows=LOOKED_AT))
        if step == 0 or step % RENEWED:
            return Shared(state.q, gram), None
        made = Shared(low_rank.renew_basis(gram.numpy(), state.q), gram)
        return made, (made.q,)

    def learn(self, state: Shared, news: Sequence[Any], dims: Dims) -> Shared:
        """Adopt the received basis."""
        return Shared(news[0])

    def reduce(self, state: Shared, x: Any) -> Reduced:
        """Coordinates on the basis."""
        return Reduced((low_rank.project(x, state.q),), residue=state.q)

    def expand(self, state: Shared, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """The rows that have these coordinates."""
        return low_rank.expand(numbers[0], state.q), state.q

    def reduce_back(self, residue: Any, gradient: Any) -> tuple[Any, ...]:
        """Project the gradient on the basis."""
        return (low_rank.project(gradient, residue),)

    def expand_back(self, residue: Any, numbers: Sequence[Any], dims: Dims) -> Any:
        """Restore the gradient by the transposed projection."""
        return low_rank.expand(numbers[0], residue)


@dataclass(frozen=True)
class TopK(Structure):
    """Top-k sparsification: the largest `fraction` of each row's entries by magnitude."""

    name = "topk"
    returns = True
    fraction: float

    def __post_init__(self) -> None:
        check_share("TopK", "fraction", self.fraction)

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The kept entries of each row."""
        m, n = rows_and_columns(dims)
        return ((m, self._kept_count(n)),) if self._kept_count(n) < n else None

    def extras(self, dims: Dims) -> tuple[Part, ...]:
        """The positions of the kept entries."""
        m, n = rows_and_columns(dims)
        return (Part("uint8", (sparse.packed_bytes(m, n, self._kept_count(n)),)),)

    def cost(self, m: int, n: int) -> Cost:
        """The cost of a selection in each row."""
        return _TOP.times(m * n)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """Select the largest entries of each row, with their positions."""
        m, n = rows_and_columns(x.shape)
        rows = tf.reshape(x, (m, n))
        places = sparse.largest(rows, self._kept_count(n))
        return Reduced((sparse.gather(rows, places),), (sparse.pack(places, n),), places)

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Scatter the entries; all others are zero."""
        m, n = rows_and_columns(dims)
        places = sparse.unpack(extras[0], m, n, self._kept_count(n))
        return self.expand_back(places, numbers, dims), places

    def reduce_back(self, residue: Any, gradient: Any) -> tuple[Any, ...]:
        """Gather the gradient at the same positions."""
        return (sparse.gather(tf.reshape(gradient, rows_and_columns(gradient.shape)), residue),)

    def expand_back(self, residue: Any, numbers: Sequence[Any], dims: Dims) -> Any:
        """Scatter the gradient; all other entries are zero."""
        return tf.reshape(sparse.scatter(numbers[0], residue, dims[-1]), dims)

    def _kept_count(self, n: int) -> int:
        return kept_count(n, self.fraction)


def check_share(codec: str, option: str, value: object) -> None:
    """Refuse a fraction that is not above 0 and at most 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:  # type: ignore[operator]
        raise OptionError(
            f"{codec}({value!r}) cannot be",
            why=f"{option} is a share of the tensor: above 0 and at most 1",
            mend=f"{codec}(0.6)",
        )
