"""TensorBoard event files of steps: results, seconds by stage, bytes by link and boundary.

TensorFlow writes them itself; TensorBoard is only needed to view them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from whale_nebula.errors import ConfigError
from whale_nebula.report.report import Report

_FLUSH_MILLISECONDS = 10_000
_ALONE = "local/0"


class EventFiles:
    """A folder of TensorBoard's event files, with a subfolder for each worker if there are several processes. The names
    of scalars begin with that of their program.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "cannot create the folder for TensorBoard",
                where=str(self.folder),
                why=error.strerror,
                mend='nb.init(tensorboard="logs"), with a folder that this user can write to',
            ) from None

    def step(self, report: Report) -> None:
        """Write the numbers of a step."""
        if self._writer is None:
            own = self.folder if report.worker == _ALONE else self.folder / report.worker.replace("/", "-")
            self._writer = tf.summary.create_file_writer(str(own), flush_millis=_FLUSH_MILLISECONDS)
        with self._writer.as_default(report.step):
            for name, value in list_scalars(report):
                tf.summary.write(f"{report.program}/{name}", value, metadata=_metadata())

    def tick(self) -> None:
        """Do nothing: the writer flushes automatically."""

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def __str__(self) -> str:
        return f"the event files in {self.folder}"


def list_scalars(report: Report) -> Iterator[tuple[str, float]]:
    """All scalars of a report, with their paths."""
    yield from report.scalars.items()
    yield "step_seconds", report.step_seconds
    if report.prediction is not None:
        yield "predicted_seconds", report.prediction.seconds
    if report.planned is not None and report.planned.seconds.predicted is not None:
        yield "planned_seconds", report.planned.seconds.predicted
    for name, stage in report.stages.items():
        if stage.compute_seconds is not None and stage.wait_seconds is not None:
            yield f"stage {name}/compute_seconds", stage.compute_seconds
            yield f"stage {name}/wait_seconds", stage.wait_seconds
            yield f"stage {name}/codec_seconds", stage.codec_seconds
    for name, link in report.links.items():
        yield f"link {name}/bytes", float(link.bytes)
        yield f"link {name}/seconds", link.seconds
    for name, each in report.boundaries.items():
        yield f"boundary {name}/bytes", float(each.wire_bytes)
        yield f"boundary {name}/ratio", each.ratio
        if each.error is not None:
            yield f"boundary {name}/error", each.error


def _metadata() -> Any:
    """The metadata for TensorBoard's scalar dashboard, as written by tf.summary.scalar."""
    made = tf.compat.v1.SummaryMetadata()
    made.plugin_data.plugin_name = "scalars"
    made.data_class = 1
    return made
