"""Trace a user's step once and build a Program from it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.capture import splits, tracing
from whale_nebula.capture.arguments import DeclaredInputs, make_key
from whale_nebula.capture.bottlenecks import Bottlenecks
from whale_nebula.capture.differentiate import bind_ops, explain_late_requests
from whale_nebula.capture.entered_scopes import adopt_stages, list_constraints
from whale_nebula.capture.errors import check_constants, translate_errors
from whale_nebula.capture.keras_scopes import list_stages
from whale_nebula.capture.layer_placement import Places, list_placed_models
from whale_nebula.capture.loss_weights import mirror_trace, replace_batch_sizes, resolve_sums
from whale_nebula.capture.mirror import COPIED, find_origin, mirror_spec, note_thread_line, order_operations
from whale_nebula.capture.patches import apply_tracing_patches, install
from whale_nebula.capture.projection import check_unprojected, check_variable_list
from whale_nebula.capture.splits import add_splits
from whale_nebula.capture.tracing import LiveRequest, Tracing, check_context, stamp_step_options
from whale_nebula.codec.encoding import derive_encodings
from whale_nebula.errors import UnsupportedError
from whale_nebula.feed.checks import find_absent
from whale_nebula.feed.inputs import Partial
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import (
    Arrival,
    Assignment,
    Constraints,
    Flow,
    GradientPart,
    Holder,
    Leaf,
    Program,
    Request,
    Variable,
)
from whale_nebula.passes.branches import Aliases, remove_bundles
from whale_nebula.passes.effects import is_effect
from whale_nebula.passes.label import label_ops
from whale_nebula.scopes.auto import get_current_limits
from whale_nebula.scopes.frames import Frame, begin_step, rewatch_frames
from whale_nebula.site import script_site, warn_once
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import initial_values
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.keras_training import create_variables, lacks_optimizer_variables


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector in this context: graphs and plans consist of many small long-lived objects,
    and scanning them takes a seventh of the time of a first step.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def warn_if_stageless(trace: Tracing) -> None:
    """Warn, once for each source line, of a traced step with `nb.cluster` or `nb.pipeline` but no `nb.stage`."""
    entered_scopes = trace.entered_scopes
    if (
        entered_scopes.stages
        or get_current_limits() is not None
        or entered_scopes.replicas.entered
        or entered_scopes.replicas.around
        or entered_scopes.splits
        or entered_scopes.outer is None
    ):
        return
    warn_once(
        entered_scopes.outer.site,
        f"nb.{entered_scopes.outer.kind} contains no nb.stage: the whole step is one stage, 'stage0'",
        why="only nb.stage assigns ops to clusters; this is reported once for this line",
        mend='use with nb.stage(cluster="gpu"): around the calls of the layers that belong together, '
        "or with nb.stage(): around all of them",
    )


def warn_if_partly_copied(trace: Tracing, paths: Mapping[int, str]) -> None:
    """Warn, once for each source line, of a step without stages that reads weights both inside and outside an
    `nb.replica`. `paths` names weights by the id of their handle.
    """
    replicas = trace.entered_scopes.replicas
    if (
        trace.entered_scopes.add_sibling_stages()
        or trace.entered_scopes.stages
        or replicas.around
        or not replicas.entered
    ):
        return
    inside, outside = (set(_list_weights(trace, copied)) for copied in (True, False))
    rest = sorted(paths.get(handle, name) for handle, name in outside - inside)
    if not inside or not rest:
        return
    warn_once(
        replicas.entered[0].site,
        f"nb.replica contains only a part of the step, but the whole step is copied: {rest[0]!r} is outside",
        why="stages are copied, and a step without nb.stage is one stage; this is reported once for this line",
        mend='use with nb.replica(...), nb.stage(name="..."): around these lines, '
        'and nb.stage(name="...") around the rest\nor put nb.replica around the whole step',
    )


def _list_weights(trace: Tracing, copied: bool) -> Iterator[tuple[int, str]]:
    """The trainable variables that the forward reads inside replica scopes, or outside: handle and name."""
    names = {id(each.handle): each.name.partition(":")[0] for each in trace.graph.variables if each.trainable}
    held = {inner.op.name: id(outer) for outer, inner in trace.graph.captures if id(outer) in names}
    first = trace.requests[0].before if trace.requests else None
    for op in trace.graph.get_operations():
        reads = op.type in ("ReadVariableOp", "ResourceGather") and (first is None or op.name in first)
        handle = held.get(op.inputs[0].op.name) if reads else None
        if handle is not None and (tf_private.read_number_stamp(op, COPIED) is not None) == copied:
            yield handle, names[handle]


@dataclass(frozen=True)
class Signature:
    """The layout of a call's arguments: structure, names and specs of tensors, and other values.

    `is_tensor` states for every leaf whether it is a tensor; `absent` has the numbers of the tensors absent in this
    process.
    """

    structure: Any
    names: tuple[str, ...]
    specs: tuple[Any, ...]
    batched: tuple[bool, ...]
    plain: tuple[Any, ...]
    key: Any
    is_tensor: tuple[bool, ...] = ()
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A captured step: its Program, the traced graph, and how to pack its results.

    `initialize_variables` assigns initial values to the requested variables that the trace created and that have none
    yet. `draw_part` computes only some entries of such a value along an axis, if possible. `projected` has a sentence
    for each tensor that crosses on a learned basis, or would not be smaller on it. `decision` is the planner's, if
    any, within the `constraints` of the scopes. `draws` are the variables that random ops draw from, each with the op's
    seeds, in order. `unused_split` is an `nb.split` that divides no variable, in a step without stages.
    """

    program: Program
    graph: Any
    structured_outputs: Any
    variables: Mapping[str, Any]
    aliases: Aliases = field(default_factory=dict)
    initialize_variables: Callable[[Callable[[Any], bool]], None] = lambda is_wanted: None
    projected: tuple[str, ...] = ()
    decision: Any = None
    constraints: Constraints = field(default_factory=Constraints)
    draws: Sequence[tuple[int, int, Any]] = ()
    draw_part: Callable[[Any, int, int, int], Any] = lambda variable, axis, start, size: None
    unused_split: Frame | None = None

    def pack(self, tensors: Sequence[Any]) -> Any:
        """The results in the user's own structure."""
        found = iter(tensors)
        return tf.nest.map_structure(
            lambda leaf: next(found) if isinstance(leaf, tf.Tensor) else leaf,
            self.structured_outputs,
            expand_composites=True,
        )


