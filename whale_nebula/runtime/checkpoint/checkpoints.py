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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.interval import Pace, guess_between_failures
from whale_nebula.checkpoint.manifest import Position
from whale_nebula.config import Checkpointing
from whale_nebula.errors import CheckpointError, NebulaError
from whale_nebula.faults import failpoint
from whale_nebula.launch.ending import departure
from whale_nebula.runtime.checkpoint.group import Group, begin_manifest, choose_source
from whale_nebula.runtime.checkpoint.level import Level
from whale_nebula.runtime.checkpoint.memories import Memories
from whale_nebula.runtime.checkpoint.slices import Source
from whale_nebula.runtime.checkpoint.spent import Spent
from whale_nebula.runtime.checkpoint.writing import Snapshot
from whale_nebula.site import script_site

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run
    from whale_nebula.runtime.step.engine import Engine

_LOG = logging.getLogger("whale_nebula.runtime.run")
_AWAY = 32
"""After so many steps of another program without one of the leading program, that one leads."""
_MEMORY_FIRST = 5.0
"""Seconds until the first saving in memory, which tells what one costs."""
_MEMORY_KEPT = 2


class Training(Protocol):
    """A step that may train: an engine, or the train function of a model without scopes."""

    name: str
    steps: int

    @property
    def trains(self) -> bool:
        """Whether it does."""
        ...


