"""Insert the projections of a learned basis where a tensor crosses a boundary inside a compress scope with one.

While a step is traced, every new op is examined. If it reads a tensor of another stage, at a boundary that
`nb.compress(rank=r, basis="learned")` covers, that input is replaced::

    producer's stage                          consumer's stage
    x [..., n] ── @ down [n, r] ── z [..., r] ── @ up [r, n] ── x' [..., n] ── the op that would read x

So z and its gradient cross, and a tape records these ops. For the variables see `bottlenecks`: with `basis="svd"` they
are initialised with the singular vectors of the linear layer that produces x.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.capture import bottlenecks
from whale_nebula.capture.bottlenecks import Bottlenecks, Home, find_factors
from whale_nebula.capture.entered_scopes import number_scope
from whale_nebula.capture.mirror import COMPRESS, STAGE, find_origin, iterate_ancestors, order_operations
from whale_nebula.capture.tracing import Tracing, current_trace
from whale_nebula.codec import Rank
from whale_nebula.errors import GradientError, NotYetError
from whale_nebula.ir.program import Program
from whale_nebula.scopes.compress_options import find_learned_rank
from whale_nebula.scopes.frames import Frame, compress_of, open_frames, stage_of
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

_EPSILON = 1e-6
_BUNDLE = "IdentityN"


def project_inputs(graph: Any, op_type: str, inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs of an op that is about to be created in `graph`, with crossing tensors replaced by projected ones."""
    trace = current_trace()
    if trace is None or trace.flags.busy or not any(map(find_learned_rank, trace.entered_scopes.compressions)):
        return inputs
    consumer = _find_consumer(trace, graph, op_type, inputs)
    if consumer is None:
        return inputs
    with trace.set_flags(busy=True):
        return [_enter_stage(trace, tensor, consumer) for tensor in inputs]


# ---------------------------------------------------------------------- stages of readers
def _find_consumer(trace: Tracing, graph: Any, op_type: str, inputs: Sequence[Any]) -> str | None:
    """The stage in which an op will run: that of the open scope, otherwise the latest of its inputs."""
    frame = stage_of(open_frames())
    if frame is not None:
        return trace.entered_scopes.stage_of(frame)
    if graph is not trace.graph or op_type == _BUNDLE:
        return None
    home = _find_latest(trace, [find_home(trace, tensor) for tensor in inputs])
    return None if home is None else home.stage


def _find_latest(trace: Tracing, homes: Sequence[Home | None]) -> Home | None:
    """The latest of these homes: the one that depends on most stages, otherwise that of the stage entered last."""
    order = list(trace.entered_scopes.stages)
    known = (home for home in homes if home is not None)
    return max(known, key=lambda home: (len(home.past_stages), order.index(home.stage)), default=None)


def find_home(trace: Tracing, tensor: Any) -> Home | None:
    """The origin of a traced tensor; None if it depends on no stage: on inputs and variables only.

    A tensor of an unstamped op has the latest home of its inputs, and the compress scope of that.
    """
    if getattr(tensor, "graph", None) is not trace.graph:
        return None
    homes, stack = trace.bottlenecks.homes, [tensor]
    while stack:
        top = stack[-1]
        op = top.op
        above = [op.inputs[top.value_index]] if op.type == _BUNDLE else list(op.inputs)
        unknown = [each for each in above if each.ref() not in homes]
        if not unknown:
            homes[stack.pop().ref()] = _combine_homes(trace, op, [homes[each.ref()] for each in above])
        stack.extend(unknown)
    return homes[tensor.ref()]


def _combine_homes(trace: Tracing, op: Any, above: Sequence[Home | None]) -> Home | None:
    stage, compress = tf_private.read_text_stamp(op, STAGE), tf_private.read_number_stamp(op, COMPRESS)
    past_stages = frozenset[str]().union(*(home.past_stages for home in above if home is not None))
    if stage:
        return Home(stage, compress, past_stages | {stage})
    latest = _find_latest(trace, above)
    return latest and Home(latest.stage, latest.compress if compress is None else compress, past_stages)


