"""Build gradients inside the trace where a tape requests them; elsewhere TensorFlow computes them.

From the last stage to the first, each stage's ops are differentiated with respect to its boundary inputs, its variables
and the sources in it; a boundary's gradient enters the previous stage through a placeholder. The user's code gets
placeholders of the same kind (None, dense, IndexedSlices) and continues to trace its update.

::

    stage 0            stage 1            stage 2 (has the loss)
    forward ──value──▶ forward ──value──▶ forward
    backward ◀─feed─── backward ◀─feed─── backward

A gradient that depends only on a micro-batch's share and on constants (such as that of a weight penalty added to the
loss) is not sent: the previous stage computes it itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from whale_nebula.capture.loss_weights import check_overwritten, mirror_trace, weight_seeds
from whale_nebula.capture.mirror import find_origin, iterate_ancestors, order_operations
from whale_nebula.capture.projection import check_nested
from whale_nebula.capture.tracing import LiveRequest, Tracing, current_trace
from whale_nebula.errors import GradientError, PlanError
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.checks import backward_flow_error, check_order
from whale_nebula.passes.label import label_ops
from whale_nebula.passes.readings import bind_readers
from whale_nebula.site import script_site
from whale_nebula.tf import gradients
from whale_nebula.tf import private as tf_private

Tensor = Any


def differentiate(
    trace: Tracing,
    tape: tf.GradientTape | None,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    seeds: Sequence[Any],
    stops: Sequence[Tensor] = (),
) -> list[Any]:
    """The gradients of `targets` for each of `sources`, as placeholders (or None) that the runtime fills.

    Gradients flow through tensors recorded by `tape`; without one, through all but `stops`.
    """
    trace.bottlenecks.differentiated.update(id(_handle(source)) for source in sources)
    before = frozenset(op.name for op in trace.graph.get_operations())
    user_seeds = [seed for seed in seeds if isinstance(seed, tf.Tensor) and getattr(seed, "graph", None) is trace.graph]
    seeds = weight_seeds(trace, targets, seeds)
    operations = order_operations(trace.graph.get_operations())
    # the ops that weigh the seeds belong to the target's stage, like all ops differentiated there
    weighing = iterate_ancestors((s.op for s in seeds), lambda op: op.name not in before and op.type != "Placeholder")
    own = {op.name for op in weighing}
    request = LiveRequest(
        before=frozenset(op.name for op in operations) - own,
        targets=list(targets),
        sources=[str(getattr(s, "path", None) or getattr(s, "name", "tensor")) for s in sources],
        user_seeds=user_seeds,
    )
    trace.labels = {name: stage for name, stage in _label_stages(trace, operations).items() if name not in own}
    stopped = {tensor.ref() for tensor in stops}
    everywhere = contextlib.nullcontext(lambda tensor: tensor.ref() not in stopped)
    with everywhere if tape is None else tf_private.reopen_tape(tape) as is_followed:
        region = _Region(trace, operations, [_handle(s) for s in sources], is_followed, request)
        region.find_reached()
    if tape is not None:
        region.order = gradients.TapeOrder(region.rank_operations(targets), trace.scopes)
    request.origins = [s if getattr(s, "graph", None) is trace.graph else None for s in region.sources]
    region.build(list(targets), list(seeds))
    request.backward = frozenset(op.name for op in trace.graph.get_operations() if op.name not in request.before)
    trace.requests.append(request)
    return [_make_holder(request, number, source) for number, source in enumerate(sources)]


def _label_stages(trace: Tracing, operations: Sequence[Any]) -> dict[str, int]:
    """Assign stages to the ops traced so far; labels of earlier requests are kept."""
    graph = mirror_trace(trace)
    if not trace.requests:
        trace.entered_scopes.order_stages(graph)
    numbers = {op.name: index for index, op in enumerate(operations)}
    fixed = {numbers[name]: stage for name, stage in trace.labels.items()}
    skip = frozenset(numbers[name] for r in trace.requests for name in r.backward)
    found = label_ops(
        graph, list(trace.entered_scopes.stages), fixed=fixed, skip=skip, bound=bind_ops(trace, graph, numbers)
    )
    if not trace.requests:  # later requests may belong to another phase, which may begin at the first stage again
        check_order(
            graph, found, tuple(trace.entered_scopes.stages.values()), where=lambda op: find_origin(operations[op])
        )
    names = [op.name for op in operations]
    return {names[index]: stage for index, stage in found.items()}


def bind_ops(trace: Tracing, graph: Graph, numbers: Mapping[str, int]) -> dict[int, frozenset[int]]:
    """The ops that read an input which some clusters do not have, each with the stages that may run it."""
    homes = {} if trace.assignment is None else trace.assignment.homes
    leaves = [numbers[leaf.op.name] for leaf in trace.leaves] if homes else []
    return bind_readers(graph, leaves, homes, [stage.cluster for stage in trace.entered_scopes.stages.values()])


@dataclass
class _Region:
    """The part of the trace between the targets and sources of a request, differentiated stage by stage.

    `reachable_tensors` depend on a source, so that gradients flow through them; `local_gradients` are the boundaries
    whose gradient each stage computes itself.
    """

    trace: Tracing
    operations: Sequence[Any]
    sources: list[Tensor]
    is_followed: Callable[[Tensor], bool]
    request: LiveRequest
    reachable_tensors: set[Any] = field(default_factory=set)
    local_gradients: set[Any] = field(default_factory=set)
    order: gradients.TapeOrder | None = None

    def find_reached(self) -> None:
        """Find the tensors that the tape recorded from a source: gradients flow only through these."""
        inner = {id(external): internal for external, internal in self.trace.graph.captures}
        self.sources = [inner.get(id(source), source) for source in self.sources]
        self.reachable_tensors = {source.ref() for source in self.sources}
        for op in self.operations:
            if any(tensor.ref() in self.reachable_tensors for tensor in op.inputs):
                ours = op.name in self.trace.grown
                followed = (
                    t for t in op.outputs if ours or t.dtype in (tf.variant, tf.resource) or self.is_followed(t)
                )
                self.reachable_tensors.update(t.ref() for t in followed)

    def rank_operations(self, targets: Sequence[Tensor]) -> dict[Any, int]:
        """The ops between targets and sources in the order in which a tape visits them: an op follows its readers."""
        readers, seen, stack = Counter[Any](), set[Any](), [target.op for target in targets]
        while stack:
            op = stack.pop()
            if op not in seen:
                seen.add(op)
                recorded = [tensor.op for tensor in op.inputs if tensor.ref() in self.reachable_tensors]
                readers.update(recorded)
                stack += recorded
        ready = deque(op for op in dict.fromkeys(target.op for target in targets) if not readers[op])
        ranks: dict[Any, int] = {}
        while ready:
            op = ready.popleft()
            ranks[op] = len(ranks)
            for tensor in op.inputs:
                if tensor.ref() in self.reachable_tensors:
                    readers[tensor.op] -= 1
                    if not readers[tensor.op]:
                        ready.append(tensor.op)
        return ranks

    def build(self, targets: list[Tensor], seeds: list[Tensor]) -> None:
        """Differentiate stage by stage, last to first."""
        incoming: dict[Any, Tensor] = {}
        for stage in reversed(range(max(1, len(self.trace.entered_scopes.stages)))):
            own = [(t, s) for t, s in zip(targets, seeds, strict=True) if self._stage(t) == stage]
            own = [(t, s) for t, s in own if t.ref() in self.reachable_tensors]
            arrived = [(t, f) for ref, f in incoming.items() if self._stage(t := ref.deref()) == stage]
            if own or arrived:
                self._differentiate_stage(stage, own + arrived, incoming)

    def _stage(self, tensor: Tensor, default: int = 0) -> int:
        """The number of a tensor's stage; `default` for inputs, variables and constants, which have none."""
        return self.trace.labels.get(tensor.op.name, default)

    def _differentiate_stage(self, stage: int, ends: list[tuple[Tensor, Tensor]], incoming: dict[Any, Tensor]) -> None:
        boundaries, stops, inside = self._walk_stage(stage, [t for t, _ in ends])
        flowing = [
            t for t in boundaries if t.ref() in self.reachable_tensors and (t.dtype.is_floating or t.dtype.is_complex)
        ]
        self._check_lists(stage, boundaries)
        requested = [(n, s) for n, s in enumerate(self.sources) if s.ref() in inside and self._stage(s, stage) == stage]
        before = len(self.trace.graph.get_operations())
        found = gradients.differentiate(
            [t for t, _ in ends],
            flowing + [s for _, s in requested],
            [s for _, s in ends],
            [*boundaries, *stops],
            self.order,
        )
        self.request.created_ops += [(stage, op) for op in self.trace.graph.get_operations()[before:]]
        for tensor, gradient in zip(flowing, found[: len(flowing)], strict=True):
            if gradient is not None:
                self._send_gradient(stage, tensor, tf.convert_to_tensor(gradient), incoming)
        for (number, _), gradient in zip(requested, found[len(flowing) :], strict=True):
            if gradient is not None:
                self.request.parts += [(stage, number, term) for term in _split_terms(gradient)]

    def _check_lists(self, stage: int, boundaries: Sequence[Tensor]) -> None:
        """Refuse a list of tensors that leaves its stage on the way to a target: its gradient would be lost."""
        for tensor in boundaries:
            if tensor.dtype == tf.variant and tensor.ref() in self.reachable_tensors:
                stages = [list(self.trace.entered_scopes.stages)[number] for number in (self._stage(tensor), stage)]
                raise PlanError(
                    f"a list of tensors cannot cross from stage {stages[0]!r} to stage {stages[1]!r}",
                    where=f"{tensor.op.name} ({tensor.op.type}), {find_origin(tensor.op)}",
                    why="a gradient flows through the list, and only tensors can be sent between stages",
                    mend=f"stack it in {stages[0]!r} (a TensorArray's .stack()), or create it in {stages[1]!r}",
                )

    def _walk_stage(self, stage: int, ends: list[Tensor]) -> tuple[list[Tensor], list[Tensor], set[Any]]:
        """Walk back from `ends` within a stage; returns boundary inputs, the tensors at which the tape stopped, and
        references to all tensors that were reached.
        """
        boundaries: dict[Any, Tensor] = {}
        stops: dict[Any, Tensor] = {}
        inside: set[Any] = {t.ref() for t in ends}
        stack = list(ends)
        seen: set[Any] = set()
        while stack:
            op = stack.pop().op
            if op in seen:
                continue
            seen.add(op)
            for tensor in op.inputs:
                inside.add(tensor.ref())
                if self._stage(tensor, stage) != stage:
                    boundaries[tensor.ref()] = tensor
                elif tensor.ref() in self.reachable_tensors:
                    stack.append(tensor)
                else:
                    stops[tensor.ref()] = tensor
        return list(boundaries.values()), list(stops.values()), inside

    def _send_gradient(self, stage: int, boundary: Tensor, gradient: Tensor, incoming: dict[Any, Tensor]) -> None:
        ref = boundary.ref()
        if self._stage(boundary) > stage:  # that stage is already differentiated: the gradient would be lost
            stages = list(self.trace.entered_scopes.stages.values())
            raise backward_flow_error(stages[self._stage(boundary)], stages[stage], find_origin(boundary.op))
        if ref in self.local_gradients:
            gradient = gradient + incoming.pop(ref)
            self.local_gradients.remove(ref)
        if ref not in incoming and self._is_computable_everywhere(gradient):
            incoming[ref] = gradient
            self.local_gradients.add(ref)
            return
        if ref not in incoming:
            incoming[ref] = _placeholder(boundary.dtype, boundary.shape, "nebula_arrival")
            self.request.arrivals.append((boundary, incoming[ref]))
        if any(gradient is sent for _, _, sent in self.request.flows):
            gradient = tf.identity(gradient)  # one tensor for several boundaries, which cross separately
        self.request.flows.append((stage, boundary, gradient))

    def _is_computable_everywhere(self, gradient: Tensor) -> bool:
        """Whether every stage can compute a gradient: a scalar that depends on the share and constants alone."""
        shares = {tensor.op for tensor in self.trace.feeds.values()}
        above = iterate_ancestors([gradient.op], lambda op: op not in shares and op.type != "Const")
        return gradient.shape.rank == 0 and all(
            op.name not in self.request.before and op.inputs and not op.op_def.is_stateful for op in above
        )


