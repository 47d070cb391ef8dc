"""The shards and groups of one worker of a split stage. If a stage's devices are workers of one cluster, each process
runs one, and TensorFlow's collectives connect them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import tensorflow as tf

from whale_nebula.capture.step import Captured
from whale_nebula.errors import NotYetError
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.layout import SPLIT, Layout, find_local_spec
from whale_nebula.ir.program import Variable
from whale_nebula.runtime.exchange.link_exchange import LinkExchange
from whale_nebula.runtime.replicas.collectives import DTYPES, CollectiveKeys, Collectives
from whale_nebula.runtime.split.groups import (
    Sizes,
    Tensors,
    cut_piece,
    cut_pieces,
    measure_pieces,
    pad_piece,
    select_piece,
)
from whale_nebula.runtime.variables.remote import Ledger
from whale_nebula.spec import Value
from whale_nebula.tf import collectives as tf_collectives
from whale_nebula.tf.private import silence_retracing_warning

_CAST_DTYPES = {
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
}
"""Dtypes without collectives, and the dtypes to which they are cast."""


def _find_cast_dtype(dtype: Any) -> Any:
    """The dtype to which tensors of a dtype are cast."""
    if dtype.name not in DTYPES and dtype.name not in _CAST_DTYPES:
        raise NotYetError(f"nb.split with a tensor of {dtype.name} that crosses between devices", mend="cast it")
    return tf.as_dtype(_CAST_DTYPES.get(dtype.name, dtype))


_KEYS = CollectiveKeys()
"""The keys of this process."""


class CollectiveGroup:
    """The group of `count` workers that run the same function of a stage, of which this process is number `index`. The
    keys of its collectives are derived from `name`, which is the same in all of them.

    A collective has a key for each size of its operand, because TensorFlow fixes the shape at the first call.
    """

    holds_pieces = True

    def __init__(self, count: int, index: int, name: str) -> None:
        self.count, self.index, self.name = count, index, name
        self._function_count = 0
        self._last: Any = None

    @property
    def here(self) -> Sequence[int]:
        """The device of this process."""
        return (self.index,)

    def sum(self, tensors: Tensors) -> Tensors:
        """The sum over all devices."""
        return [self._run(tensors[0], lambda tensor, keys: tf_collectives.reduce(tensor, self.count, *keys, op="Add"))]

    def maximum(self, tensors: Tensors) -> Tensors:
        """The maximum over all devices, entry by entry."""
        return [self._run(tensors[0], lambda tensor, keys: tf_collectives.reduce(tensor, self.count, *keys, op="Max"))]

    def gather(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """All-gather along an axis. All shards are padded to the longest."""
        longest = _find_longest(sizes)
        padded = pad_piece(tensors[0], axis, 0, longest - sizes[self.index])
        found = self._run(padded[tf.newaxis], lambda tensor, keys: tf_collectives.gather(tensor, self.count, *keys))
        return [self._join(found, axis, sizes)]

    def scatter(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """Reduce-scatter: devices exchange shards, and each adds up its own."""
        found = self._exchange(self._stack(tensors[0], axis, sizes))
        return [cut_piece(tf.reduce_sum(found, 0), axis, 0, sizes[self.index])]

    def exchange(self, tensors: Tensors, axis: int, sizes: Sizes, other: int, others: Sizes) -> Tensors:
        """All-to-all: pieces along one axis become pieces along another."""
        padded = pad_piece(tensors[0], axis, 0, _find_longest(sizes) - sizes[self.index])
        found = self._exchange(self._stack(padded, other, others))
        return [cut_piece(self._join(found, axis, sizes), other, 0, others[self.index])]

    def run_between(self, add: Callable[[], Any]) -> Any:
        """Add a collective of another group by `add`, on GPUs between the previous and the next one of this group."""
        with tf.control_dependencies([self._last] * (self._last is not None)):
            found = add()
        if tf_collectives.find_device() != tf_collectives.CPU:
            self._last = found
        return found

    def _stack(self, tensor: Any, axis: int, sizes: Sizes) -> Any:
        """The pieces for all devices, padded to the longest."""
        longest, pieces = _find_longest(sizes), zip(cut_pieces(tensor, axis, sizes), sizes, strict=True)
        return tf.stack([pad_piece(piece, axis, 0, longest - size) for piece, size in pieces])

    def _join(self, stacked: Any, axis: int, sizes: Sizes) -> Any:
        """Concatenate the shards of all devices without their padding."""
        pieces = [cut_piece(stacked[number], axis, 0, size) for number, size in enumerate(sizes)]
        return tf.concat(pieces, axis)

    def _exchange(self, stacked: Any) -> Any:
        return self._run(stacked, lambda tensor, keys: tf_collectives.exchange(tensor, self.count, *keys))

    def _run(self, tensor: Any, do: Callable[[Any, tuple[int, Any]], Any]) -> Any:
        """Run one collective. On GPUs all members must start collectives in the same order, so each waits for the
        previous one.
        """
        carried = _find_cast_dtype(tensor.dtype)
        self._function_count += 1
        group = _KEYS.find_number(f"{self.name} {self._function_count}")
        device = tf_collectives.find_device()
        with tf.device(device), tf.control_dependencies([self._last] * (self._last is not None)):
            given = tf.cast(tensor, carried)
            found = do(given, (group, tf.size(given) + 1))
        if device != tf_collectives.CPU:
            self._last = found
        return tf.cast(found, tensor.dtype)


def _find_longest(sizes: Sizes) -> Any:
    return max(sizes) if all(isinstance(size, int) for size in sizes) else tf.reduce_max(tf.stack(sizes))


_MAX_AXES = 8


class TensorBroadcast:
    """Broadcast of tensors of any shape and dtype from the first of some workers to the others, outside their
    functions.
    """

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._keys = [_KEYS.find_number(f"{name} {what}") for what in ("head", "body")]
        self._functions: dict[Any, Any] = {}

    def send(self, tensor: Any) -> Any:
        """Send a value from the first worker; returns it as a tensor."""
        tensor = tf.convert_to_tensor(tensor)
        self._function(tensor.dtype, self._send, tf.TensorSpec(None, tensor.dtype))(tensor)
        return tensor

    def receive(self, dtype: Any) -> Any:
        """Receive the value on another worker."""
        dtype = tf.as_dtype(dtype)
        return self._function(dtype, lambda: self._receive(dtype))()

    def _function(self, dtype: Any, body: Callable[..., Any], *signature: Any) -> Any:
        if dtype not in self._functions:
            made = tf.function(body, input_signature=list(signature), autograph=False)
            self._functions[dtype] = silence_retracing_warning(made)
        return self._functions[dtype]

    def _send(self, tensor: Any) -> Any:
        shape = tf.shape(tensor)
        head = tf.concat([[tf.size(shape)], shape, tf.zeros([_MAX_AXES - tf.size(shape)], tf.int32)], 0)
        given = tf.cast(tensor, _find_cast_dtype(tensor.dtype))
        with tf.device(tf_collectives.find_device()):
            sent = tf_collectives.send(head, self.count, self._keys[0], 1)
            return sent, tf_collectives.send(given, self.count, self._keys[1], tf.size(given) + 1)

    def _receive(self, dtype: Any) -> Any:
        carried = _find_cast_dtype(dtype)
        with tf.device(tf_collectives.find_device()):
            head = tf_collectives.receive([1 + _MAX_AXES], tf.int32, self.count, self._keys[0], 1)
            shape = head[1 : 1 + head[0]]
            size = tf.reduce_prod(shape) + 1
            return tf.cast(tf_collectives.receive(shape, carried, self.count, self._keys[1], size), dtype)


@dataclass
class Piece:
    """A worker's piece of a split variable: number `index` of `count`, held in `variable`. `name` is the path of the
    split variable, and `first` the worker with the first piece.
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
        self.variable.assign(select_piece(tf.convert_to_tensor(whole), self.layout, self.count, self.index))

    def join(self, size: int) -> Any:
        """Gather the whole value, whose split axis has this size. Collective: all holders call it at the same point."""
        if self._gather is None:
            _, sizes = measure_pieces(size, self.count, self.layout.units)

            def gather() -> Any:
                group = CollectiveGroup(self.count, self.index, f"read of {self.name} with {self.first}")
                return group.gather([self.variable.read_value()], self.layout.axis, sizes)[0]

            self._gather = silence_retracing_warning(tf.function(gather, autograph=False))
        with self.collectives.explain_failures(f"a read of {self.name}, which several workers hold"):
            return self._gather()


