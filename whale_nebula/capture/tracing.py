"""The trace in progress: the scopes entered so far, its gradient requests, and the watcher that stamps ops.

Contexts around a step that change what it computes, such as a distribution strategy, are refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.capture.bottlenecks import Bottlenecks
from whale_nebula.capture.entered_scopes import EnteredScopes, number_scope
from whale_nebula.capture.mirror import COMPRESS, COPIED, SPLIT, STAGE
from whale_nebula.capture.splits import mark_variables
from whale_nebula.errors import BoundaryInBodyError, OptionError, StateError, UnsupportedError
from whale_nebula.ir.program import Assignment
from whale_nebula.scopes.compress_options import find_learned_rank
from whale_nebula.scopes.frames import Frame, open_frames
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

_started_before_fork = False


def _note_fork() -> None:
    global _started_before_fork
    _started_before_fork = tf_private.is_runtime_started()


os.register_at_fork(after_in_child=_note_fork)


def check_context() -> None:
    """Refuse a step in a TensorFlow context that a plan cannot reproduce."""
    if _started_before_fork:
        raise StateError(
            "this process was forked after TensorFlow had started",
            where=_find_line(),
            why="a fork does not copy TensorFlow's threads, and a step would wait for them forever",
            mend='use multiprocessing.get_context("spawn"), or fork before TensorFlow computes anything',
        )
    if tf.config.functions_run_eagerly():
        raise UnsupportedError(
            "tf.config.run_functions_eagerly(True) is not compatible with scopes",
            where=_find_line(),
            why="an eager step is never traced, so it cannot be divided into stages",
            mend="tf.config.run_functions_eagerly(False); to debug eagerly, remove the scopes",
        )
    if tf_private.is_debugger_active():
        raise UnsupportedError(
            "tf.debugging.enable_check_numerics() (or a similar debugger) is not compatible with scopes",
            where=_find_line(),
            why="it adds an op to every traced op, including those of the plan",
            mend="tf.debugging.disable_check_numerics(); in a layer, use tf.debugging.check_numerics(tensor, message)",
        )
    check_strategy(_find_line)
    if not tf.executing_eagerly():
        raise UnsupportedError(
            "a step is called inside a tf.function or the map function of a dataset",
            where=_find_line(),
            why="a plan runs its step in separate parts, which cannot be inside a TensorFlow function",
            mend="use @nb.function on the outer function, too, or instead: whatever it calls becomes part of its step",
        )


def check_strategy(where: Callable[[], str]) -> None:
    """Refuse a `tf.distribute` strategy around a scope; `where` gives the line of the scope, for the error."""
    if tf.distribute.has_strategy():
        raise make_strategy_error(tf.distribute.get_strategy(), where())


def make_strategy_error(strategy: tf.distribute.Strategy, where: str) -> UnsupportedError:
    """The error for a TensorFlow strategy around scopes of this package."""
    name = type(strategy).__name__
    return UnsupportedError(
        f"tf.distribute.{name} is used around scopes",
        where=where,
        why="both determine where the step runs: the strategy copies it, and a plan divides it",
        mend=f"remove {name}.scope() and {name}.run; scopes determine which cluster runs what",
    )


def _find_line() -> str:
    """The user's source line, or "" in a thread that a strategy has started."""
    site = script_site()
    return str(site) if site.line else ""


@dataclass
class LiveRequest:
    """A gradient request during the trace: with tensors, not yet op numbers. See `ir.program.Request`."""

    before: frozenset[str]
    targets: list[Any]
    sources: list[str]
    origins: list[Any] = field(default_factory=list)
    backward: frozenset[str] = frozenset()
    holders: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)
    arrivals: list[tuple[Any, Any]] = field(default_factory=list)
    flows: list[tuple[int, Any, Any]] = field(default_factory=list)
    created_ops: list[tuple[int, Any]] = field(default_factory=list)
    parts: list[tuple[int, int, tuple[Any, ...]]] = field(default_factory=list)
    user_seeds: list[Any] = field(default_factory=list)


@dataclass
class Flags:
    """State of a trace: inside our own ops, the body of `tf.vectorized_map`, or a function that XLA will compile."""

    busy: bool = False
    vectorizing: bool = False
    compiled: bool = False


