"""A pinned step runs as planned, or not at all."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import ConfigError, NebulaWarning, OptionError, PlanError, PlanMismatchError

X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NebulaWarning)
        nb.shutdown()
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NebulaWarning)
        nb.shutdown()


def model(second: str = "npu", name: str = "small") -> Any:
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="a")(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1, name="b")(hidden), name=name)
    made.compile(keras.optimizers.SGD(0.1, name="sgd"), "mse")
    nb.place(made, {"a": "gpu", "b": nb.stage(cluster=second, name="last")})
    return made


@pytest.fixture(scope="module")
def pin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pin") / "plan.json"
    nb.plan(model(), X, Y).save(path)
    nb.shutdown()
    return path


def test_the_pinned_step_runs(pin: Path) -> None:
    nb.init(plan=pin)
    model().fit(X, Y, verbose=0)
    assert tuple(nb.last_report().stages) == ("gpu", "last")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nb.shutdown()


@pytest.mark.parametrize(
    "how", ["plan", *(pytest.param(how, marks=pytest.mark.grid) for how in ("list", "dict")), "loaded"]
)
def test_another_is_refused_before_anything_of_it_runs(pin: Path, how: str) -> None:
    given: dict[str, Any] = {
        "plan": {"plan": str(pin)},
        "list": {"plan": [pin]},
        "dict": {"config": {"plan": str(pin)}},
        "loaded": {"plan": nb.Plan.load(pin)},
    }[how]
    nb.init(**given)
    other = model("tpu")
    before = other.get_weights()
    with pytest.raises(PlanMismatchError) as caught:
        other.fit(X, Y, verbose=0)
    assert caught.value.what == "the plan of small.train_step differs from the pinned plan"
    assert caught.value.why == "stage 'last' is on cluster 'tpu' now, on cluster 'npu' in the pinned plan"
    assert caught.value.where == (str(pin) if how != "loaded" else caught.value.where)
    assert "remove plan= from nb.init" in caught.value.mend
    assert all(map(np.array_equal, before, other.get_weights()))


def test_other_batches_of_a_pinned_step_are_other_programs(pin: Path) -> None:
    nb.init(plan=pin)
    made = model()
    made.fit(X, Y, verbose=0)
    made.fit(X[:5], Y[:5], verbose=0)
    with pytest.raises(PlanMismatchError, match="input sample_weight exists now, but not in the pinned plan"):
        made.train_on_batch(X, Y, sample_weight=Y[:, 0])


def test_a_step_without_scopes_is_not_the_pinned_one(tmp_path: Path) -> None:
    scoped = True

    @nb.function
    def double(x: Any) -> Any:
        if scoped:
            with nb.stage(cluster="gpu"):
                return 2.0 * x
        return 2.0 * x

    nb.plan(double, tf.constant([1.0])).save(tmp_path / "plan.json")
    nb.shutdown()
    nb.init(plan=tmp_path / "plan.json")
    double(tf.constant([1.0]))
    nb.shutdown()
    scoped = False
    nb.init(plan=tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="stage 'stage0' exists now, but not in the pinned plan"):
        double(tf.constant([1.0]))


def test_a_step_of_another_model_and_a_pin_without_a_step_are_told(pin: Path) -> None:
    nb.init(plan=pin)
    made = model(name="other")
    with pytest.warns(NebulaWarning, match="other.train_step has no pinned plan") as caught:
        made.fit(X, Y, verbose=0)
    assert len(caught) == 1
    with pytest.warns(
        NebulaWarning, match="small.train_step has a pinned plan, but no step of that name has run"
    ) as caught:
        nb.shutdown()
    assert "steps that ran with scopes:" in str(caught[0].message)
    assert "other.train_step" in str(caught[0].message)


def unnamed(micro_batch: int = 2) -> Any:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(micro_batch=micro_batch), nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(3, name="a")(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1, name="b")(hidden))
    made.compile(keras.optimizers.SGD(0.1, name="sgd"), "mse")
    return made


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pin of a model that Keras named; those of the tests have other numbers."""
    path = tmp_path_factory.mktemp("numbered") / "plan.json"
    keras.utils.clear_session(free_memory=False)
    nb.plan(unnamed(), X, Y).save(path)
    nb.shutdown()
    unnamed()
    return path


def test_keras_numbers_do_not_hide_a_step_from_its_pin(numbered: Path) -> None:
    nb.init(plan=numbered)
    other = unnamed(micro_batch=4)
    before = other.get_weights()
    with pytest.raises(PlanMismatchError, match="differs from the pinned plan of functional") as caught:
        other.fit(X, Y, verbose=0)
    assert caught.value.why == "micro_batch is 4 now, 2 in the pinned plan"
    assert 'name="mine"' in caught.value.mend
    assert all(map(np.array_equal, before, other.get_weights()))


def test_the_same_model_with_another_number_is_the_pinned_one(numbered: Path) -> None:
    nb.init(plan=numbered)
    made = unnamed()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        made.fit(X, Y, verbose=0)
        made.fit(X[:6], Y[:6], verbose=0)
        made.predict(X, verbose=0)
        nb.shutdown()


def test_a_pin_that_has_found_its_step_is_not_taken_for_another(numbered: Path) -> None:
    keras.utils.clear_session(free_memory=False)
    nb.init(plan=numbered)
    unnamed().fit(X, Y, verbose=0)
    second = unnamed(micro_batch=4)
    with pytest.warns(NebulaWarning, match="has no pinned plan, so it runs with a new plan"):
        second.fit(X, Y, verbose=0)


@pytest.mark.grid
def test_a_warning_points_at_the_users_line(pin: Path) -> None:
    nb.init(plan=pin)
    made = model(name="other")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(X, Y, verbose=0)
        nb.shutdown()
    said = [each for each in caught if issubclass(each.category, NebulaWarning)]
    assert [each.filename for each in said] == [__file__, __file__]
    assert "made.fit" in Path(__file__).read_text().splitlines()[said[0].lineno - 1]
    assert "nb.init" in Path(__file__).read_text().splitlines()[said[1].lineno - 1]


@pytest.mark.parametrize("bad", [3, {"small": 3}.values(), object()])
def test_what_is_no_plan_is_refused(bad: Any) -> None:
    with pytest.raises(OptionError, match="neither a path nor a plan") as caught:
        nb.init(plan=bad)
    assert caught.value.where.startswith(f"{__file__}:")


def test_two_pins_of_one_step_are_refused(pin: Path) -> None:
    with pytest.raises(OptionError, match=r"two plans pin small.train_step"):
        nb.init(plan=[pin, nb.Plan.load(pin)])


def test_files_that_hold_no_plan_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PlanError, match="is not a saved plan") as caught:
        nb.init(plan=tmp_path / "other.json")
    assert caught.value.why == "it has no 'format'"
    with pytest.raises(PlanError, match=r"the pinned plan '.*none.json' does not exist") as caught:
        nb.init(plan=tmp_path / "none.json")
    assert "test_pinned.py" in caught.value.where
    assert "--save none.json" in caught.value.mend
    with pytest.raises(ConfigError, match="is not a list"):
        nb.init({"plan": 3})
