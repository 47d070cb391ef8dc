"""A place where the checkpoints of a run are written (a disk, or the memory of this host), and the interval between
savings that minimises the expected loss of time.

A failure loses half of the interval on average, and each saving slows steps down. The sum of both is minimal at
`interval = sqrt(2 * cost * time between failures)` (Young), and a bound on the share of time spent on saving may
require a longer one.

With local SGD, the workers share no steps, and thus no sheets; they send each other notices instead. The first worker
announces the step before which all save, which no worker can reach without the announcement, and each announces when
its part is written.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import Manifest, Part
from whale_nebula.errors import AccountError, CheckpointError, DeadlineError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.faults import failpoint
from whale_nebula.runtime.checkpoint.copies import Copies
from whale_nebula.runtime.checkpoint.group import Group
from whale_nebula.runtime.checkpoint.writer import Snapshot, commit_parts, count_bytes, write_part
from whale_nebula.runtime.session.absences import Absences
from whale_nebula.runtime.single_thread import SingleThread
from whale_nebula.site import Site, warn_at
from whale_nebula.tf import tf
from whale_nebula.transport import Link
from whale_nebula.wire.message import build_message

# ---------------------------------------------------------------------- the interval
OVERHEAD = 0.035
"""The share of a run's time that saving may take."""
BETWEEN_FAILURES = 3600.0
"""The assumed seconds between two failures, before any is observed."""
_FIRST = 30.0
_WEIGHT = 0.5


def choose_interval(cost: float, between_failures: float = BETWEEN_FAILURES, overhead: float = OVERHEAD) -> float:
    """Seconds between two savings of this cost: Young's optimum, or more if savings would exceed the `overhead`.

    >>> round(choose_interval(0.2)), round(choose_interval(20.0, 24 * 3600.0)), round(choose_interval(20.0))
    (38, 1859, 571)
    """
    return max(math.sqrt(2 * cost * between_failures), cost / overhead)


def estimate_between_failures(seconds: float, failures: int) -> float:
    """Estimate of the seconds between two failures of a run; the prior is one failure after an hour.

    >>> [estimate_between_failures(seconds, count) for seconds, count in ((0.0, 0), (82800.0, 0), (7200.0, 2))]
    [3600.0, 86400.0, 3600.0]
    """
    return (BETWEEN_FAILURES + seconds) / (1 + failures)


@dataclass
class Pace:
    """Schedule of savings: at intervals of `steps` or `seconds`; without these the cost of savings in seconds
    determines the interval, which is `first` until one is known.
    """

    steps: int | None = None
    seconds: float | None = None
    overhead: float = OVERHEAD
    cost: float | None = None
    first: float = _FIRST
    between_failures: float = BETWEEN_FAILURES
    saved_step: int = 0
    saved_time: float = 0.0

    def is_due(self, step: int, now: float) -> bool:
        """Whether a saving is due after this number of steps.

        >>> pace = Pace(steps=10)
        >>> pace.is_due(9, 0.0), pace.is_due(10, 0.0)
        (False, True)
        """
        if step <= self.saved_step:
            return False
        if self.steps is not None:
            return step - self.saved_step >= self.steps
        return now - self.saved_time >= self.interval

    @property
    def interval(self) -> float:
        """Seconds between two savings."""
        if self.seconds is not None:
            return self.seconds
        return self.first if self.cost is None else choose_interval(self.cost, self.between_failures, self.overhead)

    def record_saving(self, step: int, now: float) -> None:
        """Record that a saving begins."""
        self.saved_step, self.saved_time = step, now

    def record_cost(self, seconds: float) -> None:
        """Record the cost of a saving in a moving average, in which the newest has half of the weight."""
        self.cost = seconds if self.cost is None else _WEIGHT * seconds + (1 - _WEIGHT) * self.cost