def _make_holder(request: LiveRequest, number: int, source: Any) -> Any:
    """A gradient as the user's code receives it: None, a dense placeholder, or IndexedSlices of two."""
    parts = [values for _, n, values in request.parts if n == number]
    if not parts:
        return None
    dtype, shape = tf.as_dtype(source.dtype), tf.TensorShape(source.shape)
    if all(len(values) > 1 for values in parts):
        values = _placeholder(dtype, tf.TensorShape([None]).concatenate(shape[1:]), "nebula_gradient_values")
        kinds = {part[1].dtype for part in parts}
        kind = kinds.pop() if len(kinds) == 1 else tf.int64
        indices = _placeholder(kind, [None], "nebula_gradient_indices")
        request.holders.append((number, (values, indices)))
        return tf.IndexedSlices(values, indices, tf.constant(shape.as_list(), tf.int64))
    dense = _placeholder(dtype, shape, "nebula_gradient")
    request.holders.append((number, (dense,)))
    return dense


def _split_terms(gradient: Any) -> list[tuple[Any, ...]]:
    """A dense gradient, or the values and indices of each lookup.

    TensorFlow concatenates the slices of several lookups of one table. They are separated here, because the indices of
    some lookups may depend on the batch, and those of others not.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return [(gradient,)]
    values, indices = (
        list(each.op.inputs)[:-1] if each.op.type == "ConcatV2" else [each]
        for each in (gradient.values, gradient.indices)
    )
    if len(values) != len(indices) or len(values) == 1:
        return [(gradient.values, gradient.indices)]
    pairs = zip(values, indices, strict=True)
    return [term for pair in pairs for term in _split_terms(tf.IndexedSlices(*pair, gradient.dense_shape))]


def _placeholder(dtype: Any, shape: Any, name: str) -> Any:
    return tf.compat.v1.placeholder(dtype, shape, name=name)


def _handle(source: Any) -> Any:
    return getattr(source, "handle", source)


_original = tf.GradientTape.gradient
_original_enter = tf.GradientTape.__enter__
_original_vectorized = tf_private.parallel_for._pfor_impl


def answer_tape(
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Replacement of `tf.GradientTape.gradient` in the thread that traces; calls the original elsewhere."""
    trace = current_trace()
    if trace is not None and trace.plain:
        with trace.set_flags(busy=True):
            found = _original(tape, target, sources, output_gradients, unconnected_gradients)
        # ops that use it belong to no stage
        parts = tf.nest.flatten(found, expand_composites=True)
        trace.bottlenecks.homes.update((part.ref(), None) for part in parts if part is not None)
        return found
    flat = [_unwrap_variable(source) for source in tf.nest.flatten(sources)]
    if trace is None or not _is_outermost(trace, tape):
        if trace is not None and not trace.flags.busy:
            check_nested(trace.bottlenecks, tf.nest.flatten(target), flat)
        return _original(tape, target, sources, output_gradients, unconnected_gradients)
    check_overwritten(trace, tf.nest.flatten(sources))
    targets = [t for t in tf.nest.flatten(target) if t is not None]
    seeds = None if output_gradients is None else tf.nest.flatten(output_gradients)
    found = _answer_request(trace, tape, targets, flat, seeds, (), unconnected_gradients)
    tf_private.finish_tape(tape)
    return tf.nest.pack_sequence_as(sources, found)