# ---------------------------------------------------------------------- projected inputs
def _enter_stage(trace: Tracing, tensor: Any, consumer: str) -> Any:
    """The tensor as seen by the stage `consumer`: projected if it crosses on a learned basis."""
    home = find_home(trace, tensor)
    if home is None or home.stage == consumer:
        return tensor
    # the compress scope around the producer, otherwise around the consumer: see `passes.codec_options`
    here = compress_of(open_frames())
    frame = here if home.compress is None else trace.entered_scopes.compressions[home.compress]
    rank = find_learned_rank(frame) if frame is not None else None
    if frame is None or rank is None or not tensor.dtype.is_floating or (tensor.shape.rank or 0) < 2:
        return tensor
    if not is_shorter_projected(tensor, rank):
        sizes = ", ".join("?" if size is None else str(size) for size in tensor.shape)
        what = f"{tensor.dtype.name}[{sizes}] of stage {home.stage!r}"
        trace.bottlenecks.add_note(f"{what} is sent without a basis: a rank of {rank.r} would not make it smaller")
        return tensor
    key = (tensor.ref(), consumer)
    if key not in trace.bottlenecks.entered:
        if tf_private.is_in_custom_gradient():  # its gradient is that of the tensor before the projection
            raise NotYetError(
                "a learned basis for a tensor that is first read by a tf.custom_gradient",
                where=str(frame.site),
                why="the gradient would bypass the basis, and its variables would get none",
                mend="read the tensor with another op first, in the same stage: function(tf.identity(x))",
            )
        with trace.graph.as_default(), tf.control_dependencies(None):
            trace.bottlenecks.entered[key] = _project(trace, tensor, rank, frame, home.stage, consumer)
    return trace.bottlenecks.entered[key]


def is_shorter_projected(tensor: Any, rank: Rank) -> bool:
    """Whether a learned basis shortens the tensor's rows; otherwise it crosses unchanged."""
    columns = tensor.shape[-1] if tensor.dtype.is_floating and (tensor.shape.rank or 0) > 1 else None
    return columns is not None and columns > rank.r


def _project(trace: Tracing, tensor: Any, rank: Rank, frame: Frame, producer: str, consumer: str) -> Any:
    known, columns = trace.bottlenecks, tensor.shape[-1]
    if tensor.ref() not in known.projected:
        factors = functools.cache(lambda: find_factors(tensor, rank.r, frame)) if rank.basis == "svd" else None
        made = bottlenecks.find_bottleneck(known, tensor, producer, frame, factors)
        down = made.get_down(columns, rank.r, frame)
        known.record_use(made.owner, down)
        crossing = f"{rank.r} numbers cross for every {columns} of a row"
        if factors is None:
            known.add_note(f"{crossing}, on the learned basis {down.path!r}")
        else:
            known.add_note(f"{crossing}, on singular vectors of the layer that is cut: {down.path!r}")
        with _stamp_ops(
            trace, made.name, {STAGE: producer, COMPRESS: number_scope(trace.entered_scopes.compressions, frame)}
        ):
            rows = tensor
            if rank.norm:  # each row with mean zero and variance one
                mean, variance = tf.nn.moments(tensor, [-1], keepdims=True)
                rows = (tensor - mean) * tf.math.rsqrt(variance + _EPSILON)
            projected = _multiply(rows, down)
        trace.masks.extend([(projected, mask) for marked, mask in trace.masks if marked is tensor])
        known.projected[tensor.ref()] = made, projected
    made, projected = known.projected[tensor.ref()]
    up = made.get_up(consumer, columns, rank.r, frame)
    known.record_use(made.owner, up)
    offset = made.offset(consumer)
    if offset is not None:
        known.record_use(made.owner, offset)
    with _stamp_ops(trace, made.name, {STAGE: consumer}):
        found = _multiply(projected, up)
        if offset is not None:
            found = found + tf.cast(offset.value, found.dtype)
        found.set_shape(tensor.shape)
        return found


