"""The layout of a call's arguments, and the packing of a captured step's results."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.arguments import Declared
from whale_nebula.capture.mirror import mirror, order_operations
from whale_nebula.capture.step import capture, fill_layout, signature
from whale_nebula.config import InputSpec
from whale_nebula.errors import AbsentInputError, InputMismatchError, PlanError, UnsupportedError
from whale_nebula.feed.checks import MissingInput


def test_names_specs_and_what_is_split() -> None:
    arguments = [("batch", {"ids": np.ones((4, 2), "int32"), "scale": 2.0}), ("table", tf.ones((3, 5))), ("n", 7)]
    layout, tensors = signature(arguments, frozenset({"table"}))
    assert layout.names == ("batch/ids", "table")
    assert [tuple(spec.shape) for spec in layout.specs] == [(None, 2), (3, 5)]
    assert layout.batched == (True, False)
    assert [tuple(tensor.shape) for tensor in tensors] == [(4, 2), (3, 5)]


def test_rows_may_change_and_nothing_else() -> None:
    def key(*shape: int, dtype: str = "float32", plain: Any = 1) -> Any:
        return signature([("x", np.zeros(shape, dtype)), ("n", plain)])[0].key

    assert key(3, 2) == key(5, 2)
    assert key(3, 2) != key(3, 4)
    assert key(3, 2) != key(3, 2, dtype="float64")
    assert key(3, 2) != key(3, 2, plain=2)


def test_arguments_are_filled_again() -> None:
    layout, tensors = signature([("x", {"a": np.ones(2), "b": "text"}), ("y", [tf.zeros(2), 3])])
    first, second = fill_layout(layout, ["A", "B"])
    assert first == {"a": "A", "b": "text"}
    assert second == ["B", 3]
    assert len(tensors) == 2


@pytest.mark.parametrize("strange", [tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[1, 0]])])
def test_what_cannot_be_split_by_rows_is_named(strange: Any) -> None:
    with pytest.raises(UnsupportedError, match="'x/1'"):
        signature([("x", (tf.ones(2), strange))])


def captured(fn: Any, **arguments: Any) -> Any:
    layout, _ = signature(list(arguments.items()))
    return capture(lambda given: fn(*given), layout)


def test_results_keep_the_users_structure() -> None:
    found = captured(lambda x: {"b": (x, None), "a": 3}, x=np.ones(2, "float32"))
    assert found.pack(["three", "X"]) == {"b": ("X", None), "a": "three"}
    assert len(found.program.returns) == 2, "tf.function makes tensors of numbers"


def test_variables_are_named_by_path_and_twins_are_numbered() -> None:
    twins = [tf.Variable(1.0, name="twin"), tf.Variable(2.0, name="twin")]
    found = captured(lambda x: x * twins[0] + twins[1], x=np.ones(2, "float32"))
    assert list(found.variables) == ["twin", "twin#2"]
    assert [v is twin for v, twin in zip(found.variables.values(), twins, strict=True)] == [True, True]


@pytest.mark.parametrize("stacked", [True, False])
def test_a_list_of_tensors_that_would_lose_its_gradient_is_refused(stacked: bool) -> None:
    """A gradient flows through tensors only; a list stays in its stage, or the error says where it leaves it."""
    weight = tf.Variable([1.0, 2.0])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(name="a"):
                rows = tf.TensorArray(tf.float32, size=2, element_shape=[2]).write(0, x * weight).write(1, weight**3)
                whole = rows.stack() if stacked else None
            with nb.stage(name="b"):
                loss = tf.reduce_sum((rows.stack() if whole is None else whole) ** 2)
        return tape.gradient(loss, weight)

    if stacked:
        np.testing.assert_allclose(nb.function(step)(tf.ones(2)), [2.0 + 6.0, 4.0 + 6.0 * 2.0**5], rtol=1e-6)
    else:
        with pytest.raises(PlanError, match=r"list of tensors .* 'a' .* 'b'"):
            nb.function(step)(tf.ones(2))


# -------------------- Shapes that the config declares for inputs: the same signature with and without the values
FORMS = {"x/source": InputSpec((None, None), "int32"), "x/target": InputSpec((None, 3)), "y": InputSpec((8,))}
TWO = Declared(FORMS, alone=False)
SOURCE, TARGET, Y = np.ones((4, 2), "int32"), np.ones((4, 3), "float32"), np.ones(4, "float32")
GIVEN: dict[str, list[tuple[str, Any]]] = {
    "all": [("x", {"source": SOURCE, "target": TARGET}), ("y", Y)],
    "source": [("x", {"source": SOURCE, "target": None}), ("y", None)],
    "target": [("x", {"source": None, "target": TARGET}), ("y", Y)],
    "y": [("x", None), ("y", Y)],
}
ABSENT = {"all": (), "source": (1, 2), "target": (0,), "y": (0, 1)}


@pytest.mark.parametrize("here", GIVEN)
def test_every_process_has_the_same_signature(here: str) -> None:
    layout, tensors = signature(GIVEN[here], declared=TWO)
    assert layout.key == signature(GIVEN["all"], declared=TWO)[0].key
    assert layout.names == ("x/source", "x/target", "y")
    assert [spec.shape.as_list() for spec in layout.specs] == [[None, None], [None, 3], [None]]
    assert layout.absent == ABSENT[here]
    assert [isinstance(tensor, MissingInput) for tensor in tensors] == [n in ABSENT[here] for n in range(3)]


def test_a_none_that_the_config_does_not_name_is_a_none() -> None:
    layout, tensors = signature([("x", {"other": None, "source": SOURCE})], declared=TWO)
    assert fill_layout(layout, tensors)[0]["other"] is None
    assert layout.absent == ()


def test_a_part_that_is_none_as_a_whole_has_the_names_in_the_config() -> None:
    forms = Declared({"x/0": FORMS["y"], "x/1/a": FORMS["y"]}, alone=False)
    assert forms.unfold("x", None) == (None, {"a": None})
    assert forms.unfold("y", None) is None
    assert forms.unfold("x", 3) == 3


def test_in_one_process_everything_is_here() -> None:
    with pytest.raises(AbsentInputError, match=r"input 'y' is None, and all clusters are in this process") as caught:
        signature(GIVEN["source"][1:], declared=Declared(FORMS))
    assert "nb.here()" in caught.value.mend
    assert signature(GIVEN["all"], declared=Declared(FORMS))[0].absent == ()


BAD = {
    "type": (np.ones((4, 3)), "float64[None, 3]", "dtype: float64"),
    "width": (np.ones((4, 5), "float32"), "float32[None, 5]", "shape: [null, 5]"),
    "rank": (np.ones(4, "float32"), "float32[None]", "shape: [null]"),
}


@pytest.mark.parametrize(("given", "said", "mend"), BAD.values(), ids=BAD)
def test_what_is_here_must_be_as_the_config_says(given: Any, said: str, mend: str) -> None:
    with pytest.raises(InputMismatchError) as caught:
        signature([("x", {"target": given})], declared=TWO)
    assert f"'x/target' is {said}, but the config specifies float32[None, 3]" in caught.value.what
    assert mend in caught.value.mend


def test_a_whole_argument_keeps_its_first_axis() -> None:
    layout, _ = signature([("y", None)], frozenset({"y"}), TWO)
    assert layout.specs == (tf.TensorSpec([8], tf.float32),)
    assert layout.batched == (False,)


# -------------------- A traced graph as pure data: cases beyond the golden programs
def traced(fn: Any, *specs: Any) -> Any:
    return tf.function(fn, autograph=False).get_concrete_function(*specs).graph


VECTOR = tf.TensorSpec([None, 3], tf.float32)


def test_an_op_never_comes_before_its_inputs() -> None:
    """Differentiating a loop gives the loop inputs that were traced after it."""

    def fn(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.sin(v)), [0, x])[1]
        return tape.gradient(y, x)

    ordered = order_operations(traced(fn, VECTOR).get_operations())
    place = {op: number for number, op in enumerate(ordered)}
    assert all(place[tensor.op] < place[op] for op in ordered for tensor in op.inputs)


def test_a_body_may_call_what_only_a_graph_around_it_knows() -> None:
    """So TensorFlow wraps a condition under a persistent tape."""

    def fn(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sin(x), lambda: x)
        return tape.gradient(y, x)

    graph = mirror(traced(fn, VECTOR))
    assert "Sin" in {op.type for body in graph.functions.values() for op in body.ops}


def test_a_body_may_call_functions_of_the_old_kind() -> None:
    """So tf.nn.ctc_loss loops: by functions of TensorFlow 1, which are ops of their own."""

    def fn(x: Any) -> Any:
        ones = tf.ones([tf.shape(x)[0]], tf.int32)
        return tf.nn.ctc_loss(ones[:, None], x, ones, 3 * ones, logits_time_major=False, blank_index=0)

    graph = mirror(traced(fn, tf.TensorSpec([None, 3, 4], tf.float32)))
    loops = [op for op in _all(graph) if op.type == "While"]
    assert loops and all(len(op.functions) == 2 for op in loops)


def _all(graph: Any) -> list[Any]:
    return [*graph.ops, *(op for body in graph.functions.values() for op in body.ops)]
