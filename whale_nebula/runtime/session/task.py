"""The worker as a task of TensorFlow's: which device it has, and which task of its cluster it is.

A launched process does this as soon as Keras is loaded, before a script computes. Nothing here imports Keras: whatever
module of ours is the first to do so would be half loaded when it is asked to prepare.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import Attachment
from whale_nebula.launch.ports import free_port
from whale_nebula.runtime.session.server_filter import restrict_port
from whale_nebula.tf import collectives as tf_collectives


def take(device: str, worker: str) -> None:
    """Make only the CPU, or one GPU in addition, visible to this process. TensorFlow must not be initialised yet.

    >>> take("CPU", "gpu/0")
    """
    gpus = tf.config.list_physical_devices("GPU")
    kind, _, number = device.partition(":")
    if kind == "GPU" and int(number) >= len(gpus):
        raise ConfigError(
            f"worker {worker} is to have {device}, and TensorFlow finds {len(gpus) or 'no'} GPU{'s' * (len(gpus) > 1)}",
            where=f"device: of {worker} in the config",
            why="workers of one host share out its GPUs, which are numbered from 0",
            mend='device: CPU, or TensorFlow with its GPU parts on that host: pip install "tensorflow[and-cuda]"',
        )
    try:
        tf.config.set_visible_devices([gpus[int(number)]] if kind == "GPU" else [], "GPU")
    except RuntimeError as begun:
        raise ConfigError(
            f"worker {worker} cannot take {device}: TensorFlow computes already",
            why=str(begun),
            mend="import keras before anything is computed, so that the worker's device is set in time",
        ) from None


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
    tf_collectives.prepare(index, addresses, functools.partial(restrict_port, port, ()))


def tasks_of(attachment: Attachment) -> list[str]:
    """The workers of one's own cluster, in the order in which they are tasks."""
    mates = [worker for worker, cluster in attachment.peers.items() if cluster == attachment.cluster]
    return sorted([attachment.worker, *mates])
