"""Graphs: tracing contexts, attributes of ops, captures, conds, and variables that a trace creates."""

import functools
import gc
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.contract.tracing import VECTOR, trace_graph
from whale_nebula.tf import drawing, gradients, guarded_variables, initial_values
from whale_nebula.tf import patch as tf_patch
from whale_nebula.tf import private as tf_private

layers = keras.layers


def test_FuncGraph_has_captures_and_variables() -> None:
    """`captures` gives (external, internal); `variables` holds what was touched, by handle."""
    variable = tf.Variable([1.0])
    graph = trace_graph(lambda x: x + variable, VECTOR)
    ((external, internal),) = graph.captures
    assert external is variable.handle
    assert internal.dtype == tf.resource
    assert [v.handle is external for v in graph.variables] == [True]


def test_FuncGraph_returns_identities_that_wait_for_effects() -> None:
    """A returned tensor is an Identity that waits for every effect: we peel it."""
    variable = tf.Variable(0.0)

    def step(x: Any) -> Any:
        variable.assign_add(1.0)
        return tf.sin(x)

    returned = trace_graph(step, VECTOR).structured_outputs
    assert returned.op.type == "Identity"
    assert returned.op.inputs[0].op.type == "Sin"


def test_CondBranch_is_the_graph_of_a_branch_inside_the_graph_around_it() -> None:
    """The graph around a branch captures the same tensors as the branch, by `capture`."""
    variable, found = tf.Variable(0.0), []

    def nest(x: Any) -> None:
        branch = tf.compat.v1.get_default_graph()
        tf.cond(x[0] > 1.0, lambda: branches.append(tf.compat.v1.get_default_graph()), lambda: None)
        variable.assign_add(tf.reduce_sum(x))
        found.append(branch)

    branches: list[Any] = []
    graph = trace_graph(lambda x: tf.cond(x[0] > 0.0, lambda: nest(x), lambda: None), VECTOR)
    assert isinstance(found[0], tf_private.CondBranch)
    assert found[0].outer_graph is graph
    assert branches[0].outer_graph is found[0]
    assert not isinstance(graph, tf_private.CondBranch)
    outer = [graph.capture(external) for external, _ in found[0].captures]
    assert [tensor.graph is graph for tensor in outer] == [True] * 2


def test_stamp_ops_and_read_text_stamp_and_read_number_stamp() -> None:
    """Ops of a loop's body carry no stamp, the loop itself does: a body cannot be cut."""
    layer = layers.Dense(2)
    layer.build((None, 1))

    def step(x: Any) -> Any:
        with tf_private.stamp_ops(tf.compat.v1.get_default_graph(), {"_stage": "a", "_number": 3}):
            inside = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v)), [0, layer(x)])[1]
        return tf.sin(inside)

    graph = trace_graph(step, tf.TensorSpec([None, 1], tf.float32))
    ops = {op.type.removeprefix("Stateless"): op for op in graph.get_operations()}
    marks = {
        kind: (tf_private.read_text_stamp(op, "_stage"), tf_private.read_number_stamp(op, "_number"))
        for kind, op in ops.items()
    }
    assert marks["MatMul"] == marks["While"] == ("a", 3) and marks["Sin"] == ("", None)
    body = tf_private.find_function_graph(graph, ops["While"].node_def.attr["body"].func.name)
    assert {tf_private.read_text_stamp(op, "_stage") for op in body.get_operations() if op.type == "Tanh"} == {""}


def test_find_layers_around_an_op_by_name_scopes() -> None:
    """Keras opens one for building and one for each call, and TensorFlow numbers all but the first."""
    inner = keras.Sequential([layers.Dense(2, name="dense_1"), layers.BatchNormalization(name="norm")], name="inner")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inner(inputs), name="outer")

    def step(x: Any) -> Any:
        return model(model(x) @ tf.ones([2, 3]), training=True)

    graph = trace_graph(step, tf.TensorSpec([None, 3], tf.float32))
    made = [op for op in graph.get_operations() if op.type in ("BiasAdd", "SquaredDifference")]
    found = {tf_private.find_layers_around(op) for op in made}
    assert {names for names, _ in found} == {("outer", "inner", "dense_1"), ("outer", "inner", "norm")}
    assert {file.rpartition("/")[2] for _, file in found} == {"dense.py", "batch_normalization.py"}
    product = next(op for op in graph.get_operations() if op.type == "MatMul" and op.name.startswith("matmul"))
    assert tf_private.find_layers_around(product) == ((), "")


