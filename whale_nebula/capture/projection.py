"""A compress scope with a learned basis: where a tensor goes over to another stage, the model projects it.

While a step is traced, every op is looked at as it is made. One that reads a tensor of another stage, at a boundary
that `nb.compress(rank=r, basis="learned")` covers, is given another tensor to read::

    producer's stage                          consumer's stage
    x [..., n] ── @ down [n, r] ── z [..., r] ── @ up [r, n] ── x' [..., n] ── the op that would read x

So z is what crosses, in both directions, and a tape follows what is there. The two variables: see `bottlenecks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture import bottlenecks
from whale_nebula.capture.bottlenecks import Home
from whale_nebula.capture.hook import Hook
from whale_nebula.capture.mirror import COMPRESS, STAGE
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.codec import Codec, Rank
from whale_nebula.errors import NotYetError
from whale_nebula.scopes import Frame
from whale_nebula.tf import private as tf_private

_EPSILON = 1e-6
_BUNDLE = "IdentityN"


def projecting() -> AbstractContextManager[None]:
    """Look at the ops that are made while a step is traced; taken off when the last trace ends."""
    return _HOOK.held()


def learned(frame: Frame) -> Rank | None:
    """The learned basis that a compress scope asks for, if it does.

    >>> import whale_nebula as nb
    >>> with nb.cluster(), nb.compress(rank=4) as frame:
    ...     learned(frame)
    """
    codec = frame.options.get("codec")
    members = codec.members if isinstance(codec, Codec) else ()
    return next((part for part in members if isinstance(part, Rank) and part.basis == "learned"), None)


def given(graph: Any, op_type: str, inputs: Sequence[Any]) -> Sequence[Any]:
    """What an op that is about to be made in `graph` is to read, where it would read these."""
    trace = current()
    if trace is None or trace.busy or not any(map(learned, trace.compressions)):
        return inputs
    consumer = _consumer(trace, graph, op_type, inputs)
    if consumer is None:
        return inputs
    trace.busy = True
    try:
        return [_entering(trace, tensor, consumer) for tensor in inputs]
    finally:
        trace.busy = False


# ---------------------------------------------------------------------- who reads what
def _consumer(trace: Tracing, graph: Any, op_type: str, inputs: Sequence[Any]) -> str | None:
    """The stage in which an op will run: that of the scope that is open, else the latest that it reads from."""
    frame = scopes.stage_of(scopes.open_frames())
    if frame is not None:
        return trace.stage_of(frame)
    if graph is not trace.graph or op_type == _BUNDLE:
        return None
    home = _latest(trace, [home_of(trace, tensor) for tensor in inputs])
    return None if home is None else home.stage


def _latest(trace: Tracing, homes: Sequence[Home | None]) -> Home | None:
    """The latest of these homes: what most stages had to run for, else that of the stage which was entered last."""
    order = list(trace.stages)
    known = (home for home in homes if home is not None)
    return max(known, key=lambda home: (len(home.ran), order.index(home.stage)), default=None)


def home_of(trace: Tracing, tensor: Any) -> Home | None:
    """Where a tensor of the trace is made; None where it is made of inputs and variables alone.

    What bears no stamp is at home with the latest that it is made of, and what covers that covers it, too.
    """
    if getattr(tensor, "graph", None) is not trace.graph:
        return None
    homes, stack = trace.bottlenecks.homes, [tensor]
    while stack:
        top = stack[-1]
        above = _made_of(top)
        unknown = [each for each in above if each.ref() not in homes]
        if not unknown:
            homes[stack.pop().ref()] = _home(trace, top.op, [homes[each.ref()] for each in above])
        stack.extend(unknown)
    return homes[tensor.ref()]


def _made_of(tensor: Any) -> list[Any]:
    """The tensors that one is made of: of a bundle, only that which becomes it."""
    return [tensor.op.inputs[tensor.value_index]] if tensor.op.type == _BUNDLE else list(tensor.op.inputs)


def _home(trace: Tracing, op: Any, above: Sequence[Home | None]) -> Home | None:
    stage, compress = tf_private.stamp_of(op, STAGE), tf_private.number_on(op, COMPRESS)
    ran = frozenset[str]().union(*(home.ran for home in above if home is not None))
    if stage:
        return Home(stage, compress, ran | {stage})
    latest = _latest(trace, above)
    return latest and Home(latest.stage, latest.compress if compress is None else compress, ran)


# ---------------------------------------------------------------------- what it reads instead
def _entering(trace: Tracing, tensor: Any, consumer: str) -> Any:
    """A tensor as it is in the stage `consumer`."""
    home = home_of(trace, tensor)
    if home is None or home.stage == consumer:
        return tensor
    frame = _covering(trace, home)
    rank = learned(frame) if frame is not None else None
    if frame is None or rank is None or not tensor.dtype.is_floating or (tensor.shape.rank or 0) < 2:
        return tensor
    if not shrinks(tensor, rank):
        trace.bottlenecks.say(_whole(tensor, home.stage, rank))
        return tensor
    key = (tensor.ref(), consumer)
    if key not in trace.bottlenecks.entered:
        if tf_private.in_custom_gradient():
            raise _in_custom_gradient(frame)
        with trace.graph.as_default(), tf.control_dependencies(None):
            trace.bottlenecks.entered[key] = _projected(trace, tensor, rank, frame, home.stage, consumer)
    return trace.bottlenecks.entered[key]


def _in_custom_gradient(frame: Frame) -> NotYetError:
    """Its gradient is its own, and goes back to the tensor as it was before the basis."""
    return NotYetError(
        "a learned basis for a tensor that a tf.custom_gradient is the first to read",
        where=str(frame.site),
        why="its gradient would go past the basis, whose variables would have none",
        mend="read the tensor before that, in the stage that reads it: function(tf.identity(x))",
    )


def _covering(trace: Tracing, home: Home) -> Frame | None:
    """The compress scope around the producer, else around the consumer: see `passes.plan`."""
    if home.compress is None:
        return scopes.compress_of(scopes.open_frames())
    return trace.compressions[home.compress]


def _whole(tensor: Any, stage: str, rank: Rank) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in tensor.shape)
    what = f"{tensor.dtype.name}[{sizes}] of stage {stage!r}"
    return f"{what} crosses whole: a rank of {rank.r} would not make it shorter"


def shrinks(tensor: Any, rank: Rank) -> bool:
    """Whether a tensor has rows that a learned basis makes shorter; what has not crosses as it is."""
    columns = tensor.shape[-1] if tensor.dtype.is_floating and (tensor.shape.rank or 0) > 1 else None
    return columns is not None and columns > rank.r


def _projected(trace: Tracing, tensor: Any, rank: Rank, frame: Frame, producer: str, consumer: str) -> Any:
    known, columns = trace.bottlenecks, tensor.shape[-1]
    if tensor.ref() not in known.small:
        made = bottlenecks.found(known, tensor, producer, frame)
        down = made.down(columns, rank.r, frame)
        known.use(made.owner, down)
        known.say(f"{rank.r} numbers cross for every {columns} of a row, on the learned basis {down.path!r}")
        with _stamped(trace, made.name, {STAGE: producer, COMPRESS: trace.compression_of(frame)}):
            small = _times(_normed(tensor) if rank.norm else tensor, down)
        trace.masks.extend([(small, mask) for marked, mask in trace.masks if marked is tensor])
        known.small[tensor.ref()] = made, small
    made, small = known.small[tensor.ref()]
    up = made.up(consumer, columns, rank.r, frame)
    known.use(made.owner, up)
    with _stamped(trace, made.name, {STAGE: consumer}):
        found = _times(small, up)
        found.set_shape(tensor.shape)
        return found


@contextlib.contextmanager
def _stamped(trace: Tracing, name: str, stamps: dict[str, str | int]) -> Iterator[None]:
    """Ops made inside bear these stamps, and gradients flow through them, whatever tape is open here."""
    before = len(trace.graph.get_operations())
    with tf.name_scope(f"{name}/"), tf_private.stamped(trace.graph, stamps):
        yield
    trace.grown.update(op.name for op in trace.graph.get_operations()[before:])


def _times(tensor: Any, variable: Any) -> Any:
    return tf.tensordot(tensor, tf.cast(variable.value, tensor.dtype), 1)


def _normed(tensor: Any) -> Any:
    """Each row with mean zero and variance one."""
    mean, variance = tf.nn.moments(tensor, [-1], keepdims=True)
    return (tensor - mean) * tf.math.rsqrt(variance + _EPSILON)


_HOOK = Hook(lambda: tf_private.hook_ops(given), lambda: tf_private.hook_ops(None))
