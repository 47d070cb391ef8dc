"""The parity harness: a `Case` runs uncut and under a `Cut`, and `assert_same` compares both outcomes.

`TOLERANCES` limits the differences. A tensor's difference is measured in norms, relative to the tensor, the largest
gradient, or the length of all steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.tf import initial_values
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.keras_training import create_variables, has_keras_train_step, lacks_optimizer_variables
from whale_nebula.tf.patch import Patch


class Tolerance(NamedTuple):
    """|a - b| <= relative * |a| + absolute, in norms. For weights `absolute` is `length` times the learning rate times
    the number of steps, for gradients `largest` times the largest of them.
    """

    relative: float
    absolute: float
    length: float = 0.0
    largest: float = 0.0


PARITY = "parity"
TOLERANCES: Mapping[str, Tolerance] = {
    "exact": Tolerance(0.0, 0.0),
    PARITY: Tolerance(1e-5, 1e-6, 1e-3, 1e-8),
    "sums": Tolerance(2e-5, 2e-6, 1e-3, 1e-7),
    "processes": Tolerance(1e-4, 1e-6, 1e-3),
    "normalised": Tolerance(1e-4, 2e-5),
    "mixed": Tolerance(1e-2, 5e-4, 1e-2),
    "bfloat16": Tolerance(3e-2, 2e-3, 3e-2),
}
"""`sums`: a sum over rows is added up in another order, a few times. `processes`: results of a model with batch
normalisation or penalties, in processes. `normalised`: means and variances of the batch from sums. `mixed`, `bfloat16`:
gradients of replicas and micro-batches are rounded each on its own.
"""


@dataclass(frozen=True)
class Cut:
    """Number of stages (0: no scopes at all), micro-batches and schedule; replicas of each stage, where there are."""

    stages: int
    micro_batches: int = 1
    schedule: str = "eager-1f1b"
    clusters: bool = True
    replicas: tuple[int, ...] = ()
    coupled: str = "error"

    @property
    def function(self) -> Any:
        """The decorator of a custom step."""
        return nb.function if self.stages else tf.function

    @contextlib.contextmanager
    def program(self, **options: Any) -> Iterator[None]:
        """The scopes around a whole step or a functional model; `options` are those of `nb.pipeline`."""
        if not self.stages:
            yield
            return
        with nb.cluster(), contextlib.nullcontext() if self.replicas else self.pipeline(**options):
            yield

    def pipeline(self, **options: Any) -> contextlib.AbstractContextManager[Any]:
        """The pipeline scope around all stages, or inside the replicas of each stage if these have their own counts."""
        return nb.pipeline(self.micro_batches, schedule=self.schedule, **{"coupled": self.coupled, **options})

    @contextlib.contextmanager
    def replicate(self, stage: int, inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """The scopes of a stage with replicas."""
        with nb.replica(self.replicas[stage]), self.pipeline(), inner:
            yield

    def at(self, third: int) -> contextlib.AbstractContextManager[Any]:
        """The scope of the first, second or third part of a model."""
        if not self.stages:
            return contextlib.nullcontext()
        stage = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[self.stages][third]
        own = nb.stage(cluster=f"c{stage}") if self.clusters else nb.stage(name=f"s{stage}")
        return self.replicate(stage, own) if self.replicas else own


@dataclass
class Outcome:
    """The results of a case. `others` are results that are not numbers, and must be equal."""

    losses: list[float] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)
    gradients: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A model or a script. `run` builds it, trains it and returns its outcome; it can be cut into `stages` and
    `micro`-batches. `rate` is its learning rate, for the tolerance of weights. It runs its stages `passes` times. One
    that is slow or similar to another runs only in the grid (`grid_only`).
    """

    run: Callable[[Cut], Outcome]
    stages: tuple[int, ...] = (1, 2, 3)
    micro: tuple[int, ...] = (1, 2, 3)
    rate: float = 1e-2
    steps: int = 10
    tolerance: str = PARITY
    passes: int = 1
    grid_only: bool = False

    @property
    def length(self) -> float:
        """The maximum length of all steps together."""
        return self.rate * self.steps


def run_uncut(case: Case) -> Outcome:
    """Run a case without scopes. Keras traces a step again if its first trace created variables: here they are created
    before it, which takes less than half as long.
    """
    with Patch(tf_private.TensorFlowTrainer, "make_train_function", _make_train_function).apply():
        return case.run(Cut(0))


