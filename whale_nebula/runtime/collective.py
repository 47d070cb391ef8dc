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

WRITES = ("save", "save_weights", "export")


def make_collective(model: Any, ledger: Ledger, writes_here: bool) -> None:
    """Let a model's reads and saves gather it first; only one process of a host writes files."""
    _replace(model, "get_weights", functools.partial(_reading, ledger, lambda: _ids(model)))
    for name in WRITES:
        _replace(model, name, functools.partial(_writing, ledger, writes_here))


def _ids(model: Any) -> set[int]:
    return {id(getattr(variable, "value", variable)) for variable in model.weights}


def _replace(model: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    plain = getattr(model, name)
    if not hasattr(plain, "nebula_collective"):
        object.__setattr__(model, name, make(plain))


def _reading(ledger: Ledger, only: Callable[[], set[int]], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with ledger.gathered(only()):
            return plain(*args, **kwargs)

    whole.nebula_collective = True  # type: ignore[attr-defined]
    return whole


def _writing(ledger: Ledger, writes_here: bool, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Gather the model and leave the file to the process of this host that writes it; it is there on return."""

    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> None:
        with ledger.gathered():
            _told(ledger, functools.partial(plain, *args, **kwargs) if writes_here else _nothing)
            ledger.session.meet(f"the end of {plain.__name__}")

    whole.nebula_collective = True  # type: ignore[attr-defined]
    return whole


def _told(ledger: Ledger, write: Callable[[], Any]) -> None:
    """Nobody waits for a file that could not be written."""
    try:
        write()
    except BaseException as failure:
        ledger.session.fail(failure)
        raise


def _nothing() -> None:
    pass


def host_name() -> str:
    """What tells this host from others: processes that share a file system write a file once."""
    return f"{socket.gethostname()}:{os.path.realpath('.')}"
