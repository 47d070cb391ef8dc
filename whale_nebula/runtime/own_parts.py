"""Files of a cluster's own parts (`weights: own`): Keras's file of weights, with NaN for what is elsewhere.

What is elsewhere takes no room in such a file, and is no number in whoever loads it: a model that is loaded from one
part alone says so at its first loss. The clusters' files together hold the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from whale_nebula.errors import OptionError
from whale_nebula.runtime.elsewhere import Ledger, blank

Plain = Callable[..., Any]
SUFFIX = ".weights.h5"
_ABOUT = "whale_nebula"


def own_path(path: str | os.PathLike[str], cluster: str) -> str:
    """Where a cluster keeps its parts of a file.

    >>> own_path("run/model.weights.h5", "gpu")
    'run/model.gpu.weights.h5'
    """
    text = os.fspath(path)
    if not text.endswith(SUFFIX):
        raise OptionError(
            f"{text!r} is no file for the parts of a cluster",
            why="with 'weights: own' each cluster saves its own in a file of weights",
            mend=f'model.save_weights("{Path(text).name.partition(".")[0]}{SUFFIX}")',
        )
    return f"{text.removesuffix(SUFFIX)}.{cluster}{SUFFIX}"


def save_own(ledger: Ledger, cluster: str, writes_here: bool) -> Callable[[Plain], Plain]:
    """What `save_weights` becomes: every process calls it, and each cluster's file is there when it returns."""

    def change(plain: Plain) -> Plain:
        def save(filepath: Any, *args: Any, **kwargs: Any) -> None:
            path = own_path(filepath, cluster)
            if writes_here:
                variables = [kept.variable for kept in ledger.kept.values()]
                with ledger.told(), blank(variables):
                    plain(path, *args, **kwargs)
                    fill_in(path, variables, cluster)
            ledger.session.meet(f"the end of save_weights({os.fspath(filepath)!r})")

        return save

    return change


def load_own(cluster: str) -> Callable[[Plain], Plain]:
    """What `load_weights` becomes: the cluster's own file, where there is one by the name that was saved."""

    def change(plain: Plain) -> Plain:
        def load(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            own = own_path(filepath, cluster) if os.fspath(filepath).endswith(SUFFIX) else ""
            return plain(own if own and os.path.exists(own) else filepath, *args, **kwargs)

        return load

    return change


def fill_in(path: str, variables: Sequence[Any], cluster: str) -> None:
    """Give what was written as a variable's number that variable's shape, and NaN in the place of values."""
    with h5py.File(path, "a") as file:
        found: list[h5py.Dataset] = []
        file.visititems(lambda name, each: found.append(each) if _is_number(each) else None)
        for each in found:
            _exchange(file, each.name, variables[each.shape[0]])
        file.attrs[_ABOUT] = f"the parts of cluster {cluster!r}; all else is NaN"


def _is_number(each: Any) -> bool:
    return isinstance(each, h5py.Dataset) and len(each.shape) == 2 and each.shape[1] == 0


def _exchange(file: h5py.File, name: str, variable: Any) -> None:
    """Room for a variable that is never taken: HDF5 answers reads of it with the fill value."""
    before = file[name]
    dtype, attributes = before.dtype, dict(before.attrs)
    del file[name]
    made = file.create_dataset(name, tuple(variable.shape), dtype, fillvalue=_nothing(dtype, attributes))
    made.attrs.update(attributes)


def _nothing(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> Any:
    """No number: of bfloat16, which HDF5 does not know, the bytes of one."""
    if attributes.get("dtype") == "bfloat16":
        return np.frombuffer(b"\xc0\x7f", dtype)[0]
    return np.nan if np.issubdtype(dtype, np.floating) else None