def answer_gradients(targets: Any, sources: Any, seeds: Any, stops: Any, unconnected: Any) -> list[Any] | None:
    """The gradients of a request; None if TensorFlow should compute them: in a function's body, or
    while a tape records.
    """
    trace = current_trace()
    if trace is None or trace.flags.busy or trace.plain:
        return None
    if tf_private.is_tape_recording():
        check_nested(trace.bottlenecks, _make_list(targets), _make_list(sources))
        return None
    ends = [tf.convert_to_tensor(target) for target in _make_list(targets)]
    _check_first_order(trace, ends)
    if tf.compat.v1.get_default_graph() is not trace.graph:
        return None
    starts = None if seeds is None else _make_list(seeds)
    return _answer_request(
        trace, None, ends, _make_list(sources), starts, [] if stops is None else _make_list(stops), unconnected
    )


def _answer_request(
    trace: Tracing,
    tape: tf.GradientTape | None,
    targets: Sequence[Any],
    sources: Sequence[Any],
    seeds: Sequence[Any] | None,
    stops: Sequence[Any],
    unconnected: Any,
) -> list[Any]:
    with trace.set_flags(busy=True):
        ends = [tf.convert_to_tensor(target) for target in targets]
        starts = [None] * len(ends) if seeds is None else seeds
        found = differentiate(trace, tape, ends, sources, starts, stops)
        if getattr(unconnected, "value", unconnected) == "zero":
            pairs = zip(found, sources, strict=True)
            found = [tf.zeros_like(source) if gradient is None else gradient for gradient, source in pairs]
    return found


