"""Everything private of TensorFlow that its collectives need, beside `tf_private`: they are between processes.

A process is one task of a TensorFlow cluster, and the names of its devices say which. They are given when TensorFlow's
runtime starts: variables, iterators and functions that were made before are on devices that there are no more. So
`prepare` says which task this process will be before anything runs, and `serve` says where the others are, whenever
that is known. Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import tensorflow as tf

from whale_nebula.tf import require_supported

require_supported()  # what follows is where it is in these versions only

from tensorflow.core.protobuf import tensorflow_server_pb2  # noqa: E402
from tensorflow.python import pywrap_tfe  # noqa: E402
from tensorflow.python.eager import context as context_lib  # noqa: E402

JOB = "worker"
_START = "ensure_initialized"  # what everything calls that needs the runtime, and what starts it


@dataclass(frozen=True, slots=True)
class Task:
    """Which of how many tasks a process is, and where it listens."""

    index: int
    count: int
    address: str


def task() -> Task | None:
    """The task of this process in TensorFlow's cluster; None if it is in none."""
    context = context_lib.context()
    server = context._server_def or context._collective_ops_server_def
    if server is None:
        return None
    jobs = {job.name: job.tasks for job in server.cluster.job}
    own = jobs.get(server.job_name, {})
    return Task(server.task_index, sum(map(len, jobs.values())), own.get(server.task_index, ""))


def prepare(index: int, addresses: Sequence[str], started: Callable[[], object]) -> None:
    """Be task `index` as soon as TensorFlow's runtime starts, which it does not by this; then call `started`.

    Until then a script may set threads and devices as always.
    """
    context = context_lib.context()
    start = getattr(context, _START)

    @functools.wraps(start)
    def begin() -> None:
        serve(index, addresses)
        started()

    setattr(context, _START, begin)


def serve(index: int, addresses: Sequence[str]) -> None:
    """Start TensorFlow's server as task `index`, or let the one that runs know where the others are now."""
    context = context_lib.context()
    vars(context).pop(_START, None)  # what was prepared is done now
    server = tensorflow_server_pb2.ServerDef(protocol="grpc", job_name=JOB, task_index=index)
    server.default_session_config.CopyFrom(context.config)
    # the first task knows which devices are in which group
    server.default_session_config.experimental.collective_group_leader = f"/job:{JOB}/replica:0/task:0"
    job = server.cluster.job.add(name=JOB)
    for number, address in enumerate(addresses):
        job.tasks[number] = address
    if context._context_handle is None:
        context.enable_collective_ops(server)
        context.ensure_initialized()
        return
    context._collective_ops_server_def = server  # `enable_collective_ops` does the same, and warns
    with context._initialize_lock:
        pywrap_tfe.TFE_EnableCollectiveOps(context._handle, server.SerializeToString())
        context._initialize_logical_devices()
    context._clear_caches()


def abort(message: str) -> None:
    """Let every collective that waits in this process fail, in whatever thread, and every later one."""
    context_lib.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


CPU, _GPU = "/CPU:0", "/GPU:0"


@functools.cache
def find_device() -> str:
    """Where collectives run: on the GPU where there is one."""
    return _GPU if tf.config.list_logical_devices("GPU") else CPU


def hash_key(text: str) -> int:
    """A positive int32 that stands for a text."""
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") >> 1 or 1


def _member(size: int, group: int, instance: Any) -> dict[str, Any]:
    """The attributes of a collective op: its group, and the instance within the group."""
    return {"group_size": size, "group_key": group, "instance_key": instance, "communication_hint": "auto"}


def reduce(tensor: Any, size: int, group: int, instance: Any, op: str) -> Any:
    """The sum ("Add") or the maximum ("Max") over the members of a group; all give the same shape. TensorFlow's own
    timeout is not used: it keeps memory for each sum until it ends.
    """
    member = _member(size, group, instance)
    found = tf.raw_ops.CollectiveReduceV2(input=tensor, ordering_token=[], merge_op=op, final_op="Id", **member)
    found.set_shape(tensor.shape)
    return found


def gather(tensor: Any, size: int, group: int, instance: Any) -> Any:
    """What all members have, one behind the other along the first axis, which has one entry of each."""
    found = tf.raw_ops.CollectiveGatherV2(input=tensor, ordering_token=[], **_member(size, group, instance))
    found.set_shape(tf.TensorShape([size]).concatenate(tensor.shape[1:]))
    return found


def exchange(tensor: Any, size: int, group: int, instance: Any) -> Any:
    """From each member the entry of the first axis that is for this one; that axis is as long as the group."""
    found = tf.raw_ops.CollectiveAllToAllV2(input=tensor, ordering_token=[], **_member(size, group, instance))
    found.set_shape(tensor.shape)
    return found


def send(tensor: Any, size: int, group: int, instance: Any) -> Any:
    """Give a tensor to all other members."""
    return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **_member(size, group, instance))


def receive(shape: Any, dtype: Any, size: int, group: int, instance: Any) -> Any:
    """Take what another member sends; its shape has to be known."""
    return tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=dtype, **_member(size, group, instance))
