"""Read ahead: what an iterator gives is fetched by a thread, while the one before it is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.2


def read_ahead(make: Callable[[], Iterator[T]], depth: int) -> Iterator[T]:
    """The same items, up to `depth` of which wait; what the iterator raises is raised here, behind the items before it.

    >>> list(read_ahead(lambda: iter(range(5)), 2))
    [0, 1, 2, 3, 4]
    """
    items: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    over = threading.Event()

    def put(is_item: bool, item: T | BaseException | None) -> bool:
        while not over.is_set():
            try:
                items.put((is_item, item), timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def fetch() -> None:
        found = make()
        try:
            for item in found:
                if not put(True, item):
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)
        finally:
            if hasattr(found, "close"):
                found.close()

    threading.Thread(target=fetch, name="nebula-read-ahead", daemon=True).start()
    try:
        while True:
            is_item, item = items.get()
            if isinstance(item, BaseException) and not is_item:
                raise item
            if not is_item:
                return
            yield item  # type: ignore[misc]
    finally:
        over.set()
