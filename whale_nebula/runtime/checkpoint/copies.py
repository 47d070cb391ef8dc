"""Copies of a host's part of a checkpoint in the memory of another host of its cluster, and their return to a new host.

The hosts of a cluster form a ring: each sends the part that it has written to its memory to the next one, which stores
it with its own, as if both shared a folder. A host without its part of the checkpoint that a run resumes from receives
it from a host that has it. A host that leaves the run sends its part to one that stays.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder, FoundCheckpoint
from whale_nebula.errors import CheckpointError, NebulaError, RemoteProtocolError
from whale_nebula.runtime.single_thread import SingleThread
from whale_nebula.transport import Key

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.group import Group
    from whale_nebula.runtime.session.session import Session

_LOG = logging.getLogger("whale_nebula.runtime.run")
_PROGRAM = 1 << 21
"""The number that marks copies in keys; it is larger than all numbers of programs and rounds."""
_BLOCK = 4 << 20
_NAME = re.compile(r"\w[\w.-]*")
_SAVING, _RESTORING = 0, 2
"""The phases of keys; acknowledgements are in the next phase."""


def admit_copies(session: Session) -> None:
    """Admit blocks of copies on the links."""
    session.expected.add_round(_PROGRAM, _BLOCK)


@dataclass(frozen=True)
class CopyChannel:
    """A channel from one worker to another for a part of a checkpoint, sent in blocks, each acknowledged before the
    next. `number` (the step, or that of a move) and `phase` (`_SAVING`, `_RESTORING`) distinguish it from others.
    """

    session: Session
    source: str
    destination: str
    number: int
    phase: int

    def send(self, blocks: Iterator[bytes]) -> None:
        """Send blocks; returns when the last one is acknowledged."""
        link = self.session.links[self.destination]
        for slot, block in enumerate(blocks):
            link.send(self._key(slot), np.frombuffer(block, np.uint8))
            link.receive(self._ack_key(slot), self.session.patience)

    def receive(self) -> Iterator[bytes]:
        """Receive blocks without end: the caller knows how many there are."""
        link, slot = self.session.links[self.source], 0
        while True:
            block = np.asarray(link.receive(self._key(slot), self.session.patience)).tobytes()
            link.send(self._ack_key(slot), np.zeros(1, np.uint8))
            yield block
            slot += 1

    def _key(self, slot: int) -> Key:
        return Key("round", _PROGRAM, self.number, self.phase, -1, slot, self.source, self.destination)

    def _ack_key(self, slot: int) -> Key:
        return Key("round", _PROGRAM, self.number, self.phase + 1, -1, slot, self.destination, self.source)


def send_part(channel: CopyChannel, found: FoundCheckpoint | None, group: str) -> None:
    """Send a group's part of a checkpoint, or a message that there is none."""
    channel.send(_read_part(found, group))


def _read_part(found: FoundCheckpoint | None, group: str) -> Iterator[bytes]:
    if found is None or group not in found.manifests:
        yield json.dumps({}).encode()
        return
    manifest = found.manifests[group]
    listed = [[file.name, file.size] for file in manifest.files]
    yield json.dumps({"step": found.step, "group": group, "files": listed}).encode()
    yield from _divide(manifest.encode())
    for file in manifest.files:
        yield from files.read_blocks(files.join(found.path, file.name), _BLOCK)


def _divide(content: bytes) -> Iterator[bytes]:
    yield len(content).to_bytes(8, "little")
    for begin in range(0, len(content), _BLOCK):
        yield content[begin : begin + _BLOCK]


def receive_part(channel: CopyChannel, folder: Folder) -> bool:
    """Receive and write another host's part of a checkpoint; returns whether there was one. The manifest is written
    last.
    """
    blocks = channel.receive()
    try:
        header = json.loads(next(blocks))
        step, group = int(header.get("step", 0)), str(header.get("group", ""))
        listed = [(str(name), int(size)) for name, size in header.get("files", [])]
        valid = all(_NAME.fullmatch(name) for name, _ in [(group or "a", 0), *listed])
    except (ValueError, AttributeError, TypeError):
        valid = False
    if not valid:
        raise RemoteProtocolError(f"worker '{channel.source}' sends a copy of a checkpoint in an unknown format")
    if not header:
        return False
    manifest = b"".join(_take_blocks(blocks, int.from_bytes(next(blocks), "little")))
    if not folder.has_room(2 * sum(size for _, size in listed)):
        raise CheckpointError("there is not enough space for a copy of another host's checkpoint", where=folder.path)
    path = folder.step_path(step)
    files.make_folder(path)
    for name, size in listed:
        files.write_blocks(files.join(path, name), _take_blocks(blocks, size))
    files.write(folder.manifest_path(step, group), manifest)
    return True


