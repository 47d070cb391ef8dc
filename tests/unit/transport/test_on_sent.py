"""Every link tells when a tensor held its line: by the line's rate where it is emulated, else while it was written."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import numpy as np

from whale_nebula.transport.memory import MemoryNetwork
from whale_nebula.transport.protocol import Key
from whale_nebula.transport.sockets import SocketLink
from whale_nebula.wire import HEADER_BYTES, wire_bytes

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


def test_over_a_socket_it_is_told_what_was_written_and_when() -> None:
    one, other = socket.socketpair()
    workers = ("gpu/0", "npu/0")
    here, there = SocketLink(one, *workers, workers), SocketLink(other, *reversed(workers), workers)
    told: Told = []
    here.on_sent = lambda *about: told.append(about)
    before = time.monotonic()
    here.post({"kind": "PING", "last": False})
    here.send(key(4), np.zeros(1000, np.uint8))
    closing = threading.Thread(target=here.close)
    closing.start()
    there.close()
    closing.join()  # both threads of the link have ended: all is told
    ((about, size, began, ended),) = told
    assert (about, size) == (key(4), wire_bytes(1000))
    assert before <= began <= ended <= time.monotonic()
