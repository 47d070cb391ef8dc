"""The rules of `nb.place`: valid maps, when they are in effect, and refusals that name both sides and the line to
change.
"""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.layer_placement import list_placed_models, match_rules
from whale_nebula.errors import (
    BoundaryInBodyError,
    NebulaError,
    NebulaWarning,
    NestingError,
    OptionError,
    PlacementError,
)
from whale_nebula.tf import private as tf_private

layers = keras.layers
X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
HERE = re.escape(__file__)


def chain(*names: str) -> keras.Model:
    """Dense layers of these names, functional."""
    keras.utils.clear_session(free_memory=False)
    inputs = hidden = keras.Input((4,))
    for name in names:
        hidden = layers.Dense(4, name=name)(hidden)
    model = keras.Model(inputs, layers.Dense(1, name="head")(hidden), name="chain")
    model.compile("sgd", "mse")
    return model


def list_stages(model: Any) -> dict[str, str]:
    return {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()}


def train_and_list_stages(model: Any) -> tuple[str, ...]:
    """The stages of a step that runs."""
    model.fit(X, Y, verbose=0)
    return tuple(nb.last_report().stages)


class ScopedLayer(layers.Layer):
    """Two layers, and code of its own in the place of `body`."""

    def __init__(self, body: Any, **options: Any) -> None:
        super().__init__(**options)
        self.one, self.two, self.body = layers.Dense(4, name="one"), layers.Dense(4, name="two"), body

    def build(self, shape: Any) -> None:
        self.one.build(shape)
        self.two.build(shape)

    def call(self, x: Any) -> Any:
        return self.body(self, x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def build_around(body: Any) -> keras.Model:
    """A model of a layer with that code, and a head."""
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="head")(ScopedLayer(body, name="mid")(inputs)), name="around")
    model.compile("sgd", "mse")
    return model


# ---------------------------------------------------------------------- what may be said
def test_placed_cluster_may_have_two_named_stages() -> None:
    model = chain("a", "b")
    nb.place(model, {"a": "gpu", "b": "npu", "head": nb.stage(cluster="gpu", name="last")})
    assert list_stages(model) == {"gpu": "gpu", "npu": "npu", "last": "gpu"}


def test_scopes_around_place_enclose_its_stages() -> None:
    model = chain("a", "b")
    with nb.cluster(["gpu", "npu"]), nb.pipeline(4, schedule="gpipe"), nb.compress(fp16=True):
        nb.place(model, {"a": nb.stage(name="first"), "b": nb.stage(name="second")})
    plan = nb.plan(model, X, Y)
    assert {name: stage.cluster for name, stage in plan.stages.items()} == {"first": "gpu", "second": "npu"}
    assert (plan.rows, plan.schedule, plan.boundaries[0].codec) == ((2, 2, 2, 2), "gpipe", "fp16")


def test_scopes_around_fit_enclose_placed_stages() -> None:
    model = chain("a", "b")
    with nb.cluster(), nb.pipeline(4):
        nb.place(model, {"a": "gpu", "b": "npu"})
        train_and_list_stages(model)
    assert nb.last_report().micro_batches == 4
    other = chain("a", "b")
    nb.place(other, {"a": "gpu", "b": "npu"})
    with nb.cluster(), nb.pipeline(2):
        train_and_list_stages(other)
    assert nb.last_report().micro_batches == 2


def test_model_may_be_built_and_placed_under_the_same_scopes() -> None:
    with nb.cluster(), nb.pipeline(2):
        model = chain("a", "b")
        nb.place(model, {"a": "gpu", "b": "npu"})
    assert train_and_list_stages(model) == ("gpu", "npu")
    assert nb.last_report().micro_batches == 2


def test_unplaced_layers_may_have_their_own_scopes() -> None:
    def body(layer: Any, x: Any) -> Any:
        with nb.stage(cluster="npu"):
            return layer.two(layer.one(x))

    model = build_around(body)
    nb.place(model, {"head": "tpu"})
    assert list_stages(model) == {"npu": "npu", "tpu": "tpu"}


def test_last_placement_applies_from_the_next_step() -> None:
    model = chain("a", "b")
    model.fit(X, Y, verbose=0)
    own = type(model.train_function)
    nb.place(model, {"a": "gpu", "b": "npu"})
    assert train_and_list_stages(model) == ("gpu", "npu")
    nb.place(model, {"a|b": "gpu", "head": "tpu"})
    assert train_and_list_stages(model) == ("gpu", "tpu")
    steps = nb.last_report().run.steps
    nb.place(model, {})
    model.fit(X, Y, verbose=0)
    assert nb.last_report().run.steps == steps
    assert type(model.train_function) is own


