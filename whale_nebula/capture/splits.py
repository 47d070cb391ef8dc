"""The variables that `nb.split` shards: those that ops inside the scope read, and those created inside it.

In a run of several processes, the initial values of large variables that are created inside are drawn later: when they
are read, or, once the first step is planned, only the piece that a worker holds. This applies only to variables that a
Keras initializer with its own seed initialises, and whose parts are bit-identical to those of the whole value, so the
time of drawing makes no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.capture.entered_scopes import REPLICA, SPLIT_STAGE, number_scope
from whale_nebula.capture.mirror import COPIED, SPLIT, order_operations
from whale_nebula.errors import OptionError
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program, Split, Stage
from whale_nebula.passes.effects import is_read
from whale_nebula.passes.replicas import find_replica_speeds
from whale_nebula.scopes.frames import Frame
from whale_nebula.scopes.identity import count_least_workers, count_workers, get_worker_speeds, has_other_processes
from whale_nebula.site import script_site, warn_once
from whale_nebula.tf import drawing, initial_values
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.guarded_variables import make_guarded_class

LEAST_UNDRAWN_BYTES = 1 << 20
"""The minimum size, in bytes, of a variable that is left undrawn."""


class PendingValue(NamedTuple):
    """A variable's initial value that is not drawn yet: a function that computes it, and its `formula` as a tensor of a
    graph. `is_waiting` is whether a read now waits for the plan instead of needing the value.
    """

    compute: Callable[[], Any]
    formula: Any
    is_waiting: Callable[[], bool]


class _Undrawn:
    """Mixin for the class of a variable without a value: the first read that needs the value draws it."""

    nebula_initial: PendingValue


def create_undrawn(create: Callable[..., Any], options: Mapping[str, Any], is_waiting: Callable[[], bool]) -> Any:
    """Create a variable without drawing its initial value; None if it is too small, or needed as a whole.
    `is_waiting` is whether code that reads a variable now waits for the plan instead of needing its value.
    """
    initial = options.get("initial_value")
    if not tf.executing_eagerly() or not callable(initial) or not initial_values.is_repeatable(initial):
        return None
    drawn = tf.function(initial, autograph=False).get_concrete_function().graph.outputs[0]
    if drawn.shape.num_elements() * drawn.dtype.size < LEAST_UNDRAWN_BYTES or not drawing.can_draw_parts(drawn):
        return None
    variable = create(**{**options, "initial_value": _allocate(drawn)})
    if variable.dtype != drawn.dtype:
        return create(**options)
    _replace(variable, tf.zeros([0], drawn.dtype))
    kind: Any = type(variable)
    variable.__class__ = make_guarded_class(kind, _Undrawn, f"Undrawn{kind.__name__}", _read, _write)
    variable.nebula_initial = PendingValue(initial, drawn, is_waiting)
    return variable


def _allocate(like: Any) -> Any:
    """Memory for a tensor, which the system provides only when it is written."""
    return tf.raw_ops.Empty(shape=like.shape.as_list(), dtype=like.dtype)


def _replace(variable: Any, value: Any) -> None:
    """Assign a value with a shape different from that of the present one."""
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


def release(variable: Any) -> PendingValue:
    """Turn an undrawn variable into a plain one that is still empty, to be assigned next. Returns its initial value."""
    initial: PendingValue = variable.nebula_initial
    del variable.nebula_initial
    variable.__class__ = type(variable).__mro__[2]
    return initial


def _read(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not variable.nebula_initial.is_waiting():
        draw_value(variable)
    return plain(variable, *args, **kwargs)


def _write(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    if tf.executing_eagerly() and name in tf_private.VARIABLE_OVERWRITES:
        _replace(variable, _allocate(release(variable).formula))
    elif not variable.nebula_initial.is_waiting():
        draw_value(variable)
    return plain(variable, *args, **kwargs)


_SIBLINGS = {REPLICA: COPIED, SPLIT_STAGE: SPLIT}
"""The stages of siblings, and the stamps of their ops."""

_MADE_IN = "_nebula_split"
"""Attribute of a variable: the scope in which it was created."""


@contextlib.contextmanager
def mark_variables(frame: Frame, is_waiting: Callable[[], bool]) -> Iterator[None]:
    """Mark the variables that are created in this context with the scope. In several processes, large ones are not
    drawn as long as only code that waits for the plan (`is_waiting`) reads them.
    """

    def make(create: Any, **options: Any) -> Any:
        variable = create_undrawn(create, options, is_waiting) if has_other_processes() else None
        variable = create(**options) if variable is None else variable
        setattr(variable, _MADE_IN, frame)
        return variable

    with tf.variable_creator_scope(make):
        yield


def stamp_siblings(trace: Any, graph: Graph) -> Graph:
    """The graph with a stage for an `nb.split` and one for an `nb.replica` next to it, for steps without `nb.stage`."""
    if not trace.entered_scopes.add_sibling_stages():
        return graph
    operations = order_operations(trace.graph.get_operations())
    ops = list(graph.ops)
    for op in graph.ops:
        stamps = {key: tf_private.read_number_stamp(operations[op.index], name) for key, name in _SIBLINGS.items()}
        key = next((key for key, number in stamps.items() if number is not None), None)
        if op.stage is None and key is not None:
            ops[op.index] = replace(op, stage=key)
    return replace(graph, ops=tuple(ops))


def add_splits(trace: Any, program: Program, operations: Sequence[Any]) -> Program:
    """The program with the variables that its splits shard, and the number of shards in each stage, 1 without any."""
    split_frames: list[Frame] = trace.entered_scopes.splits
    found: dict[tuple[int, int], tuple[int, Frame]] = {}
    caught: list[Frame] = []
    made = _list_created_inside(trace, {op.name: number for number, op in enumerate(operations)})
    decided = _list_decided(trace, program)
    for op in program.graph.ops:
        handle = op.inputs[0].op if is_read(op) and op.inputs else -1
        variable = program.variable_ops.get(handle)
        if variable is None or program.request_of(op.index) is not None:
            continue
        number = tf_private.read_number_stamp(operations[op.index], SPLIT)
        frame = made.get(handle) if number is None else split_frames[number]
        frame = frame or decided.get((program.labels.get(op.index, 0), variable.path))
        shape = variable.spec.shape
        if frame is None or shape is None or not variable.spec.floating:  # integers are a generator's state
            continue
        axis = int(frame.options["axis"])
        if -len(shape) <= axis < len(shape):
            key, axis = (program.labels.get(op.index, 0), handle), axis % len(shape)
            caught.append(frame)
            before, first = found.setdefault(key, (axis, frame))
            if before != axis:
                raise _two_axes_error(variable.path, frame, axis, first, before)
    stages = list(program.stages)
    for number, stage in enumerate(stages):
        inside = [frame for (of, _), (_, frame) in found.items() if of == number]
        beside = {of for of, _ in found if stages[of].cluster == stage.cluster}
        where = stage.where or next((str(frame.site) for frame in inside), "")
        stages[number] = replace(stage, shards=_count_shards(stage, inside, len(beside)), where=where)
        for frame in inside:
            if frame in split_frames and frame.options["count"]:
                _warn_if_elastic(frame, stages[number])
    for frame in split_frames:
        if all(frame is not each for each in caught):
            _warn_if_unused(frame)
    splits, longest = list[Split](), dict[Frame, int]()
    for (of, handle), (axis, frame) in sorted(found.items(), key=lambda pair: pair[0]):
        shards, size = stages[of].shards, (program.variable_ops[handle].spec.shape or ())[axis] or 0
        longest[frame] = max(size, longest.get(frame, 0))
        if size >= shards > 1:
            splits.append(Split(handle, of, axis, str(frame.site)))
    for (of, _), (_, frame) in found.items():
        if frame in split_frames and longest[frame] < stages[of].shards:
            _warn_if_short(frame, longest[frame], stages[of].shards)
    divided = {split.stage for split in splits}
    stages = [stage if number in divided else replace(stage, shards=1) for number, stage in enumerate(stages)]
    if any(stage.speeds for stage in stages):
        found_speeds = find_replica_speeds(stages, get_worker_speeds())
        stages = [replace(stage, speeds=each) for stage, each in zip(stages, found_speeds, strict=True)]
    return replace(program, stages=tuple(stages), splits=tuple(splits))


def _list_decided(trace: Any, program: Program) -> dict[tuple[int, str], Frame]:
    """The variables that a planner has decided to shard, by stage number and path, as if a scope had requested it;
    without optimizer slots, because an update shared by several stages reads the slots of all.
    """
    given = trace.assignment
    shards = {stage.key: stage.shards for stage in given.stages if stage.shards > 1} if given is not None else {}
    return {
        (number, path): Frame("split", {"count": shards[stage.key], "axis": -1}, script_site())
        for number, stage in enumerate(program.stages)
        if stage.key in shards
        for path, keys in given.variables.items()
        if stage.key in keys
    }


def _list_created_inside(trace: Any, numbers: Mapping[str, int]) -> dict[int, Frame]:
    """The split scopes in which captured variables were created, by the op of the variable's handle."""
    known = {id(variable.handle): variable for variable in trace.graph.variables}
    found = {}
    for external, internal in trace.graph.captures:
        frame = getattr(known.get(id(external)), _MADE_IN, None)
        if frame is not None:
            number_scope(trace.entered_scopes.splits, frame)
            found[numbers[internal.op.name]] = frame
    return found


