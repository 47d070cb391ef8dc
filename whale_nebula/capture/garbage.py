"""Python's garbage collector, held while programs and plans are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let Python look for no garbage meanwhile: graphs and plans are made of many small things that stay, and to look
    through them again and again takes a seventh of the time of a first step.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
