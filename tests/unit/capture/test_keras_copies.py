"""Copies of a model that was built under scopes lose them, with a warning: at once, or when they run."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.unit.capture.built import X, Y, built_later, caught, compiled, functional, sequential

layers = keras.layers


def nested() -> keras.Model:
    inner, inputs = functional(), keras.Input((4,))
    return compiled(keras.Model(inputs, layers.Dense(3)(inner(inputs))))


def said(run: Callable[[], Any]) -> list[str]:
    found = caught(run)
    assert {warning.filename for warning in found} <= {__file__}
    return [str(warning.message) for warning in found]


ALL = [functional, sequential, built_later, nested]


def cloned_by(function: Callable[[Any], Any]) -> Callable[[keras.Model], keras.Model]:
    return lambda model: keras.models.clone_model(model, clone_function=function)


COPIES = {
    "clone": keras.models.clone_model,
    "recursive": lambda model: keras.models.clone_model(model, recursive=True),
    "function": cloned_by(lambda layer: type(layer).from_config(layer.get_config())),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


# Keras's way, Python's and pickle's, each with one kind of model; `--grid` all with all.
GRID = pytest.mark.grid
ONCE = ("clone", "deepcopy", "pickle")
PAIRS = [
    pytest.param(
        build, duplicate, marks=() if way in ONCE and not (a + b) % len(ALL) else GRID, id=f"{way}-{build.__name__}"
    )
    for a, (way, duplicate) in enumerate(COPIES.items())
    for b, build in enumerate(ALL)
]


@pytest.mark.parametrize(("build", "duplicate"), PAIRS)
def test_a_copy_says_at_once_that_it_has_no_scopes(
    build: Callable[[], keras.Model], duplicate: Callable[[keras.Model], keras.Model]
) -> None:
    model, made = build(), []
    (message,) = said(lambda: made.append(duplicate(model)))
    assert f"of model {model.name!r} has no scopes" in message
    assert "nb.place" in message
    assert said(lambda: compiled(made[0], run_eagerly=True).fit(X, Y, verbose=0)) == []
    assert said(lambda: model.fit(X, Y, verbose=0)) == []
    assert nb.last_report().stages


@pytest.mark.parametrize("build", [functional, pytest.param(nested, marks=pytest.mark.grid)])
def test_a_clone_of_a_model_that_was_saved_says_it_once_and_what_is_loaded_for_itself(
    build: Callable[[], keras.Model], tmp_path: Path
) -> None:
    model, made = build(), []
    said(lambda: model.save(tmp_path / "model.keras"))
    (message,) = said(lambda: made.append(keras.models.clone_model(model)))
    assert "the clone of model" in message
    clone = compiled(made[0])
    assert said(lambda: [clone.fit(X, Y, verbose=0), clone.predict(X, verbose=0)]) == []
    loaded = keras.models.load_model(tmp_path / "model.keras")
    (message,) = said(lambda: loaded.fit(X, Y, verbose=0))
    assert "runs uncut" in message


def test_a_place_says_it_once() -> None:
    model = functional()
    assert len(said(lambda: [keras.models.clone_model(model) for _ in range(3)])) == 1


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (functional, "model.keras"),
        (sequential, "folder"),
        pytest.param(nested, "model.keras", marks=pytest.mark.grid),
    ],
)
def test_save_says_it_and_so_does_the_first_run_of_what_is_loaded(
    build: Callable[[], keras.Model], name: str, tmp_path: Path
) -> None:
    model, path = build(), tmp_path / name
    (message,) = said(lambda: model.save(path, zipped=None if path.suffix else False))
    assert f"model {model.name!r} is saved without its scopes" in message
    assert "load_weights" in message
    loaded = keras.models.load_model(path)
    (message,) = said(lambda: loaded.fit(X, Y, verbose=0))
    assert f"model {model.name!r} runs uncut" in message
    assert said(lambda: loaded.predict(X, verbose=0)) == []


@pytest.mark.parametrize("build", [functional, sequential])
def test_what_is_made_from_a_config_says_it_when_it_runs(build: Callable[[], keras.Model]) -> None:
    model = build()
    made: list[keras.Model] = []
    assert said(lambda: made.append(type(model).from_config(model.get_config()))) == []
    (message,) = said(lambda: compiled(made[0]).fit(X, Y, verbose=0))
    assert "runs uncut" in message


def test_checkpoints_of_whole_models_say_it_once_and_those_of_weights_do_not(tmp_path: Path) -> None:
    kept = [
        keras.callbacks.ModelCheckpoint(tmp_path / "kept.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "kept.keras"),
    ]
    assert len(said(lambda: functional().fit(X, Y, epochs=2, callbacks=kept, verbose=0))) == 1
    assert len([*tmp_path.iterdir()]) == 2


def test_copies_made_under_scopes_have_those() -> None:
    model = functional()

    def again() -> None:
        with nb.cluster(), nb.stage(cluster="c"):
            made = keras.models.clone_model(model)
        compiled(made).fit(X, Y, verbose=0)

    assert said(again) == []
    assert tuple(nb.last_report().stages) == ("c",)


def test_a_clone_made_while_only_the_cluster_is_open_has_lost_its_stages() -> None:
    def clone() -> None:
        with nb.cluster():
            with nb.stage(cluster="a"):
                hidden = layers.Dense(3)(inputs := keras.Input((4,)))
            with nb.stage(cluster="b"):
                model = keras.Model(inputs, layers.Dense(1)(hidden), name="original")
            keras.models.clone_model(model)

    (message,) = said(clone)
    assert "the clone of model 'original' has no scopes" in message


def test_models_without_scopes_are_copied_in_silence(tmp_path: Path) -> None:
    def use() -> None:
        keras.models.clone_model(compiled(keras.Sequential([keras.Input((4,)), layers.Dense(3)])))
        model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(3)]))
        model.save(tmp_path / "model.keras")
        keras.models.load_model(tmp_path / "model.keras").fit(X, Y, verbose=0)

    assert said(use) == []


def test_a_part_that_bears_none_itself_is_saved_in_silence(tmp_path: Path) -> None:
    """The scopes lie on the outer model's calls: nothing of the inner one is lost."""
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    inputs = keras.Input((4,))
    with nb.cluster(), nb.stage(cluster="a"):
        outputs = inner(inputs)
    outer = compiled(keras.Model(inputs, outputs))
    assert said(lambda: inner.save(tmp_path / "inner.keras")) == []
    assert len(said(lambda: outer.save(tmp_path / "outer.keras"))) == 1


@keras.saving.register_keras_serializable("copies")
class Subclass(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            return self.dense(x)


def test_scopes_in_a_call_are_not_lost(tmp_path: Path) -> None:
    model, path = compiled(Subclass()), tmp_path / "model.keras"
    model.fit(X, Y, verbose=0)

    def use() -> None:
        model.save(path)
        keras.models.load_model(path).fit(X, Y, verbose=0)
        copy.deepcopy(model).fit(X, Y, verbose=0)

    assert said(use) == []
    assert tuple(nb.last_report().stages) == ("a",)
