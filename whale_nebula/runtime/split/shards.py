"""What one worker of a split stage holds: its pieces of variables, and the groups in which it runs functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import tensorflow as tf

from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.layout import SPLIT, Layout, local_shape
from whale_nebula.ir.program import Variable
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.replicas.collectives import Collectives
from whale_nebula.runtime.split.collective_group import Broadcast, CollectiveGroup
from whale_nebula.runtime.split.groups import measure_pieces, take_piece
from whale_nebula.runtime.variables.remote import Ledger
from whale_nebula.spec import Value


@dataclass
class Piece:
    """What this worker has of a variable, one of `count` pieces; all that have one `join` them at the same time. The
    first of them is on worker `first`.
    """

    layout: Layout
    count: int
    index: int
    variable: Any
    name: str
    first: str
    collectives: Collectives
    _gather: Any = None

    def store(self, whole: Any) -> None:
        """Keep this worker's piece of a whole value."""
        self.variable.assign(take_piece(tf.convert_to_tensor(whole), self.layout, self.count, self.index))

    def join(self, size: int) -> Any:
        """The whole value; `size` is that of its axis."""
        if self._gather is None:
            _, sizes = measure_pieces(size, self.count, self.layout.units)

            def gather() -> Any:
                group = CollectiveGroup(self.count, self.index, f"read of {self.name} with {self.first}")
                return group.gather([self.variable.read_value()], self.layout.axis, sizes)[0]

            self._gather = tf.function(gather, autograph=False)
        with self.collectives.explain_failures(f"a read of {self.name}, which several workers hold"):
            return self._gather()


@dataclass
class Shards:
    """The split stages of a program on one worker of theirs. `pieces` are its variables in pieces, by their op."""

    cut: Cut
    worker: str
    collectives: Collectives
    program: int
    pieces: dict[int, Piece] = field(default_factory=dict)
    _broadcasts: dict[int, Broadcast] = field(default_factory=dict)

    @cached_property
    def stages(self) -> Sequence[int]:
        """The stages with layouts that this worker runs."""
        return [stage for stage in self.cut.layouts if self.worker in self.cut.workers_of(stage)]

    @cached_property
    def split_stages(self) -> Sequence[int]:
        """Those whose micro-batches all of their workers run together."""
        return [stage for stage in self.stages if self.cut.program.stages[stage].shards > 1]

    @cached_property
    def mates(self) -> Mapping[str, Sequence[str]]:
        """By the name of each variable that is held in pieces, the workers that hold the same piece as this one."""
        found: dict[str, Sequence[str]] = {}
        for stage in self.stages:
            alike = self.cut.routings[self.worker].of(stage) if stage in self.split_stages else (self.worker,)
            for op in self.cut.layouts[stage].variables.keys() & self.pieces.keys():
                found[self.cut.program.variable_ops[op].path] = alike
        return found

    def index(self, stage: int) -> int:
        """Which of the devices of its replica of a stage this worker is."""
        return self.cut.group_of(stage, self.worker).index(self.worker)

    def name(self, stage: int) -> str:
        """What the workers of a replica of a stage call what they do together."""
        return f"{self.program} stage {stage} with {self.cut.group_of(stage, self.worker)[0]}"

    def group(self, stage: int, fragment: Fragment) -> CollectiveGroup:
        """The group in which a function of a fragment runs; all its workers name it alike."""
        about = f"{self.name(stage)}: {fragment.kind} {fragment.phase} {fragment.round}"
        return CollectiveGroup(self.cut.layouts[stage].count, self.index(stage), about)

    def explained(self) -> AbstractContextManager[None]:
        """Inside, what fails because another of the workers is gone says so."""
        keys = " and ".join(repr(self.cut.program.stages[stage].key) for stage in self.stages)
        return self.collectives.explain_failures(f"stage {keys}, which several workers run together")

    def broadcast(self, stage: int) -> Broadcast:
        """How the first worker of a replica gives the others what came for all of them."""
        if stage not in self._broadcasts:
            self._broadcasts[stage] = Broadcast(self.cut.program.stages[stage].shards, self.name(stage))
        return self._broadcasts[stage]


