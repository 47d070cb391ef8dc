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
from whale_nebula.runtime.exchange.state import HOST_SEPARATOR, States, Tally, TensorPosition
from whale_nebula.transport.protocol import Packed, check_packed

FORWARD, BACKWARD = "b0 a->b", "b0 b->a"


@dataclass
class Pair:
    """Both sides of a boundary, as two processes have them. What crossed last is its `payload`."""

    forward: str | Encoding = "int8"
    backward: str = "int8"
    seed: int = 0
    limit: int = LIMIT
    states_a: States = field(default_factory=States)
    states_b: States = field(default_factory=States)
    tally: Tally = field(default_factory=Tally)
    training: bool = True
    steps: int = 0

    def __post_init__(self) -> None:
        forward = self.forward if isinstance(self.forward, Encoding) else parse_encoding(self.forward)
        backward = parse_encoding(self.backward).returned
        self.outgoing = Outgoing(FORWARD, f"a->b{HOST_SEPARATOR}a", forward, self.states_a, limit=self.limit)
        self.incoming = Incoming(FORWARD, f"a->b{HOST_SEPARATOR}b, incoming", forward, self.states_b, limit=self.limit)
        self.outgoing_gradient = Outgoing(
            BACKWARD, f"a->b gradient{HOST_SEPARATOR}b", backward, self.states_b, is_gradient=True
        )
        self.incoming_gradient = Incoming(
            BACKWARD, f"a->b gradient{HOST_SEPARATOR}a, incoming", backward, self.states_a, is_gradient=True
        )

    def send(self, x: Any, at: TensorPosition, rows: Any = None, ids: Any = None) -> Any:
        """What crosses for a tensor."""
        self.payload, self.sent_residue = self.outgoing.encode(tf.convert_to_tensor(x), at, self.tally, None, rows, ids)
        if isinstance(self.payload, Packed):
            check_packed(self.payload)
        return self.payload

    def cross(
        self, x: Any, step: int = 0, micro_batch: int = 0, rows: Any = None, *, training: bool = True
    ) -> np.ndarray:
        """The tensor as b has it."""
        made, self.received_residue = self.incoming.decode(
            self.send(x, TensorPosition(step, micro_batch, training, self.seed), rows), self.tally
        )
        return made.numpy()

    def cross_back(self, gradient: Any, step: int = 0, micro_batch: int = 0) -> np.ndarray:
        """The gradient as a has it."""
        at = TensorPosition(step, micro_batch, self.training, self.seed)
        self.payload, _ = self.outgoing_gradient.encode(
            tf.convert_to_tensor(gradient), at, self.tally, self.received_residue
        )
        made, _ = self.incoming_gradient.decode(self.payload, self.tally, self.sent_residue)
        return made.numpy()

    def measure(self, x: Any, rows: Any = None, gradient: Any = None) -> tuple[BoundaryReport, np.ndarray]:
        """Run a step of one micro-batch: the report of the last sent tensor, and its decoded value."""
        self.incoming.dtype = self.incoming_gradient.dtype = "float32"
        self.tally, step, self.steps = Tally(), self.steps, self.steps + 1
        made = self.cross(x, step, rows=rows, training=self.training)
        if gradient is None:
            return self.tally.reports()[FORWARD], made
        made = self.cross_back(gradient, step)
        return self.tally.reports()[BACKWARD], made