def signature(
    arguments: Sequence[tuple[str, Any]], whole: frozenset[str] = frozenset(), declared: DeclaredInputs | None = None
) -> tuple[Signature, list[Any]]:
    """Lay out the arguments of a call; returns the signature and the tensors. `declared` has the specs that the config
    declares for inputs; they replace an input that is None by a placeholder.
    """
    declared = declared or DeclaredInputs()
    inputs: list[tuple[str, Any, bool]] = []  # for each tensor its name, its spec and whether it has a row per sample
    plain: list[Any] = []
    tensors: list[Any] = []
    given: list[bool] = []
    structure = [declared.expand_argument(name, argument) for name, argument in arguments]
    for (name, _), argument in zip(arguments, structure, strict=True):
        for parts, leaf in tf_private.list_leaf_paths(argument):
            path = "/".join([name, *map(str, parts)])
            tensor = declared.make_placeholder(path) if leaf is None else _to_tensor(path, leaf)
            plain.append(None if tensor is not None else leaf)
            given.append(tensor is not None)
            if tensor is not None:
                split, spec = tensor.shape.rank > 0 and name not in whole, declared.spec(path, tensor)
                inputs.append(
                    (path, tf.TensorSpec([None, *spec.shape[1:]] if split else spec.shape, spec.dtype), split)
                )
                tensors.append(tensor)
    names, specs, batched = zip(*inputs, strict=True) if inputs else ((), (), ())
    marks = [tf.nest.map_structure(lambda _: None, argument) for argument in structure]
    key = (tuple(name for name, _ in arguments), specs, str(marks), tuple(map(make_key, plain)))
    return Signature(structure, names, specs, batched, tuple(plain), key, tuple(given), find_absent(tensors)), tensors


