"""Exchange of results among the replicas of a stage after their micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Told
from whale_nebula.passes.replicas import sums_of
from whale_nebula.runtime.replicas.bucketed_allreduce import Added
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.gradients import sum_in_order
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.spec import Spec
from whale_nebula.transport.protocol import Key, Link

Turns = Mapping[str, tuple[int, ...]]
"""The micro-batches that each replica of a stage took, by its worker, the first replica's first."""


@dataclass
class Mates:
    """What one worker tells the other replicas of its stages, and hears of them, in one step."""

    compiled: Compiled
    links: Mapping[str, Link]
    program: int
    step: int
    patience: float
    variables: Mapping[str, Any]
    added: Added | None = None

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Tell everything first, then hear: so nobody waits for one who waits."""
        told = self.compiled.told(phase)
        if self.added is not None:
            for run in runs:
                self.added.add(run, [each for each in told if each.stage == run.stage])
        pairs = [(run, each) for run in runs for each in told if each.stage == run.stage]
        shared = [(run, each) for run, each in pairs if not self._is_known(run, each)]
        heard = [(self._own(run, each), run, each) for run, each in shared]
        for own, run, each in heard:
            self._tell(phase, run, each, own)
        columns: dict[tuple[int, PartKey], list[Sequence[Any]]] = {}
        for own, run, each in heard:
            all_told = self._hear(phase, run, each, own)
            if each.kind == "sum":
                columns.setdefault((run.stage, each.key), []).append(_in_order(all_told))
            else:
                self._take(run, each, all_told)
        for (stage, gradient), pieces in columns.items():
            run = next(run for run in runs if run.stage == stage)
            run.sums.put(gradient, list(zip(*pieces, strict=True)))

    def _is_known(self, run: StageRun, each: Told) -> bool:
        """Whether all replicas have it: TensorFlow has added it up, or all of what it is made of on the way."""
        if each.kind == "tensor":
            same = self.compiled.cut.merges[each.values[0]] == "same"
            return same and run.stage in sums_of(self.compiled.cut.program) and all(self._turns(run).values())
        return self.added is not None and self.added.takes(each)

    # ------------------------------------------------------------------ what there is to tell
    def _own(self, run: StageRun, each: Told) -> dict[int, Any]:
        """What this replica has of it: by micro-batch, or -1 for all of its micro-batches together."""
        if not run.turns:
            return {}
        if each.kind == "numbers":
            return {-1: pack_scalars([run.kept[value][m] for m in run.turns for value in each.values])}
        if each.kind == "tensor":
            return dict(run.kept[each.values[0]])
        if each.kind == "drift":
            return {-1: self.variables[each.path].read_value()}
        return dict(run.sums.pieces(each.key, each.piece, run.turns))

    def _tell(self, phase: PhasePlan, run: StageRun, each: Told, own: Mapping[int, Any]) -> None:
        for mate in self._turns(run):
            for micro_batch, tensor in own.items() if mate != self.compiled.worker else ():
                key = self._key(phase, each, micro_batch, self.compiled.worker, mate)
                self.links[mate].send(key, np.asarray(tensor))

    def _hear(self, phase: PhasePlan, run: StageRun, each: Told, own: dict[int, Any]) -> Mapping[str, dict[int, Any]]:
        """What all replicas have of it, by worker, this one's own among them."""
        found: dict[str, dict[int, Any]] = {}
        for mate, turns in self._turns(run).items():
            if mate == self.compiled.worker:
                found[mate] = own
                continue
            numbers = self._numbers(run, each, turns)
            keys = ((m, self._key(phase, each, m, mate, self.compiled.worker)) for m in numbers)
            found[mate] = {m: self.links[mate].receive(key, self.patience) for m, key in keys}
        return found

    def _numbers(self, run: StageRun, each: Told, turns: Sequence[int]) -> Sequence[int]:
        """The micro-batches under which a replica with these turns tells of it."""
        if not turns:
            return ()
        by_turn = each.kind == "tensor" or (each.kind == "sum" and run.sums.lists(each.key))
        return turns if by_turn else (-1,)

    # ------------------------------------------------------------------ what is made of it
    def _take(self, run: StageRun, each: Told, heard: Mapping[str, dict[int, Any]]) -> None:
        if each.kind == "numbers":
            self._numbers_of(run, each, heard)
        elif each.kind == "tensor":
            every = {m: tf.convert_to_tensor(tensor) for theirs in heard.values() for m, tensor in theirs.items()}
            run.kept[each.values[0]] = every
        else:
            values = [tf.convert_to_tensor(theirs[-1]) for theirs in heard.values() if theirs]
            self.variables[each.path].assign(tf.cast(sum_in_order(values) / len(values), values[0].dtype))

    def _numbers_of(self, run: StageRun, each: Told, heard: Mapping[str, dict[int, Any]]) -> None:
        for mate, turns in self._turns(run).items():
            found = iter(unpack_scalars(heard[mate][-1], each.specs * len(turns)) if turns else ())
            for m in turns:
                for value in each.values:
                    run.kept.setdefault(value, {})[m] = next(found)

    # ------------------------------------------------------------------ who
    def _turns(self, run: StageRun) -> Turns:
        routing = self.compiled.cut.routing
        count = len(run.batch.slices)
        return {host: routing.turns(run.stage, host, count) for host in routing.of(run.stage)}

    def _key(self, phase: PhasePlan, each: Told, micro_batch: int, source: str, destination: str) -> Key:
        return Key("result", self.program, self.step, phase.index, micro_batch, each.slot, source, destination)


def _in_order(heard: Mapping[str, Mapping[int, Any]]) -> Sequence[Any]:
    """By micro-batch, and sums by replica: the same order in every process, so the same bits."""
    found = [(m, tensor) for theirs in heard.values() for m, tensor in theirs.items()]
    return [tf.convert_to_tensor(tensor) for _, tensor in sorted(found, key=lambda pair: pair[0])]


def pack_scalars(tensors: Sequence[Any]) -> np.ndarray:
    """The bytes of scalars, one after the other.

    >>> pack_scalars([tf.constant(1.5), tf.constant(True)]).tolist()
    [0, 0, 192, 63, 1]
    """
    arrays = (tf.convert_to_tensor(tensor).numpy() for tensor in tensors)
    return np.frombuffer(b"".join(np.asarray(each).tobytes() for each in arrays), np.uint8)


def unpack_scalars(array: Any, specs: Sequence[Spec]) -> list[Any]:
    """The scalars whose bytes these are.

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
    """What is sent: one tensor as it is, the bytes of several scalars.

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