@dataclass
class Checkpoints:
    """The checkpoints of one run, written to `levels`, of which the first is the disk. `source` is the one that it goes
    on from, if there is one, and `resumed` where that stood.

    Where it was written at the end of a `fit` whose next epochs are trained now, `reset_metrics` is called when the
    variables are restored. So many batches of a `fit` are `skips`, as they were trained already.
    """

    run: Run
    group: Group
    levels: Sequence[Level]
    memories: Memories
    source: Source | None = None
    position: Position = field(default_factory=Position)
    resumed: Position | None = None
    saved: Position = field(default_factory=Position)
    spent: Spent = field(default_factory=Spent)
    failed: bool = False
    fits: int = 0
    skips: int = 0
    reset_metrics: Callable[[], None] | None = None
    said: list[Any] = field(default_factory=list)
    _known: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    _restored: set[str] = field(default_factory=set)
    _batch: str = ""
    _away: int = 0
    _trains: bool = False
    _heeds: bool = False
    _logs: Callable[[], Mapping[str, float]] = dict

    # ------------------------------------------------------------------ the beginning
    def open(self) -> None:
        """Choose the checkpoint that the run goes on from, together with all other processes."""
        folders = [level.folder for level in self.levels]
        if self.group.commits:
            folders[0].lock()
        self.source = choose_source(self.group, lambda: [found for folder in folders for found in folder.scan()])
        step = None if self.source is None else self.source.manifest.position.step
        for level in self.levels if self.group.commits else ():
            level.clean(step)
        self.group.exchange("the choice of a checkpoint", None)
        if self.source is None or step is None:
            return
        self.group.tell_saved(step)
        self.position = self.resumed = self.source.manifest.position
        self.saved = self.position if self.source.path.startswith(folders[0].path) else self.saved
        for level in self.levels:
            level.pace.note_saving(step, time.monotonic())
        part = self.source.parts.get(self.group.worker)
        same = set(self.source.manifest.workers) == set(self.group.everyone)
        self._batch = part.batch if part is not None and same else ""
        self.spent.resume(self.source.manifest)
        self.memories.source = self.source
        self.memories.restore_codecs()
        _LOG.info("%s: goes on from %s", self.group.worker, self.source.path)

    # ------------------------------------------------------------------ what there is to save
    def take_in(self, engine: Engine) -> None:
        """Know the variables of a program; where the run goes on from a checkpoint they get their values."""
        program = engine.name
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
        fresh: dict[str, str] = {}
        for path in sorted(variables):
            variable = variables[path]
            if id(variable) in self._names and self._known[self._names[id(variable)]]() is variable:
                continue
            name = self._name(program, path)
            self._known[name], self._names[id(variable)] = weakref.ref(variable), name
            if name not in self._restored:
                self._restored.add(name)
                fresh[name] = path
        if self.source is None:
            return
        missing = self.group.restore(self.source, {name: variables[path] for name, path in fresh.items()})
        lost = next((fresh[name] for name in missing if fresh[name] in needed), None)
        if lost is not None:
            raise CheckpointError(
                f"variable {lost!r} of {program} is not in the checkpoint",
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

    # ------------------------------------------------------------------ steps
    def before_step(self, engine: Training, tensors: Sequence[Any]) -> None:
        """A step is about to begin: the point at which all is saved, if it is due."""
        if not engine.trains:
            return
        self._trains = True
        self.spent.begin()
        self._check_batch(engine, tensors)
        self._choose_leading(engine.name)
        if engine.name != self.position.program:
            return
        if departure.agreed:
            self.finish()
        departure.begin()
        if any(level.due for level in self.levels):
            self.save([level for level in self.levels if level.due], fingerprint(tensors))

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
        self.memories.read_objects()
        if self.run.alone:
            self.hear({self.group.worker: self.sheet()})

    @contextlib.contextmanager
    def note_failure(self) -> Iterator[None]:
        """Around a step: after one that fails nothing is saved any more, unless another one succeeds."""
        self.failed = True
        with self.spent.count_step():
            yield
        self.failed = False

    def sheet(self) -> list[Any]:
        """What is said of each level with a step's sheet. The lead says whether a saving is due when it is over."""
        after = self.position.step + (0 if self.run.alone else 1)
        here = self.run.here()
        for level in self.levels if here.lead else ():
            level.pace.between_failures = guess_between_failures(self.spent.sum_up().total, here.epoch)
        self.said = [level.sheet(after, here.lead) for level in self.levels]
        return self.said

    def hear(self, sheets: Mapping[str, Any]) -> None:
        """What all have said with the same step."""
        for number, level in enumerate(self.levels):
            level.hear({worker: _take(sheet, number) for worker, sheet in sheets.items()})

    # ------------------------------------------------------------------ fits of Keras
    def begin_epoch(self, epoch: int, callbacks: Sequence[Any]) -> None:
        """A `fit` begins an epoch."""
        self.memories.callbacks = callbacks
        self.position = replace(self.position, fit=self.fits, epoch=epoch, batch=0, ended=False)

    def end_fit(self, epoch: int, epochs: int, callbacks: Sequence[Any]) -> None:
        """A `fit` has ended before an epoch, of so many that it was asked for."""
        self.memories.callbacks = callbacks
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
    def save(self, levels: Sequence[Level], batch: str = "") -> None:
        """Take all that there is to save, and write it beside what follows; `batch` is the one that comes next."""
        with self.spent.count_saving():
            self._save(levels, batch)

    def _save(self, levels: Sequence[Level], batch: str) -> None:
        alive = {name: ref() for name, ref in self._known.items()}
        entries = list(self.group.list_entries({name: each for name, each in alive.items() if each is not None}))
        memory = self.memories.encode(entries)
        logs = {name: float(value) for name, value in self._logs().items()}
        self.position = replace(self.position, logs=logs)
        manifest = begin_manifest(self.run, self.position, self._aliases)
        manifest = replace(manifest, at=time.time(), spent=asdict(self.spent.sum_up()))
        for level in levels:
            level.write(Snapshot(manifest, self.group.worker, entries, memory, batch))
            if level.durable:
                self.saved = self.position

    def finish(self) -> None:
        """Save what is not saved yet, and return when it is on the disk. All processes call it at the same point."""
        with self.spent.count_saving():
            self._finish()

    def _finish(self) -> None:
        busy = any(level.busy for level in self.levels)
        for level in self.levels:
            level.drain()
        if self._known and replace(self.position, logs={}) != replace(self.saved, logs={}):
            busy = True
            self._save(self.levels[:1], "")
            self.levels[0].drain()
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
        for level in self.levels:
            level.close()


def _take(sheet: Any, number: int) -> Any:
    """What a worker says of a level; another process may have said anything."""
    return sheet[number] if isinstance(sheet, list) and len(sheet) > number else None


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
    group, now = Group(run), time.monotonic()
    path = os.path.expanduser(options.folder).rstrip("/") or "/"
    several = options.keep if not group.label else max(2, options.keep)
    memory = None if run.attachment is None or options.memory is False else run.attachment.memory
    in_memory = all(group.exchange("whether checkpoints are in memory, too", memory is not None).values())
    overhead = options.overhead / (1 + in_memory)
    levels = [
        Level(Folder(path, group.label), group, Pace(options.steps, options.seconds, overhead, saved_time=now), several)
    ]
    if in_memory and memory is not None:
        beside = os.path.join(memory, hashlib.sha256(path.encode()).hexdigest()[:16])
        pace = Pace(options.memory_steps, options.memory_seconds, overhead, saved_time=now, first=_MEMORY_FIRST)
        levels.append(Level(Folder(beside, group.label), group, pace, _MEMORY_KEPT, durable=False))
    spent = Spent(None if run.attachment is None else run.attachment.ended)
    found = Checkpoints(run, group, levels, Memories(group.worker, run.channels), spent=spent)
    with contextlib.nullcontext() if run.alone else run.ledger.tell_failures():
        found.open()
    found.heed_sigterm()
    return found
