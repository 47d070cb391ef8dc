"""A contender's side of the benchmark: runs steps on request, and reports the seconds of each."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

WIDTH, LAYERS, ROWS = 512, 8, 64
"""Eight dense layers of 512 x 512: 8.4 MB of gradients; so many rows for each worker."""


def blocks(door: int | str, name: str) -> Iterator[tuple[int, Callable[[object], None]]]:
    """The requested blocks, at a port or the path of a Unix socket: the number of steps, and the function that reports
    their seconds.
    """
    family, address = (socket.AF_UNIX, door) if isinstance(door, str) else (socket.AF_INET, ("127.0.0.1", door))
    with socket.socket(family) as line, line.makefile("rw") as talk:
        line.connect(address)

        def say(seconds: object) -> None:
            talk.write(json.dumps(seconds) + "\n")
            talk.flush()

        say(name)
        for order in iter(talk.readline, ""):
            yield int(order), say


def serve(
    door: int | str,
    name: str,
    step: Callable[[], object],
    tell: Callable[[list[float]], object] = lambda seconds: seconds,
) -> None:
    """Run every requested block, step by step, and `tell` its seconds."""
    for count, say in blocks(door, name):
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        say(tell(seconds))
