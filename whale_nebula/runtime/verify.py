"""`nb.verify`: compare a step of the plan with a step of the uncut model.

Both run one step from the same state, which is then restored. The effect of rounding on an update is measured: the
uncut step runs again from weights that differ by one bit. `plan.verification` has the limits.

With several processes, each runs the uncut step, while it holds the complete model, and then its part of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.capture.arguments import explain_missing_target
from whale_nebula.capture.patches import STATE
from whale_nebula.capture.step import Signature, signature, trace_uncut
from whale_nebula.codec.encoding import Encoding, parse_encoding
from whale_nebula.errors import AbsentInputError, OptionError
from whale_nebula.feed.inputs import Partial
from whale_nebula.passes.batch import DRAWS_NOTE, find_batch_fixes
from whale_nebula.passes.effects import is_seeded_draw, is_stateful_draw
from whale_nebula.passes.replicas import BATCH_SUM_NOTE
from whale_nebula.plan import verification
from whale_nebula.plan.verification import EXACT, HALF, Row, Runs, State, Values, Verification
from whale_nebula.runtime.exchange.state import States
from whale_nebula.runtime.function import NebulaFunction
from whale_nebula.runtime.keras import make_keras_step, pack_as_fit
from whale_nebula.runtime.planning import Subject, cast_to_floatx, check_batch, check_scopes
from whale_nebula.runtime.run import current_run, gathered
from whale_nebula.runtime.step.engine import Engine, make_plain_function
from whale_nebula.runtime.step.results import AbsentResult
from whale_nebula.runtime.step.rollback import OpLocations, uncut_step_error
from whale_nebula.runtime.step.step import find_declared_inputs
from whale_nebula.scopes.options import check_signature
from whale_nebula.site import calling_site, short_traceback
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.failures import suspend_carried_errors

_NUDGES = 3
_HALVES = {"fp16": "float16", "bf16": "bfloat16"}


@check_signature
@short_traceback
def verify(model_or_function: Any, *batch: Any) -> Verification:
    """Run one step with the plan and the same step uncut, and compare everything that they return and write.

    The arguments are a Keras model and a batch (x, y[, sample_weight]), or an `nb.function` and its arguments.
    Variables, optimizer, metrics and seeds are restored afterwards; effects of the step outside TensorFlow's variables
    (printing, a `py_function`) happen more than once. In a run of several processes every process calls it with the
    same batch, and temporarily holds the complete model, which is sent over the link twice.

    The limit of a variable's error is 1e-3 of its update (1e-2 in half precision) plus the measured effect of rounding.
    A plan with codecs less precise than half precision cannot be compared.

    >>> import tensorflow as tf
    >>> import whale_nebula as nb
    >>> weight = tf.Variable(3.0)
    >>> @nb.function
    ... def step(x):
    ...     with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
    ...         with nb.stage(cluster="gpu"):
    ...             hidden = x * weight
    ...         with nb.stage(cluster="npu"):
    ...             loss = tf.reduce_mean(hidden**2)
    ...     weight.assign_sub(0.1 * tape.gradient(loss, weight))
    ...     return loss
    >>> nb.verify(step, tf.constant([1.0, 2.0, 3.0, 4.0])).ok
    True
    >>> float(weight)
    3.0
    """
    current_run().settle()
    subject = _find_subject(model_or_function, batch)
    layout, tensors = signature(subject.arguments, subject.step.whole, find_declared_inputs())
    with explain_missing_target("nb.verify", model_or_function, batch):
        engine = subject.step.plan(subject.arguments, subject.unpack)
    run = current_run()
    with run.share_failures():  # other processes do not wait for one that failed
        _check_comparable(engine, subject, layout, tensors)
        around = partial(trace_uncut, owner=subject.step.owner) if engine.captured.projected else None
        plain = make_plain_function(subject.call, layout, around=around)
        reasons = _list_reasons(engine, tensors)
        with _restore_channels():
            runs = _run_both(engine, plain, tensors, measured=not reasons)
    return _build_verification(engine, runs, reasons)


def _check_comparable(engine: Engine, subject: Subject, layout: Signature, tensors: Sequence[Any]) -> None:
    apart = engine.captured.program.local_sgd
    if apart is not None:
        raise OptionError(
            "nb.verify cannot compare a step with sync_every",
            where=apart.where,
            why="clusters that synchronise only every few steps differ from one that has all rows in each step",
            mend='nb.replica(sync_every=1, outer="average") with plain SGD equals the uncut run; or verify without it',
        )
    check_scopes(subject.step.name, engine.captured)
    partly = [number for number, tensor in enumerate(tensors) if isinstance(tensor, Partial)]
    if missing := [*layout.absent, *partly]:
        raise AbsentInputError(
            f"nb.verify needs all of {layout.names[missing[0]]!r}, but this process has only a part of it",
            where=str(calling_site()),
            why="the uncut step runs in every process, on the whole batch",
            mend="pass complete batches, without nb.shard\nor verify the script in one process, which has all inputs",
        )


def _find_subject(subject: Any, batch: Sequence[Any]) -> Subject:
    if isinstance(subject, NebulaFunction):
        return Subject(subject.step, *subject.arguments(*batch))
    if not isinstance(subject, keras.Model):
        raise OptionError(
            f"nb.verify cannot run a {type(subject).__name__}",
            where=str(calling_site()),
            why="it takes a compiled Keras model, or a function with @nb.function",
            mend="write @nb.function above the step, and pass that to nb.verify",
        )
    if not subject.compiled:
        raise OptionError(
            f"model {subject.name!r} is not compiled",
            where=str(calling_site()),
            why="its train step needs a loss",
            mend="model.compile(optimizer, loss)",
        )
    check_batch("nb.verify", subject.name, batch)
    parts = [tf.nest.map_structure(_make_tensor, part) for part in batch]
    return Subject(*make_keras_step(subject, "train", pack_as_fit(parts)))


def _make_tensor(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, tf.Tensor) else tf.constant(cast_to_floatx(np.asarray(leaf)))


def _run_both(engine: Engine, plain: Callable[..., Any], tensors: Sequence[Any], *, measured: bool) -> Runs:
    """Run the uncut step and the planned one from the current variables, which are restored; the effect of rounding is
    `measured` in addition.
    """
    with gathered(), suspend_carried_errors():
        before = _read_variables(engine)

        def restore_variables() -> None:
            for path, value in before.items():
                engine.captured.variables[path].assign(value)

        try:
            returned = [each for each in tf.nest.flatten(plain(*tensors)) if isinstance(each, tf.Tensor)]
            uncut = State(returned, _read_variables(engine))
            shuffled = _shuffle_rows(engine, tensors)
            noise = (
                _measure_noise(engine, restore_variables, lambda: plain(*shuffled), before, uncut) if measured else {}
            )
        except tf.errors.OpError as failure:
            place = OpLocations(engine.captured.graph, engine.captured.program.stages)
            raise uncut_step_error(failure, place) from failure
        finally:
            restore_variables()
    try:
        planned = list(engine.runner.run(tensors).tensors)
        with gathered():
            return Runs(before, uncut, State(planned, _read_variables(engine)), noise)
    finally:
        restore_variables()


@contextmanager
def _restore_channels() -> Iterator[None]:
    """Restore codec states at the end."""
    states = States(current_run().channels)
    before = states.copy()
    try:
        yield
    finally:
        states.restore(before)


def _read_variables(engine: Engine) -> dict[str, Any]:
    return {path: variable.read_value() for path, variable in engine.captured.variables.items()}


def _measure_noise(
    engine: Engine, restore_variables: Callable[[], None], run: Callable[[], Any], before: Values, uncut: State
) -> dict[str, float]:
    """The effect of rounding on each variable's update, measured with weights changed by one bit."""
    found: dict[str, float] = {}
    for seed in range(_NUDGES):
        restore_variables()
        _nudge(engine, seed)
        near = _read_variables(engine)
        run()
        for path, far in verification.noise(before, uncut.variables, near, _read_variables(engine)).items():
            found[path] = max(far, found.get(path, 0.0))
    return found


