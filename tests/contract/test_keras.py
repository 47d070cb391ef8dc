"""Keras: how layers are called, models built, copied and trained."""

import copy
import importlib
import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.contract.tracing import record_calls, trace_graph
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.keras_import import unwrap_keras, wrap_keras

layers = keras.layers


def test_find_entry_layer_returns_the_outermost_running_layer() -> None:
    seen: list[Any] = []

    class Inner(layers.Layer):
        def build(self, shape: Any) -> None:
            seen.append(tf_private.find_entry_layer())

        def call(self, x: Any) -> Any:
            seen.append(tf_private.find_entry_layer())
            return x

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def call(self, x: Any) -> Any:
            return self.inner(x)

    outer = Outer()
    assert tf_private.find_entry_layer() is None
    outer(tf.ones((2, 2)))
    assert seen[-1] is outer
    assert tf_private.find_entry_layer() is None


def test_list_nodes_by_depth_of_each_kind_of_model() -> None:
    """Every node has an operation; a shared layer has one node for each call."""
    inputs, shared = keras.Input((2,)), layers.Dense(2)
    shared_model = keras.Model(inputs, shared(shared(inputs)) + 1.0)
    nodes = [node for level in tf_private.list_nodes_by_depth(shared_model).values() for node in level]
    assert sum(node.operation is shared for node in nodes) == 2
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    assert tf_private.list_nodes_by_depth(model)
    assert tf_private.list_nodes_by_depth(layers.Dense(2)) == {}


def test_compute_output_spec_calls_a_subclass_in_symbolic_scope() -> None:
    called: list[Any] = []

    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x: Any) -> Any:
            called.append((tf_private.find_entry_layer(), tf_private.in_symbolic_scope()))
            return self.dense(x)

    model = Lazy()
    found = tf_private.compute_output_spec(model, keras.KerasTensor((None, 2), "float32"), training=False)
    assert found.shape == (None, 3)
    assert called[-1] == (model, True)
    model(np.ones((1, 2)))
    tf.function(model)(tf.ones((1, 2)))
    assert [symbolic for _, symbolic in called[-2:]] == [False, False] and not tf_private.in_symbolic_scope()


def test_call_on_run_is_called_at_every_run_of_a_node() -> None:
    heard: list[Any] = []
    inputs = keras.Input((2,))
    outputs = layers.Dense(3)(inputs)
    tf_private.call_on_run(outputs._keras_history.operation._inbound_nodes[0], heard.append)
    model = keras.Model(inputs, outputs)
    heard.clear()
    expected = model.layers[1](np.ones((1, 2)))
    np.testing.assert_array_equal(model(np.ones((1, 2))), expected)
    ((given,), options) = heard.pop()
    assert given.shape == (1, 2)
    assert options == {}
    keras.models.clone_model(model)
    assert isinstance(heard[0][0][0], keras.KerasTensor)


def test_find_original_of_cloned_nodes() -> None:
    hidden = layers.Dense(3)(keras.Input((2,)))
    shared = layers.Dense(3)
    outputs = layers.Dense(1)(shared(shared(hidden)))
    originals = [*shared._inbound_nodes, *outputs._keras_history.operation._inbound_nodes]
    assert [tf_private.find_original(node) for node in originals] == [None, None, None]
    for _ in range(2):
        model = keras.Model(hidden, outputs)
        nodes = [node for level in sorted(tf_private.list_nodes_by_depth(model).items()) for node in level[1]]
        assert [tf_private.find_original(node) for node in nodes if not node.is_input] == originals[::-1]


def test_call_on_config_is_called_when_a_model_is_copied(tmp_path: Any) -> None:
    heard: list[int] = []

    class Own(layers.Layer):
        """Its config is made by Keras, which looks whether `get_config` is its own."""

        def __init__(self, units: int, **options: Any) -> None:
            super().__init__(**options)
            self.units = units

        def call(self, x: Any) -> Any:
            return x

    own = Own(3, name="own")
    plain = own.get_config()
    tf_private.call_on_config(own, lambda: heard.append(1))
    assert own.get_config() == plain
    assert plain["units"] == 3
    model = keras.Sequential([keras.Input((2,)), own])
    for copy_it in (keras.models.clone_model, lambda m: m.save(tmp_path / "m.keras"), lambda m: m.get_config()):
        heard.clear()
        copy_it(model)
        assert heard


