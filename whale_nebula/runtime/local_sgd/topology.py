"""Exchange of weight differences: first workers between clusters, then each to the workers of its own cluster."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import google_crc32c
import numpy as np
import tensorflow as tf

from whale_nebula.capture.patches import STATE
from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.codec.objects import PLAIN, Codec
from whale_nebula.codec.packing import Payload, read_payload, write_payload
from whale_nebula.codec.sizes import choose_codec, nbytes
from whale_nebula.errors import ConfigError, OptionError, RemoteProtocolError
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.ir.program import ASYNC, LocalSgd, Program
from whale_nebula.schedule.rounds import GRAIN, share_rows
from whale_nebula.scopes.identity import LOCAL
from whale_nebula.transport import Key, Link, LinkTotals
from whale_nebula.transport.base import receive_each
from whale_nebula.wire.tensor import Bytes

if TYPE_CHECKING:
    from whale_nebula.runtime.run import Run

PROGRAMS = 1 << 20
"""The number that marks rounds in keys, larger than all numbers of programs, because their tensors belong to no
program.
"""


@dataclass(frozen=True)
class Ends:
    """One worker's ends of the exchange. `lead_workers` are the first workers by cluster, in the order in which
    differences are added. `mates` are the other workers of its own cluster, to which the first passes on what it
    receives. `number` distinguishes the rounds of a run.
    """

    worker: str
    cluster: str
    lead_workers: Mapping[str, str]
    links: Mapping[str, Link]
    patience: float
    mates: Sequence[str] = ()
    number: int = 0

    @property
    def is_lead(self) -> bool:
        """Whether this is the first worker of its cluster, which sends and receives for it."""
        return self.lead_workers[self.cluster] == self.worker

    @property
    def others(self) -> Mapping[str, str]:
        """The first workers of the other clusters."""
        return {cluster: first for cluster, first in self.lead_workers.items() if cluster != self.cluster}

    @property
    def program(self) -> int:
        """The number of these rounds in keys of tensors, instead of that of a program."""
        return PROGRAMS + self.number

    def send_fragment(self, round_number: int, fragment: int, data: Bytes, raw: int) -> None:
        """Send a fragment to the other clusters, without waiting. Their fragments are requested first: all send at the
        same time, and a link delays tensors that the receiver has not requested.
        """
        for first in self.others.values() if self.is_lead else ():
            self.links[first].announce_receive(self._key(round_number, fragment, self.cluster, first, self.worker))
        for cluster, first in self.others.items() if self.is_lead else ():
            self._send(self._key(round_number, fragment, cluster, self.worker, first), data, raw)

    @property
    def absent(self) -> tuple[str, ...]:
        """The clusters that do not take part since the last exchange."""
        return ()

    def receive_fragments(
        self, round_number: int, fragment: int, compute_digest: Callable[[], int] = lambda: 0
    ) -> Mapping[str, Bytes]:
        """Receive a fragment from each other cluster that takes part, by name. `compute_digest` gives a checksum of the
        shared weights, for ends that compare it.
        """
        if not self.is_lead:
            lead, here = self.lead_workers[self.cluster], self.worker
            keys = {name: self._key(round_number, fragment, name, lead, here) for name in self.others}
            return {cluster: np.asarray(self._receive(key)) for cluster, key in keys.items()}
        own = self.cluster
        keys = {name: self._key(round_number, fragment, own, w, self.worker) for name, w in self.others.items()}
        received = {}
        for cluster, find in receive_each({cluster: partial(self._receive, key) for cluster, key in keys.items()}):
            received[cluster] = np.asarray(find())
            for mate in self.mates:
                key = self._key(round_number, fragment, cluster, self.worker, mate)
                self._send(key, received[cluster], received[cluster].nbytes)
        return received

    def send_start(self, worker: str, data: Bytes) -> None:
        """Send another worker the initial weights, before the first round."""
        self._send(self._key(0, 0, "", self.worker, worker), data, data.nbytes)

    def receive_start(self, worker: str) -> Bytes:
        """Receive the initial weights from another worker."""
        return np.asarray(self._receive(self._key(0, 0, "", worker, self.worker)))

    @property
    def server(self) -> str:
        """The worker of the parameter server, in asynchronous mode."""
        return next(iter(self.lead_workers.values()))

    def push(self, round_number: int, data: Bytes, raw: int) -> None:
        """Send this cluster's difference to the server."""
        if self.is_lead:
            self._send(self._key(round_number, 0, self.cluster, self.worker, self.server), data, raw)

    def pull(self, round_number: int) -> Bytes:
        """Receive the server's answer; the cluster's first worker passes it on to its other workers."""
        source = self.server if self.is_lead else self.lead_workers[self.cluster]
        data = np.asarray(self._receive(self._key(round_number, 0, "", source, self.worker)))
        self.forward_answer(round_number, data)
        return data

    def forward_answer(self, round_number: int, data: Bytes) -> None:
        """Send the server's answer to the other workers of this cluster, if this is its first."""
        for mate in self.mates if self.is_lead else ():
            self._send(self._key(round_number, 0, "", self.worker, mate), data, data.nbytes)

    def receive_push(self, round_number: int, cluster: str, seconds: float) -> Bytes:
        """Receive a cluster's difference, on the server, within these seconds."""
        key = self._key(round_number, 0, cluster, self.lead_workers[cluster], self.worker)
        return np.asarray(self._receive(key, seconds))

    def answer(self, round_number: int, cluster: str, data: Bytes, raw: int) -> None:
        """Send a cluster the server's answer to its push."""
        self._send(self._key(round_number, 0, "", self.worker, self.lead_workers[cluster]), data, raw)

    @property
    def _numbered_clusters(self) -> Sequence[str]:
        """The clusters in the order of their numbers in keys."""
        return tuple(self.lead_workers)

    def _send(self, key: Key, data: Bytes, raw: int) -> None:
        self.links[key.destination].send(key, np.ascontiguousarray(data), raw_bytes=raw)

    def _receive(self, key: Key, seconds: float | None = None) -> Any:
        """Receive a tensor within these seconds, or the patience."""
        return self.links[key.source].receive(key, self.patience if seconds is None else seconds)

    def _key(self, round_number: int, fragment: int, cluster: str, source: str, destination: str) -> Key:
        """The key of a message about a cluster; "" if it is about none, such as the server's answer."""
        place = (*self._numbered_clusters, "").index(cluster)
        return Key("round", self.program, round_number, place, -1, fragment, source, destination)

    def count_sent(self) -> Mapping[str, LinkTotals]:
        """The totals of the links to the other clusters, by the names of both clusters."""
        return {f"{self.cluster}->{cluster}": self.links[first].totals() for cluster, first in self.others.items()}


