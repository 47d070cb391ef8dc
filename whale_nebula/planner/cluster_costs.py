"""Build the planning problem from a chain and the clusters of a run: seconds of each block on each
cluster's workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from whale_nebula.hardware import ClusterInfo, Clusters, Device, WorkerInfo
from whale_nebula.plan.timing import CALL, SPEED
from whale_nebula.planner.chain import Layers, OpWork
from whale_nebula.planner.crossing import code_crossings
from whale_nebula.planner.measured_blocks import MeasuredBlocks
from whale_nebula.planner.problem import Array, ClusterCosts, Options, Problem
from whale_nebula.schedule.lines import Line

OP_SECONDS = 5e-6
"""Seconds of overhead for each op, to schedule and to call it."""
MEMORY_RATE = 2e10
"""The default memory bandwidth of a device in bytes a second."""
EMPTY_CALL = 2.5e-5
"""The default seconds of calling an empty function."""
STAGE_CALL, MESSAGE, CROSSING, STEP, VARIABLE = 40.0, 25.0, 8e-5, 150.0, 4.0
"""The overhead of a processor's core besides the functions of stages, in multiples of an empty call: for each call of a
function, to collect its inputs and outputs; for each tensor that is sent or received, and for each of its bytes, to
copy, seal, write or read it; for each step, to announce it and to assemble its results; and for each variable that is
updated.
"""


@dataclass(frozen=True)
class Grounds:
    """Sources of a prediction as shares of its computing time: blocks that were measured; and ops whose seconds follow
    from FLOPs and bytes by rates that were measured, configured or guessed.
    """

    measured: float = 0.0
    fitted: float = 0.0
    said: float = 0.0
    guessed: float = 1.0


Measured = Mapping[str, MeasuredBlocks]
"""Seconds of blocks by the name of the cluster."""


def problem_of(
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
    lines = {(a, b): Line.of(clusters.between(one, other)) for (a, one), (b, other) in pairs}
    coded = code_crossings(compress, layers.tensors, layers.rows, clusters.codecs)
    return Problem(replace(layers.chain, coded=coded), costs, layers.rows, lines, options)


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
    later, whole = at @ layers.seconds(layers.backward, pace, later=True), at @ backward
    share_later = np.divide(later, whole, where=whole > 0, out=np.zeros_like(later))
    update, adding = np.array(layers.update) * (3.0 / rate), 3.0 / rate
    call, crossing, message, step, fused = slowest.call_seconds or CALL, 0.0, 0.0, 0.0, 1.0
    if measured is not None:
        adding = adding if math.isnan(measured.adding) else measured.adding
        empty = EMPTY_CALL if math.isnan(measured.call) else measured.call
        call, step = STAGE_CALL * empty, STEP * empty
        cores = slowest.cores if slowest.cores_said else measured.cores
        crossing, message = CROSSING * empty / cores, MESSAGE * empty / cores
        fused = _compare_fused(measured, layers.rows)
        forward = _complete(measured.forward, forward, layers.rows)
        backward = _complete(measured.backward, backward, layers.rows)
        update = _complete(measured.update, np.stack([update, 0.0 * update]), 1)[0]
        update += VARIABLE * empty * np.array([len(each) for each in layers.variables]) * (update > 0.0)
    return ClusterCosts(
        cluster.name, max(1, len(devices)), forward, backward, update, call,
        float(min(memory, options.memory)), Line.of(cluster.ring), adding, fused, crossing, message, step,
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


def grounds_of(layers: Layers, clusters: Clusters, measured: Measured | None = None) -> Grounds:
    """The sources of predictions for these clusters."""
    shares = np.zeros(4)
    for cluster in clusters.clusters:
        blocks = (measured or {}).get(cluster.name)
        for place, works in enumerate((layers.forward, layers.backward) if cluster.workers else ()):
            worker = cluster.workers[0]
            for block, op in ((block, op) for block, ops in enumerate(works) for op in ops):
                known = blocks is not None and blocks.has(place, block)
                ground = 0 if known else 1 + _ground(clusters, worker, op)
                shares[ground] += op_seconds(worker.device, op.kernel, op.flops, op.moved)
    total = float(shares.sum()) or 1.0
    return Grounds(*(float(share) / total for share in shares))


def _ground(clusters: Clusters, worker: WorkerInfo, op: OpWork) -> int:
    """The source of one op's seconds: 0 if its rate was measured, 1 if it is configured, 2 if it is guessed."""
    name = "memory_bytes_per_s" if op.kernel == "elementwise" else f"rates.{op.kernel}"
    if f"{worker.name}.{name}" in clusters.measured:
        return 0
    known = worker.device.memory_bytes_per_s if op.kernel == "elementwise" else worker.device.rate_of(op.kernel)
    return 2 if known is None else 1


def told_by_nobody(clusters: Clusters, worker: WorkerInfo) -> bool:
    """Whether the config has no speed for a worker."""
    return worker.device.flops_per_s is None or f"{worker.name}.flops_per_s" in clusters.measured
