"""The chain of a program: its forward as blocks in topological order, with the work and memory of each.

A block is a layer that has variables, with the ops after it that have none. A cut is defined by assigning variables to
stages, so the only candidates are places before a layer with variables; the crossing there is the smallest between the
two layers. A stage defined by a scope begins and ends with a block, and is not cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from whale_nebula.ir.graph import Op
from whale_nebula.ir.program import Program
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.backward_split import find_predecessors, is_movement
from whale_nebula.passes.effects import SHAPE_OPS, find_written_handles, is_effect, is_read, is_seeded_draw
from whale_nebula.passes.readings import needs_only_rows
from whale_nebula.plan.flops import FlopCounter
from whale_nebula.plan.work import memory_of
from whale_nebula.planner.problem import Array, Chain
from whale_nebula.planner.update_memory import count_update_temporaries
from whale_nebula.spec import Spec, Value

MOST_CROSSING = 4
"""The maximum number of tensors that cross at a cut."""
LABELLED_ROWS = 32
"""The number of rows with which `passes.label` counts bytes."""
_GRADIENT = re.compile(r"(?:gradient_tape/(.+)|nebula(?:_\d+)?/(.+)_grad)/")
"""The pattern of the names of a gradient's ops: the name scope in which a tape recorded the forward's op, or for
`tf.gradients` the name of that op.
"""

Pace = Callable[[str, float, float], float]
"""Seconds of one op: its kernel, its FLOPs, and the bytes that it reads and writes."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a batch that crosses at a cut: its type and sizes, and whether its gradient crosses back."""

    dtype: str
    dims: tuple[int, ...]
    returns: bool

    @property
    def nbytes(self) -> int:
        """Bytes without a codec."""
        return Spec(self.dtype, self.dims).nbytes()


@dataclass(frozen=True)
class OpWork:
    """Costs of one op: its kernel, FLOPs and moved bytes for a batch, and whether they grow with the rows; for an op of
    a backward, whether it computes gradients of weights only.
    """

    kernel: str
    flops: float
    moved_bytes: float
    grows_with_rows: bool
    is_deferrable: bool = False


@dataclass(frozen=True)
class BlockOps:
    """The ops of each block by purpose, in the order of the trace."""

    forward: tuple[tuple[int, ...], ...] = ()
    backward: tuple[tuple[int, ...], ...] = ()
    update: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Layers:
    """A program's chain, and the work of its blocks; `rows` are those that sizes were counted with.

    `variables` are the paths of each block's variables with the number of the reader that is in it; `forward`,
    `backward` and `update` the work of each block's ops, and `ops` these ops. `is_random` is whether the forward draws
    random numbers, `written_ranges` the range of blocks of each stage defined by a scope. `tensors` are those that
    cross at each cut, and `readers` the blocks that read each input, by its number.
    """

    chain: Chain
    rows: int
    variables: tuple[tuple[tuple[str, int], ...], ...]
    forward: tuple[tuple[OpWork, ...], ...]
    backward: tuple[tuple[OpWork, ...], ...]
    update: tuple[float, ...]
    is_random: bool = False
    ops: BlockOps = BlockOps()
    written_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensors: tuple[tuple[Tensor, ...], ...] = ()
    readers: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def seconds(self, works: Sequence[Sequence[OpWork]], pace: Pace, *, deferrable_only: bool = False) -> Array:
        """Seconds of blocks at the pace of a device: costs of a call, and costs of a row; for all ops, or for those
        that may be deferred (`deferrable_only`).
        """
        found = np.zeros((2, len(works)))
        for block, ops in enumerate(works):
            for op in (op for op in ops if op.is_deferrable or not deferrable_only):
                taken = pace(op.kernel, op.flops, op.moved_bytes)
                found[int(op.grows_with_rows), block] += taken / self.rows if op.grows_with_rows else taken
        return found


