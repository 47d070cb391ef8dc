"""Translate errors that are raised during a trace: what failed, on which line of the user's code, why, and what to
write instead.

Errors of this package and of the user's own code are raised unchanged, though TensorFlow wraps them. Errors of
TensorFlow and Keras become errors of this package that are also of the same Python type (a ValueError stays one).
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import TracebackType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from whale_nebula.capture.mirror import find_origin, is_library_file
from whale_nebula.capture.tracing import Tracing
from whale_nebula.errors import CaptureError, DataDependentError, NebulaError, StaticBatchError
from whale_nebula.passes.rules.verdict import free_row_count
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

_AUTOGRAPH_PREFIX = "__autograph_generated_file"
"""The prefix of the files with AutoGraph's copies of the user's functions."""
_IN_USER_CODE = "in user code:"
"""The beginning of AutoGraph's own description of an error."""

Place = tuple[str, int]


@dataclass(frozen=True)
class RaisedError:
    """An error as it left a trace."""

    error: Exception

    @cached_property
    def chain(self) -> tuple[BaseException, ...]:
        """The error and its causes, the last one first."""
        found: list[BaseException] = []
        error: BaseException | None = self.error
        while error is not None and error not in found:
            found.append(error)
            error = error.__cause__ or error.__context__
        return tuple(found)

    @cached_property
    def origin(self) -> BaseException:
        """The error before AutoGraph wrapped it."""
        return next((each for each in self.chain if not str(each).lstrip().startswith(_IN_USER_CODE)), self.error)

    @cached_property
    def text(self) -> str:
        """The whole message."""
        return str(self.origin).strip()

    @cached_property
    def sentence(self) -> str:
        """The message on one line."""
        return next((line.strip()[:400] for line in self.text.splitlines()), type(self.origin).__name__)

    @cached_property
    def place(self) -> Place | None:
        """The innermost line of the user's code that led to the error, as (file, line); None if there is none."""
        named = [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', str(self.error))]
        for places in [*map(_frames, self.chain), named]:
            for file, line in reversed(places):
                if not is_library_file(file) and not _is_autograph_copy(file):
                    return (file, line) if places is named or not named else named[-1]
        return None

    @property
    def line(self) -> str:
        """The source line as 'file.py:12'; if it is not in user code, the line that called the step."""
        return str(script_site()) if self.place is None else f"{self.place[0]}:{self.place[1]}"

    @property
    def source(self) -> str:
        """The text of the source line; "" if it is not in user code."""
        return "" if self.place is None else linecache.getline(*self.place).strip()

    @cached_property
    def is_deliberate(self) -> bool:
        """Whether the user's own code raised the error, not a library that it called."""
        places = _frames(self.origin)
        return bool(places) and (_is_autograph_copy(places[-1][0]) or not is_library_file(places[-1][0]))

    def shorten(self) -> Exception:
        """The error without the frames of libraries between the user's frames."""
        kept: TracebackType | None = None
        for frame, line in reversed(list(traceback.walk_tb(self.error.__traceback__))):
            if not is_library_file(frame.f_code.co_filename):
                kept = TracebackType(kept, frame, frame.f_lasti, line)
        return self.error.with_traceback(kept)


def _frames(error: BaseException) -> list[Place]:
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def _is_autograph_copy(file: str) -> bool:
    return os.path.basename(file).startswith(_AUTOGRAPH_PREFIX)


@contextlib.contextmanager
def keep_all_frames() -> Iterator[None]:
    """Keep all frames of errors in this thread while this is open, as they show which code raised them."""
    settings = [(each, each.is_traceback_filtering_enabled()) for each in (tf.debugging, keras.config)]
    for each, _ in settings:
        each.disable_traceback_filtering()
    try:
        yield
    finally:
        for each, enabled in settings:
            if enabled:
                each.enable_traceback_filtering()


class FixedReshape(NamedTuple):
    """A reshape that gives rows a fixed number."""

    op: Any
    sizes: Sequence[int]

    @property
    def line(self) -> str:
        """The user's source line of the reshape."""
        return str(find_origin(self.op))

    @property
    def mend(self) -> str:
        """The corrected reshape."""
        return f"tf.reshape(x, {free_row_count(self.sizes, self.op.inputs[0].shape.as_list())})"

    def error(self) -> StaticBatchError:
        """The error of a trace that needs sizes that the reshape leaves unknown."""
        return StaticBatchError(
            f"a batch size is baked in: rows are reshaped to {list(self.sizes)}",
            where=f"{self.op.name} (Reshape), {self.line}",
            why="the first axis of the batch is captured as None, so the other axes of this reshape cannot be inferred",
            mend=self.mend,
        )


def find_fixed_reshape(graph: Any) -> FixedReshape | None:
    """The first reshape of a traced graph, including gradients, that fixes the number of rows, if any."""
    for op in graph.get_operations() if graph is not None else []:
        own = op.type == "Reshape" and tf_private.find_forward_op(op) is op
        if own and op.inputs[0].shape.rank and op.inputs[0].shape[0] is None:
            value = tf.get_static_value(op.inputs[1])
            sizes = [] if value is None else [int(size) for size in value]
            if sizes and sizes[0] > 1:
                return FixedReshape(op, sizes)
    return None


CONSTANT_LIMIT = 2**31
CONSTANT_FIX = (
    "use a variable, tf.Variable(array, trainable=False), or pass it as an argument: @nb.function(whole=('table',))"
)


def check_constants(graph: Any) -> None:
    """Refuse a traced graph whose constants are too large, naming the largest."""
    constants = [op for op in graph.get_operations() if op.type == "Const"]
    total = sum(map(_count_bytes, constants))
    if total >= CONSTANT_LIMIT:
        largest = max(constants, key=_count_bytes)
        raise CaptureError(
            f"the constants of the step have {total / 1e9:.1f} GB",
            where=f"{largest.name} ({_count_bytes(largest) / 1e9:.1f} GB), {find_origin(largest)}",
            why="constants are part of the traced graph, which is limited to 2 GB",
            mend=CONSTANT_FIX,
        )


def _count_bytes(op: Any) -> int:
    tensor = op.outputs[0]
    return (tensor.shape.num_elements() or 0) * max(1, tensor.dtype.size)


TensorSpecs = Sequence[tuple[str, Any]]
"""Names and specs of a step's tensors."""

_HINT = "whale_nebula: raised while the step was captured, where the number of rows is None until it runs"


@contextlib.contextmanager
def translate_errors(traces: Sequence[Tracing], specs: TensorSpecs = ()) -> Iterator[None]:
    """Translate errors that tracing raises, around the last of these traces. `specs` are the step's tensors."""
    try:
        with keep_all_frames(), tf_private.restore_caching_device():
            yield
    except NebulaError:
        raise
    except Exception as error:
        raised = RaisedError(error)
        ours = next((each for each in raised.chain if isinstance(each, NebulaError)), None)
        if ours is not None:
            raise ours from None
        translated = _translate_error(raised, traces[-1].graph if traces else None, specs)
        if translated is not None:
            raise translated from raised.shorten()
        error.add_note(_HINT)
        raise raised.shorten() from None


def _translate_error(raised: RaisedError, graph: Any, specs: TensorSpecs) -> NebulaError | None:
    """The translated error; None if the user's own code raised it."""
    if raised.is_deliberate and raised.source.startswith(("raise", "assert")):
        return None
    translated = _find_static_batch(raised, graph)
    if translated is None and any(word in raised.text for word in _SYMBOLIC):
        loops = "Python `bool`" in raised.text and raised.source.lstrip().startswith("while")
        # the sentences after TensorFlow's first one are advice for other cases
        first = raised.sentence.partition(" You can attempt")[0].partition(" This error may indicate")[0]
        translated = DataDependentError(
            "Python code reads the value of a tensor",
            where=raised.line,
            why=f"a tensor has no value while the step is captured: {first}",
            mend=_LOOP_FIX if loops else next((fix for phrase, fix in _FIXES.items() if phrase in raised.text), None),
        )
    for phrase, (what, why, mend) in _UNSUPPORTED.items() if translated is None else ():
        if phrase in raised.text:
            return _choose_error_class(raised)(what, where=raised.line, why=why.format(raised.sentence), mend=mend)
    return translated if translated is not None or raised.is_deliberate else _explain_refusal(raised, specs)


# ------------------------------------------------------------------------------------------ the number of rows
_DYNAMIC_SHAPE = re.compile(r"\b(tf|ops)\.shape\(")  # never None
_PARTLY_KNOWN = ("partially known TensorShape", "Cannot infer argument `num` from shape", "None dimensions")


def _find_static_batch(raised: RaisedError, graph: Any) -> NebulaError | None:
    """The error for an operation that failed on None, after a shape was read or a reshape fixed the number of rows."""
    if not isinstance(raised.error, (TypeError, ValueError)) or "None" not in raised.text:
        return None
    source = _DYNAMIC_SHAPE.sub("", raised.source)
    reads = "shape" in source or "len(" in source or any(phrase in raised.text for phrase in _PARTLY_KNOWN)
    fixed_reshape = find_fixed_reshape(graph) if not reads or "shape=(None" in raised.text else None
    if fixed_reshape is not None or not reads:
        return None if fixed_reshape is None else fixed_reshape.error()
    return StaticBatchError(
        "the step reads the number of rows from a static shape",
        where=raised.line,
        why=f"the first axis of the batch is captured as None: {raised.sentence}",
        mend="compute all rows at once, or use tf.map_fn(f, x)" if "`num`" in raised.text else None,
    )


# -------------------------------------------------------------------------------------- the value of a tensor
_SYMBOLIC = ("SymbolicTensor", "symbolic `tf.Tensor`", "symbolic tf.Tensor")
_FIXES = {
    "no attribute 'numpy'": "remove .numpy() and use the tensor; where Python needs the numbers: "
    "tf.py_function(f, [x], tf.float32)",
    "Python `bool`": "use tf.cond(condition, lambda: a, lambda: b), or tf.where(condition, a, b)",
    "Iterating over": "compute all rows at once, or use tf.map_fn(f, x)",
    "integer": "keep it a tensor: tf.range(n) instead of range(n), tf.cast(n, tf.int32) instead of int(n)",
    "int()": "keep it a tensor: tf.cast(t, tf.int32) instead of int(t)",
    "float()": "keep it a tensor: tf.cast(t, tf.float32) instead of float(t)",
    "numpy": "use the TensorFlow function instead of NumPy's, such as tf.reduce_mean for np.mean; "
    "if it must be NumPy's: tf.numpy_function(f, [x], tf.float32)",
}


_LOOP_FIX = (
    "use tf.while_loop(condition, body, [x]) or tf.map_fn(f, x); @nb.function converts a while on a tensor itself"
)

# ------------------------------------------------------------------------------------- unsupported operations
_UNSUPPORTED = {
    "tf.function only supports singleton tf.Variables": (
        "the step creates a variable in a later trace",
        "a step may create variables only the first time it is captured",
        "create it once, outside the step: in __init__ or build, or before the function",
    ),
    "larger than 2GB": (
        "a constant of the step is larger than 2 GB",
        "constants are part of the traced graph: {}",
        CONSTANT_FIX,
    ),
}
"""By TensorFlow's message: what happened, why (with TensorFlow's sentence) and the fix."""


_MAX_SHOWN = 12
_CORRECTION = (
    "correct that line, or the arguments of the step; most such steps fail without scopes as well, "
    "unless they need the number of rows: tf.shape(x)[0]"
)
_ARRAYS_FIX = "pass arrays, np.asarray(x): in a list each number is a separate tensor"


def _explain_refusal(raised: RaisedError, specs: TensorSpecs) -> CaptureError:
    """The error for a step that TensorFlow or Keras rejects."""
    names = ", ".join(f"{name} {spec.dtype.name}{list(spec.shape)}" for name, spec in specs[:_MAX_SHOWN])
    names += f" and {len(specs) - _MAX_SHOWN} more" if len(specs) > _MAX_SHOWN else ""
    several = sum(spec.shape.rank == 0 for _, spec in specs) > _MAX_SHOWN
    # a tensor with one axis is assumed to be batched, which may be wrong: the state of an environment, for example
    rows = [f'"{name}"' for name, spec in specs if spec.shape.rank == 1 and spec.shape[0] is None]
    whole = f"\nor, if an argument with one axis is not a batch: @nb.function(whole=({', '.join(rows)},))"
    return _choose_error_class(raised)(
        f"the step cannot be traced: {raised.sentence}",
        where=raised.line,
        why=f"it raised {type(raised.origin).__name__}; the arguments of the step are {names or 'no tensors'}",
        mend=_ARRAYS_FIX if several else _CORRECTION + whole * bool(rows),
    )


_PYTHON_KINDS = frozenset({"ValueError", "TypeError", "AttributeError", "KeyError", "IndexError", "RuntimeError"})


def _choose_error_class(raised: RaisedError) -> Callable[..., CaptureError]:
    """A subclass of CaptureError and of the Python type that was raised, so that `except ValueError` still works."""
    return _make_error_class(
        next((kind for kind in type(raised.error).__mro__ if kind.__name__ in _PYTHON_KINDS), Exception)
    )


@cache
def _make_error_class(python: type) -> type[CaptureError]:
    body = {"__doc__": CaptureError.__doc__, "__module__": CaptureError.__module__}
    return type("CaptureError", (CaptureError, python), body)
