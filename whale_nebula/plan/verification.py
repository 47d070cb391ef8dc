"""The result of `nb.verify`: one row per compared tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.errors import VerificationError

_FEW = 24  # the number of rows that are shown by default


class Row(NamedTuple):
    """The comparison of one tensor: its name, the error of the plan's against the uncut one, and the limit.

    `noisy` means that rounding alone may change it as much as the step does, so that nothing is verified: its gradient
    is nearly zero, and an optimizer such as Adam makes full steps of the noise.
    """

    name: str
    error: float
    limit: float
    noisy: bool = False

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit

    @property
    def badness(self) -> float:
        """The error as a multiple of the limit."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.limit if self.limit else math.inf * self.error if self.error else 0.0


@dataclass(frozen=True)
class Verification:
    """One step by the plan compared with the same step uncut: a row for everything it returned or wrote.

    `comparable` is false if the two must differ (dropout with several micro-batches draws other numbers, and
    `coupled="allow"` separates rows that depend on each other): then no row has a limit, and nothing is verified.
    `notes` are the reasons (the first `reasons` of them) and remarks, `mends` the changes that make a verification
    possible. `proviso` is a reservation of the headline: half precision. The object is true if `ok` is.

    >>> rows = Row("loss", 0.0, 1e-5), Row("kernel", 2e-3, 1e-5)
    >>> found = Verification(rows, stages=("gpu", "npu"), micro_batches=2)
    >>> found.ok, found.worst.name
    (False, 'kernel')
    >>> print(found)
    2 stages (gpu, npu), micro-batches: 2: 1 of 2 tensors differ from the uncut step
         error    limit
       0.0e+00  1.0e-05  loss
      !2.0e-03  1.0e-05  kernel
    """

    rows: tuple[Row, ...]
    stages: tuple[str, ...] = ()
    micro_batches: int = 1
    comparable: bool = True
    notes: tuple[str, ...] = ()
    mends: tuple[str, ...] = ()
    proviso: str = ""
    reasons: int = 1

    @property
    def ok(self) -> bool:
        """Whether the two steps can be compared, and all errors are within their limits."""
        return self.comparable and all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def worst(self) -> Row | None:
        """The row with the largest error relative to its limit; None if nothing was compared."""
        return max(self.rows, key=lambda row: row.badness, default=None)

    def to_text(self, *, every: bool = False) -> str:
        """A table with a line for each tensor, differences marked by '!', noise by '~', and the notes under it.

        With many tensors it shows those that differ and those that are nearest to their limits; with `every`, all.
        """
        count = len(self.stages)
        stages = f"{count} stage{'s' * (count != 1)} ({', '.join(self.stages)})"
        head = f"{stages}, micro-batches: {self.micro_batches}"
        lines = [f"{head}: {self._sentence()}", *(f"  mend: {mend}" for mend in self.mends)]
        shown = self.rows if every or len(self.rows) <= _FEW else self._select_rows()
        lines += ["     error    limit", *map(_line, shown)]
        rest = len(self.rows) - len(shown)
        lines += [f"  and {rest} more with smaller errors: to_text(every=True) lists them"] * (rest > 0)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes[0 if self.comparable else self.reasons :])])

    def _select_rows(self) -> list[Row]:
        """The rows that differ, with their neighbors, in order."""
        nearest = sorted(self.rows, key=lambda row: row.badness, reverse=True)[:_FEW]
        return [row for row in self.rows if not row.ok or row in nearest]

    def __str__(self) -> str:
        return self.to_text()

    def _sentence(self) -> str:
        bad = sum(not row.ok for row in self.rows)
        if bad:
            return f"{bad} of {len(self.rows)} tensors differ from the uncut step"
        if not self.comparable:
            return f"not comparable: {self._reason()}"
        return ", ".join([f"all {len(self.rows)} tensors match the uncut step", *filter(None, [self.proviso])])

    def _reason(self) -> str:
        return "; and ".join(self.notes[: self.reasons]) or "the two steps must differ"

    def raise_if_bad(self) -> Verification:
        """Raise `VerificationError` if a tensor differs or the steps cannot be compared; otherwise return itself."""
        if not self.comparable:
            raise VerificationError(
                "the plan and the uncut step cannot be compared",
                why=self._reason(),
                mend="\nor ".join(self.mends) or None,
            )
        if not self.ok and self.worst is not None:
            raise VerificationError(
                "the plan and the uncut step give different results",
                where=self.worst.name,
                why=f"the error is {self.worst.error:.1e}, the limit {self.worst.limit:.1e}\n{self}",
            )
        return self


def _line(row: Row) -> str:
    mark = "!" if not row.ok else "~" if row.noisy else " "
    limit = f"{row.limit:7.1e}" if math.isfinite(row.limit) else "   none"
    return f"  {mark}{row.error:.1e}  {limit}  {row.name}"


LARGEST_NORM_SHARE = 1e-3
_NOISE, _STORED = 4.0, 4.0
BITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
BITS |= {"complex128": BITS["float64"], "complex64": BITS["float32"]}
"""The relative value of the last bit of a number, by element type."""

