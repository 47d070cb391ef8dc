"""Plans of sharded models: what crosses between devices, which is never the large tensor."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.passes.programs import list_cases
from tests.unit.passes.rules.fold_texts import list_batched_inputs, parse_graph
from whale_nebula.errors import NebulaWarning, NotYetError, PlanError
from whale_nebula.ir.cut import Worker
from whale_nebula.ir.layout import SPLIT, WHOLE_LAYOUT, Layout, Layouts, count_bytes
from whale_nebula.models import SwitchFeedForward
from whale_nebula.passes.completion import Completion, Question, complete_layouts
from whale_nebula.passes.facts import LayoutChange
from whale_nebula.passes.pipeline import cut_program
from whale_nebula.passes.rules import fold
from whale_nebula.passes.split import check_devices, list_runs
from whale_nebula.plan.records import PlanCollective
from whale_nebula.plan.splits import time_collective
from whale_nebula.runtime.split.groups import LocalGroup
from whale_nebula.runtime.split.lowering import StageLowering
from whale_nebula.schedule.lines import Line
from whale_nebula.scopes.identity import set_clusters
from whale_nebula.spec import Value

ROWS, CLASSES, WIDTH, COUNT = 12, 1000, 6, 3
LOGITS = ROWS * CLASSES * 4
layers, metrics = keras.layers, keras.metrics


@pytest.fixture(autouse=True)
def closed_runs() -> Iterator[None]:
    nb.shutdown()
    yield
    nb.shutdown()


def with_integer_labels() -> tuple[Any, list[Any]]:
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own = [metrics.SparseTopKCategoricalAccuracy(3), metrics.SparseCategoricalCrossentropy(from_logits=True)]
    return logits, ["accuracy", *own]


def with_one_hot_labels() -> tuple[Any, list[Any]]:
    logits = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return logits, ["accuracy", metrics.TopKCategoricalAccuracy(3), metrics.CategoricalCrossentropy(from_logits=True)]


def with_probabilities() -> tuple[Any, list[Any]]:
    return keras.losses.SparseCategoricalCrossentropy(), ["accuracy", metrics.SparseTopKCategoricalAccuracy(3)]


def with_focal_loss() -> tuple[Any, list[Any]]:
    return keras.losses.CategoricalFocalCrossentropy(from_logits=True), [
        mean_of_top_three,
        metrics.TopKCategoricalAccuracy(3),
    ]


def mean_of_top_three(y_true: Any, y_pred: Any) -> Any:
    """The mean of each row's three best, and where they are."""
    values, places = tf.math.top_k(y_pred, 3)
    return tf.reduce_mean(values) + tf.reduce_mean(tf.cast(places, values.dtype))


def make_classifier(task: Callable[[], tuple[Any, list[Any]]], count: int = 0) -> tuple[keras.Model, Any, Any]:
    """Make a classifier split over `count` devices; with 0, an eager Keras model."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,))
    with nb.cluster() if count else contextlib.nullcontext():
        hidden = layers.Dense(WIDTH, activation="relu")(inputs)
        with nb.split(count) if count else contextlib.nullcontext():
            outputs = layers.Dense(CLASSES)(hidden)
            outputs = layers.Softmax()(outputs) if task is with_probabilities else outputs
    model = keras.Model(inputs, outputs)
    loss, task_metrics = task()
    rule = keras.optimizers.SGD(1e-2, momentum=0.9, global_clipnorm=1.0)
    model.compile(rule, loss, metrics=task_metrics, run_eagerly=not count)
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((ROWS, WIDTH)).astype("float32"), draw.integers(0, CLASSES, ROWS)
    return model, x, np.eye(CLASSES, dtype="float32")[y] if task in (with_one_hot_labels, with_focal_loss) else y


class CountingGroup(LocalGroup):
    """A group that adds up what each device sends when it runs, by the formulas of a ring."""

    sent: float = 0.0
    paused: bool = False

    def count_bytes(self, kind: str, tensors: list[Any], share: float = 1.0) -> None:
        def add(entries: Any) -> None:
            CountingGroup.sent += count_bytes(kind, float(entries) * tensors[0].dtype.size * share, self.count)

        if not CountingGroup.paused:
            tf.py_function(add, [tf.add_n([tf.size(tensor) for tensor in tensors])], [])

    def sum(self, tensors: list[Any]) -> list[Any]:
        if tensors[0].dtype.is_floating or tensors[0].shape.rank:  # a plan does not count sums of integer scalars
            self.count_bytes("all-reduce", tensors, 1 / self.count)
        return super().sum(tensors)

    def maximum(self, tensors: list[Any]) -> list[Any]:
        self.count_bytes("all-reduce", tensors, 1 / self.count)
        return super().maximum(tensors)

    def gather(self, tensors: list[Any], axis: int, sizes: Any) -> list[Any]:
        self.count_bytes("all-gather", tensors)
        return super().gather(tensors, axis, sizes)

    def scatter(self, tensors: list[Any], axis: int, sizes: Any) -> list[Any]:
        self.count_bytes("reduce-scatter", tensors, 1 / self.count)
        return super().scatter(tensors, axis, sizes)

    def exchange(self, tensors: list[Any], axis: int, sizes: Any, other: int, others: Any) -> list[Any]:
        self.count_bytes("all-to-all", tensors)
        return super().exchange(tensors, axis, sizes, other, others)


def pause_counting(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the assignment of a variable: in one process its pieces are gathered, which a plan does not count."""

    def do(*args: Any) -> Any:
        CountingGroup.paused = True
        found = assign(*args)
        CountingGroup.paused = False
        return found

    return do


