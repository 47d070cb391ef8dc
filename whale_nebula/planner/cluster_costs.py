"""Build the planning problem from a chain and the clusters of a run: seconds of each block on each cluster's workers,
by rates or as subgraphs that were measured; and bytes and seconds of crossing at each cut with a codec.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from whale_nebula.codec.encoding import AUTO, AUTO_LADDER, Encoding, derive_encodings, mirror_options
from whale_nebula.codec.registry import parse
from whale_nebula.codec.sizes import cost, payload_bytes, used_codec
from whale_nebula.hardware import ClusterInfo, Clusters, Device, WorkerInfo
from whale_nebula.hardware.measurements import fit_line
from whale_nebula.ir.canonical import format_subgraph
from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.graph import CAPTURE, Op
from whale_nebula.ir.program import Program
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.effects import find_written_handles, is_check, is_effect
from whale_nebula.plain import to_plain
from whale_nebula.plan.timing import CALL, SPEED
from whale_nebula.planner.chain import BlockOps, Layers, OpWork, Tensor
from whale_nebula.planner.problem import Array, ClusterCosts, CodecCosts, Options, Problem
from whale_nebula.schedule.lines import Line
from whale_nebula.spec import Spec, Value

OP_SECONDS = 5e-6
"""Seconds of overhead for each op, to schedule and to call it."""
MEMORY_RATE = 2e10
"""The default memory bandwidth of a device in bytes per second."""
PYTHON_LOOP = 2.5e-5
"""The default seconds of a loop of 1,000 additions in Python."""
STAGE_CALL, MESSAGE, CROSSING, STEP = 40.0, 25.0, 8e-5, 150.0
"""The overhead of a processor's core in addition to the functions of stages, in multiples of a loop of 1,000 additions
in Python: for each call of a function, to collect its inputs and outputs; for each tensor that is sent or received, and
for each of its bytes, to copy, seal, write or read it; and for each step, to announce it and to assemble its results.
"""


@dataclass(frozen=True)
class Grounds:
    """Sources of a prediction as shares of its computing time: blocks that were measured; and ops whose seconds follow
    from FLOPs and bytes by rates that were measured, configured or guessed.
    """

    measured: float = 0.0
    fitted: float = 0.0
    configured: float = 0.0
    guessed: float = 1.0


def build_problem(
    layers: Layers,
    clusters: Clusters,
    options: Options,
    measured: Measured | None = None,
    compress: str | None = None,
) -> Problem:
    """The planning problem of a program. Some clusters may have measured its blocks; `compress` is the codec of
    crossings, or "auto".
    """
    costs = tuple(_find_costs(layers, each, options, (measured or {}).get(each.name)) for each in clusters.clusters)
    pairs = permutations(enumerate(clusters.names), 2)
    lines = {(a, b): Line.from_link(clusters.between(one, other)) for (a, one), (b, other) in pairs}
    coded = code_crossings(compress, layers.tensors, layers.rows, clusters.codecs)
    return Problem(replace(layers.chain, codecs=coded), costs, layers.rows, lines, options)


def _find_costs(
    layers: Layers, cluster: ClusterInfo, options: Options, measured: MeasuredBlocks | None
) -> ClusterCosts:
    """A cluster with the speed of its slowest worker and the memory of its smallest."""
    devices = [worker.device for worker in cluster.workers]
    slowest = min(devices, key=lambda device: device.rate_of("matmul") or SPEED)

    def pace(kernel: str, flops: float, moved: float) -> float:
        return op_seconds(slowest, kernel, flops, moved)

    memory = min((d.memory_bytes for d in devices if d.memory_bytes is not None), default=math.inf)
    rate = slowest.memory_bytes_per_s or MEMORY_RATE
    forward, backward = layers.seconds(layers.forward, pace), layers.seconds(layers.backward, pace)
    at = np.array([1.0, layers.rows])
    later, whole = at @ layers.seconds(layers.backward, pace, deferrable_only=True), at @ backward
    share_later = np.divide(later, whole, where=whole > 0, out=np.zeros_like(later))
    update, adding = np.array(layers.update) * (3.0 / rate), 3.0 / rate
    call, crossing, message, step, fused = slowest.call_seconds or CALL, 0.0, 0.0, 0.0, 1.0
    if measured is not None:
        adding = adding if math.isnan(measured.adding) else measured.adding
        loop = PYTHON_LOOP if math.isnan(measured.python) else measured.python
        call, step = STAGE_CALL * loop, STEP * loop
        cores = slowest.cores if slowest.cores_said else measured.cores
        crossing, message = CROSSING * loop / cores, MESSAGE * loop / cores
        fused = _compare_fused(measured, layers.rows)
        forward = _complete(measured.forward, forward, layers.rows)
        backward = _complete(measured.backward, backward, layers.rows)
        update = _complete(measured.update, np.stack([update, 0.0 * update]), 1)[0]
    return ClusterCosts(
        cluster.name, max(1, len(devices)), forward, backward, update, call,
        float(min(memory, options.memory)), Line.from_link(cluster.ring), adding, fused, crossing, message, step,
        backward * share_later,
    )  # fmt: skip


def _complete(measured: Array, estimated: Array, rows: int) -> Array:
    """Complete measured seconds: blocks that were not measured get an estimate, scaled as those that were. The total is
    that of all blocks run together, which is less than their sum if some run in parallel.
    """
    blocks, whole = measured[:, :-1], measured[:, -1]
    known, at = ~np.isnan(blocks[0]), np.array([1.0, rows])
    guess, found = float((at @ estimated)[known].sum()), float((at @ blocks)[known].sum())
    line = np.where(known, blocks, estimated * (found / guess if guess and found else 1.0))
    sums = line.sum(axis=1)
    if np.isnan(whole).any() or not sums.any():
        return line
    if whole.all() and sums.all():
        return line * (whole / sums)[:, None]
    return line * float(at @ whole / (at @ sums))


def _compare_fused(measured: MeasuredBlocks, rows: int) -> float:
    """Seconds of forward and backward as one function, as a ratio to their sum."""
    apart = measured.forward[:, -1] + measured.backward[:, -1]
    share = float((measured.fused[:, -1] @ [1.0, rows]) / (apart @ [1.0, rows]))
    return 1.0 if math.isnan(share) else min(max(share, 0.5), 1.2)


def op_seconds(device: Device, kernel: str, flops: float, moved: float) -> float:
    """Seconds of one op by the roofline model: the larger of its FLOPs and its bytes, each by its rate.

    >>> op_seconds(Device(flops_per_s=1e9, memory_bytes_per_s=1e9), "matmul", 2e6, 1e3)
    0.002005
    """
    if not flops and not moved:
        return 0.0
    compute = flops / (device.rate_of(kernel) or SPEED) if kernel != "elementwise" else 0.0
    return OP_SECONDS + max(compute, moved / (device.memory_bytes_per_s or MEMORY_RATE))


def find_grounds(layers: Layers, clusters: Clusters, measured: Measured | None = None) -> Grounds:
    """The sources of predicted computing times, as shares of those of all blocks on all clusters."""
    shares = np.zeros(4)
    for cluster in clusters.clusters:
        blocks = (measured or {}).get(cluster.name)
        for place, works in enumerate((layers.forward, layers.backward) if cluster.workers else ()):
            worker = cluster.workers[0]
            for block, op in ((block, op) for block, ops in enumerate(works) for op in ops):
                known = blocks is not None and blocks.has(place, block)
                ground = 0 if known else 1 + _ground(clusters, worker, op)
                shares[ground] += op_seconds(worker.device, op.kernel, op.flops, op.moved_bytes)
    total = float(shares.sum()) or 1.0
    return Grounds(*(float(share) / total for share in shares))


def _ground(clusters: Clusters, worker: WorkerInfo, op: OpWork) -> int:
    """The source of one op's seconds: 0 if its rate was measured, 1 if it is configured, 2 if it is guessed."""
    name = "memory_bytes_per_s" if op.kernel == "elementwise" else f"rates.{op.kernel}"
    if f"{worker.name}.{name}" in clusters.measured:
        return 0
    known = worker.device.memory_bytes_per_s if op.kernel == "elementwise" else worker.device.rate_of(op.kernel)
    return 2 if known is None else 1