def _to_tensor(path: str, leaf: Any) -> Any:
    """A leaf as a tensor, or None if it is not one: a variable is read and written by the step itself."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        raise UnsupportedError(
            f"input {path!r} is a {type(leaf).__name__}",
            where=f"{path}, {script_site()}",
            why="ragged and sparse inputs cannot be split by rows yet",
            mend="pass a dense tensor: .to_tensor() or tf.sparse.to_dense(...)",
        )
    if isinstance(leaf, tf.Tensor | Partial):
        return leaf
    arrays = hasattr(leaf, "__array__") and not isinstance(leaf, (tf.Variable, keras.Variable))
    return tf.convert_to_tensor(leaf) if arrays else None


def bind(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call as (name of the parameter, argument)."""
    return list(inspect.signature(fn).bind(*args, **kwargs).arguments.items())


_CAPTURE_LOCK = threading.RLock()


@contextlib.contextmanager
def wait_for_captures() -> Iterator[None]:
    """Context of one thread at a time: the layers of a model keep state while they are called."""
    with _CAPTURE_LOCK:
        yield


@wait_for_captures()
@pause_garbage_collection()
def capture(
    call: Callable[[Sequence[Any]], Any],
    layout: Signature,
    *,
    paths: Callable[[], Mapping[int, str]] = dict,
    metrics: Callable[[], Mapping[int, str]] = dict,
    later: bool = False,
    owner: Any = None,
    data: Callable[[Sequence[Any]], Any] | None = None,
    assignment: Assignment | None = None,
    handles: Mapping[int, str] | None = None,
) -> Captured:
    """Trace `call`, which takes arguments in the structure of `layout`, under the scopes. Variables that it creates get
    their initial values at the end of the trace, or `later` by `Captured.initialize_variables`, so that
    optimizer slots need no memory in processes that do not keep them. `owner` is the model that the step belongs to, if
    any; for Keras's own train step, `data` extracts its data from the arguments. An `assignment` gives the stages of a
    step without scopes by the paths of variables; `handles` gives these paths by the id of the handle.
    """
    install()
    check_context()
    traces: list[Tracing] = []  # TensorFlow traces twice if variables are created
    created: list[initial_values.InitialValues] = []
    variables: dict[str, Any] = {}

    def function_of(traced: Callable[[Sequence[Any]], Any]) -> Any:
        def body(*tensors: Any) -> Any:
            with _begin_trace(
                tensors, owner, batched=layout.batched, assignment=assignment, handles=handles or {}
            ) as trace:
                traces.append(trace)
                return traced(fill_layout(layout, tensors))

        function = tf.function(body, autograph=False)
        created.append(initial_values.defer_initialization(function))
        return function

    def initialize_variables(is_wanted: Callable[[Any], bool]) -> None:
        for each in created:
            each.initialize_variables(is_wanted)
        for own in filter(is_wanted, variables.values()):
            splits.draw_value(own)

    def draw_part(variable: Any, axis: int, start: int, size: int) -> Any:
        if splits.is_undrawn(variable):
            return splits.draw_part(variable, axis, start, size)
        parts = (each.draw_part(variable, axis, start, size) for each in created)
        return next((part for part in parts if part is not None), None)

    with translate_errors(traces, list(zip(layout.names, layout.specs, strict=True))), apply_tracing_patches():
        # Tracing only their creation is faster than tracing the step.
        if data is not None and lacks_optimizer_variables(owner):
            slots = initial_values.InitialValues()
            made = function_of(lambda given: create_variables(owner, data(given), slots if later else None))
            initial_values.trace_variables(made, layout.specs)
            created.append(slots)
        graph = function_of(call).get_concrete_function(*layout.specs).graph
        if not later:
            initialize_variables(lambda variable: True)
    explain_late_requests(tape for each in traces for tape in each.tapes)
    trace = traces[-1]
    if trace.places:
        trace.places.check()
    check_constants(graph)
    warn_if_partly_copied(trace, paths())
    if isinstance(owner, keras.Model):  # a function with @nb.function issues its own warning
        warn_if_stageless(trace)
    results = tf.nest.flatten(graph.structured_outputs, expand_composites=True)
    returned = [tensor for tensor in results if isinstance(tensor, tf.Tensor)]
    program, aliases = remove_bundles(assemble_program(trace, returned, layout.names, paths(), metrics()))
    check_unprojected(trace, program)
    check_variable_list(trace.bottlenecks)
    variables |= _find_variables(graph, program)
    if not later:  # variables that were left undrawn
        initialize_variables(lambda variable: True)
    notes = tuple(trace.bottlenecks.notes)
    constraints = list_constraints(trace.entered_scopes, program)
    split_frames = [] if program.has_scopes else trace.entered_scopes.splits
    return Captured(
        program, graph, graph.structured_outputs, variables, aliases, initialize_variables, notes,
        constraints=constraints, draws=trace.draws, draw_part=draw_part, unused_split=next(iter(split_frames), None),
    )  # fmt: skip


