"""What we rely on in TensorFlow's and Keras's insides: an upgrade that changes it fails here, by name."""

import copy
import inspect
import subprocess
import sys
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula import tf_private

layers = keras.layers


def graph_of(fn: Any, *specs: Any) -> Any:
    return tf.function(fn, autograph=False).get_concrete_function(*specs).graph


VECTOR = tf.TensorSpec([None], tf.float32)


def test_everything_private_has_a_contract() -> None:
    own = [
        name
        for name, thing in vars(tf_private).items()
        if isinstance(thing, types.FunctionType)
        and thing.__module__ == tf_private.__name__
        and not name.startswith("_")
    ]
    names = {*own, *tf_private.__all__, "FuncGraph"}
    tested = "\n".join(name for name in globals() if name.startswith("test_"))
    assert sorted(name for name in names if f"test_{name}_" not in tested) == []


# ---------------------------------------------------------------- graphs


def test_FuncGraph_is_what_tf_function_traces_into() -> None:
    graph = graph_of(lambda x: x + 1.0, VECTOR)
    assert isinstance(graph, tf_private.FuncGraph)
    assert [t.op.type for t in graph.inputs] == ["Placeholder"]
    assert [t.op.type for t in graph.outputs] == ["Identity"]


def test_FuncGraph_knows_captures_and_their_variables() -> None:
    """`captures` gives (external, internal); `variables` holds what was touched, by handle."""
    variable = tf.Variable([1.0])
    graph = graph_of(lambda x: x + variable, VECTOR)
    ((external, internal),) = graph.captures
    assert external is variable.handle
    assert internal.dtype == tf.resource
    assert [v.handle is external for v in graph.variables] == [True]


def test_FuncGraph_hangs_returned_tensors_on_effects() -> None:
    """A returned tensor is an Identity that waits for every effect: we peel it."""
    variable = tf.Variable(0.0)

    def step(x: Any) -> Any:
        variable.assign_add(1.0)
        return tf.sin(x)

    returned = graph_of(step, VECTOR).structured_outputs
    assert returned.op.type == "Identity"
    assert returned.op.inputs[0].op.type == "Sin"


def test_FuncGraph_orders_reads_and_writes_of_a_variable() -> None:
    """... by control edges: a read before a write, and a write before a later read."""
    variable = tf.Variable(1.0)

    def step() -> Any:
        before = variable.read_value()
        variable.assign(2.0)
        return before, variable.read_value()

    ops = graph_of(step).get_operations()
    first, second = [op for op in ops if op.type == "ReadVariableOp"]
    (write,) = [op for op in ops if op.type == "AssignVariableOp"]
    assert first in write.control_inputs
    assert write in second.control_inputs


def test_FuncGraph_lets_a_trace_happen_twice_for_new_variables() -> None:
    made: list[tf.Variable] = []
    graphs: list[Any] = []

    @tf.function
    def step(x: Any) -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        if not made:
            made.append(tf.Variable(2.0))
        return x * made[0]

    step.get_concrete_function(VECTOR)
    assert len(graphs) == 2
    assert graphs[0] is not graphs[1]


def test_stamped_marks_ops_of_layers() -> None:
    """Nearly every op that a Keras layer makes inside carries the attribute; ops outside do not."""
    layer = layers.Dense(2)
    layer.build((None, 1))

    def step(x: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with tf_private.stamped(graph, {"_stage": "a", "_number": 3}):
            inside = layer(x)
        return tf.sin(inside)

    ops = graph_of(step, tf.TensorSpec([None, 1], tf.float32)).get_operations()
    marks = {op.type: op.node_def.attr["_stage"].s for op in ops}
    assert marks["MatMul"] == b"a"
    assert marks["Sin"] == b""
    assert {op.node_def.attr["_number"].i for op in ops if op.type == "MatMul"} == {3}


def test_stamped_does_not_reach_into_bodies() -> None:
    """Ops of a loop's body carry no stamp, the loop itself does: a body cannot be cut."""

    def step(x: Any) -> Any:
        with tf_private.stamped(tf.compat.v1.get_default_graph(), {"_stage": "a"}):
            return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.sin(v)), [0, x])[1]

    graph = graph_of(step, VECTOR)
    (loop,) = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    assert loop.node_def.attr["_stage"].s == b"a"
    body = tf_private.function_graph(graph, loop.node_def.attr["body"].func.name)
    assert {op.node_def.attr["_stage"].s for op in body.get_operations() if op.type == "Sin"} == {b""}


def test_stamp_of_an_op_is_what_was_stamped() -> None:
    def step(x: Any) -> Any:
        with tf_private.stamped(tf.compat.v1.get_default_graph(), {"_line": "train.py:3"}):
            inside = tf.sin(x)
        return tf.cos(inside)

    ops = {op.type: op for op in graph_of(step, VECTOR).get_operations()}
    assert [tf_private.stamp_of(ops[kind], "_line") for kind in ("Sin", "Cos")] == ["train.py:3", ""]


