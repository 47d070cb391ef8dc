"""Observers of steps: where only the plan of a script is requested, its steps are planned instead of run.

There is at most one observer in a process, as there is at most one run. Without an observer this module only
records which step, if any, had no scopes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from whale_nebula.scopes import hints


class PlanShown(BaseException):
    """Ends a script when the requested plan has been made.

    It is not an Exception, so that neither Keras nor a script that catches errors handles it.
    """


class Observer(Protocol):
    """Plans the steps of a script instead of running them."""

    def replace_config(self, config: Any, links: Any) -> tuple[Any, Any]:
        """The config and links with which to open a run, instead of the script's."""

    def observe_step(self, step: Any, layout: Any, tensors: Any, unpack: Any) -> Any:
        """Observe a call of a step; returns (a substitute for its results,), or None if it is to run normally."""

    def begin_training(self) -> None:
        """A model is about to train or to be evaluated; its callbacks have not run yet."""

    def observe_unscoped(self, name: str, kind: str) -> None:
        """A model without scopes is about to train, test or predict."""

    def create_report(self) -> Any:
        """The result of `nb.last_report()` if no step was run."""


_observer: Observer | None = None
_plain = ""


def observer() -> Observer | None:
    """The observer of this process's steps, if there is one."""
    return _observer


@contextlib.contextmanager
def use_observer(new_observer: Observer) -> Iterator[None]:
    """Context in which all steps are passed to an observer."""
    global _observer
    before, _observer = _observer, new_observer
    try:
        yield
    finally:
        _observer = before


def record_unscoped(name: str, kind: str) -> None:
    """Record, and report to the observer, that a model without scopes is about to run."""
    global _plain
    _plain = f"{name}'s {kind}_step"
    hints.warn_unscoped(name)
    if _observer is not None:
        _observer.observe_unscoped(name, kind)


def get_last_unscoped() -> str:
    """The last step without scopes in this run, in words; "" if there was none."""
    return _plain


def forget_unscoped() -> None:
    """Discard the record of the last step without scopes, as the run is closed."""
    global _plain
    _plain = ""