def build_layers(
    program: Program, rows: int, shapes: Sequence[tuple[int, ...]], beside: Mapping[str, float] | None = None
) -> Layers | None:
    """The chain of a program for a batch with these shapes; None if no op of the forward reads a variable. `beside` are
    the bytes of objects that are stored next to variables, by the path of the variable.
    """
    return _ChainBuilder(program, rows, shapes, beside or {}).build()


def size_values(program: Program, rows: int, shapes: Sequence[tuple[int, ...]]) -> Sizes:
    """The shapes of all values of a program for a batch whose leaves have these shapes."""
    leaves = {Value(leaf.op): shape for leaf, shape in zip(program.leaves, shapes, strict=True)}
    like = {feed: arrival.boundary for feed, (_, arrival) in program.arrivals.items()}
    return Sizes(program.graph, rows, leaves, like=like).follow(range(len(program.graph)))


@dataclass
class _ChainBuilder:
    program: Program
    rows: int
    shapes: Sequence[tuple[int, ...]]
    beside: Mapping[str, float] = field(default_factory=dict)
    block: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.program.graph
        self.sizes = size_values(self.program, self.rows, self.shapes)
        self.flop_counter = FlopCounter(self.sizes)
        self.batch = self.program.batch_dependent_ops
        self.requests = self.program.requests[:1]
        self.backward_ops = {op for request in self.program.requests for op in request.backward}
        self.effects = [op for op in self.graph.ops if is_effect(op, self.graph) and op.index not in self.backward_ops]

    def build(self) -> Layers | None:
        """Order the forward, divide it into blocks, and compute their work."""
        order = self._order_ops()
        weighted = self._find_weighted(order)
        self.stages = {op: stage for op in order if (stage := self.graph.ops[op].stage) is not None}
        weighted |= {op: [] for op in self.stages if op not in weighted}
        if not weighted:
            return None
        starts = self._find_starts(order, weighted)
        for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(order)], strict=True)):
            for place in range(begin if number else 0, end):
                self.block[order[place]] = number
        count = len(starts)
        variables = self._list_variables(order, weighted, count)
        there, back, cuttable, tensors = self._size_cuts(order, starts, weighted)
        weights, slots, gradients, largest, tied, apart = self._size_weights(variables, count)
        block_of_op = self._find_backward_blocks(count)
        held, transient = self._size_activations(block_of_op, count)
        self._forbid_cuts_of_state(cuttable, apart)
        written = self._bound_written_stages(cuttable)
        later, parted = self._find_deferrable(block_of_op, count)
        chain = Chain(
            self._name_blocks(variables, written), weights, slots, gradients, held, transient,
            there, back, tied, cuttable, parted,
            sent_tensors=np.array([len(each) for each in tensors], float),
            returned_tensors=np.array([sum(tensor.returns for tensor in each) for each in tensors], float),
            largest_gradient=largest, deferred_inputs=self._size_deferred_inputs(block_of_op, later, count),
            object_bytes=self._size_objects(variables), update_temporaries=count_update_temporaries(self.program),
        )  # fmt: skip
        ops = self._list_ops(block_of_op, variables, count)
        forward, backward = self._measure_ops(ops.forward), self._measure_ops(ops.backward, later)
        update = [float(weights[n] + slots[n] + gradients[n]) * bool(self.requests) for n in range(count)]
        draws = any(is_seeded_draw(op) for op in self.graph.with_bodies(self.graph.ops[index] for index in order))
        return Layers(
            chain, self.rows, variables, forward, backward, tuple(update), draws, ops, written, tensors,
            self._list_readers(),
        )  # fmt: skip

    # ------------------------------------------------------------------ order
    def _list_end_ops(self) -> list[int]:
        """The final ops of the forward; without gradients these include writes, as an evaluation's to its metrics."""
        if self.requests:
            return [value.op for request in self.program.requests for value in request.targets]
        return [value.op for value in self.program.returns] + [op.index for op in self.effects]

    def _order_ops(self) -> list[int]:
        """The ops of the forward that depend on the batch, each just before it is needed; of an op's inputs the one
        with the longest path is computed first, so that a side branch is computed late.
        """
        graph = self.graph
        depth = [0.0] * len(graph)
        for op in graph.ops:
            own = 1.0 + self.flop_counter.count_op(op) if op.index not in self.backward_ops else 0.0
            depth[op.index] = own + max((depth[value.op] for value in op.inputs), default=0.0)
        found: dict[int, None] = {}
        stack = [(op, False) for op in reversed(self._list_end_ops())]
        seen: set[int] = set()
        while stack:
            index, done = stack.pop()
            if done:
                found[index] = None
            elif index not in seen and index in self.batch and index not in self.backward_ops:
                seen.add(index)
                stack.append((index, True))
                inputs = sorted({value.op for value in graph.ops[index].inputs}, key=lambda each: depth[each])
                stack += [(each, False) for each in inputs]
        return sorted(found, key=lambda each: self.program.labels.get(each, 0))  # in the order of stages

    def _find_weighted(self, order: Iterable[int]) -> dict[int, list[tuple[str, int]]]:
        """The ops of the forward that read variables, each with their paths and the numbers of these readers."""
        inside, seen = set(order), dict[str, int]()
        found: dict[int, list[tuple[str, int]]] = {}
        for op in self.graph.ops:
            handle = op.inputs[0].op if is_read(op) and op.inputs else -1
            variable = self.program.variable_ops.get(handle)
            if variable is None or variable.metric or op.index in self.backward_ops:
                continue
            number = seen.get(variable.path, 0)
            seen[variable.path] = number + 1
            readers = [op.index] if op.index in inside else self._find_readers(op, inside)
            for reader in readers:
                found.setdefault(reader, []).append((variable.path, number))
        return found

    def _find_readers(self, op: Op, inside: set[int]) -> list[int]:
        """The first ops that depend on the batch and use, directly or not, what an op has read of a variable."""
        found, stack = list[int](), [op.index]
        while stack:
            each = self.graph.ops[stack.pop()]
            for value in each.values:
                for reader in self.graph.consumers(value):
                    if reader.index in inside:
                        found.append(reader.index)
                    elif reader.index not in self.backward_ops and reader.index not in self.batch:
                        stack.append(reader.index)
        return found

    def _find_starts(self, order: Sequence[int], weighted: dict[int, list[tuple[str, int]]]) -> list[int]:
        """The places where blocks begin: at the first op of each layer with variables, and of each stage."""
        starts, last = list[int](), ("", "")
        for place, op in enumerate(order):
            if op in weighted:
                stage = self.stages.get(op, "")
                layer = _layer(weighted[op][0][0]) if weighted[op] else last[0] if stage == last[1] else ""
                if (layer, stage) != last:
                    starts.append(place)
                last = layer, stage
        return starts

    # ------------------------------------------------------------------ properties of blocks
    def _list_variables(
        self, order: Sequence[int], weighted: dict[int, list[tuple[str, int]]], count: int
    ) -> tuple[tuple[tuple[str, int], ...], ...]:
        found: list[dict[tuple[str, int], None]] = [{} for _ in range(count)]
        for op in order:
            for each in weighted.get(op, ()):
                found[self.block[op]][each] = None
        return tuple(tuple(each) for each in found)

    def _name_blocks(
        self, variables: Sequence[Sequence[tuple[str, int]]], written: Mapping[str, tuple[int, int]]
    ) -> tuple[str, ...]:
        """The name of each block: that of its layer, or of its stage if it has no variables."""
        stages = {block: key for key, (begin, end) in written.items() for block in range(begin, end)}
        return tuple(_layer(each[0][0]) if each else stages.get(n, "") for n, each in enumerate(variables))

    def _bound_written_stages(self, cuttable: np.ndarray) -> dict[str, tuple[int, int]]:
        """The range of blocks of each stage defined by a scope; in `cuttable`, allow cuts between these stages, and
        forbid those inside.
        """
        found: dict[str, tuple[int, int]] = {}
        for op, stage in self.stages.items():
            block = self.block[op]
            begin, end = found.get(stage, (block, block + 1))
            found[stage] = min(begin, block), max(end, block + 1)
        for number, (begin, end) in enumerate(sorted(found.values())):
            cuttable[begin + 1 : end] = False
            cuttable[begin] |= number > 0
        return dict(sorted(found.items(), key=lambda each: each[1]))

    def _size_cuts(
        self, order: Sequence[int], starts: Sequence[int], weighted: Mapping[int, Sequence[tuple[str, int]]]
    ) -> tuple[Array, Array, np.ndarray, tuple[tuple[Tensor, ...], ...]]:
        """By cut: bytes per row in both directions, whether a cut is allowed, and the tensors that cross."""
        place = {op: number for number, op in enumerate(order)}
        trained = self._find_trained(order)
        size = len(order) + 1
        there, back = np.zeros(size), np.zeros(size)
        crossing: list[list[Tensor]] = [[] for _ in range(size)]
        for op in order:
            for value in self.graph.ops[op].values:
                readers = [place[reader.index] for reader in self.graph.consumers(value) if reader.index in place]
                if not readers or self.graph.spec(value).dtype in ("resource", "variant"):
                    continue
                # values of inputs alone are computed in the block that first reads them
                begin = place[op] if op in trained else min(readers)
                nbytes = self.sizes.nbytes(value) / self.rows
                crossed = slice(begin + 1, max(readers) + 1)
                there[crossed] += nbytes
                returns = op in trained and self.graph.spec(value).floating and bool(self.requests)
                back[crossed] += nbytes * returns
                tensor = Tensor(self.graph.spec(value).dtype, self.sizes.shape(value), returns)
                for tensors in crossing[crossed]:
                    tensors.append(tensor)
        ends = [0, *starts[1:], len(order)]
        best = [0]
        last = {self.block[op]: place[op] for op in order if op in weighted}
        for number, end in enumerate(ends[1:-1]):
            places = range(last[number] + 1, end + 1)
            best.append(min(places, key=lambda at: (there[at] + back[at], -at)))
        at = np.array([*best, len(order)])
        found = [tuple(crossing[place]) for place in at]
        sizes = there[at], back[at]
        for cut in range(2, len(starts)):
            self._move_cut_back(cut, order[starts[cut - 1] : ends[cut]], weighted, sizes, found)
        return *sizes, np.array([len(each) <= MOST_CROSSING for each in found]), tuple(found)

    def _move_cut_back(
        self,
        cut: int,
        ops: Sequence[int],
        weighted: Mapping[int, Sequence[tuple[str, int]]],
        sizes: tuple[Array, Array],
        tensors: list[tuple[Tensor, ...]],
    ) -> None:
        """Count at a cut what crosses at the one before it, and the variables that are read between them, where that is
        less: `passes.label` then runs these ops after the cut, such as a normalization whose input crosses as well.
        """
        there, back = sizes
        known = {v.path: v for v in self.program.variables}
        paths = dict.fromkeys(path for op in ops for path, _ in weighted.get(op, ()))
        size = sum(known[path].spec.nbytes() for path in paths)
        graph = self.graph
        stays = any(graph.ops[op].stateful or op in self.stages for op in ops) or any(
            is_read(graph.ops[value.op]) for op in ops if op in weighted for value in graph.ops[op].inputs
        )  # what reads a variable itself is in the variable's stage
        if not stays and LABELLED_ROWS * there[cut - 1] + size < LABELLED_ROWS * there[cut]:
            trained = {path: bool(self.requests) and known[path].trainable for path in paths}
            there[cut] = there[cut - 1] + size / self.rows
            returned = sum(known[path].spec.nbytes() for path, own in trained.items() if own)
            back[cut] = back[cut - 1] + returned / self.rows
            more = [
                Tensor(known[path].spec.dtype, tuple(known[path].spec.fill_shape(1)), own)
                for path, own in trained.items()
            ]
            tensors[cut] = (*tensors[cut - 1], *more)

    def _find_trained(self, order: Sequence[int]) -> set[int]:
        """The ops of the forward that depend on a variable that is not a generator's state."""
        roots = {v.op for v in self.program.variables if v.spec.floating}
        return self.graph.descend(roots) & set(order)

    def _size_weights(
        self, variables: Sequence[Sequence[tuple[str, int]]], count: int
    ) -> tuple[Array, Array, Array, Array, Array, dict[str, set[int]]]:
        """By block bytes of weights, slots, gradients and the largest gradient; by cut those of weights on both sides;
        and the blocks that read each variable.
        """
        known = {v.path: v for v in self.program.variables}
        readers: dict[str, set[int]] = {}
        for block, each in enumerate(variables):
            for path, _ in each:
                readers.setdefault(path, set()).add(block)
        weights, gradients, largest, tied = np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count + 1)
        for path, blocks in readers.items():
            size = known[path].spec.nbytes()
            for block in blocks:
                weights[block] += size
                if known[path].trainable and self.requests:
                    gradients[block] += size
                    largest[block] = max(largest[block], size)
            if known[path].trainable and self.requests:
                tied[min(blocks) + 1 : max(blocks) + 1] += size
        rest = sum(v.spec.nbytes() for v in self.program.variables if v.path not in readers and not v.metric)
        share = gradients / gradients.sum() if gradients.sum() else np.zeros(count)
        return weights, rest * share, gradients, largest, tied, readers

    def _list_readers(self) -> dict[int, frozenset[int]]:
        """By the number of an input, the blocks that read more of it than its number of rows."""
        found = {}
        for number, leaf in enumerate(self.program.leaves):
            readers = [op for op in self.graph.consumers(Value(leaf.op)) if not needs_only_rows(self.graph, op)]
            found[number] = frozenset(self.block[op.index] for op in readers if op.index in self.block)
        return found

    def _size_objects(self, variables: Sequence[Sequence[tuple[str, int]]]) -> Array | None:
        """By block, the bytes of objects next to its variables; None if there are none."""
        found = [sum(self.beside.get(path, 0.0) for path in {path for path, _ in own}) for own in variables]
        return np.array(found) if self.beside else None

    def _size_activations(self, block_of_op: Mapping[int, int], count: int) -> tuple[Array, Array]:
        """Two numbers of bytes per row for each block: what its backward keeps of its forward, and the most that one of
        its ops needs in addition (two of the forward's largest tensors, or the intermediates of a gradient). Tensors
        that share memory count once. A tensor is not kept if only its shape is read, or if only dead ops read it, such
        as the gradient of a constant.
        """
        held, transient = np.zeros(count), np.zeros(count)
        results = [value.op for request in self.program.requests for part in request.parts for value in part.values]
        results += [flow.gradient.op for request in self.program.requests for flow in request.flows]
        results += [op for request in self.program.requests for _, op in request.effects]
        needed = self.graph.ascend(results) & self.backward_ops
        behind = {op for op in needed if self.graph.ops[op].type not in SHAPE_OPS}
        counted: set[Value] = set()
        for op, block in self.block.items():
            for value in self.graph.ops[op].values:
                nbytes = self.sizes.nbytes(value) / self.rows
                transient[block] = max(transient[block], 2 * nbytes)
                kept = any(reader.index in behind for reader in self.graph.consumers(value))
                memory = memory_of(self.graph, value)
                if kept and memory not in counted and memory.op not in self.program.leaf_ops:
                    counted.add(memory)
                    held[block] += nbytes
        for index in behind & block_of_op.keys():
            own = self.graph.ops[index]
            values = {memory_of(self.graph, value) for value in (*own.inputs, *own.values)}
            made = [value for value in values if value.op in block_of_op and self._has_rows(value)]
            transient[block_of_op[index]] = max(
                transient[block_of_op[index]], sum(map(self.sizes.nbytes, made)) / self.rows
            )
        return held, transient

    def _forbid_cuts_of_state(self, cuttable: np.ndarray, readers: dict[str, set[int]]) -> None:
        """Forbid cuts between two blocks that share a variable that the forward writes: a seed, or statistics."""
        for handle in {handle for op in self.effects for handle in find_written_handles(op, self.graph)}:
            variable = self.program.variable_ops.get(handle)
            blocks = readers.get(variable.path, set()) if variable is not None and not variable.metric else set()
            if len(blocks) > 1 and variable is not None and not variable.trainable:
                cuttable[min(blocks) + 1 : max(blocks) + 1] = False

    # ------------------------------------------------------------------ work
    def _find_backward_blocks(self, count: int) -> dict[int, int]:
        """The block of each op of the backward: that of the op whose gradient it computes, by its name or name scope,
        else that of the backward's ops that it reads.
        """
        blocks: dict[str, set[int]] = {}
        for forward, block in self.block.items():
            blocks.setdefault(self.graph.ops[forward].name.rpartition("/")[0], set()).add(block)
        names = {scope: min(own) for scope, own in blocks.items() if len(own) == 1}
        names |= {self.graph.ops[forward].name: block for forward, block in self.block.items()}
        block_of_op: dict[int, int] = {}
        for index in sorted(self.backward_ops):
            op = self.graph.ops[index]
            above = min((block_of_op[value.op] for value in op.inputs if value.op in block_of_op), default=count - 1)
            made = _GRADIENT.match(op.name)
            scope = (made[1] or made[2]) if made else ""
            while scope and scope not in names:
                scope = scope.rpartition("/")[0]
            block_of_op[index] = names.get(scope, above)
        return block_of_op

    def _list_ops(
        self, block_of_op: Mapping[int, int], variables: Sequence[Sequence[tuple[str, int]]], count: int
    ) -> BlockOps:
        return BlockOps(
            *(_group_by_block(each, count) for each in (self.block, block_of_op, self._list_updates(variables)))
        )

    def _list_updates(self, variables: Sequence[Sequence[tuple[str, int]]]) -> dict[int, int]:
        """The ops of updates with the block of their variable: the one connected to them by tensors other than scalars,
        as slots are. Ops that several blocks share are omitted.
        """
        first: dict[str, int] = {}
        for block, own in enumerate(variables):
            for path, _ in own:
                first.setdefault(path, block)
        roots = {
            Value(op): first[v.path] for op, v in self.program.variable_ops.items() if v.trainable and v.path in first
        }
        for request in self.requests:
            for holder in request.holders:
                source = self.program.variable_ops.get(request.origins[holder.source])
                if source is not None and source.path in first:
                    roots |= dict.fromkeys(holder.values, first[source.path])
        after = sorted(self.program.gradient_dependent_ops - self.backward_ops - self.block.keys())
        joined: dict[Value, Value] = {}

        def find(value: Value) -> Value:
            while (above := joined.setdefault(value, value)) != value:
                value = above
            return value

        for op in (self.graph.ops[index] for index in after):
            for place, value in enumerate(op.inputs):  # an IdentityN passes each value separately
                if not self._is_scalar(value):
                    joined[find(self._end(value))] = find(self._end(Value(op.index, place)))
        block_of_op: dict[Value, set[int]] = {}
        for value, block in roots.items():
            block_of_op.setdefault(find(value), set()).add(block)
        found = {op: block_of_op.get(find(self._end(Value(op))), set()) for op in after if not self.graph.ops[op].role}
        return {op: next(iter(blocks)) for op, blocks in found.items() if len(blocks) == 1}

    def _end(self, value: Value) -> Value:
        return value if self.graph.ops[value.op].type == "IdentityN" else Value(value.op)

    def _is_scalar(self, value: Value) -> bool:
        """Whether a value is a scalar, or a scalar variable."""
        held = self.program.variable_ops.get(value.op)
        return (self.graph.spec(value) if held is None else held.spec).scalar

    def _find_deferrable(self, block_of_op: Mapping[int, int], count: int) -> tuple[set[int], Array]:
        """The ops of the backward that only gradients of weights depend on; and by block the bytes of these gradients.
        They are those that `passes.backward_split` defers in a stage that begins with their block or an earlier one.
        """
        graph, lowest = self.graph, dict.fromkeys(block_of_op, count)  # the first block that an op is computed for
        for index in sorted(block_of_op, reverse=True):
            if graph.ops[index].stateful and not is_read(graph.ops[index]):
                lowest[index] = -1
            for value in graph.ops[index].inputs:
                if value.op in block_of_op:
                    lowest[value.op] = min(lowest[value.op], lowest[index], block_of_op[index])
        rest = {index for index in block_of_op if lowest[index] >= block_of_op[index]}
        later, parted = set[int](), np.zeros(count)
        for request in self.requests:
            for part in request.parts:
                variable = self.program.variable_ops.get(request.origins[part.source])
                made = find_predecessors(graph, (value.op for value in part.values), rest)
                if variable is not None and not is_movement(graph, made):
                    later |= made
                    parted[block_of_op[max(made)]] += variable.spec.nbytes()
        return later, parted

    def _size_deferred_inputs(self, block_of_op: Mapping[int, int], later: Collection[int], count: int) -> Array:
        """By block, bytes per row of the deferred ops' inputs from other ops, which are kept until they run."""
        found, seen = np.zeros(count), set[tuple[int, Value]]()
        for op in later:
            for value in self.graph.ops[op].inputs if self.graph.ops[op].type not in SHAPE_OPS else ():
                memory = memory_of(self.graph, value)
                made = memory.op in self.block or memory.op in block_of_op
                if made and memory.op not in later and (block_of_op[op], memory) not in seen:
                    seen.add((block_of_op[op], memory))
                    found[block_of_op[op]] += self.sizes.nbytes(value) / self.rows
        return found

    def _measure_ops(self, ops: Sequence[Sequence[int]], later: Container[int] = ()) -> tuple[tuple[OpWork, ...], ...]:
        return tuple(tuple(self._measure_op(self.graph.ops[index], index in later) for index in own) for own in ops)

    def _measure_op(self, op: Op, later: bool = False) -> OpWork:
        moved = sum(map(self.sizes.nbytes, (*dict.fromkeys(op.inputs), *op.values)))
        by_rows = any(shape and self.rows > 1 and prod(shape) >= self.rows for shape in self._list_shapes(op))
        return OpWork(
            _kernel(op),
            float(self.flop_counter.count_op(op)),
            0.0 if op.type in _FREE else float(moved),
            by_rows,
            later,
        )

    def _list_shapes(self, op: Op) -> list[tuple[int, ...]]:
        """The shapes of an op's inputs and outputs that have rows of the batch."""
        return [self.sizes.shape(value) for value in (*op.inputs, *op.values) if self._has_rows(value)]

    def _has_rows(self, value: Value) -> bool:
        """Whether a value's shape has an unknown axis, as those with the batch's rows have."""
        return None in (self.graph.spec(value).shape or (None,))


_FREE = frozenset({"Identity", "Reshape", "Shape", "ReadVariableOp", "Const", "Placeholder", "ExpandDims", "Squeeze",
                   "StopGradient", "NoOp", "IdentityN"})  # fmt: skip


def _group_by_block(block_of_op: Mapping[int, int], count: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(count)]
    for op, block in sorted(block_of_op.items()):
        found[block].append(op)
    return tuple(map(tuple, found))


def _kernel(op: Op) -> str:
    if "MatMul" in op.type or op.type == "Einsum":
        return "matmul"
    return "conv" if "Conv" in op.type else "elementwise"


def _layer(path: str) -> str:
    """The layer that a variable belongs to.

    >>> _layer("net/block0/dense/kernel"), _layer("kernel")
    ('net/block0/dense', 'kernel')
    """
    return path.rpartition("/")[0] or path
