"""The worker as a TensorFlow task: its device, and its index in the cluster.

A launched process does this as soon as Keras is loaded, before a script computes. Nothing here imports Keras: the
first module of ours to do so would be partially loaded when `prepare` is called.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import Attachment
from whale_nebula.launch.placement import free_port
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


_NOWHERE = "127.0.0.1:1"  # the address of a mate that is not yet known


def prepare(attachment: Attachment) -> None:
    """Take the worker's device, and prepare its task."""
    if attachment.device is not None:
        take(attachment.device, attachment.worker)
    prepare_task(attachment)


def prepare_task(attachment: Attachment) -> None:
    """Configure a worker with mates in its cluster as their task, before TensorFlow's runtime starts.

    It does not start the runtime: a script may still set threads and devices. Tensors that it makes remain valid when
    the collectives are opened. Until then, only this machine can connect to the port. If the runtime has already
    started, nothing is done, and the collectives cannot be opened.
    """
    workers = tasks_of(attachment)
    if len(workers) < 2 or tf_collectives.task() is not None:
        return
    index, port = workers.index(attachment.worker), free_port()
    addresses = [f"127.0.0.1:{port}" if number == index else _NOWHERE for number in range(len(workers))]
    tf_collectives.prepare(index, addresses, functools.partial(restrict_port, port, ()))


def tasks_of(attachment: Attachment) -> list[str]:
    """The workers of this worker's cluster, in the order of tasks."""
    mates = [worker for worker, cluster in attachment.peers.items() if cluster == attachment.cluster]
    return sorted([attachment.worker, *mates])
