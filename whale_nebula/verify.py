"""`nb.verify`: does the plan give what the uncut step gives?

Both run one step from the same state, which is then put back. Tolerances are those of the parity tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula import tf_private
from whale_nebula.capture.step import signature
from whale_nebula.capture.targets import target_wanted
from whale_nebula.errors import NotYetError, OptionError
from whale_nebula.function import NebulaFunction
from whale_nebula.passes.effects import is_random
from whale_nebula.planning import no_scopes
from whale_nebula.run import current_run
from whale_nebula.runtime.engine import Engine, plain_function
from whale_nebula.runtime.step import Arguments, Step, Unpack, declared
from whale_nebula.scopes import calling_site
from whale_nebula.scopes.words import checked
from whale_nebula.verification import Row, Verification

RELATIVE, OF_A_STEP, OF_THE_LARGEST = 1e-5, 1e-3, 1e-3
RELATIVE_HALF = 1e-2
_NOISE = 10.0
_HALVES = ("float16", "bfloat16")
_STATEFUL_RANDOM = (
    "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt", "Multinomial",
    "RandomShuffle", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2",
)  # fmt: skip


@checked
def verify(model_or_function: Any, *batch: Any) -> Verification:
    """Run one step by the plan and the same step uncut, and compare all that they return and write.

    A Keras model is given a batch (x, y[, sample_weight]) for its train step, an `nb.function` its arguments.
    Variables, optimizer, metrics and seeds are afterwards what they were before; what the step does outside
    TensorFlow's variables (printing, a `py_function`) happens more than once.

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
    if not current_run().alone:
        raise NotYetError("nb.verify in several processes", mend="verify the script in one process, without a launcher")
    subject = _subject(model_or_function, batch)
    layout, tensors = signature(subject.arguments, subject.step.whole, declared())
    with target_wanted("nb.verify", model_or_function, batch):
        engine = subject.step.plan(subject.arguments, subject.unpack)
    if not engine.captured.program.stages[0].where:
        raise no_scopes(subject.step.name)
    plain = plain_function(lambda given: _call(subject, given), layout)
    with _kept(engine.captured.variables) as again:
        before = _values(engine)
        uncut = _after(engine, again, lambda: tf.nest.flatten(plain(*tensors)))
        planned = _after(engine, again, lambda: list(engine.runner.run(tensors).tensors))
        shuffled = _shuffled(engine, tensors)
        noise = _after(engine, again, lambda: tf.nest.flatten(plain(*shuffled))) if shuffled else None
    return _compare(engine, subject, before, uncut, planned, noise)


@dataclass(frozen=True)
class _Subject:
    """What is verified: a step, the arguments of the call, and the learning rate where it is known."""

    step: Step
    arguments: Arguments
    unpack: Unpack
    rate: float | None = None


@dataclass(frozen=True)
class _State:
    """What a run left: the tensors it returned, and its variables."""

    returned: Sequence[Any]
    variables: Mapping[str, Any]


def _subject(subject: Any, batch: Sequence[Any]) -> _Subject:
    import keras

    if isinstance(subject, NebulaFunction):
        return _Subject(subject.step, *subject.arguments(*batch))
    if not isinstance(subject, keras.Model):
        raise OptionError(
            f"nb.verify cannot run a {type(subject).__name__}",
            where=str(calling_site()),
            why="it takes a compiled Keras model, or a function under @nb.function",
            mend="write @nb.function over the step, and give nb.verify that",
        )
    return _of_keras(subject, batch)


def _of_keras(model: Any, batch: Sequence[Any]) -> _Subject:
    from whale_nebula.runtime.keras_step import keras_step

    if not model.compiled:
        raise OptionError(
            f"model {model.name!r} is not compiled",
            where=str(calling_site()),
            why="its train step needs a loss",
            mend="model.compile(optimizer, loss)",
        )
    if not 1 <= len(batch) <= 3:
        raise OptionError(
            f"nb.verify got {len(batch)} parts of a batch",
            where=str(calling_site()),
            why="a Keras model takes x, y and sample_weight",
            mend=f"nb.verify({model.name}, x, y)",
        )
    step, arguments, unpack = keras_step(model, "train", tuple(map(_as_fit_does, batch)))
    rate = getattr(model.optimizer, "learning_rate", None)
    return _Subject(step, arguments, unpack, None if rate is None else float(rate))


def _as_fit_does(part: Any) -> Any:
    """Keras turns floating-point arrays into its own float type."""
    import keras

    def turned(leaf: Any) -> Any:
        array = leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
        floating = not isinstance(array, tf.Tensor) and np.issubdtype(array.dtype, np.floating)
        return tf.constant(array.astype(keras.config.floatx()) if floating else array)

    return None if part is None else tf.nest.map_structure(turned, part)


def _call(subject: _Subject, given: Sequence[Any]) -> Any:
    args, kwargs = subject.unpack(list(given))
    return subject.step.fn(*args, **kwargs)