def lacks_speed(clusters: Clusters, worker: WorkerInfo) -> bool:
    """Whether the config has no speed for a worker."""
    return worker.device.flops_per_s is None or f"{worker.name}.flops_per_s" in clusters.measured


def code_crossings(
    compress: str | None, tensors: Sequence[Sequence[Tensor]], rows: int, measured: Mapping[str, float]
) -> tuple[CodecCosts, ...]:
    """The codecs from which the planner may choose, the least lossy first; empty if nothing is to be encoded.

    `tensors` are those of each cut, for this number of rows. `measured` are seconds per byte, to encode and to decode,
    by codec; other codecs have the costs of `codec.sizes.cost`, which were measured on one machine.
    """
    if compress is None:
        return ()
    if compress != AUTO:
        return (code_crossing(compress, *derive_encodings({"codec": parse(compress)}), tensors, rows, measured),)
    return tuple(
        code_crossing(each, *derive_encodings(mirror_options(each)), tensors, rows, measured) for each in AUTO_LADDER
    )


def code_crossing(
    name: str,
    there: Encoding,
    back: Encoding,
    tensors: Sequence[Sequence[Tensor]],
    rows: int,
    measured: Mapping[str, float],
) -> CodecCosts:
    """Costs of crossing at each cut with these encodings, of tensors and of gradients; see `code_crossings`."""
    sizes, seconds = np.zeros((2, len(tensors))), np.zeros((4, len(tensors)))
    for cut, crossing in enumerate(tensors):
        for each in crossing:
            for direction, encoding, forward in ((0, there, None), (1, back, there))[: 1 + each.returns]:
                coded = bool(each.dims) and Spec(each.dtype, each.dims).floating
                text = str(forward) if forward is not None else None
                size = payload_bytes(str(encoding), each.dtype, each.dims, text) if coded else each.nbytes
                sizes[direction, cut] += size / rows
                if coded:
                    taken = _coding_seconds(each, encoding, forward, measured)
                    seconds[2 * direction : 2 * direction + 2, cut] += np.array(taken) / rows
    return CodecCosts(name, sizes[0], sizes[1], seconds)


