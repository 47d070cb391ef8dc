"""A dataset that is open on its owner's machine: batches of the rows that may leave, by seed, pass and position."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_nebula.datasets.interface import Interface
from whale_nebula.datasets.order import find_rows
from whale_nebula.datasets.schema import check_columns
from whale_nebula.datasets.sources import Source
from whale_nebula.datasets.transforms import Apply, apply_steps, prepare_rows


@dataclass(frozen=True)
class Opened:
    """The rows of an interface. `edition` names what the interface says and how many rows there are."""

    interface: Interface
    source: Source
    steps: list[Apply]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.source.count

    @property
    def edition(self) -> str:
        """A digest that differs where the interface or the number of rows does."""
        return hashlib.sha256(f"{self.interface.digest} {self.count}".encode()).hexdigest()[:16]

    def read(self, seed: int | None, number: int, first: int, last: int) -> tuple[int, dict[str, Any]]:
        """The rows at these positions of a pass, checked against the schema; and how many they are."""
        rows = find_rows(self.count, seed, number, first, last)
        columns = apply_steps(self.source.read(rows.astype("int64")), self.steps)
        return check_columns(self.interface.schema, columns, self.interface.name), columns


def open_dataset(interface: Interface, folder: Path) -> Opened:
    """Open the source of an interface whose files are in this folder, and look at its first row."""
    source, steps = prepare_rows(folder, interface.open_source(folder), interface.steps)
    opened = Opened(interface, source, steps)
    opened.read(None, 0, 0, 1)
    return opened
