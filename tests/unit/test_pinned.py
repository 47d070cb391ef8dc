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
def close_run() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NebulaWarning)
        nb.shutdown()
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NebulaWarning)
        nb.shutdown()


def build_model(second: str = "npu", name: str = "small") -> Any:
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
    nb.plan(build_model(), X, Y).save(path)
    nb.shutdown()
    return path


def test_pinned_step_runs(pin: Path) -> None:
    nb.init(plan=pin)
    build_model().fit(X, Y, verbose=0)
    assert tuple(nb.last_report().stages) == ("gpu", "last")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nb.shutdown()


@pytest.mark.parametrize(
    "how", ["plan", *(pytest.param(how, marks=pytest.mark.grid) for how in ("list", "dict")), "loaded"]
)
def test_step_that_differs_from_its_pin_is_refused_before_it_runs(pin: Path, how: str) -> None:
    given: dict[str, Any] = {
        "plan": {"plan": str(pin)},
        "list": {"plan": [pin]},
        "dict": {"config": {"plan": str(pin)}},
        "loaded": {"plan": nb.Plan.load(pin)},
    }[how]
    nb.init(**given)
    other = build_model("tpu")
    before = other.get_weights()
    with pytest.raises(PlanMismatchError) as caught:
        other.fit(X, Y, verbose=0)
    assert caught.value.what == "the plan of small.train_step differs from the pinned plan"
    assert caught.value.why == "stage 'last' is on cluster 'tpu' now, on cluster 'npu' in the pinned plan"
    assert caught.value.where == (str(pin) if how != "loaded" else caught.value.where)
    assert "remove plan= from nb.init" in caught.value.mend
    assert all(map(np.array_equal, before, other.get_weights()))


def test_pin_admits_other_batch_sizes_but_no_other_inputs(pin: Path) -> None:
    nb.init(plan=pin)
    made = build_model()
    made.fit(X, Y, verbose=0)
    made.fit(X[:5], Y[:5], verbose=0)
    with pytest.raises(PlanMismatchError, match="input sample_weight exists now, but not in the pinned plan"):
        made.train_on_batch(X, Y, sample_weight=Y[:, 0])


def test_unscoped_step_differs_from_its_pin(tmp_path: Path) -> None:
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


def test_unpinned_step_and_unused_pin_warn(pin: Path) -> None:
    nb.init(plan=pin)
    made = build_model(name="other")
    with pytest.warns(NebulaWarning, match="other.train_step has no pinned plan") as caught:
        made.fit(X, Y, verbose=0)
    assert len(caught) == 1
    with pytest.warns(
        NebulaWarning, match="small.train_step has a pinned plan, but no step of that name has run"
    ) as caught:
        nb.shutdown()
    assert "steps that ran with scopes:" in str(caught[0].message)
    assert "other.train_step" in str(caught[0].message)


def build_unnamed_model(micro_batch: int = 2) -> Any:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(micro_batch=micro_batch), nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(3, name="a")(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1, name="b")(hidden))
    made.compile(keras.optimizers.SGD(0.1, name="sgd"), "mse")
    return made


@pytest.fixture(scope="module")
def unnamed_pin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pin of a model that Keras named; those of the tests have other numbers."""
    path = tmp_path_factory.mktemp("numbered") / "plan.json"
    keras.utils.clear_session(free_memory=False)
    nb.plan(build_unnamed_model(), X, Y).save(path)
    nb.shutdown()
    build_unnamed_model()
    return path


def test_pin_applies_despite_automatic_model_numbers(unnamed_pin: Path) -> None:
    nb.init(plan=unnamed_pin)
    other = build_unnamed_model(micro_batch=4)
    before = other.get_weights()
    with pytest.raises(PlanMismatchError, match="differs from the pinned plan of functional") as caught:
        other.fit(X, Y, verbose=0)
    assert caught.value.why == "micro_batch is 4 now, 2 in the pinned plan"
    assert 'name="mine"' in caught.value.mend
    assert all(map(np.array_equal, before, other.get_weights()))


def test_same_model_with_another_number_matches_its_pin(unnamed_pin: Path) -> None:
    nb.init(plan=unnamed_pin)
    made = build_unnamed_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        made.fit(X, Y, verbose=0)
        made.fit(X[:6], Y[:6], verbose=0)
        made.predict(X, verbose=0)
        nb.shutdown()


def test_matched_pin_is_not_applied_to_another_model(unnamed_pin: Path) -> None:
    keras.utils.clear_session(free_memory=False)
    nb.init(plan=unnamed_pin)
    build_unnamed_model().fit(X, Y, verbose=0)
    second = build_unnamed_model(micro_batch=4)
    with pytest.warns(NebulaWarning, match="has no pinned plan, so it runs with a new plan"):
        second.fit(X, Y, verbose=0)


@pytest.mark.grid
def test_pin_warnings_have_the_users_line(pin: Path) -> None:
    nb.init(plan=pin)
    made = build_model(name="other")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(X, Y, verbose=0)
        nb.shutdown()
    nebula_warnings = [each for each in caught if issubclass(each.category, NebulaWarning)]
    assert [each.filename for each in nebula_warnings] == [__file__, __file__]
    assert "made.fit" in Path(__file__).read_text().splitlines()[nebula_warnings[0].lineno - 1]
    assert "nb.init" in Path(__file__).read_text().splitlines()[nebula_warnings[1].lineno - 1]


@pytest.mark.parametrize("bad", [3, {"small": 3}.values(), object()])
def test_invalid_plan_argument_is_refused(bad: Any) -> None:
    with pytest.raises(OptionError, match="neither a path nor a plan") as caught:
        nb.init(plan=bad)
    assert caught.value.where.startswith(f"{__file__}:")


def test_two_pins_of_a_step_are_refused(pin: Path) -> None:
    with pytest.raises(OptionError, match=r"two plans pin small.train_step"):
        nb.init(plan=[pin, nb.Plan.load(pin)])


def test_invalid_plan_files_are_refused(tmp_path: Path) -> None:
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
