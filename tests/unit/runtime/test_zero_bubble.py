"""The schedule with parted backwards: the same bits as others, and notes on what stays whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import Cut, assert_same, data
from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import Problem
from whale_nebula.planner.search import SearchResult, search
from whale_nebula.report.records import Span
from whale_nebula.runtime import decisions
from whale_nebula.runtime.run import current_run

layers = keras.layers
Middle = Callable[[], list[keras.layers.Layer]]
MIDDLES: dict[str, Middle] = {
    "dense": lambda: [layers.Dense(8, activation="tanh"), layers.Dense(8, activation="relu")],
    "norms": lambda: [layers.Dense(8), layers.LayerNormalization(), layers.Dropout(0.5, seed=3), layers.Dense(8)],
    "convolution": lambda: [layers.Reshape((4, 2)), layers.Conv1D(2, 3, padding="same"), layers.Flatten()],
    "attention": lambda: [layers.Reshape((2, 4)), Attention(), layers.Flatten()],
    "recurrent": lambda: [layers.Reshape((4, 2)), layers.LSTM(8)],
    "no weights": lambda: [layers.Activation("tanh")],
}


class Attention(layers.Layer):
    """Attention of a tensor to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.MultiHeadAttention(2, 2)

    def call(self, x: Any) -> Any:
        return self.inner(x, x)


def model(middle: str, stages: int, schedule: str, **options: Any) -> keras.Model:
    """Two or three stages, in clusters of their own, with a middle in the second; none at all is the uncut model."""
    keras.utils.set_random_seed(21)
    inputs = keras.Input((6,))
    cut = Cut(stages, 4, schedule)
    with cut.program(**options):
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(inputs)
        with cut.at(1):
            for layer in MIDDLES[middle]():
                hidden = layer(hidden)
        with cut.at(2):
            hidden = layers.Dense(3)(hidden)
    found = keras.Model(inputs, hidden)
    found.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return found