Values = Mapping[str, Any]
"""The values of variables by path."""


class Tolerance(NamedTuple):
    """Relative tolerances: of returned tensors, and of variables, relative to their change in the step."""

    value: float
    update: float


EXACT, HALF = Tolerance(1e-5, 1e-3), Tolerance(1e-2, 1e-2)


@dataclass(frozen=True)
class State:
    """The tensors that a step returned, and the variables after it."""

    returned: Sequence[Any]
    variables: Values


@dataclass(frozen=True)
class Runs:
    """One step, uncut and by the plan, from the same variables; `noise` is the norm of what rounding alone changes."""

    initial_values: Values
    uncut: State
    planned: State
    noise: Mapping[str, float] = field(default_factory=dict)


def compare_tensors(names: Sequence[str], runs: Runs, tolerance: Tolerance) -> Iterator[Row]:
    """A row for each tensor that was returned, by its name, and for each variable."""
    found = runs.uncut.returned
    largest = max((_norm(_numbers(t)) for t in found if is_inexact(t)), default=0.0)
    for name, a, b in zip(names, found, runs.planned.returned, strict=True):
        size = _norm(_numbers(a)) if is_inexact(a) else 0.0
        limit = tolerance.value * (size + LARGEST_NORM_SHARE * largest) if is_inexact(a) else 0.0
        yield Row(name, distance(a, b), limit)
    for path in runs.uncut.variables:
        yield _variable(path, runs, tolerance)


def _variable(path: str, runs: Runs, tolerance: Tolerance) -> Row:
    a, b = runs.uncut.variables[path], runs.planned.variables[path]
    if not is_inexact(a):
        return Row(path, distance(a, b), 0.0)
    update = _norm(change(runs.initial_values[path], a))
    stored = _STORED * BITS.get(a.dtype.name, 0.0) * _norm(_numbers(a))
    limit = tolerance.update * update + max(stored, _NOISE * runs.noise.get(path, 0.0))
    return Row(path, distance(a, b), limit, noisy=limit >= update > 0)


def distance(a: Any, b: Any) -> float:
    """The norm of the difference of two tensors, or the number of unequal elements if their type is exact; infinite for
    different shapes or types. NaN equals NaN.

    >>> distance(tf.constant([1.0, math.nan]), tf.constant([1.5, math.nan]))
    0.5
    >>> distance(tf.constant([1.0, 2.0]), tf.constant([1.0, math.nan]))
    inf
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not is_inexact(a):
        return float(np.sum(a.numpy() != b.numpy()))
    left, right = _numbers(a), _numbers(b)
    unlike = ~((left == right) | (np.isnan(left) & np.isnan(right)))
    left, right = left[unlike], right[unlike]
    return _norm(left - right) if np.isfinite(left).all() and np.isfinite(right).all() else math.inf


def change(before: Any, after: Any) -> Any:
    """The change of a variable by a step; if the step changed its shape, the new value."""
    return _subtract(_numbers(after), _numbers(before)) if before.shape == after.shape else _numbers(after)


def noise(before: Values, after: Values, near: Values, near_after: Values) -> dict[str, float]:
    """By path, the norm of the difference between a variable's updates from `before` and from the nearly equal values
    `near`: the effect of rounding.
    """
    floating = [path for path, value in after.items() if is_inexact(value)]
    pairs = {path: (change(near[path], near_after[path]), change(before[path], after[path])) for path in floating}
    return {path: _norm(_subtract(*pair)) if pair[0].shape == pair[1].shape else 0.0 for path, pair in pairs.items()}


def nudge(value: Any, bit: float, seed: int) -> Any:
    """A tensor whose numbers are each randomly larger or smaller by the relative difference `bit`."""
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), tuple(value.shape))
    wide = tf.complex128 if value.dtype.is_complex else tf.float64
    return tf.cast(tf.cast(value, wide).numpy() * (1.0 + bit * signs), value.dtype)


def has_nonfinite(tensor: Any) -> bool:
    """Whether a tensor contains a NaN or an infinity."""
    return is_inexact(tensor) and not np.isfinite(_numbers(tensor)).all()


def is_inexact(tensor: Any) -> bool:
    """Whether a tensor's type is floating-point or complex, so that results are rounded.

    >>> is_inexact(tf.zeros([2], tf.complex64)), is_inexact(tf.zeros([2], tf.int32))
    (True, False)
    """
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _numbers(tensor: Any) -> Any:
    """A tensor's elements; for a complex one the real and imaginary parts."""
    if tensor.dtype.is_complex:
        wide = tf.cast(tensor, tf.complex128).numpy()
        return np.stack([wide.real, wide.imag], axis=-1)
    return np.asarray(tf.cast(tensor, tf.float64).numpy())


def _subtract(left: Any, right: Any) -> Any:
    with np.errstate(invalid="ignore"):  # infinity - infinity is NaN
        return left - right


def _norm(numbers: Any) -> float:
    """Norm of the finite elements."""
    return float(np.linalg.norm(numbers[np.isfinite(numbers)]))