def _is_outermost(trace: Tracing, tape: tf.GradientTape) -> bool:
    """Whether a request is in none of these: our own differentiation, a body, another tape that records. Stops the
    tape.

    A request to a tape that is not open is left to TensorFlow, which raises.
    """
    if trace.flags.busy or tf.compat.v1.get_default_graph() is not trace.graph or not tf_private.is_tape_open(tape):
        return False
    tf_private.stop_tape(tape)
    return not tf_private.is_tape_recording()


def _unwrap_variable(source: Any) -> Any:
    """The tf.Variable inside a Keras variable; anything else unchanged."""
    return getattr(source, "value", source) if not isinstance(source, (tf.Tensor, tf.Variable)) else source


def run_vectorized(*args: Any, **kwargs: Any) -> Any:
    """Replacement of TensorFlow's vectorizer: gradients requested inside a body (of a Jacobian or a map) are computed
    by TensorFlow.
    """
    trace = current_trace()
    if trace is None:
        return _original_vectorized(*args, **kwargs)
    with trace.set_flags(busy=True, vectorizing=True):
        return _original_vectorized(*args, **kwargs)


def enter_tape(tape: tf.GradientTape) -> tf.GradientTape:
    """Replacement of `tf.GradientTape.__enter__` that records the tapes of a trace."""
    trace = current_trace()
    if trace is not None:
        trace.tapes.append(tape)
    return _original_enter(tape)