def train_with_schedule(
    middle: str, stages: int, schedule: str, line: str | None = "10gbit,0ms", **options: Any
) -> list[Any]:
    """The history and the weights of a training of two epochs with a ragged last batch."""
    nb.shutdown()
    nb.init(links=line)
    made = model(middle, stages, schedule, **options)
    made.run_eagerly = not stages  # so few uncut steps are not worth a trace
    history = made.fit(data(22, 6), data(22, 3, seed=1), batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [history, [np.array(each) for each in made.weights]]


def to_bits(found: list[Any]) -> Any:
    history, weights = found
    return {name: [value.hex() for value in values] for name, values in history.items()}, [w.tobytes() for w in weights]


GRID = pytest.mark.grid
CASES = [
    pytest.param("dense", 2, {}, marks=GRID),
    pytest.param("dense", 3, {}, marks=GRID),
    pytest.param("dense", 3, {"recompute": True}, marks=GRID),
    pytest.param("dense", 3, {"in_flight": 2}, marks=GRID),
    pytest.param("norms", 3, {}, marks=GRID),
    pytest.param("convolution", 2, {}, marks=GRID),
    pytest.param("attention", 3, {}, marks=GRID),
    pytest.param("recurrent", 3, {}, marks=GRID),
]


@pytest.mark.parametrize(("middle", "stages", "options"), CASES)
def test_zero_bubble_trains_bit_identically_to_eager_1f1b(middle: str, stages: int, options: dict[str, Any]) -> None:
    assert to_bits(train_with_schedule(middle, stages, "zero-bubble", **options)) == to_bits(
        train_with_schedule(middle, stages, "eager-1f1b", **options)
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    ("middle", "stages"),
    [("dense", 2), pytest.param("recurrent", 3, marks=GRID), pytest.param("attention", 3, marks=GRID)],
)
def test_zero_bubble_as_one_function_equals_the_uncut_step(middle: str, stages: int) -> None:
    found = train_with_schedule(middle, stages, "zero-bubble", None)
    assert_same(train_with_schedule(middle, 0, "", None), found, "sums", 0.6)


# ---------------------------------------------------------------------- what is apart
def list_runs(middle: str, stages: int = 3, **options: Any) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """What stages run, and what the plan says of backwards."""
    plan = nb.plan(model(middle, stages, "zero-bubble", **options), np.zeros((8, 6)), np.zeros((8, 3)))
    return {name: stage.runs for name, stage in plan.stages.items()}, [n for n in plan.notes if "backward" in n]


def test_backward_of_the_first_stage_is_not_divided() -> None:
    assert list_runs("dense") == ({"c0": ("FB",), "c1": ("FBW",), "c2": ("FBW",)}, [])
    assert list_runs("dense", 2) == ({"c0": ("FB",), "c1": ("FBW",)}, [])


def test_backward_of_a_stage_without_weights_is_not_divided_and_noted() -> None:
    found, notes = list_runs("no weights")
    assert found["c1"] == ("FB",)
    assert notes == ["the backward of stage 'c1' is not divided: the stage has no weights"]


def test_op_that_prevents_the_division_is_noted_with_its_line() -> None:
    found, notes = list_runs("recurrent")
    assert found["c1"] == ("FB",) and found["c2"] == ("FBW",)
    (note,) = notes
    assert note.startswith("the backward of stage 'c1' is not divided: ") and " at " in note
    assert note.endswith(" computes the gradients of its weights together with the values sent back")


def abbreviate(span: Span) -> str:
    return f"{span.what[0]}{span.micro_batch}"


def test_weight_gradients_are_deferred_within_the_memory_of_stage_0() -> None:
    """Of the last stage, with one micro-batch in flight: as many wait as the first stage has more."""
    train_with_schedule("dense", 3, "zero-bubble", in_flight=3)
    spans = [span for span in nb.last_report().timeline() if span.lane == "c2"]
    assert [abbreviate(span) for span in sorted(spans, key=lambda span: span.start)] == [
        "f0", "f1", "f2", "w0", "f3", "w1", "w2", "w3"
    ]  # fmt: skip
    assert "W weights" in str(nb.last_report().timeline())
    found = nb.last_report().prediction
    assert found is not None and found.stages["c2"].compute_seconds > 0.0


# ---------------------------------------------------------------------- chosen by the planner
def make_slow_clusters(flops: str) -> dict[str, Any]:
    """Three clusters so slow that a model is cut."""
    return {"clusters": {f"c{number}": {"flops": flops} for number in range(3)}}


@pytest.mark.grid
@pytest.mark.parametrize(
    "middle",
    [pytest.param(name, marks=[] if name == "recurrent" else GRID) for name in MIDDLES],
)
def test_planner_predicts_which_backwards_are_divided(middle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage has a function for gradients of weights just where the planner counts seconds for it."""

    def choose(problem: Problem, most: int = 8) -> SearchResult:
        free = replace(problem, clusters=tuple(replace(each, call=0.0) for each in problem.clusters))
        several = next(each for each in search(free, 24).candidates if len(each.parts) > 1)
        return SearchResult((replace(several, schedule="zero-bubble"),))

    monkeypatch.setattr(decisions, "search", choose)
    nb.shutdown()
    nb.init(make_slow_clusters("1M"), links="10gbit,0ms")
    with nb.auto_parallel(micro_batch=4):
        plan = nb.plan(model(middle, 0, ""), np.zeros((8, 6)), np.zeros((8, 3)))
    (decision,) = current_run().decisions
    costs = Costs(decision.problem, 4)
    promised = [costs.part_deferred_seconds(part) > 0.0 for part in decision.chosen.parts]
    assert promised == [stage.runs == ("FBW",) for stage in plan.stages.values()]
    assert promised[0] is False and any(promised)


@pytest.mark.grid
def test_planner_chooses_zero_bubble_when_clearly_faster() -> None:
    """What is proposed trains as the uncut model: tests/parity/test_auto_parallel.py."""

    def planned(flops: str) -> nb.Plan:
        nb.shutdown()
        nb.init(make_slow_clusters(flops), links="10gbit,0ms")
        found = keras.Sequential([keras.Input((64,)), *(layers.Dense(64, "relu") for _ in range(3)), layers.Dense(1)])
        found.compile(keras.optimizers.SGD(0.1), "mse")
        with nb.auto_parallel():
            return nb.plan(found, data(16, 64), data(16, 1))

    plan = planned("1M")
    assert plan.schedule == "zero-bubble" and [stage.runs for stage in plan.stages.values()][1:] == [("FBW",)] * 2
    assert "zero-bubble" in plan.explain()
    assert planned("100G").schedule != "zero-bubble"


# ---------------------------------------------------------------------- what is written meanwhile
def test_deferred_weight_gradients_use_values_of_their_forward() -> None:
    """A weight that each micro-batch's forward scales: the gradient of another one is made of what it was then."""
    gate, scale, weight = tf.Variable(1.0, trainable=False), tf.Variable(0.5 * data(4, 4)), tf.Variable(data(4, 4))

    def train_with(schedule: str) -> list[Any]:
        gate.assign(1.0), scale.assign(0.5 * data(4, 4)), weight.assign(data(4, 4, seed=1))

        @nb.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(4, schedule=schedule, coupled="allow"):
                with nb.stage(cluster="a"):
                    hidden = tf.tanh(x @ scale)
                with nb.stage(cluster="b"):
                    factor = gate.assign_add(1.0)
                    loss = tf.reduce_mean(tf.square((hidden * factor) @ weight))
            for variable, gradient in zip((scale, weight), tape.gradient(loss, (scale, weight)), strict=True):
                variable.assign_sub(0.01 * gradient)
            return loss

        nb.shutdown()
        nb.init(links="10gbit,0ms")
        losses = [float(step(data(8, 4, seed=number))) for number in range(2)]
        return [losses, scale.numpy().tobytes(), weight.numpy().tobytes(), float(gate)]

    assert train_with("zero-bubble") == train_with("1f1b")
