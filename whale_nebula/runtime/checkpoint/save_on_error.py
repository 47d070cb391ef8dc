"""The last checkpoint of a script that stops with an error: the state after its last step, if that state is certain to
be consistent. It is consistent if an undisturbed run would have had the same state, and if a resumed run repeats
everything that came after it: in a `fit`, callbacks are called again for the last batch, and for the end of an epoch.
In a custom loop, code after a step is not repeated, so its effects must not be saved partly.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.parts import (
    WrittenPart,
    describe_parts,
    join_parts,
    list_uncommitted,
    read_document,
    write_document,
)
from whale_nebula.errors import StageFailedError
from whale_nebula.runtime.checkpoint.extra_state import PLACE
from whale_nebula.runtime.checkpoint.fit_position import AFTER_CALLBACKS, BEFORE_CALLBACKS, BEFORE_STEP
from whale_nebula.runtime.checkpoint.objects import holds_variables, is_spread, list_variables
from whale_nebula.runtime.checkpoint.slices import Entry
from whale_nebula.runtime.checkpoint.writer import Snapshot, commit_parts

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints
    from whale_nebula.runtime.checkpoint.group import Group
    from whale_nebula.runtime.checkpoint.known_variables import KnownVariables
    from whale_nebula.runtime.checkpoint.level import Level
    from whale_nebula.runtime.step.clock import Runner

_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass(frozen=True)
class BatchState:
    """What callbacks of a batch may change, as it was before them: their own states, by their places, and the values of
    small variables, by name. `place` is the place in the script.
    """

    place: str
    callbacks: Mapping[int, Any]
    variables: Mapping[str, Any]


_FIRST_STEPS, _STEPS_BETWEEN = 4, 16
"""All settings of a loop are read after so many first steps, and later once in so many."""


@dataclass
class ScriptState:
    """The position of the script between two steps of the leading program; this process has run `steps` of them.
    `thread` runs a step. `torn`: a step has failed, and may have changed variables; `was_rolled_back`: it has changed
    none. `is_complete`: all code between the last step and the next one has run. `batch_state` is the state before the
    callbacks that are being called. `epoch_snapshot` is the state after the last batch of an epoch, until the next step
    begins: validation and callbacks may change variables in between. `has_ended_epoch`: they may have begun to.
    `settings` are values after the last step of a loop, and `written` is the name of one that the loop has changed
    before a next step; `is_written`: before the last one.
    """

    steps: int = 0
    thread: int | None = None
    torn: bool = False
    was_rolled_back: bool = False
    is_complete: bool = False
    batch_state: BatchState | None = None
    epoch_snapshot: Snapshot | None = None
    has_ended_epoch: bool = False
    settings: Mapping[str, tuple[Any, bytes]] = field(default_factory=dict)
    written: str = ""
    is_written: bool = False

    def count_step(self, variables: KnownVariables, loop: str) -> None:
        """Count a completed step, which other code follows: a step of this program in a loop, or "". After the first
        steps of a loop, and later after some of them, all its settings are read.
        """
        reads_all = self.steps < _FIRST_STEPS or self.steps % _STEPS_BETWEEN == 0
        names = (variables.list_settings(loop) if reads_all else [self.written] * self.is_written) if loop else ()
        self.steps, self.is_complete, self.settings = self.steps + 1, False, variables.read_bytes(names)

    def find_written(self, variables: KnownVariables) -> None:
        """Before the next step of a loop: find out whether the loop has written a variable since the last one."""
        if self.settings:
            found = variables.find_written(self.settings)
            self.written, self.is_written = found or self.written, bool(found)

    def complete(self) -> None:
        """Record that all code between the last step and the next one has run."""
        self.is_complete, self.batch_state = True, None

    @contextlib.contextmanager
    def run_step(self, runner: Runner | None = None) -> Iterator[None]:
        """Context of a step of any program. A failed step has changed nothing if its error, or its runner, reports
        this.
        """
        self.thread, self.torn, self.was_rolled_back = threading.get_ident(), True, False
        try:
            yield
            self.torn = False
        except BaseException as failure:
            self.torn = failure.torn if isinstance(failure, StageFailedError) else runner is None or runner.torn
            self.was_rolled_back = not self.torn
            raise
        finally:
            self.thread = None


def save_at_error(checkpoints: Checkpoints) -> None:
    """Save unsaved steps, if the state is certain to be consistent, and log what was saved, or why not. In a run of
    several processes each writes its part; the next start of the run commits them if they match.
    """
    level, step = checkpoints.levels[0], checkpoints.position.step
    if not checkpoints.script_state.steps:
        return
    last, why, alone = 0, "", checkpoints.group.is_single_worker
    try:
        written = level.finish_writing() and level.pending == step
        last = _find_newest(level)
        if last < step:
            doubt = _find_doubt(checkpoints)
            if not written:
                why = doubt or _save(checkpoints)
            elif not doubt:
                _add_shared(checkpoints)
    except Exception as failure:  # the script's own error is raised, not this one
        why = str(failure).partition("\n")[0] or type(failure).__name__
    if why:
        who = "" if alone else f"{checkpoints.group.worker}: "
        newer = f" newer than step {last}" if last else ""
        _LOG.warning("%sno step%s could be saved in %s: %s", who, newer, level.folder.path, why)
    elif alone or last == step:
        _LOG.warning("the last completed step, %d, is saved in %s", step, level.folder.path)
    else:
        _LOG.warning(
            "%s: its part of the last completed step, %d, is saved in %s: the run resumes from it if all "
            "workers have saved theirs", checkpoints.group.worker, step, level.folder.path,
        )  # fmt: skip


def commit_written(group: Group, folder: Folder) -> None:
    """Before a run chooses a checkpoint: commit the parts that its last start wrote when it stopped, if those of all
    workers exist and are from the same moment. All processes call it.
    """
    elsewhere = set(group.everyone).difference(group.members)
    written = list_uncommitted(folder, elsewhere) if group.commits else {}
    descriptions = group.exchange("the written checkpoint parts", describe_parts(written))
    for joined in join_parts(descriptions):
        own = {w: each for w, each in written.get(joined.step, {}).items() if joined.holders.get(w) == group.worker}
        if joined.why and joined.step in written:
            _LOG.warning("the parts of step %d in %s are not used: %s", joined.step, folder.path, joined.why)
        elif own:
            _commit(group, folder, own, joined.digests)
        if not joined.why:
            return


def _commit(group: Group, folder: Folder, written: Mapping[str, WrittenPart], digests: Mapping[str, str]) -> None:
    found = [each.manifest for each in written.values() if each.manifest is not None]
    manifest = replace(found[0], at_error=any(each.at_error for each in found))
    try:
        commit_parts(folder, manifest, digests, list(written), 0)
        _LOG.info("%s: step %d is saved, from the parts of all workers", group.worker, manifest.position.step)
    except Exception as error:  # the run resumes from an earlier one
        _LOG.warning("the parts of step %d in %s cannot be joined: %s", manifest.position.step, folder.path, error)


def _find_newest(level: Level) -> int:
    """The newest step that is saved; 0 if there is none."""
    return max((found.step for found in level.folder.scan() if found.is_committed), default=0)


def _save(checkpoints: Checkpoints) -> str:
    """Save the state after the last step to the disk; returns why that failed, or "". One checkpoint more than usual is
    kept, so that it replaces none.
    """
    script_state, group = checkpoints.script_state, checkpoints.group
    held, batch_state = script_state.epoch_snapshot, script_state.batch_state
    small = {} if batch_state is None else batch_state.variables
    checkpoints.extra_state.held_callbacks = {} if batch_state is None else batch_state.callbacks
    snapshot = held or checkpoints.take_snapshot(held=small)
    if damaged := _find_nan(snapshot.manifest.position.logs, snapshot.entries):
        return f"{damaged} is NaN"
    level = checkpoints.levels[0]
    level.keep += 1
    place = BEFORE_STEP if script_state.is_complete else BEFORE_CALLBACKS
    if held is not None:
        place = AFTER_CALLBACKS
    elif batch_state is not None:
        place = batch_state.place
    memory = {**snapshot.memory, PLACE: place}
    exact = group.is_single_worker or held is not None
    shared = None if exact else group.digest_shared(checkpoints.known_variables.naming.find_alive(), small)
    snapshot = replace(
        snapshot, manifest=replace(snapshot.manifest, at_error=True), memory=memory, exact=exact, shared=shared
    )
    level.write(snapshot)
    written = level.finish_writing() or (group.is_single_worker and _find_newest(level) == snapshot.step)
    return "" if written else "its files could not be written"


def _add_shared(checkpoints: Checkpoints) -> None:
    """Add digests of shared variables to the already written part of the last step: other workers may write theirs at
    another line of the script.
    """
    group, level = checkpoints.group, checkpoints.levels[0]
    path = level.folder.worker_path(checkpoints.position.step, group.worker)
    shared = group.digest_shared(checkpoints.known_variables.naming.find_alive(), {})
    write_document(path, replace(read_document(path), shared=shared))


def _find_doubt(checkpoints: Checkpoints) -> str:
    """The reason why the state may not be that after a complete step, or ""."""
    script_state, position, extra_state = checkpoints.script_state, checkpoints.position, checkpoints.extra_state
    if script_state.epoch_snapshot is not None:
        return ""
    if script_state.torn:
        return f"step {position.step + 1} failed or got no batch, and may have changed variables"
    if checkpoints.must_synchronize:
        return "with local SGD, all clusters would have to exchange their states"
    if shared := _find_shared(checkpoints):
        return f"{shared!r} of nb.state must be read by all processes together"
    spread = sorted(name for name, value in extra_state.objects.items() if is_spread(value))
    if spread and script_state.was_rolled_back:
        return f"step {position.step + 1} failed, and may have changed {spread[0]!r} of nb.state"
    if script_state.is_complete:
        return ""
    if script_state.has_ended_epoch:
        return "callbacks at the end of an epoch may have changed variables"
    late = sorted(name for name, value in extra_state.objects.items() if holds_variables(value))
    fits = position.fit > 0 and not position.ended
    if checkpoints.leading.has_others or (script_state.steps < 2 and not fits):
        return "each step may be followed by other steps, and not all of them were completed"
    if script_state.is_written and not fits and not checkpoints.known_variables.find_written(script_state.settings):
        return f"the loop writes {script_state.written!r} between its steps, and may not have done so for the next one"
    return f"{late[0]!r} of nb.state may be written after a step, which has not happened yet" if late else ""


def can_hold(checkpoints: Checkpoints) -> bool:
    """Whether the state after an epoch can be kept for an error: it is not saved, nor held, and certain to be that
    after a complete step, without objects that cannot be read now.
    """
    script_state, position = checkpoints.script_state, checkpoints.position
    new = script_state.steps > 0 and position.step > checkpoints.saved.step and not checkpoints.leading.trained_others
    spread = any(is_spread(value) for value in checkpoints.extra_state.objects.values()) or _find_shared(checkpoints)
    unknown = script_state.torn or spread or checkpoints.must_synchronize
    return new and script_state.epoch_snapshot is None and not unknown


def _find_shared(checkpoints: Checkpoints) -> str:
    """The name of a user object with a variable of a program, which several processes read together; "" if there is
    none.
    """
    group, objects = checkpoints.group, checkpoints.extra_state.objects
    if group.is_single_worker:
        return ""
    shared = (n for n, each in sorted(objects.items()) if any(map(group.knows_holders, list_variables(each))))
    return next(shared, "")


def _find_nan(logs: Mapping[str, float], entries: Sequence[Entry]) -> str:
    """The name of a result of the last step, or of a tensor, that has a NaN; "" if there is none."""
    result = next((name for name, value in logs.items() if math.isnan(value)), "")
    return result or next((entry.name for entry in entries if _has_nan(entry.value)), "")


def _has_nan(value: Any) -> bool:
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return False
    numbers = tf.cast(value, tf.float32) if value.dtype.size < 2 else tf.math.abs(value)
    return bool(tf.reduce_any(tf.math.is_nan(numbers)))
