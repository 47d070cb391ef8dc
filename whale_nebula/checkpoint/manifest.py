"""The manifest of a checkpoint: contents, writers, position of the run, and digests of the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.errors import CheckpointError
from whale_nebula.plain import from_plain, to_plain

FORMAT = 1
NAME = "manifest"
STATES = "memory/"
"""The prefix of tensors that are no variables, but arrays in the states of a worker."""


Shapes = tuple[tuple[int | None, ...], ...]
LengthChoice = tuple[int | None, str | None, float]
"""What was chosen for a length of a curriculum: micro-batches, a codec, and the predicted seconds of a step."""


@dataclass(frozen=True)
class File:
    """A file of a checkpoint, by its name in the checkpoint's folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Tensor:
    """The dtype and shape of a tensor in the uncut model."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Position:
    """The position of a run: after `step` steps of training, in the `fit`-th call of `fit` after `batch` batches of an
    `epoch` (`fit` is 0 in a custom loop). If that call has `ended`, `epochs` is its requested number. `programs` counts
    the steps of each program, and `logs` are the results of the last step. For programs of a loop that share a name,
    `titles` maps the title under which each is counted to a variable that it trains.
    """

    step: int = 0
    fit: int = 0
    epoch: int = 0
    batch: int = 0
    ended: bool = False
    epochs: int = 0
    program: str = ""
    programs: Mapping[str, int] = field(default_factory=dict)
    logs: Mapping[str, float] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The part of one worker: the slices of each tensor ("" is all of it), its data files, its states other than
    variables as documents (their arrays are tensors), and a fingerprint of the next batch.
    """

    worker: str
    slices: Mapping[str, tuple[str, ...]]
    files: tuple[File, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    batch: str = ""

    @property
    def digest(self) -> str:
        """A digest that identifies the part to other processes."""
        return hashlib.sha256(json.dumps(to_plain(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ProgramPlan:
    """How a program was run: the digest of its computation (`Plan.program_digest`), the workers of each stage by its
    name, and the number of micro-batches.
    """

    program_digest: str
    stages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    micro_batch: int = 1

    def __str__(self) -> str:
        stages = "; ".join(f"{name} on {', '.join(workers)}" for name, workers in self.stages.items())
        return f"{stages or 'uncut'}; {self.micro_batch} micro-batch{'es' * (self.micro_batch != 1)}"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors, as one host wrote it.

    `workers` are all writers of parts, with the parts' digests, the same in the manifest of every host; `parts` are
    those of this host, in the TensorFlow bundle `bundle`. `aliases` has, by program, the names of tensors that are not
    the paths of its variables, as other variables have these. `forms` has, by program, the shapes of the inputs of each
    of its traces in order, if a trace may be for more than one shape; `intervals` the steps between meetings that were
    chosen for it; and `by_length` what was chosen for it in a curriculum, by the length as text. `plans` has the plans
    of the programs with scopes; any other plan can read the checkpoint. `at` is when the values were taken, in seconds
    since 1970, and `spent` how the run's time was spent until then. `at_error`: the script ended after it by an error.
    """

    position: Position
    workers: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    files: tuple[File, ...] = ()
    bundle: str = ""
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forms: Mapping[str, tuple[Shapes, ...]] = field(default_factory=dict)
    intervals: Mapping[str, int] = field(default_factory=dict)
    by_length: Mapping[str, Mapping[str, LengthChoice]] = field(default_factory=dict)
    plans: Mapping[str, ProgramPlan] = field(default_factory=dict)
    run: str = ""
    attempt: int = 0
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    time: str = ""
    at: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    at_error: bool = False
    format: int = FORMAT

    @property
    def identity(self) -> str:
        """An identity that is shared by all manifests of one checkpoint, and unique to it."""
        content = json.dumps([self.position.step, self.attempt, sorted(self.workers.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    @property
    def is_manual(self) -> bool:
        """Whether it was written by `nb.save`, and not by a run."""
        return self.position == Position()

    @property
    def size(self) -> int:
        """The total bytes of this host's files."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """The text of the file: a line with the digest of the rest, which reveals a truncated or changed file."""
        document = json.dumps(to_plain(self), indent=1, sort_keys=True)
        return f'{{"sha256": "{_digest(document)}", "manifest":\n{document}\n}}\n'.encode()


def decode_manifest(content: bytes, where: str) -> Manifest:
    """Decode a manifest file; damaged ones and unknown formats are refused."""
    try:
        text = content.decode()
        document = text.partition("\n")[2].rpartition("\n}")[0]
        outer = json.loads(text)
        if outer["sha256"] != _digest(document) or not text.endswith("\n}\n"):
            raise _unreadable_error(where, "its digest does not match its content")
        if outer["manifest"].get("format") != FORMAT:
            raise _unreadable_error(
                where, f"it has format {outer['manifest'].get('format')}, but this version reads format {FORMAT}"
            )
        found: Manifest = from_plain(Manifest, outer["manifest"])
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise _unreadable_error(where, "it is not the manifest of a checkpoint") from None
    return found


def _digest(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def _unreadable_error(where: str, why: str) -> CheckpointError:
    return CheckpointError("a checkpoint cannot be read", where=where, why=why)
