"""Which variables of a step its clusters tell each other of, and which must differ between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from whale_nebula.ir.program import Program

_SEEDS = "seed_generator_state"
_STRIDE = 0x3779B9  # between the seeds of two clusters


def weights_of(program: Program, variables: Mapping[str, Any], models: Iterable[Any]) -> Mapping[str, Any]:
    """What is trained, and the averages that layers of these models keep of their batches; in the order of their paths.

    What an optimizer remembers stays where it is, and so do metrics.
    """
    asked_for = {op for request in program.requests for op in request.origins}
    trained = {program.variable_ops[op].path for op in asked_for & program.variable_ops.keys()}
    kept = {id(_plain(each)) for model in models for each in model.non_trainable_weights}
    asked = {path for path, variable in variables.items() if path in trained or id(variable) in kept}
    return {path: variables[path] for path in sorted(asked) if variables[path].dtype.is_floating}


def seeds_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The seeds that dropout draws by."""
    return {path: v for path, v in variables.items() if path.endswith(_SEEDS) and v.shape.rank == 1}


def sow(variables: Mapping[str, Any], place: int) -> None:
    """Let the dropout of the cluster with this place draw other numbers than that of the first."""
    for variable in seeds_of(variables).values() if place else ():
        first = tf.one_hot(0, variable.shape[0], dtype=variable.dtype)
        variable.assign_add(first * tf.cast(place * _STRIDE, variable.dtype))


def _plain(variable: Any) -> Any:
    """TensorFlow's own variable behind one of Keras's."""
    return getattr(variable, "value", variable)
