"""The four ends of a boundary from a to b without a model: of the tensor and of its gradient, each side with states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.deltas import LIMIT
from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.report.records import BoundaryReport
from whale_nebula.runtime.exchange.ends import Incoming, Outgoing
from whale_nebula.runtime.exchange.state import AT, At, States, Tally
from whale_nebula.transport.protocol import Packed, check_packed

THERE, BACK = "b0 a->b", "b0 b->a"


@dataclass
class Pair:
    """Both sides of a boundary, as two processes have them. What crossed last is its `payload`."""

    there: str | Encoding = "int8"
    back: str = "int8"
    seed: int = 0
    limit: int = LIMIT
    here: States = field(default_factory=States)
    away: States = field(default_factory=States)
    tally: Tally = field(default_factory=Tally)
    training: bool = True
    steps: int = 0

    def __post_init__(self) -> None:
        there = self.there if isinstance(self.there, Encoding) else parse_encoding(self.there)
        back = parse_encoding(self.back).returned
        self.out = Outgoing(THERE, f"a->b{AT}a", there, self.here, limit=self.limit)
        self.into = Incoming(THERE, f"a->b{AT}b, incoming", there, self.away, limit=self.limit)
        self.returned = Outgoing(BACK, f"a->b gradient{AT}b", back, self.away, back=True)
        self.taken = Incoming(BACK, f"a->b gradient{AT}a, incoming", back, self.here, back=True)

    def send(self, x: Any, at: At, rows: Any = None, ids: Any = None) -> Any:
        """What crosses for a tensor."""
        self.payload, self.sent = self.out.send(tf.convert_to_tensor(x), at, self.tally, None, rows, ids)
        if isinstance(self.payload, Packed):
            check_packed(self.payload)
        return self.payload

    def cross(
        self, x: Any, step: int = 0, micro_batch: int = 0, rows: Any = None, *, training: bool = True
    ) -> np.ndarray:
        """The tensor as b has it."""
        made, self.got = self.into.take(self.send(x, At(step, micro_batch, training, self.seed), rows), self.tally)
        return made.numpy()

    def cross_back(self, gradient: Any, step: int = 0, micro_batch: int = 0) -> np.ndarray:
        """The gradient as a has it."""
        at = At(step, micro_batch, self.training, self.seed)
        self.payload, _ = self.returned.send(tf.convert_to_tensor(gradient), at, self.tally, self.got)
        made, _ = self.taken.take(self.payload, self.tally, self.sent)
        return made.numpy()

    def measure(self, x: Any, rows: Any = None, gradient: Any = None) -> tuple[BoundaryReport, np.ndarray]:
        """A step of one micro-batch: what is told of what was sent last, and what the other side has."""
        self.into.dtype = self.taken.dtype = "float32"
        self.tally, step, self.steps = Tally(), self.steps, self.steps + 1
        made = self.cross(x, step, rows=rows, training=self.training)
        if gradient is None:
            return self.tally.reports()[THERE], made
        made = self.cross_back(gradient, step)
        return self.tally.reports()[BACK], made