def _count_shards(stage: Stage, frames: Sequence[Frame], among: int) -> int:
    """The number of devices of a split stage: the scope's or, by default, the cluster's workers divided `among` its
    split stages and their replicas.
    """
    usual = max(1, count_workers(stage.cluster) // max(1, among) // stage.replicas)
    counts = {frame.options["count"] or usual: frame for frame in frames}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        raise OptionError(
            f"nb.split has {other} devices, and at {first.site} it has {one}",
            where=str(second.site),
            why=f"both divide variables of stage {stage.key!r}, and a stage can have only one group of devices",
            mend=f"use nb.split({one}) in both places, or a separate stage for one of them",
        )
    return int(next(iter(counts), 1))


def _two_axes_error(path: str, frame: Frame, axis: int, first: Frame, before: int) -> OptionError:
    return OptionError(
        f"nb.split divides {path!r} along axis {axis}, and at {first.site} along axis {before}",
        where=str(frame.site),
        why="a variable can be divided along only one axis",
        mend=f"use nb.split(axis={before}) in both places",
    )


def _warn_if_unused(frame: Frame) -> None:
    warn_once(
        frame.site,
        "nb.split has no effect",
        why=f"no variable with an axis {frame.options['axis']} is read inside it; this is reported once for this line",
        mend="use with nb.split(...): around the call of the layer whose weights are to be divided",
    )


def _warn_if_elastic(frame: Frame, stage: Stage) -> None:
    """Warn that an elastic run ends when the stage's cluster has fewer workers than the scope needs."""
    needed, least = stage.replicas * stage.shards, count_least_workers(stage.cluster)
    if least < needed <= count_workers(stage.cluster):
        warn_once(
            frame.site,
            f"nb.split({stage.shards}) needs {needed} workers of {stage.cluster!r}, "
            f"but elastic: allows it to have {least}",
            why="each device is a worker of the stage's cluster, so the run ends when there are fewer",
            mend=f"nb.split() for all workers that there are, or elastic: {{{stage.cluster}: {{min: {needed}}}}}",
            key="elastic",
        )


def _warn_if_short(frame: Frame, longest: int, devices: int) -> None:
    warn_once(
        frame.site,
        "nb.split has no effect",
        why=f"its variables have at most {longest} entries along axis {frame.options['axis']}, for {devices} devices",
        mend=f"nb.split({longest}) or fewer devices, or another axis" if longest > 1 else "nb.split with another axis=",
    )
