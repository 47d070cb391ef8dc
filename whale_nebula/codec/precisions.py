"""The built-in precisions: codecs that use fewer bits per number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from whale_nebula.codec import blocks, packing
from whale_nebula.codec.objects import CAST_SECONDS, Codec, Compressed, Cost, Precision
from whale_nebula.codec.packing import Dims, Part
from whale_nebula.errors import OptionError
from whale_nebula.tf import tf
from whale_nebula.wire.tensor import Bytes


class Cast(Precision):
    """A cast to two bytes a number."""

    dtype: ClassVar[str]
    call = CAST_SECONDS

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """Two bytes a number."""
        return (Part(self.dtype, dims),)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Cast back to the tensor's type."""
        return blocks.restore(parts[0], dtype)


@dataclass(frozen=True)
class FP16(Cast):
    """IEEE half precision; too large values are clamped.

    >>> str(FP16())
    'fp16'
    """

    name, dtype = "fp16", "float16"
    nearest = Cost(1.1, 1.1)
    clamps = True

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """Round to nearest."""
        return (blocks.to_fp16(x),)


@dataclass(frozen=True)
class BF16(Cast):
    """The upper half of a float32: its range, and 8 bits of precision."""

    name, dtype = "bf16", "bfloat16"
    nearest = Cost(0.9, 1.1)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """Round to nearest; stochastically with a key."""
        return (blocks.to_bf16(x, key),)


class Integers(Precision):
    """Integers of 8 or 4 bits with a scale for each block of neighbours. Both sides can add the differences of samples
    bit-identically.
    """

    bits: ClassVar[int]
    block: ClassVar[int]

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse widths that are not packed: one or two numbers a byte."""
        super().__init_subclass__(**options)
        if cls.bits not in (4, 8):
            raise OptionError(
                f"{cls.__name__}.bits is {cls.bits}",
                why="Integers packs one or two numbers into a byte, so bits must be 8 or 4",
                mend=f"class {cls.__name__}(nb.codec.Precision): ..., with its own parts, encode and decode",
            )

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """The integers, and the scales."""
        return blocks.parts(dims, self.bits, self.block)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """Round to the nearest level; stochastically with a key."""
        return tuple(blocks.quantise(x, bits=self.bits, block=self.block, key=key))

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Integers times scales."""
        return blocks.dequantise(*parts, dims=dims, bits=self.bits, block=self.block, dtype=dtype)


@dataclass(frozen=True)
class INT8(Integers):
    """Eight bits a number, block by block."""

    name, bits, block = "int8", 8, 64
    nearest, by_chance = Cost(2.3, 1.6), Cost(3.1, 1.7)


@dataclass(frozen=True)
class INT4(Integers):
    """Four bits a number, block by block."""

    name, bits, block = "int4", 4, 32
    nearest, by_chance = Cost(3.3, 2.3), Cost(4.1, 2.3)


def is_integers(codec: Codec | None) -> TypeGuard[Integers]:
    """Whether a codec encodes integers times scales."""
    return isinstance(codec, Integers)


@dataclass(frozen=True)
class Bits(Codec):
    """Integers and bools in as many bits as their values need, without loss.

    It is not selectable: all such tensors of a compressed boundary use it.
    """

    name = "bits"
    layer = "integers"
    lossless = True

    def compress(self, x: Any, state: Any = None, key: Any = None) -> Compressed:
        """Pack the array."""
        return Compressed(packing.pack(x.numpy()))

    def restore(self, data: Bytes, dims: Dims, dtype: str, state: Any = None) -> tuple[Any, Any]:
        """Unpack the array."""
        return tf.convert_to_tensor(packing.unpack(data, dtype, dims)), None
