"""Assemble a Program from a finished trace: tensors and names become op and output numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.capture.loss_weights import mirror_trace, replace_batch_sizes, settle_sums
from whale_nebula.capture.mirror import in_order, mirror_spec
from whale_nebula.capture.source_lines import find_origin
from whale_nebula.capture.splits import add_splits
from whale_nebula.capture.tracing import LiveRequest, Tracing
from whale_nebula.codec.way import ways
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Arrival, Flow, GradientPart, Holder, Leaf, Program, Request, Variable
from whale_nebula.passes.effects import is_effect
from whale_nebula.passes.label import label
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import private as tf_private


def assemble(
    trace: Tracing,
    returned: Sequence[Any],
    leaf_names: Sequence[str],
    paths: Mapping[int, str],
    metrics: Mapping[int, str],
) -> Program:
    """The Program of a trace. By the id of their handle, `paths` names variables, and `metrics` the metric of some."""
    if trace.met.cut:
        replace_batch_sizes(trace)
    operations = in_order(trace.graph.get_operations())
    numbers = {op.name: index for index, op in enumerate(operations)}
    graph = mirror_trace(trace)
    if not trace.requests:  # a gradient request makes the numbers final
        trace.met.order_stages(graph)

    def value(tensor: Any) -> Value:
        return Value(numbers[tensor.op.name], tensor.value_index)

    def is_ours(tensor: Any) -> bool:
        return getattr(tensor, "graph", None) is trace.graph

    requests = _requests(trace, graph, numbers, value)
    trace.met.settle(summed=bool(trace.summed))
    stages = tuple(trace.met.stages.values())
    backward = frozenset(op for request in requests for op in request.backward)
    fixed = {numbers[name]: stage for name, stage in trace.labels.items()}
    labels = label(graph, [stage.key for stage in stages], fixed=fixed, skip=backward)
    codecs = [ways(frame.options, training=bool(requests)) for frame in trace.met.compressions]
    # what Keras marked tensors with, where a compress scope asks for it
    marked = trace.masks if any(frame.options.get("mask") is True for frame in trace.met.compressions) else []
    leaves = zip(trace.leaves, leaf_names, trace.batched, strict=True)
    program = Program(
        graph=graph,
        leaves=tuple(Leaf(value(t).op, name, mirror_spec(t), split) for t, name, split in leaves),
        variables=_variables(trace, numbers, paths, metrics),
        stages=stages,
        requests=requests,
        # without the Identity that TensorFlow puts on a returned tensor, which waits for every effect of the step
        returns=tuple(value(t.op.inputs[0] if t.op.type == "Identity" else t) for t in returned),
        weights=tuple(value(tensor) for tensor in trace.weights),
        share=value(trace.feeds["share"]) if "share" in trace.feeds else None,
        grow=value(trace.feeds["grow"]) if "grow" in trace.feeds else None,
        pipeline=trace.met.pipeline,
        compressions=tuple((str(there), str(back)) for there, back in codecs),
        labels=labels,
        masks={value(tensor): value(mask) for tensor, mask in marked if all(map(is_ours, (tensor, mask)))},
        sites=tuple(str(frame.site) for frame in trace.met.compressions),
        apart=trace.met.replicas.apart,
    )
    program = add_splits(trace, program, operations)
    return settle_sums(trace, program, where=lambda op: find_origin(operations[op]))


def _requests(
    trace: Tracing, graph: Graph, numbers: Mapping[str, int], value: Callable[[Any], Value]
) -> tuple[Request, ...]:
    made = {numbers[name] for live in trace.requests for name in live.backward}
    helpers: set[int] = set()  # ops made while differentiating that the forward reads: a loop's accumulators
    for op in reversed(graph.ops):
        if op.index not in made or op.index in helpers:
            helpers.update(value.op for value in op.inputs if value.op in made)
    effects = {op.index for op in graph.ops if is_effect(op, graph)}
    pairs = enumerate(trace.requests)
    return tuple(_request(number, live, numbers, value, helpers, effects) for number, live in pairs)


def _request(
    number: int,
    live: LiveRequest,
    numbers: Mapping[str, int],
    value: Callable[[Any], Value],
    helpers: set[int],
    effects: set[int],
) -> Request:
    before = {numbers[name] for name in live.before if name in numbers}
    inside = frozenset(numbers[name] for name in live.backward if name in numbers) - helpers
    parts: list[GradientPart] = []
    terms: Counter[tuple[int, int]] = Counter()  # which of the lookups of one stage each part is
    for stage, source, tensors in live.parts:
        parts.append(GradientPart(stage, source, tuple(map(value, tensors)), terms[stage, source]))
        terms[stage, source] += 1
    return Request(
        index=number,
        start=max(before, default=-1) + 1,
        backward=inside,
        targets=tuple(value(t) for t in live.targets),
        given=tuple(value(t) for t in live.given),
        sources=tuple(live.sources),
        origins=tuple(-1 if t is None else numbers[t.op.name] for t in live.origins),
        holders=tuple(Holder(n, tuple(value(t) for t in tensors)) for n, tensors in live.holders),
        arrivals=tuple(Arrival(value(t), value(feed)) for t, feed in live.arrivals),
        flows=tuple(Flow(stage, value(t), value(g)) for stage, t, g in live.flows),
        effects=tuple((stage, numbers[op.name]) for stage, op in live.made if numbers[op.name] in effects),
        parts=tuple(parts),
    )


def _variables(
    trace: Tracing, numbers: Mapping[str, int], paths: Mapping[int, str], metrics: Mapping[int, str]
) -> tuple[Variable, ...]:
    known = {id(v.handle): v for v in trace.graph.variables}
    found: list[Variable] = []
    used: dict[str, int] = {}
    for external, internal in trace.graph.captures:
        if internal.dtype != tf.resource or id(external) not in known:
            continue
        variable = known[id(external)]
        spec = tf_private.resource_spec(internal) or (variable.dtype.name, tuple(variable.shape.as_list()))
        path = paths.get(id(external)) or variable.name.split(":")[0]
        used[path] = used.get(path, 0) + 1
        unique = path if used[path] == 1 else f"{path}#{used[path]}"
        metric = metrics.get(id(external), "")
        found.append(Variable(numbers[internal.op.name], unique, Spec(*spec), bool(variable.trainable), metric))
    return tuple(found)
