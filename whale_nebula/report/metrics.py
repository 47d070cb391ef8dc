"""Steps as lines of JSON in a file: one a step, appended whole, so that several processes may share the file."""

from __future__ import annotations

import os
from pathlib import Path

from whale_nebula.errors import ConfigError
from whale_nebula.report.report import Report
from whale_nebula.report.saved import line
from whale_nebula.site import script_site


class MetricsFile:
    """A file that grows by a line for every step. A line that a dying process cut short stays alone on its line."""

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
        """Append a line; it is with the system when this returns."""
        self._append(line(report).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    def tick(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __str__(self) -> str:
        return f"the metrics file {self.path}"
