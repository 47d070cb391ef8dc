"""Reads of a whole model that is trained apart: first all clusters meet. And writes of one: then they begin anew.

They are put on the instance, as those of a run of several processes are: see `runtime.collective`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from whale_nebula.run import Run

READS = ("get_weights", "save", "save_weights", "export")
WRITES = ("set_weights", "load_weights")


def meet_before_reads(models: Iterable[Any], run: Run) -> None:
    """In a run whose clusters train apart, let reads of these models settle what they have not told each other yet, and
    writes of them start anew.
    """
    for model in models if run.rounds is not None else ():
        for name in READS:
            _replace(model, name, functools.partial(_reading, run.rounds))
        for name in WRITES:
            _replace(model, name, functools.partial(_writing, run.rounds))


class Rounds(Protocol):
    """All rounds of a run."""

    def settle(self) -> None:
        """Everybody has the same weights after this."""

    def restart(self) -> None:
        """The weights were replaced."""


def _replace(model: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    plain = getattr(model, name)
    if not hasattr(plain, "nebula_meets"):
        changed = make(plain)
        changed.nebula_meets = True  # type: ignore[attr-defined]
        changed.nebula_collective = True  # type: ignore[attr-defined]
        object.__setattr__(model, name, changed)


def _reading(rounds: Rounds, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def read(*args: Any, **kwargs: Any) -> Any:
        rounds.settle()
        return plain(*args, **kwargs)

    return read


def _writing(rounds: Rounds, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def write(*args: Any, **kwargs: Any) -> Any:
        rounds.settle()
        found = plain(*args, **kwargs)
        rounds.restart()
        return found

    return write
