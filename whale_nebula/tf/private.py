# ruff: noqa: E402
"""Private parts of TensorFlow and Keras that this package uses, one small function each.

Each has a contract test in tests/contract, so that an upgrade of TensorFlow or Keras fails in one place.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.tf import require_supported
from whale_nebula.tf.patch import Patch

require_supported()  # the following imports depend on these versions

from keras.src import backend as keras_backend
from keras.src import tree as keras_tree
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow.core import compute_output_spec
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.layers.core.input_layer import InputLayer as KerasInput
from keras.src.layers.layer import Layer as KerasLayer
from keras.src.models.sequential import Sequential as KerasSequential
from keras.src.ops.function import Function as KerasFunction
from keras.src.ops.node import Node as KerasNode
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager import record
from tensorflow.python.eager import tape as tape_lib
from tensorflow.python.eager.polymorphic_function import autograph_util, function_type_utils
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as PolymorphicFunction
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import function_def_to_graph, kernels, op_callbacks, random_seed
from tensorflow.python.ops import cond_v2, control_flow_v2_func_graphs, custom_gradient, handle_data_util
from tensorflow.python.ops.parallel_for import control_flow_ops as parallel_for
from tensorflow.python.util import dispatch, nest, tf_stack

__all__ = [
    "KerasFunction",
    "KerasInput",
    "KerasLayer",
    "KerasNode",
    "KerasSequential",
    "PolymorphicFunction",
    "TFEpochIterator",
    "TensorFlowTrainer",
    "compute_output_spec",
    "in_symbolic_scope",
    "keras_tree",
    "parallel_for",
]

FuncGraph = func_graph_lib.FuncGraph
CondBranch = control_flow_v2_func_graphs.CondBranchFuncGraph


def stamp_ops(graph: Any, stamps: Mapping[str, str | int]) -> contextlib.AbstractContextManager[None]:
    """While open, every op created in `graph` gets these attributes."""
    values = {
        name: attr_value_pb2.AttrValue(**{"i": value} if isinstance(value, int) else {"s": value.encode()})
        for name, value in stamps.items()
    }
    scope: contextlib.AbstractContextManager[None] = graph._attr_scope(values)
    return scope


_build_cond = cond_v2._build_cond


def patch_cond(build_branches: Callable[[Any, Sequence[Any]], tuple[Any, ...]]) -> Patch:
    """Call `build_branches(predicate, branches)` before a cond is built. If it builds the cond, it returns a tuple with
    the result, otherwise an empty one.
    """

    def build(
        pred: Any, true_graph: Any, false_graph: Any, true_inputs: Any, false_inputs: Any, building_gradient: bool,
        **options: Any,
    ) -> Any:  # fmt: skip
        built = () if building_gradient else build_branches(pred, (true_graph, false_graph))
        if built:
            return built[0]
        return _build_cond(
            pred, true_graph, false_graph, true_inputs, false_inputs, building_gradient=building_gradient, **options
        )

    return Patch(cond_v2, "_build_cond", build)


_create_op = func_graph_lib.FuncGraph._create_op_internal


def patch_ops(choose_inputs: Callable[[Any, str, Sequence[Any]], Sequence[Any]]) -> Patch:
    """Call `choose_inputs(graph, op_type, inputs)` for an op's inputs, before it is created in any FuncGraph."""

    def create(graph: Any, op_type: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return _create_op(graph, op_type, list(choose_inputs(graph, op_type, list(inputs))), *args, **kwargs)

    return Patch(func_graph_lib.FuncGraph, "_create_op_internal", create)


def is_tape_recording() -> bool:
    """Whether a gradient tape is recording."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """While open, no tape of this thread records."""
    stopped: contextlib.AbstractContextManager[None] = record.stop_recording()
    return stopped


def is_followed_by_tape(tensor: Any) -> bool:
    """Whether a recording tape has traced this tensor from a watched one."""
    return bool(pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([tensor]))


def record_on_tapes(
    variables: Sequence[Any],
    tensors: Sequence[Any],
    results: Sequence[Any],
    report: Callable[[frozenset[int] | None], None],
) -> None:
    """Record on the open tapes that `results` depend on variables and tensors, without a gradient. A request for such a
    gradient calls `report` with the ids of its sources (tensors, and handles of variables), or None if they are
    unknown.
    """
    tape_lib.variables_accessed(variables)

    def back(*gradients: Any) -> list[None]:
        calls = (frame for frame in iterate_python_frames() if frame.f_code is _tape_gradient.__code__)
        report(next((frozenset(map(id, frame.f_locals["flat_sources"])) for frame in calls), None))
        return [None] * (len(variables) + len(tensors))

    given = [*(variable.handle for variable in variables), *tensors]
    record.record_operation("NebulaStep", list(results), given, back)


_tape_gradient = tf.GradientTape.gradient


def is_tape_open(tape: tf.GradientTape) -> bool:
    """Whether a tape can still compute gradients: a plain tape does so once."""
    return tape._tape is not None


def stop_tape(tape: tf.GradientTape) -> None:
    """Stop recording, like `gradient` of a plain tape inside its own block."""
    if tape._recording and not tape._persistent:
        tape._pop_tape()


def finish_tape(tape: tf.GradientTape) -> None:
    """Do the last action of `gradient`: a plain tape discards its records."""
    if not tape._persistent:
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape = None


@contextlib.contextmanager
def reopen_tape(tape: tf.GradientTape) -> Iterator[Callable[[Any], bool]]:
    """Context with a function that returns whether a tape has traced a tensor: it has not traced ops outside its block,
    or unwatched.
    """
    again = not tape._recording
    if again:
        tape_lib.push_tape(tape._tape)
    try:
        yield is_followed_by_tape
    finally:
        if again:
            tape_lib.pop_tape(tape._tape)


def find_resource_spec(tensor: Any) -> tuple[str, tuple[int | None, ...] | None] | None:
    """Element type and shape of the variable behind a resource tensor; None if they are unknown."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    first = data.shape_and_type[0]
    shape = tf.TensorShape(first.shape)
    return tf.as_dtype(first.dtype).name, None if shape.rank is None else tuple(shape.as_list())


def list_op_types(graph: Any) -> list[str]:
    """The types of all ops of a graph and of the functions that it calls, each once."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    return list(dict.fromkeys(str(node.op) for each in nodes for node in each))


def find_function_graph(graph: Any, name: str) -> Any:
    """The FuncGraph of a function that an op of `graph` calls; those of a body may be registered in an outer graph."""
    while not graph._is_function(name) and getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    found = graph._get_function(name)
    with graph.as_default():  # the graph of the functions that it calls by name
        return found.graph if hasattr(found, "graph") else function_def_to_graph.function_def_to_graph(found.definition)


def set_input(op: Any, position: int, tensor: Any) -> None:
    """Make an op of the graph being traced read a different tensor."""
    op._update_input(position, tensor)


def list_user_frames(op: Any) -> list[tuple[str, int]]:
    """File and line of the Python frames that created an op, outermost first."""
    return [(frame.filename, frame.lineno) for frame in op.traceback or ()]


def read_text_stamp(op: Any, name: str) -> str:
    """The attribute that `stamp_ops` wrote on an op, as text; "" if there is none."""
    try:
        return bytes(op.get_attr(name)).decode()
    except ValueError:
        return ""


def read_number_stamp(op: Any, name: str) -> int | None:
    """The integer that `stamp_ops` wrote on an op; None if there is none."""
    try:
        return int(op.get_attr(name))
    except ValueError:
        return None


def find_layers_around(op: Any) -> tuple[tuple[str, ...], str]:
    """The names of the Keras layers whose calls created an op, outermost first, and the file in Keras of the innermost;
    "" if that is not one of Keras's own layers.

    Each call opens a name scope; TensorFlow numbers repeated ones.
    """
    frames = [(frame.filename, frame.name) for frame in op.traceback or ()]
    calls = sum(name == "__call__" and file.endswith(_LAYER_FILE) for file, name in frames)
    scopes = op.name.split("/")[:-1][:calls]
    plain = [re.sub(r"_\d+$", "", scope) for scope in scopes]
    in_use = op.graph._names_in_use
    names = tuple(
        plain[depth] if "/".join([*scopes[:depth], plain[depth]]).lower() in in_use else scopes[depth]
        for depth in range(len(scopes))
    )
    inside = [file for file, _ in frames if _LAYERS in file and not file.endswith(_LAYER_FILE)]
    return names, inside[-1] if names and inside else ""


_LAYERS, _LAYER_FILE = "/keras/src/layers/", "/keras/src/layers/layer.py"


def call_flat(function: Any, tensors: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """Call a ConcreteFunction with its tensors in order and its captured ones, at half the cost of an ordinary call."""
    return list(function._call_flat(list(tensors), captured) or ())


def find_entry_layer() -> Any:
    """The outermost running Keras layer call, or None."""
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def list_running_layers() -> list[Any]:
    """The Keras layers whose calls are running, outermost first. Each call has opened a name scope."""
    calls = [call for call in list_keras_calls() if call.name == "__call__"]
    return [call.first_argument for call in reversed(calls) if call.frame.f_code.co_filename.endswith(_LAYER_FILE)]


def add_variable(layer: Any, name: str, values: Any) -> Any:
    """Add a variable to a layer that is already built, as its own `build` would have created it."""
    with tf.init_scope():
        variable = keras.Variable(values, dtype=layer.variable_dtype, name=name)
    variable._path = f"{layer.path or layer.name}/{name}"
    locked = layer._tracker.locked
    layer._tracker.unlock()
    layer._track_variable(variable)
    if locked:
        layer._tracker.lock()
    return variable


def list_layers(model: Any) -> list[Any]:
    """A model and every layer inside it, at any depth."""
    return list(model._flatten_layers())


def list_sublayers(layer: Any) -> list[Any]:
    """The layers directly inside a layer or model, in the order of their assignment, each once."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def list_nodes_by_depth(function: Any) -> dict[int, list[Any]]:
    """The nodes of a functional model, by depth; of a Sequential, those of the functional model inside it."""
    found: dict[int, list[Any]] = getattr(getattr(function, "_functional", None) or function, "_nodes_by_depth", {})
    return found


def call_on_run(node: Any, callback: Callable[[Any], None]) -> None:
    """Call `callback` with the arguments whenever a functional model runs this node, for any purpose."""
    fill_in = node.arguments.fill_in

    def wrapper(tensors: Any) -> Any:
        found = fill_in(tensors)
        callback(found)
        return found

    node.arguments.fill_in = wrapper


def find_original(node: Any) -> Any:
    """The node that a node is a copy of, or None: a functional model that starts at a tensor inside another one has
    copies of its nodes, with outputs named after those of the originals.
    """
    names = [tensor.name for tensor in node.output_tensors]
    others = (other for other in node.operation._inbound_nodes if other is not node)
    return next((each for each in others if [f"{one.name}_clone" for one in each.output_tensors] == names), None)


def call_on_config(operation: Any, callback: Callable[[], None]) -> None:
    """Call `callback` whenever a layer or operation returns its config, from which copies are made."""
    _wrap_method(operation, "get_config", before=callback)


def call_on_build(sequential: Any, callback: Callable[[], None]) -> None:
    """Call `callback` whenever a Sequential has built the functional model inside it."""
    _wrap_method(sequential, "build", after=callback)


def _wrap_method(
    instance: Any, name: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    plain = getattr(instance, name)

    @functools.wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before()
        found = plain(*args, **kwargs)
        after()
        return found

    object.__setattr__(instance, name, wrapper)


def iterate_python_frames() -> Iterator[FrameType]:
    """The running Python frames, innermost first, starting with the caller's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class KerasCall(NamedTuple):
    """A running function of Keras: its name, its first argument, and its frame."""

    name: str
    first_argument: Any
    frame: FrameType


def list_keras_calls() -> list[KerasCall]:
    """The running functions of Keras, innermost first."""
    found: list[KerasCall] = []
    for frame in iterate_python_frames():
        code = frame.f_code
        if code.co_argcount and frame.f_globals.get("__name__", "").startswith("keras.src."):
            found.append(KerasCall(code.co_name, frame.f_locals.get(code.co_varnames[0]), frame))
    return found


def is_in_custom_gradient() -> bool:
    """Whether a function under `tf.custom_gradient` is running, while a graph is built."""
    return any(frame.f_code is custom_gradient._graph_mode_decorator.__code__ for frame in iterate_python_frames())


def is_exporting() -> bool:
    """Whether a model is being written as a SavedModel: its traces are never trained."""
    return any(part in frame.filename for frame in tf_stack.extract_stack() for part in _EXPORTERS)


def is_debugger_active() -> bool:
    """Whether a TensorFlow debugger adds its own ops to every op created in this thread."""
    return bool(op_callbacks.should_invoke_op_callbacks())


_EXPORTERS = ("/keras/src/export/", "/tensorflow/python/saved_model/")


def apply_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function as tf.function would: Python control flow becomes TensorFlow's."""
    context = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=None)
    converted: Callable[..., Any] = autograph.tf_convert(function, context, user_requested=True)
    return converted


def is_compiled_by_xla(function: Any) -> bool:
    """Whether a tf.function has jit_compile=True."""
    return bool(function._jit_compile)


def can_inline(function: Any) -> bool:
    """Whether a tf.function is equivalent to its Python function."""
    return not function._attributes and not function._run_functions_eagerly


def run_inline(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the Python function behind a tf.function in the current graph, as tracing it would.

    Arguments are cast to its signature, AutoGraph rewrites it, op seeds are those of a separate graph, and its results
    become tensors.
    """
    bound = function_type_utils.bind_function_inputs(args, kwargs, function._function_type, function._default_values)

    def as_traced(leaf: Any) -> Any:  # Python values are unchanged
        return tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf

    def as_returned(leaf: Any) -> Any:
        kept = leaf is None or isinstance(leaf, tf.TensorArray)
        return (
            leaf if kept or (tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)) else tf.convert_to_tensor(leaf)
        )

    args, kwargs = nest.map_structure(as_traced, (bound.args, bound.kwargs))
    python, options = function._python_function, function._experimental_autograph_options
    status = ag_ctx.Status.ENABLED if function._autograph else ag_ctx.Status.DISABLED
    if function._autograph:
        python = autograph_util.py_func_from_autograph(python, options)
    with ag_ctx.ControlStatusCtx(status=status, options=options), _number_random_ops():
        return nest.map_structure(as_returned, python(*args, **kwargs))


@contextlib.contextmanager
def _number_random_ops() -> Iterator[None]:
    """Number the random ops that are created inside as a separate graph would: the number determines their seeds."""
    graph, counts = tf.compat.v1.get_default_graph(), random_seed._graph_to_seed_dict
    before, counts[graph] = counts.get(graph, 0), 0
    try:
        yield
    finally:
        counts[graph] = before


def list_leaf_paths(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a nested structure, each with its path, in the order of tf.nest.flatten."""
    return list(nest.flatten_with_tuple_paths(structure)) if nest.is_nested(structure) else [((), structure)]


VARIABLE_READS = ("_read_variable_op", "sparse_read", "gather_nd")
"""Methods of a resource variable through which every read goes."""

VARIABLE_WRITES = ("assign", "assign_add", "assign_sub", "_restore_from_tensors")
"""Methods of a resource variable through which Keras and checkpoints write."""

VARIABLE_OVERWRITES = ("assign", "_restore_from_tensors")
"""The writing methods that do not depend on the previous value."""


def find_written_value(value: Any, *args: Any, **kwargs: Any) -> Any:
    """The value that a method of `VARIABLE_OVERWRITES` writes, from its arguments: `_restore_from_tensors` has it in a
    dict, by a name.
    """
    return next(iter(value.values())) if isinstance(value, Mapping) else value


VARIABLE_HANDLE = "_handle"
"""Attribute by which eager ops in C++ read a variable, bypassing its methods, only if it is an EagerTensor."""


def is_runtime_started() -> bool:
    """Whether TensorFlow's runtime, with its threads, has started in this process."""
    context = context_lib.context_safe()
    return context is not None and bool(context._initialized)


exempt_from_autograph = autograph.autograph_artifact
"""Decorator for classes with objects that AutoGraph calls unconverted when it rewrites the caller."""


@functools.cache
def is_supported_by_xla(op_type: str, gpu: bool) -> bool:
    """Whether XLA has a kernel for an op type. XLA registers its kernels at its first compilation."""
    _start_xla()
    wanted = "XLA_GPU_JIT" if gpu else "XLA_CPU_JIT"
    return any(kernel.device_type == wanted for kernel in kernels.get_registered_kernels_for_op(op_type).kernel)


@functools.cache
def _start_xla() -> None:
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(tf.identity, jit_compile=True, autograph=False)(tf.zeros(()))


def find_forward_op(op: Any) -> Any:
    """The forward op to whose gradient `op` belongs; `op` itself if it belongs to the forward."""
    return find_forward_op(op._original_op) if op._original_op is not None else op


@contextlib.contextmanager
def restore_caching_device() -> Iterator[None]:
    """Restore what tf.scan and tf.map_fn set in the variable scope of all graphs, and do not reset if a body raises."""
    scope = tf.compat.v1.get_variable_scope()
    before = scope._caching_device
    try:
        yield
    finally:
        scope._caching_device = before


_set_keras_mask = keras_backend.set_keras_mask


def patch_masks(callback: Callable[[Any, Any], None]) -> Patch:
    """Call `callback(tensor, mask)` for every mask that Keras sets on a tensor, as a layer may remove it again."""

    def set_keras_mask(x: Any, mask: Any) -> None:
        _set_keras_mask(x, mask)
        if mask is not None:
            callback(x, mask)

    return Patch(keras_backend, "set_keras_mask", set_keras_mask)


def dispatch_to(api: Any, kind: type, answer: Callable[..., Any]) -> None:
    """Make `answer` implement a TensorFlow function for arguments of one of our classes. The public function for
    classes, `dispatch_for_api`, does not cover functions that are called without annotations.
    """
    dispatch.dispatch_for_types(api, kind)(answer)


def silence_retracing_warning(function: Any) -> Any:
    """Return a tf.function without TensorFlow's warning about frequent retracing.

    TensorFlow counts traces by the line of a function, and one line of this library creates many functions.
    """
    function._omit_frequent_tracing_warning = True
    return function


def copy_op(op: Any, inputs: Sequence[Any]) -> Any:
    """Copy an op with other inputs, in the graph that is being traced; its shapes are inferred again."""
    attributes = {name: value for name, value in op.node_def.attr.items() if name not in ("_class", "_output_shapes")}
    graph = tf.compat.v1.get_default_graph()
    dtypes = [tensor.dtype for tensor in op.outputs]
    return graph._create_op_internal(op.type, list(inputs), dtypes, attrs=attributes, op_def=op.op_def, name=op.name)
