"""What `nb.init(show=, metrics=, tensorboard=)` asks for becomes the watchers of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whale_nebula.config.schema import SHOWS
from whale_nebula.errors import OptionError
from whale_nebula.errors.suggestions import did_you_mean
from whale_nebula.report.lines import Lines
from whale_nebula.report.metrics import MetricsFile
from whale_nebula.report.screen import Canvas, Screen, terminal
from whale_nebula.report.watching import Watcher, Watching

_EXAMPLES = {"metrics": "run.jsonl", "tensorboard": "logs"}


@dataclass(frozen=True)
class Seen:
    """What a user wants to see of a run: on the screen, in a file of metrics, in TensorBoard."""

    show: str = "none"
    metrics: str | os.PathLike[str] | None = None
    tensorboard: str | os.PathLike[str] | None = None

    def checked(self, site: str = "") -> Seen:
        """The same, or an error that names the word that is wrong.

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
        for option, example in _EXAMPLES.items():
            path = getattr(self, option)
            if path is not None and not (isinstance(path, str | os.PathLike) and str(path)):
                mend = f'nb.init({option}="{example}")'
                raise OptionError(f"{option}={path!r} is no path", where=site, mend=mend)
        return self


def audience(
    seen: Seen, more: Sequence[Watcher], lead: Callable[[], bool], canvas: Canvas | None = None
) -> Watching | None:
    """Everybody who is told of a run's steps; None where nobody is.

    `lead` says whether this process is the one that prints; it is asked at every step, because the first program
    decides it. Files are written by every process. `canvas` is what takes a table to the terminal of the launcher that
    started this process, if it has one.
    """
    watchers: list[Watcher] = [*more]
    if seen.metrics is not None:
        watchers.append(MetricsFile(seen.metrics))
    if seen.show != "none":
        watchers.append(_view(seen.show, lead, canvas))
    return Watching(watchers) if watchers else None


def _view(show: str, lead: Callable[[], bool], canvas: Canvas | None) -> Watcher:
    """A table where there is a terminal to draw on, else lines."""
    stream = terminal()
    if stream is not None:
        canvas = Screen(stream)
    if canvas is None or show != "live":
        return Lines(lead)
    from whale_nebula.report.live import Live

    return Live(canvas, lead)
