"""The codec interface: plain data that describes an encoding, and the functions that perform it.

A *precision* uses fewer bits for each number, and is stateless. A *structure* produces fewer numbers, for which a
precision may follow; its state is passed to it, and returned. Built-in codecs and those of users have the same
interface: see `registry.register`. `Codec.compress` and `Codec.restore` compose the two.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from whale_nebula.codec import blocks
from whale_nebula.codec.packing import Dims, Part, join, split
from whale_nebula.errors import OptionError, RemoteProtocolError
from whale_nebula.spec import Spec
from whale_nebula.wire.tensor import Bytes

CALL_SECONDS, CAST_SECONDS = 0.6e-3, 0.15e-3
"""Seconds for each call of an encoder or a decoder, for a tensor of any size; casts are one operation."""

FLOPS = 110e9
"""Floating-point operations a second in products of matrices."""

EIGEN_SECONDS = 0.18e-9
"""Seconds for the eigenvectors of an n x n matrix, by n^3."""

COPY_SECONDS = 0.9e-9
"""Seconds a number, to write the result of a product."""

_GRAM_PASSES = 4  # over the running Gram matrix in a step: decay, addition and the check for NaN


class Cost(NamedTuple):
    """Seconds, at the sending and at the receiving side.

    >>> Cost(0.25, 0.5) + Cost(1, 1)
    Cost(encode=1.25, decode=1.5)
    """

    encode: float = 0.0
    decode: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.encode + self.decode

    def times(self, count: float) -> Cost:
        """The cost of `count` repetitions."""
        return Cost(self.encode * count, self.decode * count)

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.encode + other.encode, self.decode + other.decode)


def gram_seconds(rows: int, n: int) -> float:
    """Seconds per step to update the running Gram matrix [n, n] with rows."""
    return 2.0 * rows * n * n / FLOPS + _GRAM_PASSES * COPY_SECONDS * n * n


STRUCTURE, PRECISION = "structure", "precision"


class Compressed(NamedTuple):
    """Bytes, the structure's new state and its residue; `clamped` counts numbers too large for half precision."""

    data: Bytes
    state: Any = None
    residue: Any = None
    clamped: int = 0


