"""Initial values of variables that a tf.function creates: assigned after its trace, and computed once.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.tf import require_supported

require_supported()
from tensorflow.python.eager import lift_to_graph  # noqa: E402
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable  # noqa: E402
from tensorflow.python.util import object_identity  # noqa: E402

from whale_nebula.tf.drawing import draw_part  # noqa: E402

_KERAS_VARIABLES = keras.Variable.__module__
_INITIALIZERS = keras.initializers.Initializer.__module__.rpartition(".")[0]


@dataclass
class InitialValues:
    """The variables that a traced tf.function has created, and that have no value yet, with their initial values."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def initialize_variables(self, is_wanted: Callable[[Any], bool]) -> None:
        """Initialise the variables for which a predicate is true, unless they have a value by now; may be called
        repeatedly.
        """
        chosen = [pair for pair in self.pairs if is_wanted(pair[0])]
        self.pairs[:] = [pair for pair in self.pairs if not any(pair is each for each in chosen)]
        _assign_values([pair for pair in chosen if not has_value(pair[0])])

    def create_variable(self, create: Callable[..., Any], **options: Any) -> Any:
        """Create a variable without a value; for `tf.variable_creator_scope` in a tf.function that is traced only to
        create variables. TensorFlow adds a condition for each, which makes up most of such a trace.
        """
        initial_value = options.pop("initial_value")
        value = initial_value() if callable(initial_value) else initial_value
        value = tf.convert_to_tensor(value, options.get("dtype"))
        options |= {"dtype": value.dtype, "shape": value.shape if options.get("shape") is None else options["shape"]}
        variable = UninitializedVariable(extra_handle_data=value, **options)
        self.pairs.append((variable, value))
        return variable

    def draw_part(self, variable: Any, axis: int, start: int, size: int) -> Any:
        """Some entries of a variable's initial value along an axis, as a tensor, without the rest; None for other
        variables, or if the initial value can be computed only as a whole.
        """
        value = next((value for each, value in self.pairs if each is variable), None)
        return None if value is None or has_value(variable) else draw_part(value, axis, start, size)


def is_repeatable(initial_value: Callable[[], Any]) -> bool:
    """Whether a callable from which Keras takes a variable's initial value returns the same at every call: its
    initializer is Keras's own, and has no seed generator.
    """
    names = initial_value.__code__.co_freevars if isinstance(initial_value, types.FunctionType) else ()
    cells = dict(zip(names, initial_value.__closure__ or (), strict=True)) if names else {}
    initializer = cells["initializer"].cell_contents if "initializer" in cells else None
    is_keras = initial_value.__module__.startswith(_KERAS_VARIABLES)
    is_keras = is_keras and type(initializer).__module__.startswith(_INITIALIZERS)
    return is_keras and isinstance(getattr(initializer, "seed", 0), int)


def has_value(variable: Any) -> bool:
    """Whether a variable has been initialised."""
    return bool(tf.raw_ops.VarIsInitializedOp(resource=variable.handle))


def defer_initialization(function: Any) -> InitialValues:
    """Leave variables that are created while a tf.function is traced uninitialised. Returns their initial values."""
    later = InitialValues()
    function._initialize_uninitialized_variables = later.pairs.extend
    return later


def _assign_values(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Initialise variables by tensors of a traced graph. Constants become arguments of the initialising function:
    TensorFlow would fold them, and compute a large value twice, with three times its memory. So do the positions of
    random draws, which the step keeps in variables (`tf.patch`): TensorFlow refuses to read one here.
    """
    if not pairs:
        return
    tensors = [tensor for _, tensor in pairs]
    above = _list_ops(tensors)
    constants, draws = ([op for op in above if op.type == kind] for kind in ("Const", "RngReadAndSkip"))
    handles = {op.inputs[0].op for op in draws}
    options: dict[str, Any] = {}
    if draws:
        fed = {op for op in tensors[0].graph.get_operations() if op.type == "Placeholder"} - handles
        options = {"disallowed_placeholders": fed, "handle_captures": True}

    def assign(*values: Any) -> None:
        known = object_identity.ObjectIdentityDictionary()
        for op, value in zip([*constants, *draws], values, strict=True):
            known[op.outputs[0]], known[op] = value, value.op
        lift_to_graph.lift_to_graph(tensors, tf.compat.v1.get_default_graph(), op_map=known, **options)
        for variable, tensor in pairs:
            variable.assign(known[tensor], read_value=False)

    with tf.init_scope():
        copies = [tf.constant(tf.make_ndarray(op.get_attr("value"))) for op in constants]
        copies += [_read_position(op) for op in draws]
        tf.function(assign, autograph=False).get_concrete_function(*copies)(*copies)  # counts no retraces


def _read_position(draw: Any) -> Any:
    """The position from which a random op of a traced graph would draw first."""
    handle = next(outside for outside, inside in draw.graph.captures if inside is draw.inputs[0])
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)


def _list_ops(tensors: Sequence[Any]) -> list[Any]:
    """The ops by which tensors of a graph are computed."""
    ops = {tensor.op: None for tensor in tensors}
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        above = [each for each in (*(tensor.op for tensor in op.inputs), *op.control_inputs) if each not in ops]
        ops.update(dict.fromkeys(above))
        waiting += above
    return list(ops)


def trace_variables(function: Any, specs: Sequence[Any]) -> None:
    """Trace a tf.function only to create its variables: once, while a call would trace it again."""
    pairs: list[tuple[Any, Any]] = []
    function._initialize(tuple(specs), {}, add_initializers_to=pairs)
    function._initialize_uninitialized_variables(pairs)
