"""The variables of a trained low-rank basis: `down` in the producer's stage, `up` in the consumer's; and there, of a
layer with a bias, its `offset`: what the basis loses of that bias.

They are variables of the Keras model (or layer) in whose call the tensor goes over to the other stage, as if its own
`build` had made them: its optimizer trains them, and its `save_weights` saves them. They are made while the first step
is traced, in the order in which tensors cross, and found again by their names in later traces.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import keras
import numpy as np

from whale_nebula.capture.linear_layers import Factors
from whale_nebula.errors import NotYetError, PlanError, UnsupportedError
from whale_nebula.scopes.frames import Frame
from whale_nebula.tf import private as tf_private

_KEPT = "_nebula_bottlenecks"


class Home(NamedTuple):
    """Where a tensor is made: its stage, the number of the compress scope around that, if there is one, and all stages
    that had to run for it.
    """

    stage: str
    compress: int | None
    ran: frozenset[str]


@dataclass
class Bottlenecks:
    """What one trace of a step knows of its bottlenecks. Tensors are looked up by their reference.

    `owner` has those of tensors that cross outside of any layer's call: the model whose step it is, if one has it.
    """

    owner: Any = None
    homes: dict[Any, Home | None] = field(default_factory=dict)
    small: dict[Any, tuple[Bottleneck, Any]] = field(default_factory=dict)
    entered: dict[tuple[Any, str], Any] = field(default_factory=dict)
    counted: dict[tuple[str, str], int] = field(default_factory=dict)
    used: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    said: dict[str, None] = field(default_factory=dict)

    def use(self, owner: Any, variable: Any) -> None:
        """Note that the step reads a variable of a bottleneck."""
        self.used[id(variable)] = owner, variable

    def say(self, sentence: str) -> None:
        """Let the report and the plan say something of what crosses, once."""
        self.said[sentence] = None

    def number(self, call: str, producer: str) -> int:
        """How many tensors of this stage have gone over before, in the same call of a layer."""
        self.counted[call, producer] = self.counted.get((call, producer), -1) + 1
        return self.counted[call, producer]


@dataclass(frozen=True)
class Bottleneck:
    """Where the variables of one tensor are: the layer that has them, and how their names begin.

    `factors` are what they start as, found when the first of them is made; where none are given, an orthonormal basis.
    """

    owner: Any
    name: str
    factors: Callable[[], Factors] | None = None

    def down(self, columns: int, rank: int, frame: Frame) -> Any:
        """The variable that the producer's stage reads."""
        return self._variable(f"{self.name}_down", (columns, rank), lambda: self._vectors(columns, rank).T, frame)

    def up(self, consumer: str, columns: int, rank: int, frame: Frame) -> Any:
        """The variable that a consumer's stage reads."""
        name = f"{self.name}_{word(consumer)}"
        is_new = f"{name}_up" not in kept_of(self.owner)
        made = self._variable(f"{name}_up", (rank, columns), lambda: self._vectors(columns, rank), frame)
        offset = self.factors().offset if is_new and self.factors is not None else None
        if offset is not None:
            self._variable(f"{name}_offset", (columns,), lambda: offset, frame)
        return made

    def offset(self, consumer: str) -> Any:
        """The variable that a consumer's stage adds, if the tensor's layer has a bias; made with `up`."""
        return kept_of(self.owner).get(f"{self.name}_{word(consumer)}_offset")

    def _vectors(self, columns: int, rank: int) -> np.ndarray:
        return orthonormal(self.name, columns, rank).T if self.factors is None else self.factors().vectors

    def _variable(self, name: str, shape: tuple[int, ...], values: Callable[[], np.ndarray], frame: Frame) -> Any:
        kept = kept_of(self.owner)
        if name not in kept:
            kept[name] = tf_private.own_variable(self.owner, name, values())
        if tuple(kept[name].shape) != shape:
            raise PlanError(
                f"{name!r} of {self.owner.name!r} is {list(kept[name].shape)}, "
                f"and the tensor that crosses needs {list(shape)}",
                where=str(frame.site),
                why="steps of one model cross in the same order, so that each of them finds its own variables",
                mend="let the same tensors cross in training, evaluation and inference, or leave basis out",
            )
        return kept[name]


