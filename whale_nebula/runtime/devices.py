"""The device that a worker has of its host: TensorFlow sees no other one."""

from __future__ import annotations

import tensorflow as tf

from whale_nebula.errors import ConfigError


def take(device: str, worker: str) -> None:
    """Let this process have the CPU alone, or one GPU besides. TensorFlow must not have begun to compute.

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
