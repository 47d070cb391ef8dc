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


def part(rows: int, units: int, **said: Any) -> keras.Model:
    inputs = keras.Input((rows,))
    with nb.stage(**said):
        outputs = Dense(units)(inputs)
    return keras.Model(inputs, outputs)


def functional(first: Any = None, second: Any = None) -> keras.Model:
    inputs = keras.Input((8,))
    with nb.stage(**first or {}):
        hidden = Dense(3)(inputs)
    with nb.stage(**second or {}):
        outputs = Dense(1)(hidden)
    return compiled(keras.Model(inputs, outputs))


def sequential() -> keras.Model:
    model = keras.Sequential([keras.Input((8,))])
    for units in (3, 1):
        with nb.stage():
            model.add(Dense(units))
    return compiled(model)


def compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model


def homes(step: Any, *batch: Any) -> dict[str, str]:
    return {name: stage.cluster for name, stage in nb.plan(step, *batch).stages.items()}


@pytest.mark.parametrize("build", [pytest.param(functional, marks=pytest.mark.grid), sequential])
def test_each_model_begins_anew(build: Any) -> None:
    for _ in range(2):
        assert homes(build(), X, Y) == FIRST_TWO


def test_stages_with_a_name_and_no_cluster_are_dealt_anew() -> None:
    for _ in range(2):
        model = functional({"name": "front"}, {"name": "back"})
        assert homes(model, X, Y) == {"front": "gpu", "back": "tpu"}


def test_one_that_names_its_cluster_counts() -> None:
    assert homes(functional({"cluster": "npu"}), X, Y) == {"npu": "npu", "stage1": "tpu"}


def test_a_name_that_looks_like_a_number_stays_a_stage_of_its_own() -> None:
    with nb.stage(cluster="gpu", name="stage1"):
        first = Dense(3)(inputs := keras.Input((8,)))
    with nb.stage():
        model = compiled(keras.Model(inputs, Dense(1)(first)))
    assert list(homes(model, X, Y)) == ["stage1", "stage2"]


def test_a_part_that_predicts_alone_stays_where_it_was() -> None:
    encoder, decoder = part(8, 3), part(3, 1)
    inputs = keras.Input((8,))
    whole = compiled(keras.Model(inputs, decoder(encoder(inputs))))
    assert homes(whole, X, Y) == FIRST_TWO
    assert homes(nb.function(lambda x: decoder(x)), X[:, :3]) == {"stage1": "tpu"}


def test_models_that_a_loop_calls_share_one_count() -> None:
    encoder, decoder = part(8, 3), part(3, 1)
    assert homes(nb.function(lambda x: decoder(encoder(x))), X) == FIRST_TWO


def test_a_part_that_was_met_alone_does_not_merge_with_another() -> None:
    encoder, decoder = part(8, 3), part(3, 1)
    assert homes(nb.function(lambda x: decoder(x)), X[:, :3]) == {"stage0": "gpu"}
    assert homes(nb.function(lambda x: decoder(encoder(x))), X) == {"stage0": "gpu", "stage1": "tpu"}


def test_variables_made_on_the_way_do_not_make_it_count_twice() -> None:
    front, back = Dense(3), Dense(1)

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage():
            hidden = front(x)
        with nb.stage():
            return tf.reduce_sum(back(hidden))

    assert homes(step, X) == FIRST_TWO


def test_a_stage_in_a_block_has_no_place_among_those_in_none() -> None:
    with record_scopes(), nb.cluster(), nb.stage() as inside:
        pass
    with record_scopes(), nb.stage() as outside:
        pass
    assert inside.place is None and outside.place == 0


def test_a_layout_around_the_call_deals_them() -> None:
    model = functional()
    with nb.cluster(["tpu", "npu"]):
        assert homes(model, X, Y) == {"stage0": "tpu", "stage1": "npu"}