@contextlib.contextmanager
def _stamp_ops(trace: Tracing, name: str, stamps: dict[str, str | int]) -> Iterator[None]:
    """Stamp ops created inside, and let gradients flow through them with any tape."""
    before = len(trace.graph.get_operations())
    with tf.name_scope(f"{name}/"), tf_private.stamp_ops(trace.graph, stamps):
        yield
    trace.grown.update(op.name for op in trace.graph.get_operations()[before:])


def _multiply(tensor: Any, variable: Any) -> Any:
    return tf.tensordot(tensor, tf.cast(variable.value, tensor.dtype), 1)


# ---------------------------------------------------------------------- refused steps
def check_unprojected(trace: Tracing, program: Program) -> None:
    """Refuse a step in which a tensor under a learned basis crosses unprojected, because its crossing was detected too
    late.
    """
    if not any(map(find_learned_rank, trace.entered_scopes.compressions)):
        return
    operations, labels = order_operations(trace.graph.get_operations()), program.labels
    # only reads of the forward cross, not those of gradients or updates
    first = min((request.start for request in program.requests), default=len(program.graph.ops))
    backward = frozenset(op for request in program.requests for op in request.backward)
    for op in program.graph.ops:
        if op.index not in labels or op.index in backward or (op.stage is None and op.index >= first):
            continue
        for value in op.inputs:
            tensor = operations[value.op].outputs[value.out]
            apart = labels.get(value.op, labels[op.index]) != labels[op.index]
            home = find_home(trace, tensor) if apart else None
            number = None if home is None else op.compress if home.compress is None else home.compress
            rank = None if number is None else find_learned_rank(trace.entered_scopes.compressions[number])
            if rank is not None and is_shorter_projected(tensor, rank):
                raise NotYetError(
                    f"a learned basis for {tensor.name!r}, which is read by an op without a stage",
                    where=find_origin(operations[op.index]),
                    why="the tensor is projected where an op of another stage reads it, and this op has no stage yet",
                    mend="move the op that reads it into its nb.stage, "
                    "and into nb.compress if that encloses the reader",
                )


def check_nested(bottlenecks: Bottlenecks, targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Refuse a nested gradient through a bottleneck: it would need the complete tensor there."""
    smalls = [projected for _, projected in bottlenecks.projected.values()]
    if not smalls:
        return
    inner = {id(external): internal for external, internal in smalls[0].graph.captures}
    handles = [getattr(source, "handle", source) for source in sources if source is not None]
    wanted = {getattr(inner.get(id(each), each), "op", None) for each in handles}
    ends = [target.op for target in targets if hasattr(target, "graph")]
    above = set(iterate_ancestors(ends, lambda op: True))
    between = [projected.op for projected in smalls if projected.op in above]
    if not wanted.isdisjoint(iterate_ancestors(between, lambda op: True)):
        raise NotYetError(
            "a second-order gradient through a learned basis",
            where=str(script_site()),
            why="values computed from the inner gradient need the complete tensor that crossed",
            mend="compute the inner gradient within one stage, or remove basis=",
        )


def check_variable_list(bottlenecks: Bottlenecks) -> None:
    """Refuse a list of variables created before the first trace: those of the bottleneck would not be trained."""
    own = {_handle(variable) for _, variable in bottlenecks.used_variables.values()}
    for owner, variable in bottlenecks.used_variables.values():
        others = {_handle(other) for other in owner.trainable_variables} - own
        if (
            variable.trainable
            and _handle(variable) not in bottlenecks.differentiated
            and others
            and others <= bottlenecks.differentiated
        ):
            raise GradientError(
                f"gradients are requested for variables of {owner.name!r}, but not for {variable.path!r}",
                where=str(script_site()),
                why="the list was created before the first call of the model, when its learned basis had no variables",
                mend=f"tape.gradient(loss, {owner.name}.trainable_variables) in the step, after the model is called",
            )


def _handle(variable: Any) -> int:
    return id(getattr(variable, "value", variable).handle)
