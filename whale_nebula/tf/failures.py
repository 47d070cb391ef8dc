"""Carry errors of this library through functions that TensorFlow calls, instead of having it convert them to text. They
are re-raised unchanged wherever TensorFlow raises: in a loop over a dataset, in Keras's `fit` and in a `tf.function`. A
contract test is in tests/contract.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

from whale_nebula.errors import NebulaError
from whale_nebula.tf import require_supported
from whale_nebula.tf.patch import Patch, apply_patches

require_supported()  # the following imports depend on these versions

from tensorflow.python.eager import core  # noqa: E402
from tensorflow.python.framework import error_interpolation  # noqa: E402

_MAX_CARRIED = 16
_carried: dict[str, NebulaError] = {}
_running: set[object] = set()
_lock = threading.Lock()
_applied = contextlib.ExitStack()
_convert_status, _parse_message = core._status_to_exception, error_interpolation.parse_message


@contextlib.contextmanager
def carry_errors() -> Iterator[None]:
    """Context of a function that TensorFlow calls: errors of this library raised inside leave TensorFlow unchanged."""
    try:
        yield
    except NebulaError as error:
        with _lock:
            if not _carried:
                _applied.enter_context(apply_patches(_PATCHES))
            elif len(_carried) == _MAX_CARRIED:  # errors that TensorFlow never raised
                del _carried[next(iter(_carried))]
            _carried[str(error)] = copy.copy(error)  # without its traceback, which would keep its frames' objects alive
        raise


@contextlib.contextmanager
def suspend_carried_errors() -> Iterator[None]:
    """Context of a step of this library, which translates TensorFlow's errors itself: they are not replaced."""
    token = object()
    _running.add(token)
    try:
        yield
    finally:
        _running.discard(token)


def _find_carried(message: str) -> NebulaError | None:
    """The error of this library that a TensorFlow message refers to; None while a step runs, which raises it itself."""
    with _lock:
        found = next((key for key in _carried if key in message), None)
        error = None if found is None else _carried.pop(found)
        if not _carried:
            _applied.close()
    return None if _running else error


def _to_exception(status: Any) -> BaseException:
    """The exception for a failed op, including one that reads a dataset."""
    made: BaseException = _find_carried(status.message) or _convert_status(status)
    return made


def _parse(message: str) -> Any:
    """Parse the message of each error that leaves a `tf.function`."""
    carried = _find_carried(message)
    if carried is not None:
        raise carried from None
    return _parse_message(message)


_PATCHES = (Patch(core, "_status_to_exception", _to_exception), Patch(error_interpolation, "parse_message", _parse))
