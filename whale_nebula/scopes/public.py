"""The public scopes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from whale_nebula.schedule.schedules import DEFAULT, SCHEDULES
from whale_nebula.scopes import compress_options
from whale_nebula.scopes import options as values
from whale_nebula.scopes.auto import AutoParallel, check_limits, set_limits
from whale_nebula.scopes.frames import Frame
from whale_nebula.scopes.options import check_signature, scope
from whale_nebula.scopes.scope import Scope
from whale_nebula.site import calling_site

Opens = AbstractContextManager[Frame]
Codecs = Any  # "auto", a codec, or its text form


@scope
def cluster(layout: str | Iterable[str] = "all", *, name: str | None = None) -> Opens:
    """Open a program whose stages run on these clusters.

    `layout` is "all" or names of clusters; `name` is the cluster of inner stages that name none.

    >>> import whale_nebula as nb
    >>> with nb.cluster(["gpu", "npu"]) as frame:
    ...     frame.options["layout"]
    ('gpu', 'npu')
    """
    layout = values.check_layout(layout)
    if name is not None:
        values.check_cluster_name("name", name)
        if layout != "all":
            values.check_choice("name", name, layout)
    return Scope("cluster", {"layout": layout, "name": name})


@scope
def replica(
    count: int | None = None,
    *,
    sync_every: int | str | None = None,
    outer: Any = "average",
    mode: str = "sync",
    fragments: int | None = None,
    delay: int | None = None,
    staleness: int | None = None,
    shard: str | None = None,
    exchange: str | None = None,
) -> Opens:
    """Replicate the stages inside; each replica works on its share of the micro-batches.

    It encloses an entire model, a pipeline, or single stages, each with its own count. Without a count there are as
    many replicas as the cluster has workers for the stages inside; with an `nb.split(count)` inside, a replica uses
    `count` of them. A batch is divided into at least as many micro-batches as there are replicas.

    With `shard="optimizer"` each replica holds a part of the optimizer's slots, receives that part of the summed
    gradients, updates that part of the weights, and sends it to the others: the results and the bytes sent are the
    same, with less memory. `shard="gradients"` also does so for gradients of weights without slots.

    With `sync_every` each *cluster* of the layout trains its own copy on its share of each batch, and sends its weight
    differences to the others only once in so many steps. `count` is then the number of replicas within each cluster.
    `outer` is the optimizer that applies the mean of the differences: "average", "nesterov", or an object of
    `nb.outer`. `nb.compress` around it is the codec of the differences, with error feedback. They are sent in
    `fragments`, one after the other, each with `delay` steps to arrive. With `mode="async"` a server in the first
    cluster applies each difference as it arrives; no cluster is more than `staleness` rounds ahead of the slowest.
    `sync_every="auto"` is the smallest number of steps, up to 500, that hides the exchange, computed from the seconds
    of a step and the rate, delay and codec of the links; `nb.plan` shows it.

    With `exchange="1bit"` each cluster also trains a copy, and all exchange the momenta of their optimizers after each
    step, at one bit per number after the warm-up: `whale_nebula.strategies.OneBitAdam`, `OneBitLamb`. If there is only
    one cluster, each of its workers trains a copy.

    >>> import whale_nebula as nb
    >>> nb.replica(3), nb.replica(sync_every=100).options["mode"]
    (nb.replica(count=3), 'sync')
    """
    apart = compress_options.check_local_sgd_options(dict(locals()))
    options = {"count": None if count is None else values.check_count("count", count), **apart}
    if shard is not None:
        options["shard"] = values.check_choice("shard", shard, ("optimizer", "gradients"))
    return Scope("replica", options)


@scope
def stage(*, cluster: str | None = None, name: str | None = None) -> Opens:
    """A part of the model that one cluster runs.

    Its identity is its `name`, otherwise its `cluster`; entering the same one again continues it. Without either it is
    `stage<n>`, the n-th entry in its `nb.cluster` block.

    >>> import whale_nebula as nb
    >>> nb.stage(cluster="npu", name="decoder")
    nb.stage(cluster='npu', name='decoder')
    """
    if cluster is not None:
        values.check_cluster_name("cluster", cluster)
    if name is not None:
        values.check_name("name", name)
    return Scope("stage", {"cluster": cluster, "name": name})


@scope
def pipeline(
    micro_batch: int | None = None,
    *,
    schedule: str = DEFAULT,
    in_flight: int | None = None,
    recompute: bool = False,
    coupled: str = "error",
) -> Opens:
    """Divide each batch into `micro_batch` micro-batches, so that the stages inside work at the same time.

    Without a number the batch is not divided or, under `nb.auto_parallel`, the planner chooses. `schedule` is "gpipe",
    "1f1b", "eager-1f1b" or "zero-bubble". `in_flight` limits the micro-batches that a stage holds. `recompute` saves
    memory by computing a stage's forward again. `coupled="allow"` lets the rows of a batch depend on each other within
    a micro-batch.

    >>> import whale_nebula as nb
    >>> with nb.cluster(), nb.pipeline(4, schedule="gpipe") as frame:
    ...     frame.options["micro_batch"]
    4
    """
    options = {
        "micro_batch": None if micro_batch is None else values.check_count("micro_batch", micro_batch),
        "schedule": values.check_choice("schedule", schedule, SCHEDULES),
        "in_flight": None if in_flight is None else values.check_count("in_flight", in_flight),
        "recompute": values.check_bool("recompute", recompute),
        "coupled": values.check_choice("coupled", coupled, ("error", "allow")),
    }
    return Scope("pipeline", options)


@scope
def split(count: int | None = None, *, axis: int = -1) -> Opens:
    """Shard the variables that are created or used inside, along their `axis`, over `count` devices of the stage.

    The layouts of all other tensors of the stage are inferred from those of the variables. Without a `count` there are
    as many devices as the stage's cluster has workers; inside `nb.replica(n)`, as many for each replica. At least one
    of the two needs a count.

    >>> import whale_nebula as nb
    >>> nb.split(2, axis=0)
    nb.split(count=2, axis=0)
    """
    options = {
        "count": None if count is None else values.check_count("count", count),
        "axis": values.check_integer("axis", axis),
    }
    return Scope("split", options)


@scope
def compress(
    codec: Codecs = None,
    *,
    svd: float | None = None,
    rank: int | None = None,
    topk: float | None = None,
    fp16: bool = False,
    bf16: bool = False,
    int8: bool = False,
    int4: bool = False,
    backward: Codecs = "default",
    start_step: int = 0,
    ramp: Any = None,
    basis: str = "shared",
    delta: str | None = None,
    mask: Any = None,
    forward: Codecs = None,
    zstd: bool = False,
    nonfinite: str = "raise",
) -> Opens:
    """Compress the tensors that cross boundaries inside.

    Flags define one codec: at most one structure (svd, rank, topk), then at most one precision (fp16, bf16, int8,
    int4). `codec` is that codec itself, or "auto", and excludes flags. The gradient is projected to the same subspace
    or positions. `backward` is its precision (int8 by default; None: unchanged), or a codec that replaces all of it.
    `forward` is the codec of steps without a gradient, "none" for none.

    The codec is used from `start_step` on. `ramp` begins with more accurate precisions and continues with the next as
    soon as its relative error is below a bound. `mask` names the input that marks the rows to send, or is True for
    Keras's mask of a tensor. `delta` names the input with the ids of samples: both sides cache up to 1 GiB of samples
    per boundary and send differences to them. `zstd` compresses the bytes if that makes them fewer. `nonfinite` is the
    reaction to a NaN that would enter a codec's state: "raise", or "skip" the step in all processes.

    >>> import whale_nebula as nb
    >>> with nb.cluster(), nb.compress(fp16=True) as frame:
    ...     frame.options["codec"]
    FP16()
    """
    return Scope("compress", compress_options.check_compress_options(dict(locals())))


@check_signature
def auto_parallel(
    *,
    clusters: Iterable[str] | None = None,
    memory: int | str | None = None,
    micro_batch: int | None = None,
    replica: int | None = None,
    split: bool | None = None,
    compress: Codecs = "none",
    recompute: bool | None = None,
    replan: bool = False,
) -> AutoParallel:
    """Let the planner choose the stages of steps: one line before the model. Scopes of a script are kept and completed.

    The planner chooses all options that are None: which `clusters` are used, the numbers of micro-batches and of
    replicas of a stage, whether its variables are sharded over workers instead, and whether forwards are recomputed to
    save memory. `memory` ("16GiB", or bytes) is the limit of a worker, or the config's if that is smaller. By default
    no lossy codec is chosen: `compress` is the codec of boundaries, as in `nb.compress` ("auto": for each boundary the
    most accurate codec that computation hides), and a batch is divided only if that gives the same numbers.

    If steps take much longer or shorter than predicted, a warning is given once, with a better plan if measurements
    show one. With `replan` the run changes to that plan between two steps, and the numbers stay the same.

    It is in effect until `nb.shutdown()` or, as a context manager, until the end of its block. `nb.plan(model, x, y)`
    shows the choice, and `.explain()` of that plan the reasons.

    >>> import whale_nebula as nb
    >>> with nb.auto_parallel(memory="16GiB", micro_batch=8) as found:
    ...     found
    nb.auto_parallel(memory=17179869184, micro_batch=8)
    """
    site = calling_site()
    limits = check_limits(
        site,
        clusters=clusters,
        memory=memory,
        micro_batch=micro_batch,
        replica=replica,
        compress=compress,
        recompute=recompute,
        split=split,
        replan=replan,
    )
    return AutoParallel(limits, set_limits(limits))
