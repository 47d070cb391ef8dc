"""Methods of a Keras model that need all of it: in a run of several processes, every process calls them together.

They are put on the instance when its first step is made, so nothing of Keras is patched.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from whale_nebula.runtime.elsewhere import Ledger

READS = ("get_weights", "count_params", "summary")
WRITES = ("save", "save_weights", "export")


def make_collective(model: Any, ledger: Ledger, writes_here: bool) -> None:
    """Let a model's reads and saves gather it first; only one process of a host writes files."""
    for name in READS:
        _replace(model, name, functools.partial(_gathering, ledger))
    for name in WRITES:
        _replace(model, name, functools.partial(_gathering if writes_here else _silently, ledger))


def _replace(model: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    plain = getattr(model, name)
    if not hasattr(plain, "nebula_collective"):
        object.__setattr__(model, name, make(plain))


def _gathering(ledger: Ledger, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with ledger.gathered():
            return plain(*args, **kwargs)

    whole.nebula_collective = True  # type: ignore[attr-defined]
    return whole


def _silently(ledger: Ledger, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Take part in gathering, but leave the file to the process of this host that writes it."""

    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> None:
        with ledger.gathered():
            return

    whole.nebula_collective = True  # type: ignore[attr-defined]
    return whole


def host_name() -> str:
    """What tells this host from others: processes that share a file system write a file once."""
    return f"{socket.gethostname()}:{os.path.realpath('.')}"
