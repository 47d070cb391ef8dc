"""Helpers of tests of links: keys, messages, a clock, and two links in this process on one cable."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.simulation.carrier import Cable, Plan, nothing_happens
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.memory import MemoryLink, MemoryNetwork
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.greeting import Greeting

GPU, NPU = WORKERS = ("gpu/0", "npu/0")
SOON = 20.0


def key(slot: int = 0, step: int = 0, source: str = GPU, destination: str = NPU) -> Key:
    return Key("forward", 1, step, 0, -1, slot, source, destination)


def back(slot: int = 0, step: int = 0) -> Key:
    return key(slot, step, NPU, GPU)


def step(number: int = 0) -> dict[str, object]:
    return {"kind": "SESSION", "about": "STEP", "program": 1, "step": number, "rows": 1, "inputs": {}}


class FakeClock:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


def memory_pair(network: MemoryNetwork | None = None) -> tuple[MemoryLink, MemoryLink]:
    network = network or MemoryNetwork()
    return network.link(GPU, NPU, "gpu", "npu"), network.link(NPU, GPU, "npu", "gpu")


class Pair:
    """Two links on one cable."""

    def __init__(self, plan: Plan = nothing_happens, **options: Any) -> None:
        self.cable = Cable(*WORKERS, plan)
        options = {"deadlines": Deadlines(patience=SOON, grace=2.0), **options}
        self.here, self.there = (
            PeerLink(end, Greeting("run-1", end.here, end.there), WORKERS, **options) for end in self.cable.ends
        )

    def begin(self, number: int = 0) -> None:
        """Both announce a step."""
        for link in (self.here, self.there):
            link.post(step(number))

    def close(self) -> None:
        close_all(self.here, self.there)


def close_all(*links: Any) -> None:
    """Close links, or whatever else has a `close`, at once: each waits for the others."""
    closing = [threading.Thread(target=link.close) for link in links]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(SOON)


def wait_for_threads() -> None:
    """Until no thread of a link is left."""
    limit = time.monotonic() + SOON
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("nebula-")]:
        assert time.monotonic() < limit, left
        threading.Event().wait(0.005)