def _nudge(engine: Engine, seed: int) -> None:
    """Change all trained variables by one bit of the lowest precision with which the step computes."""
    bit = max(verification.BITS[dtype] for dtype in ("float32", *_list_half_types(engine)))
    for variable in engine.captured.program.variables:
        live = engine.captured.variables[variable.path]
        if variable.trainable and verification.is_inexact(live):
            live.assign(verification.nudge(live.read_value(), bit, seed))


def _shuffle_rows(engine: Engine, tensors: Sequence[Any]) -> Sequence[Any]:
    """The batch with its rows in a different order, if micro-batches also add them in a different order."""
    leaves = engine.captured.program.leaves
    strange = any(leaf.spec.dtype in ("string", "variant", "resource") for leaf in leaves)
    if engine.captured.program.pipeline.micro_batch < 2 or strange:
        return tensors
    return [tf.reverse(t, [0]) if leaf.batched else t for leaf, t in zip(leaves, tensors, strict=True)]


def _build_verification(engine: Engine, runs: Runs, reasons: Sequence[_Reason]) -> Verification:
    program, is_half = engine.captured.program, bool(_list_half_types(engine))
    names, runs, elsewhere = _select_here(_list_names(engine), runs)
    rows = list(verification.compare_tensors(names, runs, HALF if is_half else EXACT))
    if reasons:
        rows = [row._replace(limit=math.inf, noisy=False) for row in rows]
    return Verification(
        tuple(rows),
        tuple(stage.key for stage in program.stages),
        program.pipeline.micro_batch,
        not reasons,
        (*(reason.why for reason in reasons), *_list_remarks(engine, rows, names, runs), *elsewhere),
        tuple(dict.fromkeys(reason.mend for reason in reasons)),
        "within half precision" if is_half else "",
        max(1, len(reasons)),
    )