@dataclass
class Shards:
    """The split stages of a program that a worker runs, and its pieces of their variables, by the variables' ops."""

    cut: Cut
    worker: str
    collectives: Collectives
    program: int
    pieces: dict[int, Piece] = field(default_factory=dict)
    _broadcasts: dict[int, TensorBroadcast] = field(default_factory=dict)

    @cached_property
    def stages(self) -> Sequence[int]:
        """The stages with layouts that this worker runs."""
        return [stage for stage in self.cut.layouts if self.worker in self.cut.workers_of(stage)]

    @cached_property
    def split_stages(self) -> Sequence[int]:
        """The stages whose micro-batches are run by all of their workers together."""
        return [stage for stage in self.stages if self.cut.program.stages[stage].shards > 1]

    @cached_property
    def mates(self) -> Mapping[str, Sequence[str]]:
        """By the path of a split variable, the workers that hold the same piece as this one."""
        found: dict[str, Sequence[str]] = {}
        for stage in self.stages:
            alike = self.cut.routings[self.worker].hosts_of(stage) if stage in self.split_stages else (self.worker,)
            for op in self.cut.layouts[stage].variables.keys() & self.pieces.keys():
                found[self.cut.program.variable_ops[op].path] = alike
        return found

    def index(self, stage: int) -> int:
        """The index of this worker among the devices of its replica of a stage."""
        return self.cut.group_of(stage, self.worker).index(self.worker)

    def name(self, stage: int) -> str:
        """The name of the group of workers that run this worker's replica of a stage."""
        return f"{self.program} stage {stage} with {self.cut.group_of(stage, self.worker)[0]}"

    def group(self, stage: int, fragment: Fragment) -> CollectiveGroup:
        """The group in which a function of a fragment runs, with the same name in all its workers."""
        about = f"{self.name(stage)}: {fragment.kind} {fragment.phase} {fragment.round}"
        return CollectiveGroup(self.cut.layouts[stage].count, self.index(stage), about)

    def explain_failures(self) -> AbstractContextManager[None]:
        """Context that explains failures caused by a lost worker."""
        keys = " and ".join(repr(self.cut.program.stages[stage].key) for stage in self.stages)
        return self.collectives.explain_failures(f"stage {keys}, which several workers run together")

    def broadcast(self, stage: int) -> TensorBroadcast:
        """The broadcast from the first worker of a replica to the others."""
        if stage not in self._broadcasts:
            self._broadcasts[stage] = TensorBroadcast(self.cut.program.stages[stage].shards, self.name(stage))
        return self._broadcasts[stage]