@pytest.fixture
def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A function that returns the bytes that each device has sent in steps."""
    CountingGroup.sent = 0.0
    monkeypatch.setattr("whale_nebula.runtime.step.compiled.LocalGroup", CountingGroup)
    monkeypatch.setattr(StageLowering, "assign", pause_counting(StageLowering.assign))
    return lambda: CountingGroup.sent


@pytest.mark.grid
@pytest.mark.parametrize("task", [with_integer_labels, with_one_hot_labels, with_probabilities, with_focal_loss])
def test_logits_never_cross_and_sent_bytes_match_the_plan(
    task: Callable[[], tuple[Any, list[Any]]], sent_bytes: Callable[[], float]
) -> None:
    model, x, y = make_classifier(task, COUNT)
    plan = nb.plan(model, x, y)
    assert not plan.notes and {each.kind for each in plan.collectives} <= {"all-reduce", "all-gather"}
    assert max(each.bytes for each in plan.collectives) < LOGITS / 20
    planned = sum(each.bytes * each.times for each in plan.collectives)
    results = model.train_on_batch(x, y, return_dict=True)
    assert planned == pytest.approx(sent_bytes(), rel=0.01)
    nb.shutdown()
    model, x, y = make_classifier(task)
    assert results == pytest.approx(model.train_on_batch(x, y, return_dict=True), rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize(("groups", "k", "micro_batches"), [(4, 2, 1), (None, 1, 2)])
def test_sent_bytes_of_experts_match_the_plan(
    groups: int | None, k: int, micro_batches: int, sent_bytes: Callable[[], float]
) -> None:
    """The number of places depends on tokens, not on rows, so only a step knows it."""
    layer, optimizer = SwitchFeedForward(4, 8, k=k, row_groups=groups), keras.optimizers.SGD(0.1)

    def step(x: Any) -> Any:
        pipeline = nb.pipeline(micro_batch=micro_batches, coupled="allow")
        with nb.cluster(), pipeline, tf.GradientTape() as tape:
            hidden = tf.tanh(x)
            with nb.stage(), nb.split(2, axis=0):
                hidden = hidden + layer(hidden, training=True)
            loss = tf.reduce_mean(tf.square(hidden)) + tf.add_n(layer.losses)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return loss

    function, x = nb.function(step), np.random.default_rng(0).standard_normal((16, 7, WIDTH)).astype("float32")
    layer.build(x.shape)
    planned = sum(each.bytes * each.times for each in nb.plan(function, x).collectives)
    function(x)
    assert planned == pytest.approx(sent_bytes(), rel=0.01)


def plan_dense_pair() -> nb.Plan:
    """Plan a dense layer split by columns and one split by rows, with a layer before them."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    with nb.cluster():
        hidden = layers.Dense(16)(inputs)
        with nb.split(2, axis=1):
            wide = layers.Dense(64, activation="gelu")(hidden)
        with nb.split(2, axis=0):
            outputs = layers.Dense(16)(wide)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    return nb.plan(model, np.zeros((ROWS, 16)), np.zeros((ROWS, 16)))


def test_dense_pair_needs_one_all_reduce_each_way() -> None:
    plan = plan_dense_pair()
    one = round(count_bytes("all-reduce", ROWS * 16 * 4, 2))
    assert [(each.kind, each.bytes, each.times) for each in plan.collectives] == [("all-reduce", one, 1)] * 2
    assert {each.seconds for each in plan.collectives} == {None}


