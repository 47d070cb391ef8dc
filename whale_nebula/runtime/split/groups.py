"""Groups of devices that run one stage together, and how they bring a tensor from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Protocol

import tensorflow as tf

from whale_nebula.ir.layout import PARTIAL, SPLIT, WHOLE, WHOLE_LAYOUT, Layout, choose_collective, divide

Tensors = list[Any]
"""The tensors of the devices that run in this process, in their order."""


class Group(Protocol):
    """`count` devices, of which `here` run in this process."""

    count: int

    @property
    def here(self) -> Sequence[int]:
        """The numbers of the devices of this process."""
        ...

    def sum(self, tensors: Tensors) -> Tensors:
        """The sum over all devices."""
        ...

    def maximum(self, tensors: Tensors) -> Tensors:
        """The maximum over all devices, entry by entry."""
        ...

    def gather(self, tensors: Tensors, axis: int) -> Tensors:
        """What all devices have, one behind the other along an axis."""
        ...


class LocalGroup:
    """Devices that one process runs in one function, where a collective is an op on what they have."""

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def here(self) -> Sequence[int]:
        """All of them."""
        return range(self.count)

    def sum(self, tensors: Tensors) -> Tensors:
        """Added in the order of the devices."""
        return [tf.add_n(tensors)] * self.count

    def maximum(self, tensors: Tensors) -> Tensors:
        """The maximum over all devices, entry by entry."""
        return [reduce(tf.maximum, tensors)] * self.count

    def gather(self, tensors: Tensors, axis: int) -> Tensors:
        """What all devices have, one behind the other along an axis."""
        return [tf.concat(tensors, axis)] * self.count


def measure_pieces(size: Any, count: int, units: int = 0) -> tuple[list[Any], list[Any]]:
    """Where the piece of each device begins, and how long it is: numbers, or tensors where the size is one.

    >>> measure_pieces(10, 3)
    ([0, 4, 7], [4, 3, 3])
    """
    if isinstance(size, int):
        sizes: list[Any] = list(divide(size, count, units))
    else:
        whole = units or size
        sizes = [size // whole * (whole // count + tf.cast(n < whole % count, size.dtype)) for n in range(count)]
    return [sum(sizes[:device]) for device in range(count)], sizes


def take_piece(tensor: Any, layout: Layout, count: int, device: int) -> Any:
    """The piece of a whole tensor that a device holds."""
    size, behind = tensor.shape[layout.axis], tensor.shape.rank - layout.axis - 1
    starts, sizes = measure_pieces(tf.shape(tensor)[layout.axis] if size is None else size, count, layout.units)
    begin, length = ([0] * layout.axis, [-1] * layout.axis)
    return tf.slice(tensor, [*begin, starts[device], *[0] * behind], [*length, sizes[device], *[-1] * behind])


def reshard(group: Group, tensors: Tensors, source: Layout, target: Layout) -> Tensors:
    """Bring a tensor from one layout to another."""
    if choose_collective(source, target) is None:
        return tensors
    if source.kind == PARTIAL:
        tensors = group.sum(tensors)
    elif source.kind == SPLIT:
        tensors = group.gather(tensors, source.axis)
    if target.kind == WHOLE:
        return tensors
    pairs = list(zip(tensors, group.here, strict=True))
    if target.kind == SPLIT:
        return [take_piece(tensor, target, group.count, device) for tensor, device in pairs]
    return [tensor if device == 0 else tf.zeros_like(tensor) for tensor, device in pairs]


def gather_whole(group: Group, tensors: Tensors, layout: Layout) -> Any:
    """A tensor as a whole, in this process."""
    return reshard(group, tensors, layout, WHOLE_LAYOUT)[0]