@contextlib.contextmanager
def _begin_trace(tensors: Sequence[Any], owner: Any, **options: Any) -> Iterator[Tracing]:
    """Record the current graph's trace; all parts of a model belong to its steps, including those that
    this step does not run.
    """
    places = Places() if list_placed_models() else None
    graph = tf.compat.v1.get_default_graph()
    note_thread_line(graph)
    trace = Tracing(graph, tensors, bottlenecks=Bottlenecks(owner), places=places, **options)
    with tracing.tracing(trace), begin_step(), rewatch_frames(), stamp_step_options(trace):
        if isinstance(owner, keras.Model):
            trace.entered_scopes.add_model(list_stages(owner))
        if trace.assignment is not None:
            adopt_stages(trace.entered_scopes, trace.assignment, script_site())
        yield trace


@contextlib.contextmanager
def trace_uncut(tensors: Sequence[Any], owner: Any = None) -> Iterator[None]:
    """Context of a step that is traced uncut: apply the learned projections of the cut step and change nothing else."""
    with apply_tracing_patches(), _begin_trace(tensors, owner, plain=True) as trace:
        yield
    if trace.places:
        trace.places.check()


def fill_layout(layout: Signature, tensors: Sequence[Any]) -> list[Any]:
    """The arguments of a call in the user's structure, with these tensors for its own."""
    found, plain, given = iter(tensors), iter(layout.plain), iter(layout.is_tensor)

    def fill(leaf: Any) -> Any:
        kept = next(plain)
        return next(found) if next(given) else kept

    return [tf.nest.map_structure(fill, argument) for argument in layout.structure]


def _find_variables(graph: Any, program: Program) -> dict[str, Any]:
    """The live variables of a program by their path."""
    known = {id(v.handle): v for v in graph.variables}
    inner = {internal.op.name: external for external, internal in graph.captures}
    names = {variable.op: variable.path for variable in program.variables}
    return {path: known[id(inner[program.graph.ops[op].name])] for op, path in names.items()}


def assemble_program(
    trace: Tracing,
    returned: Sequence[Any],
    leaf_names: Sequence[str],
    paths: Mapping[int, str],
    metrics: Mapping[int, str],
) -> Program:
    """The Program of a trace. `paths` has the names of variables, and `metrics` the metrics that some belong to, by the
    id of their handle.
    """
    graph = replace_batch_sizes(trace) if trace.entered_scopes.is_cut else mirror_trace(trace)
    operations = order_operations(trace.graph.get_operations())
    numbers = {op.name: index for index, op in enumerate(operations)}
    if not trace.requests:  # a gradient request fixes the numbers of stages
        trace.entered_scopes.order_stages(graph)

    def value(tensor: Any) -> Value:
        return Value(numbers[tensor.op.name], tensor.value_index)

    def is_ours(tensor: Any) -> bool:
        return getattr(tensor, "graph", None) is trace.graph

    requests = _build_requests(trace, graph, numbers, value)
    trace.entered_scopes.settle(summed=bool(trace.summed))
    stages = tuple(trace.entered_scopes.stages.values())
    backward = frozenset(op for request in requests for op in request.backward)
    fixed = {numbers[name]: stage for name, stage in trace.labels.items()}
    bound = bind_ops(trace, graph, numbers)
    labels = label_ops(graph, [stage.key for stage in stages], fixed=fixed, skip=backward, bound=bound)
    if bound:  # these ops run nowhere else
        graph = graph.stamp({op: stages[labels[op]].key for op in bound if op in labels})
    codecs = [derive_encodings(frame.options, training=bool(requests)) for frame in trace.entered_scopes.compressions]
    # Keras's masks of tensors, if a compress scope requests them
    marked = (
        trace.masks if any(frame.options.get("mask") is True for frame in trace.entered_scopes.compressions) else []
    )
    leaves = zip(trace.leaves, leaf_names, trace.batched, strict=True)
    program = Program(
        graph=graph,
        leaves=tuple(Leaf(value(t).op, name, mirror_spec(t), split) for t, name, split in leaves),
        variables=_list_variables(trace, numbers, paths, metrics),
        stages=stages,
        requests=requests,
        # without the Identity that TensorFlow adds to a returned tensor, which waits for every effect of the step
        returns=tuple(value(t.op.inputs[0] if t.op.type == "Identity" else t) for t in returned),
        loss_weights=tuple(value(tensor) for tensor in trace.loss_weights),
        share=value(trace.feeds["share"]) if "share" in trace.feeds else None,
        grow=value(trace.feeds["grow"]) if "grow" in trace.feeds else None,
        pipeline=trace.entered_scopes.pipeline,
        compressions=tuple((str(there), str(back)) for there, back in codecs),
        labels=labels,
        masks={value(tensor): value(mask) for tensor, mask in marked if all(map(is_ours, (tensor, mask)))},
        compress_sites=tuple(str(frame.site) for frame in trace.entered_scopes.compressions),
        local_sgd=trace.entered_scopes.replicas.local_sgd,
    )
    program = add_splits(trace, program, operations)
    return resolve_sums(trace, program, where=lambda op: find_origin(operations[op]))


