"""The latest report of this process, the step in progress, and the watchers of steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from whale_nebula.errors import StateError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.report.records import RunTotals
from whale_nebula.report.report import Report
from whale_nebula.scopes.observer import forget_unscoped, get_last_unscoped, observer
from whale_nebula.site import calling_site


class RunningStep(Protocol):
    """What watchers may read of a step while it runs."""

    @property
    def name(self) -> str:
        """The name of the program."""

    @property
    def steps(self) -> int:
        """The number of completed steps."""

    @property
    def doing(self) -> Mapping[str, str]:
        """The current activity of each stage, if known."""


class Audience(Protocol):
    """Receiver of every step's report, such as a metrics file or a table on the terminal."""

    def publish(self, report: Report) -> None:
        """Publish a finished step."""


@dataclass
class _PublishedState:
    """The state of this module; `programs` has the last report of each program, ordered by time."""

    programs: dict[str, Report] = field(default_factory=dict)
    run: RunTotals = field(default_factory=RunTotals)
    audience: Sequence[Audience] = ()
    running_step: RunningStep | None = None
    skipped: str = ""


_LOCK = threading.Lock()
_published = _PublishedState()


def publish(report: Report) -> Report:
    """Make a new report the last one, with the run's totals, and pass it to watchers."""
    with _LOCK:
        vars(report)["run"] = _total(_published.run, report)  # `replace` would copy all fields, at every step
        _published.run = report.run
        _published.programs.pop(report.program, None)
        _published.programs[report.program] = report
        _published.running_step = None
    for each in _published.audience:
        each.publish(report)
    return report


def note_skipped(program: str) -> None:
    """Record that a step of a program was not run, because it had run before the checkpoint from which the run
    resumed.
    """
    _published.skipped = program


def _total(before: RunTotals, report: Report) -> RunTotals:
    """The totals up to a step."""
    links = dict(before.links)
    for name, link in report.links.items():
        links[name] = links[name] + link if name in links else link
    return RunTotals(before.steps + 1, before.seconds + report.step_seconds, links)


def begin(step: RunningStep) -> None:
    """Announce that a step begins, so that watchers may observe it while it runs."""
    _published.running_step = step if _published.audience else None


def find_running_step() -> RunningStep | None:
    """The running step, if there are watchers."""
    return _published.running_step


def is_watched() -> bool:
    """Whether there are watchers."""
    return bool(_published.audience)


def watch(audience: Sequence[Audience]) -> None:
    """Pass every step's report to these watchers from now on."""
    _published.audience = tuple(audience)


def forget() -> None:
    """Remove all reports, totals and watchers, when a run is opened or closed."""
    global _published
    with _LOCK:
        _published = _PublishedState()
        forget_unscoped()


def last_report(program: str | None = None) -> Report:
    """The report of the last step that was run; with a name, of the last step of the program of that name.

    A program is named after its model and step, "functional.train_step", or its function; a suffix of the name is
    enough. After `fit(validation_data=...)` the last step is a test step: `nb.last_report("train_step")` is the one
    before it.

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    >>> nb.last_report()
    Traceback (most recent call last):
        ...
    whale_nebula.errors.StateError: NB-305 no step has run yet (...)
      mend: run a step first: model.fit(...), or a function under @nb.function
    """
    with _LOCK:
        kept = dict(_published.programs)
    if not kept:
        watching = observer()
        if watching is None:
            raise _no_report_error(get_last_unscoped(), _published.skipped)
        shown: Report = watching.create_report()
        return shown
    if program is None:
        return kept[next(reversed(kept))]
    return kept[_find_program(program, list(kept))]


def _no_report_error(plain: str, skipped: str) -> StateError:
    """The error if there is no report: nothing ran, or only steps without scopes, or all had run in earlier starts."""
    if skipped:
        return StateError(
            "there is no report: no step has run since this start of the run",
            where=str(calling_site()),
            why=f"the run resumed from a checkpoint, and all its steps of {skipped} had already been completed",
            mend="catch nb.errors.StateError if the script may be restarted after it has finished",
        )
    if not plain:
        return StateError(
            "no step has run yet",
            where=str(calling_site()),
            mend="run a step first: model.fit(...), or a function under @nb.function",
        )
    return StateError(
        "there is no report: no step has run with a plan",
        where=str(calling_site()),
        why=f"{plain} ran uncut: its trace contained no scope",
        mend='with nb.stage(cluster="gpu"): where layers are called, while the model is built or in its call; '
        "around compile, fit or the creation of a layer it has no effect",
    )


def _find_program(program: str, names: Sequence[str]) -> str:
    """The program with that name, otherwise the last one whose name ends with it; `names` are ordered by last step."""
    found = [name for name in names if isinstance(program, str) and name.endswith(program)]
    if not program or not found:
        raise StateError(
            f"no step of program {program!r} has run",
            where=str(calling_site()),
            why=f"programs with steps: {', '.join(map(repr, names))}",
            mend=did_you_mean(str(program), [*names, *(name.rpartition(".")[2] for name in names)]),
        )
    return program if program in found else found[-1]
