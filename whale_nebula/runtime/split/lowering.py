"""Lower ops of split stages: each op is created for the shards, with collectives between ops.

Most ops are the traced op on other inputs; an input that is a shape is replaced by that of the piece. Reads and writes
of variables, and ops that devices compute together (`Layouts.together`), have separate functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.ir.graph import REPLICA_SUM, Graph, Op
from whale_nebula.ir.layout import PARTIAL, SPLIT, WHOLE_LAYOUT, Layout, Layouts, find_local_spec
from whale_nebula.passes.facts import ASSIGNS, SCATTERS, SEGMENT_SUM
from whale_nebula.runtime.split.groups import (
    Group,
    Pieces,
    Tensors,
    measure_pieces,
    measure_whole,
    reshard,
    select_piece,
)
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import private as tf_private

_SHAPE_INPUTS = {
    "Reshape": 1, "BroadcastTo": 1, "Fill": 0, "Empty": 0, "Slice": 2, "Conv2DBackpropInput": 0,
    "Conv2DBackpropFilter": 1, "Conv3DBackpropInputV2": 0, "Conv3DBackpropFilterV2": 1,
    "DepthwiseConv2dNativeBackpropInput": 0, "DepthwiseConv2dNativeBackpropFilter": 1, "AvgPoolGrad": 0,
    "StridedSliceGrad": 0,
}  # fmt: skip
"""The index of the input of an op that is the shape of its output."""


SumOverReplicas = Callable[[int, Any], Any]
"""Creates the sum of an operand over replicas in other processes, by the number of the traced op and the operand."""


@dataclass(frozen=True)
class SplitStage:
    """The layouts of a stage's values, and the group of devices that runs it."""

    layouts: Layouts
    group: Group