def test_nb_function_uses_the_placement_of_its_model() -> None:
    model = chain("a", "b")

    @nb.function
    def step(x: Any) -> Any:
        return tf.reduce_sum(model(x))

    with pytest.warns(NebulaWarning, match="step under @nb.function runs uncut"):
        plain = float(step(X))
    nb.place(model, {"a": "gpu", "b": "npu"})
    assert float(step(X)) == pytest.approx(plain)
    assert tuple(nb.last_report().stages) == ("gpu", "npu")


def test_outer_model_uses_the_placement_of_an_inner_one() -> None:
    inner = chain("a", "b")
    nb.place(inner, {"a": "gpu", "b": "npu"})
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, layers.Dense(1, name="outer")(inner(inputs)))
    outer.compile("sgd", "mse")
    assert train_and_list_stages(outer) == ("gpu", "npu")
    nb.place(outer, {"chain/a": "tpu"})
    with pytest.raises(PlacementError, match=r"the same layer is placed twice, as 'a' under .* and as 'chain/a' under"):
        nb.plan(outer, X, Y)


def test_keras_layer_call_is_restored_after_the_trace() -> None:
    call = tf_private.KerasLayer.__call__
    seen = []

    def body(layer: Any, x: Any) -> Any:
        seen.append(tf_private.KerasLayer.__call__)
        return layer.two(layer.one(x))

    model = build_around(body)
    nb.place(model, {"mid/one": "gpu", "head": "npu"})
    list_stages(model)
    assert seen[-1] is not call
    assert seen[-1].__module__ == call.__module__
    assert tf_private.KerasLayer.__call__ is call


# ---------------------------------------------------------------------- what is refused as it is written
@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"encoder/.*": "gpu"}, "matches 'encoder/.*'.*its layers are 'a', 'bb', 'head'"),
        ({"heda": "gpu"}, "did you mean 'head'"),
        ({"haed.*": "gpu"}, "did you mean 'head(.*)?'"),
        ({"head/.*": "gpu"}, "did you mean 'head'. it contains no layers"),
        ({"b": "gpu"}, "did you mean 'bb'|a pattern must match the complete path"),
        ({"a|bb": "gpu", "b+": "npu"}, r"layer 'bb' of 'chain' matches two patterns.*exclude the layer from one"),
    ],
)
def test_invalid_patterns_are_refused_at_their_line(places: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=re.compile(message, re.DOTALL)) as caught:
        nb.place(chain("a", "bb"), places)
    assert caught.value.where.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a1", "a.*"),
        pytest.param("a1", "b.*|a.*|head", marks=pytest.mark.grid),
        ("b.*|a.*|head", "a1"),
        pytest.param("a[12]", "a.*", marks=pytest.mark.grid),
        ("a1|a2", "a.*|b"),
        ("a[12]|b", "a.*|head"),
    ],
)
def test_suggested_excluding_pattern_works(first: str, second: str) -> None:
    """The mend can be written as it stands, whatever '|' there is in the patterns."""
    with pytest.raises(PlacementError, match="matches two patterns") as caught:
        nb.place(chain("a1", "a2", "a3", "b"), {first: "gpu", second: "npu"})
    mended = caught.value.mend.removeprefix("exclude the layer from one of them: ")
    changed = first if mended.endswith((first, f"(?:{first})")) else second
    places = {mended if pattern == changed else pattern: home for pattern, home in ((first, "gpu"), (second, "npu"))}
    model = chain("a1", "a2", "a3", "b")
    nb.place(model, places)
    homes = match_rules(model, next(own for placed, own in list_placed_models() if placed is model)).homes
    assert {home.spot.path for home in homes if home.rule is not None} == {
        path for path in ("a1", "a2", "a3", "b", "head") if re.fullmatch(f"{first}|{second}", path)
    }


def test_patterns_with_equal_matches_are_refused() -> None:
    with pytest.raises(PlacementError) as caught:
        nb.place(chain("a", "b"), {"a|b": "gpu", "[ab]": "npu"})
    assert caught.value.mend == "remove 'a|b' or '[ab]': they match the same layers"


