"""Graphs: what TensorFlow traces into, stamps on ops, captures, conds, and variables that a trace makes."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.contract.tracing import VECTOR, graph_of
from whale_nebula.tf import private as tf_private

layers = keras.layers


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


def test_stamp_ops_marks_ops_of_layers() -> None:
    """Nearly every op that a Keras layer makes inside carries the attribute; ops outside do not."""
    layer = layers.Dense(2)
    layer.build((None, 1))

    def step(x: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with tf_private.stamp_ops(graph, {"_stage": "a", "_number": 3}):
            inside = layer(x)
        return tf.sin(inside)

    ops = graph_of(step, tf.TensorSpec([None, 1], tf.float32)).get_operations()
    marks = {op.type: op.node_def.attr["_stage"].s for op in ops}
    assert marks["MatMul"] == b"a"
    assert marks["Sin"] == b""
    assert {op.node_def.attr["_number"].i for op in ops if op.type == "MatMul"} == {3}


def test_stamp_ops_does_not_reach_into_bodies() -> None:
    """Ops of a loop's body carry no stamp, the loop itself does: a body cannot be cut."""

    def step(x: Any) -> Any:
        with tf_private.stamp_ops(tf.compat.v1.get_default_graph(), {"_stage": "a"}):
            return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.sin(v)), [0, x])[1]

    graph = graph_of(step, VECTOR)
    (loop,) = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    assert loop.node_def.attr["_stage"].s == b"a"
    body = tf_private.function_graph(graph, loop.node_def.attr["body"].func.name)
    assert {op.node_def.attr["_stage"].s for op in body.get_operations() if op.type == "Sin"} == {b""}


def test_stamp_of_an_op_is_what_was_stamped() -> None:
    def step(x: Any) -> Any:
        with tf_private.stamp_ops(tf.compat.v1.get_default_graph(), {"_line": "train.py:3"}):
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


def test_patch_cond_is_asked_before_a_cond_is_built() -> None:
    seen: list[tuple[str, ...]] = []

    def takes(pred: Any, branches: Any) -> bool:
        seen.append(tuple(op.type for branch in branches for op in branch.get_operations() if op.type != "Placeholder"))
        return False

    with tf_private.patch_cond(takes).apply():
        graph = graph_of(lambda x: tf.cond(x[0] > 0.0, lambda: tf.sin(x), lambda: tf.cos(x)), VECTOR)
    assert [set(types) >= {"Sin", "Cos"} for types in seen] == [True]
    assert "StatelessIf" in {op.type for op in graph.get_operations()}


def test_patch_cond_may_build_something_else() -> None:
    counter = tf.Variable(0.0)

    def takes(pred: Any, branches: Any) -> bool:
        counter.assign_add(10.0)
        return True

    def add() -> None:
        counter.assign_add(1.0)

    def step(x: Any) -> Any:
        tf.cond(x[0] > 0.0, add, lambda: None)
        return x

    with tf_private.patch_cond(takes).apply():
        tf.function(step, autograph=False)(tf.constant([1.0]))
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


def test_patch_ops_gives_an_op_and_one_in_a_body_other_inputs() -> None:
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

    with tf_private.patch_ops(given).apply():
        y, gradient = step(tf.constant([0.5]))
    np.testing.assert_allclose(y, np.sin([1.0]) + 1.0, rtol=1e-6)
    np.testing.assert_allclose(gradient, 0.5 * np.cos(1.0) + 2.0 * 0.5, rtol=1e-6)
    assert {"Sin", "StatelessIf", "Mul"} <= set(asked)
    asked.clear()
    tf.function(lambda x: x + 1.0)(tf.constant(1.0))
    assert not asked


def test_number_on_reads_what_stamped_wrote() -> None:
    def step(x: Any) -> Any:
        with tf_private.stamp_ops(tf.compat.v1.get_default_graph(), {"_nebula_test": 3}):
            return tf.sin(x), None

    graph = graph_of(lambda x: tf.cos(step(x)[0]), VECTOR)
    found = {op.type: tf_private.number_on(op, "_nebula_test") for op in graph.get_operations()}
    assert (found["Sin"], found["Cos"]) == (3, None)
