"""An open dataset on its owner's machine: the rows of its interface by seed, pass and position.

The order of rows is a permutation determined by the seed and the number of the pass, computed row by row: a Feistel
network over the smallest power of four that is not less than the number of rows, with cycle walking. It needs no
memory, begins at any position, and does not depend on the versions of packages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_nebula.datasets.interface import Interface
from whale_nebula.datasets.schema import check_columns
from whale_nebula.datasets.sources import Source
from whale_nebula.datasets.transforms import Apply, apply_steps, prepare_rows

_ROUNDS = 4
_KEPT = 1 << 20
"""Up to so many rows, the whole order of a pass is kept in memory."""
Rows = NDArray[np.uint64]


@dataclass(frozen=True)
class Opened:
    """The rows of an interface. `edition` identifies the interface and the number of rows."""

    interface: Interface
    source: Source
    steps: list[Apply]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.source.count

    @property
    def edition(self) -> str:
        """A digest of the interface and the number of rows."""
        return hashlib.sha256(f"{self.interface.digest} {self.count}".encode()).hexdigest()[:16]

    def read(self, seed: int | None, number: int, first: int, last: int) -> tuple[int, dict[str, Any]]:
        """The number of rows at these positions of a pass, and their columns, checked against the schema."""
        rows = find_rows(self.count, seed, number, first, last)
        columns = apply_steps(self.source.read(rows.astype("int64")), self.steps)
        return check_columns(self.interface.schema, columns, self.interface.name), columns


def open_dataset(interface: Interface, folder: Path) -> Opened:
    """Open the source of an interface whose files are in this folder, and check its first row."""
    source, steps = prepare_rows(folder, interface.open_source(folder), interface.steps)
    opened = Opened(interface, source, steps)
    opened.read(None, 0, 0, 1)
    return opened


# ---------------------------------------------------------------------- the order of rows
def find_rows(count: int, seed: int | None, number: int, first: int, last: int) -> Rows:
    """The rows at the positions from `first` to before `last` of a pass; without a seed they are in their original
    order.

    >>> find_rows(10, None, 0, 3, 6).tolist()
    [3, 4, 5]
    >>> sorted(find_rows(10, 7, 0, 0, 10).tolist()) == list(range(10))
    True
    >>> find_rows(10, 7, 0, 4, 10).tolist() == find_rows(10, 7, 0, 0, 10).tolist()[4:]
    True
    """
    if seed is None or count < 2:
        return np.arange(first, min(last, count), dtype=np.uint64)
    if count <= _KEPT:
        return _order_all(count, seed, number)[first:last]
    return _order(count, seed, number, first, last)


@lru_cache(4)
def _order_all(count: int, seed: int, number: int) -> Rows:
    return _order(count, seed, number, 0, count)


def _order(count: int, seed: int, number: int, first: int, last: int) -> Rows:
    places = np.arange(first, min(last, count), dtype=np.uint64)
    half = max(1, -(-(count - 1).bit_length() // 2))
    keys = _derive_keys(seed, number)
    found = _permute(places, half, keys)
    while (outside := found >= count).any():
        found[outside] = _permute(found[outside], half, keys)
    return found


def _derive_keys(seed: int, number: int) -> list[np.uint64]:
    digest = hashlib.sha256(f"whale_nebula order 1 {seed} {number}".encode()).digest()
    return [np.uint64(int.from_bytes(digest[8 * each : 8 * each + 8], "little")) for each in range(_ROUNDS)]


def _permute(places: Rows, half: int, keys: list[np.uint64]) -> Rows:
    mask, bits = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = places >> bits, places & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _mix(values: Rows) -> Rows:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Rows = values ^ (values >> np.uint64(31))
    return mixed
