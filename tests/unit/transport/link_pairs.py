"""Helpers for tests of links: keys, messages, a clock, and two links in this process on a simulated cable."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from tests.simulation.carrier import Cable, FrameFilter, pass_unchanged
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.memory import MemoryLink, MemoryNetwork
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.greeting import Greeting

GPU, NPU = WORKERS = ("gpu/0", "npu/0")
TIMEOUT_SECONDS = 20.0


def make_key(slot: int = 0, step: int = 0, source: str = GPU, destination: str = NPU) -> Key:
    return Key("forward", 1, step, 0, -1, slot, source, destination)


def make_back_key(slot: int = 0, step: int = 0) -> Key:
    return make_key(slot, step, NPU, GPU)


def build_step_message(number: int = 0) -> dict[str, object]:
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


def make_memory_pair(network: MemoryNetwork | None = None) -> tuple[MemoryLink, MemoryLink]:
    network = network or MemoryNetwork()
    return network.link(GPU, NPU, "gpu", "npu"), network.link(NPU, GPU, "npu", "gpu")


class LinkPair:
    """Two links on one cable."""

    def __init__(self, frame_filter: FrameFilter = pass_unchanged, **options: Any) -> None:
        self.cable = Cable(*WORKERS, frame_filter)
        options = {"deadlines": Deadlines(patience=TIMEOUT_SECONDS, grace=2.0), **options}
        self.here, self.there = (
            PeerLink(end, Greeting("run-1", end.here, end.there), WORKERS, **options) for end in self.cable.ends
        )

    def announce_steps(self, number: int = 0) -> None:
        """Let both announce a step."""
        for link in (self.here, self.there):
            link.post(build_step_message(number))

    def connect(self, patience: float) -> None:
        """Exchange messages, and only then shorten the patience, so that a slow machine is not out of time before."""
        self.announce_steps()
        for link in (self.here, self.there):
            link.take("SESSION", TIMEOUT_SECONDS)
        for link in (self.here, self.there):
            link._deadlines = replace(link._deadlines, patience=patience)

    def close(self) -> None:
        close_all(self.here, self.there)


def close_all(*links: Any) -> None:
    """Close links, or other objects with `close`, in parallel, as each waits for the others."""
    closing = [threading.Thread(target=link.close) for link in links]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(TIMEOUT_SECONDS)


def wait_for_threads() -> None:
    """Wait until no thread of a link is left."""
    limit = time.monotonic() + TIMEOUT_SECONDS
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("nebula-")]:
        assert time.monotonic() < limit, left
        threading.Event().wait(0.005)