_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass
class _Pending:
    """A checkpoint that is being written: its manifest, this worker's part, and the time at which it began, by
    `time.perf_counter`.
    """

    manifest: Manifest
    part: Future[Part]
    began: float


@dataclass
class Level:
    """Writes checkpoints to a folder, at the rate of its `pace`, and keeps the newest `keep`. If an account's storage
    is limited, `check_room` raises for too many bytes.

    `due`: all processes save before their next step. A level on a disk is `durable`. A level in memory that could not
    be written is no longer `usable`; on a disk it is tried again. A level in memory may have `copies` in the memory of
    another host.
    """

    folder: Folder
    group: Group
    pace: Pace
    keep: int
    durable: bool = True
    usable: bool = True
    due: bool = False
    copies: Copies | None = None
    check_room: Callable[[int], None] = lambda need: None
    _writer: SingleThread = field(default_factory=lambda: SingleThread("nebula-checkpoint"))
    _pending: _Pending | None = None
    _committing: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint waits for the parts of all workers; the same in all processes."""
        return self._pending is not None

    def clean(self, step: int | None) -> None:
        """Before a run resumes from a step, or from none: rename unread checkpoints; in memory, remove them."""
        for name in self.folder.clean(step):
            if self.durable:
                _LOG.warning("an unread checkpoint in %s is renamed to %s", self.folder.path, name)
            else:
                files.remove(files.join(self.folder.path, name))

    @property
    def pending(self) -> int | None:
        """The step of the checkpoint that waits for parts."""
        return None if self._pending is None else self._pending.manifest.position.step

    def is_due(self, step: int) -> bool:
        """Whether a step is to be saved, and nothing else is being saved."""
        idle = self._pending is None and (self._committing is None or self._committing.done())
        return idle and self.usable and self.pace.is_due(step, time.monotonic())

    def read_part(self, *, wait: bool = False) -> list[Any] | None:
        """The step of the pending checkpoint, and the digest of the local part, or "!" and the reason of its failure.
        None without one, and while it is being written; with `wait` it waits for the latter.
        """
        if self._pending is None or not (wait or self._pending.part.done()):
            return None
        return [self._pending.manifest.position.step, _digest_of(self._pending.part)]

    def sheet(self, step: int, decides: bool) -> list[Any]:
        """The entry of a step's sheet: whether a saving is due after this step, if this worker `decides` that; and the
        report of `read_part`.
        """
        return [decides and self.is_due(step), self.read_part()]

    def receive_sheets(self, sheets: Mapping[str, Any]) -> None:
        """Receive the entries of all processes for the same step; all processes draw the same conclusions from them."""
        self.due = any(isinstance(sheet, list) and sheet[:1] == [True] for sheet in sheets.values())
        if self.pending is not None:
            reports = {worker: _read_saved(sheet, self.pending) for worker, sheet in sheets.items()}
            if all(reports.values()):
                self.settle({worker: str(report) for worker, report in reports.items()})

    def write(self, snapshot: Snapshot) -> None:
        """Write this worker's part, concurrently with training."""
        self.due = False
        self.pace.record_saving(snapshot.step, time.monotonic())
        part = self._writer.submit(self._write_part, snapshot)
        self._pending = _Pending(snapshot.manifest, part, time.perf_counter())
        if self.group.is_single_worker:
            self._committing = self._writer.submit(self._conclude, self._pending)
            self._pending = None

    def _write_part(self, snapshot: Snapshot) -> Part:
        need = count_bytes(snapshot.entries) * len(self.group.members)
        if not self.durable and not self.folder.has_room((self.keep + 1) * need):
            raise CheckpointError(
                "there is not enough space for checkpoints in this host's memory", where=self.folder.path
            )
        self.check_room(need)
        return write_part(self.folder, snapshot)

    def drain(self) -> None:
        """Wait until the pending checkpoint is committed; all processes call it at the same point."""
        if self._pending is not None:
            entries = self.group.exchange("the parts of a checkpoint", self.read_part(wait=True))
            self.settle({worker: str(each[1]) for worker, each in entries.items()})
        if self._committing is not None:
            self._committing.result()

    def abandon(self) -> None:
        """Give up the checkpoint that waits for parts: a worker that was to write one is lost. A part in memory is
        removed; on the disk the next start of the run may find all parts.
        """
        if self._pending is not None:
            step, self._pending = self._pending.manifest.position.step, None
            if not self.durable:
                self._writer.submit(self.folder.discard, step, [self.group.worker])
            _LOG.info(
                "%s: step %d is not saved, because a cluster was lost before it was written", self.group.worker, step
            )

    def finish_writing(self) -> bool:
        """Wait until nothing is being written here, without the other processes; returns whether a written part waits
        for those of others.
        """
        written = self._pending is not None and self._pending.part.exception() is None
        if self._committing is not None:
            self._committing.result()
        return written

    def settle(self, reports: Mapping[str, str]) -> None:
        """When all workers have reported on the pending checkpoint: commit it, or give it up if a part is missing."""
        pending = self._pending
        if pending is None or set(reports) != set(self.group.everyone):
            return
        self._pending = None
        failpoint("checkpoint.said")
        failed = {worker: report[1:] for worker, report in sorted(reports.items()) if report.startswith("!")}
        if failed:
            why = "; ".join(f"{worker}: {escape_foreign_text(report)}" for worker, report in failed.items())
            self._give_up(pending.manifest.position.step, why)
        elif self.group.commits:
            if self.copies is not None:
                self.copies.expect(pending.manifest.position.step)
            self._committing = self._writer.submit(self._commit, pending, dict(reports))

    def _conclude(self, pending: _Pending) -> None:
        """Conclude a saving of a run of one process: its part is the whole checkpoint once it is written."""
        digest = _digest_of(pending.part)
        if digest.startswith("!"):
            self._give_up(pending.manifest.position.step, digest[1:])
        else:
            self._commit(pending, {self.group.worker: digest})

    def _commit(self, pending: _Pending, digests: Mapping[str, str]) -> None:
        step = pending.manifest.position.step
        try:
            commit_parts(self.folder, pending.manifest, digests, self.group.members, self.keep)
            if not pending.manifest.at_error:
                self.group.report_saved(step)
            _LOG.info("%s: step %d is saved%s", self.group.worker, step, "" if self.durable else " in memory")
        except Exception as error:
            self._give_up(step, _explain(error))
        if self.copies is not None:
            self.copies.send(step)
        self.pace.record_cost(time.perf_counter() - pending.began)

    def _give_up(self, step: int, why: str) -> None:
        """Warn of a failed saving, and free what was written; training continues, and earlier checkpoints are kept."""
        with contextlib.suppress(OSError, tf.errors.OpError):  # the folder may not be writable
            self.folder.discard(step, self.group.members if self.group.commits else [self.group.worker])
        self.usable = self.durable
        if not self.durable:
            _LOG.info("%s: checkpoints are no longer saved in memory: %s", self.group.worker, why)
            return
        warn_at(
            Site(self.folder.path, 0),
            f"step {step} could not be saved",
            why=why,
            mend="free space on that disk, or use nb.init(checkpoint=...) with a writable folder",
            where=self.folder.path,
        )

    def close(self) -> None:
        """Release all resources at the end of the run."""
        self._writer.close(wait=True)
        if self.copies is not None:
            self.copies.close()
        self.folder.unlock()


