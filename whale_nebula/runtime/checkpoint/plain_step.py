"""Training of a model without scopes: Keras runs its steps itself, and the variables that they read and write are
saved. These are the variables of the model, and all others that the function traced by Keras refers to: optimizers of a
custom `train_step`, and the generator of all draws without a seed. In it, TensorFlow's own random ops draw from
variables, with unchanged numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.capture.patches import STATE
from whale_nebula.runtime.checkpoint.fit_position import program_of, to_tensors, variables_of
from whale_nebula.site import script_site, warn_once
from whale_nebula.tf import keras_training
from whale_nebula.tf.patch import apply_patches, make_generator_state, patch_draws
from whale_nebula.tf.private import list_op_types

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints


class PlainStep:
    """The train function of a model without scopes, whose steps Keras runs itself."""

    trains = True

    def __init__(self, checkpoints: Checkpoints, model: Any) -> None:
        self.name, self.title = program_of(model), ""
        self.steps = 0
        self._checkpoints, self._model, self._function = checkpoints, model, model.train_function
        self._restored_at = -1
        self._draws: dict[str, Any] = {}
        self._draw_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
        self._patches = patch_draws(self._find_draw_counter)

    def __call__(self, iterator: Any) -> Any:
        """Run the `steps_per_execution` steps of an execution, or skip their batches."""
        with apply_patches(self._patches):
            return self._run(iterator)

    def _run(self, iterator: Any) -> Any:
        steps: int = self._model.steps_per_execution
        batches: list[Any] = []
        known = self._restored_at == self._checkpoints.known_variables.restore_requests
        if not known and not isinstance(iterator, tf.data.Iterator):
            batches, iterator = keras_training.draw_batches(iterator, 1)
        traced = iterator if isinstance(iterator, tf.data.Iterator) else batches and batches[0]
        if not known and self.name in self._checkpoints.position.programs:
            self._register_variables(traced)
        if self._checkpoints.skip_batch(self.name, steps):
            for _ in range(steps):
                next(iterator)
            return to_tensors(self._checkpoints.position.logs)
        if self._checkpoints.needs_batch(self):
            batches, iterator = keras_training.draw_batches(iterator, steps)
        self._checkpoints.before_step(self, tf.nest.flatten(batches))
        with self._checkpoints.note_failure():
            logs = self._function(iterator)
        if self._restored_at < 0:
            self._register_variables(traced)
        self.steps += 1
        self._checkpoints.after_step(self, lambda: select_numbers(logs), steps)
        return logs

    def _register_variables(self, traced: Any) -> None:
        """Register all variables, and restore them. They exist after the first step; in a resumed run, its trace."""
        self._restored_at = self._checkpoints.known_variables.restore_requests
        graph = keras_training.trace_step(self._function, traced)
        if graph is None:
            keras_training.build_model(self._model, getattr(traced, "element_spec", traced))
            warn_once(
                script_site(),
                f"{self.name} runs eagerly, so only the variables of its model are saved",
                why="other variables that it writes, such as optimizers and seeds, are known only if it is traced",
                mend="use model.compile(...) without run_eagerly",
                key=self.name,
            )
        variables = variables_of(self._model)
        for variable in [] if graph is None else keras_training.list_captured_variables(graph):
            add_variable(variables, variable)
        self._checkpoints.add_variables(self, variables)
        counted = self._checkpoints.count_saved(self)
        needed = {each.path for each in self._model.trainable_variables} if counted else ()
        self._checkpoints.register_variables(self.name, variables, needed, counted=bool(counted))
        self._checkpoints.restore_others(self)
        self._checkpoints.warn_of_draws(self.name, () if graph is None else list_op_types(graph))
        if self._checkpoints.known_variables.was_reached(self.name, needed):
            self.steps = counted or self.steps
        if self.title:
            self._checkpoints.known_variables.titles.note_trained(self.name, self.title, self.list_trained())

    def list_trained(self) -> list[Any]:
        """The trained variables, once they are created."""
        return [each.value for each in self._model.trainable_variables]

    def _find_draw_counter(self, seed: int, seed2: int) -> Any:
        """The variable from which the next op with these seeds in this graph draws: the n-th one has the same in all
        traces, so that draws continue. None outside graphs.
        """
        if tf.executing_eagerly():
            return None
        met = self._draw_counts.setdefault(tf.compat.v1.get_default_graph(), Counter())
        name = f"{STATE}_{seed}_{seed2}"
        met[name] += 1
        path = name if met[name] == 1 else f"{name}#{met[name]}"
        if path not in self._draws:
            self._draws[path] = make_generator_state(seed, seed2, name)
            with tf.init_scope():
                self._checkpoints.known_variables.restore(self.name, {path: self._draws[path]})
        return self._draws[path]


def select_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the results of a step, by name, as in Keras's logs: those in dicts are included.

    >>> select_numbers({"loss": tf.constant(0.5), "parts": {"first": tf.constant(2.0)}, "each": tf.zeros(3)})
    {'loss': 0.5, 'first': 2.0}
    """
    found: dict[str, float] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            found |= select_numbers(value)
        else:
            with contextlib.suppress(TypeError, ValueError):
                found[name] = float(value)
    return found


def restore_trained(checkpoints: Checkpoints, model: Any, kind: str) -> None:
    """Restore a model without scopes that is about to be evaluated, if the saved run has trained it."""
    source = checkpoints.source
    if source is not None and program_of(model) in source.manifest.position.programs:
        program = f"{model.name}.{kind}_step"
        checkpoints.register_variables(program, variables_of(model), (), counted=False)


def add_variable(variables: dict[str, Any], variable: Any) -> None:
    """Add a variable by its name, with a number if that name is already used, unless it is among them."""
    if any(each is variable for each in variables.values()):
        return
    path, number = variable.name.split(":")[0], 1
    while (name := path if number == 1 else f"{path}#{number}") in variables:
        number += 1
    variables[name] = variable