@pytest.mark.parametrize(
    ("kind", "devices", "rounds"),
    [("all-reduce", 2, 2), ("all-reduce", 4, 6), ("all-gather", 2, 1), ("all-gather", 4, 3)],
)
def test_collective_is_timed_as_a_ring(kind: str, devices: int, rounds: int) -> None:
    collective = PlanCollective(kind, 3000, "wide", "hidden", "forward")
    seconds = time_collective(collective, devices, Line(rate=1e6, delay=0.25))
    assert seconds == pytest.approx(0.003 + rounds * 0.25)


def test_collective_seconds_follow_the_link_inside_a_cluster(tmp_path: Path) -> None:
    """An all-reduce of two devices has two rounds."""
    nb.shutdown()
    nb.init({"clusters": {"gpu": {"inside": {"rate": "8mbit", "delay": "1ms"}}}})
    plan = plan_dense_pair()
    assert [each.seconds for each in plan.collectives] == [each.bytes * 1e-6 + 2e-3 for each in plan.collectives]
    takes = f"{2e3 * (plan.collectives[0].bytes * 1e-6 + 2e-3):.1f} ms"
    assert f"in 2 collectives, which take {takes}" in plan.to_text()
    assert f"in 2, {takes}" in plan.to_mermaid()
    plan.save(tmp_path / "plan.json")
    assert nb.Plan.load(tmp_path / "plan.json").collectives == plan.collectives


@pytest.mark.parametrize(
    ("axis", "optimizer", "count"),
    [
        (0, keras.optimizers.SGD(0.1), 1),
        pytest.param(1, keras.optimizers.SGD(0.1), 1, marks=pytest.mark.grid),
        (0, keras.optimizers.Adam(), 3),
    ],
)
def test_embedding_table_and_its_sparse_gradient_never_cross(axis: int, optimizer: keras.Optimizer, count: int) -> None:
    """The table, its gradient and its slots are never whole; only rows of the batch cross."""
    inputs = keras.Input((5,), dtype="int32")
    with nb.cluster():
        with nb.split(2, axis=axis):
            hidden = layers.Embedding(4001, 8, name="words")(inputs)
        outputs = layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer.from_config(optimizer.get_config()), "mse")
    plan = nb.plan(model, np.zeros((ROWS, 5), "int32"), np.zeros((ROWS, 4)))
    assert not plan.notes and max(each.bytes for each in plan.collectives) <= ROWS * 5 * 8 * 4
    tables = {path: layout for path, layout in plan.layouts.items() if "words_embeddings" in path.replace("/", "_")}
    assert tables.keys() >= {"words/embeddings"} and sum(map(f"split({axis})".__eq__, tables.values())) == count


def test_all_devices_gather_a_variable_that_the_update_of_another_cluster_reads() -> None:
    kernel, average = (tf.Variable(tf.ones((4, 4)), name=name) for name in ("kernel", "average"))

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), tf.GradientTape() as tape:
            with nb.stage(cluster="d"):
                x = x @ average
            with nb.stage(cluster="c"), nb.split(2):
                loss = tf.reduce_sum(x @ kernel)
        kernel.assign_sub(tape.gradient(loss, kernel))
        average.assign(0.9 * average + 0.1 * kernel)
        return loss

    step(np.ones((2, 4), "float32"))
    workers = [Worker("d/0", "d", (0,)), Worker("c/0", "c", (1,)), Worker("c/1", "c", (1,))]
    cut = cut_program(step._step.last.captured.program, workers)
    passed_on = [
        {op for *_, passed, op in list_runs(cut, worker, cut.layouts[1]) if passed} for worker in ("c/0", "c/1")
    ]
    assert passed_on[0] == passed_on[1] != set()


def test_all_devices_compute_a_penalty_that_the_update_of_another_cluster_reads() -> None:
    kernel, scale = tf.Variable(tf.ones((4, 4)), name="kernel"), tf.Variable(1.0, name="scale")

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            with nb.cluster():
                with nb.stage(cluster="c"), nb.split(2):
                    x = x @ kernel
                with nb.stage(cluster="d"):
                    loss = tf.reduce_sum(x * scale)
            loss += 0.1 * tf.nn.l2_loss(kernel)
        for variable, gradient in zip((kernel, scale), tape.gradient(loss, [kernel, scale]), strict=True):
            variable.assign_sub(gradient)
        scale.assign_sub(loss)

    step(np.ones((2, 4), "float32"))
    workers = [Worker("c/0", "c", (0,)), Worker("c/1", "c", (0,)), Worker("d/0", "d", (1,))]
    prologue = cut_program(step._step.last.captured.program, workers).phases[0].prologue
    assert prologue["c/0"].fetches and prologue["c/0"].ops == prologue["c/1"].ops


