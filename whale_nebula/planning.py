"""`nb.plan`: what a step will be cut into, without running one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

import whale_nebula
from whale_nebula.capture.mirror import in_order
from whale_nebula.capture.places import place_of
from whale_nebula.capture.step import Captured, Signature, capture, signature
from whale_nebula.errors import OptionError, PlanError
from whale_nebula.feed.batch import micro_batches
from whale_nebula.function import NebulaFunction
from whale_nebula.ir.canonical import canonical_lines
from whale_nebula.ir.face import Plan
from whale_nebula.ir.overview import Overview, PlanLink
from whale_nebula.ir.plan import Cut
from whale_nebula.passes.plan import cut_program
from whale_nebula.run import Run, current_run
from whale_nebula.runtime.engine import place_workers
from whale_nebula.runtime.fragment_function import Workshop
from whale_nebula.runtime.keras_step import keras_step
from whale_nebula.runtime.sizes import link_reports
from whale_nebula.runtime.step import Arguments, Step, Unpack

__all__ = ["Plan", "plan"]

_ROWS = 32
"""Rows of an example whose rows are not given."""


def plan(model_or_function: Any, *example: Any) -> Plan:
    """What a step is cut into: stages, boundaries, what runs once, and the schedule. Nothing is run.

    Take a Keras model and a batch `x, y[, sample_weight]`: the plan is that of its train step, or of its predict
    step where it is not compiled. Or take an `nb.function` and its arguments. Of the example only shapes and
    types matter: arrays, tensors, `tf.TensorSpec`, `keras.KerasTensor` or a `tf.data.Dataset` all do. Variables
    keep their values; what the first step would build (layers, optimizer slots) is built.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> @nb.function
    ... def double(x):
    ...     with nb.stage(cluster="gpu"):
    ...         return 2.0 * x
    >>> nb.plan(double, tf.TensorSpec([None, 4])).stages["gpu"].inputs
    ('x',)
    """
    subject = _subject(model_or_function, _example(example))
    layout, tensors = _signature(subject)
    captured = capture(subject.call, layout, paths=subject.step.paths)
    if not captured.program.stages[0].where:
        raise _no_scopes(subject.step.name)
    run = current_run()
    run.meet([stage.cluster for stage in captured.program.stages])
    operations = in_order(captured.graph.get_operations())
    cut = cut_program(captured.program, place_workers(captured, run), lambda op: place_of(operations[op]))
    program = captured.program
    return _plan(subject.step.name, captured, cut, micro_batches(program.leaves, tensors, program.pipeline.micro_batch), run)


@dataclass(frozen=True)
class _Subject:
    """What is planned."""

    step: Step
    arguments: Arguments
    unpack: Unpack

    def call(self, given: Sequence[Any]) -> Any:
        """The step on these values of its arguments."""
        args, kwargs = self.unpack(list(given))
        return self.step.fn(*args, **kwargs)


def _subject(given: Any, example: Sequence[Any]) -> _Subject:
    if isinstance(given, functools.partial) and isinstance(given.func, NebulaFunction) and not given.keywords:
        given, example = given.func, (*given.args, *example)
    if isinstance(given, NebulaFunction):
        return _Subject(given.step, *given.arguments(*example))
    if not isinstance(given, keras.Model):
        raise OptionError(
            f"nb.plan takes a Keras model or an nb.function, not {type(given).__name__}",
            mend="put @nb.function where the function is defined, and plan that",
        )
    if not example:
        raise OptionError("nb.plan needs an example", where=given.name, mend="nb.plan(model, x, y)")
    if getattr(given, "compiled", False):
        return _Subject(*keras_step(given, "train", tuple(example)))
    return _Subject(*keras_step(given, "predict", example[0]))


def _no_scopes(name: str) -> PlanError:
    return PlanError(
        f"{name} has no scopes, so there is nothing to plan",
        why="no op was made inside nb.stage",
        mend='with nb.cluster(), nb.stage(cluster="gpu"): around the layers of each stage',
    )


# ---------------------------------------------------------------------- examples
def _example(example: Sequence[Any]) -> Sequence[Any]:
    """A dataset stands for what it gives."""
    if len(example) == 1 and isinstance(example[0], tf.data.Dataset):
        found = example[0].element_spec
        return found if isinstance(found, tuple) else (found,)
    return example


def _signature(subject: _Subject) -> tuple[Signature, list[Any]]:
    """The signature of a call with these examples; a spec keeps the unknown axes that it has."""
    specs: dict[int, tf.TensorSpec] = {}

    def stand_in(leaf: Any) -> Any:
        spec = _spec(leaf)
        if spec is None:
            return _as_keras_feeds(leaf) if subject.step.name.endswith("_step") else leaf
        tensor = tf.zeros([_ROWS if axis is None else axis for axis in spec.shape], spec.dtype)
        specs[id(tensor)] = spec
        return tensor

    arguments = [(name, tf.nest.map_structure(stand_in, value)) for name, value in subject.arguments]
    layout, tensors = signature(arguments, subject.step.whole)
    chosen = tuple(
        tf.TensorSpec([None, *specs[id(t)].shape[1:]] if split else specs[id(t)].shape, t.dtype) if id(t) in specs else spec
        for t, split, spec in zip(tensors, layout.batched, layout.specs, strict=True)
    )
    return replace(layout, specs=chosen), tensors


def _spec(leaf: Any) -> tf.TensorSpec | None:
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, keras.KerasTensor) else None


def _as_keras_feeds(leaf: Any) -> Any:
    """Keras feeds floating arrays in its own precision."""
    dtype = getattr(leaf, "dtype", None)
    floating = dtype is not None and tf.as_dtype(dtype).is_floating and not isinstance(leaf, tf.Tensor)
    return leaf.astype(keras.config.floatx()) if floating else leaf
