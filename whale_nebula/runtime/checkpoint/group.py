"""The processes of one host, which write a checkpoint together, and the part of every variable that each holds; and the
choice of the checkpoint that a run resumes from.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from whale_nebula import __version__
from whale_nebula.checkpoint.folder import Folder, FoundCheckpoint, check_whole, choose_checkpoint, offer_checkpoints
from whale_nebula.checkpoint.manifest import Manifest, Position, ProgramPlan, Tensor
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import CheckpointError, RemoteProtocolError
from whale_nebula.errors.text import list_names
from whale_nebula.ir.canonical import program_digest
from whale_nebula.ir.cut import Cut
from whale_nebula.launch.membership import select_workers
from whale_nebula.runtime.checkpoint.copies import fetch_parts
from whale_nebula.runtime.checkpoint.slices import Entry, Slice, Source, find_slice, make_whole_entry
from whale_nebula.runtime.variables.remote import Transfer

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run
    from whale_nebula.runtime.session.session import Session

_LOG = logging.getLogger("whale_nebula.runtime.run")
_ALONE = "local/0"
_OFFERED = 3
"""The number of newest checkpoints of each folder that are offered: a host is at most one behind the others, and may
have lost one that others saved from memory when the run stopped.
"""


class Group:
    """The processes of a run that share a host with this one, and thus a folder: the first of them commits their
    parts.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.worker: str = _ALONE if run.alone else run.ledger.session.worker
        hosts = run.hosts or {self.worker: ""}
        self.members = tuple(sorted(each for each, host in hosts.items() if host == hosts.get(self.worker)))
        self.label = "" if len(self.members) == len(hosts) else self.members[0].replace("/", "-")

    @property
    def session(self) -> Session:
        """The session with the other processes, if there are any."""
        found: Session = self._run.ledger.session
        return found

    @cached_property
    def everyone(self) -> tuple[str, ...]:
        """All workers of the run."""
        return tuple(self._run.workers) or (self.worker,)

    def remove_workers(self, workers: Collection[str]) -> None:
        """Continue without these workers. The folder keeps its name."""
        self.members = tuple(each for each in self.members if each not in workers)
        vars(self).pop("everyone", None)

    @property
    def is_single_worker(self) -> bool:
        """Whether the run has no other worker."""
        return len(self.everyone) == 1

    @property
    def commits(self) -> bool:
        """Whether this process commits the parts of its host."""
        return self.worker == self.members[0]

    @property
    def absent_workers(self) -> list[str]:
        """The workers without which the run continues, sorted."""
        found = self._run.attachment
        return [] if found is None else sorted(found.absent)

    @property
    def absent_clusters(self) -> list[str]:
        """The clusters of which no worker is present, sorted."""
        return sorted(set(map(cluster_of, self.absent_workers)) - set(self._run.workers.values()))

    def find_leaving(self, counts: Mapping[str, int]) -> frozenset[str]:
        """The workers that leave the run if clusters get these agreed numbers of workers (`ExitAgreement.counts`)."""
        running = self._run.workers
        return frozenset(running) - select_workers(running, [*running, *self.absent_workers], counts)

    def report_needed(self, workers: Collection[str]) -> None:
        """Report to the launcher that absent workers are needed."""
        self._report(needs=sorted(workers))

    def report_saved(self, step: int) -> None:
        """Report to the launcher, if there is one, that a step is saved."""
        self._report(saved=step)

    def report_saving(self, saving: bool) -> None:
        """Report to the launcher that this worker is saving because it stops with an error, or that it has finished."""
        self._report(saving=saving)

    def _report(self, **words: Any) -> None:
        heartbeat_sender = None if self._run.attachment is None else self._run.attachment.heartbeat_sender
        if heartbeat_sender is not None:
            heartbeat_sender.send(**words)

    def exchange(self, doing: str, value: Any) -> dict[str, Any]:
        """Exchange a value with all processes; returns all of them by worker, with this one's. Collective."""
        if self._run.alone:
            return {self.worker: value}
        return self._run.ledger.session.share(doing, value)

    def list_entries(self, variables: Mapping[str, Any], sharers: Sequence[str] | None = None) -> Iterator[Entry]:
        """The entries of variables that this worker writes: those that only it holds on this host, its pieces, and its
        share of those that others also hold. With local SGD, only the `sharers` of its own copy count.
        """
        mates = [each for each in self.members if sharers is None or each in sharers]
        for name, variable in sorted(variables.items()):
            kept = self._find_kept(variable)
            if kept is not None and kept.piece is not None:
                form = Tensor(variable.dtype.name, tuple(variable.shape.as_list()))
                held = find_slice(form.shape, kept.piece.layout, kept.piece.count, kept.piece.index)
                if kept.piece.first == kept.holders[0]:
                    yield Entry(name, form, held, tf.convert_to_tensor(kept.piece.variable.read_value()))
                continue
            near = self.members[:1] if kept is None else [each for each in mates if each in kept.holders]
            if near and choose_writer(name, near) == self.worker:
                yield make_whole_entry(name, variable.read_value())

    def read_own(self, variables: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The variables that this worker holds, or its pieces of them, by name, each with its value."""
        found = {}
        for name, variable in variables.items():
            kept = self._find_kept(variable)
            if kept is None or self.worker in kept.holders:
                own = variable if kept is None or kept.piece is None else kept.piece.variable
                found[name] = own, own.read_value()
        return found

    def digest_shared(self, variables: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, str]:
        """Digests of the variables that this worker shares with others, by the names of all holders. Some variables
        have `held` values instead of the present ones.
        """
        found: dict[str, Any] = {}
        for name, variable in sorted(variables.items()):
            kept = self._find_kept(variable)
            holders = self.everyone if kept is None else kept.holders
            if self.worker in holders and len(holders) > 1 and (kept is None or kept.piece is None):
                digest = found.setdefault(" ".join(holders), hashlib.sha256())
                digest.update(name.encode())
                value = held[name] if name in held else variable.read_value()
                digest.update(np.ascontiguousarray(value).tobytes())
        return {holders: digest.hexdigest()[:32] for holders, digest in found.items()}

    def restore(self, source: Source, variables: Mapping[str, Any]) -> list[str]:
        """Restore variables, or this worker's pieces of them, by name; returns the names without a saved value. If
        hosts have their own folders, missing tensors are received from other processes: all call it at the same point.
        """
        lacking = {}
        for name, variable in sorted(variables.items()):
            if not self._holds(variable):
                continue
            form = source.tensors.get(name)
            if form is not None and source.has(name, self._find_piece(variable, form)):
                self._assign(variable, partial(source.read, name), form, name, source.path)
            else:
                lacking[name] = variable
        return self._fetch(source, lacking) if self.label else list(lacking)

    def _fetch(self, source: Source, lacking: Mapping[str, Any]) -> list[str]:
        """Receive missing tensors, by slices, from the first process that has them; send those that others lack."""
        missing = self.exchange("the missing parts of a checkpoint", list(lacking))
        every = sorted({str(name) for names in missing.values() for name in names})
        if not every:
            return []
        own = {name: [_encode_slice(source, name, each) for each in source.list_slices(name)] for name in every}
        slices_by_worker = self.exchange(
            "the holders of missing checkpoint parts", {name: slices for name, slices in own.items() if slices}
        )
        transfers: list[Transfer] = []
        received_tensors: dict[str, ReceivedTensor] = {}
        for name in every:
            first: dict[tuple[Any, ...], str] = {}
            for worker in sorted(slices_by_worker):
                for each in slices_by_worker[worker].get(name, ()):
                    first.setdefault(_parse_slice_key(each), worker)
            receivers = tuple(sorted(worker for worker, names in missing.items() if name in names))
            if name in lacking and first:
                received_tensors[name] = ReceivedTensor(first)
            for (dtype, _, starts, sizes), sender in first.items():
                part = Slice(starts, sizes)
                store = received_tensors[name].store(part) if name in received_tensors else None
                transfers.append(Transfer(sender, receivers, partial(source.read, name, part), (dtype, sizes), store))
        self._run.ledger.transfer_values(transfers, f"{len(transfers)} slices of a checkpoint")
        for name, found in received_tensors.items():
            self._assign(lacking[name], found.read, found.form, name, source.path)
        return [name for name in lacking if name not in received_tensors]

    def _assign(self, variable: Any, read: Callable[..., Any], form: Tensor, name: str, where: str) -> None:
        if form.dtype != variable.dtype.name or not variable.shape.is_compatible_with(form.shape):
            raise CheckpointError(
                f"variable {name!r} is {variable.dtype.name}{variable.shape.as_list()} here, "
                f"but {form.dtype}{list(form.shape)} in the checkpoint",
                where=where,
                why="the checkpoint is from a different model",
                mend='nb.init(checkpoint="another/folder"), or use the model that was saved',
            )
        part = self._find_piece(variable, form)
        if part is None:
            variable.assign(read())
        else:
            self._find_kept(variable).piece.variable.assign(read(part))

    def _find_piece(self, variable: Any, form: Tensor) -> Slice | None:
        """The part of a variable that this worker has; None if it has the complete variable."""
        kept = self._find_kept(variable)
        if kept is None or kept.piece is None:
            return None
        return find_slice(form.shape, kept.piece.layout, kept.piece.count, kept.piece.index)

    def _holds(self, variable: Any) -> bool:
        kept = self._find_kept(variable)
        return kept is None or self.worker in kept.holders

    def knows_holders(self, variable: Any) -> bool:
        """Whether the holders of a variable are known, because it belongs to a program; each process has all others."""
        return self._run.alone or self._find_kept(variable) is not None

    def _find_kept(self, variable: Any) -> Any:
        """The record of a variable's holders; None if each process has the complete variable."""
        return None if self._run.alone else self._run.ledger.variables.get(id(variable))


class ReceivedTensor:
    """A tensor that is received in slices."""

    def __init__(self, slices: Collection[tuple[Any, ...]]) -> None:
        """Each slice is described by the dtype and shape of the tensor, and its own starts and sizes."""
        dtype, shape = next(iter(slices))[:2]
        self.form = Tensor(dtype, shape)
        self._whole = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)

    def store(self, part: Slice) -> Callable[[Any], None]:
        """The function that stores the values of a slice."""
        place = tuple(slice(a, a + n) for a, n in zip(part.starts, part.sizes, strict=True))

        def store(value: Any) -> None:
            self._whole[place] = np.asarray(value)

        return store

    def read(self, part: Slice | None = None) -> Any:
        """The tensor, or a part of it."""
        value = tf.convert_to_tensor(self._whole)
        return value if part is None else tf.slice(value, part.starts, part.sizes)


