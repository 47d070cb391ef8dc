"""Layouts of tensors on the devices of a stage, and the collectives that convert them.

A tensor is *whole* on each device, *split* along an axis, or *partial*: each device holds a part of a sum. Devices
differ by at most one unit of a split axis: a unit is an entry, or a block of entries that stay together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from whale_nebula.spec import Spec, Value

WHOLE, SPLIT, PARTIAL = "whole", "split", "partial"

SLICE, MASK, PAD = "slice", "mask", "pad"
"""Conversions without communication: take a piece, replace by zeros but on the first device, pad with zeros."""
ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL = "all-gather", "all-reduce", "reduce-scatter", "all-to-all"

ROW_GROUPS, ROWS_JOINED = "row_groups", "rows_joined"
"""Names of identities whose tensor a stage of several devices splits along axis 0, and gathers again if fewer bytes
cross then (`models.SwitchFeedForward`).
"""
ROWS_PULLED, ROWS_PUSHED = "rows_pulled", "rows_pushed"
"""Names of Python calls that look up and update rows of a table outside the graph (`models.HashedEmbedding`). Their
last two inputs are a variable with an entry for each bucket of ids, and the first bucket and the number of buckets of
a device. A device with a part of the buckets looks up zeros for the ids of others.
"""


@dataclass(frozen=True)
class Layout:
    """The distribution of a tensor's entries over devices. `units` is the number of indivisible pieces of a split axis,
    if that is not its size: 8 heads of 64 numbers are 8 units of an axis of size 512.

    >>> print(Layout(SPLIT, 1), Layout(), Layout(SPLIT, 0, units=8))
    split(1) whole split(0, 8 units)
    """

    kind: str = WHOLE
    axis: int = 0
    units: int = 0

    def __str__(self) -> str:
        if self.kind != SPLIT:
            return self.kind
        return f"split({self.axis}{f', {self.units} units' if self.units else ''})"


WHOLE_LAYOUT, PARTIAL_LAYOUT = Layout(), Layout(PARTIAL)


def divide(size: int, count: int, units: int = 0) -> tuple[int, ...]:
    """The sizes of an axis on `count` devices: the first ones have a unit more if it does not divide evenly.

    >>> divide(100_003, 3), divide(512, 3, units=8)
    ((33335, 33334, 33334), (192, 192, 128))
    """
    units = units or size
    block, (least, more) = size // max(units, 1), divmod(units, count)
    return tuple(block * (least + (device < more)) for device in range(count))


def choose_collective(source: Layout, target: Layout) -> str | None:
    """The collective with the fewest bytes, or the local conversion, from one layout to another; None if they are
    equal.

    >>> choose_collective(PARTIAL_LAYOUT, Layout(SPLIT, 1))
    'reduce-scatter'
    """
    if source == target:
        return None
    if source.kind == WHOLE:
        return SLICE if target.kind == SPLIT else MASK
    if source.kind == PARTIAL:
        return ALL_REDUCE if target.kind == WHOLE else REDUCE_SCATTER
    return {SPLIT: ALL_TO_ALL, PARTIAL: PAD}.get(target.kind, ALL_GATHER)


_SENT_SHARES = {SLICE: 0.0, MASK: 0.0, PAD: 0.0, ALL_GATHER: 1.0, REDUCE_SCATTER: 1.0, ALL_REDUCE: 2.0}


def count_bytes(kind: str | None, size: float, count: int) -> float:
    """Bytes that each of `count` devices sends for a tensor of `size` bytes, in a ring.

    >>> count_bytes("all-reduce", 1000, 4), count_bytes("all-to-all", 1000, 4), count_bytes(None, 1000, 4)
    (1500.0, 187.5, 0.0)
    """
    if kind is None or count < 2:
        return 0.0
    share = 1 / count if kind == ALL_TO_ALL else _SENT_SHARES[kind]
    return share * size * (count - 1) / count


def find_local_spec(spec: Spec, layout: Layout, count: int, device: int) -> Spec:
    """The spec of the piece of one device; a split axis of unknown size stays unknown.

    >>> print(find_local_spec(Spec("float32", (None, 10)), Layout(SPLIT, 1), 3, 0))
    float32[?,4]
    """
    if layout.kind != SPLIT or spec.shape is None:
        return spec
    size = spec.shape[layout.axis]
    part = None if size is None else divide(size, count, layout.units)[device]
    return Spec(spec.dtype, (*spec.shape[: layout.axis], part, *spec.shape[layout.axis + 1 :]))


class Reshard(NamedTuple):
    """A tensor that is converted from one layout to another before an op reads it."""

    value: Value
    source: Layout
    target: Layout
    kind: str
    nbytes: float


def list_collectives(reshards: Mapping[int, Sequence[Reshard]]) -> tuple[Reshard, ...]:
    """The reshards that move bytes, each only once; `reshards` are by the op that needs them."""
    every = dict.fromkeys(reshard for found in reshards.values() for reshard in found)
    return tuple(reshard for reshard in every if reshard.nbytes)


@dataclass(frozen=True)
class Layouts:
    """The layout of every value of a stage on `count` devices that is not whole.

    `reshards` are by the op that needs them, -1 at the end; `joint_ops` are ops that devices compute together,
    `split_ops` all whose tensors are not whole; `notes` describe ops that are run whole, `whole_op_notes` maps such an
    op to its note. `handed_on` are passed between functions of the stage in the devices' layout; other values are
    passed whole. `sums` are gradients whose parts replicas add up between micro-batches and update, by a reduce-scatter
    or an all-reduce.
    """

    count: int
    by_value: Mapping[Value, Layout]
    reshards: Mapping[int, tuple[Reshard, ...]] = field(default_factory=dict)
    variables: Mapping[int, Layout] = field(default_factory=dict)
    joint_ops: frozenset[int] = frozenset()
    split_ops: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    handed_on: frozenset[Value] = frozenset()
    sums: tuple[Reshard, ...] = ()
    whole_op_notes: Mapping[int, str] = field(default_factory=dict)

    def layout(self, value: Value) -> Layout:
        """The layout of a value."""
        return self.by_value.get(value, WHOLE_LAYOUT)

    def returns_pieces(self, value: Value) -> bool:
        """Whether a function of the stage returns a value in pieces: it is handed on, and not made whole at the end."""
        return value in self.handed_on and all(each.value != value for each in self.reshards.get(-1, ()))

    @property
    def collectives(self) -> tuple[Reshard, ...]:
        """The collectives in one run of all ops, without repetitions."""
        return list_collectives(self.reshards)

    @property
    def nbytes(self) -> float:
        """Bytes that each device sends."""
        return fsum(each.nbytes for each in self.collectives)
