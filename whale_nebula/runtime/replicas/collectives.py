"""Sums over the replicas of a stage by TensorFlow's collectives: a ring on CPUs, NCCL on GPUs.

Every worker of the cluster is a task of a TensorFlow cluster. Each calls the same sums under the same names, and all
get bit-identical results, because every part of a sum is computed by one member and distributed, or kept there if
members get pieces of a sum. For pieces, all members exchange their parts, because CPUs have no reduce-scatter.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.config.place import split_address
from whale_nebula.config.schema import PATIENCE_SECONDS
from whale_nebula.errors import DeadlineError, LinkClosedError, NebulaError, OptionError, StateError
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.graph import REPLICA_SUM
from whale_nebula.ir.layout import divide, find_local_spec
from whale_nebula.runtime.session.task import restrict_port
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import collectives as tf_collectives
from whale_nebula.tf import patch as tf_patch
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.private import is_runtime_started, silence_retracing_warning

BUCKET_BYTES = 1 << 21
"""The size of a bucket: two are in flight while a third is filled; see benchmarks/replica for other sizes."""


def group_into_buckets(dtypes: Sequence[str], sizes: Sequence[int], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Group tensors into buckets by index: neighbours of the same dtype up to `limit` bytes, larger ones alone.

    >>> group_into_buckets(["float32", "int32", "float32"], [8, 4, 8], limit=16)
    [[0, 2], [1]]
    >>> group_into_buckets(["float32"] * 4, [8, 8, 8, 64], limit=16)
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    for number, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        bucket, held = filling.get(dtype, ([], limit))
        if held + size > limit:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(number)
        filling[dtype] = bucket, held + size
    return found


def apply_packed(
    tensors: Sequence[tf.Tensor], bucket: Sequence[int], do: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Apply a function to the tensors of a bucket as one vector; returns each in its own shape."""
    chosen = [tensors[number] for number in bucket]
    if len(chosen) == 1:
        return [do(chosen[0])]
    packed = do(tf.concat([tf.reshape(tensor, [-1]) for tensor in chosen], 0))
    pieces = tf.split(packed, [count_elements(tensor) for tensor in chosen])
    return [tf.reshape(piece, tensor.shape) for piece, tensor in zip(pieces, chosen, strict=True)]


def count_elements(tensor: tf.Tensor) -> int:
    """The number of elements of a tensor of known shape."""
    return int(np.prod(tensor.shape.as_list(), dtype=np.int64))


DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
"""The element types that collectives sum."""
_POLL_SECONDS, _LOST_POLLS = 0.25, 4


def can_open(index: int, count: int) -> bool:
    """Whether `open_collectives` is possible: TensorFlow's runtime has not started, or has started as this task."""
    task = tf_collectives.find_task()
    return (task.index, task.count) == (index, count) if task is not None else not is_runtime_started()


def find_listening_port() -> int | None:
    """The port of TensorFlow's server in this process; None if there is none."""
    task = tf_collectives.find_task()
    return None if task is None or not task.address else split_address(task.address)[1]


def open_collectives(
    index: int,
    addresses: Sequence[str],
    *,
    patience: float = PATIENCE_SECONDS,
    lost: Callable[[], NebulaError | None] = lambda: None,
) -> Collectives:
    """Become task `index` of the cluster with workers at `addresses` ("host:port"), and listen on its own port.

    If all hosts are numeric, only these hosts and this one can connect. `lost` returns the error of a lost worker, if
    there is one; it is polled during a long sum: only the neighbour in the ring detects a dead process, and the others
    would wait.
    """
    if not can_open(index, len(addresses)):
        raise StateError(
            "TensorFlow has already started in this process, so its collectives cannot be opened",
            why="the names of its devices are set when it starts, and existing tensors are on these devices",
            mend="call nb.init() before any code that creates a tensor, a variable or a layer",
        )
    tf_collectives.start_server(index, addresses)
    restrict_port(split_address(addresses[index])[1], [split_address(address)[0] for address in addresses])
    return Collectives(index, tuple(addresses), patience, lost)


