"""Exchange between the updates of workers: replicas' results, partial gradients, and values of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import tensorflow as tf

from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle, ReplicaMessage, list_shared_parts
from whale_nebula.passes.replicas import find_replica_sums
from whale_nebula.runtime.replicas.bucketed_allreduce import BucketedAllReduce
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.gradients import sum_in_order
from whale_nebula.runtime.step.results import PendingResult
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.spec import Spec
from whale_nebula.transport import Key, KeyKind, Link

Parts = dict[PartKey, tuple[Any, ...]]


class Peers:
    """The exchange of an update in a run without other workers."""

    def merge_replicas(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge results over all replicas of each stage: sums of gradients, values of micro-batches."""

    def exchange_parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Exchange the gradient parts of variables on several workers."""
        return own

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send values of a round that another worker needs."""

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for values of a round from another worker."""
        return ()

    def receive_later(self, bundle: Bundle) -> Sequence[Any]:
        """Substitutes of numbers from another worker, which wait for their values when they are read."""
        return ()


@dataclass
class WorkerPeers(Peers):
    """The exchange of one worker's update in one step. Values that are not awaited use the thread of `receive_pool`."""

    compiled: Compiled
    links: Mapping[str, Link]
    program: int
    step: int
    patience: float
    receive_pool: Executor
    variables: Mapping[str, Any]
    allreduce: BucketedAllReduce | None = None

    def _make_key(self, kind: str, phase: int, slot: int, source: str, destination: str, micro_batch: int = -1) -> Key:
        return Key(cast(KeyKind, kind), self.program, self.step, phase, micro_batch, slot, source, destination)

    # ------------------------------------------------------------------ values of rounds
    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send values that another worker needs."""
        self.links[bundle.destination].send(self._make_bundle_key(bundle), bundle_tensors(tensors))

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for values from another worker."""
        came = self.links[bundle.source].receive(self._make_bundle_key(bundle), self.patience)
        return unbundle_tensors(came, bundle.specs)

    def receive_later(self, bundle: Bundle) -> Sequence[PendingResult]:
        """Receive numbers that are only returned in the background; returns their substitutes."""
        self.links[bundle.source].announce_receive(self._make_bundle_key(bundle))
        promise = self.receive_pool.submit(self.receive, bundle)
        return [PendingResult(promise, place, spec) for place, spec in enumerate(bundle.specs)]

    def _make_bundle_key(self, bundle: Bundle) -> Key:
        return self._make_key("scalar", bundle.phase, bundle.number, bundle.source, bundle.destination)

    # ------------------------------------------------------------------ gradient parts
    def exchange_parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Send gradient parts of this worker to the workers that hold the variable and compute no part; returns its own
        parts and those received.
        """
        here = self.compiled.worker
        shared = list(list_shared_parts(self.compiled.cut, phase))
        for part in shared:
            if part.source == here:
                array = tf.convert_to_tensor(own[part.key][part.piece]).numpy()
                for destination in part.destinations:
                    key = self._make_key("part", phase.index, part.slot, here, destination)
                    self.links[destination].send(key, array)
        found: dict[PartKey, list[Any]] = {key: list(tensors) for key, tensors in own.items()}
        for part in shared:
            if here in part.destinations:
                key = self._make_key("part", phase.index, part.slot, part.source, here)
                array = self.links[part.source].receive(key, self.patience)
                found.setdefault(part.key, []).append(tf.convert_to_tensor(array))
        return {key: tuple(tensors) for key, tensors in found.items()}

    # ------------------------------------------------------------------ results of replicas
    def merge_replicas(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge results over all replicas of each stage. All messages are sent before any is received, so that no two
        workers wait for each other.
        """
        messages = self.compiled.replica_messages[phase.index]
        pairs = [(run, each) for run in runs for each in messages if each.stage == run.stage]
        exchanged = [(self._read_own(run, each), run, each) for run, each in pairs if not self._is_merged(run, each)]
        for own, run, each in exchanged:
            self._send_parts(phase, run, each, own)
        if self.allreduce is not None:
            for run in runs:
                self.allreduce.sum_remaining(run, messages)
        columns: dict[tuple[int, PartKey], list[Sequence[Any]]] = {}
        for own, run, each in exchanged:
            parts = self._receive_parts(phase, run, each, own)
            if each.kind == "sum":
                columns.setdefault((run.stage, each.key), []).append(_sort_parts(parts))
            else:
                self._merge_parts(run, each, parts)
        for (stage, gradient), pieces in columns.items():
            run = next(run for run in runs if run.stage == stage)
            run.sums.put(gradient, list(zip(*pieces, strict=True)))

    def _is_merged(self, run: StageRun, each: ReplicaMessage) -> bool:
        """Whether all replicas already have a value: TensorFlow has reduced it, or everything that it depends on."""
        if each.kind == "tensor":
            same = self.compiled.cut.merges[each.values[0]] == "same"
            return (
                same
                and run.stage in find_replica_sums(self.compiled.cut.program)
                and all(self._list_turns(run).values())
            )
        return self.allreduce is not None and self.allreduce.can_sum(each)

    # ------------------------------------------------------------------ the values that are sent
    def _read_own(self, run: StageRun, each: ReplicaMessage) -> dict[int, Any]:
        """The part of a value that this replica has: by micro-batch, or under -1 for the sum over its micro-batches."""
        if not run.turns:
            return {}
        if each.kind == "numbers":
            return {-1: pack_scalars([run.kept_values[value][m] for m in run.turns for value in each.values])}
        if each.kind == "tensor":
            return dict(run.kept_values[each.values[0]])
        if each.kind == "drift":
            return {-1: self.variables[each.path].read_value()}
        return dict(run.sums.pieces(each.key, each.piece, run.turns))

    def _send_parts(self, phase: PhasePlan, run: StageRun, each: ReplicaMessage, own: Mapping[int, Any]) -> None:
        for mate in self._list_turns(run):
            for micro_batch, tensor in own.items() if mate != self.compiled.worker else ():
                key = self._make_key("result", phase.index, each.slot, self.compiled.worker, mate, micro_batch)
                self.links[mate].send(key, np.asarray(tensor))

    def _receive_parts(
        self, phase: PhasePlan, run: StageRun, each: ReplicaMessage, own: dict[int, Any]
    ) -> Mapping[str, dict[int, Any]]:
        """All replicas' parts of a value by worker, this one's included."""
        found: dict[str, dict[int, Any]] = {}
        for mate, turns in self._list_turns(run).items():
            if mate == self.compiled.worker:
                found[mate] = own
                continue
            numbers = self._list_numbers(run, each, turns)
            keys = (
                (m, self._make_key("result", phase.index, each.slot, mate, self.compiled.worker, m)) for m in numbers
            )
            found[mate] = {m: self.links[mate].receive(key, self.patience) for m, key in keys}
        return found

    def _list_numbers(self, run: StageRun, each: ReplicaMessage, turns: Sequence[int]) -> Sequence[int]:
        """The micro-batch numbers under which a replica with these turns sends a value."""
        if not turns:
            return ()
        by_turn = each.kind == "tensor" or (each.kind == "sum" and run.sums.is_row_list(each.key))
        return turns if by_turn else (-1,)

    # ------------------------------------------------------------------ merging
    def _merge_parts(self, run: StageRun, each: ReplicaMessage, parts: Mapping[str, dict[int, Any]]) -> None:
        if each.kind == "numbers":
            for mate, turns in self._list_turns(run).items():
                found = iter(unpack_scalars(parts[mate][-1], each.specs * len(turns)) if turns else ())
                for m in turns:
                    for value in each.values:
                        run.kept_values.setdefault(value, {})[m] = next(found)
        elif each.kind == "tensor":
            every = {m: tf.convert_to_tensor(tensor) for theirs in parts.values() for m, tensor in theirs.items()}
            run.kept_values[each.values[0]] = every
        else:
            values = [tf.convert_to_tensor(theirs[-1]) for theirs in parts.values() if theirs]
            self.variables[each.path].assign(tf.cast(sum_in_order(values) / len(values), values[0].dtype))

    def _list_turns(self, run: StageRun) -> Mapping[str, tuple[int, ...]]:
        """The micro-batches that each replica of a stage took, by its worker, the first replica's first."""
        routing, count = self.compiled.cut.routings[self.compiled.worker], len(run.batch.slices)
        return {host: routing.turns(run.stage, host, count) for host in routing.hosts_of(run.stage)}