@dataclass
class SplitExchange:
    """An exchange for the stages of one worker, of which some are split over several."""

    inner: Post
    shards: Shards

    def put(self, value: Value, micro_batch: int, tensor: Any, rows: Any = None) -> None:
        """Give a value to other stages: all workers of a replica of a split stage have it, and the first gives it."""
        source = self.inner.crossings.by_value[value].source
        if source not in self.shards.split_stages or self.shards.index(source) == 0:
            self.inner.put(value, micro_batch, tensor, rows)

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Take a value that another stage gave."""
        if stage not in self.shards.split_stages:
            return self.inner.get(value, micro_batch, stage)
        first = self.shards.index(stage) == 0
        given = self.inner.get(value, micro_batch, stage) if first else None
        with self.shards.explained():
            if first:
                return self.shards.broadcast(stage).give(given)
            return self.shards.broadcast(stage).take(self.shards.cut.program.graph.spec(value).dtype)


@dataclass(frozen=True)
class Parted:
    """The variables that a program newly divides, each with the stage whose workers hold its pieces.

    Those that are trained start from the first worker's value, of which each is given its piece. Others (an optimizer's
    slots) every worker makes by itself, and keeps its piece.
    """

    cut: Cut
    stages: Mapping[str, int]

    @classmethod
    def of(cls, cut: Cut, variables: Mapping[str, Any], ledger: Ledger) -> Parted:
        """Those of a program; none where no stage is split."""
        found: dict[str, int] = {}
        for stage, layouts in cut.layouts.items():
            for op, layout in layouts.variables.items():
                path = cut.program.variable_ops[op].path
                if layout.kind == SPLIT and ledger.layout_of(variables[path]) is None:
                    found[path] = stage
        return cls(cut, dict(sorted(found.items())))

    @property
    def layouts(self) -> dict[str, Layout]:
        """How each lies on its holders."""
        known = {variable.path: variable.op for variable in self.cut.program.variables}
        return {path: self.cut.layouts[stage].variables[known[path]] for path, stage in self.stages.items()}

    def shapes(self, worker: str) -> dict[str, tuple[int, ...] | None]:
        """The shape of the piece of each that is handed out, as a worker is given it; None of what all make."""
        found: dict[str, tuple[int, ...] | None] = {}
        for variable in self.cut.program.variables:
            stage = self.stages.get(variable.path)
            if stage is not None:
                shape = self.shape(variable, stage, worker) if worker in self.cut.workers_of(stage) else ()
                found[variable.path] = shape if variable.trainable else None
        return found

    def shape(self, variable: Variable, stage: int, worker: str) -> tuple[int, ...]:
        """The shape of a worker's piece."""
        layouts, index = self.cut.layouts[stage], self.cut.group_of(stage, worker).index(worker)
        piece = local_shape(variable.spec, layouts.variables[variable.op], layouts.count, index)
        return tuple(axis or 0 for axis in piece.shape or ())


def hold_pieces(
    shards: Shards, parted: Parted, variables: Mapping[str, Any], ledger: Ledger, begin: Callable[[Any], None]
) -> None:
    """Let a worker hold its pieces of the variables of split stages, one variable after the other; `begin` gives one
    its value that has none yet. Pieces of earlier programs are held already.
    """
    ledger.exchanges += 1
    program, trained = shards.cut.program, 0
    known = {variable.path: variable for variable in program.variables}
    for path, stage in parted.stages.items():
        slot, trained = trained, trained + known[path].trainable
        if stage not in shards.stages:
            continue
        own, layouts, group = variables[path], shards.cut.layouts[stage], shards.cut.group_of(stage, shards.worker)
        layout, count = layouts.variables[known[path].op], layouts.count

        def take(worker: str, own: Any = own, layout: Layout = layout, stage: int = stage, count: int = count) -> Any:
            index = shards.cut.group_of(stage, worker).index(worker)
            return take_piece(own.read_value(), layout, count, index)

        if shards.worker == shards.cut.held[path][0] or not known[path].trainable:
            begin(own)
        first = ledger.hand_out(slot, own, take) if known[path].trainable else take(shards.worker)
        with tf.device(own.device):
            made = tf.Variable(first, trainable=False, name=f"{path}/piece")
        piece = Piece(layout, count, shards.index(stage), made, path, group[0], shards.collectives)
        ledger.hold(own, piece)
    for stage in shards.stages:
        for op, layout in shards.cut.layouts[stage].variables.items():
            if layout.kind == SPLIT:
                shards.pieces[op] = cast(Piece, ledger.kept[id(variables[program.variable_ops[op].path])].piece)
