"""Watchers of steps, called from a thread of their own; the training thread only queues the report.

So a slow terminal or disk does not delay a step, and numbers on a device are fetched concurrently with training.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Protocol

from whale_nebula.config.schema import SHOWS
from whale_nebula.errors import ConfigError, OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.report.lines import Lines
from whale_nebula.report.report import Report
from whale_nebula.report.saved import line
from whale_nebula.report.screen import Canvas, Screen, terminal
from whale_nebula.site import script_site

TICK_SECONDS = 0.25
_BACKLOG = 256  # the most queued reports: training waits while the queue is full
_PATIENCE = 30.0

log = logging.getLogger("whale_nebula")


class Watcher(Protocol):
    """Displays or writes reports."""

    def step(self, report: Report) -> None:
        """Handle a finished step."""

    def tick(self) -> None:
        """Handle the passing of a quarter of a second."""

    def close(self) -> None:
        """Write what is deferred, as the run ends."""


class Watching:
    """Passes reports to watchers by a thread. A watcher that fails is logged and dropped; training continues."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)
        self._told: queue.Queue[Report | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._work, name="nebula-report", daemon=True)
        self._thread.start()

    def tell(self, report: Report) -> None:
        """Pass on a finished step."""
        self._told.put(report)

    def close(self) -> None:
        """Pass on all queued reports, and end."""
        self._told.put(None)
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        while True:
            try:
                report = self._told.get(timeout=TICK_SECONDS)
            except queue.Empty:
                self._call_each(methodcaller("tick"))
                continue
            if report is None:
                break
            self._call_each(methodcaller("step", report))
        self._call_each(methodcaller("close"))

    def _call_each(self, act: Callable[[Watcher], object]) -> None:
        for watcher in list(self._watchers):
            try:
                act(watcher)
            except Exception as failure:
                self._watchers.remove(watcher)
                log.warning("%s is not told of steps any more: %s", watcher, failure)


class MetricsFile:
    """A file with a line for every step. An incomplete line of a process that died is ended before a new one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ConfigError(
                "the metrics cannot be written",
                where=f"{self.path}, {script_site()}",
                why=error.strerror,
                mend='make the folder first, or give another path: nb.init(metrics="run.jsonl")',
            ) from None
        self._end_last_line()

    def _end_last_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append(b"\n")

    def step(self, report: Report) -> None:
        """Append a line; it is passed to the operating system before this returns."""
        self._append(line(report).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    def tick(self) -> None:
        """Do nothing: nothing is deferred."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __str__(self) -> str:
        return f"the metrics file {self.path}"


def _serve(address: str) -> Watcher:
    from whale_nebula.report.prometheus import Prometheus

    return Prometheus(address)


_WRITTEN = {"metrics": 'nb.init(metrics="run.jsonl")', "tensorboard": 'nb.init(tensorboard="logs")'}
"""The outputs that have an option of their own, as it is written."""
OUTPUTS: dict[str, Callable[[str], Watcher]] = {"metrics": MetricsFile, "prometheus": _serve}
"""The constructors of a run's outputs from their value in `nb.init(outputs={name: value})`; another one is an entry."""


@dataclass(frozen=True)
class Seen:
    """The user's choice of displays: on the screen, and outputs by name."""

    show: str = "none"
    outputs: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)

    def checked(self, site: str = "") -> Seen:
        """The validated choice; raises an error that names an invalid word.

        >>> Seen("life").checked()
        Traceback (most recent call last):
        ...
        whale_nebula.errors.OptionError: NB-104 show='life' is not known
          why: it is 'none', 'lines' or 'live'
          mend: did you mean 'live'?
        """
        if self.show not in SHOWS:
            why, mend = "it is 'none', 'lines' or 'live'", did_you_mean(str(self.show), SHOWS)
            raise OptionError(f"show={self.show!r} is not known", where=site, why=why, mend=mend)
        for name, path in self.outputs.items():
            if name not in OUTPUTS:
                raise OptionError(f"no output is called {name!r}", where=site, mend=did_you_mean(name, OUTPUTS))
            if not (isinstance(path, str | os.PathLike) and str(path)):
                mend = f'nb.init(outputs={{"{name}": "a/path"}})'
                raise OptionError(f"{name}={path!r} is no path", where=site, mend=_WRITTEN.get(name, mend))
        return self


def audience(
    seen: Seen, lead: Callable[[], bool], canvas: Canvas | None = None, folder: str | None = None
) -> Watching | None:
    """The watchers of a run's steps; None if there are none.

    `lead` returns whether this process prints; it is called at every step, because it depends on the first program.
    Outputs are written by every process. `canvas` draws on the terminal of the launcher of this process, if any, and
    `folder` is where that launcher reads the last report.
    """
    watchers = [OUTPUTS[name](os.fspath(path)) for name, path in seen.outputs.items()]
    if folder is not None:
        from whale_nebula.report.prometheus import LastReport

        watchers.append(LastReport(folder))
    if seen.show != "none":
        watchers.append(_view(seen.show, lead, canvas))
    return Watching(watchers) if watchers else None


def _view(show: str, lead: Callable[[], bool], canvas: Canvas | None) -> Watcher:
    """A table on a terminal, otherwise lines."""
    stream = terminal()
    if stream is not None:
        canvas = Screen(stream)
    if canvas is None or show != "live":
        return Lines(lead)
    from whale_nebula.report.live import Live

    return Live(canvas, lead)
