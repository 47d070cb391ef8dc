"""From a chain and the clusters of a run to a problem: seconds of each block on each cluster's workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from whale_nebula.hardware import ClusterInfo, Clusters, Device, LinkRate
from whale_nebula.plan.timing import CALL, SPEED
from whale_nebula.planner.chain import Layers, OpWork
from whale_nebula.planner.crossing import code_crossings
from whale_nebula.planner.problem import Options, Problem, Site, Wire

OP_SECONDS = 5e-6
"""What an op costs besides: to be scheduled and called."""
MEMORY_RATE = 2e10
"""Bytes a second that a device reads and writes, where nobody has said or measured it."""


@dataclass(frozen=True)
class Grounds:
    """What a prediction rests on: the shares of its computing time whose rates were measured, said, or guessed."""

    measured: float = 0.0
    said: float = 0.0
    guessed: float = 1.0


def problem_of(layers: Layers, clusters: Clusters, options: Options, compress: str | None = None) -> Problem:
    """The problem of planning a program for clusters; `compress` is the codec of what crosses, or "auto"."""
    sites = tuple(_site(layers, cluster, options) for cluster in clusters.clusters)
    pairs = permutations(enumerate(clusters.names), 2)
    lines = {(a, b): _wire(clusters.between(one, other)) for (a, one), (b, other) in pairs}
    coded = code_crossings(compress, layers.tensors, layers.rows, clusters.codecs)
    return Problem(replace(layers.chain, coded=coded), sites, layers.rows, lines, options)


def _wire(link: LinkRate) -> Wire:
    return Wire(link.rate_bytes_per_s or math.inf, link.delay_s)


def _site(layers: Layers, cluster: ClusterInfo, options: Options) -> Site:
    """A cluster is as fast as its slowest worker, and has the memory of the smallest."""
    devices = [worker.device for worker in cluster.workers]
    slowest = min(devices, key=lambda device: device.rate_of("matmul") or SPEED)

    def pace(kernel: str, flops: float, moved: float) -> float:
        return op_seconds(slowest, kernel, flops, moved)

    memory = min((d.memory_bytes for d in devices if d.memory_bytes is not None), default=math.inf)
    inside = _wire(cluster.inside)
    for each in cluster.collectives:
        if each.kind == "all-reduce":  # its time for a byte is that of 2 (n - 1) / n bytes on each way
            share = 2.0 * (each.workers - 1) / each.workers
            inside = Wire(share / each.beta_s_per_byte, each.alpha_s / (2.0 * (each.workers - 1)))
    rate = slowest.memory_bytes_per_s or MEMORY_RATE
    return Site(
        cluster.name, max(1, len(devices)), layers.seconds(layers.forward, pace),
        layers.seconds(layers.backward, pace),
        np.array(layers.update) * (3.0 / rate),
        slowest.call_seconds or CALL, float(min(memory, options.memory)), inside,
        layers.seconds(layers.backward, pace, later=True),
    )  # fmt: skip


def op_seconds(device: Device, kernel: str, flops: float, moved: float) -> float:
    """Seconds of one op: those of its FLOPs or of its bytes, whichever take longer.

    >>> op_seconds(Device(flops_per_s=1e9, memory_bytes_per_s=1e9), "matmul", 2e6, 1e3)
    0.002005
    """
    if not flops and not moved:
        return 0.0
    compute = flops / (device.rate_of(kernel) or SPEED) if kernel != "elementwise" else 0.0
    return OP_SECONDS + max(compute, moved / (device.memory_bytes_per_s or MEMORY_RATE))


def grounds_of(layers: Layers, clusters: Clusters) -> Grounds:
    """What the predictions for these clusters rest on."""
    shares = np.zeros(3)
    ops = [op for works in (*layers.forward, *layers.backward) for op in works]
    for worker in (cluster.workers[0] for cluster in clusters.clusters if cluster.workers):
        for op in ops:
            taken = op_seconds(worker.device, op.kernel, op.flops, op.moved)
            shares[_ground(clusters, worker.name, worker.device, op)] += taken
    total = float(shares.sum()) or 1.0
    return Grounds(*(float(share) / total for share in shares))


def _ground(clusters: Clusters, worker: str, device: Device, op: OpWork) -> int:
    """Of one op: 0 where its rate was measured, 1 where the config says it, 2 where it is guessed."""
    name = "memory_bytes_per_s" if op.kernel == "elementwise" else f"rates.{op.kernel}"
    if f"{worker}.{name}" in clusters.measured:
        return 0
    known = device.memory_bytes_per_s if op.kernel == "elementwise" else device.rate_of(op.kernel)
    return 2 if known is None else 1
