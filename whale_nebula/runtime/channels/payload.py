"""What stands before the bytes of a codec, and what was done to them besides: rows left out, news, zstd."""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

import numpy as np

from whale_nebula.codec.packing import Mask, Zstd, pack_mask, shrink, unpack_mask, unshrink
from whale_nebula.codec.sizes import PREFIX
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

_SIZE = 4  # bytes that say how many there were before zstd


class Has(IntFlag):
    """What a payload has, one bit each."""

    ROWS = 1
    NEWS = 2
    ZSTD = 4
    CHANGES = 8


_KNOWN = int(Has.ROWS | Has.NEWS | Has.ZSTD | Has.CHANGES)


class Payload(NamedTuple):
    """The bytes of a codec with what belongs to them: the mask of the rows, and news of the state.

    `changes` says that they are those of differences of samples.
    """

    data: Bytes
    rows: Mask | None = None
    news: Bytes | None = None
    changes: bool = False


def written(payload: Payload, *, zstd: bool) -> Bytes:
    """As it crosses."""
    has = Has.ROWS * (payload.rows is not None) | Has.NEWS * (payload.news is not None) | Has.CHANGES * payload.changes
    body = [] if payload.rows is None else [pack_mask(payload.rows)]
    body += [] if payload.news is None else [payload.news]
    whole = np.concatenate([*body, payload.data])
    small = shrink(whole, Zstd()) if zstd else None
    if small is not None and _SIZE + small.size < whole.size:
        whole = np.concatenate([np.array([whole.size], "<u4").view(np.uint8), small])
        has |= Has.ZSTD
    return np.concatenate([np.array([has, 0, 0, 0], np.uint8), whole])


def read(data: Bytes, rows: int, news: int, most: int, *, zstd: bool = True) -> Payload:
    """What crossed, for a tensor of so many rows and so many bytes of news if there are any; `most` bounds the rest."""
    if data.size < PREFIX or int(data[0]) & ~_KNOWN or data[1:PREFIX].any():
        raise RemoteProtocolError("an encoded tensor begins with bytes that mean nothing")
    has, body = Has(int(data[0])), data[PREFIX:]
    if (Has.ZSTD in has and not zstd) or (Has.NEWS in has and not news):
        raise RemoteProtocolError("an encoded tensor has what this boundary never sends")
    if Has.ZSTD in has:
        body = _opened(body, most + rows // 8 + 1 + news)
    mask = None
    if Has.ROWS in has:
        mask, body = unpack_mask(body[: -(-rows // 8)], rows), body[-(-rows // 8) :]
    told = None
    if Has.NEWS in has:
        told, body = body[:news], body[news:]
    return Payload(body, mask, told, Has.CHANGES in has)


def _opened(body: Bytes, most: int) -> Bytes:
    size = int(body[:_SIZE].view("<u4")[0]) if body.size >= _SIZE else most + 1
    if size > most:
        raise RemoteProtocolError(f"{size} bytes are said to be packed where there are at most {most}")
    return unshrink(body[_SIZE:], size, Zstd())
