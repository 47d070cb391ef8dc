"""Plan steps instead of running them, for `whale-nebula show`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.capture.step import Captured, Signature
from whale_nebula.plan.plan import Plan
from whale_nebula.runtime.plan_step import capture_step, plan_step
from whale_nebula.runtime.step.step import Step, Unpack
from whale_nebula.tf.patch import Patch, apply_patches

_SAVING = (
    *((keras.Model, name) for name in ("save", "save_weights", "export")),
    *((tf.train.Checkpoint, name) for name in ("save", "write")),
    (tf.train.CheckpointManager, "save"),
    *((keras.saving, name) for name in ("save_model", "save_weights")),
    (tf.saved_model, "save"),
)
_BEGINNINGS = ("on_train_begin", "on_test_begin")
_KEPT_CALLBACKS = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


@dataclass
class ShownPlans:
    """The plans of the steps that a script calls, one for each signature of a step. With `goes_on` the script continues
    after a step, with zeros as results; `report_save` is called instead of each function that would save a model, with
    its name.
    """

    goes_on: bool
    report_save: Callable[[str], None]
    plans: list[Plan] = field(default_factory=list)
    steps_by_key: dict[Any, Captured] = field(default_factory=dict)
    open_patches: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    are_callbacks_suppressed: bool = False

    def suppress_callbacks(self) -> None:
        """Suppress callbacks of the script from now on, because many open a file as soon as training begins."""
        if not self.are_callbacks_suppressed:
            self.are_callbacks_suppressed = True
            self.open_patches.enter_context(_suspend_callbacks())

    def observe_step(self, step: Step, layout: Signature, tensors: Sequence[Any], unpack: Unpack) -> Captured:
        """The captured step of a call: a new one is captured, and planned if it has scopes."""
        key = id(step), layout.key
        if key not in self.steps_by_key:
            call = partial(step.call, unpack)
            seen = capture_step(step.name, call, layout, tensors, paths=step.paths, metrics=step.metrics)
            if seen.program.has_scopes:
                self.plans.append(plan_step(step.name, seen, tensors, (*step.notes, *seen.projected)))
                self._suppress_saving()
            self.steps_by_key[key] = seen
        return self.steps_by_key[key]

    def make_zeros(self, seen: Captured, tensors: Sequence[Any]) -> Any:
        """Zeros in place of a step's results, with their structure, shapes and dtypes."""
        rows = next((int(tensor.shape[0]) for tensor in tensors if tensor.shape.rank), 1)
        results = tf.nest.flatten(seen.structured_outputs, expand_composites=True)
        return seen.pack([_zero(each, rows) for each in results if isinstance(each, tf.Tensor)])

    def _suppress_saving(self) -> None:
        """Suppress saving once the first planned step has returned zeros."""
        if self.goes_on and len(self.plans) == 1:
            self.open_patches.enter_context(_report_saves(self.report_save))


def _suspend_callbacks() -> contextlib.AbstractContextManager[None]:
    """Suppress all callbacks but history and progress bar while this is open."""
    kind = keras.callbacks.CallbackList

    def suppress_and_begin(plain: Callable[..., None]) -> Callable[..., None]:
        def begin(callbacks: Any, *args: Any, **kwargs: Any) -> None:
            callbacks.callbacks = [each for each in callbacks.callbacks if type(each) in _KEPT_CALLBACKS]
            plain(callbacks, *args, **kwargs)

        return begin

    return apply_patches([Patch(kind, name, suppress_and_begin(getattr(kind, name))) for name in _BEGINNINGS])


def _report_saves(report: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """While this is open, report calls that save a model to `report` instead of saving."""

    def make_report(what: str) -> Callable[..., None]:
        return lambda *args, **kwargs: report(what)

    found = [(kind, name, f"{kind.__name__.rpartition('.')[2]}.{name}") for kind, name in _SAVING]
    return apply_patches([Patch(kind, name, make_report(what)) for kind, name, what in found])


def _zero(result: Any, rows: int) -> Any:
    shape = [] if result.shape.rank is None else [rows if axis is None else axis for axis in result.shape]
    return tf.zeros(shape, result.dtype)
