"""Files of a cluster's own parts in Keras's format, with NaN where the values are elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from whale_nebula.errors import CollectiveReadError, OptionError
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.variables.remote import Kept, Ledger, blank, empty, fill_in, load_own, name_own_path, save_own


def model() -> Any:
    found = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(3, dtype="bfloat16")])
    found.compile("sgd", "mse")
    return found


def values(found: Any) -> list[Any]:
    return [variable.value for variable in found.variables]


def parted(found: Any, elsewhere: slice) -> Any:
    """The model with some of its variables emptied."""
    for variable in values(found)[elsewhere]:
        empty(Kept("path", variable, ("npu/0",)))
    return found


def datasets(group: Any) -> list[Any]:
    inside = [group[name] for name in group]
    return [each for g in inside for each in (datasets(g) if isinstance(g, h5py.Group) else [g])]


def test_the_cluster_is_in_the_name() -> None:
    assert name_own_path(Path("run/my.v1.weights.h5"), "gpu") == os.path.join("run", "my.v1.gpu.weights.h5")
    with pytest.raises(OptionError, match="no file for the parts of a cluster") as caught:
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
        ledger.kept[id(variable)] = Kept(str(number), variable, ("gpu/0" if number > 1 else "npu/0",))
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
    with pytest.raises(CollectiveReadError, match="no process may hold the whole model"), ledger.gather():
        pass
