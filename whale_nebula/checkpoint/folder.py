"""The folder of a run's checkpoints: a folder for each step, in which the manifest is written last.

A folder without a manifest is not a checkpoint: the run stopped while writing it. Processes of one host write together
(a *group*), and each host of a run has its own manifest, in one shared folder or in several. A host may also save to a
folder in its memory, which outlives the workers but not their launcher. When a run is not restarted, the newest
checkpoint in it is copied to the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.manifest import NAME, Manifest, decode_manifest
from whale_nebula.errors import CheckpointError, ConfigError, NebulaError, RemoteProtocolError, StateError
from whale_nebula.site import script_site
from whale_nebula.tf import tf

_STEP = re.compile(r"step-(\d{8,})")
_MANIFEST = re.compile(rf"{NAME}(?:\.([\w.-]+))?\.json")
LOCK = ".lock"
_TRIES, _TURN_SECONDS = 20, 0.05


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a folder: its manifests by group, and the faults of those that cannot be read."""

    step: int
    path: str
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def is_committed(self) -> bool:
        """Whether it was written completely here."""
        return bool(self.manifests) and not self.problems

    @property
    def is_manual(self) -> bool:
        """Whether it was written by `nb.save`, and not by a run."""
        return any(manifest.is_manual for manifest in self.manifests.values())

    def check_name(self) -> FoundCheckpoint:
        """Return it, with a fault if the step in its folder's name differs from that of a manifest."""
        steps = {manifest.position.step for manifest in self.manifests.values()} - {self.step}
        problems = [
            f"it was saved after step {step}, but its folder is named for step {self.step}" for step in sorted(steps)
        ]
        return replace(self, problems=(*self.problems, *problems))

    def check(self, *, digests: bool = True) -> tuple[str, ...]:
        """The faults of the manifests and files: of their sizes, and with `digests` of their content; empty if none."""
        found = list(self.problems)
        for manifest in self.manifests.values():
            found += _check_files(self.path, manifest, digests)
        if not self.manifests and not found:
            found.append("it has no manifest: the run stopped while writing it")
        return tuple(found)


def _check_files(path: str, manifest: Manifest, digests: bool) -> Iterator[str]:
    if manifest.bundle and f"{manifest.bundle}.index" not in {file.name for file in manifest.files}:
        yield f"the manifest lists no file of its bundle {manifest.bundle!r}"
    for file in manifest.files:
        place = files.join(path, file.name)
        size = files.get_size(place)
        if size is None:
            yield f"{file.name} is missing"
        elif size != file.size:
            yield f"{file.name} has {size} bytes, but {file.size} were written"
        elif digests and files.compute_digest(place) != file.sha256:
            yield f"{file.name} is damaged: its digest differs from the manifest"


