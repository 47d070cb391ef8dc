"""Stages without cluster and block are numbered and assigned by their step."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.scopes.scope_trees import record_scopes

Dense = keras.layers.Dense
X, Y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")
FIRST_TWO = {"stage0": "gpu", "stage1": "tpu"}


@pytest.fixture(autouse=True)
def three_clusters() -> Iterator[None]:
    nb.shutdown()
    nb.init({"clusters": {"gpu": {}, "tpu": {}, "npu": {}}})
    with nb.stage() as passed:
        passed.touched = True  # a number that some other model took
    yield
    nb.shutdown()


def build_part(rows: int, units: int, **options: Any) -> keras.Model:
    inputs = keras.Input((rows,))
    with nb.stage(**options):
        outputs = Dense(units)(inputs)
    return keras.Model(inputs, outputs)


def functional(first: Any = None, second: Any = None) -> keras.Model:
    inputs = keras.Input((8,))
    with nb.stage(**first or {}):
        hidden = Dense(3)(inputs)
    with nb.stage(**second or {}):
        outputs = Dense(1)(hidden)
    return compile_model(keras.Model(inputs, outputs))


def sequential() -> keras.Model:
    model = keras.Sequential([keras.Input((8,))])
    for units in (3, 1):
        with nb.stage():
            model.add(Dense(units))
    return compile_model(model)


def compile_model(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model


def list_stage_clusters(step: Any, *batch: Any) -> dict[str, str]:
    return {name: stage.cluster for name, stage in nb.plan(step, *batch).stages.items()}


@pytest.mark.parametrize("build", [pytest.param(functional, marks=pytest.mark.grid), sequential])
def test_stage_numbers_start_at_zero_for_each_model(build: Any) -> None:
    for _ in range(2):
        assert list_stage_clusters(build(), X, Y) == FIRST_TWO


def test_named_stages_without_a_cluster_are_assigned_per_model() -> None:
    for _ in range(2):
        model = functional({"name": "front"}, {"name": "back"})
        assert list_stage_clusters(model, X, Y) == {"front": "gpu", "back": "tpu"}


def test_stage_with_a_cluster_takes_a_number() -> None:
    assert list_stage_clusters(functional({"cluster": "npu"}), X, Y) == {"npu": "npu", "stage1": "tpu"}


def test_name_like_a_numbered_stage_is_not_reused() -> None:
    with nb.stage(cluster="gpu", name="stage1"):
        first = Dense(3)(inputs := keras.Input((8,)))
    with nb.stage():
        model = compile_model(keras.Model(inputs, Dense(1)(first)))
    assert list(list_stage_clusters(model, X, Y)) == ["stage1", "stage2"]


def test_part_of_a_planned_model_keeps_its_stage() -> None:
    encoder, decoder = build_part(8, 3), build_part(3, 1)
    inputs = keras.Input((8,))
    whole = compile_model(keras.Model(inputs, decoder(encoder(inputs))))
    assert list_stage_clusters(whole, X, Y) == FIRST_TWO
    assert list_stage_clusters(nb.function(lambda x: decoder(x)), X[:, :3]) == {"stage1": "tpu"}


def test_models_called_by_one_step_share_stage_numbers() -> None:
    encoder, decoder = build_part(8, 3), build_part(3, 1)
    assert list_stage_clusters(nb.function(lambda x: decoder(encoder(x))), X) == FIRST_TWO


def test_part_planned_alone_does_not_merge_stages_later() -> None:
    encoder, decoder = build_part(8, 3), build_part(3, 1)
    assert list_stage_clusters(nb.function(lambda x: decoder(x)), X[:, :3]) == {"stage0": "gpu"}
    assert list_stage_clusters(nb.function(lambda x: decoder(encoder(x))), X) == {"stage0": "gpu", "stage1": "tpu"}


def test_retracing_for_new_variables_keeps_stage_numbers() -> None:
    front, back = Dense(3), Dense(1)

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage():
            hidden = front(x)
        with nb.stage():
            return tf.reduce_sum(back(hidden))

    assert list_stage_clusters(step, X) == FIRST_TWO


def test_stage_inside_a_cluster_scope_has_no_place() -> None:
    with record_scopes(), nb.cluster(), nb.stage() as inside:
        pass
    with record_scopes(), nb.stage() as outside:
        pass
    assert inside.place is None and outside.place == 0


def test_cluster_layout_around_the_call_assigns_stages() -> None:
    model = functional()
    with nb.cluster(["tpu", "npu"]):
        assert list_stage_clusters(model, X, Y) == {"stage0": "tpu", "stage1": "npu"}