@contextmanager
def _kept(variables: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Remember the variables; gives what puts them back, and puts them back at the end."""
    saved = {path: variable.read_value() for path, variable in variables.items()}

    def again() -> None:
        for path, value in saved.items():
            variables[path].assign(value)

    try:
        yield again
    finally:
        again()


def _values(engine: Engine) -> dict[str, Any]:
    return {path: variable.read_value() for path, variable in engine.captured.variables.items()}


def _after(engine: Engine, again: Callable[[], None], run: Callable[[], Sequence[Any]]) -> _State:
    """Run a step from the remembered state."""
    again()
    returned = [tensor for tensor in run() if isinstance(tensor, tf.Tensor)]
    return _State(returned, _values(engine))


def _shuffled(engine: Engine, tensors: Sequence[Any]) -> list[Any]:
    """The batch with its rows in another order, where micro-batches add its rows in another order too.

    What this changes is rounding, and what an optimizer makes of it: Adam turns a gradient that should be
    zero into a step of full length, in any direction.
    """
    leaves = engine.captured.program.leaves
    if engine.captured.program.pipeline.micro_batch < 2 or not all(_known(leaf) for leaf in leaves):
        return []
    return [tf.reverse(t, [0]) if leaf.batched else t for leaf, t in zip(leaves, tensors, strict=True)]


def _known(leaf: Any) -> bool:
    return leaf.spec.dtype not in ("string", "variant", "resource")


def _compare(
    engine: Engine,
    subject: _Subject,
    before: Mapping[str, Any],
    uncut: _State,
    planned: _State,
    noise: _State | None,
) -> Verification:
    program = engine.captured.program
    reasons = _incomparable(engine)
    scale = RELATIVE if not _halved(engine) else RELATIVE_HALF
    names = _names(engine)
    largest = max((_norm(t) for t in uncut.returned if t.dtype.is_floating), default=0.0)
    rows = [
        _row(name, a, b, scale, scale * OF_THE_LARGEST * largest)
        for name, a, b in zip(names, uncut.returned, planned.returned, strict=True)
    ]
    length = OF_A_STEP * scale / RELATIVE * _length(engine, subject, before, uncut)
    for path, a in uncut.variables.items():
        floor = _NOISE * _distance(a, noise.variables[path]) if noise is not None and a.dtype.is_floating else 0.0
        rows.append(_row(path, a, planned.variables[path], scale, max(length, floor)))
    if reasons:
        rows = [row._replace(limit=math.inf) for row in rows]
    return Verification(
        tuple(rows),
        tuple(stage.key for stage in program.stages),
        program.pipeline.micro_batch,
        not reasons,
        (*(reason.why for reason in reasons), *_remarks(engine)),
        tuple(dict.fromkeys(reason.mend for reason in reasons)),
    )


def _row(name: str, a: Any, b: Any, relative: float, absolute: float) -> Row:
    """Floating-point tensors by their norms; all else must be the same."""
    error = _distance(a, b)
    return Row(name, error, relative * _norm(a) + absolute if a.dtype.is_floating else 0.0)


def _distance(a: Any, b: Any) -> float:
    """How far two tensors are from each other; 0 only where they are the same, NaN and all."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.dtype.is_floating:
        return float(np.sum(a.numpy() != b.numpy()))
    left, right = (tf.cast(t, tf.float64).numpy() for t in (a, b))
    return 0.0 if np.array_equal(left, right, equal_nan=True) else float(np.linalg.norm(left - right))


def _norm(tensor: Any) -> float:
    return float(np.linalg.norm(tf.cast(tensor, tf.float64).numpy()))


def _length(engine: Engine, subject: _Subject, before: Mapping[str, Any], uncut: _State) -> float:
    """How far a step goes: the learning rate, or where it is unknown the longest move of a variable."""
    if subject.rate is not None:
        return subject.rate
    trained = [variable.path for variable in engine.captured.program.variables if variable.trainable]
    return max((_distance(uncut.variables[path], before[path]) for path in trained if path in before), default=0.0)


class _Reason(NamedTuple):
    """Why two steps must differ, and how to ask for two that need not."""

    why: str
    mend: str


def _incomparable(engine: Engine) -> tuple[_Reason, ...]:
    """Why the two steps must differ."""
    program, graph = engine.captured.program, engine.captured.program.graph
    ops = [op for part in (graph, *graph.functions.values()) for op in part.ops]
    coupled = engine.cut.notes if program.pipeline.coupled == "allow" else ()
    found = [_Reason(note, "nb.pipeline(micro_batch=1) for the check") for note in coupled]
    if any(op.type in _STATEFUL_RANDOM for op in ops):
        why = "the step draws random numbers whose state is in no variable: each run draws others"
        found.append(_Reason(why, "draw them from a keras.random.SeedGenerator, or not at all for the check"))
    elif program.pipeline.micro_batch > 1 and any(is_random(op) for op in ops):
        why = "the step draws random numbers, and each micro-batch its own: reproducible, not those uncut"
        found.append(_Reason(why, "nb.pipeline(micro_batch=1), or a dropout rate of zero, for the check"))
    return tuple(found)


def _halved(engine: Engine) -> bool:
    """Whether some numbers have half the bits, in the model or on a link: its tolerance is another."""
    on_links = any(b.codec != "none" or b.backward_codec != "none" for b in engine.cut.boundaries)
    return on_links or any(spec.dtype in _HALVES for op in engine.captured.program.graph.ops for spec in op.outputs)


def _remarks(engine: Engine) -> tuple[str, ...]:
    program = engine.captured.program
    if len(program.stages) > 1 or program.pipeline.micro_batch > 1:
        return ("half precision: the tolerance is 1e-2",) if _halved(engine) else ()
    return ("one stage and one micro-batch: nothing is cut, the step runs the user's own function",)


def _names(engine: Engine) -> list[str]:
    paths = tf_private.leaf_paths(engine.captured.structured_outputs)
    return ["/".join(["returned", *map(str, path)]) for path, leaf in paths if isinstance(leaf, tf.Tensor)]


__all__ = ["Verification", "verify"]