@dataclass
class Tracing:
    """The record of one trace of a step in `graph`, with the inputs `leaves`, some of them `batched`.

    `places` is a `layer_placement.Places` if a model is placed. A `plain` trace belongs to a step that runs uncut:
    TensorFlow computes its gradients, and only projections are applied (see `projection`). `assignment` has the stages
    of a step without scopes, by the paths of its variables, and `handles` these paths by the id of the handle. `scopes`
    has the name scope in which a tape recorded an op.
    """

    graph: Any
    leaves: Sequence[Any]
    batched: Sequence[bool] = ()
    bottlenecks: Bottlenecks = field(default_factory=Bottlenecks)
    plain: bool = False
    places: Any = None
    flags: Flags = field(default_factory=Flags)
    entered_scopes: EnteredScopes = field(default_factory=EnteredScopes)
    requests: list[LiveRequest] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    feeds: dict[str, Any] = field(default_factory=dict)
    loss_weights: list[Any] = field(default_factory=list)
    masks: list[tuple[Any, Any]] = field(default_factory=list)
    draws: list[Any] = field(default_factory=list)
    summed: list[Any] = field(default_factory=list)
    grown: set[str] = field(default_factory=set)
    tapes: list[Any] = field(default_factory=list)
    scopes: dict[str, str] = field(default_factory=dict)
    assignment: Assignment | None = None
    handles: Mapping[int, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def set_flags(self, **flags: bool) -> Iterator[None]:
        """Set flags while this is open, and restore them afterwards."""
        before = dict(vars(self.flags))
        vars(self.flags).update(flags)
        try:
            yield
        finally:
            vars(self.flags).update(before)

    def feed(self, name: str) -> Any:
        """A float32 scalar that the runtime fills for each micro-batch: 'share' or 'grow'."""
        if name not in self.feeds:
            with self.graph.as_default(), tf.control_dependencies(None):
                self.feeds[name] = tf.compat.v1.placeholder(tf.float32, [], name=f"nebula_{name}")
        return self.feeds[name]


class _Local(threading.local):
    tracing: Tracing | None = None
    uncut = False


_LOCAL = _Local()


def current_trace() -> Tracing | None:
    """The current trace of this thread, if any."""
    return _LOCAL.tracing


def current_graph_trace() -> Tracing | None:
    """The current trace of this thread if new ops belong to its own graph, not to a body in it; otherwise None."""
    trace = current_trace()
    return trace if trace is not None and tf.compat.v1.get_default_graph() is trace.graph else None


@contextlib.contextmanager
def tracing(trace: Tracing) -> Iterator[Tracing]:
    """Make `trace` the current one of this thread."""
    before = current_trace()
    _LOCAL.tracing = trace
    try:
        yield trace
    finally:
        _LOCAL.tracing = before


@contextlib.contextmanager
def uncut() -> Iterator[None]:
    """Context of a step that intentionally runs uncut: scopes that this thread enters are ignored."""
    before = _LOCAL.uncut
    _LOCAL.uncut = True
    try:
        yield
    finally:
        _LOCAL.uncut = before


def is_uncut_on_purpose() -> bool:
    """Whether the running code is intentionally uncut: the oracle, Keras's shape inference, or an export of a model."""
    return _LOCAL.uncut or tf_private.in_symbolic_scope() or tf_private.is_exporting()


def is_waiting_for_plan() -> bool:
    """Whether ops are created for a step, whose variables get their values when it is planned, or for Keras's shape
    inference.
    """
    trace = current_trace()
    captured = tf_private.in_symbolic_scope() or (trace is not None and not trace.plain)
    return captured and not tf.executing_eagerly()


class Stamper:
    """A watcher of scopes: while a step is traced, a scope stamps the ops created inside it."""

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        """A context for the body of a scope that stamps the ops created in it."""
        trace = current_trace()
        if frame.kind == "stage" and not is_uncut_on_purpose():
            check_strategy(lambda: str(frame.site))
        if trace is None or tf_private.in_symbolic_scope():  # Keras infers shapes, to build
            frame.touched = frame.touched or (is_uncut_on_purpose() and not frame.building)
            with mark_variables(frame, is_waiting_for_plan) if frame.kind == "split" else contextlib.nullcontext():
                yield
            return
        frame.touched = True
        stamps = _record_scope(trace, frame)
        with tf_private.stamp_ops(tf.compat.v1.get_default_graph(), stamps) if stamps else contextlib.nullcontext():
            yield


def _record_scope(trace: Tracing, frame: Frame) -> dict[str, str | int]:
    """Record a scope that is entered; returns the attributes of the ops created inside it."""
    if frame.kind in ("cluster", "replica", "pipeline"):
        trace.entered_scopes.outer = trace.entered_scopes.outer or frame
    if frame.kind == "cluster":
        trace.entered_scopes.cluster_blocks.append(frame)
    if frame.kind == "pipeline":
        trace.entered_scopes.enter_pipeline(frame)
    if frame.kind == "replica":
        trace.entered_scopes.replicas.enter(frame)
        return {COPIED: 1} if current_graph_trace() is not None else {}
    if frame.kind == "compress":
        trace.entered_scopes.replicas.enter_compress(open_frames())
    if frame.kind not in ("stage", "compress", "split"):
        return {}
    graph = tf.compat.v1.get_default_graph()
    if graph is not trace.graph or trace.flags.vectorizing:
        raise body_error(frame, None if graph is trace.graph else graph.name, compiled=trace.flags.compiled)
    if frame.kind == "compress" and trace.entered_scopes.step_options.compress is not None:
        check_replaceable(frame, trace.entered_scopes.step_options.compress)
        return {}
    if frame.kind == "stage":
        return {STAGE: trace.entered_scopes.stage_of(frame)}
    if frame.kind == "split":
        return {SPLIT: trace.entered_scopes.enter_split(frame)}
    return {COMPRESS: number_scope(trace.entered_scopes.compressions, frame)}


def check_replaceable(frame: Frame, replacement: Frame) -> None:
    """Refuse to replace the codec of a compress scope by that of `replacement` if its basis is a part of the model."""
    if find_learned_rank(frame) is not None:
        raise OptionError(
            "a curriculum has codecs by length, and nb.compress here has a basis that is learned",
            where=str(frame.site),
            why="that basis is a part of the model, which is the same for all lengths",
            mend=f"leave compress= out of the curriculum at {replacement.site}, or the basis out of this nb.compress",
        )


@contextlib.contextmanager
def stamp_step_options(trace: Tracing) -> Iterator[None]:
    """Mark all ops that a trace makes with the codec that replaces those of its scopes, if there is one."""
    frame = trace.entered_scopes.step_options.compress
    if frame is None:
        yield
        return
    with tf_private.stamp_ops(trace.graph, {COMPRESS: number_scope(trace.entered_scopes.compressions, frame)}):
        yield


_LOOP = (
    "a loop (tf.while_loop, tf.map_fn, tf.scan, an RNN, or a Python loop that AutoGraph turned into one)",
    "enter nb.{kind} around the whole loop, which then is part of that stage; or, if each pass is a training step, "
    "decorate only the body with @nb.function, and loop in Python outside of it",
)
_BRANCH = ("a branch (tf.cond, or an if on a tensor)", "enter nb.{kind} around the whole condition")
_DATASET = (
    "a loop over a dataset, or a function of one (tf.data runs it)",
    "decorate only the body with @nb.function, and loop outside of it: for batch in dataset: step(*batch)",
)
_VECTORIZED = ("tf.vectorized_map", "enter nb.{kind} around the tf.vectorized_map")
_FUNCTION = (
    "a nested tf.function",
    "enter nb.{kind} around the call of that function, or define it without @tf.function",
)
_COMPILED = (
    "a tf.function with jit_compile=True",
    "remove jit_compile=True, so that the function becomes part of the step; or enter nb.{kind} around its call",
)
# the name of a kind of body, and the fix, by a part of the name of the body's graph in TensorFlow
_BODIES = {
    "while_body": _LOOP, "while_cond": _LOOP, "cond_true": _BRANCH, "cond_false": _BRANCH, "branch": _BRANCH,
    "Dataset_": _DATASET,
}  # fmt: skip


def body_error(frame: Frame, graph: str | None, *, compiled: bool = False) -> BoundaryInBodyError:
    """The error for a scope entered in a body; `graph` is the name of the body's graph, if it has one."""
    other = _COMPILED if compiled else _FUNCTION
    found = (body for part, body in _BODIES.items() if graph is not None and part in graph)
    called, mend = _VECTORIZED if graph is None else next(found, other)
    return BoundaryInBodyError(
        f"nb.{frame.kind} is entered inside {called}",
        where=str(frame.site),
        why="TensorFlow runs such a body as one op, so a boundary inside it is not possible",
        mend=mend.format(kind=frame.kind),
    )
