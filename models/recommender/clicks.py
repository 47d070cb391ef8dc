"""A generated click log: ids with power-law frequencies, and clicks that depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whale_nebula.errors import OptionError

from .hashing import draw_uniform, id_of

_BLOCK = 4096
_LATENT = 4


@dataclass(frozen=True)
class Clicks:
    """Rows of a log: numbers and ids of each, and whether it was clicked.

    `numbers` is float32 [rows, numbers], `ids` int64 [rows, fields], `clicked` float32 [rows, 1]. `chances` has the
    true probability of a click if the rows are generated.
    """

    numbers: np.ndarray
    ids: np.ndarray
    clicked: np.ndarray
    chances: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs of this package's models."""
        return {"numbers": self.numbers, "ids": self.ids}


def generated_clicks(
    rows: int,
    *,
    fields: int = 8,
    numbers: int = 4,
    vocabulary: int = 100_000,
    exponent: float = 1.05,
    start: int = 0,
    seed: int = 0,
) -> Clicks:
    """Generate rows of an unlimited click log; a row depends only on its place, the seed and the other options.

    The value of rank r of a field has a frequency proportional to r ** -exponent. The logit of a click has a weight for
    each value, products of latent vectors of fields 0 and 1, and the numbers. Weights are drawn by id, so the weight of
    a rare id is useful only if the id recurs.

    Args:
        rows: number of rows.
        fields: number of ids in a row.
        numbers: number of dense numbers in a row.
        vocabulary: number of values of a field.
        exponent: exponent of the power law of frequencies.
        start: place of the first row.
        seed: seed of the log.

    >>> log = generated_clicks(3)
    >>> log.numbers.shape, log.ids.shape, log.clicked.shape
    ((3, 4), (3, 8), (3, 1))
    """
    for name, value, least in (
        ("rows", rows, 1), ("fields", fields, 2), ("numbers", numbers, 1), ("vocabulary", vocabulary, 2),
        ("start", start, 0),
    ):  # fmt: skip
        if not isinstance(value, int) or value < least:
            raise OptionError(f"{name}={value!r} is too small for a click log", mend=f"{name}={least}, or more")
    if exponent <= 0:
        raise OptionError(f"exponent={exponent!r} does not give a power law", mend="exponent=1.05")
    first, last = start // _BLOCK, (start + rows - 1) // _BLOCK
    blocks = [_draw_block(block, fields, numbers, vocabulary, exponent, seed) for block in range(first, last + 1)]
    chosen = slice(start - first * _BLOCK, start - first * _BLOCK + rows)
    joined = [np.concatenate(parts)[chosen] for parts in zip(*blocks, strict=True)]
    return Clicks(*joined)


def _draw_block(
    block: int, fields: int, numbers: int, vocabulary: int, exponent: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    drawn = np.random.default_rng([seed, block])
    dense = drawn.standard_normal((_BLOCK, numbers)).astype(np.float32)
    ranks = _draw_ranks(drawn.random((_BLOCK, fields)), vocabulary, exponent)
    ids = id_of(np.arange(fields)[None, :], ranks)
    chances = 1 / (1 + np.exp(-_logits(dense, ids, seed)))
    clicked = drawn.random(_BLOCK) < chances
    return dense, ids, clicked.astype(np.float32)[:, None], chances.astype(np.float32)[:, None]


def _draw_ranks(uniform: np.ndarray, vocabulary: int, exponent: float) -> np.ndarray:
    """Ranks from 0 by the inverse of the distribution x ** -exponent on [1, vocabulary + 1)."""
    if abs(exponent - 1) < 1e-9:
        drawn = (vocabulary + 1) ** uniform
    else:
        power = 1 - exponent
        drawn = (1 + uniform * ((vocabulary + 1) ** power - 1)) ** (1 / power)
    return np.clip(drawn.astype(np.int64) - 1, 0, vocabulary - 1)


def _logits(dense: np.ndarray, ids: np.ndarray, seed: int) -> np.ndarray:
    """The log-odds of a click, with a mean below 0: fewer than half of the rows are clicked."""
    flat = ids.reshape(-1)
    weights = (2 * draw_uniform(flat, 1, seed + 1) - 1).reshape(ids.shape).sum(1) * np.sqrt(3.0 / ids.shape[1])
    one, other = (2 * draw_uniform(ids[:, field], _LATENT, seed + 2) - 1 for field in (0, 1))
    slopes = np.linspace(1.0, 0.25, dense.shape[1]) / np.sqrt(dense.shape[1])
    return np.asarray(1.5 * weights + 1.5 * (one * other).sum(1) + dense @ slopes - 1.0)