@dataclass
class SplitExchange:
    """The exchange for the stages of one worker, some of which are sharded over several workers."""

    inner: LinkExchange
    shards: Shards

    def put(self, value: Value, micro_batch: int, tensor: Any, rows: Any = None) -> None:
        """Send a value to other stages: all workers of a replica of a split stage have it, and the first sends it."""
        source = self.inner.crossings.by_value[value].source
        if source not in self.shards.split_stages or self.shards.index(source) == 0:
            self.inner.put(value, micro_batch, tensor, rows)

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Receive a value from another stage."""
        if stage not in self.shards.split_stages:
            return self.inner.get(value, micro_batch, stage)
        first = self.shards.index(stage) == 0
        given = self.inner.get(value, micro_batch, stage) if first else None
        with self.shards.explain_failures():
            if first:
                return self.shards.broadcast(stage).send(given)
            return self.shards.broadcast(stage).receive(self.shards.cut.program.graph.spec(value).dtype)


@dataclass(frozen=True)
class NewShards:
    """The variables that a program splits first, by path, each with the stage whose workers hold its pieces.

    Of trained variables the first worker has the value, and each worker receives its piece. Others (an optimizer's
    slots) are initialised by every worker, which keeps its piece.
    """

    cut: Cut
    stages: Mapping[str, int]

    @classmethod
    def create(cls, cut: Cut, variables: Mapping[str, Any], ledger: Ledger) -> NewShards:
        """The variables of a program that no earlier program has split; empty without split stages."""
        found: dict[str, int] = {}
        for stage, layouts in cut.layouts.items():
            for op, layout in layouts.variables.items():
                path = cut.program.variable_ops[op].path
                if layout.kind == SPLIT and ledger.layout_of(variables[path]) is None:
                    found[path] = stage
        return cls(cut, dict(sorted(found.items())))

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each variable in its stage."""
        known = {variable.path: variable.op for variable in self.cut.program.variables}
        return {path: self.cut.layouts[stage].variables[known[path]] for path, stage in self.stages.items()}

    def shapes(self, worker: str) -> dict[str, tuple[int, ...] | None]:
        """The shape of a worker's piece of each trained variable, `()` if it has none; None for the other variables,
        which all holders initialise.
        """
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
        piece = find_local_spec(variable.spec, layouts.variables[variable.op], layouts.count, index)
        return tuple(axis or 0 for axis in piece.shape or ())


