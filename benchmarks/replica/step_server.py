"""A contender's side of the benchmark: runs steps on request, and reports the seconds of each."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

WIDTH, LAYERS, ROWS = 512, 8, 64
"""Eight dense layers of 512 x 512: 8.4 MB of gradients; so many rows for each worker."""


def blocks(address_or_port: int | str, name: str) -> Iterator[tuple[int, Callable[[object], None]]]:
    """The requested blocks, at a port or the path of a Unix socket: the number of steps, and the function that reports
    their seconds.
    """
    family, address = (
        (socket.AF_UNIX, address_or_port)
        if isinstance(address_or_port, str)
        else (socket.AF_INET, ("127.0.0.1", address_or_port))
    )
    with socket.socket(family) as line, line.makefile("rw") as talk:
        line.connect(address)

        def send(seconds: object) -> None:
            talk.write(json.dumps(seconds) + "\n")
            talk.flush()

        send(name)
        for order in iter(talk.readline, ""):
            yield int(order), send


def serve(
    address_or_port: int | str,
    name: str,
    step: Callable[[], object],
    tell: Callable[[list[float]], object] = lambda seconds: seconds,
) -> None:
    """Run every requested block, step by step, and `tell` its seconds."""
    for count, send in blocks(address_or_port, name):
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        send(tell(seconds))
