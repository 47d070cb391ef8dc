"""A plan's work and memory by stage, for models whose numbers are known by calculation."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.ir.example_plans import skipping, tied
from whale_nebula.plan.work import LayerNames

ROWS, WIDTH = 8, 16


@functools.cache
def make_plan(
    *,
    micro_batch: int = 1,
    recompute: bool = False,
    optimizer: Any = "sgd",
    norm: bool = False,
    line: str | None = None,
) -> nb.Plan:
    """Plan two dense layers with stages, and layers before and after them without a stage."""
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((4,))
    before = keras.layers.Dense(WIDTH, activation="tanh", name="before")(inputs)
    if norm:
        before = keras.layers.BatchNormalization(name="norm")(before)
    with nb.cluster(), nb.pipeline(micro_batch, recompute=recompute):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(WIDTH, activation="tanh", name="first")(before)
        with nb.stage(cluster="npu"):
            hidden = keras.layers.Dense(WIDTH, activation="tanh", name="second")(hidden)
    outputs = keras.layers.Dense(1, name="after")(hidden)
    model = keras.Model(inputs, outputs, name="model")
    model.compile(optimizer, "mse")
    with nb.init(links=line):
        return nb.plan(model, np.zeros((ROWS, 4)), np.zeros((ROWS, 1)))


def test_layer_outside_scopes_belongs_to_the_stage_that_runs_it() -> None:
    gpu, npu = make_plan().stages.values()
    assert gpu.variables == ("before/kernel", "before/bias", "first/kernel", "first/bias")
    assert npu.variables == ("second/kernel", "second/bias", "after/kernel", "after/bias")
    assert gpu.parameters == 4 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH
    assert npu.parameters == WIDTH * WIDTH + WIDTH + WIDTH + 1


@pytest.mark.grid
def test_moving_averages_outside_scopes_belong_to_the_stage() -> None:
    gpu = make_plan(norm=True).stages["gpu"]
    names = {path for path in gpu.variables if path.startswith("norm/")}
    assert names == {"norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"}


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_flops_are_slightly_more_than_those_of_the_products(micro_batch: int) -> None:
    gpu, npu = make_plan(micro_batch=micro_batch).stages.values()
    forward = 2 * ROWS * (4 * WIDTH + WIDTH * WIDTH)
    assert forward < gpu.forward_flops < 1.2 * forward
    backward = 2 * ROWS * (4 * WIDTH + 2 * WIDTH * WIDTH)  # the inputs need no gradient
    assert backward < gpu.backward_flops < 1.2 * backward
    assert npu.flops > npu.backward_flops > npu.forward_flops > 0


def test_recompute_adds_forward_flops_and_stores_no_activations() -> None:
    usual, recomputed = make_plan(micro_batch=2).stages["gpu"], make_plan(micro_batch=2, recompute=True).stages["gpu"]
    assert recomputed.backward_flops == usual.backward_flops + usual.forward_flops
    assert usual.activation_bytes == 2 * ROWS // 2 * WIDTH * 4  # what both activations gave
    assert recomputed.activation_bytes == 0


def test_activation_bytes_are_those_read_by_gradients() -> None:
    gpu = make_plan().stages["gpu"]
    assert gpu.activation_bytes == 2 * ROWS * WIDTH * 4
    assert {layer.name: layer.activation_bytes for layer in gpu.layers}["first"] == ROWS * WIDTH * 4


@pytest.mark.parametrize(
    ("optimizer", "times"),
    [
        pytest.param("sgd", 0, marks=pytest.mark.grid),
        pytest.param(lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1, marks=pytest.mark.grid),
        pytest.param(lambda: keras.optimizers.AdamW(0.1, global_clipnorm=1.0), 2, marks=pytest.mark.grid),
        (lambda: keras.optimizers.Adam(0.1, use_ema=True), 3),
    ],
    ids=["sgd", "momentum", "adamw", "ema"],
)
def test_memory_counts_variables_gradients_and_slots(optimizer: Any, times: int) -> None:
    found = make_plan(optimizer=optimizer() if callable(optimizer) else optimizer)
    for stage in found.stages.values():
        assert stage.variable_bytes == stage.gradient_bytes == 4 * stage.parameters
        assert stage.slot_bytes == times * stage.variable_bytes
        activations = stage.activation_bytes * stage.in_flight
        assert stage.memory_bytes == activations + (2 + times) * stage.variable_bytes


def test_backward_of_a_layer_counts_as_the_layer() -> None:
    for stage, product in zip(make_plan().stages.values(), ("first", "second"), strict=True):
        layers = {layer.name: layer for layer in stage.layers}
        assert layers[product].backward_ops > 0
        assert layers[product].flops > 2 * (2 * ROWS * WIDTH * WIDTH)  # a product forward, and two backward
        assert sum(layer.flops for layer in stage.layers if not layer.name) < 0.01 * stage.flops


def test_layer_counts_add_up_to_their_stage() -> None:
    for stage in skipping().stages.values():
        for count in ("forward_ops", "backward_ops", "parameters"):
            assert sum(getattr(layer, count) for layer in stage.layers) == getattr(stage, count)
        total = sum(layer.flops for layer in stage.layers)
        assert abs(total - stage.flops) <= len(stage.layers)
        assert sum(layer.activation_bytes for layer in stage.layers) == stage.activation_bytes


def test_stage_that_only_evaluates_holds_no_metric() -> None:
    weight = tf.Variable(tf.ones((4, 2)), name="weight")
    total = tf.Variable(0.0, name="total")

    @nb.function
    def evaluate(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="gpu"):
            hidden = x @ weight
        total.assign_add(tf.reduce_sum(hidden))
        return total.read_value()

    (stage,) = nb.plan(evaluate, np.zeros((6, 4), "float32")).stages.values()
    assert (stage.variables, stage.backward_flops, stage.in_flight) == (("weight",), 0, 0)
    assert stage.memory_bytes == 32


def test_link_bytes_of_a_tied_variable() -> None:
    found = tied()
    (table,) = found.tied
    assert table.bytes == 50 * 8 * 4
    assert table.link_bytes["npu->gpu"] == table.bytes  # all of its rows, once a step
    assert table.link_bytes["gpu->npu"] == 10 * (8 * 4 + 8)  # the rows that were looked up, with their indices
    assert {stage.name for stage in found.stages.values() if "table" in stage.variables} == {"embed", "project"}


def test_link_seconds_follow_the_rate() -> None:
    found = make_plan(micro_batch=2, line="8mbit,5ms")
    (boundary,) = found.boundaries
    assert boundary.step_bytes == boundary.backward_step_bytes == ROWS * WIDTH * 4
    assert boundary.seconds == found.links["gpu->npu"].seconds
    assert found.links["gpu->npu"].seconds == found.links["gpu->npu"].wire_bytes / 1e6
    assert (found.links["gpu->npu"].messages, found.links["gpu->npu"].delay) == (2, 0.005)
    assert found.links["gpu->npu"].wire_bytes > found.links["gpu->npu"].bytes


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model_1/first_1/Tanh", "first"),
        ("nebula/model_1/first_1/Tanh_grad/TanhGrad", "first"),
        ("gradient_tape/model_1/first_1/MatMul/MatMul_1", "first"),
        ("gradient_tape/compile_loss/mse/sub/Neg", "compile_loss"),
        ("model_1/block_1/moments/mean", "block"),
        ("model_1/dropout_1_1/stateless_dropout/Mul", "dropout_1"),
        ("compile_loss/mse/Mean", "compile_loss"),
        ("model_1/first_1/a_1/b_1/c_1/MatMul", "first/a/b"),
        ("AddN", ""),
    ],
)
def test_layer_is_found_in_an_op_name(name: str, layer: str) -> None:
    assert LayerNames("model", {"first", "block"}).find_layer(name) == layer