def hold_pieces(shards: Shards, parted: NewShards, captured: Captured, ledger: Ledger) -> None:
    """Replace the variables of split stages by a worker's pieces, one variable after the other. If a variable has no
    value, only its pieces are drawn, if possible. Pieces of earlier programs are already held.
    """
    ledger.exchanges += 1
    program, variables, trained = shards.cut.program, captured.variables, 0
    known = {variable.path: variable for variable in program.variables}
    for path, stage in parted.stages.items():
        slot, trained = trained, trained + known[path].trainable
        if stage not in shards.stages:
            continue
        own, layouts, group = variables[path], shards.cut.layouts[stage], shards.cut.group_of(stage, shards.worker)
        layout, count = layouts.variables[known[path].op], layouts.count

        def take(worker: str, own: Any = own, layout: Layout = layout, stage: int = stage, count: int = count) -> Any:
            index = shards.cut.group_of(stage, worker).index(worker)
            starts, sizes = measure_pieces(own.shape[layout.axis], count, layout.units)
            drawn = captured.draw_part(own, layout.axis, starts[index], sizes[index])
            if drawn is not None:
                return drawn
            captured.initialize_variables(lambda variable: variable is own)
            return select_piece(own.read_value(), layout, count, index)

        first = ledger.distribute_pieces(slot, own, take) if known[path].trainable else take(shards.worker)
        with tf.device(own.device):
            made = tf.Variable(first, trainable=False, name=f"{path}/piece", dtype=own.dtype)
        piece = Piece(layout, count, shards.index(stage), made, path, group[0], shards.collectives)
        del first  # before the next one is drawn
        ledger.hold_piece(own, piece)
    for stage in shards.stages:
        for op, layout in shards.cut.layouts[stage].variables.items():
            if layout.kind == SPLIT:
                shards.pieces[op] = cast(Piece, ledger.variables[id(variables[program.variable_ops[op].path])].piece)
