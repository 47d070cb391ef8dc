"""What this package replaces of TensorFlow and Keras to capture a step, and when: one list.

`BUILDING` is applied while a scope is open, so that Keras's construction of models is followed. `TRACING` is applied
while a step is traced. Outside of both, TensorFlow and Keras are as they were, except for what single features change:

- `tf.keras_import`: one inert wrapper of Keras's `make_train_function` and its like.
- `capture.intercept`: the questions to a tape that a step opens, on that object.
- `runtime.step.step`: `keras.Model.__call__`, while a step is traced, to see which models it calls.
- `runtime.show`: the beginnings of callbacks, and all that saves, while `whale-nebula show` plans a script.
- `runtime.variables.reads`: reads and saves of single models, and hooks of single callbacks, in several processes.
- `runtime.variables.remote`: the class of variables that other processes hold.
- `runtime.step.results` and `feed.inputs`: what `tf.shape` and `tf.concat` do with our stand-ins for tensors, by
  TensorFlow's dispatch; `tf.private.tape_told`: a record on tapes around a step, whose gradient is refused.
- `tf.collectives`: the start of TensorFlow's runtime, in a worker that has others in its cluster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture import intercept, keras_scopes, loss_weights, place_trace, projection, replacements
from whale_nebula.capture.tracing import Stamper, current
from whale_nebula.scopes import Frame
from whale_nebula.tf import moments as tf_moments
from whale_nebula.tf import private as tf_private
from whale_nebula.tf import random as tf_random
from whale_nebula.tf.patch import Patch, apply_patches

BUILDING = (
    Patch(tf_private.KerasNode, "__init__", keras_scopes.init_node),
    Patch(tf_private.KerasSequential, "add", keras_scopes.add_layer),
)
TRACING = (
    Patch(tf.GradientTape, "gradient", intercept.answer_tape),
    Patch(tf.GradientTape, "__enter__", intercept.enter_tape),
    Patch(tf_private.parallel_for, "_pfor_impl", intercept.vectorize_plainly),
    tf_private.patch_gradients(intercept.answer_gradients),
    tf_private.patch_masks(intercept.note_mask),
    Patch(tf_private.PolymorphicFunction, "__call__", replacements.call_inlined),
    tf_private.patch_cond(replacements.split_condition),
    tf_private.patch_ops(projection.find_inputs),
    *tf_random.patch_draws(replacements.find_draw_counter),
    Patch(tf_private.KerasFunction, "_run_through_graph", keras_scopes.run_graph),
    Patch(tf_private.KerasFunction, "_get_operation_for_node", keras_scopes.find_operation),
    Patch(tf_private.KerasSequential, "call", keras_scopes.call_sequential),
    Patch(tf_private.KerasLayer, "__call__", place_trace.call_placed),
    tf_moments.patch_moments(loss_weights.synchronize_moments),
)


class _Builder:
    """Watches scopes: what Keras builds while one is open remembers it."""

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        """Around what stands in a scope."""
        keras_scopes.note_entry()
        with apply_patches(BUILDING if current() is None else ()):
            yield


def install() -> list[scopes.Watcher]:
    """Let scopes stamp what is traced and tag what Keras builds; gives the watchers that were not there before."""
    there = {type(watcher) for watcher in scopes.watchers}
    fresh: list[scopes.Watcher] = [kind() for kind in (Stamper, _Builder) if kind not in there]
    for watcher in fresh:
        scopes.add_watcher(watcher)
    return fresh


@contextlib.contextmanager
def trace_patched() -> Iterator[None]:
    """Around the trace of a step: apply `TRACING`."""
    with apply_patches(TRACING):
        yield
