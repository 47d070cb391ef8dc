"""Private parts of TensorFlow for its collectives between processes.

A process is one task of a TensorFlow cluster, which is part of its devices' names. These are assigned when TensorFlow's
runtime starts: variables, iterators and functions created before would be on devices that no longer exist. Therefore
`prepare_task` sets the task of this process before the runtime starts, and `start_server` sets the addresses of the
others once they are known. Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import tensorflow as tf

from whale_nebula.tf import require_supported

require_supported()  # the following imports depend on these versions

from tensorflow.core.protobuf import tensorflow_server_pb2  # noqa: E402
from tensorflow.python import pywrap_tfe  # noqa: E402
from tensorflow.python.eager import context as context_lib  # noqa: E402

JOB = "worker"
_START = "ensure_initialized"  # the function that starts the runtime, called by all code that needs it


@dataclass(frozen=True, slots=True)
class Task:
    """A process's task in TensorFlow's cluster: its number, the number of tasks, and its address."""

    index: int
    count: int
    address: str


def find_task() -> Task | None:
    """The task of this process in TensorFlow's cluster; None if it is in none."""
    context = context_lib.context()
    server = context._server_def or context._collective_ops_server_def
    if server is None:
        return None
    jobs = {job.name: job.tasks for job in server.cluster.job}
    own = jobs.get(server.job_name, {})
    return Task(server.task_index, sum(map(len, jobs.values())), own.get(server.task_index, ""))


def prepare_task(index: int, addresses: Sequence[str], started: Callable[[], object]) -> None:
    """Make this process task `index` when TensorFlow's runtime starts, and call `started` after its start. Until then a
    script may configure threads and devices as usual.
    """
    context = context_lib.context()
    start = getattr(context, _START)

    @functools.wraps(start)
    def begin() -> None:
        start_server(index, addresses)
        started()

    setattr(context, _START, begin)


def start_server(index: int, addresses: Sequence[str]) -> None:
    """Start TensorFlow's server as task `index`, or update the addresses of the others in the running one."""
    context = context_lib.context()
    vars(context).pop(_START, None)  # the prepared start is done
    server = tensorflow_server_pb2.ServerDef(protocol="grpc", job_name=JOB, task_index=index)
    server.default_session_config.CopyFrom(context.config)
    # the first task resolves the devices of each group
    server.default_session_config.experimental.collective_group_leader = f"/job:{JOB}/replica:0/task:0"
    job = server.cluster.job.add(name=JOB)
    for number, address in enumerate(addresses):
        job.tasks[number] = address
    if context._context_handle is None:
        context.enable_collective_ops(server)
        context.ensure_initialized()
        return
    context._collective_ops_server_def = server  # like `enable_collective_ops`, without its warning
    with context._initialize_lock:
        pywrap_tfe.TFE_EnableCollectiveOps(context._handle, server.SerializeToString())
        context._initialize_logical_devices()
    context._clear_caches()


def abort_collectives(message: str) -> None:
    """Make every waiting and every later collective of this process fail, in any thread."""
    context_lib.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


CPU, _GPU = "/CPU:0", "/GPU:0"


@functools.cache
def find_device() -> str:
    """The device of collectives: the GPU if there is one."""
    return _GPU if tf.config.list_logical_devices("GPU") else CPU


def hash_key(text: str) -> int:
    """The hash of a text as a positive int32, for keys of groups and instances."""
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") >> 1 or 1


def _member_attributes(size: int, group: int, instance: Any) -> dict[str, Any]:
    """The attributes of a collective op: its group, and the instance within the group."""
    return {"group_size": size, "group_key": group, "instance_key": instance, "communication_hint": "auto"}


def reduce(tensor: Any, size: int, group: int, instance: Any, op: str) -> Any:
    """The sum ("Add") or the maximum ("Max") over the members of a group; all have the same shape. TensorFlow's own
    timeout is not used: it holds memory for each sum until it expires.
    """
    member = _member_attributes(size, group, instance)
    found = tf.raw_ops.CollectiveReduceV2(input=tensor, ordering_token=[], merge_op=op, final_op="Id", **member)
    found.set_shape(tensor.shape)
    return found


def gather(tensor: Any, size: int, group: int, instance: Any) -> Any:
    """The tensors of all members, concatenated along the first axis, of which each has one entry."""
    found = tf.raw_ops.CollectiveGatherV2(input=tensor, ordering_token=[], **_member_attributes(size, group, instance))
    found.set_shape(tf.TensorShape([size]).concatenate(tensor.shape[1:]))
    return found


def exchange(tensor: Any, size: int, group: int, instance: Any) -> Any:
    """All-to-all: entry m of the first axis goes to member m; the result has the entries of all members for this one,
    by member. That axis has the size of the group.
    """
    found = tf.raw_ops.CollectiveAllToAllV2(
        input=tensor, ordering_token=[], **_member_attributes(size, group, instance)
    )
    found.set_shape(tensor.shape)
    return found


def send(tensor: Any, size: int, group: int, instance: Any) -> Any:
    """Broadcast a tensor to all other members."""
    return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **_member_attributes(size, group, instance))


def receive(shape: Any, dtype: Any, size: int, group: int, instance: Any) -> Any:
    """Receive the broadcast of another member; its shape must be known."""
    return tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=dtype, **_member_attributes(size, group, instance))
