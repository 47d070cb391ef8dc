"""Steps of Keras models, lowered to several devices of one process: they train like the traced steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parity_harness import assert_same
from whale_nebula.capture.mirror import mirror, order_operations
from whale_nebula.ir.graph import CAPTURE, INPUT
from whale_nebula.ir.layout import SPLIT, Layout, Layouts
from whale_nebula.passes.completion import Question, complete_layouts
from whale_nebula.passes.rules import fold
from whale_nebula.runtime.split.groups import LocalGroup
from whale_nebula.runtime.split.lowering import Lowering, SplitStage
from whale_nebula.spec import Value

RATE, STEPS = 0.05, 3
layers = keras.layers


class Task(NamedTuple):
    """A model, its layers by name, and a batch for it."""

    model: keras.Model
    named: dict[str, Any]
    x: np.ndarray
    y: np.ndarray


def make_dense() -> Task:
    inputs = keras.Input((4,))
    named = {"first": layers.Dense(8, activation="relu"), "second": layers.Dense(5)}
    rng = np.random.default_rng(0)
    outputs = layers.Lambda(lambda logits: tf.ensure_shape(logits, [None, 5]))(named["second"](named["first"](inputs)))
    model = keras.Model(inputs, outputs)
    return Task(model, named, rng.standard_normal((6, 4)).astype("float32"), rng.integers(0, 5, 6))


def make_grouped() -> Task:
    """A scale in pieces is reshaped to groups, with an axis of one entry before them."""
    inputs = keras.Input((4,))
    named = {"first": layers.Dense(12), "norm": layers.GroupNormalization(3), "second": layers.Dense(5)}
    rng = np.random.default_rng(0)
    model = keras.Model(inputs, named["second"](named["norm"](named["first"](inputs))))
    return Task(model, named, rng.standard_normal((6, 4)).astype("float32"), rng.integers(0, 5, 6))


def make_flattened() -> Task:
    """What a norm has made is reshaped to other axes; of four channels over three devices two have one each."""
    inputs = keras.Input((5, 5, 3))
    named = {"first": layers.Conv2D(4, 3), "norm": layers.RMSNormalization()}
    rng = np.random.default_rng(0)
    hidden = layers.Flatten()(named["norm"](named["first"](inputs)))
    model = keras.Model(inputs, layers.Dense(5)(hidden))
    return Task(model, named, rng.standard_normal((6, 5, 5, 3)).astype("float32"), rng.integers(0, 5, 6))


def make_shifted() -> Task:
    """A constant from outside the trace is added to what is in pieces."""
    inputs = keras.Input((4,))
    named = {"first": layers.Dense(8), "second": layers.Dense(5)}
    rng = np.random.default_rng(0)
    hidden = named["first"](inputs) + tf.constant(rng.standard_normal(8).astype("float32"))
    model = keras.Model(inputs, named["second"](hidden))
    return Task(model, named, rng.standard_normal((6, 4)).astype("float32"), rng.integers(0, 5, 6))


def make_sliced() -> Task:
    """Of what is in pieces the first place alone is read."""
    inputs = keras.Input((3, 4))
    named = {"first": layers.Dense(8), "second": layers.Dense(5)}
    rng = np.random.default_rng(0)
    model = keras.Model(inputs, named["second"](layers.ReLU()(named["first"](inputs)[:, 0])))
    return Task(model, named, rng.standard_normal((6, 3, 4)).astype("float32"), rng.integers(0, 5, 6))


def make_convolutional() -> Task:
    inputs = keras.Input((8, 8, 3))
    named = {
        "first": layers.Conv2D(8, 3, padding="same"),
        "second": layers.DepthwiseConv2D(3),
        "third": layers.Conv2D(6, 2),
    }
    hidden = layers.MaxPooling2D()(layers.ReLU()(layers.LayerNormalization()(named["first"](inputs))))
    hidden = layers.GlobalAveragePooling2D()(named["third"](named["second"](hidden)))
    rng = np.random.default_rng(0)
    model = keras.Model(inputs, layers.Dense(5)(hidden))
    return Task(model, named, rng.standard_normal((6, 8, 8, 3)).astype("float32"), rng.integers(0, 5, 6))


def make_transformer() -> Task:
    inputs = keras.Input((7,), dtype="int32")
    named = {
        "embedding": layers.Embedding(20, 16),
        "attention": layers.MultiHeadAttention(4, 4),
        "wide": layers.Dense(32, activation="gelu"),
        "narrow": layers.Dense(16),
        "head": layers.Dense(20),
    }
    hidden = named["embedding"](inputs)
    hidden = layers.LayerNormalization()(hidden + named["attention"](hidden, hidden))
    hidden = layers.LayerNormalization()(hidden + named["narrow"](named["wide"](hidden)))
    rng = np.random.default_rng(0)
    model = keras.Model(inputs, named["head"](hidden))
    return Task(model, named, rng.integers(0, 20, (6, 7)), rng.integers(0, 20, (6, 7)))


def make_tokens() -> Task:
    """A table of which few rows are looked up, some of them more than once."""
    inputs = keras.Input((7,), dtype="int32")
    named = {"embedding": layers.Embedding(50, 8)}
    rng = np.random.default_rng(0)
    model = keras.Model(inputs, layers.Dense(5)(layers.Flatten()(named["embedding"](inputs))))
    return Task(model, named, rng.integers(0, 50, (4, 7)), rng.integers(0, 5, 4))


CASES: dict[str, tuple[Callable[[], Task], dict[str, int]]] = {
    "columns": (make_dense, {"first.kernel": 1}),
    "rows": (make_dense, {"first.kernel": 0}),
    "classes": (make_dense, {"second.kernel": 1}),
    "groups": (make_grouped, {"first.kernel": 1, "norm.gamma": 0}),
    "flattened": (make_flattened, {"first.kernel": 3, "first.bias": 0, "norm.scale": 0}),
    "shifted": (make_shifted, {"first.kernel": 1, "first.bias": 0, "second.kernel": 0}),
    "sliced": (make_sliced, {"first.kernel": 1, "first.bias": 0, "second.kernel": 0}),
    "channels": (make_convolutional, {"first.kernel": 3}),
    "channels in": (make_convolutional, {"third.kernel": 2}),
    "feed-forward": (make_transformer, {"wide.kernel": 1, "narrow.kernel": 0}),
    "tokens": (make_transformer, {"head.kernel": 1}),
    "heads": (make_transformer, {f"attention.{name}_dense.kernel": 1 for name in ("query", "key", "value")}),
    "table by rows": (make_transformer, {"embedding.embeddings": 0}),
    "table by columns": (make_transformer, {"embedding.embeddings": 1}),
    "sgd: rows of a table": (make_tokens, {"embedding.embeddings": 0}),
    "sgd: columns of a table": (make_tokens, {"embedding.embeddings": 1}),
    "rows of a table": (make_tokens, {"embedding.embeddings": 0}),
}
"""What is split along which axis: layers by their names in the task, and their attributes."""
COUNTS = {"flattened": 3}
ADAM_CASES = ("rows", "classes", "rows of a table")
# Held by tests/parity/test_splits.py, in whole models, or much like another one: of the grid.
GRID_CASES = (
    "columns", "rows", "channels", "channels in", "feed-forward", "tokens", "heads", "table by rows",
    "table by columns", "sgd: columns of a table", "rows of a table", "groups", "flattened",
)  # fmt: skip


def trace(function: Any, specs: Sequence[tf.TensorSpec]) -> tuple[Any, ...]:
    """The graph of a function and its ops, what it is fed and gives, and the variables that it reads."""
    traced = function.get_concrete_function(*specs).graph
    captured_inputs = {internal.op.name: external for external, internal in traced.captures}
    roles = {t.op.name: (CAPTURE if t.op.name in captured_inputs else INPUT, t.op.name) for t in traced.inputs}
    graph, operations = mirror(traced, roles), order_operations(traced.get_operations())
    numbers = {op.name: number for number, op in enumerate(operations)}
    feeds = [Value(numbers[t.op.name]) for t in traced.inputs if t.op.name not in captured_inputs]
    fetches = [Value(numbers[t.op.name], t.value_index) for t in traced.outputs]
    return graph, operations, feeds, fetches, {numbers[name]: external for name, external in captured_inputs.items()}


class Step:
    """A traced training step, and the same for devices."""

    def __init__(self, task: Task, optimizer: keras.Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.optimizer.build(task.model.trainable_variables)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.whole = tf.function(self.train, autograph=False)
        specs = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in (task.x, task.y)]
        self.graph, self.operations, self.feeds, self.fetches, self.handles = trace(self.whole, specs)

    def train(self, x: Any, y: Any) -> tuple[Any, Any]:
        model = self.task.model
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = self.loss(y, outputs)
        self.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss, tf.argmax(outputs, -1)

    @property
    def variables(self) -> list[Any]:
        return [*self.task.model.variables, *self.optimizer.variables]

    def complete(self, split: dict[str, int], count: int) -> Layouts:
        numbers = {id(handle): number for number, handle in self.handles.items()}
        annotated = {}
        for path, axis in split.items():
            layer, _, attributes = path.partition(".")
            variable = operator.attrgetter(attributes)(self.task.named[layer])
            annotated[numbers[id(variable.value.handle)]] = Layout(SPLIT, axis)
        folds = fold(self.graph, {value.op: 0 for value in self.feeds}).folds
        question = Question(
            self.graph, range(len(self.graph)), count, annotated, wholes=self.fetches, folds=folds,
            where=lambda op: self.operations[op].name,
        )  # fmt: skip
        return complete_layouts(question)

    def lower(self, layouts: Layouts) -> Any:
        @tf.function(autograph=False)
        def run(*tensors: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            handles = {number: graph.capture(handle) for number, handle in self.handles.items()}
            lowering = Lowering(self.graph, self.operations, [SplitStage(layouts, LocalGroup(layouts.count))], handles)
            return lowering.run(range(len(self.graph)), dict(zip(self.feeds, tensors, strict=True)), self.fetches)

        return run

    def run_steps(self, run: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """What some steps gave and left; all is put back then."""
        before = [variable.numpy() for variable in self.variables]
        batch = tf.constant(self.task.x), tf.constant(self.task.y)
        found = [[np.asarray(each) for each in tf.nest.flatten(run(*batch))] for _ in range(STEPS)]
        after = [variable.numpy() for variable in self.variables]
        for variable, value in zip(self.variables, before, strict=True):
            variable.assign(value)
        return found, after


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(
            name, 3 if name == "flattened" else 2 + number % 2, marks=[pytest.mark.grid] if name in GRID_CASES else []
        )
        for number, name in enumerate(CASES)
    ],
)
def test_lowered_step_trains_like_the_whole_step(name: str, count: int) -> None:
    make, split = CASES[name]
    task = make()
    rule = keras.optimizers.SGD(RATE)
    if name in ADAM_CASES:
        rule = keras.optimizers.Adam(RATE, epsilon=1e-3, global_clipnorm=0.5)
    elif not name.startswith("sgd"):
        rule = keras.optimizers.SGD(RATE, momentum=0.9, global_clipnorm=0.5)
    step = Step(task, rule)
    layouts = step.complete(split, count)
    assert any(layout.kind == SPLIT for value, layout in layouts.by_value.items() if step.graph.spec(value).floating)
    alone = ("Scatter", "Segment", "SliceGrad")  # of these a device can make its own part
    assert not any(name in note for note in layouts.notes for name in alone)
    (outputs, weights), (found, left) = step.run_steps(step.whole), step.run_steps(step.lower(layouts))
    assert_same(outputs, found, "sums")
    assert_same(weights, left, "sums", RATE * STEPS)


class OneDeviceGroup(LocalGroup):
    """One of several devices, of which each runs its own function and needs nothing of the others."""

    holds_pieces = True

    def __init__(self, count: int, device: int) -> None:
        super().__init__(count)
        self.device = device

    @property
    def here(self) -> Sequence[int]:
        return (self.device,)


@pytest.mark.parametrize("axis", [0, 1])
def test_each_device_scatters_its_own_rows_into_its_piece(axis: int) -> None:
    """A table of 11 rows over three devices, and a slot that needs the rows in a tensor of its form."""
    draw, count = np.random.default_rng(0), 3
    values = [draw.standard_normal((11, 6)).astype("float32") for _ in range(2)]
    table, slot = map(tf.Variable, values)
    numbers, rows = tf.constant([4, 10, 0, 4, 7]), tf.constant(draw.standard_normal((5, 6)).astype("float32"))

    def train(numbers: Any, rows: Any) -> None:
        slot.assign(0.9 * slot + tf.math.unsorted_segment_sum(rows, numbers, 11))
        table.scatter_sub(tf.IndexedSlices(rows, numbers))
        table.assign(0.5 * table - slot)

    specs = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 6])]
    graph, operations, feeds, _, handles = trace(tf.function(train, autograph=False), specs)
    op = next(number for number, handle in handles.items() if handle is table.handle)
    layouts = complete_layouts(Question(graph, range(len(graph)), count, {op: Layout(SPLIT, axis)}))
    assert set(layouts.variables.values()) == {Layout(SPLIT, axis)} and len(layouts.variables) == 2
    assert not layouts.nbytes and not layouts.notes

    def run(device: int) -> list[np.ndarray]:
        pieces = [tf.Variable(np.array_split(value, count, axis)[device]) for value in values]
        own = {number: pieces[handle is slot.handle].handle for number, handle in handles.items()}

        @tf.function(autograph=False)
        def step(*tensors: Any) -> None:
            inside = {number: tf.compat.v1.get_default_graph().capture(handle) for number, handle in own.items()}
            lowering = Lowering(graph, operations, [SplitStage(layouts, OneDeviceGroup(count, device))], inside)
            lowering.run(range(len(graph)), dict(zip(feeds, tensors, strict=True)), [])

        step(numbers, rows)
        return [piece.numpy() for piece in pieces]

    train(numbers, rows)
    for whole, found in zip((table, slot), zip(*map(run, range(count)), strict=True), strict=True):
        np.testing.assert_allclose(np.concatenate(found, axis), whole.numpy(), rtol=1e-6)
