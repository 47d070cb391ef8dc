"""A table that follows the training on a terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

from rich.console import Console, ConsoleDimensions

from whale_nebula.report.published import under_way
from whale_nebula.report.rate import Rate
from whale_nebula.report.report import Report
from whale_nebula.report.screen import Canvas
from whale_nebula.report.table import step_table

_THINK_SECONDS = 5.0
_DRAW_SECONDS = 0.25


class Live:
    """Draws the last step, and what is under way, four times a second at most.

    It stays below what others print, and leaves them the terminal while a line of theirs is unfinished.
    """

    def __init__(self, canvas: Canvas, here: Callable[[], bool] = lambda: True) -> None:
        self._here = here
        self._canvas = canvas
        self._console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        self._rate = Rate()
        self._report: Report | None = None
        self._per_second: float | None = None
        self._drawn = self._thought = float("-inf")
        self._bottleneck = ""
        self._canvas.open()

    def step(self, report: Report) -> None:
        """Take in a step."""
        self._report, self._per_second = report, self._rate.add(report)
        if time.monotonic() - self._drawn >= _DRAW_SECONDS:
            self._draw()

    def tick(self) -> None:
        """No step has ended for a while: show what the stages do."""
        self._draw()

    def close(self) -> None:
        """Leave the last step on the terminal."""
        self._thought = float("-inf")
        self._draw()
        self._canvas.close()

    def _draw(self) -> None:
        if self._report is None or not self._here():
            return
        self._drawn = time.monotonic()
        self._canvas.draw(self._text(self._report))

    def _text(self, report: Report) -> str:
        """The table as the terminal takes it; what is higher than the terminal is cut off below."""
        now, size = under_way(), self._canvas.size()
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        if self._drawn - self._thought > _THINK_SECONDS:
            self._thought, self._bottleneck = self._drawn, report.bottleneck
        table = step_table(report, self._per_second, {} if now is None else now.doing, self._bottleneck)
        with self._console.capture() as drawn:
            self._console.print(table)
        lines = drawn.get().splitlines(keepends=True)
        return "".join(lines[: max(size.lines - 1, 1)])

    def __str__(self) -> str:
        return "the table on the terminal"