def _coding_seconds(
    tensor: Tensor, encoding: Encoding, forward: Encoding | None, measured: Mapping[str, float]
) -> tuple[float, float]:
    """Seconds to encode and to decode a tensor or its gradient; 0 for a codec with unknown costs."""
    used = used_codec(encoding, tensor.dtype, tensor.dims, forward)
    if used is not None and str(used) in measured:
        each = measured[str(used)] * tensor.nbytes / 2.0
        return each, each
    return cost(used, tensor.dims, back=forward is not None) or (0.0, 0.0)


KINDS = ("forward", "backward", "update", "fused")
"""The functions of blocks that are measured; the last one, forward and backward together, only for all blocks."""
Points = dict[int, float]
"""Seconds by the rows of the batch."""


@dataclass(frozen=True, eq=False)
class MeasuredBlocks:
    """Two numbers for each block, the seconds of a call and of each row, and last for all blocks together; NaN if not
    measured. `fused` is for all blocks with forward and backward as one function. `adding` are the seconds of adding
    two tensors for each byte of one, `python` those of a loop of 1,000 additions, on this number of `cores`.

    >>> found = MeasuredBlocks.from_points({"forward": {1: {4: 6.0, 8: 10.0}}, "backward": {}, "update": {}}, 2)
    >>> found.forward.tolist(), MeasuredBlocks.from_plain(found.to_plain(), 2).forward[1, 1].item()
    ([[nan, 2.0, nan], [nan, 1.0, nan]], 1.0)
    >>> MeasuredBlocks.from_plain({"forward": {"0": 5, "1": [1.0], "2": ["a", "b"], "9": [1.0, 2.0]}}, 2).has(0, 0)
    False
    """

    forward: Array
    backward: Array
    update: Array
    fused: Array
    adding: float = math.nan
    python: float = math.nan
    cores: int = 1

    @classmethod
    def from_points(
        cls,
        points: Mapping[str, Mapping[int, Points]],
        count: int,
        adding: float = math.nan,
        python: float = math.nan,
        cores: int = 1,
    ) -> MeasuredBlocks:
        """Fit a line to the seconds of each block: `points` are by kind, block (-1 for all) and rows."""
        made = {kind: np.full((2, count + 1), np.nan) for kind in KINDS}
        for kind, blocks in points.items():
            for block, seconds in blocks.items():
                made[kind][:, block] = fit_line([(float(rows), max(each, 1e-9)) for rows, each in seconds.items()])
                if kind == "update":  # it is independent of rows
                    made[kind][:, block] = min(seconds.values()), 0.0
        return cls(**made, adding=adding, python=python, cores=cores)

    def has(self, direction: int, block: int) -> bool:
        """Whether the forward (0) or the backward (1) of a block was measured."""
        return not np.isnan((self.forward, self.backward)[direction][0, block])

    def to_plain(self) -> dict[str, Any]:
        """The form for JSON, without blocks that were not measured."""
        return {"adding": to_plain(self.adding), "python": to_plain(self.python), "cores": self.cores} | {
            kind: {str(block): [float(each) for each in own[:, block]] for block in np.flatnonzero(~np.isnan(own[0]))}
            for kind, own in ((kind, getattr(self, kind)) for kind in KINDS)
        }

    @classmethod
    def from_plain(cls, plain: Any, count: int) -> MeasuredBlocks:
        """Parse the result of `to_plain`, or a peer's message; invalid entries are omitted."""
        made = {kind: np.full((2, count + 1), np.nan) for kind in KINDS}
        for kind, own in made.items():
            given = plain.get(kind) if isinstance(plain, dict) else None
            for block, pair in (given if isinstance(given, dict) else {}).items():
                is_valid = (
                    isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, int | float) for each in pair)
                )
                if is_valid and block.isdecimal() and int(block) <= count:
                    own[:, int(block)] = pair
        others = plain if isinstance(plain, dict) else {}
        numbers = map(others.get, ("adding", "python"))
        adding, python = (each if isinstance(each, float) else math.nan for each in numbers)
        cores = others.get("cores")
        return cls(**made, adding=adding, python=python, cores=max(cores, 1) if isinstance(cores, int) else 1)


