"""The list of all replacements of TensorFlow and Keras functions during capture, and the replaced ops.

`BUILDING_PATCHES` is applied while a scope is open, to follow the construction of Keras models. `TRACING_PATCHES` is
applied while a step is traced. Outside of both, TensorFlow and Keras are unchanged, except for patches of single
features:

- `tf.keras_import`: one inert wrapper of Keras's `make_train_function` and similar methods.
- `capture.differentiate`: the methods of a tape that a step opens, on that object.
- `runtime.step.step`: `keras.Model.__call__`, while a step is traced, to record which models it calls.
- `runtime.show`: the begin methods of callbacks, and all saving, while `whale-nebula show` plans a script.
- `runtime.variables.reads`: reads and saves of single models, and hooks of single callbacks, in several processes.
- `runtime.variables.remote`: the class of variables that other processes hold.
- `capture.splits`: the class of large variables that are created under `nb.split` in a run of several processes.
- `runtime.step.results` and `feed.inputs`: `tf.shape` and `tf.concat` of substitutes for tensors, by TensorFlow's
  dispatch; `tf.private.record_on_tapes`: a record on tapes around a step, whose gradient is refused.
- `tf.failures`: the conversion of a failed op's status into an exception, while an error of this library passes through
  a function that TensorFlow has called.
- `tf.collectives`: the start of TensorFlow's runtime, in a worker whose cluster has other workers.

Replaced here are stateful random ops, calls of tf.functions, and conditions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import tensorflow as tf

from whale_nebula.capture import differentiate, keras_scopes, layer_placement, loss_weights, projection
from whale_nebula.capture.mirror import Donor, import_nodes, mirror, order_operations
from whale_nebula.capture.tracing import Stamper, Tracing, current_graph_trace, current_trace
from whale_nebula.passes.branches import NO_OWNER, Branch, Owners, find_bundle_aliases, rewire, split_branches
from whale_nebula.passes.phases import MAX_SMALL_BYTES
from whale_nebula.scopes.frames import Frame, Watcher, open_frames, stage_of, watchers
from whale_nebula.tf import gradients
from whale_nebula.tf import patch as tf_patch
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.patch import Patch, apply_patches


def create_draw_state(seed: int, seed2: int) -> Any:
    """Create the variable from which a random op with these seeds draws; None if the op is not to be replaced."""
    trace = current_graph_trace()
    if trace is None or trace.flags.busy or trace.plain or trace.flags.vectorizing:
        return None
    state = tf_patch.make_generator_state(seed, seed2, f"{STATE}_{seed}_{seed2}")
    trace.draws.append((seed, seed2, state))
    return state


STATE = "nebula_draws"
"""The prefix of the variables' names; the seeds follow it, so that processes with different seeds are detected."""


@contextlib.contextmanager
def draw_from(draws: Sequence[tuple[int, int, Any]]) -> Iterator[None]:
    """Context in which a step that is traced again draws from the variables that its capture created. They are passed
    with the seeds of their ops, in the same order.
    """
    remaining: dict[tuple[int, int], list[Any]] = {}
    for seed, seed2, state in reversed(draws):
        remaining.setdefault((seed, seed2), []).append(state)

    def find(seed: int, seed2: int) -> Any:
        states = remaining.get((seed, seed2))
        return states.pop() if states else None

    with apply_patches(tf_patch.patch_draws(find)):
        yield


_call = tf_private.PolymorphicFunction.__call__


