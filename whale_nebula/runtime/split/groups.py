"""Groups of devices that run one stage together, and the conversion of tensors between layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from whale_nebula.ir.layout import PARTIAL, SPLIT, WHOLE, Layout, choose_collective, divide

Tensors = list[Any]
"""A tensor for each device that runs in this process, in their order."""
Sizes = Sequence[Any]
"""The length of the piece of each device along an axis: numbers, or tensors if known only in a step."""


class Pieces(tf.experimental.ExtensionType):
    """The pieces of a tensor that the devices of this process hold; two tensors are added piece by piece."""

    tensors: tuple[tf.Tensor, ...]

    def __add__(self, other: Any) -> Any:
        return Pieces(tuple(own + theirs for own, theirs in zip(self.tensors, other.tensors, strict=True)))


class Group(Protocol):
    """A group of `count` devices, of which `here` run in this process."""

    count: int

    @property
    def here(self) -> Sequence[int]:
        """The numbers of the devices of this process."""

    @property
    def holds_pieces(self) -> bool:
        """Whether this process holds only its pieces of variables of the stage, not whole variables."""

    def sum(self, tensors: Tensors) -> Tensors:
        """The sum over all devices."""

    def maximum(self, tensors: Tensors) -> Tensors:
        """The maximum over all devices, entry by entry."""

    def gather(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """All-gather along an axis."""

    def scatter(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """Reduce-scatter along an axis."""

    def exchange(self, tensors: Tensors, axis: int, sizes: Sizes, other: int, others: Sizes) -> Tensors:
        """All-to-all: pieces along `axis`, of `sizes`, become pieces along the `other` axis, of the `others`."""


class LocalGroup:
    """Devices that one process runs in one function, so that collectives are local ops."""

    holds_pieces = False

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def here(self) -> Sequence[int]:
        """All devices."""
        return range(self.count)

    def sum(self, tensors: Tensors) -> Tensors:
        """The sum in the order of the devices."""
        return [tf.add_n(tensors)] * self.count

    def maximum(self, tensors: Tensors) -> Tensors:
        """The maximum over all devices, entry by entry."""
        return [reduce(tf.maximum, tensors)] * self.count

    def gather(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """All-gather along an axis."""
        return [tf.concat(tensors, axis)] * self.count

    def scatter(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """Reduce-scatter along an axis."""
        return cut_pieces(tf.add_n(tensors), axis, sizes)

    def exchange(self, tensors: Tensors, axis: int, sizes: Sizes, other: int, others: Sizes) -> Tensors:
        """All-to-all: pieces along one axis become pieces along another."""
        return cut_pieces(tf.concat(tensors, axis), other, others)


def measure_pieces(size: Any, count: int, units: int = 0) -> tuple[list[Any], list[Any]]:
    """Offsets and sizes of the pieces of all devices along an axis of this size, in whole units if there are any:
    numbers, or tensors if the size is one.

    >>> measure_pieces(10, 3)
    ([0, 4, 7], [4, 3, 3])
    """
    if isinstance(size, int):
        sizes: list[Any] = list(divide(size, count, units))
    else:
        whole, unit = (units, size // units) if units else (size, 1)
        sizes = [unit * (whole // count + tf.cast(n < whole % count, size.dtype)) for n in range(count)]
    return [sum(sizes[:device]) for device in range(count)], sizes


def measure_whole(group: Group, sizes: Tensors, layout: Layout) -> Any:
    """The length of a split axis; `sizes` are those of the pieces here. If the axis has a unit for each device, it is
    computed from the first of them, whose number of units is known; otherwise the devices add up their sizes.
    """
    parts = divide(layout.units, group.count)
    if min(parts) > 0:
        return sizes[0] // parts[group.here[0]] * layout.units
    return group.sum(sizes)[0]


def cut_piece(tensor: Any, axis: int, start: Any, size: Any) -> Any:
    """The `size` entries of a tensor from `start` on along an axis."""
    along = _mark_axis(tensor, axis)
    return tf.slice(tensor, along * start, along * (size + 1) - 1)


def cut_pieces(tensor: Any, axis: int, sizes: Sizes) -> Tensors:
    """A tensor in pieces of these sizes."""
    return [cut_piece(tensor, axis, sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def pad_piece(tensor: Any, axis: int, before: Any, behind: Any) -> Any:
    """A tensor padded along an axis: with so many zeros `before` and `behind`."""
    if isinstance(before, int) and isinstance(behind, int) and before == behind == 0:
        return tensor
    along = _mark_axis(tensor, axis)
    return tf.pad(tensor, tf.stack([along * before, along * behind], 1))


def _mark_axis(tensor: Any, axis: int) -> Any:
    """A one-hot vector of an axis, also if the rank is dynamic."""
    rank = tensor.shape.rank
    if rank is None:
        return tf.one_hot(axis, tf.rank(tensor), dtype=tf.int32)
    return np.eye(rank, dtype=np.int32)[axis]


def select_piece(tensor: Any, layout: Layout, count: int, device: int) -> Any:
    """The piece of a whole tensor that a device holds."""
    size = tensor.shape[layout.axis]
    starts, sizes = measure_pieces(tf.shape(tensor)[layout.axis] if size is None else size, count, layout.units)
    return cut_piece(tensor, layout.axis, starts[device], sizes[device])


def reshard(
    group: Group, tensors: Tensors, source: Layout, target: Layout, shape: Sequence[int | None] = ()
) -> Tensors:
    """Convert a tensor from one layout to another; `shape` is that of the whole tensor, as far as known."""
    if choose_collective(source, target) is None:
        return tensors

    def measure(layout: Layout) -> tuple[list[Any], list[Any]]:
        size: Any = shape[layout.axis] if len(shape) > layout.axis else None
        if size is None and source.kind == SPLIT and source.axis == layout.axis:
            size = measure_whole(group, [tf.shape(tensor)[layout.axis] for tensor in tensors], source)
        elif size is None:
            size = tf.shape(tensors[0])[layout.axis]
        return measure_pieces(size, group.count, layout.units)

    if source.kind == PARTIAL:
        return group.sum(tensors) if target.kind == WHOLE else group.scatter(tensors, target.axis, measure(target)[1])
    if source.kind == WHOLE and target.kind == SPLIT:
        starts, sizes = measure(target)
        pairs = zip(tensors, group.here, strict=True)
        return [cut_piece(tensor, target.axis, starts[device], sizes[device]) for tensor, device in pairs]
    if source.kind == WHOLE:
        pairs = zip(tensors, group.here, strict=True)
        return [tensor if device == 0 else tf.zeros_like(tensor) for tensor, device in pairs]
    starts, sizes = measure(source)
    if target.kind == WHOLE:
        return group.gather(tensors, source.axis, sizes)
    if target.kind == SPLIT and target.axis != source.axis:
        return group.exchange(tensors, source.axis, sizes, target.axis, measure(target)[1])
    if target.kind == SPLIT:
        whole = group.gather(tensors, source.axis, sizes)
        return [
            select_piece(tensor, target, group.count, device) for tensor, device in zip(whole, group.here, strict=True)
        ]
    total = sum(sizes)
    return [
        pad_piece(tensor, source.axis, starts[device], total - starts[device] - sizes[device])
        for tensor, device in zip(tensors, group.here, strict=True)
    ]