def _sort_parts(parts: Mapping[str, Mapping[int, Any]]) -> Sequence[Any]:
    """The parts in the order of micro-batches or of replicas, so that sums are bit-identical in every process."""
    found = [(m, tensor) for theirs in parts.values() for m, tensor in theirs.items()]
    return [tf.convert_to_tensor(tensor) for _, tensor in sorted(found, key=lambda pair: pair[0])]


def pack_scalars(tensors: Sequence[Any]) -> np.ndarray:
    """The bytes of scalars, one after the other.

    >>> pack_scalars([tf.constant(1.5), tf.constant(True)]).tolist()
    [0, 0, 192, 63, 1]
    """
    arrays = (tf.convert_to_tensor(tensor).numpy() for tensor in tensors)
    return np.frombuffer(b"".join(np.asarray(each).tobytes() for each in arrays), np.uint8)


def unpack_scalars(array: Any, specs: Sequence[Spec]) -> list[Any]:
    """Split bytes into scalars.

    >>> sent = pack_scalars([tf.constant(1.5), tf.constant(True)])
    >>> [tensor.numpy().item() for tensor in unpack_scalars(sent, [Spec("float32", ()), Spec("bool", ())])]
    [1.5, True]
    """
    data, place = np.asarray(array).tobytes(), 0
    found: list[Any] = []
    for spec in specs:
        kind = tf.as_dtype(spec.dtype).as_numpy_dtype
        found.append(tf.convert_to_tensor(np.frombuffer(data, kind, 1, place)[0]))
        place += spec.nbytes()
    return found


def bundle_tensors(tensors: Sequence[Any]) -> np.ndarray:
    """The content of a message: one tensor, or the bytes of several scalars.

    >>> bundle_tensors([tf.constant([2.0])]).tolist(), len(bundle_tensors([tf.constant(1.5), tf.constant(True)]))
    ([2.0], 5)
    """
    if len(tensors) > 1:
        return pack_scalars(tensors)
    found: np.ndarray = tf.convert_to_tensor(tensors[0]).numpy()
    return found


def unbundle_tensors(array: Any, specs: Sequence[Spec]) -> Sequence[Any]:
    """The tensors that were bundled.

    >>> sent = bundle_tensors([tf.constant([2.0])])
    >>> [tensor.numpy().tolist() for tensor in unbundle_tensors(sent, [Spec("float32", (1,))])]
    [[2.0]]
    """
    return unpack_scalars(array, specs) if len(specs) > 1 else [tf.convert_to_tensor(array)]
