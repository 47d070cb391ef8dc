"""All pipelines of a step must agree, as it has one batch; the model's own overrides one around `fit`."""

import warnings
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.unit.capture import built
from tests.unit.capture.built import X, Y, two_stages
from whale_nebula.errors import NebulaWarning, OptionError


def functional(first: dict[str, Any], second: dict[str, Any] | None = None) -> keras.Model:
    """A stage in each of two pipelines, the second as the first where nothing is said of it."""
    said = (first, first if second is None else second)
    return two_stages({"cluster": "a"}, {"cluster": "b"}, around=lambda number: nb.pipeline(**said[number]))


def rows(model: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = nb.plan(model, X, Y).rows
    return found


def test_two_that_differ_are_refused_with_both_lines() -> None:
    model = functional({"micro_batch": 4, "schedule": "gpipe"}, {"micro_batch": 2})
    with pytest.raises(OptionError) as caught:
        model.fit(X, Y, verbose=0)
    error = caught.value
    mine, other = "micro_batch=2, schedule='eager-1f1b'", "micro_batch=4, schedule='gpipe'"
    assert f"says {mine}, and at {built.__file__}:" in error.what
    assert error.what.endswith(f"says {other}")
    assert error.where.startswith(f"{built.__file__}:")
    assert error.where not in error.what
    assert "one nb.pipeline(...) around all stages" in error.mend


@pytest.mark.parametrize("second", [None, {"micro_batch": 4, "in_flight": None}])
def test_two_that_say_the_same_are_one(second: dict[str, Any] | None) -> None:
    assert rows(functional({"micro_batch": 4}, second)) == (2, 2, 2, 2)


def test_the_models_own_goes_before_one_around_fit_and_says_so_once() -> None:
    model = functional({"micro_batch": 4})
    around = r"nb.pipeline\(micro_batch=2\) around the step does not count"
    with pytest.warns(NebulaWarning, match=around) as caught, nb.pipeline(2):
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    assert nb.last_report("train_step").micro_batches == 4
    told = [warning for warning in caught if isinstance(warning.message, NebulaWarning)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert f"the model has its own at {built.__file__}:" in str(told[0].message)


def test_one_around_fit_that_says_the_same_is_no_news() -> None:
    model = functional({"micro_batch": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        with nb.pipeline(4):
            model.fit(X, Y, verbose=0)
    assert nb.last_report().micro_batches == 4