def choose_writer(name: str, workers: Sequence[str]) -> str:
    """The one of these workers that writes a variable that all of them hold. All processes choose the same, although
    some may still have variables that others have released.

    >>> [choose_writer(name, ["npu/0", "npu/1"]) for name in ("dense/kernel", "mean")]
    ['npu/1', 'npu/0']
    """
    return workers[zlib.crc32(name.encode()) % len(workers)]


def _encode_slice(source: Source, name: str, part: Slice) -> list[Any]:
    """The description of a local slice for other processes."""
    form = source.tensors[name]
    return [form.dtype, list(form.shape), list(part.starts), list(part.sizes)]


def _parse_slice_key(description: Any) -> tuple[Any, ...]:
    """The description of a slice from another process as a key."""
    try:
        dtype, *lists = description
        shape, starts, sizes = (tuple(int(axis) for axis in each) for each in lists)
        return str(dtype), shape, starts, sizes
    except (TypeError, ValueError):
        raise RemoteProtocolError("another process describes a slice in an unknown format") from None


def choose_source(
    group: Group,
    list_found: Callable[[], Sequence[FoundCheckpoint]],
    folder: Folder | None = None,
    list_durable: Callable[[], Sequence[FoundCheckpoint]] = list,
) -> Source | None:
    """The newest checkpoint of those that `list_found` returns of which all parts are available, the same in all
    processes; None if there is none. Damaged ones are reported and skipped. A host without its part receives it into
    this `folder`. `list_durable` returns the checkpoints on the disk: without absent workers, newer ones may lack
    parts. Collective.
    """
    whole: dict[str, list[FoundCheckpoint]] = {}  # by folder: a checkpoint in memory may be newer than all others
    for each in sorted(list_found(), key=lambda found: -found.step) if group.commits else ():
        beside = whole.setdefault(os.path.dirname(each.path), [])
        if (each.manifests or each.problems) and len(beside) < _OFFERED and check_whole(each, _LOG.warning):
            beside.append(each)
    offers = group.exchange("the available checkpoints", offer_checkpoints(chain.from_iterable(whole.values())))
    chosen = choose_checkpoint(list(offers.values()))
    _check_missed(group, list_durable(), chosen)
    if chosen is None:
        return None
    found = _find_checkpoint(list_found(), chosen[1])
    if group.label and folder is not None and fetch_parts(group, chosen[1], found, folder):
        found = _find_checkpoint(list_found(), chosen[1])
    return None if found is None else Source(found, chosen[1])