def _select_here(names: Sequence[str], runs: Runs) -> tuple[list[str], Runs, list[str]]:
    """The names and values of the results that the plan returned in this process; remarks name the holders of the
    others.
    """
    planned = runs.planned.returned
    kept = [number for number, tensor in enumerate(planned) if not isinstance(tensor, AbsentResult)]
    uncut, cut = (State([run.returned[n] for n in kept], run.variables) for run in (runs.uncut, runs.planned))
    gone = [
        (name, tensor.owner) for name, tensor in zip(names, planned, strict=True) if isinstance(tensor, AbsentResult)
    ]
    remarks = [f"{name} stays on {owner} (results: owner), and is compared there" for name, owner in gone]
    return [names[n] for n in kept], replace(runs, uncut=uncut, planned=cut), remarks


class _Reason(NamedTuple):
    """A reason for which two steps must differ, and how to request equal ones."""

    why: str
    mend: str


def _list_reasons(engine: Engine, tensors: Sequence[Any]) -> tuple[_Reason, ...]:
    """The reasons why the two steps must differ."""
    program, graph = engine.captured.program, engine.captured.program.graph
    ops = [op for part in (graph, *graph.functions.values()) for op in part.ops]
    unrelated = (DRAWS_NOTE, BATCH_SUM_NOTE)
    coupled = [note for note in engine.cut.notes if not note.startswith(unrelated) and "nb.compress at " not in note]
    allowed = coupled if program.pipeline.coupled == "allow" else []
    fix = find_batch_fixes(program).alone
    found = [_Reason(note, f"{fix} for the check") for note in allowed]
    has_own_state = any(STATE in variable.path for variable in program.variables)
    if has_own_state or any(is_stateful_draw(op) for op in ops):
        why = "the step draws random numbers without a state in a variable of the uncut step: they differ in each run"
        found.append(_Reason(why, "draw them from a keras.random.SeedGenerator, or draw none for the check"))
    elif program.pipeline.micro_batch > 1 and any(is_seeded_draw(op) for op in ops):
        why = "each micro-batch draws its own random numbers: reproducible, but not those of the uncut step"
        found.append(_Reason(why, f"{fix}, or a dropout rate of zero, for the check"))
    found += _list_lossy_codecs(engine)
    batched = [t for leaf, t in zip(program.leaves, tensors, strict=True) if leaf.batched]
    if any(len(tensor.shape) and tensor.shape[0] == 0 for tensor in batched):
        found.append(_Reason("the batch has no rows, so nothing was compared", "pass a batch with rows"))
    return tuple(found)


def _list_lossy_codecs(engine: Engine) -> Iterator[_Reason]:
    """Codecs that lose more than a cast does."""
    for boundary in engine.cut.boundaries:
        name = f"boundary b{boundary.slot}"
        if _is_lossy(parse_encoding(boundary.codec)):
            why = f"{name} is sent as {boundary.codec}, which is lossy"
            yield _Reason(why, "remove nb.compress for the check")
        elif boundary.backward and _is_lossy(parse_encoding(boundary.backward_codec)):
            why = f"the gradient of {name} is sent as {boundary.backward_codec}, which is lossy"
            kept = parse_encoding(boundary.codec).cast or "none"
            yield _Reason(why, f'use backward="{kept}" in nb.compress, or remove it, for the check')


def _is_lossy(encoding: Encoding) -> bool:
    return encoding.coded and (encoding.auto or (encoding.codec is not None and not encoding.lossless))


def _list_half_types(engine: Engine) -> list[str]:
    """The dtypes of half precision with which the step computes, or to which values are cast that cross."""
    casts = [parse_encoding(text).cast for b in engine.cut.boundaries for text in (b.codec, b.backward_codec)]
    inside = {spec.dtype for op in engine.captured.program.graph.ops for spec in op.outputs}
    return [dtype for name, dtype in _HALVES.items() if name in casts or dtype in inside]


def _list_remarks(engine: Engine, rows: Sequence[Row], names: Sequence[str], runs: Runs) -> Iterator[str]:
    halves = _list_half_types(engine)
    if engine.runner.plain:
        yield "one stage and one micro-batch: nothing is divided, the step runs the original function"
    if halves and any(math.isfinite(row.limit) for row in rows):
        yield f"half precision ({', '.join(halves)}): the tolerance is 1e-2, and for a variable 1e-2 of its update"
    if any(row.noisy and row.ok for row in rows):
        yield "~: rounding alone can change it as much as the step does (its gradient is almost zero): inconclusive"
    returned = zip(names, runs.uncut.returned, strict=True)
    strange = [
        name for name, tensor in (*returned, *runs.uncut.variables.items()) if verification.has_nonfinite(tensor)
    ]
    if strange:
        yield f"NaN or infinite values in the uncut step: {', '.join(strange[:8])}{' ...' * (len(strange) > 8)}"


def _list_names(engine: Engine) -> list[str]:
    paths = tf_private.list_leaf_paths(engine.captured.structured_outputs)
    return ["/".join(["returned", *map(str, path)]) for path, leaf in paths if isinstance(leaf, tf.Tensor)]


__all__ = ["Verification", "verify"]