def test_layers_around_an_op_are_the_name_scopes_that_their_calls_opened() -> None:
    """Keras opens one for building and one for each call, and TensorFlow numbers all but the first."""
    inner = keras.Sequential([layers.Dense(2, name="dense_1"), layers.BatchNormalization(name="norm")], name="inner")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inner(inputs), name="outer")

    def step(x: Any) -> Any:
        return model(model(x) @ tf.ones([2, 3]), training=True)

    graph = graph_of(step, tf.TensorSpec([None, 3], tf.float32))
    made = [op for op in graph.get_operations() if op.type in ("BiasAdd", "SquaredDifference")]
    found = {tf_private.layers_around(op) for op in made}
    assert {names for names, _ in found} == {("outer", "inner", "dense_1"), ("outer", "inner", "norm")}
    assert {file.rpartition("/")[2] for _, file in found} == {"dense.py", "batch_normalization.py"}
    product = next(op for op in graph.get_operations() if op.type == "MatMul" and op.name.startswith("matmul"))
    assert tf_private.layers_around(product) == ((), "")


def test_function_graph_gives_the_body_of_a_call() -> None:
    inner = tf.function(lambda v: tf.cos(v))
    graph = graph_of(lambda x: inner(x), VECTOR)
    (call,) = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    body = tf_private.function_graph(graph, call.node_def.attr["f"].func.name)
    assert "Cos" in {op.type for op in body.get_operations()}


def test_set_input_rewires_an_op_while_tracing() -> None:
    def step(x: Any) -> Any:
        doubled = tf.sin(x)
        tf_private.set_input(doubled.op, 0, x * 2.0)
        return doubled

    np.testing.assert_allclose(tf.function(step)(tf.constant([0.5])), np.sin([1.0]), rtol=1e-6)


def test_resource_spec_knows_a_captured_variable() -> None:
    """A captured handle says what variable is behind it, although the graph sees a bare resource."""
    variable = tf.Variable(tf.zeros((2, 3), tf.float16))
    graph = graph_of(lambda: variable.read_value())
    ((_, internal),) = graph.captures
    assert tf_private.resource_spec(internal) == ("float16", (2, 3))


def test_resource_spec_is_none_without_handle_data() -> None:
    graph = graph_of(lambda x: x, VECTOR)
    assert tf_private.resource_spec(graph.inputs[0]) is None


def test_call_flat_is_the_call_without_its_structure() -> None:
    variable = tf.Variable(3.0)
    concrete = tf.function(lambda x, y: [y, x * variable]).get_concrete_function(VECTOR, VECTOR)
    found = tf_private.call_flat(concrete, [tf.constant([1.0]), tf.constant([2.0])], concrete.captured_inputs)
    assert [t.numpy().tolist() for t in found] == [[2.0], [3.0]]


def test_call_flat_of_nothing_is_empty() -> None:
    variable = tf.Variable(3.0)

    def effect() -> None:
        variable.assign_add(1.0)

    concrete = tf.function(effect).get_concrete_function()
    assert tf_private.call_flat(concrete, [], concrete.captured_inputs) == []
    assert float(variable) == 4.0


def test_call_flat_makes_a_call_op_inside_a_trace() -> None:
    """... to which control edges can be given: an update waits for all forwards that way."""
    concrete = tf.function(lambda x: [tf.sin(x)]).get_concrete_function(VECTOR)
    graph = graph_of(lambda x: tf_private.call_flat(concrete, [x], [])[0], VECTOR)
    assert any(op.type.endswith("PartitionedCall") for op in graph.get_operations())


# ---------------------------------------------------------------- gradients and tapes


def test_differentiate_works_in_the_graph_that_is_traced() -> None:
    def step(x: Any) -> Any:
        y = tf.sin(x)
        return tf_private.differentiate([y], [x], [2.0 * tf.ones_like(y)], [])[0]

    np.testing.assert_allclose(tf.function(step)(tf.constant([0.5])), 2.0 * np.cos([0.5]), rtol=1e-6)


def test_differentiate_stops_where_it_is_told() -> None:
    def step(x: Any) -> Any:
        y = tf.sin(x)
        (found,) = tf_private.differentiate([y * x], [x], [tf.ones_like(y)], [y])
        return found

    np.testing.assert_allclose(tf.function(step)(tf.constant([0.5])), np.sin([0.5]), rtol=1e-6)


def test_differentiate_takes_captured_handles_and_gives_true_kinds() -> None:
    """A variable's captured handle is a source; None, dense and IndexedSlices come out as they are."""
    table, kernel, unused = tf.Variable(tf.ones((3, 2))), tf.Variable(tf.ones((2, 2))), tf.Variable(1.0)
    kinds: list[Any] = []

    def step(ids: Any) -> Any:
        y = tf.gather(table, ids) @ kernel + 0.0 * tf.stop_gradient(unused)
        inner = {id(e): i for e, i in tf.compat.v1.get_default_graph().captures}
        sources = [inner[id(v.handle)] for v in (table, kernel, unused)]
        kinds.extend(map(type, tf_private.differentiate([y], sources, [tf.ones_like(y)], [])))
        return y

    graph_of(step, tf.TensorSpec([None], tf.int32))
    assert kinds == [tf.IndexedSlices, tf.Tensor, type(None)] or (
        kinds[0] is tf.IndexedSlices and kinds[2] is type(None) and issubclass(kinds[1], tf.Tensor)
    )


def test_differentiate_of_no_sources_is_empty() -> None:
    assert tf_private.differentiate([], [], [], []) == []


def test_tape_records_tells_whether_any_tape_is_open() -> None:
    assert not tf_private.tape_records()
    with tf.GradientTape() as tape:
        assert tf_private.tape_records()
        with tape.stop_recording():
            assert not tf_private.tape_records()
    assert not tf_private.tape_records()