_make_original_train_function = tf_private.TensorFlowTrainer.make_train_function


def _make_train_function(model: Any, force: bool = False) -> Any:
    function = _make_original_train_function(model, force)

    def run(iterator: Any) -> Any:
        plain = isinstance(iterator, tf.data.Iterator) and isinstance(iterator.element_spec, tuple)
        if plain and has_keras_train_step(model) and lacks_optimizer_variables(model):
            creation = tf.function(lambda *data: create_variables(model, data), autograph=False)
            initial_values.trace_variables(creation, iterator.element_spec)
        return function(iterator)

    model.train_function = run
    return run


def assert_same(plain: Any, found: Any, tolerance: str = PARITY, length: float = 0.0) -> None:
    """Assert that two outcomes, or two nested structures of numbers, are equal within a tolerance."""
    wrong = {path: share for path, share in compare_outcomes(plain, found, tolerance, length) if not share <= 1.0}
    assert not wrong, f"times what {tolerance} allows: {wrong}"


def compare_outcomes(
    plain: Any, found: Any, tolerance: str = PARITY, length: float = 0.0
) -> Iterator[tuple[str, float]]:
    """Each difference as a share of the allowed one, with its path."""
    allowed = TOLERANCES[tolerance]
    if not isinstance(plain, Outcome):
        yield from _compare_values(plain, found, allowed, "")
        return
    largest = max((float(np.linalg.norm(gradient)) for gradient in plain.gradients), default=0.0)
    values = allowed._replace(absolute=min(allowed.absolute, 1e-8))
    yield from _compare_values(plain.losses, found.losses, values, "losses")
    yield from _compare_values(plain.history, found.history, values, "history")
    noise = allowed._replace(absolute=allowed.largest * largest)
    yield from _compare_values(plain.gradients, found.gradients, noise, "gradients")
    steps = allowed._replace(absolute=allowed.length * length)
    yield from _compare_values(plain.weights, found.weights, steps, "weights")
    yield from _compare_values(plain.outputs, found.outputs, allowed, "outputs")
    yield "others", 0.0 if plain.others == found.others else float("inf")


def _compare_values(plain: Any, found: Any, allowed: Tolerance, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(plain, Mapping):
        if sorted(plain) != sorted(found):
            yield f"{path}: {sorted(plain)} != {sorted(found)}", float("inf")
            return
        for name in plain:
            yield from _compare_values(plain[name], found[name], allowed, f"{path}/{name}")
    elif isinstance(plain, Sequence) and not isinstance(plain, str) and not _is_matrix(plain):
        if len(plain) != len(found):
            yield f"{path}: {len(plain)} != {len(found)}", float("inf")
            return
        for number, (one, other) in enumerate(zip(plain, found, strict=True)):
            yield from _compare_values(one, other, allowed, f"{path}/{number}")
    else:
        yield path, _compare_arrays(np.asarray(plain), np.asarray(found), allowed)


def _is_matrix(plain: Sequence[Any]) -> bool:
    """Whether lists of lists, as JSON has them, are a tensor."""
    if not plain or not isinstance(plain[0], list):
        return False
    try:
        return np.asarray(plain).dtype.kind in "fiub"
    except ValueError:
        return False


def _compare_arrays(plain: np.ndarray, found: np.ndarray, allowed: Tolerance) -> float:
    if plain.shape != found.shape:
        return float("inf")
    if plain.dtype.kind not in "fciub":
        return 0.0 if np.array_equal(plain, found) else float("inf")
    kind = "complex128" if "c" in (plain.dtype.kind, found.dtype.kind) else "float64"
    plain, found = plain.astype(kind), found.astype(kind)
    odd = ~np.isfinite(plain) | ~np.isfinite(found)
    if not np.array_equal(plain[odd], found[odd], equal_nan=True):
        return float("inf")
    far = float(np.linalg.norm(plain[~odd] - found[~odd]))
    near = allowed.relative * float(np.linalg.norm(plain[~odd])) + allowed.absolute
    return far / near if near else (float("inf") if far else 0.0)


def data(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Normally distributed numbers with a fixed seed."""
    return np.random.default_rng(seed).standard_normal((rows, *shape)).astype("float32")
