"""Private parts of TensorFlow and Keras that matter to work in another thread: the state that belongs to a thread, and
the losses that layers keep between calls.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from whale_nebula.tf import require_supported

require_supported()  # the following imports depend on these versions

from keras.src.backend.common import global_state  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

_CALL = "current_call_ctx"
"""Keras's record of the layer call that is running, which belongs to the thread that runs it."""


def copy_thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A function whose context, in another thread, has this thread's device and Keras settings: its dtype policy, its
    seeds, and the numbers in names of layers.
    """
    trackers = (global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER)
    states = [{name: value for name, value in vars(each).items() if name != _CALL} for each in trackers]
    device = context.context().device_name

    @contextlib.contextmanager
    def use_state() -> Iterator[None]:
        before = [dict(vars(each)) for each in trackers]
        try:
            for each, state in zip(trackers, states, strict=True):
                vars(each).update(state)
            with tf.device(device) if device else contextlib.nullcontext():
                yield
        finally:
            for each, state in zip(trackers, before, strict=True):
                vars(each).clear()
                vars(each).update(state)

    return use_state


def keeps_losses(layers: list[Any]) -> bool:
    """Whether the last call of one of these layers has added losses, which each call of a model clears."""
    return any(layer._losses for layer in layers)