def record_name_scope(outputs: Sequence[Tensor]) -> None:
    """Record the name scope of an op that a tape may record."""
    trace = current_trace()
    if trace is not None and outputs and outputs[0].graph is trace.graph:
        trace.scopes[outputs[0].op.name] = gradients.get_name_scope()


def record_mask(tensor: Any, mask: Any) -> None:
    """Record the Keras mask of a tensor, which marks the rows that count."""
    trace = current_trace()
    if trace is not None:
        trace.masks.append((tensor, mask))


def _make_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_first_order(trace: Tracing, ends: Sequence[Any]) -> None:
    """Refuse the gradient of a tensor that depends on a gradient, unless by `tf.stop_gradient`."""
    held = {tensor.op for request in trace.requests for _, tensors in request.holders for tensor in tensors}
    stack, seen = [tensor.op for tensor in ends], set[Any]()
    while stack and held:
        op = stack.pop()
        if op in held:
            raise GradientError(
                "tf.gradients of a value that depends on a gradient is not supported",
                where=str(script_site()),
                why="in a plan, the first gradient is known only after all stages have run backward",
                mend="use with tf.GradientTape() as outer: around the forward and the first tf.gradients, then "
                "outer.gradient(...); or tf.stop_gradient(...) around the first gradient, if it is a constant",
            )
        if op not in seen and op.type != "StopGradient":
            seen.add(op)
            # a placeholder of a body may be a capture of the outer graph
            captures = getattr(op.graph, "captures", ()) if op.type == "Placeholder" else ()
            outside = [given for given, inner in captures if inner.op is op and hasattr(given, "op")]
            stack.extend(tensor.op for tensor in [*op.inputs, *outside])


def explain_late_requests(tapes: Iterable[Any]) -> None:
    """At the end of the trace, make later requests to tapes that are still alive raise an explanatory error."""
    for tape in tapes:
        for method in ("gradient", "jacobian", "batch_jacobian") if tf_private.is_tape_open(tape) else ():
            setattr(tape, method, partial(_call_tape_method, tape, method))


def _call_tape_method(tape: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return getattr(tf.GradientTape, method)(tape, *args, **kwargs)
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise GradientError(
            "a tape of a step is used after the step",
            where=str(script_site()),
            why="it recorded the symbolic tensors of the trace, which have no values outside it",
            mend="compute the gradient inside the step, and return it: return loss, tape.gradient(loss, variables)",
        ) from error
