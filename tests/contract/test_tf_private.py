"""What we rely on in TensorFlow's and Keras's insides: an upgrade that changes it fails here, by name."""

import inspect
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
