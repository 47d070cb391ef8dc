"""The checkpoints of a run: what is saved, when, and how all processes agree on one.

A checkpoint is taken before a step of training, so it includes all changes after the previous step. The lead announces
in a step's sheet that it is due; all receive the announcement by the end of the step, and save before the next one.
Each process then writes its part concurrently with training, and announces this in a later sheet; when all parts are
written, the checkpoint is committed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from whale_nebula.checkpoint.manifest import Position, ProgramPlan, Shapes
from whale_nebula.checkpoint.parts import Start
from whale_nebula.errors import CheckpointError, NebulaError
from whale_nebula.faults import failpoint
from whale_nebula.launch.worker_exit import exit_agreement, restore_signal_handler, set_signal_handler
from whale_nebula.passes.effects import STATEFUL_DRAWS
from whale_nebula.report.records import Goodput, TimeAccount
from whale_nebula.runtime.checkpoint.cluster_copies import capture_rounds, list_copies, must_synchronize
from whale_nebula.runtime.checkpoint.copies import hand_over_parts
from whale_nebula.runtime.checkpoint.extra_state import WRITTEN, ExtraState
from whale_nebula.runtime.checkpoint.fit_position import BEFORE_STEP, copy_callback_states
from whale_nebula.runtime.checkpoint.group import Group, begin_manifest, choose_source, describe_plan
from whale_nebula.runtime.checkpoint.known_variables import KnownVariables, warn_of_unused
from whale_nebula.runtime.checkpoint.leading_program import LeadingProgram
from whale_nebula.runtime.checkpoint.level import Level, Notices, estimate_between_failures
from whale_nebula.runtime.checkpoint.save_on_error import (
    BatchState,
    ScriptState,
    can_hold,
    commit_written,
    save_at_error,
)
from whale_nebula.runtime.checkpoint.slices import Source
from whale_nebula.runtime.checkpoint.writer import Snapshot
from whale_nebula.runtime.local_sgd.step import LocalSgdRunner, OwnClusterRunner
from whale_nebula.site import script_site, warn_once
from whale_nebula.tf import keras_training

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run
    from whale_nebula.runtime.step.clock import Runner
    from whale_nebula.runtime.step.engine import Engine

_LOG = logging.getLogger("whale_nebula.runtime.run")


class Training(Protocol):
    """A step that may train: an engine, or the train function of a model without scopes. `steps` counts its training
    steps. In a loop its `title` distinguishes it from other steps of the same name, which train other variables.
    """

    name: str
    title: str
    steps: int

    @property
    def trains(self) -> bool:
        """Whether the step trains."""

    def list_trained(self) -> Sequence[Any]:
        """The trained variables, once they are created."""


@dataclass
class Checkpoints:
    """The checkpoints of one run, written to `levels`, of which the first is the disk. `source` is the checkpoint that
    the run resumes from, if any, and `resumed` its position. `position` is the present one, and `saved` that of the
    last snapshot for the disk.

    `failed`: the last step has failed. `fits` counts the calls of `fit`, and `skips` the next batches of a `fit` that
    were already trained. `forms`, by program, are the shapes for which it was traced, `intervals` the chosen numbers of
    steps between its rounds, and `plans` how it is run, as in the manifest. `pending_notes` is this worker's entry of
    the sheet of the running step. `has_read`: a program was registered, or `nb.restore` was called. `resume_at` is
    called at places of a resumed `fit`, until the place where its state was saved.
    """

    run: Run
    group: Group
    levels: Sequence[Level]
    extra_state: ExtraState
    source: Source | None = None
    position: Position = field(default_factory=Position)
    resumed: Position | None = None
    saved: Position = field(default_factory=Position)
    time_account: TimeAccount = field(default_factory=TimeAccount)
    failed: bool = False
    has_read: bool = False
    fits: int = 0
    skips: int = 0
    forms: dict[str, tuple[Shapes, ...]] = field(default_factory=dict)
    intervals: dict[str, int] = field(default_factory=dict)
    plans: dict[str, ProgramPlan] = field(default_factory=dict)
    pending_notes: list[Any] = field(default_factory=list)
    script_state: ScriptState = field(default_factory=ScriptState)
    leading: LeadingProgram = field(default_factory=LeadingProgram)
    known_variables: KnownVariables = field(init=False)
    resume_at: Callable[[str], None] | None = None
    next_batch: str = ""
    _local_sgd_runners: dict[str, LocalSgdRunner] = field(default_factory=dict)
    _restore_requests: dict[str, int] = field(default_factory=dict)
    _finished: Position | None = None
    _ended: bool = False
    _start: Start = field(default_factory=Start)
    _trains: bool = False
    _handled_signals: tuple[signal.Signals, ...] = ()
    _interrupted: bool = False
    _logs: Callable[[], Mapping[str, float]] = dict

    def __post_init__(self) -> None:
        self.known_variables = KnownVariables(self.group, restored_elsewhere=self.extra_state.restored_variables)

    # ------------------------------------------------------------------ the beginning
    def open(self) -> None:
        """Choose the checkpoint that the run resumes from, together with all other processes."""
        folders = [level.folder for level in self.levels]
        commit_written(self.group, folders[0])
        self.source = choose_source(
            self.group, lambda: [each for folder in folders for each in folder.scan()], folders[-1], folders[0].scan
        )
        step = None if self.source is None else self.source.manifest.position.step
        for level in self.levels if self.group.commits else ():
            level.clean(step)
        tokens = self.group.exchange("the choice of a checkpoint", secrets.token_hex(8))
        self._start = Start(str(tokens[min(tokens)]), tuple(sorted(self.group.everyone)))
        if self.source is None or step is None:
            return
        if not self.source.manifest.at_error:  # otherwise a run that fails at each step would be restarted forever
            self.group.report_saved(step)
        self.position = self.resumed = self.source.manifest.position
        self.forms = dict(self.source.manifest.forms)
        self.run.length_choices |= self.source.manifest.by_length
        if os.path.dirname(self.source.path) == folders[0].path:  # not in memory
            self.saved = self.position
        for level in self.levels:
            level.pace.record_saving(step, time.monotonic())
        part = self.source.parts.get(self.group.worker)
        same = set(self.source.manifest.workers) == set(self.group.everyone)
        self.intervals = dict(self.source.manifest.intervals) if same else {}
        self.next_batch = part.batch if part is not None and same else ""
        self.time_account.resume(Goodput(**self.source.manifest.spent), self.source.manifest.at)
        self.extra_state.source = self.source
        self.known_variables.open(self.source, self.extra_state.written_between_steps)
        self.extra_state.restore_codecs()
        _LOG.info("%s: resumes from %s", self.group.worker, self.source.path)

    # ------------------------------------------------------------------ variables
    def register_program(self, engine: Engine) -> None:
        """Register the variables of a program, and restore them if the run resumes from a checkpoint."""
        program, self.has_read = engine.name, True
        self._restore_requests[program] = self.known_variables.restore_requests
        if isinstance(engine.runner, LocalSgdRunner):
            self._local_sgd_runners[program] = engine.runner
        trainable = {variable.path for variable in engine.cut.program.variables if variable.trainable}
        variables = engine.captured.variables
        self.add_variables(engine, variables)
        self.plans[program] = describe_plan(engine.cut)
        steps = self.count_saved(engine)
        needed = trainable if steps else set()
        apart = self._local_sgd_runners.get(program)
        if apart is not None and self.resumed is not None:
            began = self.position.step > self.resumed.step
            self.known_variables.restore_apart(program, variables, needed, apart, self.run.rounds, began=began)
        else:
            self.register_variables(program, variables, needed, counted=bool(steps))
        self.known_variables.restore(program, engine.unread, counted=False)
        if engine.steps < steps and self.known_variables.was_reached(program, needed):
            engine.count_from(steps)
        if engine.trains:
            self.restore_others(engine)
            graph = engine.cut.program.graph
            self.warn_of_draws(program, {op.type for part in (graph, *graph.functions.values()) for op in part.ops})
        failpoint("checkpoint.restored")

    def record_form(self, program: str, shapes: Shapes) -> None:
        """Record that a program was traced for these input shapes: a resumed run creates the same traces."""
        known = self.forms.get(program, ())
        if shapes not in known:
            self.forms[program] = (*known, shapes)

    @property
    def _is_in_fit(self) -> bool:
        return bool(self.position.fit) and not self.position.ended

    def add_variables(self, engine: Training, variables: Mapping[str, Any]) -> None:
        """Register the variables of a program by their names in checkpoints."""
        if engine.trains and not self._is_in_fit:
            self.known_variables.expect_leading(engine.name, self.position.program, variables)
        self.known_variables.add(engine.name, variables)

    def count_saved(self, engine: Training) -> int:
        """The number of steps of a program in the checkpoint that the run resumes from."""
        if self.source is None or not engine.trains:
            return 0
        return self.position.programs.get(self._find_title(engine), 0)

    def _find_title(self, engine: Training) -> str:
        """The title of a program: in a `fit` its name; in custom loops, where several steps may share a name, it
        also depends on the trained variables.
        """
        if self._is_in_fit:
            return engine.name
        if not engine.title:
            engine.title = self.known_variables.titles.find(engine.name, engine.list_trained())
            if engine.name in self._local_sgd_runners:
                self._local_sgd_runners[engine.title] = self._local_sgd_runners[engine.name]
        return engine.title

    def restore_if_requested(self, engine: Engine) -> None:
        """Restore a program's variables again, if this was requested since it was registered."""
        if self._restore_requests.get(engine.name) != self.known_variables.restore_requests:
            self.register_program(engine)

    def warn_of_draws(self, program: str, types: Collection[str]) -> None:
        """Warn if one of these types of ops of a program draws random numbers from a state that is not saved."""
        drawing = sorted(STATEFUL_DRAWS & set(types))
        if drawing:
            warn_once(
                script_site(),
                f"the random state of {drawing[0]} in {program} is not saved: a resumed run draws different numbers",
                where=self.levels[0].folder.path,
                why="TensorFlow keeps it inside the op, where it cannot be read",
                mend="use keras.random with a keras.random.SeedGenerator as seed, or tf.random.stateless_...\n"
                "for tf.random.normal and tf.random.uniform the state is saved if a seed is set: "
                "keras.utils.set_random_seed(1)",
                key=(program, drawing[0]),
            )

    def register_variables(
        self, program: str, variables: Mapping[str, Any], needed: Collection[str], *, counted: bool
    ) -> None:
        """Register the variables of a program by path, and restore those that were saved (`KnownVariables.restore`)."""
        self.has_read = True
        self.known_variables.restore(program, variables, needed, counted=counted)

    def restore_others(self, engine: Training) -> None:
        """Restore the variables of other programs, too, when the leading program of a resumed run begins to train."""
        if self._find_title(engine) == self.position.program:
            self.known_variables.restore_others()

    # ------------------------------------------------------------------ steps
    def needs_batch(self, engine: Training) -> bool:
        """Whether the next batch of a program is needed before its step, to compare or to save its fingerprint."""
        due = bool(self.next_batch) or any(level.due for level in self.levels)
        return due and self._find_title(engine) == self.position.program

    def before_step(self, engine: Training, tensors: Sequence[Any]) -> None:
        """Before a step of training: save everything if a checkpoint is due. Raises if the run was asked to stop."""
        if not engine.trains:
            return
        self._trains = True
        self.time_account.begin()
        title = self._find_title(engine)
        if title == self.position.program:
            self._check_batch(tensors)
        self.position = self.leading.choose(self.position, title)
        if title != self.position.program:
            return
        self.extra_state.restore_late()
        if self.resume_at is not None:
            self.resume_at(BEFORE_STEP)
        if not self.leading.has_others:  # these may have written them
            self.script_state.find_written(self.known_variables)
        self.script_state.complete()
        self.script_state.epoch_snapshot, self.script_state.has_ended_epoch = None, False
        if exit_agreement.is_agreed or self._interrupted:
            self.finish(ended=False)
        self._end_if_interrupted()
        exit_agreement.begin_step()
        due = (
            [level for level in self.levels if level.due] if self.notices is None else self._receive_apart(self.notices)
        )
        if due:
            self.save(due, fingerprint(tensors))

    @property
    def must_synchronize(self) -> bool:
        """Whether clusters cannot be saved one by one: they must synchronise before, or are in other processes."""
        return bool(self._local_sgd_runners) and (not self.run.alone or must_synchronize(self.run.rounds))

    @property
    def notices(self) -> Notices | None:
        """The notices by which workers agree on savings if processes train the leading program with local SGD."""
        return self._notices if self.position.program in self._local_sgd_runners else None

    @cached_property
    def _notices(self) -> Notices | None:
        if self.run.alone:
            return None
        session = self.run.ledger.session
        return Notices(session.worker, session.links, self.levels, session.patience, absences=session.absences)

    def _receive_apart(self, notices: Notices) -> list[Level]:
        """The levels to save before the next step. One worker announces the steps that are saved: the one through which
        all exchanged data pass, otherwise the first.
        """
        step, runner = self.position.step, self._local_sgd_runners[self.position.program]
        notices.poll()
        found = notices.take_due(step)
        announcer = runner.participants.deciding_worker or self.group.everyone[0]
        if self.group.worker == announcer and isinstance(runner, OwnClusterRunner):
            self._estimate_failures()
            for number, level in enumerate(self.levels):
                if number not in notices.due and level not in found and level.is_due(step):
                    notices.announce(number, step + runner.count_to_common())
        return found

    def continue_without(self, workers: Collection[str]) -> None:
        """Continue without these workers, which were lost: what is saved from now on needs no parts of them."""
        self.group.remove_workers(workers)
        self._start = replace(self._start, workers=tuple(sorted(self.group.everyone)))
        for level in self.levels:
            level.abandon()

    def _estimate_failures(self) -> None:
        for level in self.levels:
            level.pace.between_failures = estimate_between_failures(
                self.time_account.sum_up().total, self.run.here().epoch
            )

    def count_last(self) -> None:
        """At the end of a loop: count the last program's steps if it trained after the leading one, not alternately."""
        self.position = self.leading.count_last(self.position)

    def _check_batch(self, tensors: Sequence[Any]) -> None:
        """Verify that the first batch is the one that the saved run would have trained next."""
        expected, self.next_batch = self.next_batch, ""
        if expected and fingerprint(tensors) != expected:
            step = self.position.step
            raise CheckpointError(
                f"the batch of step {step + 1} differs from the one that this run had before it stopped",
                where=str(script_site()),
                why="the order of the data, the batch size or the starting point has changed",
                mend="shuffle with a seed: dataset.shuffle(n, seed=1), or fit(shuffle=False)\n"
                "in your own loop, start at the step of nb.resumed(): for batch in dataset.skip(nb.resumed().step)",
            )

    def after_step(self, engine: Training, logs: Callable[[], Mapping[str, float]], batches: int = 1) -> None:
        """Record a finished step of this number of batches; `logs` returns its results."""
        if not engine.trains:
            return
        self.extra_state.read_objects(spread=exit_agreement.is_agreed or any(level.due for level in self.levels))
        title = self._find_title(engine)
        programs = {**self.position.programs, title: engine.steps}
        self.position = replace(self.position, programs=programs)
        if title != self.position.program:
            return
        position = self.position
        batch = position.batch + batches if self._is_in_fit else 0
        self.position, self._logs = replace(position, step=position.step + 1, batch=batch), logs
        is_in_loop = not (self._is_in_fit or self._local_sgd_runners)
        self.script_state.count_step(self.known_variables, engine.name if is_in_loop else "")
        if self.run.alone:
            self.receive_sheets({self.group.worker: self.sheet()})

    @contextlib.contextmanager
    def note_failure(self, runner: Runner | None = None) -> Iterator[None]:
        """Context of a step of a runner. If it fails, nothing is saved at the end, unless a later one succeeds."""
        self.failed = True
        with self.script_state.run_step(runner), self.time_account.count_step():
            yield
        self.failed = False

    def sheet(self) -> list[Any]:
        """The entries of the levels for a step's sheet. The lead announces whether a saving is due after the step."""
        if self.notices is not None:
            return []
        after = self.position.step + (0 if self.run.alone else 1)
        lead = self.run.here().lead
        if lead:
            self._estimate_failures()
        self.pending_notes = [level.sheet(after, lead) for level in self.levels]
        return self.pending_notes

    def receive_sheets(self, sheets: Mapping[str, Any]) -> None:
        """Receive the sheets of all processes for the same step."""
        for number, level in enumerate(self.levels if self.notices is None else ()):
            # a sheet is untrusted, because another process has sent it
            entries = {w: s[number] if isinstance(s, list) and len(s) > number else None for w, s in sheets.items()}
            level.receive_sheets(entries)

    # ------------------------------------------------------------------ fits of Keras
    def begin_epoch(self, program: str, epoch: int, callbacks: Sequence[Any]) -> None:
        """Record the start of an epoch of a `fit` of this program."""
        self.extra_state.callbacks = callbacks
        self.position = replace(self.position, program=program, fit=self.fits, epoch=epoch, batch=0, ended=False)

    def end_fit(self, epoch: int, epochs: int, callbacks: Sequence[Any]) -> None:
        """At the end of a `fit` before `epoch`, of `epochs` requested: save everything. With local SGD, clusters
        synchronise first.
        """
        if self.position.program in self._local_sgd_runners:
            self.run.settle()
        self.extra_state.callbacks = callbacks
        self.extra_state.keep_history(self.position.fit, callbacks)
        self.position = replace(self.position, epoch=epoch, batch=0, ended=True, epochs=epochs)
        self.script_state.complete()
        self.finish()
        self.script_state.epoch_snapshot, self.script_state.has_ended_epoch = None, False
        self._end_if_interrupted()
        if exit_agreement.is_agreed:
            exit_agreement.begin_step()

    def hold_epoch(self) -> None:
        """Keep the state after an epoch's last batch, until the next step begins: an error may come before it."""
        self.script_state.batch_state = None
        if can_hold(self):
            with self.time_account.count_saving():
                self.script_state.epoch_snapshot = self.take_snapshot()
        self.script_state.has_ended_epoch = True

    def hold_batch(self, hook: str, place: str) -> None:
        """Keep what the callbacks of a batch may change at this hook: an error may come before all are called."""
        script_state, callbacks = self.script_state, self.extra_state.callbacks
        if not script_state.steps or script_state.epoch_snapshot is not None:
            return
        changes = any(keras_training.may_change_variables(each, hook) for each in callbacks)
        small = self.known_variables.read_small() if changes else {}
        script_state.batch_state = BatchState(place, copy_callback_states(callbacks, hook), small)

    def skip_batch(self, program: str, count: int = 1) -> bool:
        """Whether the next `count` batches of a `fit` were trained before the run stopped; if so, count them as passed.
        False for programs that callbacks of the `fit` train.
        """
        if self.skips < count or program != self.position.program:
            return False
        self.skips -= count
        self.position = replace(self.position, batch=self.position.batch + count)
        return True

    # ------------------------------------------------------------------ saving
    def save(self, levels: Sequence[Level], batch: str = "") -> None:
        """Take a snapshot and write it concurrently with training; `batch` is the fingerprint of the next batch."""
        with self.time_account.count_saving():
            self._save(levels, batch)

    def _save(self, levels: Sequence[Level], batch: str, ended: bool = False) -> None:
        if self._local_sgd_runners and must_synchronize(self.run.rounds):
            self.run.settle()
        if not self._local_sgd_runners:
            self.known_variables.keep_unused()
        snapshot = self.take_snapshot(batch, ended)
        for level in levels:
            level.write(snapshot)
            if level.durable:
                self.saved = self.position

    def take_snapshot(self, batch: str = "", ended: bool = False, held: Mapping[str, Any] | None = None) -> Snapshot:
        """The state of this worker now; `batch` is the fingerprint of the next batch, unless training has `ended`. Some
        variables have `held` values instead of the present ones.
        """
        if not (self._local_sgd_runners or self.group.label):  # if hosts have their own folders, `_save` does it
            self.known_variables.keep_unused()
        alive = self.known_variables.naming.find_alive()
        if self._local_sgd_runners:
            self.run.rounds.propagate_writes({id(alive[name]): value for name, value in (held or {}).items()})
        sharers = self.run.rounds.own_workers if self._local_sgd_runners and not self.run.alone else None  # None: all
        entries, late = list(self.group.list_entries(alive, sharers)), None
        entries = [each._replace(value=held[each.name]) if held and each.name in held else each for each in entries]
        if self._local_sgd_runners:
            entries = list(list_copies(self.run.rounds, self.group, entries, alive))
            late = capture_rounds(self.run.rounds, self.known_variables.naming.by_id)
        memory = self.extra_state.encode(entries, ended) | {WRITTEN: self.script_state.written if ended else ""}
        logs = {name: float(value) for name, value in self._logs().items()}
        self.position = replace(self.position, logs=logs, titles=self.known_variables.titles.describe())
        manifest = begin_manifest(self.run, self.position, self.known_variables.naming.aliases)
        manifest = replace(
            manifest,
            forms=self.forms,
            intervals=self.intervals,
            by_length=self.run.length_choices,
            plans=self.plans,
            at=time.time(),
            spent=asdict(self.time_account.sum_up()),
        )
        return Snapshot(manifest, self.group.worker, entries, memory, batch, late, self._start)

    def finish(self, *, ended: bool = True) -> None:
        """Save unsaved steps, and return when they are on the disk, or a failure was reported. All processes call it at
        the same point. `ended` is true unless a step is about to begin.
        """
        with self.time_account.count_saving():
            self._finish(ended)

    def _finish(self, ended: bool) -> None:
        stands, apart = replace(self.position, logs={}), self.notices
        if apart is not None and stands == self._finished:
            return
        busy = apart is not None or any(level.busy for level in self.levels)
        self._drain()
        if self.known_variables.naming.by_id and stands != replace(self.saved, logs={}):
            busy = True
            self._save(self.levels[:1], "", ended)
            self._drain()
        if busy:
            self.group.exchange("the end of a checkpoint", None)
        leaving = self.group.find_leaving(exit_agreement.counts)
        if self.group.label and self.saved.step and leaving:
            hand_over_parts(self.group, self.levels[0].folder, self.saved.step, leaving)
        if apart is not None:
            apart.poll()
            apart.due.clear()
            self._finished = stands

    def _drain(self) -> None:
        """Wait until all pending checkpoints are committed."""
        if self.notices is not None:
            self.notices.drain()
        for level in self.levels:
            level.drain()

    def end(self) -> None:
        """At the end of the run: save unsaved steps, unless the last step has failed."""
        error = sys.exc_info()[1]
        if self.group.is_single_worker and error is not None and not isinstance(error, SystemExit | GeneratorExit):
            self.end_by_error()
        if self.failed:
            return
        if self.run.here().lead:
            warn_of_unused(self)
        self.count_last()
        try:
            self.finish()
        except (NebulaError, OSError) as error:
            _LOG.warning("step %d is not saved: %s", self.position.step, error)

    def end_by_error(self) -> None:
        """When a script stops with an error: save unsaved steps if their state is consistent, once."""
        if not self._ended:
            self.group.report_saving(True)
            save_at_error(self)
            self.group.report_saving(False)
        self.failed = self._ended = True

    def handle_signals(self) -> None:
        """Make SIGTERM, and Ctrl-C during training, stop a script without a launcher after its step, and save it."""
        if self.run.alone:
            handlers = {signal.SIGTERM: self._leave, signal.SIGINT: self._interrupt}
            self._handled_signals = tuple(n for n, handler in handlers.items() if set_signal_handler(n, handler))

    def _leave(self, name: str) -> None:
        exit_agreement.conclude_step({self.group.worker: name})
        if not self._trains:
            exit_agreement.begin_step()

    def _interrupt(self, name: str) -> None:
        """On Ctrl-C: a first one during training makes it stop before the next step, any other one raises at once. It
        may interrupt a print, so this writes to the descriptor directly.
        """
        trains = self.script_state.thread == threading.get_ident() or keras_training.is_fitting()
        if not trains or self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt
        self._interrupted = True
        with contextlib.suppress(OSError):
            text = f"whale-nebula: {name}: saves, then stops before the next step; send it again to stop now\n"
            os.write(2, text.encode())

    def _end_if_interrupted(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def close(self) -> None:
        """Release all resources at the end of the run."""
        for number in self._handled_signals:
            restore_signal_handler(number)
        for level in self.levels:
            level.close()


def fingerprint(tensors: Sequence[Any]) -> str:
    """A digest of the dense tensors of a batch's local part."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if isinstance(tensor, tf.Tensor | np.ndarray):
            array = np.asarray(tensor)
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(
                repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            )
    return digest.hexdigest()[:32]
