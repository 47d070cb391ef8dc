"""Write a checkpoint: each worker its part, and the first worker of a host the manifest, once all parts are written.

Everything here runs concurrently with training, in a thread, on values that were taken between two steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import File, Manifest, Part
from whale_nebula.checkpoint.parts import Start, WrittenPart, read_document, write_document
from whale_nebula.errors import CheckpointError
from whale_nebula.faults import failpoint
from whale_nebula.runtime.checkpoint.extra_state import make_put
from whale_nebula.runtime.checkpoint.objects import Put
from whale_nebula.runtime.checkpoint.slices import Entry, write_entries

_STATE = "state"
_BUNDLE = 256 << 20
"""The bytes of tensors after which a bundle is complete."""


@dataclass(frozen=True)
class Snapshot:
    """What one worker writes for a step: `entries` of tensors, states other than variables as documents (`memory`), and
    the fingerprint of the next `batch`; and the manifest without parts. `late` returns more states; the writing thread
    calls it, because it may wait. `start`, `exact` and `shared` are for the next start of the run, which may find the
    part (`WrittenPart`).
    """

    manifest: Manifest
    worker: str
    entries: Sequence[Entry]
    memory: Mapping[str, Any]
    batch: str = ""
    late: Callable[[Put], Mapping[str, Any]] | None = None
    start: Start = field(default_factory=Start)
    exact: bool = True
    shared: Mapping[str, str] | None = None

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.manifest.position.step


def write_part(folder: Folder, snapshot: Snapshot) -> Part:
    """Write the part of one worker, durably. It is not yet committed."""
    path = folder.worker_path(snapshot.step, snapshot.worker)
    files.remove(path)
    files.make_folder(path)
    failpoint("checkpoint.before")
    slices: dict[str, tuple[str, ...]] = {}
    written, every, memory = [], list(snapshot.entries), snapshot.memory
    if snapshot.late is not None:
        memory = {**memory, **snapshot.late(make_put(snapshot.worker, every))}
    for number, entries in enumerate(_divide_entries(every)):
        prefix = files.join(path, f"{_STATE}-{number:05d}")
        slices |= write_entries(prefix, entries)
        data = f"{prefix}.data-00000-of-00001"
        files.sync(data)
        written.append(File(os.path.basename(prefix), files.get_size(data) or 0, files.compute_digest(data)))
    files.sync_folder(path)
    failpoint("checkpoint.written")
    part = Part(snapshot.worker, slices, tuple(written), memory, snapshot.batch)
    tensors = {entry.name: entry.tensor for entry in every}
    document = WrittenPart(part, tensors, snapshot.manifest, snapshot.start, snapshot.exact, snapshot.shared)
    write_document(path, document)
    return part


def count_bytes(entries: Sequence[Entry]) -> int:
    """The bytes of tensors, without the contents of strings."""
    return sum(each.local_slice.numbers * (each.value.dtype.size or 1) for each in entries)


def _divide_entries(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Divide entries into bundles small enough that their copies need little memory."""
    some: list[Entry] = []
    size = 0
    for entry in entries:
        some.append(entry)
        size += count_bytes([entry])
        if size >= _BUNDLE:
            yield some
            some, size = [], 0
    if some:
        yield some


def commit_parts(
    folder: Folder, manifest: Manifest, digests: Mapping[str, str], here: Sequence[str], keep: int
) -> None:
    """Join the parts of the workers `here`, which this host has written, and commit the checkpoint. `digests` are those
    of the parts of all workers. Of older checkpoints those beyond the newest `keep` are removed; 0 keeps all.
    """
    step = manifest.position.step
    paths = {worker: folder.worker_path(step, worker) for worker in sorted(here)}
    written = {worker: read_document(path) for worker, path in paths.items()}
    for worker, found in written.items():
        if found.part.digest != digests[worker]:
            raise CheckpointError(f"the part of {worker} differs from the one that it wrote", where=paths[worker])
    bundles = [(worker, file) for worker, found in written.items() for file in found.part.files]
    bundle = folder.name_bundle(step)
    target = files.join(folder.step_path(step), bundle)
    prefixes = [files.join(paths[worker], file.name) for worker, file in bundles]
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=target, delete_old_dirs=False)
    failpoint("checkpoint.joined")
    joined = []
    for number, (_, file) in enumerate(bundles):
        joined.append(replace(file, name=f"{bundle}.data-{number:05d}-of-{len(bundles):05d}"))
    index = f"{target}.index"
    files.sync(index)
    joined.append(File(f"{bundle}.index", files.get_size(index) or 0, files.compute_digest(index)))
    tensors = {name: form for found in written.values() for name, form in found.tensors.items()}
    folder.commit(
        replace(
            manifest,
            workers=dict(digests),
            parts=tuple(found.part for found in written.values()),
            tensors=tensors,
            files=tuple(joined),
            bundle=bundle,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
    )
    failpoint("checkpoint.committed")
    for path in paths.values():
        files.remove(path)
    if keep:
        folder.prune(keep)