def _take_blocks(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Blocks until their bytes are `size`."""
    while size > 0:
        block = next(blocks)
        size -= len(block)
        yield block
    if size:
        raise RemoteProtocolError("a copy of a checkpoint has more bytes than announced")


@dataclass
class Copies:
    """The copies of one host's memory (`folder`): they are sent to `receiver`, the first worker of another host of the
    cluster, and those of another one, `sender`, are stored in the same folder.
    """

    session: Session
    folder: Folder
    receiver: str
    sender: str
    _receiving: SingleThread = field(default_factory=lambda: SingleThread("nebula-checkpoint"))
    _is_usable: bool = True

    def expect(self, step: int) -> None:
        """Receive the other host's part of a step in the background. All parts of the step are written."""
        channel = CopyChannel(self.session, self.sender, self.session.worker, step, _SAVING)
        self._receiving.submit(self._guard, lambda: receive_part(channel, self.folder))

    def send(self, step: int) -> None:
        """Send the part of a step, if it was written; returns when the other host has it."""
        channel = CopyChannel(self.session, self.session.worker, self.receiver, step, _SAVING)
        found = next((each for each in self.folder.scan() if each.step == step), None)
        self._guard(lambda: send_part(channel, found, self.folder.group))

    def close(self) -> None:
        """Stop the thread that receives. It may still wait for a host that has failed."""
        self._receiving.close()

    def _guard(self, act: Callable[[], object]) -> None:
        """Call a function; after a failure, copying stops and training continues."""
        try:
            if self._is_usable:
                act()
        except (NebulaError, OSError) as error:
            self._is_usable = False
            _LOG.info("%s: checkpoints are no longer copied to other hosts: %s", self.session.worker, error)


def find_ring(labels: Mapping[str, str], clusters: Mapping[str, str], worker: str) -> tuple[str, str] | None:
    """The receiver of a worker's copies and the worker whose copies it keeps: the first workers of the cluster's hosts
    form a ring. None if there is one host, and for the other workers of a host. `labels` are those of hosts, by worker.

    >>> hosts = {"npu/0": "a", "npu/1": "a", "npu/2": "b", "npu/3": "c"}
    >>> [find_ring(hosts, dict.fromkeys(hosts, "npu"), worker) for worker in ("npu/0", "npu/1", "npu/3")]
    [('npu/2', 'npu/3'), None, ('npu/0', 'npu/2')]
    """
    firsts = sorted({label: each for each, label in sorted(labels.items(), reverse=True)}.values())
    ring = [each for each in firsts if clusters[each] == clusters[worker]]
    if worker not in ring or len(ring) < 2:
        return None
    place = ring.index(worker)
    return ring[(place + 1) % len(ring)], ring[place - 1]


class PartMove(NamedTuple):
    """A part of a checkpoint that one host sends to another, each by its first worker."""

    part: str
    source: str
    destination: str


def fetch_parts(group: Group, identity: str, found: FoundCheckpoint | None, folder: Folder) -> bool:
    """Send parts of the checkpoint of this identity to hosts that lack them; returns whether any was sent. All
    processes call it at the same point; `found` has the local parts, and `folder` is where this host stores received
    ones.
    """
    manifests = {} if found is None else found.manifests
    held_parts = sorted(name for name, manifest in manifests.items() if manifest.identity == identity)
    answers = group.exchange("the holders of checkpoint parts", [group.label, held_parts] if group.commits else None)
    hosts = {worker: (str(each[0]), list(map(str, each[1]))) for worker, each in sorted(answers.items()) if each}
    moves = [move for worker in hosts if (move := _find_missing_part(worker, hosts)) is not None]
    _move_parts(group, moves, found, folder)
    return bool(moves)


def hand_over_parts(group: Group, folder: Folder, step: int, leaving_workers: Collection[str]) -> None:
    """Send the parts of a step from hosts whose first workers leave the run to hosts that stay, unless these share a
    folder that has them. All processes call it at the same point.
    """
    found = next((each for each in folder.scan() if each.step == step), None)
    held_parts = [] if found is None else sorted(found.manifests)
    answers = group.exchange("the hosts that leave", [group.label, held_parts] if group.commits else None)
    hosts = {worker: answer for worker, answer in sorted(answers.items()) if answer}
    stays = next((worker for worker in hosts if worker not in leaving_workers), None)
    if stays is not None:
        leaving = [each for each in hosts if each in leaving_workers and hosts[each][0] not in hosts[stays][1]]
        _move_parts(group, [PartMove(hosts[each][0], each, stays) for each in leaving], found, folder)


def _move_parts(group: Group, moves: Sequence[PartMove], found: FoundCheckpoint | None, folder: Folder) -> None:
    """Send parts of a checkpoint between hosts. All processes call it at the same point, with the same `moves`."""
    for number, (part, source, destination) in enumerate(moves):
        channel = CopyChannel(group.session, source, destination, number, _RESTORING)
        if group.worker == source:
            send_part(channel, found, part)
        elif group.worker == destination:
            receive_part(channel, folder)
            _LOG.info("%s: %s has sent its part of the checkpoint", destination, source)
    if moves:
        group.exchange("the end of sending checkpoint parts", None)


def _find_missing_part(worker: str, hosts: Mapping[str, tuple[str, Sequence[str]]]) -> PartMove | None:
    """The part of a checkpoint that a host lacks, from its holder: the host's own part, or, if no host has that and it
    has no part at all, any part, for the common contents. None if it lacks none.
    """
    label, held_parts = hosts[worker]
    if label in held_parts:
        return None
    holders = {name: each for each in sorted(hosts, reverse=True) for name in hosts[each][1]}
    part = label if label in holders else min(holders, default=None) if not held_parts else None
    return None if part is None else PartMove(part, holders[part], worker)