@functools.wraps(_call)  # with this module name, AutoGraph calls it unconverted, like TensorFlow's own functions
def call_inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of the call of a tf.function: inline its body in the trace, if that is equivalent."""
    trace = current_graph_trace()
    if trace is not None and not trace.flags.busy:
        if tf_private.is_compiled_by_xla(function):
            with trace.set_flags(compiled=True):
                return _call(function, *args, **kwargs)
        if tf_private.can_inline(function):
            return tf_private.run_inline(function, args, kwargs)
    return _call(function, *args, **kwargs)


def split_condition(pred: Any, branches: Sequence[Any]) -> tuple[Any, ...]:
    """Replacement of a cond in a trace, or in a branch of a cond in it: create one for each cluster, and one for the
    results of the branches, which is returned in a tuple; an empty tuple if there is nothing to split. A cond in a
    stage belongs to that.
    """
    trace = current_trace()
    if trace is None or trace.flags.busy or not trace.requests or stage_of(open_frames()) is not None:
        return ()
    clusters = [stage.cluster for stage in trace.entered_scopes.stages.values()]
    graphs = _list_graphs_around(trace)
    if len(set(clusters)) < 2 or not graphs:
        return ()
    with trace.set_flags(busy=True):
        traced = [_TracedBranch(branch) for branch in branches]
        found = split_branches([each.branch for each in traced], _find_owners(trace, clusters, graphs))
        if found is None:
            return ()
        keys, splits = found
        for each, split in zip(traced, splits, strict=True):
            each.move(sorted(split.removed_ops))
        for key in keys:
            bodies = [each.body(sorted(split.groups.get(key, ()))) for each, split in zip(traced, splits, strict=True)]
            tf.cond(pred, *bodies)
        if not any(branch.outputs for branch in branches):
            return (None,)
        pairs = zip(traced, splits, strict=True)
        return (tf.cond(pred, *[each.body(sorted(split.results), results=True) for each, split in pairs]),)


@dataclass
class _TracedBranch:
    """A branch of a cond: TensorFlow's graph, its mirror without bundles, and the outer tensors of its values."""

    graph: Any
    outer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        around = tf.compat.v1.get_default_graph()
        plain = mirror(self.graph)
        aliases = find_bundle_aliases(plain, lambda op: True)
        self.donor = Donor(self.graph)
        self.donor.replace_inputs(aliases)
        self.outer = {internal.name: around.capture(external) for external, internal in self.graph.captures}
        numbers = {op.name: index for index, op in enumerate(self.donor.operations)}
        given = {numbers[internal.op.name]: self.outer[internal.name].name for _, internal in self.graph.captures}
        self.branch = Branch(rewire(plain, aliases), given)

    def move(self, ops: Sequence[int]) -> None:
        """Move ops into the outer graph."""
        made = [tensor.name for index in ops for tensor in self.donor.operations[index].outputs]
        with tf.control_dependencies(None):
            found = import_nodes(self.donor.cut(ops), self.outer, made, name="nebula_shared")
        self.outer.update(zip(made, found, strict=True))

    def body(self, ops: Sequence[int], *, results: bool = False) -> Callable[[], Any]:
        """A function that runs these ops, and returns the results of the branch if they are asked for."""
        definition = self.donor.cut(ops)
        returns = self.branch.graph.returns if results else ()
        structure = self.graph.structured_outputs if results else None
        given = (value for index in ops for value in self.branch.graph.ops[index].inputs)
        read = sorted({self.donor.tensor(value).name for value in (*given, *returns) if value.op not in ops})

        def run() -> Any:
            graph = tf.compat.v1.get_default_graph()
            known = {name: graph.capture(self.outer[name]) for name in read}
            found = iter(import_nodes(definition, known, [self.donor.tensor(value).name for value in returns]))
            leaves = tf.nest.flatten(structure, expand_composites=True)
            packed = [None if leaf is None else next(found) for leaf in leaves]
            return tf.nest.pack_sequence_as(structure, packed, expand_composites=True)

        return run


def _list_graphs_around(trace: Tracing) -> list[Any]:
    """The graph of the trace and, if new ops belong to a branch of a cond in it, the branches around them, outermost
    first. Empty if they belong to another body.
    """
    graph = tf.compat.v1.get_default_graph()
    graphs = [graph]
    while graph is not trace.graph and isinstance(graph, tf_private.CondBranch):
        graph = graph.outer_graph
        graphs.insert(0, graph)
    return graphs if graph is trace.graph else []


def _find_owners(trace: Tracing, clusters: Sequence[str], graphs: Sequence[Any]) -> dict[str, Owners]:
    """The clusters that each tensor of the last of these graphs belongs to: those of the gradients and variables that
    it depends on.

    A variable belongs to the clusters whose stages read it; a scalar (the loss scale) can cross.
    """
    outer = {}
    for around, graph in reversed(list(pairwise(graphs))):  # inner first: it adds captures to the outer
        outer.update({internal.ref(): around.capture(external).name for external, internal in graph.captures})
    found = _find_traced_owners(trace, clusters)
    for graph in graphs[1:]:
        found = {internal.name: found.get(outer[internal.ref()], NO_OWNER) for _, internal in graph.captures}
        _add_dependent_owners(order_operations(graph.get_operations()), found)
    return found


