"""A worker that reads its own side of the text, and looks at all that it sends for words of either side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import whale_nebula as nb
from tests.processes.sides import INPUTS, SOURCE, TARGET, WORDS, course
from tests.processes.telling import bits, tell
from whale_nebula.errors import CollectiveReadError
from whale_nebula.runtime.run import current_run

found: dict[str, int] = {"tensors": 0, "messages": 0, "source": 0, "target": 0}


def look(data: bytes) -> None:
    """Count the words of each side in some bytes, wherever they begin."""
    for start in range(4):
        ids = np.frombuffer(data[start : start + (len(data) - start) // 4 * 4], "<i4")
        for side, base in (("source", SOURCE), ("target", TARGET)):
            found[side] += int(np.sum((ids > base) & (ids < base + WORDS)))


def watched(link: Any) -> None:
    """Look at everything that this process hands to a link."""
    send: Callable[..., None] = link.send
    post: Callable[..., None] = link.post

    def sending(key: Any, array: Any, **options: Any) -> None:
        found["tensors"] += 1
        look(np.ascontiguousarray(array).tobytes())
        send(key, array, **options)

    def posting(message: Any) -> None:
        found["messages"] += 1
        for number in _numbers(message):
            look(int(number).to_bytes(8, "little", signed=True))
        tell(f"inputs {found['messages']}", sorted(message.get("inputs", {})))
        post(message)

    link.send, link.post = sending, posting


def _numbers(message: Any) -> list[int]:
    if isinstance(message, dict):
        return [n for value in message.values() for n in _numbers(value)]
    if isinstance(message, list | tuple):
        return [n for value in message for n in _numbers(value)]
    return [message] if isinstance(message, int) and abs(message) < 2**62 else []


def shown(result: Any) -> Any:
    try:
        return bits([np.asarray(result)])
    except CollectiveReadError as refused:
        return refused.what


nb.init({"results": "owner", "inputs": INPUTS})
for each in current_run().ledger.session.links.values():
    watched(each)
look(np.asarray([SOURCE + 1, TARGET + 1], np.int32).tobytes())
tell("the look works", [found.pop("source"), found.pop("target")])
found |= {"source": 0, "target": 0}
left = course("source" if nb.here().runs("c0") else "target")
function = left.pop("function")
tell("function", {name: shown(value) for name, value in function.items()})
tell("predict", shown(left.pop("predict")))
for name, value in left.items():
    tell(name, value)
tell("seen", found)
nb.shutdown()