@dataclass
class Folder:
    """A folder of checkpoints, or of a `single` one. `group` names the host within a run, "" if there is only one.
    `run` identifies the run, the same on all its hosts.
    """

    path: str
    group: str = ""
    single: bool = False
    run: str = ""
    _locks: list[int] = field(default_factory=list)

    def step_path(self, step: int) -> str:
        """The folder of a step.

        >>> Folder("runs/a").step_path(120)
        'runs/a/step-00000120'
        """
        return self.path if self.single else files.join(self.path, f"step-{step:08d}")

    def name_bundle(self, step: int) -> str:
        """A name for the bundle of this group that no manifest uses, as a step may be saved again."""
        base = f"state.{self.group}" if self.group else "state"
        taken = {manifest.bundle for manifest in self._read_step(step, self.step_path(step)).manifests.values()}
        return next(name for n in range(len(taken) + 1) if (name := f"{base}-{n}" if n else base) not in taken)

    def worker_path(self, step: int, worker: str) -> str:
        """The path of a worker's part, until all parts are written."""
        return files.join(self.step_path(step), f".{worker.replace('/', '-')}")

    def scan(self) -> list[FoundCheckpoint]:
        """All checkpoints, also incomplete ones, the newest first."""
        steps = [(int(match[1]), name) for name in files.list_names(self.path) if (match := _STEP.fullmatch(name))]
        several = [self._read_step(step, files.join(self.path, name)) for step, name in sorted(steps, reverse=True)]
        return [each if each.is_manual else each.check_name() for each in several]

    def read_single(self) -> FoundCheckpoint:
        """The single checkpoint of this folder, if it exists."""
        return self._read_step(0, self.path)

    def _read_step(self, step: int, path: str) -> FoundCheckpoint:
        manifests, problems = {}, []
        for name in files.list_names(path):
            if match := _MANIFEST.fullmatch(name):
                place = files.join(path, name)
                try:
                    manifests[match[1] or ""] = decode_manifest(files.read(place), place)
                except CheckpointError as error:
                    problems.append(f"{name}: {error.why}")
                except OSError as error:
                    problems.append(f"{name}: {error.strerror or error}")
        return FoundCheckpoint(step, path, manifests, tuple(problems))

    def manifest_path(self, step: int, group: str) -> str:
        """The path of the manifest of a group of a step."""
        return files.join(self.step_path(step), f"{NAME}.{group}.json" if group else f"{NAME}.json")

    def commit(self, manifest: Manifest) -> None:
        """Commit a step: write its manifest, which makes it a checkpoint."""
        path = self.step_path(manifest.position.step)
        files.sync_folder(path)
        files.write(self.manifest_path(manifest.position.step, self.group), manifest.encode())
        files.sync_folder(os.path.dirname(path) or "." if files.is_local(path) else path)
        self._remove_unlisted_bundles(manifest.position.step)

    def discard(self, step: int, workers: Iterable[str]) -> None:
        """Remove the parts of a step that could not be committed, and what was joined of them."""
        for worker in workers:
            files.remove(self.worker_path(step, worker))
        self._remove_unlisted_bundles(step)

    def _remove_unlisted_bundles(self, step: int) -> None:
        start = f"state.{self.group}" if self.group else "state"
        _remove_unlisted_files(self._read_step(step, self.step_path(step)), start)

    def prune(self, keep: int, *, digests: bool = False) -> list[int]:
        """Remove all checkpoints older than the newest `keep` complete ones; returns the removed steps. A checkpoint is
        complete if the sizes of its files, or their `digests`, are correct.

        The manifest is removed first, so that a partly removed checkpoint is not taken for one.
        """
        whole, gone = 0, []
        for found in self.scan():
            if found.is_committed and whole == keep:
                gone.append(found)
            elif found.is_committed and not found.check(digests=digests):
                whole += 1
        for found in gone:
            remove_checkpoint(found)
        return [found.step for found in gone]

    def clean(self, resumed: int | None) -> list[str]:
        """Prepare the folder for a run that resumes from a step: remove incomplete checkpoints, and rename newer ones,
        which were not read. Returns the names of the latter.
        """
        aside = []
        for found in self.scan():
            if resumed is not None and found.step <= resumed and found.is_committed:
                _remove_unlisted_files(found)
                continue
            if not found.manifests and not found.problems:
                remove_checkpoint(found)
                continue
            names = set(files.list_names(self.path))
            base = os.path.basename(found.path)
            name = next(each for n in range(len(names) + 1) if (each := f"skipped-{base}.{n}") not in names)
            with contextlib.suppress(FileNotFoundError):  # another host that shares the folder has removed it
                files.move(found.path, files.join(self.path, name))
                aside.append(name)
        return aside

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes are at most half of the free space of this folder's file system."""
        files.make_folder(self.path)
        about = os.statvfs(self.path)
        return 2 * size <= about.f_bavail * about.f_frsize

    def lock(self) -> None:
        """Lock the folder against other runs until this process exits; the hosts of one run may share a folder. Only
        local file systems have locks.
        """
        try:
            files.make_folder(self.path)
            if not files.is_local(self.path):
                return
            for name in [LOCK, f"{LOCK}.{self.group}"] if self.group else [LOCK]:
                self._locks.append(os.open(files.join(self.path, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
                _LOCKED.add(self._locks[-1])
        except (OSError, tf.errors.OpError) as error:
            self.unlock()
            raise ConfigError(
                f"checkpoints cannot be written to {self.path!r}",
                where=str(script_site()),
                why=error.strerror if isinstance(error, OSError) else error.message,
                mend='nb.init(checkpoint="another/folder")',
            ) from None
        try:
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.group:
                _share_lock(self._locks[0], self.run.encode())
        except OSError:
            self.unlock()
            raise StateError(
                f"another run is writing its checkpoints to {self.path!r}",
                why="two runs in one folder would remove each other's checkpoints",
                mend='nb.init(checkpoint="another/folder"), or wait until that run has stopped',
            ) from None

    def unlock(self) -> None:
        """Release the lock."""
        while self._locks:
            descriptor = self._locks.pop()
            if descriptor in _LOCKED:
                _LOCKED.remove(descriptor)
                os.close(descriptor)


_LOCKED: set[int] = set()
"""The lock files that this process has open."""


def _close_locks() -> None:
    """Close the locks in a forked process: they belong to the run, which it may outlive."""
    while _LOCKED:
        os.close(_LOCKED.pop())


os.register_at_fork(after_in_child=_close_locks)


def _share_lock(descriptor: int, run: bytes) -> None:
    """Hold a shared lock with other processes of a run. The lock file names the run: a process that briefly holds the
    lock exclusively writes that name, and the others compare it.
    """
    for tried in range(_TRIES):
        time.sleep(_TURN_SECONDS * (tried > 0))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, run, 0)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(descriptor, len(run) + 1, 0) == run:
                return
    raise BlockingIOError


def _remove_unlisted_files(checkpoint: FoundCheckpoint, start: str = "") -> None:
    """Remove files of a checkpoint's folder that have this prefix and are in none of its manifests."""
    known = {file.name for manifest in checkpoint.manifests.values() for file in manifest.files}
    own = re.compile(rf"{re.escape(start)}(-\d+)?\." if start else "")
    for name in files.list_names(checkpoint.path):
        if own.match(name) and name not in known and not _MANIFEST.fullmatch(name):
            files.remove(files.join(checkpoint.path, name))


def remove_checkpoint(checkpoint: FoundCheckpoint) -> None:
    """Remove a checkpoint, complete or not."""
    for name in files.list_names(checkpoint.path):
        if _MANIFEST.fullmatch(name):
            files.remove(files.join(checkpoint.path, name))
    files.remove(checkpoint.path)


Offer = Mapping[str, Any]
"""A host's description of its checkpoint: step, identity, the workers whose parts are available, and all workers."""


def offer_checkpoints(several: Iterable[FoundCheckpoint]) -> list[dict[str, Any]]:
    """Checkpoints as offered to other processes: an offer for each of their manifests."""
    return [
        {
            "step": each.step,
            "identity": manifest.identity,
            "parts": [part.worker for part in manifest.parts],
            "workers": sorted(manifest.workers),
        }
        for each in several
        for manifest in each.manifests.values()
    ]


def choose_checkpoint(offers: Sequence[Sequence[Offer]]) -> tuple[int, str] | None:
    """The newest step whose parts are all available, and its identity; all hosts choose the same.

    >>> gpu = {"step": 8, "identity": "a", "parts": ["gpu/0"], "workers": ["gpu/0", "npu/0"]}
    >>> npu, newer = {**gpu, "parts": ["npu/0"]}, {**gpu, "step": 9, "identity": "b"}
    >>> choose_checkpoint([[gpu, newer], [npu]])
    (8, 'a')
    """
    held: dict[tuple[int, str], set[str]] = {}
    wanted: dict[tuple[int, str], set[str]] = {}
    for offer in (each for host in offers if isinstance(host, list) for each in host):
        try:
            key = (int(offer["step"]), str(offer["identity"]))
            held.setdefault(key, set()).update(map(str, offer["parts"]))
            wanted[key] = set(map(str, offer["workers"]))
        except (KeyError, TypeError, ValueError):
            raise RemoteProtocolError("another process offers a checkpoint in an unknown format") from None
    whole = [key for key in held if wanted[key] and wanted[key] <= held[key]]
    return max(whole, default=None)


def check_whole(checkpoint: FoundCheckpoint, report: Callable[[str], None]) -> bool:
    """Whether a checkpoint is complete; each fault is reported."""
    problems = checkpoint.check()
    for problem in problems:
        report(f"the checkpoint {checkpoint.path} is skipped: {problem}")
    return not problems


# ---------------------------------------------------------------------- checkpoints in memory
_NAME = "origin.json"
_BLOCK = 4 << 20


@dataclass(frozen=True)
class Origin:
    """The folder on the disk to which a folder in memory belongs, its group, its run, and how many checkpoints stay."""

    folder: str
    group: str
    run: str
    keep: int


def write_origin(memory: Folder, origin: Origin) -> None:
    """Record where a folder in memory belongs."""
    files.make_folder(memory.path)
    files.write(files.join(memory.path, _NAME), json.dumps(asdict(origin)).encode())


def save_memory_to_disk(
    memory: str, check_room: Callable[[str, int], None] = lambda folder, need: None
) -> Iterator[str]:
    """Save the checkpoints of each folder within `memory` that are newer than all on the disk to the disk. All are
    saved, as the newest may lack parts of workers of other launchers, which failed before they saved theirs. Yields a
    line for each. `check_room` raises if that many bytes must not be written to a folder.
    """
    for name in sorted(files.list_names(memory)):
        path = files.join(memory, name)
        if _NAME not in files.list_names(path):
            continue
        origin = Origin(**json.loads(files.read(files.join(path, _NAME))))
        disk = Folder(origin.folder, origin.group, run=origin.run)
        for found in _list_newer(Folder(path, origin.group), disk) if files.is_local(origin.folder) else ():
            try:
                check_room(origin.folder, sum(file.size for file in found.manifests[origin.group].files))
                disk.lock()
                _copy(found, disk)
                disk.prune(origin.keep + 1)
                yield f"step {found.step}, which was saved in memory, is saved in {origin.folder}"
            except (NebulaError, OSError) as error:
                why = str(error).partition("\n")[0]
                yield f"step {found.step}, which was saved in memory, could not be saved in {origin.folder}: {why}"
            finally:
                disk.unlock()


def _list_newer(memory: Folder, disk: Folder) -> list[FoundCheckpoint]:
    """The complete checkpoints of a group in memory, the newest first, except those for which the disk has one that is
    as new, damaged or not.
    """
    newest = max((each.step for each in disk.scan() if each.manifests or each.problems), default=-1)
    newer = (each for each in memory.scan() if each.step > newest and memory.group in each.manifests)
    return [each for each in newer if not each.check()]


def _copy(checkpoint: FoundCheckpoint, disk: Folder) -> None:
    """Copy this group's part of a checkpoint, its manifest last."""
    manifest = checkpoint.manifests[disk.group]
    path = disk.step_path(checkpoint.step)
    files.make_folder(path)
    for file in manifest.files:
        files.write_blocks(
            files.join(path, file.name), files.read_blocks(files.join(checkpoint.path, file.name), _BLOCK)
        )
    disk.commit(manifest)
