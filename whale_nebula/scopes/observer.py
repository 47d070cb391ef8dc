"""Observers of steps: where a script is only shown, each step is planned and not run.

There is at most one observer in a process, as there is at most one run. Without one nothing here does anything but
keep in mind which step, if any, had no scopes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from whale_nebula.scopes import hints


class PlanShown(BaseException):
    """Ends a script that is only shown, as the requested plan is known.

    It is no Exception, so that neither Keras nor a script that catches errors takes it for one.
    """


class Observer(Protocol):
    """Looks at the steps of a script."""

    def instead(self, config: Any, links: Any) -> tuple[Any, Any]:
        """The config and links to open a run with, in place of the script's."""

    def look(self, step: Any, layout: Any, tensors: Any, unpack: Any) -> Any:
        """Look at a call of a step; gives (what stands for its results,), or None where it is to run as it is."""

    def begins(self) -> None:
        """A model is about to train or to be evaluated: its callbacks have not begun yet."""

    def plain(self, name: str, kind: str) -> None:
        """A model without scopes is about to train, test or predict."""

    def report(self) -> Any:
        """What `nb.last_report()` gives where no step was run."""


_observer: Observer | None = None
_plain = ""


def observer() -> Observer | None:
    """Who looks at this process's steps, if anyone does."""
    return _observer


@contextlib.contextmanager
def observed_by(given: Observer) -> Iterator[None]:
    """Let an observer look at all steps, for a while."""
    global _observer
    before, _observer = _observer, given
    try:
        yield
    finally:
        _observer = before


def met_plain(name: str, kind: str) -> None:
    """Say that a model without scopes is about to run."""
    global _plain
    _plain = f"{name}'s {kind}_step"
    hints.warn_unscoped(name)
    if _observer is not None:
        _observer.plain(name, kind)


def last_plain() -> str:
    """The last step without scopes that this run has met; nothing where there was none."""
    return _plain


def forget_plain() -> None:
    """The run is closed."""
    global _plain
    _plain = ""