def test_tape_open_until_a_plain_tape_has_answered() -> None:
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = x * x
    assert tf_private.tape_open(tape)
    tape.gradient(y, x)
    assert not tf_private.tape_open(tape)


def test_tape_stop_ends_recording_of_a_plain_tape_only() -> None:
    """What `gradient` does when it is called inside its own block."""
    with tf.GradientTape() as tape:
        tf_private.tape_stop(tape)
        assert not tf_private.tape_records()
    with tf.GradientTape(persistent=True) as tape:
        tf_private.tape_stop(tape)
        assert tf_private.tape_records()


def test_tape_finish_leaves_what_a_request_leaves() -> None:
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = x * x
    tf_private.tape_finish(tape)
    assert not tf_private.tape_open(tape)
    assert [v is x for v in tape.watched_variables()] == [True]
    with pytest.raises(RuntimeError, match="non-persistent"):
        tape.gradient(y, x)


def test_tape_finish_keeps_a_persistent_tape() -> None:
    with tf.GradientTape(persistent=True) as tape:
        pass
    tf_private.tape_finish(tape)
    assert tf_private.tape_open(tape)


def test_tape_reopened_knows_what_a_closed_tape_has_followed() -> None:
    x, other = tf.Variable([1.0]), tf.Variable([1.0])
    asked: dict[str, bool] = {}

    def step() -> Any:
        before = tf.sin(other)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            inside, unwatched = tf.sin(x), tf.cos(other)
            stopped = tf.stop_gradient(inside)
        after = tf.tan(inside)
        with tf_private.tape_reopened(tape) as followed:
            tensors = {"inside": inside, "unwatched": unwatched, "before": before, "after": after, "stop": stopped}
            asked.update({name: followed(tensor) for name, tensor in tensors.items()})
        if tf_private.tape_records():
            raise AssertionError("the tape was left open")
        return inside

    graph_of(step)
    assert asked == {"inside": True, "unwatched": False, "before": False, "after": False, "stop": False}


def test_tape_reopened_does_not_close_one_that_records() -> None:
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf_private.tape_reopened(tape) as followed:
            assert followed(x)
        assert tf_private.tape_records()


def test_tape_records_nothing_of_custom_gradients_inside() -> None:
    """`recompute_grad` calls `tape.gradient` while it is differentiated: ours must let it pass."""
    calls: list[str] = []
    original = tf.GradientTape.gradient

    class Noting(tf.GradientTape):
        def gradient(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("asked")
            return original(self, *args, **kwargs)

    assert inspect.signature(original).parameters.keys() >= {
        "target", "sources", "output_gradients", "unconnected_gradients",
    }  # fmt: skip
    x = tf.Variable(2.0)
    with Noting() as tape:
        y = tf.recompute_grad(lambda v: v * v)(x)
    assert float(tape.gradient(y, x)) == 4.0
    assert calls == ["asked"]


# ---------------------------------------------------------------- places and structures


def here() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def test_user_frames_lead_to_the_line_that_made_an_op() -> None:
    lines: list[int] = []

    def step(x: Any) -> Any:
        lines.append(here() + 1)
        return tf.sin(x)

    (op,) = [op for op in graph_of(step, VECTOR).get_operations() if op.type == "Sin"]
    frames = tf_private.user_frames(op)
    assert (__file__, lines[0]) in frames
    assert frames.index((__file__, lines[0])) > 0, "outermost first"


def test_user_frames_are_those_of_the_source_under_autograph() -> None:
    """AutoGraph runs a rewritten copy; frames are mapped back to the user's file."""

    def step(x: Any) -> Any:
        if tf.reduce_sum(x) > 0:
            x = tf.sin(x)
        return tf.cos(x)

    graph = tf.function(tf_private.autographed(step), autograph=False).get_concrete_function(VECTOR).graph
    (op,) = [op for op in graph.get_operations() if op.type == "Cos"]
    assert __file__ in {file for file, _ in tf_private.user_frames(op)}


def test_current_frames_end_here() -> None:
    frames, line = tf_private.current_frames(), here()
    assert (__file__, line) in frames


def test_autographed_turns_python_control_flow_into_ops() -> None:
    def step(x: Any) -> Any:
        for _ in tf.range(3):
            x = x + 1.0
        return x

    graph = graph_of(tf_private.autographed(step), tf.TensorSpec([], tf.float32))
    assert any("While" in op.type for op in graph.get_operations())


def test_autographed_wraps_errors_of_types_that_it_does_not_know() -> None:
    """... and keeps ours as the context, where `capture.failures` finds it again."""

    class Ours(Exception):
        def __init__(self, *, why: str) -> None:
            super().__init__(why)

    def step(x: Any) -> Any:
        raise Ours(why="because")

    with pytest.raises(Exception, match="because") as caught:
        graph_of(tf_private.autographed(step), VECTOR)
    chain: list[type] = []
    error: BaseException | None = caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__
    assert Ours in chain


def test_leaf_paths_are_in_the_order_of_flatten() -> None:
    structure = {"b": 1, "a": (2, [3, {"c": 4}])}
    found = tf_private.leaf_paths(structure)
    assert [leaf for _, leaf in found] == tf.nest.flatten(structure) == [2, 3, 4, 1]
    assert [path for path, _ in found] == [("a", 0), ("a", 1, 0), ("a", 1, 1, "c"), ("b",)]


def test_leaf_paths_of_a_leaf() -> None:
    assert tf_private.leaf_paths(7) == [((), 7)]


# ---------------------------------------------------------------- Keras


def test_entry_layer_is_the_outermost_that_runs() -> None:
    seen: list[Any] = []

    class Inner(layers.Layer):
        def build(self, shape: Any) -> None:
            seen.append(tf_private.entry_layer())

        def call(self, x: Any) -> Any:
            seen.append(tf_private.entry_layer())
            return x

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def call(self, x: Any) -> Any:
            return self.inner(x)

    outer = Outer()
    assert tf_private.entry_layer() is None
    outer(tf.ones((2, 2)))
    assert seen[-1] is outer
    assert tf_private.entry_layer() is None


def test_layers_of_a_model_are_all_of_them() -> None:
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="deep")])
    model = keras.Sequential([keras.Input((2,)), inner, layers.Dense(1, name="top")])
    names = {layer.name for layer in tf_private.layers_of(model)}
    assert {"deep", "top", model.name} <= names