def test_call_on_build_is_called_after_a_sequential_has_nodes() -> None:
    heard: list[int] = []
    model = keras.Sequential([layers.Dense(2)])
    tf_private.call_on_build(model, lambda: heard.append(len(tf_private.list_nodes_by_depth(model))))
    model(np.ones((1, 2)))
    model.add(layers.Dense(3))
    assert heard == [2, 3]


@pytest.mark.parametrize(
    ("copy_model", "name"),
    [
        (lambda model, path: model.save(path / "m.keras"), "save_model"),
        (lambda model, path: model.save(path / "m", zipped=False), "save_model"),
        (lambda model, path: keras.saving.save_model(model, path / "m.h5"), "save_model"),
        (lambda model, path: copy.deepcopy(model), "__reduce__"),
        (lambda model, path: keras.models.clone_model(model), "clone_model"),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_list_keras_calls_contains_the_copying_function(copy_model: Any, name: str, tmp_path: Any) -> None:
    found: list[Any] = []
    dense = layers.Dense(3)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, dense(inputs))
    tf_private.call_on_config(dense, lambda: found.extend(tf_private.list_keras_calls()))
    copy_model(model, tmp_path)
    assert any(
        (call.name, call.frame.f_code.co_name) == (name, name) and call.first_argument is model for call in found
    )
    gives_config = any(call.name == "get_config" and call.first_argument is model for call in found)
    assert gives_config == (name != "clone_model")


def test_is_exporting_while_a_saved_model_is_traced(tmp_path: Any) -> None:
    found: list[bool] = []

    class Exported(keras.Model):
        def call(self, x: Any) -> Any:
            found.append(tf_private.is_exporting())
            return x + 1.0

    model = Exported()
    model(np.ones((1, 2)))
    tf.function(model)(tf.ones((1, 2)))
    assert set(found) == {False}
    for export in (
        lambda: model.export(str(tmp_path / "a"), verbose=False),
        lambda: tf.saved_model.save(model, str(tmp_path / "b")),
    ):
        found.clear()
        export()
        assert set(found) == {True}


def test_keras_tree_flattens_as_keras() -> None:
    assert tf_private.keras_tree.flatten({"b": 1, "a": [2]}) == [2, 1]


def test_KerasNode_is_created_by_every_symbolic_call() -> None:
    """We tag in `__init__`: layers, operators and `keras.ops` alike go through it."""
    with record_calls(tf_private.KerasNode, "__init__") as made:
        inputs = keras.Input((2,))
        keras.ops.sin(layers.Dense(2)(inputs)) + inputs
    assert [type(node.operation).__name__ for node, *_ in made] == ["InputLayer", "Dense", "Sin", "Add"]


def test_KerasFunction_gets_each_operation_before_its_call() -> None:
    """`_run_through_graph` is handed `operation_fn`, and `_get_operation_for_node` tells us the node."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    assert isinstance(model, tf_private.KerasFunction)
    with record_calls(tf_private.KerasFunction, "_get_operation_for_node") as asked:
        model(tf.ones((1, 2)))
    assert [node.operation for _, node, _ in asked] == [model.layers[-1]]
    names = list(inspect.signature(tf_private.KerasFunction._run_through_graph).parameters)
    assert names == ["self", "inputs", "operation_fn", "call_fn"]


def test_KerasSequential_add_rebuilds_its_functional() -> None:
    """`add` makes every node anew, so a layer's scope must be kept on the layer."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    before = model._functional
    model.add(layers.Dense(3))
    assert model._functional is not before
    assert isinstance(model._functional, tf_private.KerasFunction)
    assert list(inspect.signature(tf_private.KerasSequential.add).parameters) == ["self", "layer", "rebuild"]


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_TensorFlowTrainer_makes_functions_by_wrapped_methods(kind: str) -> None:
    make = inspect.unwrap(vars(tf_private.TensorFlowTrainer)[f"make_{kind}_function"])
    original = getattr(make, "nebula_original", make)
    assert list(inspect.signature(original).parameters) == ["self", "force"]
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    assert getattr(model, f"{kind}_function") is None
    getattr(model, f"make_{kind}_function")()
    assert callable(getattr(model, f"{kind}_function"))


def test_TensorFlowTrainer_skips_the_symbolic_build() -> None:
    """A subclassed model is first called inside the trace of its first step: too late for scopes."""
    where: list[bool] = []

    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x: Any) -> Any:
            where.append(tf.inside_function())
            return self.dense(x)

    model = Lazy()
    model.compile("sgd", "mse")
    original = vars(tf_private.TensorFlowTrainer)["make_train_function"]
    getattr(original, "nebula_original", original)(model, True)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert where
    assert all(where)