def test_print_of_a_split_variable_is_refused_across_processes() -> None:
    """One of the workers would print, and wait for the others to gather the pieces."""
    kernel = tf.Variable(tf.ones((4, 4)), name="kernel")

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.stage(cluster="c"), nb.split(2):
            loss = tf.reduce_sum(x @ kernel)
        kernel.assign_sub(tape.gradient(loss, kernel))
        tf.print(tf.norm(kernel))
        return loss

    step(np.ones((2, 4), "float32"))
    cut = cut_program(step._step.last.captured.program, [Worker(f"c/{number}", "c", (0,)) for number in range(2)])
    with pytest.raises(NotYetError, match="an op that one worker of stage 'c' runs alone, on pieces of a variable"):
        check_devices(cut, lambda op: "", collectives=True)


def test_branch_that_reads_a_split_variable_is_refused_across_processes() -> None:
    """Within a process the branches read the whole variable."""
    table = tf.Variable(np.arange(24, dtype="float32").reshape(4, 6), name="table")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.split(2, axis=1):
            return x @ table + tf.cond(tf.reduce_sum(x) > 0, lambda: x @ table, lambda: x @ (2 * table))

    for x in (np.ones((3, 4), "float32"), -np.ones((3, 4), "float32")):
        np.testing.assert_allclose(step(x), x @ np.asarray(table) * (2 if x[0, 0] > 0 else 3))
    captured = step._step.last.captured
    cut = cut_program(captured.program, [Worker(f"c/{number}", "c", (0,)) for number in range(2)])
    with pytest.raises(
        NotYetError, match=r"nb\.split of 'table' between processes, if If has it as an input"
    ) as caught:
        check_devices(cut, lambda op: captured.program.graph.ops[op].type, collectives=True)
    assert caught.value.where == "If" and "exclude it from nb.split" in str(caught.value.mend)


@pytest.mark.parametrize(
    ("held", "tied", "reason"),
    [(True, False, "an earlier program needs it completely"), (False, True, "other stages also hold it")],
)
def test_split_of_nothing_is_refused_across_processes(held: bool, tied: bool, reason: str) -> None:
    """The error has the reasons for this stage only."""
    kernel, other = (tf.Variable(tf.ones((4, 4)), name=name) for name in ("kernel", "other"))

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="d"), nb.split(2):
                x = x @ other @ kernel if tied else x @ other
            with nb.stage(cluster="c"), nb.split(2):
                return x @ kernel

    step(np.ones((2, 4), "float32"))
    program = step._step.last.captured.program
    workers = [Worker("c/0", "c", (1,)), Worker("c/1", "c", (1,)), Worker("d/0", "d", (0,))]
    cut = cut_program(
        program, workers, held_layouts=dict.fromkeys(program.variable_ops, WHOLE_LAYOUT) if held else None
    )
    with pytest.raises(PlanError, match="divides no variable of stage 'c'") as caught:
        check_devices(cut, lambda op: "", collectives=True)
    assert caught.value.why == f"kernel is not sharded: {reason}"


def test_split_of_too_few_entries_has_one_device() -> None:
    kernel = tf.Variable(tf.ones((4, 1)), name="kernel")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="c"), nb.split(2):
            return x @ kernel

    with pytest.warns(NebulaWarning, match=r"nb\.split has no effect"):
        step(np.ones((2, 4), "float32"))
    assert [stage.shards for stage in step._step.last.captured.program.stages] == [1]