@dataclass(frozen=True)
class Codec:
    """A tensor encoding. `str` returns the text form in plans, which `parse` reads."""

    name: ClassVar[str] = ""
    layer: ClassVar[str] = ""
    lossless: ClassVar[bool] = False
    """Whether it encodes integers without loss, with a size that depends on the values."""
    clamps: ClassVar[bool] = False
    """Whether numbers beyond its range saturate: reports count them."""

    @property
    def members(self) -> tuple[Codec, ...]:
        """The simple codecs that this one combines, in the order of encoding."""
        return (self,)

    @cached_property
    def structure(self) -> Structure | None:
        """Its structure, if it has one."""
        return next((each for each in self.members if isinstance(each, Structure)), None)

    @cached_property
    def precision(self) -> Precision | None:
        """Its precision, if it has one."""
        return next((each for each in self.members if isinstance(each, Precision)), None)

    @property
    def returned(self) -> Codec:
        """The codec of the gradient of a tensor that was sent with this one."""
        return self

    def arrays(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """The arrays of an encoded tensor, in the order in which they are sent.

        >>> from whale_nebula.codec import FP16, TopK
        >>> (TopK(0.5) >> FP16()).arrays((2, 8), "float32")
        (Part(dtype='float16', dims=(2, 4)), Part(dtype='uint8', dims=(2,)))
        """
        structure, precision = self.structure, self.precision or PLAIN
        left = (dims,) if structure is None else structure.numbers(dims) or ()
        encoded = (part for each in left for part in precision.parts(each, dtype))
        return (*encoded, *(() if structure is None else structure.extras(dims)))

    def compress(self, x: Any, state: Any = None, key: Any = None) -> Compressed:
        """Encode, at the sending side: first the structure, then the precision."""
        structure, precision = self.structure, self.precision or PLAIN
        reduced = Reduced((x,)) if structure is None else structure.reduce(state, x)
        arrays = [part for each in reduced.numbers for part in precision.encode(each, key)]
        clamped = sum(map(blocks.count_clamped, reduced.numbers)) if precision.clamps else 0
        return Compressed(join([*arrays, *reduced.extras]), reduced.state, reduced.residue, clamped)

    def restore(self, data: Bytes, dims: Dims, dtype: str, state: Any = None) -> tuple[Any, Any]:
        """Decode, at the receiving side: returns the tensor and the residue."""
        structure, precision = self.structure, self.precision or PLAIN
        left = (dims,) if structure is None else structure.numbers(dims)
        if left is None:
            raise RemoteProtocolError(
                f"received a tensor of sizes {dims} encoded as {self}, which does not make it smaller"
            )
        parts = [precision.parts(each, dtype) for each in left]
        extras = () if structure is None else structure.extras(dims)
        arrays = iter(split(data, [*itertools.chain(*parts), *extras]))
        wide = structure is not None and structure.widens and Spec(dtype, ()).nbytes() < 4
        numbers = [
            precision.decode(list(itertools.islice(arrays, len(each))), sizes, "float32" if wide else dtype)
            for each, sizes in zip(parts, left, strict=True)
        ]
        if structure is None:
            return numbers[0], None
        x, residue = structure.expand(state, numbers, list(arrays), dims)
        return blocks.restore(x, dtype), residue

    def __rshift__(self, other: Codec) -> Codec:
        """Compose: first this, then `other`: a structure, then a precision."""
        if not isinstance(other, Codec):
            raise OptionError(
                f"{other!r} is not a codec",
                why=f"'>>' combines two codecs; the left one is {self}",
                mend=f"{self!r} >> FP16()",
            )
        return Chain(self.members + other.members)

    def __str__(self) -> str:
        pairs = [(getattr(self, field.name), field.default) for field in fields(self)]
        shown = [_format_value(value) for value, default in pairs if value != default]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def _format_value(value: object) -> str:
    """Format an argument: numbers as Python writes them (numpy's too), words without quotes."""
    return repr(float(value)) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Chain(Codec):
    """A structure followed by a precision; `>>` creates it."""

    members: tuple[Codec, ...] = ()

    def __post_init__(self) -> None:
        if [part.layer for part in self.members] != [STRUCTURE, PRECISION]:
            raise _bad_chain(self.members)

    @property
    def returned(self) -> Codec:
        """The structure's returned codec, with the same precision."""
        structure, precision = self.members
        return self if structure.returned is structure else structure.returned >> precision

    def __str__(self) -> str:
        return " >> ".join(str(part) for part in self.members)

    def __repr__(self) -> str:
        return " >> ".join(repr(part) for part in self.members)


def _bad_chain(members: tuple[Codec, ...]) -> OptionError:
    by_layer = {layer: [part for part in members if part.layer == layer] for layer in (STRUCTURE, PRECISION)}
    twice = next((found for found in by_layer.values() if len(found) > 1), None)
    if twice:
        mend = f"keep one of {' and '.join(map(repr, twice))}"
    else:
        mend = " >> ".join(repr(part) for found in by_layer.values() for part in found)
    return OptionError(
        f"{' >> '.join(map(str, members))} is not a codec",
        why="a codec is at most one structure (svd, rank, ..., axes), then one precision (fp16, int8, ..., coded)",
        mend=mend,
    )


class Precision(Codec, ABC):
    """A reduced precision of numbers.

    `encode` and `decode` are TensorFlow functions; `parts` describes the result of `encode` from the sizes only.
    """

    layer = PRECISION
    call: ClassVar[float] = CALL_SECONDS
    """Seconds for each call of `encode` and of `decode`, for a tensor of any size."""
    nearest: ClassVar[Cost | None] = None
    """Cost of a number with rounding to the nearest, in nanoseconds; None if unknown."""
    by_chance: ClassVar[Cost | None] = None
    """Cost of a number of a gradient with stochastic rounding; None if it is the same."""

    def cost(self, count: int, *, back: bool = False) -> Cost | None:
        """Cost to encode and decode `count` numbers, or those of a gradient (`back`); None if unknown."""
        each = (self.by_chance or self.nearest) if back else self.nearest
        return None if each is None else each.times(1e-9 * count) + Cost(self.call, self.call)

    @abstractmethod
    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """The arrays into which `encode` converts a tensor of these sizes."""

    @abstractmethod
    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """The encoded arrays. With a `key` (two uint32) rounding is stochastic, and so unbiased, as gradients require.
        The same key gives bit-identical results.
        """

    @abstractmethod
    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """The decoded tensor."""


@dataclass(frozen=True)
class Plain(Precision):
    """The identity: numbers without loss, after a structure without its own precision."""

    name = "none"

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """The tensor itself."""
        return (Part(dtype, dims),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """The tensor unchanged."""
        return (x,)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """The tensor unchanged."""
        return blocks.restore(parts[0], dtype)


PLAIN = Plain()


class Reduced(NamedTuple):
    """The result of a structure: `numbers`, which a precision may compress, and `extras`, which are sent unchanged.
    `residue` stays on this side, for the gradient of the same micro-batch. `state` is the new state.
    """

    numbers: tuple[Any, ...]
    extras: tuple[Any, ...] = ()
    residue: Any = None
    state: Any = None


class Structure(Codec, ABC):
    """Encoding with fewer numbers. A tensor is viewed as a matrix: its last axis as columns, all others as rows."""

    layer = STRUCTURE
    follows: ClassVar[bool] = False
    """Whether it is the structure of a gradient whose tensor was encoded by a structure that returns."""
    returns: ClassVar[bool] = False
    """Whether the gradient is sent in the same form: in the same subspace, at the same positions."""
    keeps: ClassVar[str] = "basis"
    """The name of its state, which is sent at intervals."""
    shrinks: ClassVar[bool] = True
    """Whether it produces fewer numbers; otherwise it only helps the precision that follows, and has no use alone."""
    widens: ClassVar[bool] = False
    """Whether its result for half precision is float32."""
    careful: ClassVar[bool] = False
    """Whether a NaN or an infinity passes without entering its state, so that no check is needed."""

    @property
    def returned(self) -> Codec:
        """The codec of a gradient in the same form, if it returns."""
        return Returned(self) if self.returns else self

    def remembers(self, dims: Dims) -> bool:
        """Whether a NaN would persist in the state for tensors of these sizes."""
        return not self.careful and (self.init(dims) is not None or bool(self.news(dims)))

    def cost(self, m: int, n: int) -> Cost | None:
        """Cost for a matrix of `m` rows and `n` columns, without calls; None if unknown."""
        return None

    def renewal_seconds(self, m: int, n: int) -> float:
        """Seconds per step in which the sender updates its state."""
        return 0.0

    @abstractmethod
    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The sizes of the reduced arrays; None if they would not have fewer numbers than the tensor."""

    def extras(self, dims: Dims) -> tuple[Part, ...]:
        """Arrays that are sent in addition with every micro-batch."""
        return ()

    def init(self, dims: Dims) -> Any:
        """The initial state, on either side; None for a stateless structure."""
        return None

    def fits(self, state: Any, dims: Dims) -> bool:
        """Whether the state belongs to a tensor of these sizes; otherwise it is initialised again."""
        return True

    def news(self, dims: Dims) -> tuple[Part, ...]:
        """The arrays that `refresh` may send."""
        return ()

    def refresh(self, state: Any, x: Any, step: int) -> tuple[Any, tuple[Any, ...] | None]:
        """Update the encoder's state, with the first micro-batch of every training step; returns the new state, and the
        arrays that the decoder needs, or None.
        """
        return state, None

    def learn(self, state: Any, news: Sequence[Any], dims: Dims) -> Any:
        """Update the decoder's state by arrays of `refresh`."""
        return state

    @abstractmethod
    def reduce(self, state: Any, x: Any) -> Reduced:
        """Reduce a tensor, on the encoding side."""

    @abstractmethod
    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Restore a tensor, on the decoding side; returns the tensor and the residue."""

    def reduce_back(self, residue: Any, gradient: Any) -> tuple[Any, ...]:
        """Reduce the gradient, on the side that computes it. Only for structures whose gradient returns in the same
        form.
        """
        raise self._no_return_error

    def expand_back(self, residue: Any, numbers: Sequence[Any], dims: Dims) -> Any:
        """Restore the gradient, on the other side."""
        raise self._no_return_error

    @property
    def _no_return_error(self) -> OptionError:
        why = "its class does not define how a gradient is reduced"
        mend = "returns = False, or def reduce_back(self, residue, gradient), expand_back(self, residue, numbers, dims)"
        return OptionError(f"a gradient cannot be sent as {self}", why=why, mend=mend)


@dataclass(frozen=True)
class Returned(Structure):
    """The gradient's structure if the tensor's structure applies to its gradient too: the state is the tensor's
    residue.
    """

    forward: Structure
    follows = True

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The same sizes as for the tensor."""
        return self.forward.numbers(dims)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """Reduce the gradient like the tensor."""
        return Reduced(self.forward.reduce_back(state, x))

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Restore the gradient."""
        return self.forward.expand_back(state, numbers, dims), None

    def __str__(self) -> str:
        return str(self.forward)