class Attendance(NamedTuple):
    """The rule on absence in one run: the cluster that is the `decider`, and those that `may_miss` meetings; neither if
    all clusters take part in all meetings, for the reason `why_none`. With `restarts_together`, clusters may only be
    absent from a start: if one is lost, the launcher of all restarts all.
    """

    decider: str = ""
    may_miss: frozenset[str] = frozenset()
    why_none: str = ""
    restarts_together: bool = False


def choose_attendance(local_sgd: LocalSgd, run: Run, names: Sequence[str]) -> Attendance:
    """The rule on absence for the clusters with these names: those that `elastic` lets go down to 0 workers may miss
    meetings, and the first of the others decides.
    """
    limits = run.config.elastic
    may_miss = frozenset(name for name in names if name in limits and not limits[name].least)
    if run.attachment is None or not may_miss:
        return Attendance()
    decider = next((name for name in names if name not in may_miss), "")
    reasons = {
        "the run has no checkpoint, from which a returning cluster starts": run.checkpoints is None,
        "none always takes part": not decider,
        f"mode={local_sgd.mode!r} has a server": local_sgd.mode == ASYNC,
        "momenta are exchanged after each step": bool(local_sgd.exchange),
        'sync_every is "auto"': bool(local_sgd.chosen) or local_sgd.is_undecided,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    together = run.attachment.has_one_launcher
    return Attendance(why_none=why) if why else Attendance(decider, may_miss, restarts_together=together)


class Participants(NamedTuple):
    """Clusters by name with their speeds; in several processes also their workers, unless a cluster is absent. If
    workers of one cluster exchange momenta, each is a separate participant, like a cluster with one worker.
    `attendance` is the rule on absence.
    """

    speeds: Mapping[str, float]
    workers: Mapping[str, tuple[str, ...]]
    attendance: Attendance = Attendance()

    @property
    def names(self) -> tuple[str, ...]:
        """The clusters in the order in which differences are added."""
        return tuple(self.speeds)

    @property
    def shares(self) -> Mapping[str, float]:
        """The weight of each cluster in the mean: its share of the rows."""
        whole = sum(self.speeds.values())
        return {name: speed / whole for name, speed in self.speeds.items()}

    @property
    def deciding_worker(self) -> str:
        """The first worker of the cluster that decides on absence, through which all data pass; "" without one."""
        return next(iter(self.workers.get(self.attendance.decider, ())), "")

    def find_own(self, run: Run) -> str:
        """The participant that this process belongs to; the first, if one process runs all of them."""
        if run.alone:
            return self.names[0]
        return next(name for name, workers in self.workers.items() if run.here().worker in workers)

    def rows(self, cluster: str, rows: int) -> tuple[int, int]:
        """The range of a batch's rows for a cluster; if there are fewer rows than clusters, each gets all of them."""
        if rows < len(self.speeds):
            return 0, rows
        return share_rows(rows, tuple(self.speeds.values()))[self.names.index(cluster)]


def find_participants(local_sgd: LocalSgd, run: Run) -> Participants:
    """The clusters of the layout that `nb.cluster` names; if it names none, all clusters of the run."""
    names = local_sgd.clusters or tuple(run.config.clusters) or tuple(dict.fromkeys(run.workers.values())) or (LOCAL,)
    if not run.alone and run.here().cluster not in names:
        raise ConfigError(
            f"this process is in cluster {run.here().cluster!r}, which nb.cluster does not name",
            where=local_sgd.where,
            why=f"each of {', '.join(names)} trains a copy, and every process of the run must take part",
            mend=f"nb.cluster({[*names, run.here().cluster]!r})",
        )
    speeds = {name: _sum_speeds(run, name) for name in names}
    workers = {name: tuple(worker for worker, cluster in run.workers.items() if cluster == name) for name in names}
    attendance = choose_attendance(local_sgd, run, names)
    workers = {name: found for name, found in workers.items() if found or name not in attendance.may_miss}
    absent = next((name for name, found in workers.items() if not run.alone and not found), None)
    if absent is not None:
        raise ConfigError(
            f"no process runs cluster {absent!r}",
            where=local_sgd.where,
            why=f"the clusters of this run are {', '.join(dict.fromkeys(run.workers.values()))}",
            mend=f"start a worker of {absent!r}, or remove it from nb.cluster(...)",
        )
    return _find_copies(local_sgd, run, names[0]) if local_sgd.copies > 1 else Participants(speeds, workers, attendance)


def _find_copies(local_sgd: LocalSgd, run: Run, cluster: str) -> Participants:
    """The workers of the one cluster, each of which trains a copy."""
    workers = [worker for worker, of in run.workers.items() if of == cluster]
    if workers and len(workers) != local_sgd.copies:
        raise OptionError(
            f"nb.replica({local_sgd.copies}, exchange={local_sgd.exchange!r}) in a cluster of {len(workers)} workers",
            where=local_sgd.where,
            why="each worker of the cluster trains a copy, and exchanges momenta with the others",
            mend=f"nb.replica(exchange={local_sgd.exchange!r}), or use as many workers as replicas",
        )
    names = workers or sorted(f"{cluster}/{number}" for number in range(local_sgd.copies))
    speeds = run.cluster_speeds.get(cluster, ())
    speeds = speeds if len(speeds) == len(names) else (1.0,) * len(names)
    return Participants(dict(zip(names, speeds, strict=True)), {name: (name,) * bool(workers) for name in names})


def _sum_speeds(run: Run, cluster: str) -> float:
    """The sum of the configured speeds of a cluster's workers; 1 for each worker without one."""
    listed = run.config.clusters.get(cluster)
    if listed is not None and listed.workers:
        return sum(worker.relative_speed for worker in listed.workers)
    return float(max(1, list(run.workers.values()).count(cluster)))


_EXTRA_BYTES = 64  # bytes by which a codec's payload may exceed the numbers


@dataclass
class Differences:
    """Encoder of one cluster's differences, with error feedback for each fragment.

    >>> from whale_nebula.codec.encoding import parse_encoding
    >>> ours = Differences(parse_encoding("int4"))
    >>> gone = np.float32([0.5, 1.0, 0.01])
    >>> data, there = ours.encode(0, gone)
    >>> there.tolist(), bool((ours.decode(data, 3) == there).all())
    ([0.43..., 1.00..., 0.0], True)
    >>> ours.encode(0, np.zeros(3, np.float32))[1].tolist()
    [0.06..., 0.0, 0.00...]
    """

    encoding: Encoding
    _residues: dict[int, Numbers] = field(default_factory=dict)

    def encode(self, fragment: int, numbers: Numbers) -> tuple[Bytes, Numbers]:
        """The bytes to send, and their decoded values."""
        if not self._codec(numbers.size) and not self.encoding.zstd:
            return numbers.view(np.uint8), numbers
        wanted = numbers + self._residues[fragment] if fragment in self._residues else numbers
        made = (self._codec(numbers.size) or PLAIN).compress(tf.convert_to_tensor(_to_matrix(wanted)))
        data = write_payload(Payload(made.data), zstd=self.encoding.zstd)
        there = self.decode(data, numbers.size)
        self._residues[fragment] = wanted - there
        return data, there

    def decode(self, data: Bytes, size: int) -> Numbers:
        """Decode `size` numbers."""
        if not self._codec(size) and not self.encoding.zstd:
            return read_numbers(data, size)
        dims = find_dims(size)
        payload = read_payload(data, dims[0], 0, 4 * dims[0] * dims[1] + _EXTRA_BYTES, zstd=self.encoding.zstd)
        found, _ = (self._codec(size) or PLAIN).restore(payload.data, dims, "float32")
        return np.asarray(found, np.float32).reshape(-1)[:size]

    @property
    def residues(self) -> Mapping[int, Numbers]:
        """The compression errors so far, by fragment."""
        return dict(self._residues)

    def resume(self, residues: Mapping[int, Numbers]) -> None:
        """Restore compression errors."""
        self._residues = dict(residues)

    def forget(self) -> None:
        """Discard compression errors, because the weights were replaced."""
        self._residues.clear()

    def _codec(self, size: int) -> Codec | None:
        return choose_codec(self.encoding.codec, "float32", find_dims(size))


@contextlib.contextmanager
def name_sender(worker: str) -> Iterator[None]:
    """Add the sending worker's name to errors about its message."""
    try:
        yield
    except RemoteProtocolError as error:
        error.where = error.where or f"from worker '{worker}'"
        raise


def read_numbers(data: Bytes, size: int) -> Numbers:
    """Decode numbers, and refuse any other count, because broadcasting would spread them over all weights."""
    if data.nbytes != 4 * size:
        raise RemoteProtocolError(f"received {data.nbytes} bytes of weights instead of {4 * size}")
    return np.ascontiguousarray(data).view(np.float32)


def find_dims(size: int) -> tuple[int, int]:
    """The matrix sizes in which numbers are encoded: rows of the grain, or a single row."""
    return (1, size) if size <= GRAIN else (-(-size // GRAIN), GRAIN)


def count_numbers(weights: Mapping[str, Any]) -> int:
    """The numbers of all weights together."""
    return sum(math.prod(variable.shape) for variable in weights.values())


def count_encoded_bytes(codec: str, count: int) -> int:
    """The bytes of so many numbers in a codec, without headers.

    >>> count_encoded_bytes("none", 10_000), count_encoded_bytes("fp16", 4096)
    (40000, 8192)
    """
    dims = find_dims(count)
    used = choose_codec(parse_encoding(codec).codec, "float32", dims)
    return 4 * count if used is None else nbytes(used.arrays(dims, "float32"))


def _to_matrix(numbers: Numbers) -> Numbers:
    dims = find_dims(numbers.size)
    padded = np.zeros(dims, np.float32)
    padded.reshape(-1)[: numbers.size] = numbers
    return padded


Range = tuple[int, int]


@dataclass(frozen=True)
class FlatVariables:
    """A flat view of variables, one after another.

    >>> one, two = tf.Variable([[1.0, 2.0]]), tf.Variable([3.0, 4.0])
    >>> flat = FlatVariables((one, two))
    >>> flat.write((1, 3), np.float32([7.0, 8.0]))
    >>> flat.read((0, flat.total)).tolist(), one.numpy().tolist()
    ([1.0, 7.0, 8.0, 4.0], [[1.0, 7.0]])
    """

    variables: Sequence[Any]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(math.prod(variable.shape) for variable in self.variables))

    @property
    def total(self) -> int:
        """The total count of numbers."""
        return self._ends[-1] if self._ends else 0

    def read(self, where: Range) -> Numbers:
        """The current numbers of a range, as a new array."""
        found = np.empty(where[1] - where[0], np.float32)
        for variable, inside, outside in self._parts(where):
            found[outside] = variable.numpy().reshape(-1)[inside]
        return found

    def write(self, where: Range, numbers: Numbers) -> None:
        """Write numbers to a range."""
        for variable, inside, outside in self._parts(where):
            whole = np.array(variable.numpy()).reshape(-1)
            whole[inside] = numbers[outside]
            variable.assign(tf.reshape(tf.convert_to_tensor(whole), variable.shape))

    def add(self, where: Range, numbers: Numbers) -> None:
        """Add numbers to those of a range."""
        self.write(where, self.read(where) + numbers)

    def divide(self, numbers: Numbers) -> Iterator[tuple[Any, Numbers]]:
        """Split all numbers into the parts of the variables."""
        for variable, _, inside in self._parts((0, self.total)):
            yield variable, numbers[inside]

    def _parts(self, where: Range) -> Iterator[tuple[Any, slice, slice]]:
        """The variables that a range overlaps, with the slice of each and the matching slice of the range."""
        begin, end = where
        for variable, stop in zip(self.variables, self._ends, strict=True):
            start = stop - math.prod(variable.shape)
            first, last = max(begin, start), min(end, stop)
            if first < last:
                yield variable, slice(first - start, last - start), slice(first - begin, last - begin)


_SEED_SUFFIX = "seed_generator_state"
_STRIDE = 0x3779B9  # the difference of the seeds of two clusters


def find_weights(program: Program, variables: Mapping[str, Any], models: Iterable[Any]) -> Mapping[str, Any]:
    """The trained weights of a step, and the moving averages of layers of these models, by path in its order, without
    optimizer slots and metrics.
    """
    origins = {op for request in program.requests for op in request.origins}
    trained = {program.variable_ops[op].path for op in origins & program.variable_ops.keys()}
    averages = {id(getattr(each, "value", each)) for model in models for each in model.non_trainable_weights}
    paths = {path for path, variable in variables.items() if path in trained or id(variable) in averages}
    return {path: variables[path] for path in sorted(paths) if variables[path].dtype.is_floating}


def find_seeds(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The seeds of dropout, and the draw counters of TensorFlow's random ops."""
    return {
        path: v for path, v in variables.items() if (path.endswith(_SEED_SUFFIX) or STATE in path) and v.shape.rank == 1
    }


def offset_seeds(variables: Mapping[str, Any], place: int) -> None:
    """Offset the seeds of a cluster's dropout, so that its draws differ from the first cluster's."""
    for variable in find_seeds(variables).values() if place else ():
        first = tf.one_hot(0, variable.shape[0], dtype=variable.dtype)
        variable.assign_add(first * tf.cast(place * _STRIDE, variable.dtype))


@dataclass(repr=False)
class ClusterSync(ABC):
    """Synchronisation of one cluster with the others. `round_count` counts exchanges, and `wait_seconds` the seconds
    that steps waited for them.
    """

    flat: FlatVariables
    ends: Ends
    differences: Differences
    steps: int = 0
    round_count: int = 0
    wait_seconds: float = 0.0
    _shared: Numbers | None = None
    _synchronized_steps: int = 0

    def begin(self, shared: Numbers | None = None) -> None:
        """Use these weights, or the current ones, as the shared weights; afterwards the clusters train separately. Only
        the first call has an effect.
        """
        if self._shared is None:
            self._shared = self._read_all() if shared is None else shared.copy()

    @abstractmethod
    def send_due(self) -> None:
        """After a step: send what is due."""

    @abstractmethod
    def apply_due(self) -> None:
        """Apply what is due now; waits for messages that have not arrived."""

    @abstractmethod
    def send_remaining(self) -> None:
        """Before a synchronisation of all clusters: send all differences since the last one."""

    @abstractmethod
    def receive_remaining(self) -> None:
        """Complete the synchronisation, after which all clusters have bit-identical weights."""

    @property
    def is_synchronized(self) -> bool:
        """Whether no step has run since all clusters had the same weights."""
        return self.steps == self._synchronized_steps

    @property
    def fragments(self) -> int:
        """The number of exchanges by which all weights are sent once."""
        return 1

    @property
    def missed(self) -> Mapping[str, float]:
        """How many exchanges of all weights each cluster has missed so far, by name, without those that missed none."""
        return {}

    def join(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of another cluster, because this one was absent when it was captured."""
        self.resume(state)

    @property
    def form(self) -> str:
        """A text that describes the rounds: a saved state can only be restored to rounds with the same text."""
        return type(self).__name__

    waits_for_all: ClassVar[bool] = False
    """Whether the state can be saved only after a synchronisation, with nothing in flight."""

    @property
    def shared(self) -> Numbers | None:
        """The weights that all clusters share; None before the first step."""
        return self._shared

    @abstractmethod
    def capture(self) -> Callable[[], dict[str, Any]]:
        """Take the state between two steps, without the weights. Returns a function, callable from any thread, that
        waits for the exchanges in flight and returns the state as plain values and arrays.
        """

    @abstractmethod
    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a captured state; the shared weights are those of `begin`."""

    def restart(self) -> None:
        """Continue from the current weights, which were replaced by the same ones in all clusters."""
        if self._shared is not None:
            self._shared = self._read_all()
            self.differences.forget()

    def digest(self) -> int:
        """A checksum of the shared state: equal in all clusters after the same number of rounds."""
        return google_crc32c.value(b"" if self._shared is None else self._shared.tobytes())

    @abstractmethod
    def close(self) -> None:
        """Stop the threads."""

    def _read_all(self) -> Numbers:
        return self.flat.read((0, self.flat.total))