@pytest.mark.parametrize(
    ("replica", "feature"),
    [
        ({"count": 2, "shard": "optimizer"}, "nb.split inside nb.replica(shard=) between processes"),
        ({"sync_every": 2}, "nb.split, or nb.replica(shard=), of a model that every cluster trains a copy of"),
    ],
    ids=("shard", "sync_every"),
)
def test_split_inside_a_replica_with_options_is_refused_across_processes(replica: Any, feature: str) -> None:
    """Within a process both run."""
    kernel, x = tf.Variable(tf.ones((4, 6)), name="kernel"), np.ones((8, 4), "float32")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.replica(**replica), nb.stage(), nb.split(2), tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel) ** 2)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    nb.init({"clusters": {"c": {}, "d": {}}} if "sync_every" in replica else None)
    assert float(step(x)) == 16.0
    cut = cut_program(step._step.last.captured.program, [Worker(f"c/{number}", "c", (0,)) for number in range(4)])
    with pytest.raises(NotYetError, match=re.escape(feature)):
        check_devices(cut, lambda op: "", collectives=True)


def test_split_without_a_stage_in_local_sgd_is_in_the_cluster_of_its_process() -> None:
    """A process of the second cluster then places it on its own workers."""
    kernel = tf.Variable(tf.ones((4, 6)), name="kernel")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.replica(sync_every=2), nb.split(2), tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel) ** 2)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    nb.init({"clusters": {"c": {}, "d": {}}})
    set_clusters({"c": 1, "d": 1}, own="d")
    (stage,) = nb.plan(step, np.ones((8, 4), "float32")).stages.values()
    assert stage.cluster == "d"


@pytest.mark.grid
def test_variables_of_a_loop_stay_whole_in_a_split_stage() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, WIDTH))
    with nb.cluster(), nb.split(2):
        outputs = layers.Dense(CLASSES, name="dense")(layers.GRU(WIDTH, name="gru")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(1e-2, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((ROWS, 5, WIDTH)).astype("float32"), draw.integers(0, CLASSES, ROWS)
    plan = nb.plan(model, x, y)
    parts = ("bias", "kernel", "recurrent_kernel")
    assert {*plan.notes} >= {f"gru/gru_cell/{part} is not sharded: While needs all of it" for part in parts}
    assert plan.layouts["dense/kernel"] == "split(1)"
    assert nb.verify(model, x, y).ok


# -------------------- Completion of layouts: the graphs of `layouts.txt`, with expected layouts after `=>`
def parse_remarks(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# (split|count|wholes|crosses|together|notes) (.*)$", text, re.MULTILINE))


def make_question(text: str) -> Question:
    """Make the question of which layouts a graph has."""
    graph, remarks = parse_graph(text), parse_remarks(text)
    split = dict(map(int, each.split(":")) for each in remarks["split"].split())
    variables = {op: Layout(SPLIT, axis) for op, axis in split.items()}
    ends = [Value(int(op)) for op in remarks.get("wholes", "").split()]
    folds = fold(graph, list_batched_inputs(graph)).folds
    count = int(remarks.get("count", 2))
    return Question(graph, range(len(graph)), count, variables, folds=folds, wholes=ends)


def complete_text(text: str) -> Layouts:
    return complete_layouts(make_question(text))


@pytest.mark.parametrize("text", list_cases("layouts"))
def test_completed_layouts_match_the_expectations(text: str) -> None:
    found, graph, remarks = complete_text(text), parse_graph(text), parse_remarks(text)
    lines = [line for line in textwrap.dedent(text).splitlines() if line.startswith("%")]
    for op, line in zip(graph.ops, lines, strict=True):
        crossing = [f"{each.value} {each.kind}" for each in found.reshards.get(op.index, ())]
        got = ", ".join([*(str(found.layout(value)) for value in op.values), *crossing])
        expected = line.partition("=>")[2].strip() or got
        assert f"%{op.index} {op.type} => {got}" == f"%{op.index} {op.type} => {expected}"
    assert ", ".join(f"{each.value} {each.kind}" for each in found.collectives) == remarks.get("crosses", "")
    assert found.joint_ops == set(map(int, remarks.get("together", "").split()))
    assert "; ".join(found.notes) == remarks.get("notes", "")


def test_collectives_have_the_bytes_of_an_all_reduce() -> None:
    (pair, *_) = (case.values[0] for case in list_cases("layouts"))
    assert [each.nbytes for each in complete_text(pair).collectives] == [count_bytes("all-reduce", 32 * 16 * 4, 2)] * 2


@pytest.mark.parametrize("text", list_cases("layouts"))
def test_completion_in_steps_equals_completion_at_once(text: str) -> None:
    """Start without split variables, and add them one after the other."""
    question = make_question(text)
    run = Completion.start(replace(question, variables={}))
    for variable, layout in question.variables.items():
        run = run.follow(LayoutChange({variable: layout}, {}))
    assert run.list_layouts() == Completion.start(question).list_layouts()
