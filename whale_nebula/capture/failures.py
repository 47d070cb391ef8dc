"""A trace that fails says so in our words: what, at which line of the user's, why, and what to write instead.

Errors of ours come out as they were raised, though TensorFlow wraps them. So do errors that the user's own code
raises. What TensorFlow and Keras raise becomes ours, of the same Python type besides (a ValueError stays one).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from whale_nebula.capture.baked import baked_reshape
from whale_nebula.capture.constants import MEND
from whale_nebula.capture.raised import Raised, unfiltered
from whale_nebula.capture.tracing import Tracing
from whale_nebula.errors import CaptureError, DataDependentError, NebulaError, StaticBatchError
from whale_nebula.tf import private as tf_private

Given = Sequence[tuple[str, Any]]
"""Names and specs of a step's tensors."""

_HINT = "whale_nebula: raised while the step was captured, where the number of rows is None until it runs"


@contextlib.contextmanager
def translated(trace: Tracing, given: Given = ()) -> Iterator[None]:
    """Around a trace: whatever it brings out is told in our words. `given` are the step's tensors."""
    try:
        with unfiltered(), tf_private.caching_device_kept():
            yield
    except NebulaError:
        raise
    except Exception as error:
        raised = Raised(error)
        ours = next((each for each in raised.chain if isinstance(each, NebulaError)), None)
        if ours is not None:
            raise ours from None
        told = _told(raised, trace, given)
        if told is not None:
            raise told from raised.shortened()
        error.add_note(_HINT)
        raise raised.shortened() from None


def _told(raised: Raised, trace: Tracing, given: Given) -> NebulaError | None:
    """The error in our words; None where the user's own code raised it."""
    if raised.deliberate and raised.source.startswith(("raise", "assert")):
        return None
    for rule in (_static, _data_dependent, _late_variable, _too_large):
        told = rule(raised, trace)
        if told is not None:
            return told
    return None if raised.deliberate else _refused(raised, given)


# ------------------------------------------------------------------------------------------ the number of rows
_PARTLY_KNOWN = ("partially known TensorShape", "Cannot infer argument `num` from shape", "None dimensions")


def _static(raised: Raised, trace: Tracing) -> NebulaError | None:
    """Something could not be done with None, where a shape was read or a reshape fixed the number of rows."""
    if not isinstance(raised.error, (TypeError, ValueError)) or "None" not in raised.text:
        return None
    reads = "shape" in raised.source or "len(" in raised.source or any(said in raised.text for said in _PARTLY_KNOWN)
    baked = baked_reshape(trace.graph) if not reads or "shape=(None" in raised.text else None
    if baked is not None or not reads:
        return None if baked is None else baked.error()
    return StaticBatchError(
        "the step reads the number of rows from a static shape",
        where=raised.line,
        why=f"the batch's first axis is captured as None: {raised.sentence}",
        mend="work on all rows at once, or tf.map_fn(f, x)" if "`num`" in raised.text else None,
    )


# -------------------------------------------------------------------------------------- the value of a tensor
_SYMBOLIC = ("SymbolicTensor", "symbolic `tf.Tensor`", "symbolic tf.Tensor")
_WAYS = {
    "no attribute 'numpy'": "leave .numpy() out and go on with the tensor; where Python must see the numbers: "
    "tf.py_function(f, [x], tf.float32)",
    "Python `bool`": "tf.cond(condition, lambda: a, lambda: b), or tf.where(condition, a, b)",
    "Iterating over": "work on all rows at once, or tf.map_fn(f, x)",
    "integer": "keep it a tensor: tf.range(n) in the place of range(n), tf.cast(n, tf.int32) in the place of int(n)",
    "int()": "keep it a tensor: tf.cast(t, tf.int32) in the place of int(t)",
    "float()": "keep it a tensor: tf.cast(t, tf.float32) in the place of float(t)",
    "numpy": "call TensorFlow's function in the place of NumPy's, tf.reduce_mean for np.mean; "
    "where it must be NumPy's: tf.numpy_function(f, [x], tf.float32)",
}


