"""Everything private of TensorFlow and Keras that this package touches, one small function each.

Each has a contract test in tests/contract, so that an upgrade of TensorFlow or Keras fails in one place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from keras.src import tree as keras_tree
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.core import compute_output_spec
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.models.sequential import Sequential as KerasSequential
from keras.src.ops.function import Function as KerasFunction
from keras.src.ops.node import Node as KerasNode
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import tape as tape_lib
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import cond_v2, gradients_util, handle_data_util
from tensorflow.python.util import nest, tf_stack

__all__ = [
    "KerasFunction",
    "KerasNode",
    "KerasSequential",
    "TensorFlowTrainer",
    "compute_output_spec",
    "keras_tree",
]

FuncGraph = func_graph_lib.FuncGraph


def stamped(graph: Any, stamps: Mapping[str, str | int]) -> contextlib.AbstractContextManager[None]:
    """While open, every op made in `graph` carries these attributes."""
    values = {
        name: attr_value_pb2.AttrValue(**{"i": value} if isinstance(value, int) else {"s": value.encode()})
        for name, value in stamps.items()
    }
    scope: contextlib.AbstractContextManager[None] = graph._attr_scope(values)
    return scope


def differentiate(
    targets: Sequence[Any], sources: Sequence[Any], seeds: Sequence[Any], stops: Sequence[Any]
) -> list[Any]:
    """The gradients of `targets` (weighted by `seeds`) in the current graph; None, dense or IndexedSlices each."""
    if not sources:
        return []
    found = gradients_util._GradientsHelper(
        list(targets), list(sources), list(seeds), stop_gradients=list(stops), name="nebula"
    )
    return list(found)


_build_cond = cond_v2._build_cond


def hook_cond(takes: Callable[[Any, Sequence[Any]], bool] | None) -> None:
    """Ask `takes(predicate, branches)` before a cond is built; where it has built one itself, nothing more is done."""
    if takes is None:
        cond_v2._build_cond = _build_cond
        return

    def build(
        pred: Any, true_graph: Any, false_graph: Any, true_inputs: Any, false_inputs: Any, building_gradient: bool,
        **options: Any,
    ) -> Any:  # fmt: skip
        if not building_gradient and takes(pred, (true_graph, false_graph)):
            return None
        return _build_cond(
            pred, true_graph, false_graph, true_inputs, false_inputs, building_gradient=building_gradient, **options
        )

    cond_v2._build_cond = build


def tape_records() -> bool:
    """Whether some gradient tape records right now."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def tape_open(tape: tf.GradientTape) -> bool:
    """Whether a tape can still be asked: a plain tape answers once."""
    return tape._tape is not None


def tape_stop(tape: tf.GradientTape) -> None:
    """Do what `gradient` does first: a plain tape asked inside its own block stops recording."""
    if tape._recording and not tape._persistent:
        tape._pop_tape()


def tape_finish(tape: tf.GradientTape) -> None:
    """Do what `gradient` does last: a plain tape forgets what it recorded."""
    if not tape._persistent:
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape = None


@contextlib.contextmanager
def tape_reopened(tape: tf.GradientTape) -> Iterator[Callable[[Any], bool]]:
    """Ask a tape whether it has followed a tensor: ops outside its block, or unwatched, it has not."""
    again = not tape._recording
    if again:
        tape_lib.push_tape(tape._tape)
    try:
        yield lambda tensor: bool(pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([tensor]))
    finally:
        if again:
            tape_lib.pop_tape(tape._tape)


def resource_spec(tensor: Any) -> tuple[str, tuple[int | None, ...] | None] | None:
    """Element type and shape of the variable behind a resource tensor."""
    data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    first = data.shape_and_type[0]
    shape = tf.TensorShape(first.shape)
    return tf.as_dtype(first.dtype).name, None if shape.rank is None else tuple(shape.as_list())


def function_graph(graph: Any, name: str) -> Any:
    """The FuncGraph of a function that an op of `graph` calls."""
    found = graph._get_function(name)
    return found.graph if hasattr(found, "graph") else function_def_to_graph.function_def_to_graph(found.definition)


def set_input(op: Any, position: int, tensor: Any) -> None:
    """Let an op of the graph being traced read another tensor."""
    op._update_input(position, tensor)


def user_frames(op: Any) -> list[tuple[str, int]]:
    """File and line of the Python frames that made an op, outermost first."""
    return [(frame.filename, frame.lineno) for frame in op.traceback or ()]


def current_frames() -> list[tuple[str, int]]:
    """File and line of the Python frames that lead here, outermost first."""
    return [(frame.filename, frame.lineno) for frame in tf_stack.extract_stack()]


def call_flat(function: Any, tensors: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """Call a ConcreteFunction with its tensors in order: half the price of the friendly call."""
    return list(function._call_flat(list(tensors), captured) or ())


def entry_layer() -> Any:
    """The outermost Keras layer whose `call` runs now, or None."""
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.entry_layer


def layers_of(model: Any) -> list[Any]:
    """A model and every layer inside it."""
    return list(model._flatten_layers())


def nodes_by_depth(function: Any) -> dict[int, list[Any]]:
    """The nodes of a functional model, by depth; of a Sequential, those of the functional model inside it."""
    found: dict[int, list[Any]] = getattr(getattr(function, "_functional", None) or function, "_nodes_by_depth", {})
    return found


def autographed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What tf.function would make of a function: Python control flow becomes TensorFlow's."""
    context = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=None)
    converted: Callable[..., Any] = autograph.tf_convert(function, context, user_requested=True)
    return converted


def leaf_paths(structure: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a nested structure, each with its path, in the order of tf.nest.flatten."""
    return list(nest.flatten_with_tuple_paths(structure)) if nest.is_nested(structure) else [((), structure)]


VARIABLE_READS = ("_read_variable_op", "sparse_read", "gather_nd")
"""Methods of a resource variable through which every read goes."""

VARIABLE_WRITES = ("assign", "assign_add", "assign_sub")
"""Methods of a resource variable through which Keras writes."""

VARIABLE_HANDLE = "_handle"
"""Attribute that eager ops in C++ read a variable by, past its methods, if it is an EagerTensor and nothing else."""