def test_list_sublayers_and_list_layers_and_KerasInput_of_models() -> None:
    shared = layers.Dense(2, name="shared")
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a"), shared], name="inner")
    inputs = keras.Input((2,))
    model = keras.Model(inputs, shared(inner(inputs)))
    assert [layer.name for layer in tf_private.list_sublayers(inner)][1:] == ["a", "shared"]
    assert isinstance(tf_private.list_sublayers(inner)[0], tf_private.KerasInput)
    assert [layer.name for layer in tf_private.list_sublayers(model)][1:] == ["inner", "shared"]
    assert {"a", "shared", "inner", model.name} <= {layer.name for layer in tf_private.list_layers(model)}


def test_KerasLayer_calls_go_through_its_class() -> None:
    """`nb.place` hooks `__call__` of the class: no layer of Keras has one that passes it by."""
    inner = keras.Sequential([keras.Input((3, 2)), layers.GRU(2, name="gru")], name="inner")
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, layers.Dense(1, name="dense")(inner(inputs)), name="model")
    with record_calls(tf_private.KerasLayer, "__call__") as calls:
        model(tf.ones((1, 3, 2)))
    called = [layer.name for layer, *_ in calls]
    assert called[:3] == ["model", "inner", "gru"]
    assert called[-1] == "dense"
    assert tf_private.KerasLayer.__call__.__module__.startswith("keras.")


def test_patch_masks_reports_masks_that_a_layer_removes() -> None:
    heard: list[tuple[Any, Any]] = []
    tokens = keras.layers.Embedding(5, 4, mask_zero=True)(tf.constant([[1, 0]]))
    with tf_private.patch_masks(lambda tensor, mask: heard.append((tensor, mask))).apply():
        hidden = keras.layers.Dense(3)(tokens)
        keras.layers.MultiHeadAttention(1, 2)(hidden, hidden)
    assert heard[0][0] is hidden and heard[0][1].numpy().tolist() == [[True, False]]
    count = len(heard)
    keras.layers.Dense(3)(tokens)
    assert len(heard) == count


def test_add_variable_to_a_built_layer() -> None:
    owner, made = keras.layers.Dense(2, name="owner"), list[Any]()
    owner.build((None, 3))

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        if not made:
            made.append(tf_private.add_variable(owner, "extra", np.ones((3, 3), np.float32)))
        return owner(x @ made[0].value)

    assert step(tf.ones((1, 3))).shape == (1, 2)
    assert [variable.path for variable in owner.trainable_variables][2:] == ["owner/extra"]
    with pytest.raises(ValueError, match="cannot add new elements of state"):
        owner._track_variable(keras.Variable(1.0))


def test_list_running_layers_each_with_a_name_scope() -> None:
    class Inner(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            seen.append(([layer.name for layer in tf_private.list_running_layers()], graph.get_name_scope()))
            return x

    seen: list[Any] = []
    inputs = keras.Input((3,))
    model = keras.Model(inputs, Inner(name="inside")(inputs), name="outside")
    seen.clear()
    trace_graph(lambda x: model(model(x)), tf.TensorSpec([None, 3], tf.float32))
    assert [layers for layers, _ in seen] == [["outside", "inside"]] * 2
    (first, inner), (second, again) = (scope.split("/") for _, scope in seen)
    assert first != second, "each call has its own"
    assert inner.startswith("inside")
    assert again.startswith("inside")
    assert tf_private.list_running_layers() == []


def test_wrap_keras_and_unwrap_keras_replace_three_methods() -> None:
    def read_methods() -> dict[str, Any]:
        return {
            kind: vars(tf_private.TensorFlowTrainer)[f"make_{kind}_function"] for kind in ("train", "test", "predict")
        }

    def load_hook() -> Any:
        return importlib.import_module("whale_nebula.runtime.keras_hook")

    unwrap_keras()
    try:
        originals = read_methods()
        assert not any(hasattr(f, "nebula_original") for f in originals.values())
        wrap_keras(load_hook)
        wrap_keras(load_hook)
        for kind, wrapper in read_methods().items():
            assert wrapper.nebula_original is originals[kind]
            assert wrapper.__doc__ == originals[kind].__doc__
        unwrap_keras()
        assert read_methods() == originals
    finally:
        wrap_keras(load_hook)
