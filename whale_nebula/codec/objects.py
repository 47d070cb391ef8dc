"""Codecs as data: what to do to a tensor, not how."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from whale_nebula.errors import OptionError
from whale_nebula.suggest import did_you_mean

STRUCTURE, PRECISION = "structure", "precision"
BASES = ("shared", "learned")


@dataclass(frozen=True)
class Codec:
    """A way to make a tensor small. `str` gives the form in which plans print it and `parse` reads it."""

    name: ClassVar[str] = ""
    layer: ClassVar[str] = ""

    @property
    def parts(self) -> tuple[Codec, ...]:
        """The simple codecs that this one is made of, in the order in which they encode."""
        return (self,)

    def __rshift__(self, other: Codec) -> Codec:
        """First this, then `other`: a structure, then a precision."""
        if not isinstance(other, Codec):
            raise OptionError(
                f"{other!r} is no codec", why=f"'>>' joins two, here after {self}", mend=f"{self!r} >> FP16()"
            )
        return Chain(self.parts + other.parts)

    def __str__(self) -> str:
        pairs = [(getattr(self, field.name), field.default) for field in fields(self)]
        shown = [_written(value) for value, default in pairs if value != default]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def _written(value: object) -> str:
    """Numbers as Python writes them (numpy's too), words bare."""
    return repr(float(value)) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Chain(Codec):
    """A structure and then a precision; `>>` makes it."""

    members: tuple[Codec, ...]

    def __post_init__(self) -> None:
        if [part.layer for part in self.members] != [STRUCTURE, PRECISION]:
            raise _bad_chain(self.members)

    @property
    def parts(self) -> tuple[Codec, ...]:
        """The structure and the precision."""
        return self.members

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
        f"{' >> '.join(map(str, members))} is no codec",
        why="a codec is at most one structure (svd, rank, topk), then one precision (fp16, bf16, int8, int4)",
        mend=mend,
    )


class _Precision(Codec):
    layer = PRECISION


class _Structure(Codec):
    layer = STRUCTURE


@dataclass(frozen=True)
class FP16(_Precision):
    """IEEE half precision; too large values are clamped.

    >>> str(FP16())
    'fp16'
    """

    name = "fp16"


@dataclass(frozen=True)
class BF16(_Precision):
    """The upper half of a float32: its range, and 8 bits of precision."""

    name = "bf16"


@dataclass(frozen=True)
class INT8(_Precision):
    """Eight bits a number, block by block."""

    name = "int8"


@dataclass(frozen=True)
class INT4(_Precision):
    """Four bits a number, block by block."""

    name = "int4"


@dataclass(frozen=True)
class SVD(_Structure):
    """The best low rank whose factors take at most `ratio` of the tensor's numbers.

    >>> str(SVD(0.6) >> INT8())
    'svd(0.6) >> int8'
    """

    name = "svd"
    ratio: float

    def __post_init__(self) -> None:
        check_share("SVD", "ratio", self.ratio)


@dataclass(frozen=True)
class Rank(_Structure):
    """`r` numbers for each row, on a basis that both sides hold ("shared") or that is trained ("learned").

    >>> str(Rank(96)), str(Rank(96, basis="learned"))
    ('rank(96)', 'rank(96, learned)')
    """

    name = "rank"
    r: int
    basis: str = "shared"

    def __post_init__(self) -> None:
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise OptionError(f"Rank({self.r!r}) is no rank", why="a rank counts columns", mend="Rank(96)")
        if self.basis not in BASES:
            raise OptionError(f"no basis is called {self.basis!r}", mend=did_you_mean(self.basis, BASES))


@dataclass(frozen=True)
class TopK(_Structure):
    """The largest `fraction` of each row."""

    name = "topk"
    fraction: float

    def __post_init__(self) -> None:
        check_share("TopK", "fraction", self.fraction)


def check_share(codec: str, option: str, value: object) -> None:
    """Refuse what is not a share of something: above 0, at most 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:  # type: ignore[operator]
        raise OptionError(
            f"{codec}({value!r}) cannot be",
            why=f"{option} is a share of the tensor: above 0 and at most 1",
            mend=f"{codec}(0.6)",
        )
