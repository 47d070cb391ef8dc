"""The parts of a step that run once: whole-batch values, prologues, rounds of updates, and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, cast

import tensorflow as tf

from whale_nebula.errors import CollectiveReadError
from whale_nebula.feed.batch import Batch
from whale_nebula.ir.cut import Cut, PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle, parts_of, shared_parts
from whale_nebula.runtime.replicas.exchange import Mates, bundle_tensors, unbundle_tensors
from whale_nebula.runtime.step.compiled import Compiled, Feed, Piece
from whale_nebula.runtime.step.gradients import Sums, merge, total
from whale_nebula.runtime.step.scalars import Later
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.site import script_site
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import private as tf_private
from whale_nebula.transport.protocol import Key, KeyKind, Link


def join_replicas(phase: PhasePlan, runs: Sequence[StageRun]) -> Sequence[StageRun]:
    """One run for each stage: values by micro-batch, and gradients that are added in the order of the replicas."""
    by_stage: dict[int, list[StageRun]] = {}
    for run in runs:
        by_stage.setdefault(run.stage, []).append(run)
    return [own[0] if len(own) == 1 else _one(phase, own) for own in by_stage.values()]


def _one(phase: PhasePlan, runs: Sequence[StageRun]) -> StageRun:
    first = runs[0]
    kept: dict[Any, dict[int, Any]] = {}
    sums = Sums(first.sums.program)
    for run in runs:
        for value, by_number in run.kept.items():
            kept.setdefault(value, {}).update(by_number)
        run.kept.clear()
    for key, part in parts_of(first.compiled.cut, phase, first.stage):
        rows = _rows(key, len(part.values), runs)
        if rows:
            sums.put(key, rows)
    return replace(first, kept=kept, sums=sums, turns=tuple(sorted(m for run in runs for m in run.turns)))


def _rows(key: PartKey, pieces: int, runs: Sequence[StageRun]) -> list[tuple[Any, ...]]:
    """The rows of every micro-batch in its order, or a sum of each replica."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    for run in runs:
        if run.turns and run.sums.has(key):
            columns = [run.sums.pieces(key, piece, run.turns) for piece in range(pieces)]
            found += [(m, tuple(column[m] for column in columns)) for m in columns[0]]
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


class _AbsentReadError(CollectiveReadError, TypeError):
    """A TypeError too: that is how TensorFlow is told to look for who can do it."""


class Absent:
    """Stands for a tensor in a process that is not given it. Keras may collect it over batches.

    >>> Absent("npu/0", Spec("float32", (None, 10)))
    <float32[?,10] on npu/0>
    """

    def __init__(self, owner: str, spec: Spec) -> None:
        self.owner = owner
        self._spec = spec

    @property
    def dtype(self) -> Any:
        """The element type of the tensor."""
        return tf.as_dtype(self._spec.dtype)

    @property
    def shape(self) -> Any:
        """The shape of the tensor, as far as the plan knows it."""
        return tf.TensorShape(self._spec.shape)

    def numpy(self) -> Absent:
        """What Keras asks of every result; nothing is read by it."""
        return self

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise _AbsentReadError(
            f"this result is on {self.owner}, not in this process",
            where=str(script_site()),
            why=f"the config says 'results: owner': tensors that a step returns, as this {self._spec}, stay in the "
            "cluster that makes them",
            mend=f"if nb.here().worker == {self.owner!r}: ..., or results: everywhere",
        )

    def __repr__(self) -> str:
        return f"<{self._spec} on {self.owner}>"


_READS = (
    "__array__", "__tf_tensor__", "__len__", "__iter__", "__getitem__", "__bool__", "__float__", "__int__", "__index__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__matmul__", "__rmatmul__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
)  # fmt: skip
for _name in _READS:
    setattr(Absent, _name, Absent._refuse)
Absent.__hash__ = object.__hash__  # type: ignore[method-assign]


def _no_rows(input: Any, out_type: Any = None, name: str | None = None) -> Any:  # noqa: A002
    return tf.zeros([max(1, len(input._spec.shape or ()))], out_type or tf.int32)


def _first(values: Sequence[Absent], axis: Any, name: str = "concat") -> Absent:
    return values[0]


# How `Model.predict` joins the results of its batches.
tf_private.dispatch_to(tf.shape, Absent, _no_rows)
tf_private.dispatch_to(tf.concat, Absent, _first)


ASSERTION = "assertion of what all rows make"
"""How a piece that only asserts is called where it fails."""


