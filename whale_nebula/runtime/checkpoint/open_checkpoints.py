"""Open the checkpoints of a run: resolve and check its folder, and create a level for the disk and one for memory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder, Origin, write_origin
from whale_nebula.config import Checkpointing
from whale_nebula.errors import CheckpointError
from whale_nebula.launch.attach import Attachment
from whale_nebula.report.records import TimeAccount
from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints
from whale_nebula.runtime.checkpoint.copies import Copies, admit_copies, find_ring
from whale_nebula.runtime.checkpoint.extra_state import ExtraState
from whale_nebula.runtime.checkpoint.group import Group
from whale_nebula.runtime.checkpoint.level import Level, Pace
from whale_nebula.security.tenant import check_disk_limit, check_folder, claim_folder

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run

_MEMORY_FIRST = 5.0
"""Seconds until the first saving in memory, which measures its cost."""
_MEMORY_KEPT = 2


def resolve_folder(path: str, attachment: Attachment | None) -> str:
    """The folder for a run's checkpoints: within the account's own folder if it has one, unless the path is absolute;
    other accounts' folders are refused.
    """
    if not files.is_local(path):
        return path
    path = path if attachment is None or attachment.home is None else os.path.join(attachment.home, path)
    check_folder(Path(path), None if attachment is None else attachment.tenant)
    return path


def check_account_room(attachment: Attachment | None, path: str, need: int) -> None:
    """Verify that the account of this run may write `need` more bytes to its own folder."""
    if attachment is not None and attachment.tenant is not None and files.is_local(path):
        check_disk_limit(attachment.tenant, [Path(each) for each in (attachment.home, path) if each is not None], need)


def _refuse_other_checkpoints(folder: Folder) -> None:
    """Refuse a folder that has a checkpoint of `nb.save`, or is itself a single checkpoint of a run."""
    here = folder.read_single()
    found = here if here.manifests else next((each for each in folder.scan() if each.is_manual), None)
    if found is None:
        return
    if found.is_manual:
        what, mend = "a model that nb.save wrote", 'nb.init(checkpoint="another/folder")\n'
        mend += f"or nb.restore({found.path!r}, model) before training, to start with that model"
    else:
        what, mend = (
            "a single checkpoint of a run",
            f"nb.init(checkpoint={os.path.dirname(found.path)!r}) resumes from it",
        )
    raise CheckpointError(
        f"this folder contains {what}, and is not the folder of a run",
        where=found.path,
        why="a run can resume only from its own folder; with this one it would start again",
        mend=mend,
    )


def _check_folders(folders: Mapping[str, str]) -> None:
    """Verify that workers that share a host, and thus write parts of one checkpoint, have the same folder."""
    first = next(iter(folders))
    other = next((worker for worker, path in folders.items() if path != folders[first]), None)
    if other is not None:
        raise CheckpointError(
            f"{first} saves to {folders[first]!r}, and {other} to {folders[other]!r}",
            why="both are processes of one host and work in the same directory, so they write parts of one checkpoint",
            mend='use nb.init(checkpoint="one/folder") in all of them',
        )


def open_checkpoints(run: Run, options: Checkpointing) -> Checkpoints:
    """Open the checkpoints of a run that has just connected its processes. Collective."""
    group, now = Group(run), time.monotonic()
    path = resolve_folder(os.path.expanduser(options.folder).rstrip("/") or "/", run.attachment)
    if run.attachment is not None and run.attachment.tenant is not None and files.is_local(path):
        claim_folder(Path(path), run.attachment.tenant)
    keep_count = options.keep if not group.label else max(2, options.keep)
    memory = None if run.attachment is None or options.memory is False else run.attachment.memory
    if not run.alone:
        admit_copies(group.session)
    places = group.exchange("the places of checkpoints", [memory is not None, group.label, os.path.abspath(path)])
    _check_folders({worker: str(places[worker][2]) for worker in group.members})
    in_memory = all(has for has, *_ in places.values())
    overhead = options.overhead / (1 + in_memory)
    clusters = sorted({*run.workers.values(), *group.absent_clusters})
    fixed = os.path.abspath(path) if files.is_local(path) else path  # the script may change its working folder
    folder = Folder(fixed, group.label, run=f"{run.config.run_name}: {' '.join(clusters)}")
    pace = Pace(options.steps, options.seconds, overhead, saved_time=now)
    levels = [Level(folder, group, pace, keep_count, check_room=partial(check_account_room, run.attachment, path))]
    if in_memory and memory is not None:
        beside = os.path.join(memory, hashlib.sha256(f"{os.getcwd()}\n{path}".encode()).hexdigest()[:16])
        pace = Pace(options.memory_steps, options.memory_seconds, overhead, saved_time=now, first=_MEMORY_FIRST)
        levels.append(Level(Folder(beside, group.label), group, pace, _MEMORY_KEPT, durable=False))
        if group.commits:
            write_origin(levels[-1].folder, Origin(fixed, group.label, folder.run, keep_count))
        ring = find_ring({worker: label for worker, (_, label, _) in places.items()}, run.workers, group.worker)
        if ring is not None:
            levels[-1].copies = Copies(group.session, levels[-1].folder, *ring)
    time_account = TimeAccount(None if run.attachment is None else run.attachment.previous_end)
    extra_state = ExtraState(group.worker, run.channels)
    checkpoints = Checkpoints(run, group, levels, extra_state, time_account=time_account)
    try:
        with run.share_failures():
            if group.commits:
                folder.lock()
                _refuse_other_checkpoints(folder)
            checkpoints.open()
    except BaseException:
        checkpoints.close()
        raise
    checkpoints.handle_signals()
    return checkpoints
