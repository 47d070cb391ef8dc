"""The built-in precisions: codecs that use fewer bits per number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from whale_nebula.codec.objects import Codec, Dims, Part, Precision


@dataclass(frozen=True)
class FP16(Precision):
    """IEEE half precision; too large values are clamped.

    >>> str(FP16())
    'fp16'
    """

    name = "fp16"
    clamps = casts = True

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """Two bytes a number."""
        return (Part("float16", dims),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """To the nearest."""
        from whale_nebula.codec.blocks import to_fp16

        return (to_fp16(x),)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Back to its own type."""
        from whale_nebula.codec.blocks import restore

        return restore(parts[0], dtype)


@dataclass(frozen=True)
class BF16(Precision):
    """The upper half of a float32: its range, and 8 bits of precision."""

    name = "bf16"
    casts = True

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """Two bytes a number."""
        return (Part("bfloat16", dims),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """To the nearest; by chance with a key."""
        from whale_nebula.codec.blocks import to_bf16

        return (to_bf16(x, key),)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Back to its own type."""
        from whale_nebula.codec.blocks import restore

        return restore(parts[0], dtype)


class Integers(Precision):
    """Integers, and a scale for each block of neighbours: differences of these both sides can add up alike."""

    bits: int
    block: int

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """The integers, and the scales."""
        from whale_nebula.codec.blocks import parts

        return parts(dims, self.bits, self.block)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """To the nearest of the levels, or by chance to one of the two nearest."""
        from whale_nebula.codec.blocks import quantise

        return tuple(quantise(x, bits=self.bits, block=self.block, key=key))

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Integers times scales."""
        from whale_nebula.codec.blocks import dequantise

        return dequantise(*parts, dims=dims, bits=self.bits, block=self.block, dtype=dtype)


@dataclass(frozen=True)
class INT8(Integers):
    """Eight bits a number, block by block."""

    name = "int8"
    bits = 8
    block = 64


@dataclass(frozen=True)
class INT4(Integers):
    """Four bits a number, block by block."""

    name = "int4"
    bits = 4
    block = 32


def is_integers(codec: Codec | None) -> TypeGuard[Integers]:
    """Whether a codec makes whole numbers times scales."""
    return isinstance(codec, Integers)


@dataclass(frozen=True)
class Bits(Codec):
    """Whole numbers and truth values in as many bits as they need: nothing is lost. How many, the values decide.

    It is never chosen: it is how such tensors of a compressed boundary cross.
    """

    name = "bits"
    layer = "integers"
    lossless = True


@dataclass(frozen=True)
class Plain(Precision):
    """Numbers as they are: what follows a structure that stands alone."""

    name = "none"

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """The tensor itself."""
        return (Part(dtype, dims),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """As it is."""
        return (x,)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """As it is."""
        return _cast(parts[0], dtype)


def _cast(tensor: Any, dtype: str) -> Any:
    from whale_nebula.codec.blocks import restore

    return restore(tensor, dtype)
