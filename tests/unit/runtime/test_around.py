"""Scopes around a step hold for the calls inside them only."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.runtime.run import current_run

X = np.ones((8, 4), "float32")
Y = X[:, :1]


def model(scoped: bool = True, placed: bool = False) -> keras.Model:
    inputs = keras.Input((4,))
    with nb.stage(cluster="a") if scoped else contextlib.nullcontext():
        hidden = keras.layers.Dense(4, name="encoder")(inputs)
    with nb.stage(cluster="b") if scoped else contextlib.nullcontext():
        outputs = keras.layers.Dense(1, name="decoder")(hidden)
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    if placed:
        nb.place(made, {"encoder": "a", "decoder": "b"})
    return made


def fit(trained: Any) -> None:
    trained.fit(X, Y, batch_size=8, verbose=0, shuffle=False)


def planned() -> tuple[int, dict[str, str], int]:
    """Of the last step: its micro-batches and its codecs; and how many plans the run has made."""
    report = nb.last_report()
    return report.micro_batches, {name: each.codec for name, each in report.boundaries.items()}, current_run().programs


@pytest.mark.grid
def test_each_fit_is_planned_for_the_scopes_that_it_stands_in() -> None:
    trained, coded = model(), {"b0 a->b": "fp16", "b0 b->a": "int8"}
    fit(trained)
    assert planned() == (1, {}, 1)
    with nb.pipeline(4):
        fit(trained)
    assert planned() == (4, {}, 2)
    for _ in range(2):  # the same words are the same plan, wherever they stand
        with nb.compress(fp16=True):
            fit(trained)
        assert planned() == (1, coded, 3)
    with nb.cluster(), nb.replica(2), nb.compress(fp16=True):
        fit(trained)
    assert planned() == (2, coded, 4)
    fit(trained)
    assert planned() == (1, {}, 4) and nb.last_report().step == 6


@pytest.mark.grid
def test_evaluate_predict_and_functions_are_too() -> None:
    trained = model()
    trained.evaluate(X, Y, verbose=0)
    trained.predict(X, verbose=0)
    with nb.pipeline(2):
        trained.evaluate(X, Y, verbose=0)
        assert planned()[0] == 2
        trained.predict(X, verbose=0)
        assert planned()[0] == 2

    @nb.function
    def called(rows: Any) -> Any:
        return trained(rows)

    called(X)
    assert planned()[0] == 1
    with nb.pipeline(4):
        called(X)
    assert planned()[0] == 4


def test_a_model_without_scopes_has_those_around_it_and_loses_them_again() -> None:
    trained = model(scoped=False)
    fit(trained)
    with pytest.raises(nb.errors.StateError):
        nb.last_report()
    with warnings.catch_warnings():
        warnings.simplefilter("error", nb.errors.NebulaWarning)
        with nb.replica(2):
            fit(trained)
    assert planned()[0] == 2
    inside = trained.train_function
    fit(trained)
    assert trained.train_function is not inside
    assert planned() == (2, {}, 1)  # of the step before: Keras has run this one


def test_a_pipeline_around_a_model_without_stages_says_that_it_holds_none() -> None:
    with pytest.warns(nb.errors.NebulaWarning, match=r"nb\.pipeline holds no nb\.stage"), nb.pipeline(2):
        fit(model(scoped=False))


@pytest.mark.parametrize(
    ("placed", "what"), [pytest.param(False, "nb.stage", marks=pytest.mark.grid), (True, "nb.place")]
)
def test_a_layout_around_a_step_that_leaves_out_a_stage_is_refused(placed: bool, what: str) -> None:
    trained = model(scoped=not placed, placed=placed)
    said = rf"{what} at .* is on cluster 'a', which nb\.cluster at"
    with pytest.raises(nb.errors.StageIdentityError, match=said), nb.cluster(["z"]):
        fit(trained)
    with nb.cluster(["b", "a"]):
        fit(trained)
    assert list(nb.last_report().stages) == ["a", "b"]


def test_a_place_for_what_is_inside_a_layer_without_layers_is_refused_when_it_is_called() -> None:
    layer = keras.layers.Dense(4, name="alone")
    nb.place(layer, {"alone": "a"})
    trained = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    trained.compile("sgd", "mse")
    with pytest.raises(nb.errors.PlacementError, match="no layer of 'alone' matches 'alone'"):
        fit(trained)
    nb.place(layer, {})


def test_lists_are_told_from_arrays_in_a_sentence() -> None:
    with pytest.raises(nb.errors.CaptureError) as caught:
        nb.verify(model(), X.tolist(), Y)
    assert "x/0/3 float32[]" in caught.value.why and caught.value.why.endswith(" and 21 more")
    assert caught.value.mend.startswith("give arrays, np.asarray(x)")


def test_a_report_and_a_plan_say_which_stages_there_are() -> None:
    trained = model()
    fit(trained)
    for stages in (nb.last_report().stages, nb.plan(trained, X, Y).stages):
        with pytest.raises(KeyError, match="there is no 'zz' here: choose one of 'a', 'b'"):
            stages["zz"]


def test_a_tolerance_that_is_not_used_is_not_told() -> None:
    trained = model()
    with nb.compress(fp16=True):
        assert not any("tolerance" in note for note in nb.verify(trained, X, Y).notes)
    with nb.compress(fp16=True, backward=None):
        assert any("tolerance" in note for note in nb.verify(trained, X, Y).notes)


@pytest.mark.grid
def test_a_compress_scope_without_a_say_does_not_make_steps_incomparable() -> None:
    trained = model()
    with nb.pipeline(2, coupled="allow"), nb.compress(fp16=True, backward=None), nb.compress(bf16=True, backward=None):
        found = nb.verify(trained, X, Y)
    assert found.comparable, found
