"""A user's step: captured on its first call with each form of batch, planned, and run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.capture.step import Signature, capture, signature
from whale_nebula.runtime.engine import Engine, engine

Arguments = Sequence[tuple[str, Any]]
Unpack = Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
"""From the values of the arguments to what `fn` is called with."""


def positional(values: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Call with the values in their order."""
    return values, {}



@dataclass
class Step:
    """Calls of `fn`, run by a plan. One engine is kept for each form of the arguments."""

    fn: Callable[..., Any]
    name: str
    paths: Callable[[], Mapping[int, str]] = dict
    whole: frozenset[str] = frozenset()
    engines: dict[Any, Engine] = field(default_factory=dict)
    last: Engine | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def run(self, arguments: Arguments, unpack: Unpack = positional) -> Any:
        """Run one step on the given arguments (name and value each)."""
        with self._lock:
            layout, tensors = signature(arguments, self.whole)
            self.last = self._engine(layout, unpack)
            return self.last.run(tensors)

    def plan(self, arguments: Arguments, unpack: Unpack = positional) -> Engine:
        """Capture and plan for the given arguments without running."""
        with self._lock:
            layout, _ = signature(arguments, self.whole)
            return self._engine(layout, unpack)

    def _engine(self, layout: Signature, unpack: Unpack) -> Engine:
        if layout.key not in self.engines:

            def call(given: Sequence[Any]) -> Any:
                args, kwargs = unpack(list(given))
                return self.fn(*args, **kwargs)

            captured = capture(call, layout, paths=self.paths)
            self.engines[layout.key] = engine(captured, call, layout, self.name)
        return self.engines[layout.key]
