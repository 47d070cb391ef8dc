"""Comparison of training runs with different codecs: a table, a plot of losses by time, and bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import keras
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.models.text import Score


@dataclass
class RunResult:
    """The result of a training run: losses by time, seconds per step, links with their bytes, and the score."""

    losses: list[tuple[float, float]]
    step: float
    links: Mapping[str, Any]
    score: Score | None = None

    @property
    def bytes(self) -> int:
        """Bytes that a step sends over the link, in both directions."""
        return sum(link.bytes for link in self.links.values())


class Clock(keras.callbacks.Callback):
    """Callback that records the loss by time, and the seconds of each step. The first step, which is traced and
    planned, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[tuple[float, float]] = []
        self.steps: list[float] = []
        self.began = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record a step."""
        self.steps.append(nb.last_report().step_seconds)
        self.began = self.began or time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record an epoch."""
        self.losses.append((time.monotonic() - self.began, float(logs["loss"])))

    def make_result(self, report: nb.Report) -> RunResult:
        """Create the result, with the last step's report, which includes the other processes, if there are several."""
        links = {**report.elsewhere.links, **report.links}
        return RunResult(self.losses, median(self.steps[1:]), dict(sorted(links.items())))


def compare(runs: Mapping[str, RunResult], title: str, folder: Path, console: Console) -> None:
    """Print the table, and draw the plots into a folder."""
    console.print(make_table(runs, title))
    scores = [run.score for run in runs.values() if run.score]
    if scores:
        console.print(f"BLEU {scores[0].signature}")
    console.print(f"picture: {draw(runs, title, folder)}")


def make_table(runs: Mapping[str, RunResult], title: str) -> Table:
    """A row for each run, with its speed-up and its compression ratio relative to the first."""
    table = Table(title=title)
    for column in ("codec", "s per step", "speed-up", "kB per step", "compression", "loss", "BLEU"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    first = next(iter(runs.values()))
    for name, run in runs.items():
        faster, fewer = f"{first.step / run.step:.1f} x", f"{first.bytes / run.bytes:.1f} x" if run.bytes else ""
        score = f"{run.score.value:.1f}" if run.score else ""
        loss = f"{run.losses[-1][1]:.3f}"
        table.add_row(name, f"{run.step:.3f}", faster, f"{run.bytes / 1e3:.0f}", fewer, loss, score)
    if any(run.step > first.step for run in runs.values()):
        table.caption = "below 1.0 x: on this machine encoding takes longer than it saves on the link"
    return table


def draw(runs: Mapping[str, RunResult], title: str, folder: Path) -> Path:
    """Plot loss by time on the left; on the right the bytes of the boundary, forward and backward."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ways = list(next(iter(runs.values())).links)
    for place, (name, run) in enumerate(runs.items()):
        left.plot(*zip(*run.losses, strict=True), marker=".", label=name)
        middles = [number + (place - (len(runs) - 1) / 2) * 0.8 / len(runs) for number in range(len(ways))]
        bars = right.bar(middles, [run.links[way].bytes / 1e3 for way in ways], 0.75 / len(runs), label=name)
        right.bar_label(bars, fmt="%.0f", padding=3)
    left.set(xlabel="seconds", ylabel="loss", title="loss by time")
    left.legend()
    right.set(ylabel="kB per step", title="bytes sent", xticks=range(len(ways)), xticklabels=ways)
    right.margins(y=0.15)
    right.legend()
    figure.suptitle(title)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "translate.png", dpi=120)
    return folder / "translate.png"