class Peers(Protocol):
    """The other workers, as an update sees them."""

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send what another worker needs."""
        ...

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for what another worker has made."""
        ...

    def later(self, bundle: Bundle) -> Sequence[Any]:
        """Things that wait for their values only where they are read."""
        ...

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Let the replicas of each stage have what all of them have made."""
        ...

    def parts(self, phase: PhasePlan, own: dict[PartKey, tuple[Any, ...]]) -> dict[PartKey, tuple[Any, ...]]:
        """Exchange the gradient parts of variables that live on several workers."""
        ...


@dataclass
class OnceRun:
    """The once-a-step part of a worker. In a trace, `gate` gives the ops that its updates wait for.

    Where it may be `lazy`, numbers that are only returned are not waited for.
    """

    compiled: Compiled
    batch: Batch
    once: dict[Value, Any]
    peers: Peers | None = None
    gate: Callable[[Sequence[Any]], Sequence[Any]] = lambda tensors: ()
    lazy: bool = False
    _after: Sequence[Any] = ()
    _gathered: int = -1
    _runs: Sequence[StageRun] = ()
    _got: set[Bundle] = field(default_factory=set)

    def weighed(self) -> Batch:
        """The batch with the shares that nb.loss_weight gives its micro-batches, where it was used."""
        piece = self.compiled.weight
        if piece is None:
            return self.batch
        weights = [_weight(piece.function([cut[feed.what] for feed in piece.feeds])) for cut in self.batch.slices]
        whole = tf.add_n(weights)
        self.batch = replace(self.batch, shares=[tf.math.divide_no_nan(weight, whole) for weight in weights])
        return self.batch

    def whole(self) -> None:
        """Compute batch-wide values of the inputs."""
        if self.compiled.whole is not None:
            self._run(self.compiled.whole, {})

    def prologue(self, phase: PhasePlan) -> None:
        """Run what comes before the micro-batches."""
        piece = self.compiled.prologue(phase)
        if piece is not None:
            self._run(piece, {})

    def asserts(self, phase: PhasePlan) -> bool:
        """Whether something is asserted here of what all micro-batches of a phase make together."""
        return any(piece.fragment.round < 0 for piece in self.compiled.updates(phase))

    def check(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge what the stages kept, and assert what is asserted of it: an update has not begun yet."""
        self._gather(phase, runs)
        for piece in self.compiled.updates(phase):
            if piece.fragment.round < 0:
                self._receive(phase, 0, self._got)
                self._run(piece, {})

    def _gather(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """What all micro-batches have made becomes one; once in a phase."""
        if self._gathered != phase.index:
            self._gathered, self._runs, self._got = phase.index, join_replicas(phase, runs), set()
            if self.peers is not None and self.compiled.told(phase):
                self.peers.even(phase, self._runs)
            self._merge(self._runs)
            if self._early(phase):
                self._send(phase, -1)

    def _early(self, phase: PhasePlan) -> bool:
        """Whether anybody asserts what others must tell: then that goes first, before the gradients of all."""
        return any(fragment.round < 0 for found in phase.updates.values() for fragment in found)

    def update(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Merge what the stages kept, exchange what others need, and run the update, round by round."""
        self._gather(phase, runs)
        gradients, got = self.gradients(phase, self._runs), self._got
        merged = (self.once[value] for value in self.compiled.cut.merges if value in self.once)
        self._after = self.gate([*gradients.values(), *merged])
        if not self._early(phase):
            self._send(phase, -1)
        for piece in self.compiled.updates(phase):
            if piece.fragment.round < 0:
                continue
            self._receive(phase, piece.fragment.round, got)
            self._run(piece, gradients)
            self._send(phase, piece.fragment.round)
        self._receive(phase, None, got)

    def gradients(self, phase: PhasePlan, runs: Sequence[StageRun]) -> dict[Value, Any]:
        """Every gradient placeholder's tensor."""
        parts: dict[PartKey, tuple[Any, ...]] = {}
        for run in runs:
            parts |= run.sums.parts()
        if self.peers is not None:
            parts = self.peers.parts(phase, parts)
        return total(self.compiled.cut.program, parts)

    def _merge(self, runs: Sequence[StageRun]) -> None:
        merges = self.compiled.cut.merges
        for run in runs:
            for value, by_number in run.kept.items():
                pieces = [by_number[number] for number in sorted(by_number)]
                self.once[value] = merge(merges[value], pieces, self.batch.shares)
            run.kept.clear()

    def _send(self, phase: PhasePlan, number: int) -> None:
        for bundle in self.compiled.bundles(phase):
            if self.peers and bundle.round == number and bundle.source == self.compiled.worker:
                self.peers.send(bundle, [self.once[crossing.value] for crossing in bundle.crossings])

    def _receive(self, phase: PhasePlan, before: int | None, got: set[Bundle]) -> None:
        """Take what others made in rounds before this one; at the end, all that is left."""
        for bundle in self.compiled.bundles(phase):
            due = before is None or bundle.round < before
            if self.peers and due and bundle not in got and bundle.destination == self.compiled.worker:
                late = self.lazy and before is None and self._is_returned_late(phase, bundle)
                tensors = (self.peers.later if late else self.peers.receive)(bundle)
                self.once.update(zip((crossing.value for crossing in bundle.crossings), tensors, strict=True))
                got.add(bundle)

    def _is_returned_late(self, phase: PhasePlan, bundle: Bundle) -> bool:
        """Whether it is numbers that nothing waits for any more, as the last update is done."""
        return phase is self.compiled.cut.phases[-1] and bundle.specs[0].scalar

    def _run(self, piece: Piece, gradients: Mapping[Value, Any]) -> None:
        tensors = [self._take(feed, gradients) for feed in piece.feeds]
        with tf.control_dependencies(self._after):
            results = piece.function(tensors)
        self.once.update(zip(piece.fetches, results, strict=True))

    def _take(self, feed: Feed, gradients: Mapping[Value, Any]) -> Any:
        if feed.kind == "leaf":
            return self.batch.whole[feed.what]
        if feed.kind == "holder":
            return gradients[feed.what]
        return self.once[feed.what]

    def results(self) -> list[Any]:
        """What the user's step returns, tensor by tensor."""
        return [self._result(value) for value in self.compiled.cut.program.returns]

    def _result(self, value: Value) -> Any:
        """A tensor that the step returns; where it stays with its owners, something that says so when it is read."""
        cut = self.compiled.cut
        if value.op in cut.program.leaf_ops:
            return self.batch.whole[cut.program.leaf_ops[value.op]]
        owners = cut.owners.get(value, ())
        if owners and self.compiled.worker not in owners:
            return Absent(owners[0], cut.program.graph.spec(value))
        return self.once[value]


def _weight(tensors: Sequence[Any]) -> Any:
    """One number from all that was given: several calls in a step add up."""
    return tf.add_n([tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in tensors])


@dataclass
class Wires:
    """The exchange of one worker's update in one step. `promises` is the thread that takes in what nobody waits for."""

    cut: Cut
    worker: str
    links: Mapping[str, Link]
    program: int
    step: int
    patience: float
    promises: Executor
    mates: Mates

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Let the replicas of each stage have what all of them have made."""
        self.mates.even(phase, runs)

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send what another worker needs."""
        self.links[bundle.destination].send(self._key(bundle), bundle_tensors(tensors))

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for what another worker has made."""
        return unbundle_tensors(self.links[bundle.source].receive(self._key(bundle), self.patience), bundle.specs)

    def later(self, bundle: Bundle) -> Sequence[Later]:
        """Numbers that are returned only: they come when they come."""
        key, link = self._key(bundle), self.links[bundle.source]
        link.later(key)

        def come() -> Sequence[Any]:
            return unbundle_tensors(link.receive(key, self.patience), bundle.specs)

        promise = self.promises.submit(come)
        return [Later(promise, place, spec) for place, spec in enumerate(bundle.specs)]

    def _key(self, bundle: Bundle) -> Key:
        return self._make_key("scalar", bundle.phase, bundle.number, bundle.source, bundle.destination)

    def _make_key(self, kind: str, phase: int, slot: int, source: str, destination: str) -> Key:
        return Key(cast(KeyKind, kind), self.program, self.step, phase, -1, slot, source, destination)

    def parts(self, phase: PhasePlan, own: dict[PartKey, tuple[Any, ...]]) -> dict[PartKey, tuple[Any, ...]]:
        """Give the parts of shared variables to the others that hold them, and take theirs."""
        shared = list(shared_parts(self.cut, phase))
        for part in shared:
            if part.source == self.worker:
                array = tf.convert_to_tensor(own[part.key][part.piece]).numpy()
                for destination in part.destinations:
                    key = self._make_key("part", phase.index, part.slot, self.worker, destination)
                    self.links[destination].send(key, array)
        found: dict[PartKey, list[Any]] = {key: list(tensors) for key, tensors in own.items()}
        for part in shared:
            if self.worker in part.destinations:
                key = self._make_key("part", phase.index, part.slot, part.source, self.worker)
                array = self.links[part.source].receive(key, self.patience)
                found.setdefault(part.key, []).append(tf.convert_to_tensor(array))
        return {key: tuple(tensors) for key, tensors in found.items()}
