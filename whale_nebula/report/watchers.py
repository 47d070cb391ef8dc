"""Watchers of steps, among them the live table of a terminal, called from a separate thread; the training thread only
queues the report.

A slow terminal or disk therefore does not delay a step, and numbers on a device are fetched concurrently with training.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Protocol

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from whale_nebula.config.schema import DISPLAYS
from whale_nebula.errors import ConfigError, OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.report.published import find_running_step
from whale_nebula.report.records import BoundaryReport, LinkReport, StageReport, duration, size
from whale_nebula.report.report import Report
from whale_nebula.report.saved import json_line
from whale_nebula.report.screen import Canvas, Screen, find_terminal
from whale_nebula.report.text import Rate, StepLog, coded_boundaries, rate_text, scalars_text
from whale_nebula.site import script_site

TICK_SECONDS = 0.25
_MAX_QUEUED = 256  # the most queued reports: training waits while the queue is full
_PATIENCE = 30.0

log = logging.getLogger("whale_nebula")


class Watcher(Protocol):
    """Displays or writes reports."""

    def step(self, report: Report) -> None:
        """Display or write the report of a finished step."""

    def tick(self) -> None:
        """Do what is due; called whenever a quarter of a second has passed without a report."""

    def close(self) -> None:
        """Write what is deferred and release resources, at the end of the run."""


class WatcherThread:
    """Passes reports to watchers in a separate thread. A watcher that fails is logged and removed; training
    continues.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)
        self._queue: queue.Queue[Report | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name="nebula-report", daemon=True)
        self._thread.start()

    def publish(self, report: Report) -> None:
        """Queue the report of a finished step."""
        self._queue.put(report)

    def close(self) -> None:
        """Pass on all queued reports, close the watchers, and stop; waits half a minute at most."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        while True:
            try:
                report = self._queue.get(timeout=TICK_SECONDS)
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
                log.warning("%s receives no more steps: %s", watcher, failure)


class MetricsFile:
    """A file with a line of JSON for every step. An incomplete last line of a process that died is ended first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ConfigError(
                "cannot write the metrics file",
                where=f"{self.path}, {script_site()}",
                why=error.strerror,
                mend='create the folder first, or use another path: nb.init(metrics="run.jsonl")',
            ) from None
        self._end_last_line()

    def _end_last_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append(b"\n")

    def step(self, report: Report) -> None:
        """Append a line; the operating system has it when this returns."""
        self._append(json_line(report).encode() + b"\n")

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


def _open_prometheus(address: str) -> Watcher:
    from whale_nebula.report.prometheus import Prometheus

    return Prometheus(address)


_OPTION_CODE = {"metrics": 'nb.init(metrics="run.jsonl")', "tensorboard": 'nb.init(tensorboard="logs")'}
"""Outputs with an option of their own: the code to write."""
OUTPUTS: dict[str, Callable[[str], Watcher]] = {"metrics": MetricsFile, "prometheus": _open_prometheus}
"""The constructors of a run's outputs from their value in `nb.init(outputs={name: value})`; another one is an entry."""


@dataclass(frozen=True)
class OutputOptions:
    """The user's choice of what shows steps on the screen, and of outputs with their values (paths, addresses)."""

    show: str = "none"
    outputs: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)

    def validate(self, site: str = "") -> OutputOptions:
        """Returns these options, or raises an error that names the invalid one and `site`, where it was given.

        >>> OutputOptions("life").validate()
        Traceback (most recent call last):
        ...
        whale_nebula.errors.OptionError: NB-104 show='life' is not a valid value
          why: show= is 'none', 'lines' or 'live'
          mend: did you mean 'live'?
        """
        if self.show not in DISPLAYS:
            why, mend = "show= is 'none', 'lines' or 'live'", did_you_mean(str(self.show), DISPLAYS)
            raise OptionError(f"show={self.show!r} is not a valid value", where=site, why=why, mend=mend)
        for name, path in self.outputs.items():
            if name not in OUTPUTS:
                raise OptionError(f"there is no output {name!r}", where=site, mend=did_you_mean(name, OUTPUTS))
            if not (isinstance(path, str | os.PathLike) and str(path)):
                mend = f'nb.init(outputs={{"{name}": "a/path"}})'
                raise OptionError(f"{name}={path!r} is not a path", where=site, mend=_OPTION_CODE.get(name, mend))
        return self