Measured = Mapping[str, MeasuredBlocks]
"""Seconds of blocks by the name of the cluster."""


def find_slowest(every: Sequence[MeasuredBlocks], rows: int) -> MeasuredBlocks | None:
    """The measurements of the slowest device of a cluster; None if none has measured."""
    known = [each for each in every if not np.isnan(each.forward[0]).all()]
    return max(known, key=lambda each: _total(each, rows), default=None)


def _total(blocks: MeasuredBlocks, rows: int) -> float:
    directions = (blocks.forward, blocks.backward)
    return float(sum(np.nansum(direction[0]) + rows * np.nansum(direction[1]) for direction in directions))


*_APART, _FUSED = KINDS
WHOLE = -1
"""The number of all blocks together."""


@dataclass(frozen=True)
class Subgraph:
    """A block's forward, backward or update as a fragment. Subgraphs of the same `text` compute the same."""

    kind: str
    block: int
    fragment: Fragment
    text: str

    def key(self, sizes: Sizes, settings: str) -> str:
        """The key of a measurement, from the text, the sizes of a batch, and TensorFlow's `settings`."""
        shapes = [sizes.shape(value) for value in self.fragment.feeds]
        return hashlib.sha256(f"{self.text}\n{shapes}\n{settings}".encode()).hexdigest()[:32]