def _read_saved(sheet: Any, step: int) -> str | None:
    """What a worker reports on its part of the checkpoint of a step (`_digest_of`); None if it is no valid report."""
    entry = sheet[1] if isinstance(sheet, list) and len(sheet) == 2 else None
    right = isinstance(entry, list) and len(entry) == 2 and entry[0] == step and isinstance(entry[1], str)
    return entry[1] if right and isinstance(entry, list) else None


def _digest_of(part: Future[Part]) -> str:
    """The digest of a part, or "!" and the reason of its failure; waits for the part."""
    try:
        return part.result().digest
    except Exception as error:
        return f"!{_explain(error)}"


_NODE_NAME = re.compile(r"^\{\{function_node \S+\}\} | \[Op:\w+\]$")
"""What TensorFlow adds to a message of the file system."""


def _explain(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, CheckpointError | AccountError):
        return error.what
    return _NODE_NAME.sub("", str(getattr(error, "message", "") or error).partition("\n")[0])


_SAVING = "SAVING"


@dataclass
class Notices:
    """The notices of one worker. `due` has the announced steps after which levels are saved, by the level's number, and
    `_parts` the reports on parts, by level and step, then by worker. Links to clusters that may be lost are skipped
    when they are (`absences`).
    """

    worker: str
    links: Mapping[str, Link]
    levels: Sequence[Level]
    patience: float
    due: dict[int, int] = field(default_factory=dict)
    absences: Absences = field(default_factory=Absences)
    _parts: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)

    def announce(self, level: int, step: int) -> None:
        """Announce to all that a level is saved after this step."""
        self._post(level, step)
        self.due[level] = step

    def take_due(self, step: int) -> list[Level]:
        """Returns and removes the levels to save after a step. If an announcement has arrived too late, the part of
        this worker counts as failed.
        """
        found = []
        for level in [level for level, due in self.due.items() if due <= step]:
            due = self.due.pop(level)
            if due == step:
                found.append(self.levels[level])
            else:
                self._announce_part(level, due, "!it was notified too late")
        return found

    def poll(self) -> None:
        """Announce written parts, receive the notices of others, and commit complete checkpoints."""
        self._announce_written()
        for peer in self.links:
            with self.absences.tolerate(peer):
                while self._take(peer, 0.0):
                    continue
        self._settle()

    def drain(self) -> None:
        """Wait until all checkpoints being written here are written everywhere."""
        self.poll()
        while any(level.busy for level in self.levels):
            self._announce_written(wait=True)
            for number, level in enumerate(self.levels):
                step = level.pending
                for peer in self.links if step is not None else ():
                    while step is not None and peer not in self._parts.get((number, step), {}):
                        self._take(peer, self.patience)
            self._settle()

    def _announce_written(self, *, wait: bool = False) -> None:
        for number, level in enumerate(self.levels):
            entry = level.read_part(wait=wait)
            if entry is not None and self.worker not in self._parts.get((number, entry[0]), {}):
                self._announce_part(number, *entry)

    def _announce_part(self, level: int, step: int, digest: str) -> None:
        self._post(level, step, part=digest)
        self._parts.setdefault((level, step), {})[self.worker] = digest

    def _settle(self) -> None:
        for number, level in enumerate(self.levels):
            step = level.pending
            if step is not None:
                level.settle(self._parts.get((number, step), {}))
            if step is not None and level.pending is None:
                self._parts = {key: parts for key, parts in self._parts.items() if key[0] != number or key[1] > step}

    def _post(self, level: int, step: int, **part: str) -> None:
        for peer, link in self.links.items():
            with self.absences.tolerate(peer):
                link.post(build_message(_SAVING, level=level, step=step, **part))

    def _take(self, peer: str, patience: float) -> bool:
        """Receive a notice of a peer; returns whether there was one. If none arrives within the `patience` in seconds
        it raises, unless that is 0.
        """
        notice = None
        with contextlib.suppress(*([] if patience else [DeadlineError])):
            notice = self.links[peer].take(_SAVING, patience)
        if notice is None or notice["level"] >= len(self.levels):
            return notice is not None
        if "part" in notice:
            self._parts.setdefault((notice["level"], notice["step"]), {})[peer] = notice["part"]
        else:
            self.due[notice["level"]] = notice["step"]
        return True