def test_inner_layer_is_placed_with_its_parent() -> None:
    model = build_around(lambda layer, x: layer.two(layer.one(x)))
    with pytest.raises(PlacementError, match=r"'mid/one' of 'around' matches .* and 'mid', which contains it, matches"):
        nb.place(model, {"mid": "gpu", "mid/one": "npu"})
    nb.place(model, {"mid": "gpu", "mid/one": "gpu", "head": "npu"})
    assert list(list_stages(model)) == ["gpu", "npu"]


@pytest.mark.parametrize("model", ["model", tf.Module(), X])
def test_place_refuses_other_objects_than_keras_models(model: Any) -> None:
    with pytest.raises(OptionError, match="takes a Keras model"):
        nb.place(model, {"a": "gpu"})


def test_pattern_for_unbuilt_layers_is_checked_in_the_first_step() -> None:
    class Late(keras.Model):
        def build(self, shape: Any) -> None:
            self.made = layers.Dense(1, name="made")
            super().build(shape)

        def call(self, x: Any) -> Any:
            return self.made(x)

    model = Late()
    model.compile("sgd", "mse")
    nb.place(model, {"made": "gpu"})
    assert train_and_list_stages(model) == ("gpu",)
    other = Late(name="late")
    other.compile("sgd", "mse")
    nb.place(other, {"mead": "gpu"})
    with pytest.raises(PlacementError, match="no layer of 'late' matches 'mead'") as caught:
        train_and_list_stages(other)
    assert "did you mean 'made'" in caught.value.mend


# ---------------------------------------------------------------------- what is refused as a step is planned
def in_stage(layer: Any, x: Any) -> Any:
    with nb.stage(cluster="gpu"):
        return layer.one(x)


def in_pipeline(layer: Any, x: Any) -> Any:
    with nb.pipeline(2):
        return layer.two(layer.one(x))


def in_loop(layer: Any, x: Any) -> Any:
    return layer.two(tf.while_loop(lambda n, x: n < 2, lambda n, x: (n + 1, layer.one(x)), [0, x])[1])


def test_scope_in_a_placed_layer_is_refused_with_both_lines() -> None:
    model = build_around(in_stage)
    nb.place(model, {"mid": "npu"})
    with pytest.raises(NestingError, match=rf"code of layer 'mid', which nb.place at {HERE}:\d+ assigns to 'npu'"):
        nb.plan(model, X, Y)


def test_scope_around_a_placed_layer_is_refused_with_both_lines() -> None:
    model = build_around(in_stage)
    nb.place(model, {"mid/one": "npu"})
    with pytest.raises(PlacementError, match=rf"'mid/one', which matches .* inside nb.stage at {HERE}:\d+"):
        nb.plan(model, X, Y)


def test_two_pipelines_around_a_placed_layer_are_refused() -> None:
    model = build_around(in_pipeline)
    nb.place(model, {"mid/one": "gpu", "head": "npu"})
    assert len(nb.plan(model, X, Y).rows) == 2
    with nb.pipeline(4):
        nb.place(model, {"mid/one": "gpu", "head": "npu"})
    with pytest.raises(PlacementError, match=r"nb.place is inside nb.pipeline at .* and layer 'mid/one' inside"):
        nb.plan(model, X, Y)


def test_placed_layer_in_a_loop_is_refused() -> None:
    model = build_around(in_loop)
    nb.place(model, {"mid/one": "gpu"})
    with pytest.raises(BoundaryInBodyError, match="layer 'mid/one'") as caught:
        nb.plan(model, X, Y)
    assert caught.value.mend == "place the layer around it: 'mid'"
    nb.place(model, {"mid(/.*)?": "gpu", "head": "npu"})
    assert list(list_stages(model)) == ["gpu", "npu"]


def test_placed_layer_inside_another_stage_is_refused() -> None:
    shared = layers.Dense(4, name="shared")
    shared.build((None, 4))
    model = build_around(lambda layer, x: shared(x))
    model.mid = model.get_layer("mid")
    other = keras.Sequential([keras.Input((4,)), shared], name="other")
    nb.place(model, {"mid": "gpu"})
    nb.place(other, {"shared": "npu"})
    with pytest.raises(PlacementError, match=r"'shared', which matches .* inside layer 'mid', which matches"):
        nb.plan(model, X, Y)


def test_error_in_a_trace_restores_the_keras_layer_call() -> None:
    call = tf_private.KerasLayer.__call__
    model = chain("a")
    nb.place(model, {"a": "gpu", "head": "npu"})
    with pytest.raises((NebulaError, ValueError)):
        nb.plan(model, np.ones((8, 9), "float32"), Y)
    assert tf_private.KerasLayer.__call__ is call
