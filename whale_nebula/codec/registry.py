"""The codecs by name, and which of them have an engine."""

from __future__ import annotations

from whale_nebula.codec.objects import BF16, FP16, INT4, INT8, SVD, Codec, Rank, TopK
from whale_nebula.errors import NotYetError

CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (SVD, Rank, TopK, FP16, BF16, INT8, INT4)}
_BUILT = (FP16, BF16)


def is_built(codec: Codec) -> bool:
    """Whether this codec can run.

    >>> is_built(FP16()), is_built(SVD(0.6) >> FP16())
    (True, False)
    """
    return all(isinstance(part, _BUILT) for part in codec.parts)


def require_built(codec: Codec, *, where: str = "") -> Codec:
    """The codec itself, if it can run; it never runs as another one.

    >>> require_built(FP16())
    FP16()
    """
    if not is_built(codec):
        raise NotYetError(
            f"codec {str(codec)!r}",
            where=where,
            why="of the codecs only fp16 and bf16 have an engine so far",
            mend="nb.compress(fp16=True) or nb.compress(bf16=True)",
        )
    return codec