def list_subgraphs(program: Program, ops: BlockOps) -> Iterator[Subgraph]:
    """The subgraphs of a program's blocks, and of all together, without those with effects on more than variables."""
    builder = _SubgraphBuilder(program, ops)
    for kind, blocks in zip(_APART, (ops.forward, ops.backward, ops.update), strict=True):
        every = tuple(sorted(op for own in blocks for op in own))
        for block, own in ((WHOLE, every), *enumerate(blocks)):
            yield from builder.subgraph(kind, block, own)
    yield from builder.subgraph(
        _FUSED, WHOLE, [op for blocks in (ops.forward, ops.backward) for own in blocks for op in own]
    )


@dataclass(frozen=True)
class _SubgraphBuilder:
    program: Program
    ops: BlockOps

    @cached_property
    def block_of_op(self) -> dict[int, tuple[str, int]]:
        """The kind and the block of each op that belongs to one."""
        kinds = zip(_APART, (self.ops.forward, self.ops.backward, self.ops.update), strict=True)
        return {op: (kind, block) for kind, blocks in kinds for block, own in enumerate(blocks) for op in own}

    @cached_property
    def gradients(self) -> frozenset[Value]:
        """The results of the backward."""
        return frozenset(v for request in self.program.requests for part in request.parts for v in part.values)

    def subgraph(self, kind: str, block: int, ops: Sequence[int]) -> Iterator[Subgraph]:
        """The subgraph of these ops, if they can be run."""
        fragment = self._fragment(kind, ops)
        if fragment is not None:
            text = format_subgraph(self.program.graph, fragment.ops, fragment.feeds, fragment.fetches)
            yield Subgraph(kind, block, fragment, text)

    def _fragment(self, kind: str, members: Sequence[int]) -> Fragment | None:
        """The ops of a block, with those of their inputs that depend neither on the batch nor on gradients."""
        graph = self.program.graph
        members = [op for op in members if not graph.ops[op].role]
        inside = set(members)
        stack = [value.op for op in members for value in graph.ops[op].inputs]
        while stack:
            op = graph.ops[stack.pop()]
            if op.index not in inside and self._is_shared(op):
                inside.add(op.index)
                stack += [value.op for value in op.inputs]
        if not members or any(self._is_refused(graph.ops[op]) for op in inside):
            return None
        ops = tuple(sorted(inside))
        read = {value for op in ops for value in graph.ops[op].inputs if value.op not in inside}
        feeds = sorted(value for value in read if graph.ops[value.op].role != CAPTURE)
        fetches = [value for op in members for value in graph.ops[op].values if self._is_read_elsewhere(value, inside)]
        return Fragment(kind, 0, None, "", 0, ops, tuple(feeds), tuple(fetches))

    def _is_shared(self, op: Op) -> bool:
        """Whether an op is computed in every block that reads it, such as reads of variables and constants."""
        program = self.program
        depends = (
            op.index in program.batch_dependent_ops
            or op.index in program.gradient_dependent_ops
            or program.request_of(op.index) is not None
        )
        return not (depends or op.role or is_effect(op, program.graph))

    def _is_refused(self, op: Op) -> bool:
        """Whether an op has side effects that a copy of the variables does not contain."""
        graph = self.program.graph
        if not is_effect(op, graph) or is_check(op, graph):
            return False
        handles = find_written_handles(op, graph)
        return not handles or any(handle not in self.program.variable_ops for handle in handles)

    def _is_read_elsewhere(self, value: Value, inside: set[int]) -> bool:
        """Whether ops outside the block read a value."""
        if value in self.gradients:
            return True
        readers = (reader.index for reader in self.program.graph.consumers(value))
        return any(reader in self.block_of_op and reader not in inside for reader in readers)