def open_outputs(
    options: OutputOptions, is_lead: Callable[[], bool], canvas: Canvas | None = None, folder: str | None = None
) -> WatcherThread | None:
    """Start the watchers of a run's steps; None if there are none.

    `is_lead` returns whether this process prints; it is called at every step, because it depends on the first program.
    Outputs are written by every process. `canvas` draws on the terminal of the launcher of this process, if any, and
    `folder` is where that launcher reads the last report.
    """
    watchers = [OUTPUTS[name](os.fspath(path)) for name, path in options.outputs.items()]
    if folder is not None:
        from whale_nebula.report.prometheus import LastReport

        watchers.append(LastReport(folder))
    if options.show != "none":
        watchers.append(_open_display(options.show, is_lead, canvas))
    return WatcherThread(watchers) if watchers else None


def _open_display(show: str, is_lead: Callable[[], bool], canvas: Canvas | None) -> Watcher:
    """The live table if it is wanted and there is a terminal, otherwise lines in the log."""
    stream = find_terminal()
    if stream is not None:
        canvas = Screen(stream)
    if canvas is None or show != "live":
        return StepLog(is_lead)
    return Live(canvas, is_lead)


# ---------------------------------------------------------------------- the live table
_BAR_COLUMNS = 14
_HEADERS = 3.0  # frames larger than their payload by this factor are mostly headers
_WIDTHS = (12, 9, 9, 9, _BAR_COLUMNS, 9)


def step_table(report: Report, rate: float | None, doing: Mapping[str, str], bottleneck: str = "") -> RenderableType:
    """A step as tables of stages, links and boundaries. `rate` is steps per second (None: not known yet), `doing` each
    stage's current activity.
    """
    title = Text(f"{report.program}, step {report.step}", style="bold")
    parts: list[RenderableType] = [Rule(title, style="dim", align="left"), _head(report, rate), _stages(report, doing)]
    if report.all_links:
        parts.append(_links(report))
    if boundaries := coded_boundaries(report.boundaries):
        parts.append(_boundaries(boundaries))
    if bottleneck:
        parts.append(Text(bottleneck, style="italic"))
    return Group(*parts)


def _head(report: Report, rate: float | None) -> Text:
    head = Text(f"{scalars_text(report)} · " if report.scalars else "", style="green")
    head.append(f"{duration(report.step_seconds)} per step", style="default")
    if report.prediction is not None:
        head.append(f", predicted {duration(report.prediction.seconds)}", style="default dim")
    if report.planned is not None and report.planned.seconds.predicted is not None:
        head.append(f", planned {duration(report.planned.seconds.predicted)}", style="default dim")
    if rate is not None:
        head.append(f" · {rate_text(rate)}", style="default")
    return head


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, (column, width) in enumerate(zip(columns, _WIDTHS, strict=True)):
        table.add_column(column, no_wrap=True, min_width=width, justify="right" if 0 < number < 4 else "left")
    return table


def _stages(report: Report, doing: Mapping[str, str]) -> Table:
    table = _table("stage", "computes", "waits", "in flight", "of the step", "now")
    for name, stage in report.all_stages.items():
        state = doing.get(name, "") if name in report.stages else Text("previous step", style="dim")
        table.add_row(_name(name, stage), *_stage(report, stage), state)
    return table


def _name(name: str, stage: StageReport) -> Text:
    """A stage's name, and its cluster if that is different."""
    return Text(name if stage.cluster in ("", name) else f"{name} ({stage.cluster})")