def test_nodes_by_depth_of_a_functional_model() -> None:
    """Every node has an operation; a shared layer has one node for each call."""
    inputs, shared = keras.Input((2,)), layers.Dense(2)
    model = keras.Model(inputs, shared(shared(inputs)) + 1.0)
    nodes = [node for level in tf_private.nodes_by_depth(model).values() for node in level]
    assert sum(node.operation is shared for node in nodes) == 2


def test_nodes_by_depth_of_a_sequential_and_of_others() -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    assert tf_private.nodes_by_depth(model)
    assert tf_private.nodes_by_depth(layers.Dense(2)) == {}


def test_compute_output_spec_calls_a_subclass_without_computing() -> None:
    called: list[Any] = []

    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x: Any) -> Any:
            called.append(tf_private.entry_layer())
            return self.dense(x)

    model = Lazy()
    found = tf_private.compute_output_spec(model, keras.KerasTensor((None, 2), "float32"), training=False)
    assert found.shape == (None, 3)
    assert called[-1] is model


def test_in_symbolic_scope_only_while_keras_asks_for_shapes() -> None:
    found = []

    class Asked(layers.Layer):
        def call(self, x: Any) -> Any:
            found.append(tf_private.in_symbolic_scope())
            return x + 1.0

    layer = Asked()
    layer(keras.Input((2,)))
    assert set(found) == {True}
    found.clear()
    layer(np.ones((1, 2)))
    tf.function(layer)(tf.ones((1, 2)))
    assert set(found) == {False}
    assert not tf_private.in_symbolic_scope()


def test_on_run_hears_every_run_of_a_node() -> None:
    heard: list[Any] = []
    inputs = keras.Input((2,))
    outputs = layers.Dense(3)(inputs)
    tf_private.on_run(outputs._keras_history.operation._inbound_nodes[0], heard.append)
    model = keras.Model(inputs, outputs)
    heard.clear()
    expected = model.layers[1](np.ones((1, 2)))
    np.testing.assert_array_equal(model(np.ones((1, 2))), expected)
    ((given,), options) = heard.pop()
    assert given.shape == (1, 2)
    assert options == {}
    keras.models.clone_model(model)
    assert isinstance(heard[0][0][0], keras.KerasTensor)


def test_on_config_hears_what_copies_are_made_from(tmp_path: Any) -> None:
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
    tf_private.on_config(own, lambda: heard.append(1))
    assert own.get_config() == plain
    assert plain["units"] == 3
    model = keras.Sequential([keras.Input((2,)), own])
    for copy_it in (keras.models.clone_model, lambda m: m.save(tmp_path / "m.keras"), lambda m: m.get_config()):
        heard.clear()
        copy_it(model)
        assert heard


def test_on_build_hears_a_sequential_that_has_its_nodes() -> None:
    heard: list[int] = []
    model = keras.Sequential([layers.Dense(2)])
    tf_private.on_build(model, lambda: heard.append(len(tf_private.nodes_by_depth(model))))
    model(np.ones((1, 2)))
    model.add(layers.Dense(3))
    assert heard == [2, 3]


def test_keras_calls_lead_to_the_model_that_is_copied() -> None:
    found: list[Any] = []
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])

    def clone(layer: Any) -> Any:
        found.extend(tf_private.keras_calls())
        return type(layer).from_config(layer.get_config())

    keras.models.clone_model(model, clone_function=clone)
    (call,) = (call for call in found if call.name == "clone_model")
    assert call.given is model
    assert call.frame.f_code.co_name == "clone_model"
    assert tf_private.keras_calls() == []


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (lambda model, path: model.save(path / "m.keras"), "save_model"),
        (lambda model, path: model.save(path / "m", zipped=False), "save_model"),
        (lambda model, path: keras.saving.save_model(model, path / "m.h5"), "save_model"),
        (lambda model, path: copy.deepcopy(model), "__reduce__"),
        (lambda model, path: model.get_config(), "get_config"),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_keras_calls_are_named_as_we_know_them(way: Any, name: str, tmp_path: Any) -> None:
    found: list[Any] = []
    dense = layers.Dense(3)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, dense(inputs))
    tf_private.on_config(dense, lambda: found.extend(tf_private.keras_calls()))
    way(model, tmp_path)
    assert any(call.name == name and call.given is model for call in found)
    assert any(call.name == "get_config" and call.given is model for call in found)


