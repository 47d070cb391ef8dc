"""`Patch`: an attribute of TensorFlow or Keras that is replaced for a while, by any number of threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any


class Patch:
    """A replacement for an attribute of a class or module. `count` says how often it is applied right now.

    >>> class Dense:
    ...     def call(self): return "Keras's"
    >>> patch = Patch(Dense, "call", lambda self: "ours")
    >>> with patch.apply(), patch.apply():
    ...     Dense().call()
    'ours'
    >>> Dense().call(), patch
    ("Keras's", Patch(Dense.call))
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.count = 0
        self._original: Any = None
        self._inherited = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Patch({self.owner.__name__}.{self.name})"

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Replace the attribute; the original is back once the last context that applied the patch has ended."""
        with self._lock:
            if self.count == 0:
                self._inherited = self.name not in vars(self.owner)
                self._original = getattr(self.owner, self.name)
                setattr(self.owner, self.name, self.replacement)
            self.count += 1
        try:
            yield
        finally:
            with self._lock:
                self.count -= 1
                if self.count == 0 and self._inherited:
                    delattr(self.owner, self.name)
                elif self.count == 0:
                    setattr(self.owner, self.name, self._original)


@contextlib.contextmanager
def apply_patches(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply several patches."""
    with contextlib.ExitStack() as applied:
        for patch in patches:
            applied.enter_context(patch.apply())
        yield