def kept_of(owner: Any) -> dict[str, Any]:
    """The variables of bottlenecks that a layer has, by their names."""
    if not hasattr(owner, _KEPT):
        object.__setattr__(owner, _KEPT, {})
    found: dict[str, Any] = getattr(owner, _KEPT)
    return found


def find_bottleneck(
    bottlenecks: Bottlenecks, tensor: Any, producer: str, frame: Frame, factors: Callable[[], Factors] | None = None
) -> Bottleneck:
    """The bottleneck of a tensor of stage `producer` that goes over now."""
    owner, call = _around(tensor)
    owner = bottlenecks.owner if owner is None else owner
    if not isinstance(owner, keras.Layer):
        raise NotYetError(
            "a learned basis outside of the call of a Keras layer",
            where=str(frame.site),
            why="its two variables belong to the model or layer that is called, so that its optimizer trains them",
            mend="put both stages in the call of one keras.Model, and read its trainable_variables in the step, "
            "after the call; or leave basis out",
        )
    for each in (owner, bottlenecks.owner):
        _check_optimizer(each, owner, frame)
    number = bottlenecks.number(call, producer)
    return Bottleneck(owner, f"bottleneck_{word(producer)}" + (f"_{number}" if number else ""), factors)


def _around(tensor: Any) -> tuple[Any, str]:
    """The innermost layer whose call made the tensor and runs still, else the outermost that runs; and that call.

    Each call of a layer has a name scope of its own.
    """
    now = tensor.graph.get_name_scope().split("/")
    pairs = zip(now, tensor.op.name.split("/")[:-1], strict=False)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    calls: list[tuple[Any, int]] = []  # outermost first, each with the number of name scopes up to its own
    depth = 0
    for layer in tf_private.layers_running():
        own = re.compile(rf"{re.escape(layer.name)}(_\d+)?")
        depth = next((number for number in range(depth, len(now)) if own.fullmatch(now[number])), len(now)) + 1
        calls.append((layer, depth))
    chosen = [call for call in calls if call[1] <= common][-1:] or calls[:1]
    return (chosen[0][0], "/".join(now[: chosen[0][1]])) if chosen else (None, "")


def word(stage: str) -> str:
    """A stage's key as a part of a variable's name.

    >>> word("gpu:0/a")
    'gpu_0_a'
    """
    return re.sub(r"[^A-Za-z0-9.]", "_", stage)


def orthonormal(name: str, columns: int, rank: int) -> np.ndarray:
    """A matrix with orthonormal columns, the same for the same name and sizes in every process.

    >>> basis = orthonormal("bottleneck_gpu", 8, 3)
    >>> basis.shape, bool(np.allclose(basis.T @ basis, np.eye(3), atol=1e-6))
    ((8, 3), True)
    """
    text = f"{name} {columns} {rank}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    drawn = np.random.Generator(np.random.PCG64(seed)).standard_normal((columns, rank))
    basis, upper = np.linalg.qr(drawn)
    return np.asarray(basis * np.sign(np.diag(upper)), np.float32)


def _check_optimizer(model: Any, owner: Any, frame: Frame) -> None:
    """An optimizer takes no variables that come after it was built."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and getattr(optimizer, "built", False) and not kept_of(owner):
        raise UnsupportedError(
            f"the optimizer of {model.name!r} is built, and its learned basis has no variables yet",
            where=str(frame.site),
            why="the first trace of a step makes them, and an optimizer takes no more variables once it is built",
            mend=f"nb.plan({model.name}, x, y) before {model.name}.optimizer.build(...)",
        )