def _find_traced_owners(trace: Tracing, clusters: Sequence[str]) -> dict[str, Owners]:
    found: dict[str, Owners] = {}
    for request in trace.requests:
        for source, tensors in request.holders:
            own = frozenset(clusters[stage] for stage, number, _ in request.parts if number == source)
            found.update({tensor.name: own for tensor in tensors})
    operations = order_operations(trace.graph.get_operations())
    for op in operations:
        stage = trace.labels.get(op.name)
        for tensor in op.inputs if stage is not None else ():
            if _is_array_variable(tensor):
                found[tensor.name] = found.get(tensor.name, NO_OWNER) | {clusters[stage or 0]}
    _add_dependent_owners([op for op in operations if op.name not in trace.labels], found)
    return found


def _add_dependent_owners(operations: Sequence[Any], found: dict[str, Owners]) -> None:
    """Add the owners of what depends on the tensors in `found`, and of variables that such values are written to."""
    for op in operations:
        if not op.inputs:
            continue
        each = [found.get(tensor.name, NO_OWNER) for tensor in op.inputs]
        written = [tensor for tensor in op.inputs if not op.outputs and _is_array_variable(tensor)]
        found.update({tensor.name: NO_OWNER.union(*each) for tensor in written})
        for number, tensor in enumerate(op.outputs):
            own = each[number] if op.type == "IdentityN" else NO_OWNER.union(*each)
            if own and (len(own) == 1 or not _is_small(tensor)):
                found[tensor.name] = own


def _is_array_variable(tensor: Any) -> bool:
    return tensor.dtype == tf.resource and (tf_private.find_resource_spec(tensor) or ("", ()))[1] != ()


def _is_small(tensor: Any) -> bool:
    count = tensor.shape.num_elements()
    return count is not None and count * max(1, tensor.dtype.size) <= MAX_SMALL_BYTES


# ---------------------------------------------------------------------- all patches
BUILDING_PATCHES = (
    Patch(tf_private.KerasNode, "__init__", keras_scopes.init_node),
    Patch(tf_private.KerasSequential, "add", keras_scopes.add_layer),
)
TRACING_PATCHES = (
    Patch(tf.GradientTape, "gradient", differentiate.answer_tape),
    Patch(tf.GradientTape, "__enter__", differentiate.enter_tape),
    Patch(tf_private.parallel_for, "_pfor_impl", differentiate.run_vectorized),
    gradients.patch_gradients(differentiate.answer_gradients),
    gradients.patch_records(differentiate.record_name_scope),
    tf_private.patch_masks(differentiate.record_mask),
    Patch(tf_private.PolymorphicFunction, "__call__", call_inlined),
    tf_private.patch_cond(split_condition),
    tf_private.patch_ops(projection.project_inputs),
    *tf_patch.patch_draws(create_draw_state),
    Patch(tf_private.KerasFunction, "_run_through_graph", keras_scopes.run_graph),
    Patch(tf_private.KerasFunction, "_get_operation_for_node", keras_scopes.note_next_node),
    Patch(tf_private.KerasSequential, "call", keras_scopes.call_sequential),
    Patch(tf_private.KerasLayer, "__call__", layer_placement.call_placed),
    tf_patch.patch_moments(loss_weights.synchronize_moments),
)


class _Builder:
    """A watcher of scopes that tags what Keras builds while one is open."""

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        """Context of a scope."""
        keras_scopes.record_entry()
        with apply_patches(BUILDING_PATCHES if current_trace() is None else ()):
            yield


def install() -> list[Watcher]:
    """Patch TensorFlow and Keras so that traced ops are stamped with scopes, and built layers tagged; returns newly
    installed watchers.
    """
    there = {type(watcher) for watcher in watchers}
    fresh: list[Watcher] = [kind() for kind in (Stamper, _Builder) if kind not in there]
    watchers.extend(fresh)
    return fresh


@contextlib.contextmanager
def apply_tracing_patches() -> Iterator[None]:
    """Context around the trace of a step that applies `TRACING_PATCHES`."""
    with apply_patches(TRACING_PATCHES):
        yield
