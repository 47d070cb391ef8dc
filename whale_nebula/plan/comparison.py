"""How far two runs of one step are from each other, tensor by tensor, and how far they may be.

A variable is judged by what the step makes of it: a limit as wide as the update itself would show nothing. What
rounding alone makes of an update is measured and not guessed: an optimizer such as Adam turns a gradient that is zero
but for noise into a step of full length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.plan.verification import Row

OF_THE_LARGEST = 1e-3
_NOISE, _STORED = 4.0, 4.0
BITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
BITS |= {"complex128": BITS["float64"], "complex64": BITS["float32"]}
"""The last bit of a number, beside its first, by element type."""

Values = Mapping[str, Any]
"""Variables' values by their path."""


class Tolerance(NamedTuple):
    """How far what a step returns may be, beside itself, and a variable's update beside the update."""

    value: float
    update: float


EXACT, HALF = Tolerance(1e-5, 1e-3), Tolerance(1e-2, 1e-2)


@dataclass(frozen=True)
class State:
    """What a run left: the tensors it returned, and its variables."""

    returned: Sequence[Any]
    variables: Values


@dataclass(frozen=True)
class Runs:
    """Two runs from one state, and for each variable how far rounding alone has moved its update."""

    before: Values
    uncut: State
    planned: State
    noise: Mapping[str, float] = field(default_factory=dict)


def compared(names: Sequence[str], runs: Runs, tolerance: Tolerance) -> Iterator[Row]:
    """A row for each tensor that was returned, by its name, and for each variable."""
    found = runs.uncut.returned
    largest = max((_norm(_numbers(t)) for t in found if inexact(t)), default=0.0)
    for name, a, b in zip(names, found, runs.planned.returned, strict=True):
        size = _norm(_numbers(a)) if inexact(a) else 0.0
        limit = tolerance.value * (size + OF_THE_LARGEST * largest) if inexact(a) else 0.0
        yield Row(name, distance(a, b), limit)
    for path in runs.uncut.variables:
        yield _variable(path, runs, tolerance)


def _variable(path: str, runs: Runs, tolerance: Tolerance) -> Row:
    a, b = runs.uncut.variables[path], runs.planned.variables[path]
    if not inexact(a):
        return Row(path, distance(a, b), 0.0)
    update = _norm(change(runs.before[path], a))
    stored = _STORED * BITS.get(a.dtype.name, 0.0) * _norm(_numbers(a))
    limit = tolerance.update * update + max(stored, _NOISE * runs.noise.get(path, 0.0))
    return Row(path, distance(a, b), limit, noisy=limit >= update > 0)


def distance(a: Any, b: Any) -> float:
    """How far two tensors are from each other. NaN is as far from NaN as from itself: not at all.

    >>> distance(tf.constant([1.0, math.nan]), tf.constant([1.5, math.nan]))
    0.5
    >>> distance(tf.constant([1.0, 2.0]), tf.constant([1.0, math.nan]))
    inf
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not inexact(a):
        return float(np.sum(a.numpy() != b.numpy()))
    left, right = _numbers(a), _numbers(b)
    unlike = ~((left == right) | (np.isnan(left) & np.isnan(right)))
    left, right = left[unlike], right[unlike]
    return _norm(left - right) if np.isfinite(left).all() and np.isfinite(right).all() else math.inf


def change(before: Any, after: Any) -> Any:
    """What a step has made of a variable; one that has another form now is all new."""
    return _less(_numbers(after), _numbers(before)) if before.shape == after.shape else _numbers(after)


def noise(before: Values, after: Values, near: Values, near_after: Values) -> dict[str, float]:
    """How far each variable's update from a state that is `near` by is from the update itself."""
    floating = [path for path, value in after.items() if inexact(value)]
    pairs = {path: (change(near[path], near_after[path]), change(before[path], after[path])) for path in floating}
    return {path: _norm(_less(*pair)) if pair[0].shape == pair[1].shape else 0.0 for path, pair in pairs.items()}


def nudged(value: Any, bit: float, seed: int) -> Any:
    """A tensor with each of its numbers a bit larger or smaller."""
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), tuple(value.shape))
    wide = tf.complex128 if value.dtype.is_complex else tf.float64
    return tf.cast(tf.cast(value, wide).numpy() * (1.0 + bit * signs), value.dtype)


def strange(tensor: Any) -> bool:
    """Whether something in a tensor is no number."""
    return inexact(tensor) and not np.isfinite(_numbers(tensor)).all()


def inexact(tensor: Any) -> bool:
    """Whether a tensor is of numbers that are rounded.

    >>> inexact(tf.zeros([2], tf.complex64)), inexact(tf.zeros([2], tf.int32))
    (True, False)
    """
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _numbers(tensor: Any) -> Any:
    """A tensor's numbers; a complex one's are the two of each."""
    if tensor.dtype.is_complex:
        wide = tf.cast(tensor, tf.complex128).numpy()
        return np.stack([wide.real, wide.imag], axis=-1)
    return np.asarray(tf.cast(tensor, tf.float64).numpy())


def _less(left: Any, right: Any) -> Any:
    with np.errstate(invalid="ignore"):  # an infinity less another is no number
        return left - right


def _norm(numbers: Any) -> float:
    """Of those that are numbers."""
    return float(np.linalg.norm(numbers[np.isfinite(numbers)]))
