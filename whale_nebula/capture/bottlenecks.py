"""The variables of a trained low-rank basis: `down` in the producer's stage and `up` in the consumer's; for a layer
with a bias also an `offset` in the consumer's stage, the part of the bias that the basis loses.

They belong to the Keras model (or layer) during whose call the tensor crosses to the other stage, as if its own `build`
had created them: its optimizer trains them, and its `save_weights` saves them. They are created while the first step is
traced, in the order of crossings, and found by name in later traces. They can be initialised with the singular vectors
of the linear layer that produces the tensor: the layer's product itself, or the product with its bias, its dropout, and
an added residual.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.errors import CollectiveReadError, NotYetError, PlanError, UnsupportedError
from whale_nebula.scopes.frames import Frame
from whale_nebula.tf import private as tf_private

_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_SAME = ("Identity", "IdentityN", "Reshape", "Cast", "StopGradient", "PreventGradient")
_SUMS = ("AddV2", "Add", "BiasAdd")


class Linear(NamedTuple):
    """The ops of a product and its variable in the graph, and the bias variables added to the product, each with the
    constant that multiplies it.
    """

    product: Any
    kernel: Any
    biases: tuple[tuple[Any, float], ...]


class Factors(NamedTuple):
    """The leading right singular vectors [rank, columns] of a kernel, and the part of its bias, if any, that they lose
    and that the consumer must add.
    """

    vectors: np.ndarray
    offset: np.ndarray | None


def find_factors(tensor: Any, rank: int, frame: Frame) -> Factors:
    """The singular vectors of the linear layer that produces a tensor; raises if no linear layer does."""
    found = find_linear(tensor)
    if found is None:
        raise UnsupportedError(
            f"basis='svd' for {tensor.name!r}, which is the output of {_describe_producer(tensor)}, "
            "not of a linear layer",
            where=str(frame.site),
            why="the cut goes through a layer's kernel: only its product, with its bias and a residual added, "
            "can cross; a norm or an activation after it must be in the next stage",
            mend="end the stage at a Dense layer, and move its norm or activation to the next stage: "
            'nb.place(model, whale_nebula.strategies.low_rank_cut(bert, 3, ["gpu", "npu"])); or basis="learned"',
        )
    values = [_read_value(each) for each in (found.kernel, *(bias for bias, _ in found.biases))]
    if not all(value.size for value in values):
        raise CollectiveReadError(
            f"basis='svd' cannot read the kernel of {found.product.name!r}",
            where=str(frame.site),
            why="an earlier program placed the layer on another cluster, and this process has freed its copy",
            mend="call nb.plan(model, x, y) with this nb.compress before any other step of the model",
        )
    kernel, *biases = values
    vectors = singular_vectors(kernel.reshape(-1, kernel.shape[-1]), rank)
    if not biases:
        return Factors(vectors, None)
    bias = np.sum([scale * value for value, (_, scale) in zip(biases, found.biases, strict=True)], axis=0)
    return Factors(vectors, np.asarray(bias - bias @ vectors.T @ vectors, np.float32))


def singular_vectors(kernel: np.ndarray, rank: int) -> np.ndarray:
    """The first `rank` right singular vectors of a kernel [inputs, columns], as rows; the same in every process.

    The entry of largest magnitude of each vector is positive. If the kernel has fewer, other orthonormal vectors
    follow.

    >>> singular_vectors(np.diag([1.0, -3.0, 2.0]), 2).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    vectors = np.linalg.svd(np.asarray(kernel, np.float64), full_matrices=True)[2][:rank]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(1)[:, None], 1)
    return np.asarray(vectors * np.sign(largest), np.float32) + np.float32(0)  # no negative zeros


def find_linear(tensor: Any) -> Linear | None:
    """The linear layer that produces a tensor; for a sum of several, the one that ran last; None if there is none."""
    columns = tensor.shape[-1]
    found = [each for each in _find_products(tensor, (), 1.0) if each.kernel.shape[-1] == columns]
    numbers = {op.name: number for number, op in enumerate(tensor.graph.get_operations())}
    return max(found, key=lambda each: numbers[each.product.name], default=None)


