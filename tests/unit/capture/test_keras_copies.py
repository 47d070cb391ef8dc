"""Copies of a model that was built under scopes lose them, with a warning: at once, or when they run."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

import whale_nebula as nb
from tests.unit.capture.scoped_models import X, Y, build_late, compile_model, functional, record_warnings, sequential

layers = keras.layers


def nested() -> keras.Model:
    inner, inputs = functional(), keras.Input((4,))
    return compile_model(keras.Model(inputs, layers.Dense(3)(inner(inputs))))


def list_messages(run: Callable[[], Any]) -> list[str]:
    found = record_warnings(run)
    assert {warning.filename for warning in found} <= {__file__}
    return [str(warning.message) for warning in found]


ALL = [functional, sequential, build_late, nested]


def clone_with(function: Callable[[Any], Any]) -> Callable[[keras.Model], keras.Model]:
    return lambda model: keras.models.clone_model(model, clone_function=function)


COPIES = {
    "clone": keras.models.clone_model,
    "recursive": lambda model: keras.models.clone_model(model, recursive=True),
    "function": clone_with(lambda layer: type(layer).from_config(layer.get_config())),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


# Keras's way, Python's and pickle's, each with one kind of model; `--grid` all with all.
GRID = pytest.mark.grid
SAMPLED_COPIES = ("clone", "deepcopy", "pickle")
PAIRS = [
    pytest.param(
        build,
        duplicate,
        marks=() if way in SAMPLED_COPIES and not (a + b) % len(ALL) else GRID,
        id=f"{way}-{build.__name__}",
    )
    for a, (way, duplicate) in enumerate(COPIES.items())
    for b, build in enumerate(ALL)
]


@pytest.mark.parametrize(("build", "duplicate"), PAIRS)
def test_copy_warns_at_once_of_missing_scopes(
    build: Callable[[], keras.Model], duplicate: Callable[[keras.Model], keras.Model]
) -> None:
    model, made = build(), []
    (message,) = list_messages(lambda: made.append(duplicate(model)))
    assert f"of model {model.name!r} has no scopes" in message
    assert "nb.place" in message
    assert list_messages(lambda: compile_model(made[0], run_eagerly=True).fit(X, Y, verbose=0)) == []
    assert list_messages(lambda: model.fit(X, Y, verbose=0)) == []
    assert nb.last_report().stages


@pytest.mark.parametrize("build", [functional, pytest.param(nested, marks=pytest.mark.grid)])
def test_clone_and_loaded_model_each_warn_once(build: Callable[[], keras.Model], tmp_path: Path) -> None:
    model, made = build(), []
    list_messages(lambda: model.save(tmp_path / "model.keras"))
    (message,) = list_messages(lambda: made.append(keras.models.clone_model(model)))
    assert "the clone of model" in message
    clone = compile_model(made[0])
    assert list_messages(lambda: [clone.fit(X, Y, verbose=0), clone.predict(X, verbose=0)]) == []
    loaded = keras.models.load_model(tmp_path / "model.keras")
    (message,) = list_messages(lambda: loaded.fit(X, Y, verbose=0))
    assert "runs uncut" in message


def test_copying_warns_once_per_line() -> None:
    model = functional()
    assert len(list_messages(lambda: [keras.models.clone_model(model) for _ in range(3)])) == 1


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (functional, "model.keras"),
        (sequential, "folder"),
        pytest.param(nested, "model.keras", marks=pytest.mark.grid),
    ],
)
def test_save_and_first_run_of_a_loaded_model_warn(build: Callable[[], keras.Model], name: str, tmp_path: Path) -> None:
    model, path = build(), tmp_path / name
    (message,) = list_messages(lambda: model.save(path, zipped=None if path.suffix else False))
    assert f"model {model.name!r} is saved without its scopes" in message
    assert "load_weights" in message
    loaded = keras.models.load_model(path)
    (message,) = list_messages(lambda: loaded.fit(X, Y, verbose=0))
    assert f"model {model.name!r} runs uncut" in message
    assert list_messages(lambda: loaded.predict(X, verbose=0)) == []


@pytest.mark.parametrize("build", [functional, pytest.param(sequential, marks=pytest.mark.grid)])
def test_model_from_config_warns_when_it_runs(build: Callable[[], keras.Model]) -> None:
    model = build()
    made: list[keras.Model] = []
    assert list_messages(lambda: made.append(type(model).from_config(model.get_config()))) == []
    (message,) = list_messages(lambda: compile_model(made[0]).fit(X, Y, verbose=0))
    assert "runs uncut" in message


def test_checkpoints_of_whole_models_warn_once(tmp_path: Path) -> None:
    kept = [
        keras.callbacks.ModelCheckpoint(tmp_path / "kept.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "kept.keras"),
    ]
    assert len(list_messages(lambda: functional().fit(X, Y, epochs=2, callbacks=kept, verbose=0))) == 1
    assert len([*tmp_path.iterdir()]) == 2


def test_copy_made_under_scopes_has_these_scopes() -> None:
    model = functional()

    def again() -> None:
        with nb.cluster(), nb.stage(cluster="c"):
            made = keras.models.clone_model(model)
        compile_model(made).fit(X, Y, verbose=0)

    assert list_messages(again) == []
    assert tuple(nb.last_report().stages) == ("c",)


def test_clone_made_inside_a_cluster_scope_warns() -> None:
    def clone() -> None:
        with nb.cluster():
            with nb.stage(cluster="a"):
                hidden = layers.Dense(3)(inputs := keras.Input((4,)))
            with nb.stage(cluster="b"):
                model = keras.Model(inputs, layers.Dense(1)(hidden), name="original")
            keras.models.clone_model(model)

    (message,) = list_messages(clone)
    assert "the clone of model 'original' has no scopes" in message


def test_copies_of_models_without_scopes_do_not_warn(tmp_path: Path) -> None:
    def use() -> None:
        keras.models.clone_model(compile_model(keras.Sequential([keras.Input((4,)), layers.Dense(3)])))
        model = compile_model(keras.Sequential([keras.Input((4,)), layers.Dense(3)]))
        model.save(tmp_path / "model.keras")
        keras.models.load_model(tmp_path / "model.keras").fit(X, Y, verbose=0)

    assert list_messages(use) == []


def test_saving_an_inner_model_without_scopes_does_not_warn(tmp_path: Path) -> None:
    """The scopes lie on the outer model's calls: nothing of the inner one is lost."""
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    inputs = keras.Input((4,))
    with nb.cluster(), nb.stage(cluster="a"):
        outputs = inner(inputs)
    outer = compile_model(keras.Model(inputs, outputs))
    assert list_messages(lambda: inner.save(tmp_path / "inner.keras")) == []
    assert len(list_messages(lambda: outer.save(tmp_path / "outer.keras"))) == 1


@keras.saving.register_keras_serializable("copies")
class Subclass(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a"):
            return self.dense(x)


def test_copies_keep_scopes_of_the_call_method(tmp_path: Path) -> None:
    model, path = compile_model(Subclass()), tmp_path / "model.keras"
    model.fit(X, Y, verbose=0)

    def use() -> None:
        model.save(path)
        keras.models.load_model(path).fit(X, Y, verbose=0)
        copy.deepcopy(model).fit(X, Y, verbose=0)

    assert list_messages(use) == []
    assert tuple(nb.last_report().stages) == ("a",)