def _stage(report: Report, stage: StageReport) -> list[RenderableType]:
    if stage.compute_seconds is None or stage.wait_seconds is None:
        return ["", "", "", Text("one function, not timed separately", style="dim")]
    whole = max(report.step_seconds, 1e-9)
    bar = _bar([(stage.compute_seconds / whole, "green"), (stage.wait_seconds / whole, "yellow")])
    return [duration(stage.compute_seconds), duration(stage.wait_seconds), str(stage.in_flight or ""), bar]


def _bar(parts: list[tuple[float, str]]) -> Text:
    """Shares of the step with their colours as a bar, with the rest dimmed."""
    bar = Text()
    for share, colour in parts:
        bar.append("━" * round(_BAR_COLUMNS * min(share, 1.0)), style=colour)
    return bar + Text("─" * max(_BAR_COLUMNS - len(bar), 0), style="dim")


def _links(report: Report) -> Table:
    table = _table("link", "per step", "of raw", "total", "of the step", "link busy")
    for name, link in report.all_links.items():
        table.add_row(Text(name), *_link(report, name, link))
    return table


def _link(report: Report, name: str, link: LinkReport) -> list[RenderableType]:
    whole = max(report.step_seconds, 1e-9)
    total = report.run.links.get(name)  # known for the sender's links; other processes report single steps
    share = f"{100 * link.ratio:.0f} %" if link.ratio < _HEADERS else "headers"
    sent = [size(link.bytes), share, "" if total is None else size(total.bytes)]
    held = [_bar([(link.seconds / whole, "blue")]), duration(link.seconds)] if link.seconds else ["", "free"]
    return [*sent, *held]


def _boundaries(boundaries: Mapping[str, BoundaryReport]) -> Table:
    table = _table("boundary", "per step", "of raw", "error", "codec", "codec time")
    for name, each in boundaries.items():
        error = "" if each.error is None else f"{each.error:.2g}"
        took = each.encode_seconds + each.decode_seconds
        sent = [size(each.wire_bytes), f"{100 * each.ratio:.3g} %", error]
        table.add_row(Text(name), *sent, Text(each.codec), duration(took) if took else "")
    return table


_BOTTLENECK_SECONDS = 5.0  # the bottleneck is determined anew after so many
_DRAW_SECONDS = 0.25


class Live:
    """A table of the last step and current activity, redrawn at most four times a second while `is_selected()` is true.

    It is drawn below other output, and removed while a line of other output is unfinished.
    """

    def __init__(self, canvas: Canvas, is_selected: Callable[[], bool] = lambda: True) -> None:
        self._is_selected = is_selected
        self._canvas = canvas
        self._console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        self._rate = Rate()
        self._report: Report | None = None
        self._per_second: float | None = None
        self._drawn_at = self._analyzed_at = float("-inf")
        self._bottleneck = ""
        self._canvas.open()

    def step(self, report: Report) -> None:
        """Draw the step, unless the last drawing is too recent."""
        self._report, self._per_second = report, self._rate.add(report)
        if time.monotonic() - self._drawn_at >= _DRAW_SECONDS:
            self._draw()

    def tick(self) -> None:
        """Draw the stages' current activity between the ends of steps."""
        self._draw()

    def close(self) -> None:
        """Draw the last step with its bottleneck, and leave it on the terminal."""
        self._analyzed_at = float("-inf")
        self._draw()
        self._canvas.close()

    def _draw(self) -> None:
        if self._report is None or not self._is_selected():
            return
        self._drawn_at = time.monotonic()
        self._canvas.draw(self._text(self._report))

    def _text(self, report: Report) -> str:
        """The table as terminal text, cut off at the terminal's height."""
        now, size = find_running_step(), self._canvas.size()
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        if self._drawn_at - self._analyzed_at > _BOTTLENECK_SECONDS:
            self._analyzed_at, self._bottleneck = self._drawn_at, report.bottleneck
        table = step_table(report, self._per_second, {} if now is None else now.doing, self._bottleneck)
        with self._console.capture() as drawn:
            self._console.print(table)
        lines = drawn.get().splitlines(keepends=True)
        return "".join(lines[: max(size.lines - 1, 1)])

    def __str__(self) -> str:
        return "the live table"