def test_exporting_while_a_saved_model_is_traced(tmp_path: Any) -> None:
    found: list[bool] = []

    class Exported(keras.Model):
        def call(self, x: Any) -> Any:
            found.append(tf_private.exporting())
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


def test_keras_tree_is_the_tree_of_keras() -> None:
    assert tf_private.keras_tree.flatten({"b": 1, "a": [2]}) == [2, 1]


def test_KerasNode_is_made_for_every_call_on_symbolic_tensors() -> None:
    """We tag in `__init__`: layers, operators and `keras.ops` alike go through it."""
    made: list[Any] = []
    original = tf_private.KerasNode.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self.operation)

    tf_private.KerasNode.__init__ = noting
    try:
        inputs = keras.Input((2,))
        keras.ops.sin(layers.Dense(2)(inputs)) + inputs
    finally:
        tf_private.KerasNode.__init__ = original
    assert [type(op).__name__ for op in made] == ["InputLayer", "Dense", "Sin", "Add"]


def test_KerasFunction_asks_for_the_operation_of_each_node_before_it_calls_it() -> None:
    """`_run_through_graph` is handed `operation_fn`, and `_get_operation_for_node` tells us the node."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    assert isinstance(model, tf_private.KerasFunction)
    asked: list[Any] = []
    original = tf_private.KerasFunction._get_operation_for_node

    def noting(self: Any, node: Any) -> Any:
        asked.append(node)
        return original(self, node)

    tf_private.KerasFunction._get_operation_for_node = noting
    try:
        model(tf.ones((1, 2)))
    finally:
        tf_private.KerasFunction._get_operation_for_node = original
    assert [node.operation for node in asked] == [model.layers[-1]]
    names = list(inspect.signature(tf_private.KerasFunction._run_through_graph).parameters)
    assert names == ["self", "inputs", "operation_fn", "call_fn"]


def test_KerasSequential_add_rebuilds_and_call_goes_through_its_functional() -> None:
    """`add` makes every node anew, so a layer's scope must be kept on the layer."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    before = model._functional
    model.add(layers.Dense(3))
    assert model._functional is not before
    assert isinstance(model._functional, tf_private.KerasFunction)
    assert list(inspect.signature(tf_private.KerasSequential.add).parameters) == ["self", "layer", "rebuild"]


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_TensorFlowTrainer_makes_its_functions_by_methods_that_we_wrap(kind: str) -> None:
    make = inspect.unwrap(vars(tf_private.TensorFlowTrainer)[f"make_{kind}_function"])
    original = getattr(make, "nebula_original", make)
    assert list(inspect.signature(original).parameters) == ["self", "force"]
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    assert getattr(model, f"{kind}_function") is None
    getattr(model, f"make_{kind}_function")()
    assert callable(getattr(model, f"{kind}_function"))


def test_hook_cond_is_asked_before_a_cond_is_built() -> None:
    seen: list[tuple[str, ...]] = []

    def takes(pred: Any, branches: Any) -> bool:
        seen.append(tuple(op.type for branch in branches for op in branch.get_operations() if op.type != "Placeholder"))
        return False

    tf_private.hook_cond(takes)
    try:
        graph = graph_of(lambda x: tf.cond(x[0] > 0.0, lambda: tf.sin(x), lambda: tf.cos(x)), VECTOR)
    finally:
        tf_private.hook_cond(None)
    assert [set(types) >= {"Sin", "Cos"} for types in seen] == [True]
    assert "StatelessIf" in {op.type for op in graph.get_operations()}


def test_hook_cond_may_build_something_else() -> None:
    counter = tf.Variable(0.0)

    def takes(pred: Any, branches: Any) -> bool:
        counter.assign_add(10.0)
        return True

    def add() -> None:
        counter.assign_add(1.0)

    def step(x: Any) -> Any:
        tf.cond(x[0] > 0.0, add, lambda: None)
        return x

    tf_private.hook_cond(takes)
    try:
        tf.function(step, autograph=False)(tf.constant([1.0]))
    finally:
        tf_private.hook_cond(None)
    assert float(counter) == 10.0


def test_function_graph_reads_functions_that_came_by_import() -> None:
    """Nodes that are imported bring their functions as definitions, not as graphs."""
    donor = graph_of(lambda x: tf.cond(x[0] > 0.0, lambda: tf.sin(x), lambda: tf.cos(x)), VECTOR)

    def planted(x: Any) -> Any:
        return tf.graph_util.import_graph_def(donor.as_graph_def(), {"x": x}, [donor.outputs[0].name], name="")[0]

    graph = graph_of(planted, VECTOR)
    node = next(op for op in graph.get_operations() if op.type in ("If", "StatelessIf"))
    body = tf_private.function_graph(graph, node.get_attr("then_branch").name)
    assert "Sin" in {op.type for op in body.get_operations()}


def test_TensorFlowTrainer_gives_its_train_function_an_iterator() -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.make_train_function()
    logs = model.train_function(iter([(tf.ones((3, 2)), tf.ones((3, 1)))]))
    assert set(logs) == {"loss"}


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


