"""The last saving of a script that ends by an error: of the state after its last step, if that is certain to be whole.

It is whole where an undisturbed run would have had it, too, and where a resumed run does all that came after it: in a
`fit` callbacks are called again for the last batch, and for the end of an epoch. In a custom loop nothing that follows
a step is done again, so nothing that it writes may be saved half.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.errors import StageFailedError
from whale_nebula.runtime.checkpoint.objects import holds_variables, is_spread
from whale_nebula.runtime.checkpoint.slices import Entry
from whale_nebula.runtime.checkpoint.writing import Snapshot

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints
    from whale_nebula.runtime.checkpoint.level import Level

_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass
class Standing:
    """Where the script stands between two steps of the leading program, of which this process has done `steps`.

    `thread` runs a step. `torn`: a step has failed, and may have changed variables. `whole`: all that follows the last
    step was done, before the next one. `held` is the state after the last batch of an epoch, until the next step
    begins: validation and callbacks may change variables meanwhile.
    """

    steps: int = 0
    thread: int | None = None
    torn: bool = False
    whole: bool = False
    held: Snapshot | None = None

    @contextlib.contextmanager
    def run_step(self) -> Iterator[None]:
        """Context of a step of any program. A failed one has changed nothing if its error says so."""
        self.thread, self.torn = threading.get_ident(), True
        try:
            yield
            self.torn = False
        except StageFailedError as failure:
            self.torn = failure.torn
            raise
        finally:
            self.thread = None


def save_at_error(checkpoints: Checkpoints) -> None:
    """Save unsaved steps, if the state is certain to be whole, and log what was saved, or why it was not."""
    level, step = checkpoints.levels[0], checkpoints.position.step
    if not checkpoints.standing.steps:
        return
    last, why = 0, ""
    try:
        level.drain()
        last = _find_newest(level)
        why = "" if last == step else _find_doubt(checkpoints) or _save(checkpoints)
    except Exception as error:  # the script's own error is raised, not this one
        why = str(error).partition("\n")[0]
    if why:
        newer = f" newer than step {last}" if last else ""
        _LOG.warning("nothing%s could be saved in %s: %s", newer, level.folder.path, why)
    else:
        _LOG.warning("step %d, the last one that was taken, is saved in %s", step, level.folder.path)


def _find_newest(level: Level) -> int:
    """The newest step that is saved; 0 if there is none."""
    return max((found.step for found in level.folder.scan() if found.committed), default=0)


def _save(checkpoints: Checkpoints) -> str:
    """Save the state after the last step to the disk; returns why that failed, or "". It takes the place of no other
    checkpoint: one more than usual is kept.
    """
    snapshot = checkpoints.standing.held or checkpoints.take_snapshot()
    if damaged := _find_nan(snapshot.manifest.position.logs, snapshot.entries):
        return f"{damaged} is NaN"
    level = checkpoints.levels[0]
    level.keep += 1
    snapshot = replace(snapshot, manifest=replace(snapshot.manifest, at_error=True))
    level.write(snapshot)
    level.drain()
    return "" if _find_newest(level) == snapshot.step else "its files could not be written"


def _find_doubt(checkpoints: Checkpoints) -> str:
    """Why the state may not be that after a whole step, or ""."""
    standing, position, memories = checkpoints.standing, checkpoints.position, checkpoints.memories
    if standing.held is not None:
        return ""
    if standing.torn:
        return f"step {position.step + 1} failed, or found no batch, and may have changed variables"
    if checkpoints.trains_apart:
        return "clusters that train apart are saved between two steps alone"
    if standing.whole:
        return ""
    late = sorted(name for name, value in memories.objects.items() if holds_variables(value))
    fits = position.fit > 0 and not position.ended
    if checkpoints.leading.has_others or (standing.steps < 2 and not fits):
        return "other steps may follow each step, and not all of them were taken"
    return f"{late[0]!r} of nb.state may be written after a step, and was not yet" if late else ""


def can_hold(checkpoints: Checkpoints) -> bool:
    """Whether the state after an epoch can be held: there is a step since the last saving, and nothing is read late."""
    standing, position = checkpoints.standing, checkpoints.position
    new = standing.steps > 0 and position.step > checkpoints.saved.step and not checkpoints.leading.trained_others
    spread = any(is_spread(value) for value in checkpoints.memories.objects.values())
    alone = checkpoints.group.alone
    return alone and new and standing.held is None and not (standing.torn or spread or checkpoints.trains_apart)


def _find_nan(logs: Mapping[str, float], entries: Sequence[Entry]) -> str:
    """The name of a result of the last step, or of a tensor, that has a NaN; "" if there is none."""
    result = next((name for name, value in logs.items() if math.isnan(value)), "")
    return result or next((entry.name for entry in entries if _has_nan(entry.value)), "")


def _has_nan(value: Any) -> bool:
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return False
    numbers = tf.cast(value, tf.float32) if value.dtype.size < 2 else tf.math.abs(value)
    return bool(tf.reduce_any(tf.math.is_nan(numbers)))
