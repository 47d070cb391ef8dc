"""An emptied variable takes no memory, refuses to be read, and can be filled again."""

from __future__ import annotations

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

from whale_nebula.errors import CollectiveReadError, OptionError
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.variables.remote import (
    HeldVariable,
    Ledger,
    blank,
    empty,
    fill,
    fill_in,
    load_own,
    name_own_path,
    save_own,
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


def square() -> Any:
    return tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="square")


def kept(variable: Any) -> HeldVariable:
    return HeldVariable("layer/square", variable, ("npu/0",))


def raw(variable: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_every_way_of_reading_is_refused(read: Callable[[Any], Any]) -> None:
    variable = square()
    empty(kept(variable))
    with pytest.raises(CollectiveReadError, match=r"'layer/square' is on npu/0, not in this process") as caught:
        read(variable)
    assert re.search(r"test_variables\.py:\d+$", caught.value.where)
    assert "with nb.gathered():" in caught.value.mend and "get_weights" in caught.value.mend


def test_it_holds_nothing_and_keeps_its_form() -> None:
    variable = square()
    empty(kept(variable))
    assert raw(variable).shape == (0,)
    assert (variable.shape, variable.dtype, variable.name) == ((2, 2), tf.float32, "square:0")
    assert isinstance(variable, tf.Variable)


def test_writes_are_the_homes_business() -> None:
    variable = square()
    empty(kept(variable))
    variable.assign([[5.0, 6.0], [7.0, 8.0]])
    variable.assign_add([[5.0, 6.0], [7.0, 8.0]])
    assert raw(variable).shape == (0,)


def test_it_can_be_traced() -> None:
    """A trace only names the variable; the function runs where the variable is."""
    variable = square()
    empty(kept(variable))
    traced = tf.function(lambda: tf.reduce_sum(variable * 2.0)).get_concrete_function()
    fill(kept(variable), np.full((2, 2), 3.0, "float32"))
    assert float(traced()) == 24.0


def test_filled_it_is_as_before() -> None:
    variable = square()
    plain = type(variable)
    for _ in range(2):
        empty(kept(variable))
        fill(kept(variable), np.eye(2, dtype="float32"))
        assert type(variable) is plain
        assert float(tf.reduce_sum(variable)) == 2.0


def test_it_may_be_an_argument_of_a_function() -> None:
    """The type of an argument is asked of its handle."""
    variable = square()
    empty(kept(variable))
    assert tf.function(lambda v: tf.shape(v.handle)).get_concrete_function(variable) is not None


def test_a_checkpoint_of_it_is_refused(tmp_path: Path) -> None:
    """It would hold an empty tensor, and nobody would know until it is restored."""
    variable = square()
    empty(kept(variable))
    with pytest.raises(CollectiveReadError):
        tf.train.Checkpoint(variable=variable).write(str(tmp_path / "checkpoint"))


def test_a_checkpoint_gives_it_nothing_back(tmp_path: Path) -> None:
    """Every process restores all of a checkpoint, and keeps its part."""
    path = tf.train.Checkpoint(square=square(), own=square()).write(str(tmp_path / "checkpoint"))
    variable, own = square(), tf.Variable(tf.zeros([2, 2]))
    empty(kept(variable))
    tf.train.Checkpoint(square=variable, own=own).read(path).assert_consumed()
    assert raw(variable).shape == (0,)
    assert own.numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]


# -------------------- Files of a cluster's own parts in Keras's format, with NaN where the values are elsewhere
def model() -> Any:
    found = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(3, dtype="bfloat16")])
    found.compile("sgd", "mse")
    return found


def values(found: Any) -> list[Any]:
    return [variable.value for variable in found.variables]


def parted(found: Any, elsewhere: slice) -> Any:
    """The model with some of its variables emptied."""
    for variable in values(found)[elsewhere]:
        empty(HeldVariable("path", variable, ("npu/0",)))
    return found


def datasets(group: Any) -> list[Any]:
    inside = [group[name] for name in group]
    return [each for g in inside for each in (datasets(g) if isinstance(g, h5py.Group) else [g])]


def test_the_cluster_is_in_the_name() -> None:
    assert name_own_path(Path("run/my.v1.weights.h5"), "gpu") == os.path.join("run", "my.v1.gpu.weights.h5")
    with pytest.raises(OptionError, match="not the name of a weights file") as caught:
        name_own_path("run/my.keras", "gpu")
    assert 'model.save_weights("my.weights.h5")' in caught.value.mend


@pytest.mark.parametrize("elsewhere", [slice(0, 2), slice(2, 4), slice(1, 3)])
def test_a_file_holds_what_is_here_and_nan_for_the_rest(tmp_path: Path, elsewhere: slice) -> None:
    whole, path = model(), str(tmp_path / "part.weights.h5")
    expected = whole.get_weights()
    variables = values(whole)
    parted(whole, elsewhere)
    with blank(variables):
        whole.save_weights(path)
    fill_in(path, variables, "gpu")
    loaded = model()
    loaded.load_weights(path)
    gone = range(4)[elsewhere]
    for number, weights in enumerate(loaded.get_weights()):
        if number in gone:
            assert np.all(np.isnan(weights.astype("float32")))
        else:
            assert np.array_equal(weights, expected[number])


def test_what_is_elsewhere_takes_no_room(tmp_path: Path) -> None:
    whole, path = model(), tmp_path / "part.weights.h5"
    variables = values(parted(whole, slice(0, 2)))
    with blank(variables):
        whole.save_weights(path)
    fill_in(str(path), variables, "gpu")
    with h5py.File(path) as file:
        sizes = sorted(each.id.get_storage_size() for each in datasets(file))
        assert sizes[:2] == [0, 0] and min(sizes[2:]) > 0
        assert "'gpu'" in file.attrs["whale_nebula"]


def test_reads_are_refused_again_afterwards(tmp_path: Path) -> None:
    whole = parted(model(), slice(0, 2))
    with blank(values(whole)):
        assert [value.numpy().shape for value in values(whole)[:2]] == [(0, 0), (1, 0)]
    with pytest.raises(CollectiveReadError):
        whole.save_weights(tmp_path / "no.weights.h5")


def test_save_and_load_use_the_clusters_own_file(tmp_path: Path) -> None:
    whole, path = model(), tmp_path / "m.weights.h5"
    ledger = Ledger(Session("gpu/0", {}, 1.0), own=True)
    for number, variable in enumerate(values(whole)):
        ledger.kept[id(variable)] = HeldVariable(str(number), variable, ("gpu/0" if number > 1 else "npu/0",))
    expected = whole.get_weights()[2:]
    parted(whole, slice(0, 2))
    save_own(ledger, "gpu", False, whole.save_weights, path)
    assert list(tmp_path.iterdir()) == []
    save_own(ledger, "gpu", True, whole.save_weights, path)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gpu.weights.h5"]
    for variable in values(whole)[2:]:
        variable.assign(0 * variable)
    load_own("gpu", whole.load_weights, path)
    assert all(np.array_equal(v.numpy(), was) for v, was in zip(values(whole)[2:], expected, strict=True))
    with pytest.raises(CollectiveReadError, match="no process may gather the whole model"), ledger.gather():
        pass