def test_set_input_changes_an_op_while_tracing() -> None:
    def step(x: Any) -> Any:
        doubled = tf.sin(x)
        tf_private.set_input(doubled.op, 0, x * 2.0)
        return doubled

    np.testing.assert_allclose(tf.function(step)(tf.constant([0.5])), np.sin([1.0]), rtol=1e-6)


def test_find_resource_spec_of_a_captured_variable() -> None:
    """A captured handle says what variable is behind it, although the graph sees a bare resource."""
    variable = tf.Variable(tf.zeros((2, 3), tf.float16))
    graph = trace_graph(lambda: variable.read_value())
    ((_, internal),) = graph.captures
    assert tf_private.find_resource_spec(internal) == ("float16", (2, 3))
    assert tf_private.find_resource_spec(trace_graph(lambda x: x, VECTOR).inputs[0]) is None


def test_call_flat_agrees_with_an_ordinary_call() -> None:
    variable = tf.Variable(3.0)
    concrete = tf.function(lambda x, y: [y, x * variable]).get_concrete_function(VECTOR, VECTOR)
    found = tf_private.call_flat(concrete, [tf.constant([1.0]), tf.constant([2.0])], concrete.captured_inputs)
    assert [t.numpy().tolist() for t in found] == [[2.0], [3.0]]
    graph = trace_graph(lambda x: tf_private.call_flat(concrete, [x, x], concrete.captured_inputs)[0], VECTOR)
    assert any(op.type.endswith("PartitionedCall") for op in graph.get_operations())


def test_patch_cond_may_build_other_ops() -> None:
    counter, seen = tf.Variable(0.0), list[str]()

    def takes(pred: Any, branches: Any) -> tuple[Any, ...]:
        seen.extend(op.type for op in branches[0].get_operations())
        counter.assign_add(10.0)
        return ("built",)

    def add() -> None:
        counter.assign_add(1.0)

    def step(x: Any) -> Any:
        assert tf.cond(x[0] > 0.0, add, lambda: None) == "built"
        return x

    with tf_private.patch_cond(takes).apply():
        tf.function(step, autograph=False)(tf.constant([1.0]))
    assert float(counter) == 10.0 and "AssignAddVariableOp" in seen


def test_find_function_graph_of_imported_functions() -> None:
    """Nodes that are imported bring their functions as definitions, not as graphs."""
    donor = trace_graph(lambda x: tf.cond(x[0] > 0.0, lambda: tf.sin(x), lambda: tf.cos(x)), VECTOR)

    def planted(x: Any) -> Any:
        return tf.graph_util.import_graph_def(donor.as_graph_def(), {"x": x}, [donor.outputs[0].name], name="")[0]

    graph = trace_graph(planted, VECTOR)
    node = next(op for op in graph.get_operations() if op.type in ("If", "StatelessIf"))
    body = tf_private.find_function_graph(graph, node.get_attr("then_branch").name)
    assert "Sin" in {op.type for op in body.get_operations()}


def test_defer_initialization_until_requested_and_has_value() -> None:
    made: list[tf.Variable] = []

    def body() -> Any:
        if not made:
            made.extend(tf.Variable(lambda n=n: tf.fill([2], n), name=f"v{n}") for n in (1.0, 2.0))
        return made[0] + made[1]

    function = tf.function(body)
    initialize = initial_values.defer_initialization(function).initialize_variables
    traced = function.get_concrete_function()
    there = [initial_values.has_value(v) for v in made]
    assert there == [False, False]
    initialize(lambda variable: variable is made[1])
    there = [initial_values.has_value(v) for v in made]
    assert there == [False, True]
    made[0].assign([5.0, 5.0])
    initialize(lambda variable: True)  # once is enough: nothing is overwritten
    assert traced().numpy().tolist() == [7.0, 7.0]


