"""Every link tells when a tensor held its line: by the line's rate where it is emulated, else while it was written."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from whale_nebula.transport.memory import MemoryNetwork
from whale_nebula.transport.protocol import Key
from whale_nebula.wire import HEADER_BYTES

Told = list[tuple[Key, int, float, float]]
SIZE = 1_000_000 - HEADER_BYTES  # with its header it takes a line of 8 Mbit/s for one second


@dataclass(frozen=True)
class Line:
    rate: float = 8e6
    delay: float = 0.25


class Still:
    """Time that stands still."""

    def now(self) -> float:
        return 5.0

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        raise AssertionError("nobody waits here")


def key(slot: int) -> Key:
    return Key("backward", 1, 7, 2, 3, slot, "gpu/0", "npu/0")


def test_over_memory_messages_hold_the_line_one_after_the_other() -> None:
    network = MemoryNetwork({("gpu", "npu"): Line()}, clock=Still())
    link = network.link("gpu/0", "npu/0", "gpu", "npu")
    told: Told = []
    link.on_sent = lambda *about: told.append(about)
    for slot in (0, 1):
        link.send(key(slot), np.zeros(SIZE, np.uint8))
    link.post({"kind": "PING", "last": False})  # control messages are not told
    assert told == [(key(0), 1_000_000, 5.0, 6.0), (key(1), 1_000_000, 6.0, 7.0)]