@dataclass
class StageLowering:
    """Creates the ops of one split stage for its devices. `operations` are the traced ops by number, `handles` those of
    its variables; `values` are the stage's tensors in their layouts, and `converted` those in other layouts, which
    single ops need. `created_ops` are the ops that were created for each traced one.
    """

    graph: Graph
    operations: Sequence[Any]
    stage: SplitStage
    handles: Mapping[int, Any]
    created_ops: dict[int, list[Any]]
    sum_over_replicas: SumOverReplicas | None = None
    values: dict[Value, Tensors] = field(default_factory=dict)
    converted: dict[tuple[Value, Layout], Tensors] = field(default_factory=dict)

    @property
    def layouts(self) -> Layouts:
        """The layouts of the stage's values."""
        return self.stage.layouts

    @property
    def group(self) -> Group:
        """The devices of the stage."""
        return self.stage.group

    def convert(self, value: Value, layout: Layout) -> Tensors:
        """A value of the stage in the layout that an op needs."""
        held = self.layouts.layout(value)
        if held == layout or value.op in self.handles:
            return self.values[value]
        if (value, layout) not in self.converted:
            shape = self.graph.spec(value).shape or ()
            self.converted[value, layout] = reshard(self.group, self.values[value], held, layout, shape)
        return self.converted[value, layout]

    def create(self, op: Op, provide: Callable[[Value], None]) -> None:
        """Create an op for each device, after the ops of its control inputs; `provide` makes an input available in
        `values`.
        """
        targets = {each.value: each.target for each in self.layouts.reshards.get(op.index, ())}
        layouts = [targets.get(value, self.layouts.layout(value)) for value in op.inputs]
        with tf.control_dependencies([made for index in op.control for made in self.created_ops.get(index, ())]):
            for value in op.inputs:
                provide(value)
            inputs = [self.convert(value, layout) for value, layout in zip(op.inputs, layouts, strict=True)]
            outputs = self.choose(op)(op, inputs, layouts)
        for value, tensors in zip(op.values, outputs, strict=True):
            self.values[value] = tensors
            self.set_shapes(value, tensors)

    def set_shapes(self, value: Value, tensors: Tensors) -> None:
        """Set the static shapes of shards, which not every collective infers."""
        for tensor, device in zip(tensors, self.group.here, strict=True):
            spec = find_local_spec(self.graph.spec(value), self.layouts.layout(value), self.group.count, device)
            if spec.dtype not in ("resource", "variant"):
                tensor.set_shape(spec.shape)

    def choose(self, op: Op) -> Callable[[Op, Sequence[Tensors], Sequence[Layout]], list[Tensors]]:
        """The function that creates an op for the devices: from its inputs and their layouts, the values of the op."""
        if op.type in SCATTERS:
            return self.scatter
        if op.index in self.layouts.joint_ops:
            return lambda op, inputs, layouts: _COLLECTIVE_OPS[op.type](self, op, inputs, layouts)
        own = {
            "ReadVariableOp": self.read,
            "ResourceGather": self.gather_columns,
            "Shape": self.shape,
            "ShapeN": self.shape,
            "Size": self.size,
            "Mean": self.mean,
            "EnsureShape": self.ensure_shape,
            "Squeeze": self.squeeze,
            SEGMENT_SUM: self.sum_segments,
            REPLICA_SUM: self.sum_replicas,
        }
        return self.assign if op.type in ASSIGNS else own.get(op.type, self.copy)

    def copy(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Copy the traced op for each device, or only once if everything is whole."""
        outputs = [self.layouts.layout(value) for value in op.values]
        alone = all(layout == WHOLE_LAYOUT for layout in (*layouts, *outputs))
        shaped = _SHAPE_INPUTS.get(op.type) if any(layout.kind == SPLIT for layout in outputs) else None
        made = []
        for place, device in enumerate(self.group.here[:1] if alone else self.group.here):
            own = [tensors[place] for tensors in inputs]
            if shaped is not None:
                own[shaped] = self.cut_shape(own[shaped], op, outputs[0], device)
            made.append(tf_private.copy_op(self.operations[op.index], own))
        self.created_ops[op.index] = made
        by_device = made * len(self.group.here) if alone else made
        return [[each.outputs[out] for each in by_device] for out in range(len(op.outputs))]

    def cut_shape(self, shape: Any, op: Op, layout: Layout, device: int) -> Any:
        """The shape of a device's piece, from that of a whole tensor; a -1 is kept."""
        entry, known = tf.get_static_value(shape[layout.axis]), op.outputs[0].shape
        if entry is not None and entry < 0:
            return shape
        size = known[layout.axis] if known is not None else None
        whole = shape[layout.axis]
        _, sizes = measure_pieces(whole if size is None else size, self.group.count, layout.units)
        return _replace_size(shape, layout.axis, tf.where(whole < 0, whole, tf.cast(sizes[device], whole.dtype)))

    def read(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """A variable's value, in pieces if it is held in pieces."""
        made = tf_private.copy_op(self.operations[op.index], [self.handles[op.inputs[0].op]])
        self.created_ops[op.index] = [made]
        tensors = [made.outputs[0]] * len(self.group.here)
        if self.group.holds_pieces:
            return [tensors]
        return [reshard(self.group, tensors, WHOLE_LAYOUT, self.layouts.layout(Value(op.index)))]

    def gather_columns(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Rows of a variable: if it is split along another axis, each device's piece of them."""
        if self.group.holds_pieces or layouts[0].kind != SPLIT:
            return self.copy(op, inputs, layouts)
        shared, tables = self.operations[op.index].get_attr("batch_dims"), _read_tables(self, op, inputs[0], layouts[0])
        found = [tf.gather(*each, axis=shared, batch_dims=shared) for each in zip(tables, inputs[1], strict=True)]
        self.created_ops[op.index] = [tensor.op for tensor in found]
        return [found]

    def assign(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Assign to a variable: this process's piece, if it holds pieces, otherwise the whole value."""
        whole = inputs[1][0]
        if not self.group.holds_pieces:
            whole = reshard(self.group, inputs[1], layouts[1], WHOLE_LAYOUT)[0]
        self.created_ops[op.index] = [
            tf_private.copy_op(self.operations[op.index], [self.handles[op.inputs[0].op], whole])
        ]
        return []

    def scatter(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Scatter rows into a variable: each process changes those of its shard."""
        handle, numbers, rows = self.handles[op.inputs[0].op], inputs[1][0], inputs[2][0]
        held = self.layouts.layout(op.inputs[0])
        if not self.group.holds_pieces:
            rows = reshard(self.group, inputs[2], layouts[2], WHOLE_LAYOUT)[0]
        elif held.kind == SPLIT and held.axis == 0:
            starts, sizes = self.measure(op.inputs[0], [handle], held)
            own = numbers - tf.cast(starts[self.group.here[0]], numbers.dtype)
            inside = (own >= 0) & (own < tf.cast(sizes[self.group.here[0]], own.dtype))
            numbers = tf.boolean_mask(own, inside)
            rows = tf.boolean_mask(rows, inside) if rows.shape.rank else rows
        self.created_ops[op.index] = [tf_private.copy_op(self.operations[op.index], [handle, numbers, rows])]
        return []

    def sum_segments(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Add up rows by segment: if only the result is in pieces, each device computes the sums of its segments."""
        layout = self.layouts.layout(Value(op.index))
        if layout.kind != SPLIT or layout.axis != 0 or layouts[0].kind == SPLIT:
            return self.copy(op, inputs, layouts)
        made, known = [], op.outputs[0].shape
        for rows, numbers, count, device in zip(*inputs, self.group.here, strict=True):
            size = known[0] if known is not None and known[0] is not None else tf.cast(count, tf.int32)
            starts, sizes = measure_pieces(size, self.group.count, layout.units)
            own = numbers - tf.cast(starts[device], numbers.dtype)
            inside = (own >= 0) & (own < tf.cast(sizes[device], own.dtype))
            made.append(tf.math.unsorted_segment_sum(rows, tf.where(inside, own, -1), sizes[device]))
        return [made]

    def shape(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """The shapes of whole tensors."""
        found = []
        for value, tensors, layout in zip(op.inputs, inputs, layouts, strict=True):
            shapes = [tf.shape(tensor, out_type=op.outputs[0].dtype) for tensor in tensors]
            if layout.kind == SPLIT:
                size = self.measure_axis(value, [shape[layout.axis] for shape in shapes], layout)
                shapes = [_replace_size(shape, layout.axis, size) for shape in shapes]
            found.append(shapes)
        return found

    def size(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """The number of entries of a whole tensor."""
        (shapes,) = self.shape(op, inputs, layouts)
        return [[tf.reduce_prod(shape) for shape in shapes]]

    def ensure_shape(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Check the shape of a tensor: each device checks that of its piece."""
        if layouts[0].kind != SPLIT:
            return self.copy(op, inputs, layouts)
        shape = tf.TensorShape(self.operations[op.index].get_attr("shape"))
        whole = Spec(op.outputs[0].dtype, None if shape.rank is None else tuple(shape.as_list()))
        pieces = [find_local_spec(whole, layouts[0], self.group.count, device) for device in self.group.here]
        checked = [tf.ensure_shape(tensor, piece.shape) for tensor, piece in zip(inputs[0], pieces, strict=True)]
        self.created_ops[op.index] = [tensor.op for tensor in checked]
        return [checked]

    def sum_replicas(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """A sum over replicas: each device adds up its piece with the same devices of the other replicas."""
        if self.sum_over_replicas is None:
            return self.copy(op, inputs, layouts)
        sums = [self.sum_over_replicas(op.index, tensor) for tensor in inputs[0]]
        self.created_ops[op.index] = [total.op for total in sums]
        return [sums]

    def squeeze(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """Remove axes with one entry in the whole tensor, but not a split axis with one entry in a piece."""
        axes = list(self.operations[op.index].get_attr("squeeze_dims"))
        shape = self.graph.spec(op.inputs[0]).shape
        if layouts[0].kind != SPLIT or axes or shape is None:
            return self.copy(op, inputs, layouts)
        axes = [axis for axis, size in enumerate(shape) if size == 1]
        found = [tf.squeeze(tensor, axes) for tensor in inputs[0]]
        self.created_ops[op.index] = [tensor.op for tensor in found]
        return [found]

    def mean(self, op: Op, inputs: Sequence[Tensors], layouts: Sequence[Layout]) -> list[Tensors]:
        """The mean over a split axis: that of a piece, times its share of the whole, is a partial sum."""
        found = self.copy(op, inputs, layouts)
        if layouts[0].kind != SPLIT or self.layouts.layout(Value(op.index)).kind != PARTIAL:
            return found
        own = [tf.shape(data)[layouts[0].axis] for data in inputs[0]]
        total = tf.cast(self.measure_axis(op.inputs[0], own, layouts[0]), op.outputs[0].dtype)
        return [[each * (tf.cast(size, each.dtype) / total) for each, size in zip(found[0], own, strict=True)]]

    def starts(self, value: Value, tensors: Tensors, layout: Layout) -> Tensors:
        """The offset along the split axis of the piece of each device that runs here."""
        starts, _ = self.measure(value, tensors, layout)
        return [starts[device] for device in self.group.here]

    def measure(self, value: Value, tensors: Tensors, layout: Layout) -> tuple[list[Any], list[Any]]:
        """Offsets and sizes of all devices' pieces along the split axis."""
        total = self.measure_axis(value, [_measure_shape(tensor)[layout.axis] for tensor in tensors], layout)
        return measure_pieces(total, self.group.count, layout.units)

    def measure_axis(self, value: Value, sizes: Tensors, layout: Layout) -> Any:
        """The size of a whole value along its split axis, from its static shape or, if that is unknown, from the
        `sizes` of the pieces here.
        """
        spec = self.graph.spec(value)
        if spec.dtype == "resource":  # its layout is taken from its readers, if any
            reads = (op for op in self.graph.ops if op.type == "ReadVariableOp" and op.inputs[0] == value)
            spec = next((op.outputs[0] for op in reads), Spec(spec.dtype, None))
        known = None if spec.shape is None else spec.shape[layout.axis]
        return measure_whole(self.group, sizes, layout) if known is None else known


@dataclass
class Lowering:
    """Creates a sequence of traced ops in the current graph: those of split `stages` for each device, others once.
    `operations` are the traced ops by number, `handles` their inputs from outside the trace, by number, and
    `sum_over_replicas` computes sums over replicas in other processes.
    """

    graph: Graph
    operations: Sequence[Any]
    stages: Sequence[SplitStage]
    handles: Mapping[int, Any]
    sum_over_replicas: SumOverReplicas | None = None
    whole_values: dict[Value, Any] = field(default_factory=dict)
    created_ops: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        handles = {op: each for op, each in self.handles.items() if each.dtype in (tf.resource, tf.variant)}
        self.lowered_stages = [
            StageLowering(self.graph, self.operations, each, handles, self.created_ops, self.sum_over_replicas)
            for each in self.stages
        ]
        for stage in self.lowered_stages:
            stage.values |= {Value(op): [handle] * len(stage.group.here) for op, handle in handles.items()}
        self.whole_values |= {Value(op): handle for op, handle in self.handles.items()}

    def run(self, ops: Iterable[int], feeds: Mapping[Value, Any], fetches: Sequence[Value]) -> list[Any]:
        """Create ops from these feeds, which are tensors or `Pieces`; returns the fetches (see `fetch`)."""
        for value, tensor in feeds.items():
            stage = self.find_stage(value)
            if isinstance(tensor, Pieces) and stage is not None:
                stage.values[value] = list(tensor.tensors)
            else:
                self.whole_values[value] = tensor
        own = set(ops)
        for index in ops:
            self.create(index, own)
        return [self.fetch(value) for value in fetches]

    def create(self, index: int, own: Collection[int]) -> None:
        """Create an op, after the ops of `own` that it reads."""
        op = self.graph.ops[index]
        if index in self.created_ops or Value(index) in self.whole_values:
            return
        self.created_ops[index] = []
        for before in (*(value.op for value in op.inputs), *op.control):
            if before in own:
                self.create(before, own)
        stage = next((each for each in self.lowered_stages if index in each.layouts.split_ops), None)
        if stage is not None:
            stage.create(op, lambda value: self.provide(value, stage))
            return
        with tf.control_dependencies([made for index in op.control for made in self.created_ops.get(index, ())]):
            inputs = [self.join(value) for value in op.inputs]
            if op.type == REPLICA_SUM and self.sum_over_replicas is not None:
                made = self.sum_over_replicas(index, inputs[0]).op
            else:
                made = tf_private.copy_op(self.operations[index], inputs)
        self.created_ops[index] = [made]
        self.whole_values.update(zip(op.values, made.outputs, strict=True))

    def find_stage(self, value: Value) -> StageLowering | None:
        """The stage that has a value in pieces, if any."""
        return next((stage for stage in self.lowered_stages if value in stage.layouts.by_value), None)

    def provide(self, value: Value, reader: StageLowering) -> None:
        """Make a value available to a stage in the stage's layout, if it is not one of its own."""
        if value not in reader.values:
            tensors = [self.join(value)] * len(reader.group.here)
            reader.values[value] = reshard(reader.group, tensors, WHOLE_LAYOUT, reader.layouts.layout(value))

    def join(self, value: Value) -> Any:
        """A value as a whole; that of a split stage is converted."""
        if value not in self.whole_values:
            stage = next(stage for stage in self.lowered_stages if value in stage.values)
            self.whole_values[value] = stage.convert(value, WHOLE_LAYOUT)[0]
        return self.whole_values[value]

    def fetch(self, value: Value) -> Any:
        """A value as it is returned: in pieces (`Pieces`) if its stage returns pieces of it, otherwise whole."""
        stage = self.find_stage(value)
        if stage is None or not stage.layouts.returns_pieces(value):
            return self.join(value)
        return Pieces(tuple(stage.values[value]))


def _measure_shape(tensor: Any) -> Any:
    """The shape of a tensor, or of a variable's value."""
    return tf.raw_ops.VariableShape(input=tensor) if tensor.dtype == tf.resource else tf.shape(tensor)


def _replace_size(shape: Any, axis: int, size: Any) -> Any:
    return tf.concat([shape[:axis], [tf.cast(size, shape.dtype)], shape[axis + 1 :]], 0)


# ---------------------------------------------------------------------- ops that devices compute together
Inputs = Sequence[Tensors]
InputLayouts = Sequence[Layout]


def _compute_exponentials(group: Group, scores: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """Scores minus the largest of their row, the exponentials of these, and the sum of each row, over all devices."""
    largest = group.maximum([tf.reduce_max(each, -1, keepdims=True) for each in scores])
    shifted = [each - most for each, most in zip(scores, largest, strict=True)]
    powers = [tf.exp(each) for each in shifted]
    return shifted, powers, group.sum([tf.reduce_sum(each, -1, keepdims=True) for each in powers])


def _softmax(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    _, powers, sums = _compute_exponentials(run.group, inputs[0])
    return [[power / total for power, total in zip(powers, sums, strict=True)]]


def _log_softmax(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    shifted, _, sums = _compute_exponentials(run.group, inputs[0])
    return [[each - tf.math.log(total) for each, total in zip(shifted, sums, strict=True)]]


def _cross_entropy(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """The loss of each row, which all devices have, and, in pieces, the op's second result: the gradient of the loss
    with respect to the scores if labels sum to 1. Both are NaN for an integer label that is not a class, as on GPUs.
    """
    shifted, powers, sums = _compute_exponentials(run.group, inputs[0])
    sparse = op.type.startswith("Sparse")
    labels = _mark_labels(run, op.inputs[0], inputs[1], shifted, layouts[0]) if sparse else inputs[1]
    own = [
        tf.stack([tf.reduce_sum(label * each, -1), tf.reduce_sum(label, -1)])
        for label, each in zip(labels, shifted, strict=True)
    ]
    picked, mass = zip(*map(tf.unstack, run.group.sum(own)), strict=True)
    if sparse:  # 1 for each row whose label is a class, otherwise NaN
        mass = tuple(each / each for each in mass)
    losses = [m * tf.math.log(total[..., 0]) - own for m, total, own in zip(mass, sums, picked, strict=True)]
    slopes = [
        power / total * (m[..., tf.newaxis] if sparse else 1.0) - label
        for m, power, total, label in zip(mass, powers, sums, labels, strict=True)
    ]
    return [losses, slopes]


def _mark_labels(run: StageLowering, value: Value, labels: Tensors, scores: Tensors, layout: Layout) -> Tensors:
    """A one at the label of each row, if it is among the classes of a device."""
    offsets = zip(labels, run.starts(value, scores, layout), scores, strict=True)
    return [
        tf.one_hot(tf.cast(label, tf.int32) - start, tf.shape(each)[-1], dtype=each.dtype)
        for label, start, each in offsets
    ]


def _extreme(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """The extreme over the local extremes of all devices."""
    (own,) = run.copy(op, inputs, layouts)
    if op.type == "Max":
        return [run.group.maximum(own)]
    return [[-each for each in run.group.maximum([-each for each in own])]]


def _arg_extreme(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """The index of the first maximum, or minimum, over all devices."""
    axis, sign = layouts[0].axis, 1 if op.type == "ArgMax" else -1
    (own,) = run.copy(op, inputs, layouts)
    starts = run.starts(op.inputs[0], inputs[0], layouts[0])
    numbers = [each + tf.cast(start, each.dtype) for each, start in zip(own, starts, strict=True)]
    ones = [1] * run.group.count
    gathered = run.group.gather([each[tf.newaxis] for each in numbers], 0, ones)
    largest = run.group.gather([tf.reduce_max(sign * data, axis)[tf.newaxis] for data in inputs[0]], 0, ones)
    return [
        [
            tf.reduce_min(tf.where(values == tf.reduce_max(values, 0), found, found.dtype.max), 0)
            for values, found in zip(largest, gathered, strict=True)
        ]
    ]


def _is_in_top_k(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """Whether fewer than k scores of a row are above that of its target, and all are finite."""
    scores, targets, counts = inputs
    marks = [mark > 0 for mark in _mark_labels(run, op.inputs[0], targets, scores, layouts[0])]
    own = [
        tf.stack(
            [tf.reduce_sum(tf.where(mark, each, tf.zeros_like(each)), -1), tf.reduce_sum(tf.cast(mark, each.dtype), -1)]
        )
        for mark, each in zip(marks, scores, strict=True)
    ]
    found = []
    for each, summed, count in zip(scores, run.group.sum(own), counts, strict=True):
        above = tf.reduce_sum(tf.cast(each > summed[0][:, tf.newaxis], tf.int32), -1)
        strange = tf.reduce_sum(tf.cast(~tf.math.is_finite(each), tf.int32), -1)
        found.append((tf.stack([above, strange]), tf.cast(count, tf.int32), summed))
    pairs = zip(map(tf.unstack, run.group.sum([each for each, _, _ in found])), found, strict=True)
    return [[(above < count) & (strange == 0) & (summed[1] > 0) for (above, strange), (_, count, summed) in pairs]]


def _top_k(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """The k largest along the last axis, from the k largest of each device's piece."""
    starts, sizes = run.measure(op.inputs[0], inputs[0], layouts[0])
    count = tf.get_static_value(inputs[1][0])
    fixed = count is not None and all(isinstance(size, int) for size in sizes)
    counts = [min(int(count), size) if fixed else tf.minimum(inputs[1][0], size) for size in sizes]
    found = [tf.math.top_k(data, counts[device]) for data, device in zip(inputs[0], run.group.here, strict=True)]
    places = [each.indices + starts[device] for each, device in zip(found, run.group.here, strict=True)]
    axis = layouts[0].axis
    values, places = (run.group.gather(each, axis, counts) for each in ([each.values for each in found], places))
    best = [tf.math.top_k(each, k) for each, k in zip(values, inputs[1], strict=True)]
    chosen = [tf.gather(each, top.indices, batch_dims=axis) for each, top in zip(places, best, strict=True)]
    return [[top.values for top in best], [tf.cast(each, op.outputs[1].dtype) for each in chosen]]


def _look_up(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """Look up rows in a sharded table: zeros for rows of other devices."""
    axis = 0 if op.type == "ResourceGather" else int(tf.get_static_value(inputs[2][0]))
    shared = run.operations[op.index].get_attr("batch_dims")
    tables = _read_tables(run, op, inputs[0], layouts[0])
    found = []
    for table, numbers, start in zip(tables, inputs[1], run.starts(op.inputs[0], tables, layouts[0]), strict=True):
        own = numbers - tf.cast(start, numbers.dtype)
        inside = (own >= 0) & (own < tf.cast(tf.shape(table)[axis], own.dtype))
        rows = tf.gather(table, tf.where(inside, own, 0), axis=axis, batch_dims=shared)
        ones = [1] * (axis - shared), [1] * (rows.shape.rank - axis + shared - inside.shape.rank)
        sizes = tf.shape(inside)
        kept = tf.reshape(inside, tf.concat([sizes[:shared], ones[0], sizes[shared:], ones[1]], 0))
        found.append(tf.where(kept, rows, tf.zeros_like(rows)))
    return [found]


def _read_tables(run: StageLowering, op: Op, tensors: Tensors, layout: Layout) -> Tensors:
    if op.type != "ResourceGather":
        return tensors
    handle = run.handles[op.inputs[0].op]
    table = tf.raw_ops.ReadVariableOp(resource=handle, dtype=op.outputs[0].dtype)
    if run.group.holds_pieces:
        return [table]
    return [select_piece(table, layout, run.group.count, device) for device in run.group.here]


def _call_rows(run: StageLowering, op: Op, inputs: Inputs, layouts: InputLayouts) -> list[Tensors]:
    """Call Python for the rows of a table outside the graph: each process for the rows of its device, by their offset
    and number in the last input; one process with all devices once, for the whole table.
    """
    given = [tensors[0] for tensors in inputs]
    if run.group.holds_pieces:
        starts, sizes = run.measure(op.inputs[-2], inputs[-2], layouts[-2])
        (device,) = run.group.here
        given[-1] = tf.constant([starts[device], sizes[device]], given[-1].dtype)
    else:
        given[-2] = run.convert(op.inputs[-2], WHOLE_LAYOUT)[0]
    made = tf_private.copy_op(run.operations[op.index], given)
    run.created_ops[op.index] = [made]
    outputs = zip(op.values, made.outputs, strict=True)
    if run.group.holds_pieces:
        return [[tensor] for _, tensor in outputs]
    count = run.group.count
    return [reshard(run.group, [tensor] * count, WHOLE_LAYOUT, run.layouts.layout(value)) for value, tensor in outputs]


_COLLECTIVE_OPS: Mapping[str, Callable[[StageLowering, Op, Inputs, InputLayouts], list[Tensors]]] = {
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "ArgMax": _arg_extreme,
    "ArgMin": _arg_extreme,
    "InTopK": _is_in_top_k,
    "InTopKV2": _is_in_top_k,
    "TopKV2": _top_k,
    "Max": _extreme,
    "Min": _extreme,
    "ResourceGather": _look_up,
    "GatherV2": _look_up,
    "PyFunc": _call_rows,
}