def test_runtime_started_tells_whether_anything_was_computed() -> None:
    tf.ones(1)
    assert tf_private.runtime_started()
    code = "from whale_nebula import tf_private; import sys; sys.exit(tf_private.runtime_started())"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_variables_that_a_trace_makes_get_their_values_later() -> None:
    made: list[tf.Variable] = []

    def body() -> Any:
        if not made:
            made.extend(tf.Variable(lambda n=n: tf.fill([2], n), name=f"v{n}") for n in (1.0, 2.0))
        return made[0] + made[1]

    function = tf.function(body)
    begin = tf_private.variables_later(function)
    traced = function.get_concrete_function()
    there = [bool(tf.raw_ops.VarIsInitializedOp(resource=v.handle)) for v in made]
    assert there == [False, False]
    begin(lambda variable: variable is made[1])
    there = [bool(tf.raw_ops.VarIsInitializedOp(resource=v.handle)) for v in made]
    assert there == [False, True]
    made[0].assign([5.0, 5.0])
    begin(lambda variable: True)  # once is enough: nothing is overwritten
    assert traced().numpy().tolist() == [7.0, 7.0]


def test_not_rewritten_keeps_autograph_away() -> None:
    @tf_private.not_rewritten
    class Ours:
        def __call__(self, x: Any) -> Any:
            return "rewritten" if "autograph" in inspect.stack()[0].filename else "as it is"

    ours = Ours()
    said: list[str] = []
    tf.function(lambda x: said.append(ours(x)) or x)(tf.ones(1))
    assert said == ["as it is"]


def test_xla_takes_what_it_has_kernels_for() -> None:
    assert [tf_private.xla_takes(op, gpu=False) for op in ("MatMul", "AssignSubVariableOp")] == [True, True]
    assert [tf_private.xla_takes(op, gpu=True) for op in ("MatMul", "Conv2D")] == [True, True]
    assert not any(tf_private.xla_takes(op, gpu=False) for op in ("EagerPyFunc", "WriteSummary", "AsString"))


def test_forward_op_goes_back_to_what_is_differentiated() -> None:
    def step(x: Any) -> Any:
        y = tf.sin(x, name="forward")
        return tf_private.differentiate([y], [x], [None], [])[0]

    graph = graph_of(step, VECTOR)
    made = [op for op in graph.get_operations() if "_grad/" in op.name]
    assert made
    assert {tf_private.forward_op(op).name for op in made} == {"forward"}
    forward = graph.get_operation_by_name("forward")
    assert tf_private.forward_op(forward) is forward


def test_sublayers_are_those_directly_inside_each_once() -> None:
    shared = layers.Dense(2, name="shared")
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a"), shared], name="inner")
    inputs = keras.Input((2,))
    model = keras.Model(inputs, shared(inner(inputs)))
    assert [layer.name for layer in tf_private.sublayers(inner)][1:] == ["a", "shared"]
    assert isinstance(tf_private.sublayers(inner)[0], tf_private.KerasInput)
    assert [layer.name for layer in tf_private.sublayers(model)][1:] == ["inner", "shared"]


def test_KerasLayer_is_called_by_its_class_whatever_kind_of_layer_it_is() -> None:
    """`nb.place` hooks `__call__` of the class: no layer of Keras has one that passes it by."""
    called: list[str] = []
    original = tf_private.KerasLayer.__call__

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self.name)
        return original(self, *args, **kwargs)

    inner = keras.Sequential([keras.Input((3, 2)), layers.GRU(2, name="gru")], name="inner")
    inputs = keras.Input((3, 2))
    model = keras.Model(inputs, layers.Dense(1, name="dense")(inner(inputs)), name="model")
    tf_private.KerasLayer.__call__ = noting
    try:
        model(tf.ones((1, 3, 2)))
    finally:
        tf_private.KerasLayer.__call__ = original
    assert called[:3] == ["model", "inner", "gru"]
    assert called[-1] == "dense"
    assert original.__module__.startswith("keras.")


def test_KerasInput_is_what_models_hold_for_their_inputs() -> None:
    inputs = keras.Input((2,))
    assert isinstance(keras.Model(inputs, layers.Dense(1)(inputs)).layers[0], tf_private.KerasInput)


def test_ops_watched_while_a_debugger_is_on() -> None:
    assert not tf_private.ops_watched()
    tf.debugging.enable_check_numerics()
    try:
        assert tf_private.ops_watched()
    finally:
        tf.debugging.disable_check_numerics()
    assert not tf_private.ops_watched()


def test_caching_device_kept_mends_what_a_failed_scan_leaves() -> None:
    """TensorFlow's own: without it, the next strategy's scope fails."""
    scope = tf.compat.v1.get_variable_scope()

    def body(_: Any, row: Any) -> Any:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError), tf_private.caching_device_kept():
        tf.function(lambda x: tf.scan(body, x))(tf.ones(3))
    assert scope.caching_device is None


# ---------------------------------------------------------------- tf.functions and tf.gradients


def test_parallel_for_vectorizes_in_the_graph_where_it_is_called() -> None:
    """A body's ops are made in the graph around it, and then others in their place: we must keep out of both."""
    met: list[Any] = []
    plain = tf_private.parallel_for._pfor_impl

    def noting(*args: Any, **kwargs: Any) -> Any:
        met.append(tf.compat.v1.get_default_graph())
        return plain(*args, **kwargs)

    tf_private.parallel_for._pfor_impl = noting
    try:
        with tf.Graph().as_default() as graph:
            tf.vectorized_map(lambda row: 2.0 * row, tf.ones([2, 3]))
    finally:
        tf_private.parallel_for._pfor_impl = plain
    assert met == [graph]