_LOOP = "tf.while_loop(condition, body, [x]), or tf.map_fn(f, x); under @nb.function, while on a tensor is one already"


def _data_dependent(raised: Raised, trace: Tracing) -> NebulaError | None:
    if not any(word in raised.text for word in _SYMBOLIC):
        return None
    ways = (way for said, way in _WAYS.items() if said in raised.text)
    loops = "Python `bool`" in raised.text and raised.source.lstrip().startswith("while")
    return DataDependentError(
        "Python asks for the value of a tensor",
        where=raised.line,
        why=f"while a step is captured a tensor has no value yet: {_first(raised.sentence)}",
        mend=_LOOP if loops else next(ways, None),
    )


def _first(text: str) -> str:
    """The first sentence: what follows in TensorFlow's is advice for other cases."""
    return text.partition(" You can attempt")[0].partition(" This error may indicate")[0]


# ------------------------------------------------------------------------------------- what a trace cannot hold
def _late_variable(raised: Raised, trace: Tracing) -> NebulaError | None:
    if "tf.function only supports singleton tf.Variables" not in raised.text:
        return None
    return _also(raised)(
        "the step makes a variable in a later trace",
        where=raised.line,
        why="a step may make its variables once, the first time it is captured; this one makes more of them",
        mend="make it once, outside of the step: in __init__ or build, or before the function",
    )


def _too_large(raised: Raised, trace: Tracing) -> NebulaError | None:
    if "larger than 2GB" not in raised.text:
        return None
    return _also(raised)(
        "a constant of the step is larger than 2 GB",
        where=raised.line,
        why=f"constants are part of the traced graph: {raised.sentence}",
        mend=MEND,
    )


_FEW = 12
_CORRECT = (
    "correct that line, or what the step is given; without scopes it fails alike, "
    "unless it needs the number of rows: tf.shape(x)[0]"
)
_ARRAYS = "give arrays, np.asarray(x): in a list each number is a tensor of its own"


def _refused(raised: Raised, given: Given) -> CaptureError:
    """TensorFlow or Keras does not take what the step does."""
    names = ", ".join(f"{name} {spec.dtype.name}{list(spec.shape)}" for name, spec in given[:_FEW])
    names += f" and {len(given) - _FEW} more" if len(given) > _FEW else ""
    several = sum(spec.shape.rank == 0 for _, spec in given) > _FEW
    return _also(raised)(
        f"the step cannot be traced: {raised.sentence}",
        where=raised.line,
        why=f"it raised a {type(raised.origin).__name__}; the step was given {names or 'no tensors'}",
        mend=_ARRAYS if several else _CORRECT + _not_a_batch(given),
    )


def _not_a_batch(given: Given) -> str:
    """The line for arguments with one axis, which is taken for a batch's: the state of an environment, say."""
    names = [name for name, spec in given if spec.shape.rank == 1 and spec.shape[0] is None]
    one_axis = f'whole=({", ".join(repr(name) for name in names)},)'.replace("'", '"')
    return f"\nor, where an argument with one axis is no batch: @nb.function({one_axis})" if names else ""


_PLAIN = frozenset({"ValueError", "TypeError", "AttributeError", "KeyError", "IndexError", "RuntimeError"})


def _also(raised: Raised) -> Callable[..., CaptureError]:
    """CaptureError, as a kind of the Python type that was raised: who expects a ValueError still finds one."""
    return _kind(next((kind for kind in type(raised.error).__mro__ if kind.__name__ in _PLAIN), Exception))


@cache
def _kind(python: type) -> type[CaptureError]:
    body = {"__doc__": CaptureError.__doc__, "__module__": CaptureError.__module__}
    return type("CaptureError", (CaptureError, python), body)
