"""Make the ops of a stage again for several devices: each on its pieces, with what crosses between them.

Most ops are the traced op on other inputs; an input that says a shape is given that of the piece. Reads and writes of
variables, and ops that devices compute together (`Layouts.together`) have a way of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.layout import PARTIAL, SPLIT, WHOLE_LAYOUT, Layout
from whale_nebula.passes.layouts import ASSIGNS, Layouts
from whale_nebula.runtime.split.groups import Group, Tensors, gather_whole, measure_pieces, reshard, take_piece
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private

_SHAPED = {
    "Reshape": 1, "BroadcastTo": 1, "Fill": 0, "Empty": 0, "Slice": 2, "Conv2DBackpropInput": 0,
    "Conv2DBackpropFilter": 1, "Conv3DBackpropInputV2": 0, "Conv3DBackpropFilterV2": 1,
    "DepthwiseConv2dNativeBackpropInput": 0, "DepthwiseConv2dNativeBackpropFilter": 1, "AvgPoolGrad": 0,
}  # fmt: skip
"""Which input of an op says the shape of what it makes."""


@dataclass
class Lowering:
    """One run of ops on the devices of a group. `operations` are the traced ones by their number, `handles` those of
    variables. `values` are held as the layouts say, `others` brought to the layouts that single ops need.
    """

    graph: Graph
    operations: Sequence[Any]
    layouts: Layouts
    group: Group
    handles: Mapping[int, Any]
    values: dict[Value, Tensors] = field(default_factory=dict)
    others: dict[tuple[Value, Layout], Tensors] = field(default_factory=dict)
    made: dict[int, list[Any]] = field(default_factory=dict)

    def run(self, ops: Iterable[int], feeds: Mapping[Value, Any], fetches: Sequence[Value]) -> list[Any]:
        """Make ops for tensors that are whole on each device; gives what is fetched, whole."""
        count = len(self.group.here)
        self.values |= {Value(op): [handle] * count for op, handle in self.handles.items()}
        for value, tensor in feeds.items():
            self.values[value] = reshard(self.group, [tensor] * count, WHOLE_LAYOUT, self.layouts.of[value])
        for index in ops:
            if Value(index) not in self.values:
                self.make(self.graph.ops[index])
        return [self.take(value, WHOLE_LAYOUT)[0] for value in fetches]

    def make(self, op: Op) -> None:
        """Make an op for each device, after what its control inputs have become."""
        targets = {each.value: each.target for each in self.layouts.reshards.get(op.index, ())}
        layouts = [targets.get(value, self.layouts.of[value]) for value in op.inputs]
        with tf.control_dependencies([made for index in op.control for made in self.made.get(index, ())]):
            inputs = [self.take(value, layout) for value, layout in zip(op.inputs, layouts, strict=True)]
            found = self.choose(op)(op, inputs, layouts)
        self.values.update(zip(op.values, found, strict=True))

    def take(self, value: Value, layout: Layout) -> Tensors:
        """A value in a layout."""
        held = self.layouts.of[value]
        if held == layout or value.op in self.handles:
            return self.values[value]
        if (value, layout) not in self.others:
            self.others[value, layout] = reshard(self.group, self.values[value], held, layout)
        return self.others[value, layout]

    def choose(self, op: Op) -> Callable[[Op, Sequence[Tensors], Sequence[Layout]], list[Tensors]]:
        """How an op is made."""
        if op.index in self.layouts.together:
            return lambda op, inputs, layouts: _TOGETHER[op.type](self, op, inputs, layouts)
        own = {"ReadVariableOp": self.read, "Shape": self.shape, "ShapeN": self.shape, "Mean": self.mean}
        return self.assign if op.type in ASSIGNS else own.get(op.type, self.copy)

    def copy(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """The traced op on each device; once for all of them where all is whole."""
        outputs = [self.layouts.of[value] for value in op.values]
        alone = all(layout == WHOLE_LAYOUT for layout in (*layouts, *outputs))
        shaped = _SHAPED.get(op.type) if any(layout.kind == SPLIT for layout in outputs) else None
        made = []
        for place, device in enumerate(self.group.here[:1] if alone else self.group.here):
            own = [tensors[place] for tensors in inputs]
            if shaped is not None:
                own[shaped] = self.cut_shape(own[shaped], op, outputs[0], device)
            made.append(tf_private.copy_op(self.operations[op.index], own))
        self.made[op.index] = made
        by_device = made * len(self.group.here) if alone else made
        return [[each.outputs[out] for each in by_device] for out in range(len(op.outputs))]

    def cut_shape(self, shape: Any, op: Op, layout: Layout, device: int) -> Any:
        """The shape of a whole tensor, as that of the piece of a device; a -1 stays."""
        entry, known = tf.get_static_value(shape[layout.axis]), op.outputs[0].shape
        if entry is not None and entry < 0:
            return shape
        size = known[layout.axis] if known is not None else None
        _, sizes = measure_pieces(shape[layout.axis] if size is None else size, self.group.count, layout.units)
        return _replace_size(shape, layout.axis, sizes[device])

    def read(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """A variable, in pieces where it is held so."""
        made = tf_private.copy_op(self.operations[op.index], [self.handles[op.inputs[0].op]])
        self.made[op.index] = [made]
        tensors = [made.outputs[0]] * len(self.group.here)
        return [reshard(self.group, tensors, WHOLE_LAYOUT, self.layouts.of[Value(op.index)])]

    def assign(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """What a variable is given, as a whole."""
        whole = gather_whole(self.group, inputs[1], layouts[1])
        self.made[op.index] = [tf_private.copy_op(self.operations[op.index], [self.handles[op.inputs[0].op], whole])]
        return []

    def shape(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """The shapes of whole tensors."""
        found = []
        for tensors, layout in zip(inputs, layouts, strict=True):
            shapes = [tf.shape(tensor, out_type=op.outputs[0].dtype) for tensor in tensors]
            if layout.kind == SPLIT:
                sizes = self.group.sum([shape[layout.axis] for shape in shapes])
                shapes = [_replace_size(shape, layout.axis, size) for shape, size in zip(shapes, sizes, strict=True)]
            found.append(shapes)
        return found

    def mean(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """The mean over a split axis: that of a piece, times its share of the whole, is a part of a sum."""
        found = self.copy(op, inputs, layouts)
        if layouts[0].kind != SPLIT or self.layouts.of[Value(op.index)].kind != PARTIAL:
            return found
        own = [tf.cast(tf.shape(data)[layouts[0].axis], data.dtype) for data in inputs[0]]
        shares = [size / total for size, total in zip(own, self.group.sum(own), strict=True)]
        return [[each * share for each, share in zip(found[0], shares, strict=True)]]

    def starts(self, tensors: Tensors, layout: Layout) -> Tensors:
        """Where the piece of each device begins along its axis."""
        total = self.group.sum([tf.shape(tensor)[layout.axis] for tensor in tensors])[0]
        starts, _ = measure_pieces(total, self.group.count, layout.units)
        return [starts[device] for device in self.group.here]


def _replace_size(shape: Any, axis: int, size: Any) -> Any:
    return tf.concat([shape[:axis], [tf.cast(size, shape.dtype)], shape[axis + 1 :]], 0)


# ---------------------------------------------------------------------- ops that devices compute together
Inputs = Sequence[Tensors]
Held = Sequence[Layout]


def _exponentials(group: Group, scores: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """Scores less their maximum, the exponentials of these, and their sum, over the last axis of all devices."""
    largest = group.maximum([tf.reduce_max(each, -1, keepdims=True) for each in scores])
    shifted = [each - most for each, most in zip(scores, largest, strict=True)]
    powers = [tf.exp(each) for each in shifted]
    return shifted, powers, group.sum([tf.reduce_sum(each, -1, keepdims=True) for each in powers])


def _softmax(run: Lowering, op: Op, inputs: Inputs, layouts: Held) -> list[Tensors]:
    _, powers, sums = _exponentials(run.group, inputs[0])
    return [[power / total for power, total in zip(powers, sums, strict=True)]]


def _log_softmax(run: Lowering, op: Op, inputs: Inputs, layouts: Held) -> list[Tensors]:
    shifted, _, sums = _exponentials(run.group, inputs[0])
    return [[each - tf.math.log(total) for each, total in zip(shifted, sums, strict=True)]]


def _cross_entropy(run: Lowering, op: Op, inputs: Inputs, layouts: Held) -> list[Tensors]:
    """The loss of each row, which all devices have, and its gradient by the scores, in pieces."""
    shifted, powers, sums = _exponentials(run.group, inputs[0])
    labels = inputs[1] if layouts[1].kind == SPLIT else _mark_labels(run, inputs[1], shifted, layouts[0])
    picked = run.group.sum([tf.reduce_sum(label * each, -1) for label, each in zip(labels, shifted, strict=True)])
    mass = run.group.sum([tf.reduce_sum(label, -1) for label in labels])
    losses = [m * tf.math.log(total[..., 0]) - own for m, total, own in zip(mass, sums, picked, strict=True)]
    slopes = [
        m[..., tf.newaxis] * power / total - label
        for m, power, total, label in zip(mass, powers, sums, labels, strict=True)
    ]
    return [losses, slopes]


def _mark_labels(run: Lowering, labels: Tensors, scores: Tensors, layout: Layout) -> Tensors:
    """A one at the label of each row, where it is among the classes of a device."""
    offsets = zip(labels, run.starts(scores, layout), scores, strict=True)
    return [
        tf.one_hot(tf.cast(label, tf.int32) - start, tf.shape(each)[-1], dtype=each.dtype)
        for label, start, each in offsets
    ]


def _extreme(run: Lowering, op: Op, inputs: Inputs, layouts: Held) -> list[Tensors]:
    """The extreme of what each device finds among its own."""
    (own,) = run.copy(op, inputs, layouts)
    if op.type == "Max":
        return [run.group.maximum(own)]
    return [[-each for each in run.group.maximum([-each for each in own])]]


def _best(run: Lowering, op: Op, inputs: Inputs, layouts: Held) -> list[Tensors]:
    """The first of the largest, or of the smallest: among devices, too."""
    axis, sign = layouts[0].axis, 1 if op.type == "ArgMax" else -1
    (own,) = run.copy(op, inputs, layouts)
    starts = run.starts(inputs[0], layouts[0])
    numbers = [each + tf.cast(start, each.dtype) for each, start in zip(own, starts, strict=True)]
    gathered = run.group.gather([each[tf.newaxis] for each in numbers], 0)
    largest = run.group.gather([tf.reduce_max(sign * data, axis)[tf.newaxis] for data in inputs[0]], 0)
    return [
        [
            tf.reduce_min(tf.where(values == tf.reduce_max(values, 0), found, found.dtype.max), 0)
            for values, found in zip(largest, gathered, strict=True)
        ]
    ]


def _look_up(run: Lowering, op: Op, inputs: Inputs, layouts: Held) -> list[Tensors]:
    """Rows of a table in pieces: zeros for those that a device does not hold."""
    axis = 0 if op.type == "ResourceGather" else int(tf.get_static_value(inputs[2][0]))
    tables = _tables(run, op, inputs[0], layouts[0])
    found = []
    for table, numbers, start in zip(tables, inputs[1], run.starts(tables, layouts[0]), strict=True):
        own = numbers - tf.cast(start, numbers.dtype)
        inside = (own >= 0) & (own < tf.cast(tf.shape(table)[axis], own.dtype))
        rows = tf.gather(table, tf.where(inside, own, 0), axis=axis)
        ones = [1] * axis, [1] * (rows.shape.rank - axis - inside.shape.rank)
        kept = tf.reshape(inside, tf.concat([ones[0], tf.shape(inside), ones[1]], 0))
        found.append(tf.where(kept, rows, tf.zeros_like(rows)))
    return [found]


def _tables(run: Lowering, op: Op, tensors: Tensors, layout: Layout) -> Tensors:
    if op.type != "ResourceGather":
        return tensors
    handle = run.handles[op.inputs[0].op]
    table = tf.raw_ops.ReadVariableOp(resource=handle, dtype=op.outputs[0].dtype)
    return [take_piece(table, layout, run.group.count, device) for device in run.group.here]


_TOGETHER: Mapping[str, Callable[[Lowering, Op, Inputs, Held], list[Tensors]]] = {
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "ArgMax": _best,
    "ArgMin": _best,
    "Max": _extreme,
    "Min": _extreme,
    "ResourceGather": _look_up,
    "GatherV2": _look_up,
}
