"""Written parts of a checkpoint that was not committed: what each worker wrote, and which parts form a complete
checkpoint.

The processes of a run that stops cannot always agree on a last checkpoint. Each worker therefore writes its part with
its position, and the next start decides: the parts form a checkpoint if those of all workers exist and are from the
same start of the run and the same position.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from whale_nebula.checkpoint import files
from whale_nebula.checkpoint.folder import Folder
from whale_nebula.checkpoint.manifest import Manifest, Part, Tensor
from whale_nebula.errors import CheckpointError, RemoteProtocolError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.plain import from_plain, to_plain

_PART = "part.json"


@dataclass(frozen=True)
class Start:
    """One start of a run: a token that no other start has, the same in all processes, and all workers."""

    token: str = ""
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenPart:
    """A worker's written part, the dtypes and shapes of its tensors, the manifest without parts, and the start that
    wrote it.

    It is `exact` if all workers took it at the same line of the script, which may change variables between two steps.
    Otherwise `shared` are digests of the variables that this and other workers hold, by all their holders.
    """

    part: Part
    tensors: Mapping[str, Tensor]
    manifest: Manifest | None = None
    start: Start = field(default_factory=Start)
    exact: bool = True
    shared: Mapping[str, str] | None = None

    @property
    def moment(self) -> str:
        """A digest that is the same for the parts of one moment of a run: of one start, at one position."""
        if self.manifest is None or not self.start.token:
            return ""
        position = replace(self.manifest.position, logs={}, titles={})
        content = [to_plain(self.start), self.manifest.attempt, to_plain(position)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def write_document(path: str, written: WrittenPart) -> None:
    """Write the document of a part to the part's folder, last of all its files."""
    files.write(files.join(path, _PART), json.dumps(to_plain(written)).encode())


def read_document(path: str) -> WrittenPart:
    """Read the document of a part in this folder."""
    try:
        found: WrittenPart = from_plain(WrittenPart, json.loads(files.read(files.join(path, _PART))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError("the part of a worker is missing", where=path) from None
    return found


def list_written(path: str) -> dict[str, WrittenPart]:
    """The written parts that the next start of a run may commit, in the folder of a step, by worker."""
    found = {}
    for name in files.list_names(path):
        with contextlib.suppress(CheckpointError):
            written = read_document(files.join(path, name)) if name.startswith(".") else None
            if written is not None and written.moment:
                found[written.part.worker] = written
    return found


def list_uncommitted(folder: Folder, elsewhere: Collection[str] = ()) -> dict[int, dict[str, WrittenPart]]:
    """The written parts by step, of steps that are not committed here, except for those of workers `elsewhere`, whose
    hosts list them.
    """
    steps = [each for each in folder.scan() if not (each.manifests or each.problems)]
    found = {each.step: list_written(each.path) for each in steps}
    return {
        step: {w: each for w, each in parts.items() if w not in elsewhere} for step, parts in found.items() if parts
    }


def describe_waiting(path: str) -> str:
    """A text that lists the workers with parts in the folder of an uncommitted step; "" if there are none."""
    written = list_written(path)
    every = sorted({worker for each in written.values() for worker in each.start.workers})
    if not written:
        return ""
    lacking = [worker for worker in every if worker not in written]
    beside = f", if it also finds that of {escape_foreign_text(lacking[0])}" if lacking else ""
    return f"parts of {escape_foreign_text(', '.join(sorted(written)))}: the next start of the run uses them{beside}"


PartDescription = Sequence[Any]
"""What a process sends others about a written part: step, worker, moment, digest, whether it is exact, digests of
shared variables, and the workers of that start.
"""


def describe_parts(several: Mapping[int, Mapping[str, WrittenPart]]) -> list[list[Any]]:
    """The written parts as sent to other processes."""
    return [
        [step, worker, each.moment, each.part.digest, each.exact, to_plain(each.shared), list(each.start.workers)]
        for step, written in sorted(several.items())
        for worker, each in sorted(written.items())
    ]


@dataclass(frozen=True)
class JoinedStep:
    """A step with written parts: the digests of all parts, and the process that has each, or `why` they do not form a
    checkpoint.
    """

    step: int
    digests: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


def join_parts(descriptions: Mapping[str, Sequence[PartDescription]]) -> list[JoinedStep]:
    """Decide on the steps with written parts, which processes have described, the newest first. All processes decide
    the same. The run that wrote them may have had other workers; a part that several processes can read belongs to the
    first of them.

    >>> both = ["a/0", "b/0"]
    >>> parts = [[7, "a/0", "m", "d0", True, None, both], [7, "b/0", "m", "d1", True, None, both]]
    >>> join_parts({"a/0": parts})
    [JoinedStep(step=7, digests={'a/0': 'd0', 'b/0': 'd1'}, holders={'a/0': 'a/0', 'b/0': 'a/0'}, why='')]
    >>> join_parts({"a/0": parts[:1]})
    [JoinedStep(step=7, digests={}, holders={}, why='b/0 has no part of it')]
    """
    by_step: dict[int, dict[str, _Part]] = {}
    try:
        for holder, rows in sorted(descriptions.items()):
            for step, worker, moment, digest, exact, shared, workers in rows:
                known = None if shared is None else dict(shared)
                part = _Part(holder, str(moment), str(digest), exact is True, known, frozenset(map(str, workers)))
                by_step.setdefault(int(step), {}).setdefault(str(worker), part)
    except (TypeError, ValueError):
        raise RemoteProtocolError("another process describes written parts in an unknown format") from None
    return [_join(step, dict(sorted(by_step[step].items()))) for step in sorted(by_step, reverse=True)]


class _Part(NamedTuple):
    holder: str
    moment: str
    digest: str
    exact: bool
    shared: Mapping[str, Any] | None
    workers: frozenset[str]


def _join(step: int, parts: Mapping[str, _Part]) -> JoinedStep:
    one, first = next(iter(parts.items()))
    lacking = next((worker for worker in sorted(first.workers) if worker not in parts), "")
    elsewhere = next((worker for worker, each in parts.items() if each.moment != first.moment), "")
    if elsewhere:
        return JoinedStep(step, why=f"{one} and {elsewhere} saved at different points of the script")
    if lacking:
        return JoinedStep(step, why=f"{escape_foreign_text(lacking)} has no part of it")
    known: dict[str, tuple[str, Any]] = {}
    for worker, each in parts.items() if not all(each.exact for each in parts.values()) else ():
        if each.shared is None:
            return JoinedStep(step, why=f"the variables that {worker} shares with others could not be compared")
        for holders, digest in each.shared.items():
            other, same = known.setdefault(holders, (worker, digest))
            if digest != same:
                return JoinedStep(step, why=f"variables that {other} and {worker} share had changed in one of them")
    digests = {worker: each.digest for worker, each in parts.items()}
    return JoinedStep(step, digests, {worker: each.holder for worker, each in parts.items()})
