"""Before a worker's script makes its first tensor, TensorFlow is told which task of the cluster this process will be.

That is after Keras is loaded, which starts nothing: in the moment in which a worker's seeds are set, too.
"""

from __future__ import annotations

import functools

from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.devices import take
from whale_nebula.runtime.reach import free_port, shut
from whale_nebula.tf import collectives as tf_collectives

_NOWHERE = "127.0.0.1:1"  # where a mate is as long as nobody has said


def prepare(attachment: Attachment) -> None:
    """Take the worker's device, and be a task."""
    if attachment.device is not None:
        take(attachment.device, attachment.worker)
    prepare_task(attachment)


def prepare_task(attachment: Attachment) -> None:
    """Let a worker that has mates in its cluster be their task once TensorFlow's runtime starts.

    It does not start it: a script may go on to set threads and devices. What it makes then lives on as the
    collectives are opened. Until they are, nobody but this machine reaches the port. Where the runtime has started,
    nothing happens, and the collectives cannot be opened.
    """
    workers = tasks_of(attachment)
    if len(workers) < 2 or tf_collectives.task() is not None:
        return
    index, port = workers.index(attachment.worker), free_port()
    addresses = [f"127.0.0.1:{port}" if number == index else _NOWHERE for number in range(len(workers))]
    tf_collectives.prepare(index, addresses, functools.partial(shut, port, ()))


def tasks_of(attachment: Attachment) -> list[str]:
    """The workers of one's own cluster, in the order in which they are tasks."""
    mates = [worker for worker, cluster in attachment.peers.items() if cluster == attachment.cluster]
    return sorted([attachment.worker, *mates])
