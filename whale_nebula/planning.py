"""`nb.plan`: what a step will be cut into, without running one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
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

    Take a Keras model and a batch `x, y[, sample_weight]`: the plan is that of its train step, or of its
    predict step where it is not compiled. Or take an `nb.function` and its arguments. Of the example only
    shapes and types matter: arrays, tensors, `tf.TensorSpec`, `keras.KerasTensor` or a `tf.data.Dataset`
    all do. Variables keep their values; what the first step would build (layers, optimizer slots) is built.

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
    pipeline = captured.program.pipeline
    rows = micro_batches(captured.program.leaves, tensors, pipeline.micro_batch)
    return _plan(subject.step.name, captured, cut, rows, run)


def _plan(name: str, captured: Captured, cut: Cut, rows: Sequence[int], run: Run) -> Plan:
    pipeline, overview = cut.program.pipeline, Overview(cut, rows[0])
    return Plan(
        name=name,
        stages=overview.stages(),
        boundaries=overview.boundaries(),
        links=_links(cut, rows, run),
        once=overview.once(),
        tied=overview.tied(),
        micro_batch=pipeline.micro_batch,
        rows=tuple(rows),
        schedule=pipeline.schedule,
        in_flight=pipeline.in_flight,
        versions={
            "tensorflow": tf.__version__, "keras": keras.__version__, "whale_nebula": whale_nebula.__version__
        },
        threads={
            "intra_op": tf.config.threading.get_intra_op_parallelism_threads(),
            "inter_op": tf.config.threading.get_inter_op_parallelism_threads(),
        },
        notes=cut.notes,
        lines=canonical_lines(cut.program),
        definition=functools.partial(_graph_def, cut, Workshop(captured.graph, captured.aliases)),
    )  # fmt: skip


def _links(cut: Cut, rows: Sequence[int], run: Run) -> dict[str, PlanLink]:
    """The lines that this step uses; sizes by the formula that links count by."""
    clusters = [stage.cluster for stage in cut.program.stages]
    found = link_reports(cut, clusters, rows)
    lines = {name: run.links.between(*name.split("->")) for name in found}
    return {name: PlanLink(str(lines[name]), link.payload_bytes) for name, link in found.items()}


def _graph_def(cut: Cut, workshop: Workshop, stage: str) -> Any:
    """The graph of a stage's forward, in the first phase in which it has one."""
    for phase in cut.phases:
        for found in phase.stages:
            if cut.program.stages[found.stage].key == stage and found.forward is not None:
                return workshop.make(found.forward).concrete.graph.as_graph_def()
    return tf.compat.v1.GraphDef()


# ---------------------------------------------------------------------- what is planned
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
    example = [tf.nest.map_structure(_as_fed, leaf) for leaf in example]
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


def _as_fed(leaf: Any) -> Any:
    """Keras feeds floating arrays in its own precision."""
    floating = isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating)
    return leaf.astype(keras.config.floatx()) if floating else leaf


def _signature(subject: _Subject) -> tuple[Signature, list[Any]]:
    """The signature of a call with these examples; a spec keeps the unknown axes that it has."""
    specs: dict[int, tf.TensorSpec] = {}

    def stand_in(leaf: Any) -> Any:
        spec = _spec(leaf)
        if spec is None:
            return leaf
        tensor = tf.zeros([_ROWS if axis is None else axis for axis in spec.shape], spec.dtype)
        specs[id(tensor)] = spec
        return tensor

    arguments = [(name, tf.nest.map_structure(stand_in, value)) for name, value in subject.arguments]
    layout, tensors = signature(arguments, subject.step.whole)
    given = [specs.get(id(tensor), spec) for tensor, spec in zip(tensors, layout.specs, strict=True)]
    chosen = [_open(spec) if split else spec for spec, split in zip(given, layout.batched, strict=True)]
    return replace(layout, specs=tuple(chosen)), tensors


def _open(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _spec(leaf: Any) -> tf.TensorSpec | None:
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, keras.KerasTensor) else None
