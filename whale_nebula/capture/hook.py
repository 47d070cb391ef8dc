"""A hook in TensorFlow that stays on for as long as somebody needs it, in whatever thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Hook:
    """`put` sets the hook, again for everybody who needs it; `take` takes it off when the last of them is done.

    >>> hook = Hook(lambda: print("on"), lambda: print("off"))
    >>> with hook.held(), hook.held():
    ...     print("traced")
    on
    on
    traced
    off
    """

    def __init__(self, put: Callable[[], None], take: Callable[[], None]) -> None:
        self._put = put
        self._take = take
        self._lock = threading.Lock()
        self._held = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The hook is on inside, however what is inside ends."""
        with self._lock:
            self._held += 1
            self._put()
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                if self._held == 0:
                    self._take()
