"""Variables that are made under `nb.split` in a run of several processes, and not drawn: they get their initial value
when it is read, or only the piece of it that a worker holds, once the first step is planned.

Only variables whose initial value is drawn by an initializer of Keras with a seed of its own, in parts with the same
bits as the whole, are left undrawn: when it is computed makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.tf import drawing, initial_values
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.guarding import make_guarded_class

LEAST = 1 << 20
"""The least bytes of a variable that is left undrawn."""


class Initial(NamedTuple):
    """A variable's initial value: how to `compute` it, the tensor of a graph that is its `formula`, and `waits`."""

    compute: Callable[[], Any]
    formula: Any
    waits: Callable[[], bool]


class _Undrawn:
    """Mixin for the class of a variable without a value: the first read outside a captured step draws it."""

    nebula_initial: Initial


def create_undrawn(create: Callable[..., Any], options: Mapping[str, Any], waits: Callable[[], bool]) -> Any:
    """Create a variable without drawing its initial value; None if it is too small, or needed as a whole. `waits` is
    whether what reads a variable now waits for the plan, instead of its value.
    """
    initial = options.get("initial_value")
    if not tf.executing_eagerly() or not callable(initial) or not initial_values.draws_alike(initial):
        return None
    drawn = tf.function(initial, autograph=False).get_concrete_function().graph.outputs[0]
    if drawn.shape.num_elements() * drawn.dtype.size < LEAST or not drawing.can_draw_parts(drawn):
        return None
    variable = create(**{**options, "initial_value": _allocate(drawn)})
    if variable.dtype != drawn.dtype:
        return create(**options)
    _replace(variable, tf.zeros([0], drawn.dtype))
    kind: Any = type(variable)
    variable.__class__ = make_guarded_class(kind, _Undrawn, f"Undrawn{kind.__name__}", _read, _write)
    variable.nebula_initial = Initial(initial, drawn, waits)
    return variable


def _allocate(like: Any) -> Any:
    """Memory for a tensor, of which the system provides none before it is written."""
    return tf.raw_ops.Empty(shape=like.shape.as_list(), dtype=like.dtype)


def _replace(variable: Any, value: Any) -> None:
    """Assign a value of another shape than that of the present one."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


def is_undrawn(variable: Any) -> bool:
    """Whether a variable has no value yet."""
    return isinstance(variable, _Undrawn)


def draw_part(variable: Any, axis: int, start: int, size: int) -> Any:
    """Some entries of an undrawn variable's initial value along an axis; None if it has a value."""
    return drawing.draw_part(variable.nebula_initial.formula, axis, start, size) if is_undrawn(variable) else None


def draw_value(variable: Any) -> None:
    """Give an undrawn variable its initial value."""
    if is_undrawn(variable):
        initial = release(variable)
        with tf.init_scope(), tf.device(variable.device):
            _replace(variable, initial.compute())


def release(variable: Any) -> Initial:
    """Make an undrawn variable a plain one, with no value: it will be assigned. Returns its initial value."""
    initial: Initial = variable.nebula_initial
    del variable.nebula_initial
    variable.__class__ = type(variable).__mro__[2]
    return initial


def _read(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not variable.nebula_initial.waits():
        draw_value(variable)
    return plain(variable, *args, **kwargs)


def _write(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    if tf.executing_eagerly() and name in tf_private.VARIABLE_OVERWRITES:
        _replace(variable, _allocate(release(variable).formula))
    elif not variable.nebula_initial.waits():
        draw_value(variable)
    return plain(variable, *args, **kwargs)
