"""Save to the disk what a run that is not started again had saved in its host's memory since the last saving there.

The memory outlives workers, but not their launcher. Each checkpoint in it is whole: it was committed when the parts of
all workers were written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder, Found
from whale_nebula.errors import NebulaError

_NAME = "origin.json"
_BLOCK = 4 << 20


@dataclass(frozen=True)
class Origin:
    """The folder on the disk to which a folder in memory belongs, its group, its run, and how many checkpoints stay."""

    folder: str
    group: str
    run: str
    keep: int


def note_origin(memory: Folder, origin: Origin) -> None:
    """Record where a folder in memory belongs."""
    files.make_folder(memory.path)
    files.write(files.join(memory.path, _NAME), json.dumps(asdict(origin)).encode())


def save_memory(memory: str, check_room: Callable[[str, int], None] = lambda folder, need: None) -> Iterator[str]:
    """Save to the disk the newest checkpoint of each folder within `memory`, if it is newer than all on the disk.

    Yields a line on each. `check_room` raises if so many more bytes may not be written to a folder.
    """
    for name in sorted(files.list_names(memory)):
        path = files.join(memory, name)
        if _NAME not in files.list_names(path):
            continue
        origin = Origin(**json.loads(files.read(files.join(path, _NAME))))
        disk = Folder(origin.folder, origin.group, run=origin.run)
        found = _find_newest(Folder(path, origin.group), disk) if files.is_local(origin.folder) else None
        if found is None:
            continue
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


def _find_newest(memory: Folder, disk: Folder) -> Found | None:
    """The newest whole checkpoint of a group in memory, unless the disk has one that is as new, damaged or not."""
    newest = max((each.step for each in disk.scan() if each.manifests or each.problems), default=-1)
    newer = (each for each in memory.scan() if each.step > newest and memory.group in each.manifests)
    return next((each for each in newer if not each.check()), None)


def _copy(found: Found, disk: Folder) -> None:
    """Copy this group's part of a checkpoint, its manifest last."""
    manifest = found.manifests[disk.group]
    path = disk.step_path(found.step)
    files.make_folder(path)
    for file in manifest.files:
        files.write_blocks(files.join(path, file.name), files.read_blocks(files.join(found.path, file.name), _BLOCK))
    disk.commit(manifest)