@dataclass(frozen=True, eq=False)
class Collectives:
    """TensorFlow's collectives between the tasks of a cluster, of which this process is number `index`. A wait for the
    others takes at most `patience` seconds.
    """

    index: int
    addresses: tuple[str, ...]
    patience: float
    find_lost: Callable[[], NebulaError | None] = lambda: None
    _failures: list[NebulaError] = field(default_factory=list, repr=False)

    def group(self, members: Sequence[int], name: str) -> Group:
        """The group of these tasks, which sum among themselves; all of them pass the same members and the same name."""
        chosen = tuple(sorted(set(members)))
        if self.index not in chosen or not set(chosen) <= set(range(len(self.addresses))):
            raise OptionError(
                f"members={list(members)} of group {name!r} are not tasks of this cluster with task {self.index}",
                why=f"the tasks are 0 to {len(self.addresses) - 1}, and only members can create a group",
                mend=f"members={sorted({*range(len(self.addresses))})}",
            )
        return Group(self, chosen, name)

    def abort(self, why: str | NebulaError) -> None:
        """Make every waiting and every later sum fail, in all threads, because this process will exit."""
        self._failures.append(why if isinstance(why, NebulaError) else LinkClosedError("a sum was cancelled", why=why))
        tf_collectives.abort_collectives(self._failures[0].what)

    @contextlib.contextmanager
    def explain_failures(self, doing: str) -> Iterator[None]:
        """Abort sums that exceed their patience or have lost members, and replace TensorFlow's error by a NebulaError.
        `sum` uses this context itself; functions that contain sums must be called inside it.
        """
        done = threading.Event()
        threading.Thread(target=self._watch, args=(doing, done), name="nebula-collectives", daemon=True).start()
        try:
            yield
        except tf.errors.OpError as error:
            found = self._explain_error(error, doing)
            if found is None:
                raise
            raise found from error
        finally:
            done.set()

    def _watch(self, doing: str, done: threading.Event) -> None:
        """Abort a sum that other members will not reach. A member that exited normally has sent all its parts."""
        until, lost_polls = time.monotonic() + self.patience, 0
        while not done.wait(_POLL_SECONDS):
            lost = self.find_lost()
            lost_polls = lost_polls + 1 if lost is not None else 0
            if lost_polls < _LOST_POLLS and time.monotonic() < until:
                continue
            if not done.is_set():
                self.abort(lost or self._late_error(doing))
            return

    def _late_error(self, doing: str) -> DeadlineError:
        return DeadlineError(f"{doing}: not all workers of the cluster took part within {self.patience:g} s")

    def _wait_for_lost(self) -> NebulaError | None:
        """The error of a lost member, after a short wait: TensorFlow may detect an exit before the links, which
        identify the member.
        """
        until = time.monotonic() + 2 * _POLL_SECONDS
        while (found := self.find_lost()) is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS / 25)
        return found

    def _explain_error(self, error: tf.errors.OpError, doing: str) -> NebulaError | None:
        """The error to raise instead; None if `error` is not one of a collective."""
        text = error.message
        if not self._failures and "Collective" not in text:
            return None
        known = self._failures[0] if self._failures else self._wait_for_lost()
        if known is not None:
            return known
        match = re.search(r"Collective ops is aborted by: (.*)", text)
        task = re.search(rf"remote target /job:{tf_collectives.JOB}/replica:0/task:(\d+)", text)
        who = f"at {self.addresses[int(task[1])]}" if task else "of its cluster"
        return LinkClosedError(f"{doing} failed: the worker {who} is gone", why=match[1] if match else text)


