"""Find the linear layer whose output a tensor is, and its singular vectors: where a low-rank cut begins.

The tensor may be the layer's product itself, or that with its bias, its dropout, and a residual added to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from whale_nebula.errors import CollectiveReadError, UnsupportedError
from whale_nebula.scopes.frames import Frame

_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
_SAME = ("Identity", "IdentityN", "Reshape", "Cast", "StopGradient", "PreventGradient")
_SUMS = ("AddV2", "Add", "BiasAdd")


class Linear(NamedTuple):
    """A product with a variable, by where both stand in the graph; and the bias variables added to it."""

    product: Any
    kernel: Any
    biases: tuple[Any, ...]


class Factors(NamedTuple):
    """The leading right singular vectors [rank, columns] of a kernel, and what they leave of its bias, if it has one:
    what must be added where the bias is cut with the rest.
    """

    vectors: np.ndarray
    offset: np.ndarray | None


def find_factors(tensor: Any, rank: int, frame: Frame) -> Factors:
    """The singular vectors of the linear layer that makes a tensor; refuses a tensor that none makes."""
    found = find_linear(tensor)
    if found is None:
        raise UnsupportedError(
            f"basis='svd' for {tensor.name!r}, which is made by {_maker(tensor)}, not by a linear layer",
            where=str(frame.site),
            why="the cut goes through a layer's kernel, so what crosses is its product, with its bias and a residual "
            "added at most: a norm or an activation between them belongs to the far side",
            mend="end the stage at a Dense layer, and put its norm or activation into the next: "
            'nb.place(model, whale_nebula.strategies.low_rank_cut(bert, 3, ["gpu", "npu"])); or basis="learned"',
        )
    values = [_value(each) for each in (found.kernel, *found.biases)]
    if not all(value.size for value in values):
        raise CollectiveReadError(
            f"basis='svd' cannot read the kernel of {found.product.name!r}",
            where=str(frame.site),
            why="this process has emptied it: another cluster holds it since an earlier program",
            mend="nb.plan(model, x, y) with this nb.compress before any other step of the model",
        )
    kernel, *biases = values
    vectors = singular_vectors(kernel.reshape(-1, kernel.shape[-1]), rank)
    if not biases:
        return Factors(vectors, None)
    bias = np.sum(biases, axis=0, dtype=np.float64)
    return Factors(vectors, np.asarray(bias - bias @ vectors.T @ vectors, np.float32))


def singular_vectors(kernel: np.ndarray, rank: int) -> np.ndarray:
    """The first `rank` right singular vectors of a kernel [inputs, columns], as rows; the same in every process.

    Of each the largest number is positive. Where the kernel has fewer, orthonormal others follow.

    >>> singular_vectors(np.diag([1.0, -3.0, 2.0]), 2).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    vectors = np.linalg.svd(np.asarray(kernel, np.float64), full_matrices=True)[2][:rank]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(1)[:, None], 1)
    return np.asarray(vectors * np.sign(largest), np.float32) + np.float32(0)  # no negative zeros


def find_linear(tensor: Any) -> Linear | None:
    """The linear layer that makes a tensor: of several that are added, the one that ran last."""
    columns = tensor.shape[-1]
    found = [each for each in _products(tensor, ()) if each.kernel.shape[-1] == columns]
    numbers = {op.name: number for number, op in enumerate(tensor.graph.get_operations())}
    return max(found, key=lambda each: numbers[each.product.name], default=None)


def _products(tensor: Any, biases: tuple[Any, ...]) -> Iterator[Linear]:
    op = tensor.op
    if op.type in _PRODUCTS:
        kernel = _variable(op.inputs[1])
        turned = any(op.node_def.attr[name].b for name in ("transpose_b", "adj_y"))
        if kernel is not None and len(kernel.shape) > 1 and not turned:
            yield Linear(op, kernel, biases)
        return
    if op.type in _SUMS:
        own = [
            found for each in op.inputs if (found := _variable(each)) is not None and found.shape == [tensor.shape[-1]]
        ]
        inner: Sequence[Any] = [each for each in op.inputs if _variable(each) is None]
        biases = (*biases, *own) if len(inner) == 1 else ()  # of two terms each has a bias of its own
    elif op.type in _SAME:
        inner = [op.inputs[tensor.value_index if op.type == "IdentityN" else 0]]
    elif op.type == "SelectV2":  # of a dropout, between the number and zero
        inner = [op.inputs[1]]
    elif op.type == "Mul" and any(map(_is_factor, op.inputs)):
        inner = [each for each in op.inputs if not _is_factor(each)]
    else:
        return
    for each in inner:
        yield from _products(each, biases)


def _variable(tensor: Any) -> Any:
    """The read of a variable that a tensor is, if it is nothing else."""
    while tensor.op.type in ("Identity", "Cast", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor if tensor.op.type == "ReadVariableOp" else None


def _is_factor(tensor: Any) -> bool:
    return tensor.op.type == "Const" and tensor.shape.rank == 0


def _value(read: Any) -> np.ndarray:
    """What the variable holds now; empty where this process does not hold it."""
    handles = {id(internal): external for external, internal in read.graph.captures}
    with tf.init_scope():
        value = tf.raw_ops.ReadVariableOp(resource=handles[id(read.op.inputs[0])], dtype=read.dtype)
        return np.asarray(value.numpy(), np.float64)


def _maker(tensor: Any) -> str:
    op = tensor.op
    while op.type in ("Identity", "IdentityN"):
        op = op.inputs[0].op
    return f"{op.type} {op.name!r}"