def _check_missed(group: Group, several: Sequence[FoundCheckpoint], chosen: tuple[int, str] | None) -> None:
    """Refuse to continue without absent workers that have the missing parts of newer checkpoints: of more than one
    step, or of all that there are.
    """
    absent = group.absent_workers
    if not absent:
        return
    begun = -1 if chosen is None else chosen[0]
    newer = sorted({each.step for each in several if each.manifests and each.step > begun})
    if len(newer) > (0 if chosen is None else 1):
        group.report_needed(absent)
        names = sorted({cluster_of(each) if cluster_of(each) in group.absent_clusters else each for each in absent})
        raise CheckpointError(
            f"the run cannot resume without {list_names(names)}: only a part of step {newer[-1]} is available",
            where=several[0].path if several else None,
            why="each host saves to its own folder, and the missing hosts were lost before they could send their parts",
            mend=f"start {names[0]} again; or use one shared folder for all hosts, from which any of them can resume",
        )


def _find_checkpoint(several: Sequence[FoundCheckpoint], identity: str) -> FoundCheckpoint | None:
    """The local checkpoint with the most manifests of this identity; None if there is none."""

    def count(found: FoundCheckpoint) -> int:
        return [manifest.identity for manifest in found.manifests.values()].count(identity)

    best = max(several, key=count, default=None)
    return best if best is not None and count(best) else None


def begin_manifest(run: Run, position: Position, aliases: Mapping[str, Mapping[str, str]]) -> Manifest:
    """A checkpoint's manifest with what a run knows of it without its tensors and states."""
    return Manifest(
        position,
        aliases=aliases,
        attempt=run.here().epoch,
        run=run.config.run_name,
        seed=run.seed if run.seed is not None else run.config.seed,
        versions={"whale_nebula": __version__, "tensorflow": tf.__version__, "keras": keras.__version__},
    )


def describe_plan(cut: Cut) -> ProgramPlan:
    """The plan of a program for the manifest."""
    stages = {stage.key: cut.workers_of(number) for number, stage in enumerate(cut.program.stages)}
    return ProgramPlan(program_digest(cut.program), stages, cut.program.pipeline.micro_batch)
