"""The checkpoints of a run: what there is to save, when it is saved, and how all processes come to the same one.

A checkpoint is taken before a step of training, so all that was done after the step before is in it. The lead says in a
step's sheet that it is due; all hear that by the end of the step, and save before the next one. Each then writes its
part beside training, and says in the sheets that follow that it has; once all have, it is made a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.interval import Pace
from whale_nebula.checkpoint.manifest import Manifest, Part, Position, Tensor
from whale_nebula.config import Checkpointing
from whale_nebula.errors import CheckpointError, NebulaError, NebulaWarning
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.faults import failpoint
from whale_nebula.launch.ending import departure
from whale_nebula.runtime.checkpoint.codec_states import decode_state, encode_state
from whale_nebula.runtime.checkpoint.fitting import remember_callbacks, restore_callbacks
from whale_nebula.runtime.checkpoint.group import Group, begin_manifest, choose_source
from whale_nebula.runtime.checkpoint.objects import check_object, decode_value, encode_value, read_object, write_object
from whale_nebula.runtime.checkpoint.slices import Entry, Slice, Source
from whale_nebula.runtime.checkpoint.writing import Snapshot, Writer, commit_parts, write_part
from whale_nebula.site import script_site

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run
    from whale_nebula.runtime.step.engine import Engine

_LOG = logging.getLogger("whale_nebula.runtime.run")
_AWAY = 32
"""After so many steps of another program without one of the leading program, that one leads."""


class Training(Protocol):
    """A step that may train: an engine, or the train function of a model without scopes."""

    name: str
    steps: int

    @property
    def trains(self) -> bool:
        """Whether it does."""
        ...


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    manifest: Manifest
    part: Future[Part]
    began: float
    blocked: float


@dataclass
class Checkpoints:
    """The checkpoints of one run. `source` is the one that it goes on from, if there is one. Where that was written at
    the end of a `fit` whose next epochs are trained now, `reset_metrics` is called when the variables are restored.
    """

    run: Run
    options: Checkpointing
    folder: Folder
    group: Group
    source: Source | None = None
    position: Position = field(default_factory=Position)
    pace: Pace = field(default_factory=Pace)
    resumed: Position | None = None
    saved: Position = field(default_factory=Position)
    objects: dict[str, Any] = field(default_factory=dict)
    failed: bool = False
    fits: int = 0
    reset_metrics: Callable[[], None] | None = None
    skips: int = 0
    _known: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    _restored: set[str] = field(default_factory=set)
    _engines: dict[str, weakref.ref[Engine]] = field(default_factory=dict)
    _pending: _Pending | None = None
    _committing: Future[None] | None = None
    _due: bool = False
    _said: dict[str, Any] = field(default_factory=dict)
    _batch: str = ""
    _away: int = 0
    _trains: bool = False
    _heeds: bool = False
    _callbacks: Sequence[Any] = ()
    _read: dict[str, Any] = field(default_factory=dict)
    _logs: Callable[[], Mapping[str, float]] = dict
    _writer: Writer = field(default_factory=Writer)

    # ------------------------------------------------------------------ the beginning
    def open(self) -> None:
        """Choose the checkpoint that the run goes on from, together with all other processes."""
        if self.group.commits:
            self.folder.lock()
        self.source = choose_source(self.group, self.folder.scan)
        step = None if self.source is None else self.source.manifest.position.step
        if self.group.commits:
            for name in self.folder.clean(step):
                _LOG.warning("what was not read of %s is now called %s", self.folder.path, name)
        self.group.exchange("the choice of a checkpoint", None)
        if self.source is None or step is None:
            return
        self.position = self.resumed = self.saved = self.source.manifest.position
        self.pace.note_saving(step, time.monotonic())
        part = self.source.parts.get(self.group.worker)
        same = set(self.source.manifest.workers) == set(self.group.everyone)
        self._batch = part.batch if part is not None and same else ""
        self._restore_codecs()
        _LOG.info("%s: goes on from %s", self.group.worker, self.source.path)

    # ------------------------------------------------------------------ what there is to save
    def take_in(self, engine: Engine) -> None:
        """Know the variables of a program; where the run goes on from a checkpoint they get their values."""
        program = engine.name
        self._engines[program] = weakref.ref(engine)
        steps = self.position.programs.get(program, 0) if self.source is not None else 0
        if steps and engine.steps < steps:
            engine.steps = steps
            if hasattr(engine.runner.innermost, "steps"):
                engine.runner.innermost.steps = steps
        trainable = {variable.path for variable in engine.cut.program.variables if variable.trainable}
        self.take_variables(program, engine.captured.variables, trainable if steps else ())
        failpoint("checkpoint.restored")

    def take_variables(self, program: str, variables: Mapping[str, Any], needed: Any = ()) -> None:
        """Know variables by the names that they have in checkpoints; give them their values, if there are some. One
        that is `needed` must be in the checkpoint.
        """
        for path in sorted(variables):
            variable = variables[path]
            if id(variable) in self._names and self._known[self._names[id(variable)]]() is variable:
                continue
            name = self._name(program, path)
            self._known[name], self._names[id(variable)] = weakref.ref(variable), name
            if self.source is None or name in self._restored:
                continue
            self._restored.add(name)
            if name in self.source.tensors:
                self.group.restore(self.source, name, variable)
            elif path in needed:
                raise CheckpointError(
                    f"variable {path!r} of {program} is not in the checkpoint",
                    where=self.source.path,
                    why="the checkpoint is of another model",
                    mend='nb.init(checkpoint="another/folder")\nor nb.restore(path, model), which takes what fits',
                )
        if self.reset_metrics is not None and program in self.position.programs:
            self.reset_metrics()
            self.reset_metrics = None

    def _name(self, program: str, path: str) -> str:
        """The name of a variable in checkpoints: its path, unless another one has that already."""
        saved = {} if self.source is None else self.source.manifest.aliases.get(program, {})
        name = saved.get(path, path)
        number = 2
        while name in self._known and self._known[name]() is not None:
            name, number = f"{path}@{number}", number + 1
        if name != path:
            self._aliases.setdefault(program, {})[path] = name
        return name

    def _put(self, kind: str, entries: list[Entry]) -> Callable[[Any], str]:
        """What makes arrays entries of this worker's own, under a name of its own each."""

        def put(array: Any) -> str:
            value = tf.convert_to_tensor(array)
            name = f"{kind}/{self.group.worker}/{len(entries)}"
            form = Tensor(value.dtype.name, tuple(value.shape.as_list()))
            entries.append(Entry(name, form, Slice((0,) * len(form.shape), form.shape), value))
            return name

        return put

    def _memories(self, entries: list[Entry]) -> dict[str, Any]:
        """What this process remembers beside variables: states of codecs, of the callbacks of a `fit`, and of objects
        of the user's.
        """
        put = self._put("memory", entries)
        return {
            "codecs": {name: encode_state(state, put) for name, state in sorted(self.run.channels.items())},
            "callbacks": remember_callbacks(self._callbacks, put),
            "objects": {name: encode_value(value, put) for name, value in sorted(self._read.items())},
        }

    def _memory(self, kind: str) -> Any:
        """What was saved of that: by this worker, or where there are other workers now, by the first one."""
        if self.source is None or self.source.manifest.position != self.resumed:
            return {}
        parts = self.source.parts
        part = parts.get(self.group.worker) or (parts[min(parts)] if parts else None)
        return {} if part is None else part.memory.get(kind, {})

    def restore_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Let the callbacks of a `fit` remember what was saved of them."""
        if self.source is not None:
            restore_callbacks(callbacks, self._memory("callbacks") or [], self.source.read)

    def add_object(self, name: str, value: Any) -> None:
        """Save an object of the user's from now on, and give it what was saved of it."""
        check_object(name, value)
        self.objects[name] = value
        saved = self._memory("objects")
        if self.source is not None and name in saved:
            write_object(value, decode_value(saved[name], self.source.read))

    def _restore_codecs(self) -> None:
        part = None if self.source is None else self.source.parts.get(self.group.worker)
        if part is None or self.source is None:
            return
        for name, document in part.memory.get("codecs", {}).items():
            state = decode_state(document, self.source.read)
            if state is None:
                _LOG.warning("what the codec of %s remembers is of a kind that is not saved: it begins anew", name)
            else:
                self.run.channels[name] = state

    # ------------------------------------------------------------------ steps
    def before_step(self, engine: Training, tensors: Sequence[Any]) -> None:
        """A step is about to begin: the point at which all is saved, if it is due."""
        if not engine.trains:
            return
        self._trains = True
        self._check_batch(engine, tensors)
        self._choose_leading(engine.name)
        if engine.name != self.position.program:
            return
        if departure.agreed:
            self.finish()
            departure.begin()
        elif self._due:
            self._due = False
            self.save(fingerprint(tensors))

    def _choose_leading(self, program: str) -> None:
        """Steps are counted of one program: that which trained first, or which alone has trained for long."""
        self._away = 0 if program == self.position.program else self._away + 1
        if not self.position.program or self._away > _AWAY:
            self.position, self._away = replace(self.position, program=program), 0

    def _check_batch(self, engine: Training, tensors: Sequence[Any]) -> None:
        """The first batch must be the one that the run would have had next."""
        expected, leading = self._batch, self.position.program
        if not expected or engine.name != leading:
            return
        self._batch = ""
        if fingerprint(tensors) != expected:
            step = self.position.step
            raise CheckpointError(
                f"the batch of step {step + 1} is not the one that this run had before it ended",
                where=str(script_site()),
                why="the data comes in another order than it did, or from another place",
                mend="shuffle with a seed: dataset.shuffle(n, seed=1), or fit(shuffle=False)\n"
                "in a loop of your own, begin where nb.resumed() says: for batch in dataset.skip(nb.resumed().step)",
            )

    def after_step(self, engine: Training, logs: Callable[[], Mapping[str, float]], batches: int = 1) -> None:
        """A step is over, of so many batches; `logs` gives the numbers that it has returned."""
        if not engine.trains:
            return
        programs = {**self.position.programs, engine.name: engine.steps}
        self.position = replace(self.position, programs=programs)
        if engine.name != self.position.program:
            return
        position = self.position
        batch = position.batch + batches if position.fit and not position.ended else 0
        self.position, self._logs = replace(position, step=position.step + 1, batch=batch), logs
        self._read = {name: read_object(value) for name, value in self.objects.items()}
        if self.run.alone:
            self.hear({self.group.worker: self.sheet()})

    @contextlib.contextmanager
    def note_failure(self) -> Iterator[None]:
        """Around a step: after one that fails nothing is saved any more, unless another one succeeds."""
        self.failed = True
        yield
        self.failed = False

    def sheet(self) -> dict[str, Any]:
        """What is said of checkpoints with a step's sheet. The lead says whether one is due when the step is over."""
        said: dict[str, Any] = {"due": False, "saved": None}
        if self._pending is not None and self._pending.part.done():
            said["saved"] = [self._pending.manifest.position.step, _outcome(self._pending.part)]
        idle = self._pending is None and (self._committing is None or self._committing.done())
        if idle and self.run.here().lead:
            after = self.position.step + (0 if self.run.alone else 1)
            said["due"] = self.pace.is_due(after, time.monotonic())
        self._said = said
        return said

    def hear(self, sheets: Mapping[str, Any]) -> None:
        """What all have said with the same step: all conclude the same from it."""
        self._due = any(isinstance(sheet, dict) and sheet.get("due") is True for sheet in sheets.values())
        if self._pending is None:
            return
        step = self._pending.manifest.position.step
        told = {worker: _read_saved(sheet, step) for worker, sheet in sheets.items()}
        if set(told) == set(self.group.everyone) and all(told.values()):
            self._settle({worker: str(said) for worker, said in told.items()})

    @property
    def said(self) -> dict[str, Any]:
        """What this process has said with the step that runs."""
        return self._said

    # ------------------------------------------------------------------ fits of Keras
    def begin_epoch(self, epoch: int, callbacks: Sequence[Any]) -> None:
        """A `fit` begins an epoch."""
        self._callbacks = callbacks
        self.position = replace(self.position, fit=self.fits, epoch=epoch, batch=0, ended=False)

    def end_fit(self, epoch: int, epochs: int, callbacks: Sequence[Any]) -> None:
        """A `fit` has ended before an epoch, of so many that it was asked for."""
        self._callbacks = callbacks
        self.position = replace(self.position, epoch=epoch, batch=0, ended=True, epochs=epochs)
        self.finish()
        if departure.agreed:
            departure.begin()

    def skip_batch(self, count: int = 1) -> bool:
        """Whether the batch that comes, or so many, were trained before the run ended."""
        if self.skips < count:
            return False
        self.skips -= count
        self.position = replace(self.position, batch=self.position.batch + count)
        return True

    # ------------------------------------------------------------------ saving
    def save(self, batch: str = "") -> None:
        """Take all that there is to save, and write it beside what follows."""
        began, self._due = time.perf_counter(), False
        alive = {name: ref() for name, ref in self._known.items()}
        entries = list(self.group.list_entries({name: each for name, each in alive.items() if each is not None}))
        memory = self._memories(entries)
        logs = {name: float(value) for name, value in self._logs().items()}
        self.saved = self.position = replace(self.position, logs=logs)
        manifest = begin_manifest(self.run, self.position, self._aliases)
        snapshot = Snapshot(manifest, self.group.worker, entries, memory, batch)
        part = self._writer.submit(write_part, self.folder, snapshot)
        self.pace.note_saving(manifest.position.step, time.monotonic())
        self._pending = _Pending(manifest, part, time.perf_counter(), time.perf_counter() - began)
        if self.run.alone:
            self._committing = self._writer.submit(self._conclude, self._pending)
            self._pending = None

    def _settle(self, told: Mapping[str, str]) -> None:
        """All have written their parts, or could not."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        failpoint("checkpoint.said")
        failed = {worker: said[1:] for worker, said in sorted(told.items()) if said.startswith("!")}
        if failed:
            why = "; ".join(f"{worker}: {escape_foreign_text(said)}" for worker, said in failed.items())
            self._tell_failure(pending.manifest.position.step, why)
            return
        self.pace.note_cost(pending.blocked + time.perf_counter() - pending.began)
        if self.group.commits:
            keep = self.options.keep if not self.group.label else max(2, self.options.keep)
            self._committing = self._writer.submit(self._commit, pending.manifest, dict(told), keep)

    def _conclude(self, pending: _Pending) -> None:
        """Where nobody else is asked, a part is the whole as soon as it is written."""
        said = _outcome(pending.part)
        if said.startswith("!"):
            self._tell_failure(pending.manifest.position.step, said[1:])
            return
        self._commit(pending.manifest, {self.group.worker: said}, self.options.keep)
        self.pace.note_cost(pending.blocked + time.perf_counter() - pending.began)

    def _commit(self, manifest: Manifest, digests: Mapping[str, str], keep: int) -> None:
        try:
            commit_parts(self.folder, manifest, digests, self.group.members, keep)
            _LOG.info("%s: step %d is saved", self.group.worker, manifest.position.step)
        except (OSError, CheckpointError, tf.errors.OpError) as error:
            self._tell_failure(manifest.position.step, _explain(error))

    def _tell_failure(self, step: int, why: str) -> None:
        """Training goes on: what was saved before is still there."""
        warning = NebulaWarning(
            f"step {step} could not be saved",
            where=self.folder.path,
            why=why,
            mend="make room on that disk, or nb.init(checkpoint=...) with a folder that can be written",
        )
        warnings.warn_explicit(warning, NebulaWarning, self.folder.path, 0)

    def finish(self) -> None:
        """Save what is not saved yet, and return when it is a checkpoint. All processes call it at the same point."""
        busy = self._pending is not None
        self._drain()
        if self._known and replace(self.position, logs={}) != replace(self.saved, logs={}):
            busy = True
            self.save()
            self._drain()
        if self._committing is not None:
            self._committing.result()
        if busy:
            self.group.exchange("the end of a checkpoint", None)

    def end(self) -> None:
        """The run is closed: what is not saved yet is saved, unless a step has failed."""
        if self.failed:
            return
        try:
            self.finish()
        except (NebulaError, OSError) as error:
            _LOG.warning("step %d is not saved: %s", self.position.step, error)

    def _drain(self) -> None:
        """Wait for what is being written."""
        if self._pending is None:
            return
        pending = self._pending
        said = [pending.manifest.position.step, _outcome(pending.part)]
        told = self.group.exchange("the parts of a checkpoint", said)
        self._settle({worker: str(each[1]) for worker, each in told.items()})

    def heed_sigterm(self) -> None:
        """Let SIGTERM end a script that nobody has started as a worker after its step, with all saved. A handler of the
        user's own stays.
        """
        main = threading.current_thread() is threading.main_thread()
        if not self.run.alone or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def ask(number: int, frame: Any) -> None:
            departure.settle({self.group.worker: signal.Signals(number).name})
            if not self._trains:
                departure.begin()

        signal.signal(signal.SIGTERM, ask)
        self._heeds = True

    def close(self) -> None:
        """The run is over."""
        if self._heeds:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._writer.close()
        self.folder.unlock()


def _read_saved(sheet: Any, step: int) -> str | None:
    """What a worker says of its part of the checkpoint of a step, if it says something."""
    said = sheet.get("saved") if isinstance(sheet, dict) else None
    right = isinstance(said, list) and len(said) == 2 and said[0] == step and isinstance(said[1], str)
    return said[1] if right and isinstance(said, list) else None


def _outcome(part: Future[Part]) -> str:
    """The digest of a part, or "!" and why there is none; it waits for it."""
    try:
        return part.result().digest
    except (OSError, tf.errors.OpError, CheckpointError) as error:
        return f"!{_explain(error)}"


def _explain(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(getattr(error, "message", "") or error).partition("\n")[0]


def fingerprint(tensors: Sequence[Any]) -> str:
    """What tells one batch from another, of what this process has of it."""
    found = hashlib.sha256()
    for tensor in tensors:
        if isinstance(tensor, tf.Tensor | np.ndarray):
            array = np.asarray(tensor)
            found.update(f"{array.dtype}{array.shape}".encode())
            found.update(
                repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            )
    return found.hexdigest()[:32]


def open_checkpoints(run: Run, options: Checkpointing) -> Checkpoints:
    """The checkpoints of a run that has just met its other processes."""
    group = Group(run)
    folder = Folder(os.path.expanduser(options.folder).rstrip("/") or "/", group.label)
    pace = Pace(options.steps, options.seconds, options.overhead, saved_time=time.monotonic())
    found = Checkpoints(run, options, folder, group, pace=pace)
    with contextlib.nullcontext() if run.alone else run.ledger.tell_failures():
        found.open()
    found.heed_sigterm()
    return found