def _find_products(tensor: Any, biases: tuple[tuple[Any, float], ...], scale: float) -> Iterator[Linear]:
    op = tensor.op
    if op.type in _PRODUCTS:
        kernel = _get_variable(op.inputs[1])
        turned = any(op.node_def.attr[name].b for name in ("transpose_b", "adj_y"))
        if kernel is not None and len(kernel.shape) > 1 and not turned:
            yield Linear(op, kernel, biases)
        return
    if op.type in _SUMS:
        own = [
            (found, scale)
            for each in op.inputs
            if (found := _get_variable(each)) is not None and found.shape == [tensor.shape[-1]]
        ]
        inner: Sequence[Any] = [each for each in op.inputs if _get_variable(each) is None]
        biases = (*biases, *own) if len(inner) == 1 else ()  # each of two terms has its own bias
    elif op.type in _SAME:
        inner = [op.inputs[tensor.value_index if op.type == "IdentityN" else 0]]
    elif op.type == "SelectV2":  # a dropout's choice between the scaled value and zero, whose mean is the value
        inner = [op.inputs[1]]
        if inner[0].op.type == "Mul":
            inner = _remove_factors(inner[0].op)
    elif op.type == "Mul" and any(map(_is_factor, op.inputs)):
        inner = _remove_factors(op)
        scale *= float(np.prod([tf.get_static_value(each) for each in op.inputs if _is_factor(each)]))
    else:
        return
    for each in inner:
        yield from _find_products(each, biases, scale)


def _get_variable(tensor: Any) -> Any:
    """The variable read that directly produces a tensor, or None."""
    while tensor.op.type in ("Identity", "Cast", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor if tensor.op.type == "ReadVariableOp" else None


def _remove_factors(op: Any) -> list[Any]:
    return [each for each in op.inputs if not _is_factor(each)]


def _is_factor(tensor: Any) -> bool:
    return tensor.op.type == "Const" and tensor.shape.rank == 0


def _read_value(read: Any) -> np.ndarray:
    """The variable's current value; empty if this process does not hold it."""
    handles = {id(internal): external for external, internal in read.graph.captures}
    with tf.init_scope():
        value = tf.raw_ops.ReadVariableOp(resource=handles[id(read.op.inputs[0])], dtype=read.dtype)
        return np.asarray(value.numpy(), np.float64)


def _describe_producer(tensor: Any) -> str:
    op = tensor.op
    while op.type in ("Identity", "IdentityN"):
        op = op.inputs[0].op
    return f"{op.type} {op.name!r}"


_ATTRIBUTE = "_nebula_bottlenecks"


class Home(NamedTuple):
    """The origin of a tensor: its stage, the number of the enclosing compress scope, if any, and all stages that it
    depends on.
    """

    stage: str
    compress: int | None
    past_stages: frozenset[str]


@dataclass
class Bottlenecks:
    """The bottlenecks of one trace of a step. Tensors are looked up by reference: `homes` caches their origins,
    `projected` has their bottleneck and projection, `entered` what a stage reads instead. `differentiated` are the ids
    of the handles of which gradients are requested.

    `owner` has the bottlenecks of tensors that cross outside any layer's call: the model of the step, if any.
    """

    owner: Any = None
    homes: dict[Any, Home | None] = field(default_factory=dict)
    projected: dict[Any, tuple[Bottleneck, Any]] = field(default_factory=dict)
    entered: dict[tuple[Any, str], Any] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    used_variables: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    differentiated: set[int] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)

    def record_use(self, owner: Any, variable: Any) -> None:
        """Record that the step reads a variable of a bottleneck."""
        self.used_variables[id(variable)] = owner, variable

    def add_note(self, sentence: str) -> None:
        """Add a note on a crossing to the report and the plan, once."""
        self.notes[sentence] = None

    def take_number(self, call: str, producer: str) -> int:
        """Number a tensor of stage `producer` that crosses in this call of a layer, from 0 on."""
        self.counts[call, producer] = self.counts.get((call, producer), -1) + 1
        return self.counts[call, producer]


@dataclass(frozen=True)
class Bottleneck:
    """The variables of one tensor's basis: the layer that owns them, and the prefix of their names.

    `factors` are their initial values, computed when the first of them is created; by default an orthonormal basis.
    """

    owner: Any
    name: str
    factors: Callable[[], Factors] | None = None

    def get_down(self, columns: int, rank: int, frame: Frame) -> Any:
        """The variable that the producer's stage reads, created on first use."""
        return self._get_variable(f"{self.name}_down", (columns, rank), lambda: self._vectors(columns, rank).T, frame)

    def get_up(self, consumer: str, columns: int, rank: int, frame: Frame) -> Any:
        """The variable that a consumer's stage reads, created on first use, with its offset if there is one."""
        name = f"{self.name}_{to_identifier(consumer)}"
        is_new = f"{name}_up" not in bottleneck_variables_of(self.owner)
        up = self._get_variable(f"{name}_up", (rank, columns), lambda: self._vectors(columns, rank), frame)
        offset = self.factors().offset if is_new and self.factors is not None else None
        if offset is not None:
            self._get_variable(f"{name}_offset", (columns,), lambda: offset, frame)
        return up

    def offset(self, consumer: str) -> Any:
        """The variable that a consumer's stage adds, if the tensor's layer has a bias; created with `up`."""
        return bottleneck_variables_of(self.owner).get(f"{self.name}_{to_identifier(consumer)}_offset")

    def _vectors(self, columns: int, rank: int) -> np.ndarray:
        return make_orthonormal(self.name, columns, rank).T if self.factors is None else self.factors().vectors

    def _get_variable(self, name: str, shape: tuple[int, ...], values: Callable[[], np.ndarray], frame: Frame) -> Any:
        kept = bottleneck_variables_of(self.owner)
        if name not in kept:
            kept[name] = tf_private.add_variable(self.owner, name, values())
        if tuple(kept[name].shape) != shape:
            raise PlanError(
                f"{name!r} of {self.owner.name!r} is {list(kept[name].shape)}, "
                f"but the tensor that crosses needs {list(shape)}",
                where=str(frame.site),
                why="variables are matched by order, so all steps of a model must send the same tensors in that order",
                mend="use the same boundaries in training, evaluation and inference, or remove basis=",
            )
        return kept[name]