def test_PolymorphicFunction_is_called_by_its_class_methods_too() -> None:
    """`f()` looks `__call__` up on the class: hooking it there reaches functions, and methods of objects."""
    called: list[str] = []
    plain = tf_private.PolymorphicFunction.__call__

    class Thing:
        @tf.function
        def method(self, x: Any) -> Any:
            return x

    def noting(function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(function.python_function.__name__)
        return plain(function, *args, **kwargs)

    thing, alone = Thing(), tf.function(tf.identity)
    tf_private.PolymorphicFunction.__call__ = noting
    try:
        thing.method(1.0), alone(1.0)
    finally:
        tf_private.PolymorphicFunction.__call__ = plain
    assert called == ["method", "identity"]


def test_compiled_by_xla_and_can_inline_tell_functions_apart() -> None:
    plain, compiled = tf.function(tf.identity), tf.function(tf.identity, jit_compile=True)
    named = tf.function(tf.identity, experimental_implements="tests.own")
    assert [tf_private.compiled_by_xla(f) for f in (plain, compiled)] == [False, True]
    assert [tf_private.can_inline(f) for f in (plain, named)] == [True, False]


def test_can_inline_not_where_functions_run_eagerly() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        assert not tf_private.can_inline(tf.function(tf.identity))
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("autograph", [True, False])
def test_run_inline_does_what_tracing_does(autograph: bool) -> None:
    """Defaults, casts to the signature, AutoGraph where it is on, and what is returned becomes tensors."""

    @tf.function(autograph=autograph, input_signature=[tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.int32)])
    def inner(x: Any, turns: Any = 3) -> Any:
        if autograph:
            for _ in tf.range(turns):
                x = x * 2.0
        return {"x": x, "three": 3, "none": None, "rank": turns.dtype.name == "int32"}

    found: dict[str, Any] = {}

    def outer() -> Any:
        found.update(tf_private.run_inline(inner, ([1.0, 2.0],), {}))
        return found["x"]

    graph = graph_of(outer)
    assert {op.type for op in graph.get_operations()}.isdisjoint({"PartitionedCall", "StatefulPartitionedCall"})
    assert found["x"].dtype == tf.float64
    assert found["three"].dtype == tf.int32
    assert found["none"] is None
    assert tf.get_static_value(found["rank"])
    assert any("while" in op.type.lower() for op in graph.get_operations()) == autograph


def test_run_inline_makes_variables_as_the_graph_around_does() -> None:
    made: list[tf.Variable] = []

    @tf.function
    def inner(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(2.0))
        return x * made[0]

    step = tf.function(lambda x: tf_private.run_inline(inner, (x,), {}), autograph=False)
    assert float(step(3.0)) == 6.0
    assert float(made[0]) == 2.0


def test_run_inline_draws_what_a_function_of_its_own_would() -> None:
    """Random ops without a seed are numbered by graph, and seeded by their number."""
    inner = tf.function(lambda: tf.random.uniform([2]))

    def outer(call: Any) -> Any:
        first = tf.random.uniform([2])
        return first, call(), tf.random.uniform([2])

    found = []
    for call in (inner, lambda: tf_private.run_inline(inner, (), {})):
        tf.random.set_seed(3)
        found.append([t.numpy().tolist() for t in tf.function(lambda call=call: outer(call), autograph=False)()])
    assert found[0] == found[1]


def test_hook_gradients_hears_of_tf_gradients_and_of_v1_optimizers() -> None:
    heard: list[tuple[int, int]] = []

    def asked(targets: Any, sources: Any, seeds: Any, stops: Any, unconnected: Any) -> None:
        heard.append((len(targets) if isinstance(targets, list) else 1, len(sources)))

    variable = tf.Variable(2.0)

    def step() -> Any:
        loss = variable**2
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        pairs = optimizer.compute_gradients(loss, [variable])
        return tf.gradients([loss, loss], [variable])[0], pairs[0][0]

    tf_private.hook_gradients(asked)
    try:
        twice, once = tf.function(step, autograph=False)()
    finally:
        tf_private.hook_gradients(None)
    assert sorted(heard) == [(1, 1), (2, 1)]
    assert (float(twice), float(once)) == (8.0, 4.0)


def test_hook_gradients_is_not_asked_about_bodies() -> None:
    """The gradients of a loop or a cond are TensorFlow's own matter: it says which graph they are about."""
    heard: list[Any] = []
    tf_private.hook_gradients(lambda *options: heard.append(options))
    try:

        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * x), [0, x])[1]
                y = tf.cond(y > 1.0, lambda: y * x, lambda: y)
            return tape.gradient(y, x)

        assert float(tf.function(step, autograph=False)(tf.constant(2.0))) == 80.0
    finally:
        tf_private.hook_gradients(None)
    assert heard == []


