"""`nb.plan`: plan a step without running one."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.capture.arguments import explain_missing_target
from whale_nebula.capture.step import Captured, Signature, signature
from whale_nebula.errors import OptionError, PlanError
from whale_nebula.plan.plan import Plan
from whale_nebula.runtime.function import NebulaFunction
from whale_nebula.runtime.keras import find_running_step, make_keras_step, pack_as_fit
from whale_nebula.runtime.plan_step import capture_step, plan_step
from whale_nebula.runtime.step.step import Arguments, Step, Unpack, find_declared_inputs
from whale_nebula.scopes.auto import get_current_limits
from whale_nebula.scopes.options import check_signature
from whale_nebula.scopes.step_options import current_step_options
from whale_nebula.site import calling_site, script_site, short_traceback, warn_at

__all__ = ["Plan", "plan"]

_ROWS = 32
"""The assumed number of rows of an example without rows."""


@check_signature
@short_traceback
def plan(model_or_function: Any, *example: Any) -> Plan:
    """Plan a step without running it: stages, boundaries, parts that run once, and the schedule.

    The arguments are a Keras model and a batch `x, y[, sample_weight]`, for the plan of its train step, or of its
    predict step if it is not compiled; or an `nb.function` and its arguments. Only shapes and dtypes of the example are
    used: arrays, tensors, `tf.TensorSpec`, `keras.KerasTensor` or a `tf.data.Dataset`. Variables keep their values;
    layers and optimizer slots that the first step would build are built. A step that has run is not captured again.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> @nb.function
    ... def double(x):
    ...     with nb.stage(cluster="gpu"):
    ...         return 2.0 * x
    >>> nb.plan(double, tf.TensorSpec([None, 4])).stages["gpu"].inputs
    ('x',)
    """
    batch, is_tuple = _read_example(example)
    subject = _find_subject(model_or_function, batch, is_tuple)
    layout, tensors = _make_signature(subject)
    with explain_missing_target("nb.plan", model_or_function, batch):
        step = subject.step
        running = None if subject.running is None or get_current_limits() else subject.running.find_capture(layout)
        captured = running or capture_step(
            step.name, subject.call, layout, tensors,
            paths=step.paths, metrics=step.metrics, owner=step.owner, data=step.data(subject.unpack),
        )  # fmt: skip
    check_scopes(subject.step.name, captured)
    notes = (*captured.projected, *filter(None, [current_step_options().description]))
    return plan_step(subject.step.name, captured, tensors, notes)


# ---------------------------------------------------------------------- subjects
@dataclass(frozen=True)
class Subject:
    """A step that is planned or verified, and the arguments of a call. `running` is the step, if any, that calls of the
    model or function run: its capture is used again.
    """

    step: Step
    arguments: Arguments
    unpack: Unpack
    running: Step | None = None

    def call(self, arguments: Sequence[Any]) -> Any:
        """Call the step with these values of its arguments."""
        return self.step.call(self.unpack, arguments)


def _find_subject(target: Any, example: Sequence[Any], is_tuple: bool = False) -> Subject:
    """The step of a model or function, with an example of its arguments. With `is_tuple` a train step receives the
    example as a tuple, otherwise as `fit` would pass it.
    """
    if isinstance(target, functools.partial) and isinstance(target.func, NebulaFunction) and not target.keywords:
        target, example = target.func, (*target.args, *example)
    if isinstance(target, NebulaFunction):
        return Subject(target.step, *target.arguments(*example), running=target.step)
    if not isinstance(target, keras.Model):
        kind = "a plain function" if inspect.isroutine(target) else f"{type(target).__name__} {reprlib.repr(target)}"
        raise OptionError(
            f"nb.plan takes a Keras model or an nb.function, not {kind}",
            where=str(calling_site()),
            mend="write @nb.function above the definition of the function, and plan that",
        )
    if not example:
        raise OptionError(
            "nb.plan needs an example",
            where=str(calling_site()),
            why="a step depends on the shapes and dtypes of its batch",
            mend="nb.plan(model, x, y); keras.KerasTensor((8, 4)) can replace an array of that shape",
        )
    check_batch("nb.plan", "model", example)
    _check_arrays(example)
    example = [tf.nest.map_structure(cast_to_floatx, leaf) for leaf in example]
    if getattr(target, "compiled", False):
        kind, data = "train", tuple(example) if is_tuple else pack_as_fit(example)
    else:
        _warn_left_out(target, example)
        kind, data = "predict", example[0]
    return Subject(*make_keras_step(target, kind, data), running=find_running_step(target, kind))


def _warn_left_out(model: Any, example: Sequence[Any]) -> None:
    """Warn if an example for a predict step, which takes only x, has more parts."""
    names = [name for name, part in zip(("y", "sample_weight"), example[1:], strict=False) if part is not None]
    if names:
        warn_at(
            calling_site(),
            f"nb.plan ignores {' and '.join(names)}: it plans the predict step of model {model.name!r}",
            why="a model that is not compiled has no train step",
            mend="call model.compile(...) first, or nb.plan(model, x)",
        )


def check_batch(caller: str, model: str, example: Sequence[Any]) -> None:
    """Validate a Keras batch: x, y and sample_weight, each one or several arrays."""
    if not 1 <= len(example) <= 3:
        raise OptionError(
            f"{caller} got {len(example)} parts of a batch",
            where=str(calling_site()),
            why="a Keras model takes x, y and sample_weight",
            mend=f"{caller}({model}, x, y)",
        )


def _check_arrays(example: Sequence[Any]) -> None:
    leaves = [leaf for leaf in tf.nest.flatten(list(example)) if leaf is not None]
    if not any(hasattr(leaf, "shape") for leaf in leaves):
        raise OptionError(
            "nb.plan got no array",
            where=str(calling_site()),
            why=f"shapes and dtypes are taken from the example, and {shorten(repr(example[0]), 50)} has none",
            mend="nb.plan(model, np.asarray(x), np.asarray(y)); keras.KerasTensor((8, 4)) can replace such an array",
        )


def check_scopes(name: str, captured: Captured) -> None:
    """Refuse a step without scopes, which has nothing to plan, or whose only scope divides nothing."""
    if captured.program.has_scopes:
        return
    if captured.unused_split is not None:
        axis = captured.unused_split.options["axis"]
        raise PlanError(
            f"{name} has no scopes but an nb.split that divides no variable, so there is nothing to plan",
            where=str(captured.unused_split.site),
            why=f"no variable with an axis {axis} is read inside it",
            mend="nb.split(2, axis=-1) divides the columns of the weights of layers that are called inside it",
        )
    raise PlanError(
        f"{name} has no scopes, so there is nothing to plan",
        where=str(script_site()),
        why="no op was created inside nb.stage",
        mend='use with nb.cluster(), nb.stage(cluster="gpu"): around the layers of each stage\n'
        "or nb.auto_parallel() before the step is built, which chooses the stages",
    )


# ---------------------------------------------------------------------- examples
def _read_example(example: Sequence[Any]) -> tuple[Sequence[Any], bool]:
    """The example batch, a dataset replaced by the spec of its elements; and whether these are tuples, which the train
    step receives unchanged, even with one element.
    """
    if len(example) != 1 or not isinstance(example[0], tf.data.Dataset):
        return example, False
    found = example[0].element_spec
    return (found, True) if isinstance(found, tuple) else ((found,), False)


def cast_to_floatx(leaf: Any) -> Any:
    """A floating-point array in Keras's precision, in which `fit` feeds it; anything else unchanged."""
    floating = isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating)
    return leaf.astype(keras.config.floatx()) if floating else leaf


def _make_signature(subject: Subject) -> tuple[Signature, list[Any]]:
    """The signature of a call with the subject's arguments, and their tensors: zeros for specs, whose unknown axes stay
    unknown in the signature.
    """
    specs: dict[int, tf.TensorSpec] = {}

    def make_tensor(leaf: Any) -> Any:
        spec = _find_spec(leaf)
        if spec is None:
            return leaf
        tensor = tf.zeros([_ROWS if axis is None else axis for axis in spec.shape], spec.dtype)
        specs[id(tensor)] = spec
        return tensor

    arguments = [(name, tf.nest.map_structure(make_tensor, value)) for name, value in subject.arguments]
    layout, tensors = signature(arguments, subject.step.whole, find_declared_inputs())
    own = [specs.get(id(tensor), spec) for tensor, spec in zip(tensors, layout.specs, strict=True)]
    any_rows = [
        tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if batched else spec
        for spec, batched in zip(own, layout.batched, strict=True)
    ]
    return replace(layout, specs=tuple(any_rows)), tensors


def _find_spec(leaf: Any) -> tf.TensorSpec | None:
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, keras.KerasTensor) else None