def bottleneck_variables_of(owner: Any) -> dict[str, Any]:
    """The variables of bottlenecks that a layer has, by their names."""
    if not hasattr(owner, _ATTRIBUTE):
        object.__setattr__(owner, _ATTRIBUTE, {})
    found: dict[str, Any] = getattr(owner, _ATTRIBUTE)
    return found


def find_bottleneck(
    bottlenecks: Bottlenecks, tensor: Any, producer: str, frame: Frame, factors: Callable[[], Factors] | None = None
) -> Bottleneck:
    """The bottleneck of a tensor of stage `producer` that is about to cross."""
    owner, call = _find_layer(tensor)
    owner = bottlenecks.owner if owner is None else owner
    if not isinstance(owner, keras.Layer):
        raise NotYetError(
            "a learned basis outside the call of a Keras layer",
            where=str(frame.site),
            why="its two variables must belong to the model or layer that is called, so that its optimizer trains them",
            mend="put both stages in the call of one keras.Model, and read its trainable_variables in the step, "
            "after the call; or remove basis=",
        )
    for each in (owner, bottlenecks.owner):
        _check_optimizer(each, owner, frame)
    number = bottlenecks.take_number(call, producer)
    return Bottleneck(owner, f"bottleneck_{to_identifier(producer)}" + (f"_{number}" if number else ""), factors)


def _find_layer(tensor: Any) -> tuple[Any, str]:
    """The innermost running layer that created the tensor, otherwise the outermost running one; and its call.

    Each call of a layer has a separate name scope.
    """
    now = tensor.graph.get_name_scope().split("/")
    pairs = zip(now, tensor.op.name.split("/")[:-1], strict=False)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    calls: list[tuple[Any, int]] = []  # outermost first, each with its number of enclosing name scopes
    depth = 0
    for layer in tf_private.list_running_layers():
        own = re.compile(rf"{re.escape(layer.name)}(_\d+)?")
        depth = next((number for number in range(depth, len(now)) if own.fullmatch(now[number])), len(now)) + 1
        calls.append((layer, depth))
    chosen = [call for call in calls if call[1] <= common][-1:] or calls[:1]
    return (chosen[0][0], "/".join(now[: chosen[0][1]])) if chosen else (None, "")


def to_identifier(stage: str) -> str:
    """A stage's key as a part of a variable's name.

    >>> to_identifier("gpu:0/a")
    'gpu_0_a'
    """
    return re.sub(r"[^A-Za-z0-9.]", "_", stage)


def make_orthonormal(name: str, columns: int, rank: int) -> np.ndarray:
    """A matrix with orthonormal columns, the same for the same name and sizes in every process.

    >>> basis = make_orthonormal("bottleneck_gpu", 8, 3)
    >>> basis.shape, bool(np.allclose(basis.T @ basis, np.eye(3), atol=1e-6))
    ((8, 3), True)
    """
    text = f"{name} {columns} {rank}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    matrix = np.random.Generator(np.random.PCG64(seed)).standard_normal((columns, rank))
    basis, upper = np.linalg.qr(matrix)
    return np.asarray(basis * np.sign(np.diag(upper)), np.float32)


def _check_optimizer(model: Any, owner: Any, frame: Frame) -> None:
    """Refuse an optimizer that is already built, as it accepts no new variables."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and getattr(optimizer, "built", False) and not bottleneck_variables_of(owner):
        raise UnsupportedError(
            f"the optimizer of {model.name!r} is built before the variables of its learned basis exist",
            where=str(frame.site),
            why="the first trace of a step creates them, and a built optimizer accepts no more variables",
            mend=f"call nb.plan({model.name}, x, y) before {model.name}.optimizer.build(...)",
        )