def test_hook_masks_hears_of_what_a_layer_takes_off_again() -> None:
    heard: list[tuple[Any, Any]] = []
    tokens = keras.layers.Embedding(5, 4, mask_zero=True)(tf.constant([[1, 0]]))
    tf_private.hook_masks(lambda tensor, mask: heard.append((tensor, mask)))
    try:
        hidden = keras.layers.Dense(3)(tokens)
        keras.layers.MultiHeadAttention(1, 2)(hidden, hidden)
    finally:
        tf_private.hook_masks(None)
    assert heard[0][0] is hidden and heard[0][1].numpy().tolist() == [[True, False]]
    count = len(heard)
    keras.layers.Dense(3)(tokens)
    assert len(heard) == count


def test_dispatch_to_answers_for_a_class_of_ours_and_for_no_other() -> None:
    class Ours:
        def __array__(self) -> None:
            raise TypeError

    tf_private.dispatch_to(tf.shape, Ours, lambda input, out_type=None, name=None: "ours")
    assert tf.shape(Ours()) == "ours"
    assert tf.shape([1, 2]).numpy().tolist() == [2]
    with pytest.raises((TypeError, ValueError)):
        tf.shape(object())


def test_variables_later_are_given_values_only_when_they_are_wanted() -> None:
    made: list[tf.Variable] = []

    def step(x: Any) -> Any:
        if not made:
            made.extend([tf.Variable(3.0), tf.Variable(5.0)])
        return made[0] * x

    function = tf.function(step, autograph=False)
    begin = tf_private.variables_later(function)
    function.get_concrete_function(tf.TensorSpec([], tf.float32))
    assert [bool(variable.is_initialized()) for variable in made] == [False, False]
    begin(lambda variable: variable is made[0])
    assert [bool(variable.is_initialized()) for variable in made] == [True, False]
    assert float(function(tf.constant(2.0))) == 6.0


def test_hook_ops_gives_an_op_and_one_in_a_body_other_inputs() -> None:
    """What tapes and gradients see is what the op was given."""
    asked: list[str] = []

    def given(graph: Any, op_type: str, inputs: Any) -> Any:
        asked.append(op_type)
        return [other.get(tensor.ref(), tensor) if tf.is_tensor(tensor) else tensor for tensor in inputs]

    other: dict[Any, Any] = {}
    weight = tf.Variable(2.0)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.identity(x)
            other[hidden.ref()] = x * weight
            y = tf.sin(hidden) + tf.cond(x[0] > 0, lambda: hidden * hidden, lambda: hidden)
        other.clear()
        return y, tape.gradient(y, weight)

    tf_private.hook_ops(given)
    try:
        y, gradient = step(tf.constant([0.5]))
    finally:
        tf_private.hook_ops(None)
    np.testing.assert_allclose(y, np.sin([1.0]) + 1.0, rtol=1e-6)
    np.testing.assert_allclose(gradient, 0.5 * np.cos(1.0) + 2.0 * 0.5, rtol=1e-6)
    assert {"Sin", "StatelessIf", "Mul"} <= set(asked)
    asked.clear()
    tf.function(lambda x: x + 1.0)(tf.constant(1.0))
    assert not asked


def test_number_on_reads_what_stamped_wrote() -> None:
    def step(x: Any) -> Any:
        with tf_private.stamped(tf.compat.v1.get_default_graph(), {"_nebula_test": 3}):
            return tf.sin(x), None

    graph = graph_of(lambda x: tf.cos(step(x)[0]), VECTOR)
    found = {op.type: tf_private.number_on(op, "_nebula_test") for op in graph.get_operations()}
    assert (found["Sin"], found["Cos"]) == (3, None)


def test_own_variable_is_a_variable_of_a_layer_that_is_built() -> None:
    owner, made = keras.layers.Dense(2, name="owner"), list[Any]()
    owner.build((None, 3))

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        if not made:
            made.append(tf_private.own_variable(owner, "extra", np.ones((3, 3), np.float32)))
        return owner(x @ made[0].value)

    assert step(tf.ones((1, 3))).shape == (1, 2)
    assert [variable.path for variable in owner.trainable_variables][2:] == ["owner/extra"]
    with pytest.raises(ValueError, match="cannot add new elements of state"):
        owner._track_variable(keras.Variable(1.0))


def test_layers_running_are_those_whose_calls_run_and_each_has_a_name_scope() -> None:
    class Inner(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            seen.append(([layer.name for layer in tf_private.layers_running()], graph.get_name_scope()))
            return x

    seen: list[Any] = []
    inputs = keras.Input((3,))
    model = keras.Model(inputs, Inner(name="inside")(inputs), name="outside")
    seen.clear()
    graph_of(lambda x: model(model(x)), tf.TensorSpec([None, 3], tf.float32))
    assert [layers for layers, _ in seen] == [["outside", "inside"]] * 2
    (first, inner), (second, again) = (scope.split("/") for _, scope in seen)
    assert first != second, "each call has its own"
    assert inner.startswith("inside")
    assert again.startswith("inside")
    assert tf_private.layers_running() == []


@pytest.mark.parametrize("often", [tf_private.traced_often, lambda function: function])
def test_traced_often_is_not_told(often: Any, caplog: pytest.LogCaptureFixture) -> None:
    def made() -> Any:
        def body(x: Any) -> Any:
            return x + 1

        return often(tf.function(body, autograph=False))

    with caplog.at_level("WARNING", logger="tensorflow"):
        for _ in range(8):
            made()(tf.constant(1))
    assert ("retracing" in caplog.text) == (often is not tf_private.traced_often)