def _build_requests(
    trace: Tracing, graph: Graph, numbers: Mapping[str, int], value: Callable[[Any], Value]
) -> tuple[Request, ...]:
    made = {numbers[name] for live in trace.requests for name in live.backward}
    helpers: set[int] = set()  # ops that differentiation created and the forward reads: a loop's accumulators
    for op in reversed(graph.ops):
        if op.index not in made or op.index in helpers:
            helpers.update(value.op for value in op.inputs if value.op in made)
    effects = {op.index for op in graph.ops if is_effect(op, graph)}
    pairs = enumerate(trace.requests)
    return tuple(_build_request(number, live, numbers, value, helpers, effects) for number, live in pairs)


def _build_request(
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
    terms: Counter[tuple[int, int]] = Counter()  # the number of the lookup of each part within one stage
    for stage, source, tensors in live.parts:
        parts.append(GradientPart(stage, source, tuple(map(value, tensors)), terms[stage, source]))
        terms[stage, source] += 1
    return Request(
        index=number,
        start=max(before, default=-1) + 1,
        backward=inside,
        targets=tuple(value(t) for t in live.targets),
        output_gradients=tuple(value(t) for t in live.user_seeds),
        sources=tuple(live.sources),
        origins=tuple(-1 if t is None else numbers[t.op.name] for t in live.origins),
        holders=tuple(Holder(n, tuple(value(t) for t in tensors)) for n, tensors in live.holders),
        arrivals=tuple(Arrival(value(t), value(feed)) for t, feed in live.arrivals),
        flows=tuple(Flow(stage, value(t), value(g)) for stage, t, g in live.flows),
        effects=tuple((stage, numbers[op.name]) for stage, op in live.created_ops if numbers[op.name] in effects),
        parts=tuple(parts),
    )


def _list_variables(
    trace: Tracing, numbers: Mapping[str, int], paths: Mapping[int, str], metrics: Mapping[int, str]
) -> tuple[Variable, ...]:
    known = {id(v.handle): v for v in trace.graph.variables}
    found: list[Variable] = []
    used: dict[str, int] = {}
    for external, internal in trace.graph.captures:
        if internal.dtype != tf.resource or id(external) not in known:
            continue
        variable = known[id(external)]
        spec = tf_private.find_resource_spec(internal) or (variable.dtype.name, tuple(variable.shape.as_list()))
        path = paths.get(id(external)) or variable.name.split(":")[0]
        used[path] = used.get(path, 0) + 1
        unique = path if used[path] == 1 else f"{path}#{used[path]}"
        metric = metrics.get(id(external), "")
        found.append(Variable(numbers[internal.op.name], unique, Spec(*spec), bool(variable.trainable), metric))
    return tuple(found)