class CollectiveKeys:
    """The keys of collectives, which are hashes of their names and therefore the same in every process."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def find_number(self, name: str) -> int:
        """The key of a name; raises an error if another name has the same one."""
        key = tf_collectives.hash_key(name)
        with self._lock:
            if self._names.setdefault(key, name) != name:
                raise StateError(
                    f"the collectives {name!r} and {self._names[key]!r} have the same key",
                    mend="give one of them a different name",
                )
        return key


@dataclass(frozen=True, eq=False)
class Group:
    """Some workers of a cluster, by their tasks (`members`), which sum tensors among themselves. Repeated calls have
    the same key, because one ends before the next begins.
    """

    collectives: Collectives
    members: tuple[int, ...]
    name: str
    _keys: CollectiveKeys = field(default_factory=CollectiveKeys, repr=False)
    _graphs: weakref.WeakKeyDictionary[Any, _GraphSums] = field(default_factory=weakref.WeakKeyDictionary, repr=False)

    def sum(self, tensors: Sequence[tf.Tensor], name: str = "", axes: Sequence[int | None] = ()) -> list[tf.Tensor]:
        """The sums over all members: each calls this with tensors of the same dtypes and shapes, under the same name.
        For a tensor with an axis in `axes` a member gets its piece along that axis, otherwise the whole.

        In a traced function it adds ops, which start as soon as their inputs are available. Functions that may run at
        the same time need different names.
        """
        _check_tensors(tensors)
        if len(self.members) == 1 or not tensors:
            return [tf.identity(tensor) for tensor in tensors]
        axes = tuple(axes) or (None,) * len(tensors)
        if not tf.executing_eagerly():
            return self._sum_tensors(tensors, name, axes)
        with self.collectives.explain_failures(f"the sum {name!r} of group {self.name!r}"):
            return list(self._sum_function(list(tensors), name, axes))

    def exchange(self, rows: Any) -> Any:
        """All-to-all of an array of int32 on CPUs: row n is sent to member n, and row n of the result is received from
        it.
        """
        order = self._sorted_members
        with self.collectives.explain_failures(f"an exchange of group {self.name!r}"):
            return self._exchange_function(tf.constant(rows[order])).numpy()[np.argsort(order)]

    def gather(self, row: Any) -> Any:
        """All-gather of an array of int32 on CPUs, of the same size in all members: a row for each, in their order."""
        with self.collectives.explain_failures(f"a gathering of group {self.name!r}"):
            return self._gather_function(tf.constant(row[np.newaxis])).numpy()[np.argsort(self._sorted_members)]

    @property
    def _sorted_members(self) -> list[int]:
        """The members in TensorFlow's order, which sorts tasks as text."""
        return sorted(range(len(self.members)), key=lambda number: str(self.members[number]))

    @functools.cached_property
    def _exchange_function(self) -> Any:
        return _make_function(functools.partial(self._move, tf_collectives.exchange))

    @functools.cached_property
    def _gather_function(self) -> Any:
        return _make_function(functools.partial(self._move, tf_collectives.gather))

    def _move(self, do: Callable[..., tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tf_collectives.CPU):
            group = tf_collectives.hash_key(f"{self.name}/{self.members}")
            key = self._keys.find_number(f"{do.__name__} {tensor.shape.as_list()}")
            return do(tensor, len(self.members), group, key)

    @functools.cached_property
    def _sum_function(self) -> Any:
        return _make_function(self._sum_tensors)

    def _sum_tensors(self, tensors: Sequence[tf.Tensor], name: str, axes: Sequence[int | None]) -> list[tf.Tensor]:
        """Add the ops of a sum to the graph that is being traced."""
        pairs = list(zip(tensors, axes, strict=True))
        forms = [
            (f"{tensor.dtype.name}{'' if axis is None else '/'}", tensor.shape.as_list()) for tensor, axis in pairs
        ]
        graph = self._graphs.setdefault(tf.compat.v1.get_default_graph(), _GraphSums())
        call = f"{name}/{graph.count_call(f'{name}{forms}')}/{forms}"
        sizes = [count_elements(tensor) * tensor.dtype.size for tensor in tensors]
        sums: list[Any] = [None] * len(tensors)
        for bucket in group_into_buckets([dtype for dtype, _ in forms], sizes, BUCKET_BYTES):
            key = self._keys.find_number(f"{call}/{bucket[0]}")
            run = functools.partial(self._run_collective, key=key, graph=graph)
            if axes[bucket[0]] is None:
                found = apply_packed(tensors, bucket, functools.partial(run, tf_collectives.reduce, op="Add"))
            else:
                chosen = [(tensors[number], axes[number] or 0) for number in bucket]
                found = self._scatter_packed(chosen, functools.partial(run, tf_collectives.exchange))
            for number, tensor in zip(bucket, found, strict=True):
                sums[number] = tensor
        return sums

    def _scatter_packed(
        self, tensors: Sequence[tuple[tf.Tensor, int]], exchange: Callable[[tf.Tensor], tf.Tensor]
    ) -> list[tf.Tensor]:
        """The local pieces of the sums of some tensors, each along its axis: members exchange their parts of all
        pieces, padded to the longest, and each sums those of its own piece.
        """
        members = len(self.members)
        cut = [tf.split(tensor, divide(tensor.shape[axis], members), axis) for tensor, axis in tensors]
        sizes = [sum(count_elements(pieces[member]) for pieces in cut) for member in range(members)]
        flat = []
        for member, size in enumerate(sizes):
            flat += [tf.reshape(pieces[member], [-1]) for pieces in cut]
            flat += [tf.zeros([max(sizes) - size], cut[0][0].dtype)] * (size < max(sizes))
        found = exchange(tf.reshape(tf.concat(flat, 0), [members, max(sizes)]))
        index = self._sorted_members.index(self.members.index(self.collectives.index))
        forms = [pieces[index].shape for pieces in cut]
        total = tf.add_n(tf.unstack(found))[: sizes[index]]
        own = tf.split(total, [form.num_elements() for form in forms])
        return [tf.reshape(piece, form) for piece, form in zip(own, forms, strict=True)]

    def _run_collective(
        self, do: Callable[..., tf.Tensor], tensor: tf.Tensor, key: int, graph: _GraphSums, **options: str
    ) -> tf.Tensor:
        """Add one collective op. On GPUs all members must start collectives in the same order, so each waits for the
        previous one.
        """
        device = tf_collectives.find_device()
        with tf.control_dependencies(graph.list_previous()), tf.device(device):
            group = tf_collectives.hash_key(f"{self.name}/{self.members}")
            found = do(tensor, len(self.members), group, key, **options)
        if device != tf_collectives.CPU:
            graph.last = weakref.ref(found)
        return found


@dataclass
class _GraphSums:
    """The sums of a group in one graph: how many there are of each call, and the last one."""

    seen: Counter[str] = field(default_factory=Counter)
    last: weakref.ref[tf.Tensor] | None = None

    def list_previous(self) -> list[tf.Tensor]:
        """The sum for which the next one waits."""
        last = self.last() if self.last is not None else None
        return [] if last is None else [last]

    def count_call(self, call: str) -> int:
        """The number of previous identical calls in this graph."""
        self.seen[call] += 1
        return self.seen[call] - 1


def _make_function(compute: Callable[..., Any]) -> Any:
    """A function of collectives, which is traced for each shape without a warning."""
    return silence_retracing_warning(tf.function(compute, autograph=False))


def _check_tensors(tensors: Sequence[tf.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype.name not in DTYPES or not tensor.shape.is_fully_defined():
            raise OptionError(
                f"a tensor of {tensor.dtype.name}{tensor.shape} cannot be summed between workers",
                why=f"the shape must be known, and the dtype one of {', '.join(DTYPES)}",
                mend="cast the tensor, or set its shape: tensor.set_shape(...)",
            )


def make_groups(cut: Cut, worker: str, collectives: Collectives | None, name: str) -> dict[int, Group]:
    """By stage, the group of the workers of its replicas, if `worker` is one of them. `name` must be unique."""
    if collectives is None:
        return {}
    cluster = next(each.cluster for each in cut.workers if each.name == worker)
    tasks = sorted(each.name for each in cut.workers if each.cluster == cluster)
    hosts = {stage: cut.routings[worker].hosts_of(stage) for stage in sorted(cut.routing.replicated)}
    return {
        stage: collectives.group([tasks.index(host) for host in members], f"{name} stage {stage}")
        for stage, members in hosts.items()
        if worker in members
    }


_SUMMED_KINDS = frozenset({"forward", "backward", "fused", "weights"})
_ACTIVITY = "the moments of stage {} over its replicas"


@dataclass
class ReplicaSums:
    """The sums over replicas in the functions of a program's stages on this worker. `groups` are those of the replicas,
    by stage; names of sums contain the number of the `program`.
    """

    cut: Cut
    groups: Mapping[int, Group]
    program: int
    worker: str
    _zero_functions: dict[Fragment, Any] = field(default_factory=dict)

    def list_ops(self, fragment: Fragment) -> tuple[int, ...]:
        """The sums in a fragment, in the order in which all replicas run them."""
        found = tuple(sorted(op for op in fragment.ops if self.cut.program.graph.ops[op].type == REPLICA_SUM))
        return found if fragment.kind in _SUMMED_KINDS and fragment.stage in self.groups else ()

    def replace_markers(self, fragment: Fragment, marks: Sequence[Any]) -> dict[Any, Any]:
        """Replace the markers of sums, in the order of `list_ops`, by the sums in the graph that is being traced;
        returns the replacement of each marker.
        """
        found = {}
        for op, mark in zip(self.list_ops(fragment), marks, strict=True):
            total = self.add(fragment, op, mark.op.inputs[0])
            for reader, place in tf_patch.list_readers(mark):
                tf_private.set_input(reader, place, total)
            found[mark.ref()] = total
        return found

    def add(self, fragment: Fragment, op: int, tensor: Any) -> Any:
        """Add the sum over the replicas of the operand of an op to the graph that is being traced."""
        name, spec = self._name_sums(fragment)[op]
        (total,) = self._find_group(fragment).sum([tf.ensure_shape(tensor, spec.shape)], name)
        return total

    def sum_zeros(self, fragment: Fragment | None) -> None:
        """Take part in the sums of a fragment with zeros, because this replica has no micro-batch."""
        if fragment is None or not self.list_ops(fragment):
            return
        if fragment not in self._zero_functions:
            self._zero_functions[fragment] = tf.function(
                lambda: self._make_zero_sums(fragment), autograph=False
            ).get_concrete_function()
        with self.explain_failures(fragment)():
            self._zero_functions[fragment]()

    def _make_zero_sums(self, fragment: Fragment) -> list[Any]:
        """Sums of zeros in sequence, because those of other members may be in sequence."""
        totals: list[Any] = []
        for name, spec in self._name_sums(fragment).values():
            with tf.control_dependencies(totals[-1:]):
                totals += self._find_group(fragment).sum([tf.zeros(spec.shape, spec.dtype)], name)
        return totals

    def explain_failures(self, fragment: Fragment) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A context that explains failures caused by a lost replica."""
        key = self.cut.program.stages[fragment.stage or 0].key
        return lambda: self._find_group(fragment).collectives.explain_failures(_ACTIVITY.format(repr(key)))

    def _find_group(self, fragment: Fragment) -> Group:
        return self.groups[fragment.stage or 0]

    def _name_sums(self, fragment: Fragment) -> dict[int, tuple[str, Spec]]:
        """The sums of a fragment by their op, each with a unique name and the shape of this worker's operand."""
        about = f"{self.program} {fragment.phase} {fragment.stage} {fragment.kind}"
        return {
            op: (f"{about} {number}", self._find_spec(fragment, op))
            for number, op in enumerate(self.list_ops(fragment))
        }

    def _find_spec(self, fragment: Fragment, op: int) -> Spec:
        stage, whole = fragment.stage or 0, self.cut.program.graph.spec(Value(op))
        layouts = self.cut.layouts.get(stage)
        if layouts is None:
            return whole
        index = self.cut.group_of(stage, self.worker).index(self.worker)
        return find_local_spec(whole, layouts.layout(Value(op)), layouts.count, index)


def make_replica_sums(cut: Cut, worker: str, collectives: Collectives | None, program: int) -> ReplicaSums | None:
    """The sums over replicas of a worker; None if it runs no stage with replicas in other workers, or if TensorFlow's
    collectives are not available.
    """
    found = make_groups(cut, worker, collectives, f"moments of program {program}")
    return ReplicaSums(cut, found, program, worker) if found else None
