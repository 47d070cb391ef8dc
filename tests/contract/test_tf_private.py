"""Private parts of TensorFlow and Keras that this package uses: an upgrade that changes one fails in this folder."""

import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.contract.tracing import VECTOR, trace_graph
from tests.processes import zygote
from whale_nebula import tf as tf_package
from whale_nebula.tf import private as tf_private


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(tf_package.__path__)])
def test_private_functions_have_contract_tests(name: str) -> None:
    module = importlib.import_module(f"{tf_package.__name__}.{name}")
    own = {name for name, thing in vars(module).items() if isinstance(thing, types.FunctionType)}
    own = {name for name in own if vars(module)[name].__module__ == module.__name__ and name[0] != "_"}
    names = own | ({*tf_private.__all__, "FuncGraph"} if module is tf_private else set())
    sources = [path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    tested = "_\n".join(name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    assert sorted(name for name in names if f"_{name}_" not in tested + "_") == []


def test_iterate_python_frames_from_the_caller_outwards() -> None:
    def inner() -> list[str]:
        return [frame.f_code.co_name for frame in tf_private.iterate_python_frames()]

    names = inner()
    assert names[: names.index("inner") + 2][-2:] == ["inner", "test_iterate_python_frames_from_the_caller_outwards"]


def current_line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


def test_list_user_frames_contains_the_line_of_an_op() -> None:
    lines: list[int] = []

    def step(x: Any) -> Any:
        lines.append(current_line() + 1)
        return tf.sin(x)

    (op,) = [op for op in trace_graph(step, VECTOR).get_operations() if op.type == "Sin"]
    frames = tf_private.list_user_frames(op)
    assert (__file__, lines[0]) in frames
    assert frames.index((__file__, lines[0])) > 0, "outermost first"


def test_apply_autograph_converts_python_control_flow() -> None:
    def step(x: Any) -> Any:
        for _ in tf.range(3):
            x = x + 1.0
        return x

    graph = trace_graph(tf_private.apply_autograph(step), tf.TensorSpec([], tf.float32))
    assert any("While" in op.type for op in graph.get_operations())


def test_list_leaf_paths_in_the_order_of_flatten() -> None:
    structure = {"b": 1, "a": (2, [3, {"c": 4}])}
    found = tf_private.list_leaf_paths(structure)
    assert [leaf for _, leaf in found] == tf.nest.flatten(structure) == [2, 3, 4, 1]
    assert [path for path, _ in found] == [("a", 0), ("a", 1, 0), ("a", 1, 1, "c"), ("b",)]
    assert tf_private.list_leaf_paths(7) == [((), 7)]


def test_is_runtime_started_after_a_computation() -> None:
    tf.ones(1)
    assert tf_private.is_runtime_started()
    code = "from whale_nebula.tf import private; import sys; sys.exit(private.is_runtime_started())"
    assert zygote.run("-c", code).returncode == 0


def test_exempt_from_autograph_prevents_conversion() -> None:
    @tf_private.exempt_from_autograph
    class Ours:
        def __call__(self, x: Any) -> Any:
            return "rewritten" if "autograph" in inspect.stack()[0].filename else "as it is"

    ours = Ours()
    results: list[str] = []
    tf.function(lambda x: results.append(ours(x)) or x)(tf.ones(1))
    assert results == ["as it is"]


def test_is_supported_by_xla_for_ops_with_kernels() -> None:
    assert [tf_private.is_supported_by_xla(op, gpu=False) for op in ("MatMul", "AssignSubVariableOp")] == [True, True]
    assert [tf_private.is_supported_by_xla(op, gpu=True) for op in ("MatMul", "Conv2D")] == [True, True]
    assert not any(tf_private.is_supported_by_xla(op, gpu=False) for op in ("EagerPyFunc", "WriteSummary", "AsString"))


def test_is_debugger_active_while_a_debugger_is_on() -> None:
    assert not tf_private.is_debugger_active()
    tf.debugging.enable_check_numerics()
    try:
        assert tf_private.is_debugger_active()
    finally:
        tf.debugging.disable_check_numerics()
    assert not tf_private.is_debugger_active()


def test_restore_caching_device_after_a_failed_scan() -> None:
    """TensorFlow's own: without it, the next strategy's scope fails."""
    scope = tf.compat.v1.get_variable_scope()

    def body(_: Any, row: Any) -> Any:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError), tf_private.restore_caching_device():
        tf.function(lambda x: tf.scan(body, x))(tf.ones(3))
    assert scope.caching_device is None


def test_dispatch_to_applies_to_one_class_only() -> None:
    class Ours:
        def __array__(self) -> None:
            raise TypeError

    tf_private.dispatch_to(tf.shape, Ours, lambda input, out_type=None, name=None: "ours")
    assert tf.shape(Ours()) == "ours"
    assert tf.shape([1, 2]).numpy().tolist() == [2]
    with pytest.raises((TypeError, ValueError)):
        tf.shape(object())


def test_copy_op_infers_shapes_again() -> None:
    """The same op on pieces: attributes are those of the traced one, shapes those of what it is given."""

    @tf.function(autograph=False)
    def product(x: Any, w: Any) -> Any:
        return tf.matmul(x, w, transpose_b=True)

    traced = (
        product.get_concrete_function(tf.TensorSpec([2, 4]), tf.TensorSpec([6, 4])).graph.outputs[0].op.inputs[0].op
    )
    assert traced.type == "MatMul"

    @tf.function(autograph=False)
    def piece(x: Any, w: Any) -> Any:
        return tf_private.copy_op(traced, [x, w]).outputs[0]

    x, w = tf.random.normal([2, 4]), tf.random.normal([3, 4])
    assert piece.get_concrete_function(x, w).output_shapes == (2, 3)
    tf.debugging.assert_near(piece(x, w), tf.matmul(x, w, transpose_b=True))


def test_find_written_value_of_assign_and_restore() -> None:
    variable = tf.Variable([1.0, 2.0])
    given = {"VARIABLE_VALUE": tf.constant([3.0, 4.0])}
    assert tf_private.find_written_value(given).numpy().tolist() == [3.0, 4.0]
    variable._restore_from_tensors(given)
    assert variable.numpy().tolist() == tf_private.find_written_value([3.0, 4.0])