@pytest.mark.parametrize("name", ["glorot_uniform", "orthogonal", "identity", "zeros", "truncated_normal"])
def test_defer_initialization_computes_initial_values_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No constant is left that TensorFlow could compute a value from beforehand."""
    graphs, plain = [], initial_values.lift_to_graph.lift_to_graph

    def lift(tensors: Any, graph: Any, **options: Any) -> Any:
        graphs.append(graph)
        return plain(tensors, graph, **options)

    options = {} if name in ("identity", "zeros") else {"seed": 7}
    draw = keras.initializers.get({"class_name": name, "config": options})
    made: list[tf.Variable] = []

    def body() -> Any:
        if not made:
            made.append(tf.Variable(lambda: draw([6, 4])))
        return made[0].read_value()

    function = tf.function(body)
    initialize = initial_values.defer_initialization(function).initialize_variables
    traced = function.get_concrete_function()
    monkeypatch.setattr(initial_values.lift_to_graph, "lift_to_graph", lift)
    initialize(lambda variable: True)
    assert traced().numpy().tolist() == draw([6, 4]).numpy().tolist()
    assert not [op.name for graph in graphs for op in graph.get_operations() if op.type == "Const"]


def test_initial_values_are_those_of_the_ops_that_a_step_replaces() -> None:
    """Two variables of one draw, initialised one after the other; the variable with its position is gone by then."""
    found: list[Any] = []

    def run(function: Any, initialize: Callable[[], None] = lambda: None) -> Any:
        made.clear()
        tf.random.set_seed(3)
        function.get_concrete_function()
        initialize()
        return [v.numpy().tolist() for v in made]

    def body() -> Any:
        if not made:
            drawn = tf.random.normal([3, 2])
            made.extend(tf.Variable(drawn + add) for add in (0.0, 1.0))
        return made[0] + made[1] + tf.random.uniform([])

    def initialize() -> None:
        found.clear()
        gc.collect()
        for variable in made:
            later.initialize_variables(functools.partial(operator.is_, variable))

    def find_state(seed: int, seed2: int) -> Any:
        found.append(tf_patch.make_generator_state(seed, seed2, "state"))
        return found[-1]

    made: list[tf.Variable] = []
    plain = run(tf.function(body))
    function = tf.function(body)
    later = initial_values.defer_initialization(function)
    with tf_patch.apply_patches(tf_patch.patch_draws(find_state)):
        assert run(function, initialize) == plain


SEEDED = {"seed": 7}
INITIALIZERS = {
    "glorot_uniform": SEEDED, "he_normal": SEEDED, "random_normal": SEEDED, "random_uniform": SEEDED,
    "truncated_normal": SEEDED, "zeros": {}, "ones": {}, "constant": {"value": 2.5},
}  # fmt: skip


PARTS_OF_OTHERS = ("random_uniform", "truncated_normal", "ones")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.grid if name in PARTS_OF_OTHERS else ()) for name in INITIALIZERS]
)
def test_draw_part_is_bit_identical_where_can_draw_parts(name: str) -> None:
    """For parts that begin within a group of the generator, too."""
    draw = keras.initializers.get({"class_name": name, "config": INITIALIZERS[name]})
    for shape in ((7, 31, 9), (1999,)):
        whole, graph = draw(shape, "float32").numpy(), trace_graph(lambda shape=shape: draw(shape, "float32"))
        assert drawing.can_draw_parts(graph.outputs[0])
        for axis, size in enumerate(shape):
            for most in (30, 500, 1 << 22):
                found = drawing.draw_part(graph.outputs[0], axis, size // 2, size - size // 2, most)
                assert found.numpy().tobytes() == whole.take(range(size // 2, size), axis).tobytes(), (
                    shape,
                    axis,
                    most,
                )


def test_draw_part_returns_none_for_indivisible_values() -> None:
    orthogonal = keras.initializers.Orthogonal(seed=7)
    changing = tf.Variable(1.0)
    for make in (
        lambda: orthogonal([64, 32]),
        lambda: tf.random.normal([64, 32]),
        lambda: tf.cast(keras.random.uniform([64, 32], seed=1, dtype="float16"), tf.float32),
        lambda: tf.fill([64, 32], changing),
        lambda: tf.reverse(tf.ones([64, 32]), [0]),
    ):
        assert drawing.draw_part(trace_graph(make).outputs[0], 0, 0, 8) is None


def test_is_repeatable_for_keras_initializers_without_a_generator() -> None:
    """And of nothing that the user has written."""
    seeds = keras.random.SeedGenerator(1)
    found: list[bool] = []

    def make(create: Any, **options: Any) -> Any:
        found.append(initial_values.is_repeatable(options["initial_value"]))
        return create(**options)

    given = [
        "zeros",
        keras.initializers.HeNormal(),
        keras.initializers.HeNormal(seed=seeds),
        lambda *a, **k: tf.ones([2]),
    ]
    with tf.variable_creator_scope(make):
        for initializer in given:
            keras.Variable(initializer, shape=[2])
    assert found == [True, True, False, False]
    assert not initial_values.is_repeatable(lambda: 1.0)


def test_make_guarded_class_intercepts_reads_and_writes() -> None:
    """Also those of eager ops in C++; in a trace the plain method may be called."""
    seen: list[str] = []

    def answer(variable: Any, name: str, plain: Any, /, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return plain(variable, *args, **kwargs)

    variable = tf.Variable([1.0, 2.0])
    kind = type(variable)
    variable.__class__ = guarded_variables.make_guarded_class(kind, type("Mixin", (), {}), "Guarded", answer, answer)
    assert hasattr(variable.assign_add, "autograph_info__"), "AutoGraph would try to convert it, and warn"
    assert (variable + tf.ones([2])).numpy().tolist() == [2.0, 3.0]
    variable.assign_add([1.0, 1.0])
    assert tf.gather(variable, [1], name="picked").numpy().tolist() == [3.0]
    assert tf.function(lambda: tf.square(variable))().numpy().tolist() == [4.0, 9.0]
    assert set(seen) >= {"_read_variable_op", "assign_add"}
    variable.__class__ = kind
    assert variable.numpy().tolist() == [2.0, 3.0]


def test_find_forward_op_of_a_gradient_op() -> None:
    def step(x: Any) -> Any:
        y = tf.sin(x, name="forward")
        return gradients.differentiate([y], [x], [None], [])[0]

    graph = trace_graph(step, VECTOR)
    made = [op for op in graph.get_operations() if "_grad/" in op.name]
    assert made
    assert {tf_private.find_forward_op(op).name for op in made} == {"forward"}
    forward = graph.get_operation_by_name("forward")
    assert tf_private.find_forward_op(forward) is forward


def test_patch_ops_replaces_inputs_also_in_bodies() -> None:
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


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "bfloat16"])
def test_copy_array_makes_an_equal_tensor(dtype: str) -> None:
    kind = tf.as_dtype(dtype).as_numpy_dtype
    for shape in ((9, 5), (0, 3), ()):
        array = (np.arange(np.prod(shape, dtype=int)) % 3).reshape(shape).astype(kind)
        found = drawing.copy_array(array)
        assert (found.dtype.name, found.shape) == (dtype, shape)
        np.testing.assert_array_equal(found.numpy(), tf.constant(array).numpy())


def test_allocate_tensor_memory_is_owned_by_a_variable() -> None:
    """It is updated where it lies, which one with the memory of an array is not."""
    tensor, array = drawing.allocate_tensor((9, 5), tf.float32)
    array[...] = 2.0
    variable, place = tf.Variable(tensor), array.ctypes.data
    del tensor, array
    variable.assign_add(tf.ones([9, 5]))
    found = np.asarray(memoryview(variable.read_value()))
    assert found.ctypes.data == place
    np.testing.assert_array_equal(found, np.full((9, 5), 3.0))
