"""An emptied variable takes no memory, refuses to be read, and can be filled again."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.capture.tracing import Tracing, tracing
from whale_nebula.errors import CollectiveReadError, OptionError, PlanError
from whale_nebula.ir.layout import SPLIT, Layout
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.variables.own_weights import fill_placeholders, load_own, name_own_path, save_own
from whale_nebula.runtime.variables.remote import (
    HeldVariable,
    Ledger,
    empty_variable,
    fill_variable,
    read_as_placeholders,
)

READS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda v: v.numpy(),
    "np.array": np.array,
    "convert": tf.convert_to_tensor,
    "add": lambda v: v + 1.0,
    "multiply": lambda v: 2.0 * v,
    "index": lambda v: v[0],
    "reduce": tf.reduce_sum,
    "matmul": lambda v: tf.matmul(v, v),
    "stack": lambda v: tf.stack([v, v]),
    "identity": tf.identity,
    "gather": lambda v: tf.gather(v, [0]),
    "keras": keras.ops.sum,
}


def make_square() -> Any:
    return tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="square")


def make_kept(variable: Any) -> HeldVariable:
    return HeldVariable("layer/square", variable, ("npu/0",))


def read_raw(variable: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_reading_an_emptied_variable_is_refused(read: Callable[[Any], Any]) -> None:
    variable = make_square()
    empty_variable(make_kept(variable))
    with pytest.raises(CollectiveReadError, match=r"'layer/square' is on npu/0, not in this process") as caught:
        read(variable)
    assert re.search(r"test_variables\.py:\d+$", caught.value.where)
    assert "with nb.gathered():" in caught.value.mend and "get_weights" in caught.value.mend


def test_emptied_variable_has_no_values_but_its_shape() -> None:
    variable = make_square()
    empty_variable(make_kept(variable))
    assert np.isnan(read_raw(variable)).tolist() == [True]
    assert (variable.shape, variable.dtype, variable.name) == ((2, 2), tf.float32, "square:0")
    assert isinstance(variable, tf.Variable)


def test_writes_to_an_emptied_variable_have_no_effect() -> None:
    variable = make_square()
    empty_variable(make_kept(variable))
    variable.assign([[5.0, 6.0], [7.0, 8.0]])
    variable.assign_add([[5.0, 6.0], [7.0, 8.0]])
    assert np.isnan(read_raw(variable)).tolist() == [True]


def test_emptied_variable_can_be_traced() -> None:
    """The trace of a step only names the variable; the function runs where the variable is."""
    variable = make_square()
    empty_variable(make_kept(variable))
    with tracing(Tracing(None, ())):
        traced = tf.function(lambda: tf.reduce_sum(variable * 2.0)).get_concrete_function()
    fill_variable(make_kept(variable), np.full((2, 2), 3.0, "float32"))
    assert float(traced()) == 24.0


def test_function_of_tensorflow_does_not_read_an_emptied_variable() -> None:
    """It is refused if it is traced now; one that was traced before would silently return the norm of no numbers."""
    variable = make_square()
    traced_before = tf.function(lambda: tf.nn.l2_loss(variable))
    assert float(traced_before()) == 15.0
    empty_variable(make_kept(variable))
    assert np.isnan(traced_before())
    for use in (lambda: tf.reduce_sum(variable), lambda: variable.assign_add([[1.0, 1.0], [1.0, 1.0]])):
        with pytest.raises(CollectiveReadError, match="'layer/square' is on npu/0"):
            tf.function(use)()


def test_filled_variable_is_readable_again() -> None:
    variable = make_square()
    plain = type(variable)
    for _ in range(2):
        empty_variable(make_kept(variable))
        fill_variable(make_kept(variable), np.eye(2, dtype="float32"))
        assert type(variable) is plain
        assert float(tf.reduce_sum(variable)) == 2.0


def test_emptied_variable_can_be_an_argument_of_a_function() -> None:
    """The type of an argument is asked of its handle."""
    variable = make_square()
    empty_variable(make_kept(variable))
    assert tf.function(lambda v: tf.shape(v.handle)).get_concrete_function(variable) is not None


def test_tf_checkpoint_of_an_emptied_variable_is_refused(tmp_path: Path) -> None:
    """It would hold an empty tensor, and nobody would know until it is restored."""
    variable = make_square()
    empty_variable(make_kept(variable))
    with pytest.raises(CollectiveReadError):
        tf.train.Checkpoint(variable=variable).write(str(tmp_path / "checkpoint"))


def test_restoring_a_tf_checkpoint_leaves_a_variable_empty(tmp_path: Path) -> None:
    """Every process restores all of a checkpoint, and keeps its part."""
    path = tf.train.Checkpoint(square=make_square(), own=make_square()).write(str(tmp_path / "checkpoint"))
    variable, own = make_square(), tf.Variable(tf.zeros([2, 2]))
    empty_variable(make_kept(variable))
    tf.train.Checkpoint(square=variable, own=own).read(path).assert_consumed()
    assert np.isnan(read_raw(variable)).tolist() == [True]
    assert own.numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]


# -------------------- Files of a cluster's own parts in Keras's format, with NaN where the values are elsewhere
def model() -> Any:
    found = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(3, dtype="bfloat16")])
    found.compile("sgd", "mse")
    return found


def list_values(found: Any) -> list[Any]:
    return [variable.value for variable in found.variables]


def empty_some(found: Any, absent: slice) -> Any:
    """The model with some of its variables emptied."""
    for variable in list_values(found)[absent]:
        empty_variable(HeldVariable("path", variable, ("npu/0",)))
    return found


def list_datasets(group: Any) -> list[Any]:
    inside = [group[name] for name in group]
    return [each for g in inside for each in (list_datasets(g) if isinstance(g, h5py.Group) else [g])]


def test_own_weights_path_contains_the_cluster() -> None:
    assert name_own_path(Path("run/my.v1.weights.h5"), "gpu") == os.path.join("run", "my.v1.gpu.weights.h5")
    with pytest.raises(OptionError, match="not the name of a weights file") as caught:
        name_own_path("run/my.keras", "gpu")
    assert 'model.save_weights("my.weights.h5")' in caught.value.mend


@pytest.mark.parametrize("absent", [slice(0, 2), slice(2, 4), slice(1, 3)])
def test_own_weights_file_has_nan_for_absent_variables(tmp_path: Path, absent: slice) -> None:
    whole, path = model(), str(tmp_path / "part.weights.h5")
    expected = whole.get_weights()
    variables = list_values(whole)
    empty_some(whole, absent)
    with read_as_placeholders(variables):
        whole.save_weights(path)
    fill_placeholders(path, variables, "gpu")
    loaded = model()
    loaded.load_weights(path)
    absent_numbers = range(4)[absent]
    for number, weights in enumerate(loaded.get_weights()):
        if number in absent_numbers:
            assert np.all(np.isnan(weights.astype("float32")))
        else:
            assert np.array_equal(weights, expected[number])


def test_own_weights_file_marks_absent_integers(tmp_path: Path) -> None:
    class Counter(keras.layers.Layer):  # type: ignore[misc]
        def build(self, _: Any) -> None:
            self.count = self.add_weight(name="count", dtype="int64", initializer="ones", trainable=False)

        def call(self, x: Any) -> Any:
            return x

    def make() -> Any:
        return keras.Sequential([keras.Input((2,)), Counter()])

    whole, path = make(), str(tmp_path / "part.weights.h5")
    variables = list_values(empty_some(whole, slice(0, 1)))
    with read_as_placeholders(variables):
        whole.save_weights(path)
    fill_placeholders(path, variables, "gpu")
    loaded = make()
    loaded.load_weights(path)
    [count] = list_values(loaded)
    with pytest.raises(PlanError, match="no value of variable 'count' was loaded, but this program needs it on gpu/0"):
        Ledger(Session("gpu/0", {}, 1.0), True).register_program({"count": count}, {"count": ("gpu/0",)})


def test_absent_variables_take_no_space_in_the_file(tmp_path: Path) -> None:
    whole, path = model(), tmp_path / "part.weights.h5"
    variables = list_values(empty_some(whole, slice(0, 2)))
    with read_as_placeholders(variables):
        whole.save_weights(path)
    fill_placeholders(str(path), variables, "gpu")
    with h5py.File(path) as file:
        sizes = sorted(each.id.get_storage_size() for each in list_datasets(file))
        assert sizes[:2] == [0, 0] and min(sizes[2:]) > 0
        assert "'gpu'" in file.attrs["whale_nebula"]


def test_reads_are_refused_again_after_placeholders(tmp_path: Path) -> None:
    whole = empty_some(model(), slice(0, 2))
    with read_as_placeholders(list_values(whole)):
        assert [value.numpy().shape for value in list_values(whole)[:2]] == [(0, 0), (1, 0)]
    with pytest.raises(CollectiveReadError):
        whole.save_weights(tmp_path / "no.weights.h5")


def test_save_own_and_load_own_use_the_file_of_the_cluster(tmp_path: Path) -> None:
    whole, path = model(), tmp_path / "m.weights.h5"
    ledger = Ledger(Session("gpu/0", {}, 1.0), keeps_own_weights=True)
    for number, variable in enumerate(list_values(whole)):
        ledger.variables[id(variable)] = HeldVariable(str(number), variable, ("gpu/0" if number > 1 else "npu/0",))
    expected = whole.get_weights()[2:]
    empty_some(whole, slice(0, 2))
    save_own(ledger, "gpu", False, whole.save_weights, path)
    assert list(tmp_path.iterdir()) == []
    save_own(ledger, "gpu", True, whole.save_weights, path)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gpu.weights.h5"]
    for variable in list_values(whole)[2:]:
        variable.assign(0 * variable)
    load_own("gpu", whole.load_weights, path)
    assert all(np.array_equal(v.numpy(), was) for v, was in zip(list_values(whole)[2:], expected, strict=True))
    with pytest.raises(CollectiveReadError, match="no process may gather the whole model"), ledger.gather():
        pass


@pytest.mark.parametrize(
    ("holder", "own", "apart", "reason"),
    [
        ({}, True, False, "with 'weights: own' in the config"),
        ({"layout": Layout(SPLIT, 0)}, False, False, "pieces cannot move"),
        ({"copied": True}, False, False, "trains each cluster apart"),
        ({}, False, True, "trains each cluster apart"),
        ({}, False, False, None),
    ],
)
def test_program_that_needs_a_variable_elsewhere(
    holder: dict[str, Any], own: bool, apart: bool, reason: str | None
) -> None:
    variable = tf.Variable(1.0)
    ledger = Ledger(Session("gpu/0", {}, 1.0), keeps_own_weights=own)
    ledger.variables[id(variable)] = HeldVariable("kernel", variable, ("npu/0",), **holder)
    refused = contextlib.nullcontext() if reason is None else pytest.raises(PlanError, match=reason)
    with refused:
        ledger.require_movable({"kernel": variable}, {"kernel": ("gpu/0", "npu/0")}, (), apart=apart)
    ledger.require_movable({"kernel": variable}, {"kernel": ("npu/0",)}, ["kernel"], apart=apart)


def test_program_that_writes_the_values_of_one_cluster_is_refused() -> None:
    variable = tf.Variable(1.0)
    ledger = Ledger(Session("gpu/0", {}, 1.0))
    ledger.variables[id(variable)] = HeldVariable("kernel", variable, ("gpu/0", "npu/0"), copied=True)
    for written, apart in (([], False), (["kernel"], True)):
        ledger.require_movable({"kernel": variable}, {"kernel": ("npu/0",)}, written, apart=apart)
    with pytest.raises(PlanError, match="writes it on npu/0 only"):
        ledger.require_movable({"kernel": variable}, {"kernel": ("npu/0",)}, ["kernel"], apart=False)


def test_variable_whose_values_are_in_the_file_of_another_cluster_is_refused() -> None:
    kernel, empty_table, running = tf.Variable([[np.nan], [np.nan]]), tf.Variable(tf.zeros([0, 2])), tf.Variable([1, 2])
    variables = {"kernel": kernel, "table": empty_table, "running": running}
    holders = dict.fromkeys(variables, ("gpu/0",))
    with pytest.raises(PlanError, match="no value of variable 'kernel' was loaded, but this program needs it on gpu/0"):
        Ledger(Session("gpu/0", {}, 1.0), keeps_own_weights=True).register_program(variables, holders)
    Ledger(Session("gpu/0", {}, 1.0)).register_program(variables, holders)
    kernel.assign([[np.nan], [0.0]])
    Ledger(Session("gpu/0", {}, 1.0), keeps_own_weights=True).register_program(variables, holders)


def test_variable_is_everywhere_if_every_process_holds_the_whole_of_it() -> None:
    ledger = Ledger(Session("gpu/0", {"npu/0": None}, 1.0))  # type: ignore[dict-item]
    one, both, unknown = tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)
    for variable, holders in ((one, ("gpu/0",)), (both, ("gpu/0", "npu/0"))):
        ledger.variables[id(variable)] = HeldVariable("sum", variable, holders)
    assert [ledger.is_everywhere(variable) for variable in (one, both, unknown)] == [False, True, True]
