"""The last report of this process, the step that runs now, and who is told of every step."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from whale_nebula.errors import StateError
from whale_nebula.report.report import Report, RunTotals


class UnderWay(Protocol):
    """A step that runs now, as a watcher sees it."""

    @property
    def name(self) -> str:
        """The program."""

    @property
    def steps(self) -> int:
        """How many of its steps are done."""

    @property
    def doing(self) -> Mapping[str, str]:
        """What each stage does at this moment, where that is known."""


class Audience(Protocol):
    """Who is told of every step: a file of metrics, a table on the terminal."""

    def tell(self, report: Report) -> None:
        """A step has ended."""


@dataclass
class _Published:
    last: Report | None = None
    audience: Sequence[Audience] = ()
    under_way: UnderWay | None = None


_LOCK = threading.Lock()
_published = _Published()


def publish(report: Report) -> Report:
    """Make a step's report, which nobody has seen yet, the last one: with the run's totals, and told to who watches."""
    with _LOCK:
        vars(report)["run"] = _total(_published.last, report)  # `replace` would make it all again, at every step
        _published.last = report
        _published.under_way = None
    for each in _published.audience:
        each.tell(report)
    return report


def _total(last: Report | None, report: Report) -> RunTotals:
    """The totals up to a step."""
    before = last.run if last is not None else RunTotals()
    links = dict(before.links)
    for name, link in report.links.items():
        links[name] = links[name] + link if name in links else link
    return RunTotals(before.steps + 1, before.seconds + report.step_seconds, links)


def begin(step: UnderWay) -> None:
    """A step begins: who watches may look at it while it runs."""
    _published.under_way = step if _published.audience else None


def under_way() -> UnderWay | None:
    """The step that runs now, if somebody watches."""
    return _published.under_way


def watched() -> bool:
    """Whether somebody is told of every step."""
    return bool(_published.audience)


def watch(audience: Sequence[Audience]) -> None:
    """From now on these are told of every step."""
    _published.audience = tuple(audience)


def forget() -> None:
    """Start the totals anew, and tell nobody any more: a run was opened or closed."""
    global _published
    with _LOCK:
        _published = _Published()


def last_report() -> Report:
    """The report of the last step that was run, whatever the program.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    >>> nb.last_report()
    Traceback (most recent call last):
        ...
    whale_nebula.errors.StateError: NB-305 no step has run yet
      mend: run a step first: model.fit(...), or a function under @nb.function
    """
    if _published.last is None:
        raise StateError(
            "no step has run yet", mend="run a step first: model.fit(...), or a function under @nb.function"
        )
    return _published.last
