"""Mixtures of rows for a step: languages by temperature, families distributed over generators.

A language with little text is drawn more often than its share of the text: with shares p_i of the text, rows are drawn
by p_i^(1/T). T = 1 keeps the shares, and a large T makes them equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import DataError, OptionError

from ..text import Tokenizer

Ints = npt.NDArray[np.int32]


def shares_by_temperature(counts: Mapping[str, int], temperature: float) -> dict[str, float]:
    """The share of each source in what is drawn, from its number of rows and the temperature.

    >>> shares_by_temperature({"en": 900, "cs": 100}, 2.0)
    {'en': 0.75, 'cs': 0.25}
    """
    if temperature <= 0 or not counts or min(counts.values()) < 1:
        raise OptionError(
            f"cannot compute shares of {dict(counts)} with temperature={temperature!r}",
            why="each family needs text, and the temperature must be positive",
            mend="temperature=2.0",
        )
    total = sum(counts.values())
    powers = {name: (count / total) ** (1 / temperature) for name, count in counts.items()}
    return {name: float(power / sum(powers.values())) for name, power in powers.items()}


def deal_rows(batch: int, shares: Mapping[str, float]) -> dict[str, int]:
    """The number of a batch's rows for each source: integers of at least one, as near to the shares as possible.

    >>> deal_rows(10, {"germanic": 0.72, "romance": 0.28})
    {'germanic': 7, 'romance': 3}
    """
    if batch < len(shares):
        raise OptionError(
            f"a batch of {batch} rows is too small for {len(shares)} families", mend=f"batch={len(shares)}, or more"
        )
    exact = {name: max(1.0, batch * share) for name, share in shares.items()}
    found = {name: int(each) for name, each in exact.items()}
    while sum(found.values()) > batch:
        found[max(found, key=lambda name: found[name] - exact[name] if found[name] > 1 else -np.inf)] -= 1
    while sum(found.values()) < batch:
        found[max(found, key=lambda name: exact[name] - found[name])] += 1
    return found


@dataclass(frozen=True)
class Mixture:
    """The text of one generator: sources of rows (count, length), drawn by their shares in every step.

    `batch(step)` depends only on the seed, `first` and the step. The numbers of rows are unique in a training run: of
    the `whole` rows of each step, by default `rows`, those from `first` on belong to this mixture.
    """

    sources: Mapping[str, Ints]
    shares: Mapping[str, float]
    rows: int
    first: int = 0
    whole: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        lengths = {name: each.shape[1] for name, each in self.sources.items()}
        if not lengths or len(set(lengths.values())) > 1 or set(lengths) != set(self.shares):
            raise DataError(
                f"sources of lengths {lengths} do not match the shares of {', '.join(self.shares)}",
                why="all sources of a mixture need the same length, and a share each",
                mend="encode all sources with the same length",
            )

    def batch(self, step: int) -> tuple[Ints, Ints]:
        """Rows of tokens (rows, length) and their numbers (rows,)."""
        draw = np.random.default_rng((self.seed, self.first, step))
        names = list(self.sources)
        picked = draw.choice(len(names), self.rows, p=[self.shares[name] for name in names])
        sources = [self.sources[names[which]] for which in picked]
        tokens = np.stack([each[draw.integers(len(each))] for each in sources])
        whole = self.whole or self.rows
        return tokens, (step * whole + self.first + np.arange(self.rows)).astype(np.int32)


def mix_families(
    families: Mapping[str, Mapping[str, Ints]],
    *,
    batch: int,
    pairs: Mapping[str, Mapping[str, Ints]] | None = None,
    of_pairs: float = 0.5,
    temperature: float = 2.0,
    seed: int = 0,
) -> dict[str, Mixture]:
    """Create a mixture for each family of languages.

    The batch is divided among families, and a family's rows among its languages, by temperature. A generator has the
    same number of rows in every step.

    Args:
        families: for each family the rows of its languages.
        batch: rows in a step, of all families together.
        pairs: for each family the rows of its pairs.
        of_pairs: share of a family's rows that is drawn from its pairs.
        temperature: 1 draws by size; a large value draws all equally.
        seed: seed of the draws.
    """
    if not 0 <= of_pairs <= 1:
        raise OptionError(f"of_pairs={of_pairs!r} is not a share of the rows", mend="of_pairs=0.5")
    if unknown := sorted(set(pairs or {}) - set(families)):
        raise OptionError(
            f"pairs of {', '.join(unknown)}, which are not families",
            why=f"the families are {', '.join(families)}",
            mend="use the same names for families and for their pairs",
        )
    sizes = {name: sum(map(len, sources.values())) for name, sources in families.items()}
    rows = deal_rows(batch, shares_by_temperature(sizes, temperature))
    found, first = {}, 0
    for name, sources in families.items():
        own_pairs = (pairs or {}).get(name, {})
        share = of_pairs if own_pairs else 0.0
        shares = _scale_shares(sources, temperature, 1 - share) | _scale_shares(own_pairs, temperature, share)
        found[name] = Mixture({**sources, **own_pairs}, shares, rows[name], first, batch, seed)
        first += rows[name]
    return found


def _scale_shares(sources: Mapping[str, Sequence[Any] | Ints], temperature: float, whole: float) -> dict[str, float]:
    if not sources:
        return {}
    shares = shares_by_temperature({name: len(rows) for name, rows in sources.items()}, temperature)
    return {name: whole * share for name, share in shares.items()}


def encode_sentences(words: Tokenizer, lines: Sequence[str], length: int) -> Ints:
    """`[CLS] a [SEP]`, padded to `length`; longer sentences are truncated."""
    return _pad_rows([_truncate(row, length, words) for row in _tokenize(words, lines)], length, words.pad)


def encode_pairs_in_rows(words: Tokenizer, first: Sequence[str], second: Sequence[str], length: int) -> Ints:
    """`[CLS] a [SEP] b [SEP]`, padded to `length`; in longer pairs both halves are truncated."""
    if len(first) != len(second):
        raise DataError(
            f"{len(first)} and {len(second)} sentences do not form pairs",
            why="row n of one language is the translation of row n of the other",
            mend="pass both languages of the same rows",
        )
    room, rows = length + 1, []  # the second half begins with the [SEP] that ends the first
    for one, other in zip(_tokenize(words, first), _tokenize(words, second), strict=True):
        half = _truncate(one, max(room // 2, room - len(other)), words)
        rows.append([*half, *_truncate(other, room - len(half), words)[1:]])
    return _pad_rows(rows, length, words.pad)


def _tokenize(words: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    rows: list[list[int]] = words.encode(list(lines)).to_list()
    return rows


def _truncate(row: list[int], length: int, words: Tokenizer) -> list[int]:
    return row if len(row) <= length else [*row[: length - 1], words.end]


def _pad_rows(rows: Sequence[Sequence[int]], length: int, pad: int) -> Ints:
    if length < 5:
        raise OptionError(f"rows of {length} tokens are too short for any words", mend="length=32")
    found = np.full((len(rows), length), pad, np.int32)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found
