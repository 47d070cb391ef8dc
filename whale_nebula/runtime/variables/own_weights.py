"""Weights files with `weights: own`: each cluster saves its part of a model to a file of its own, and loads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from whale_nebula.errors import OptionError
from whale_nebula.runtime.variables.remote import Ledger, find_absent_mark, read_as_placeholders

Plain = Callable[..., Any]
"""A method as it was before it was replaced."""
WEIGHTS_SUFFIX = ".weights.h5"
_ABOUT = "whale_nebula"


def name_own_path(path: str | os.PathLike[str], cluster: str) -> str:
    """The path of the file with a cluster's part of a weights file.

    >>> name_own_path("run/model.weights.h5", "gpu")
    'run/model.gpu.weights.h5'
    """
    text = os.fspath(path)
    if not text.endswith(WEIGHTS_SUFFIX):
        raise OptionError(
            f"{text!r} is not the name of a weights file",
            why=f"with 'weights: own' each cluster saves its part to a file that ends in {WEIGHTS_SUFFIX}",
            mend=f'model.save_weights("{Path(text).name.partition(".")[0]}{WEIGHTS_SUFFIX}")',
        )
    return f"{text.removesuffix(WEIGHTS_SUFFIX)}.{cluster}{WEIGHTS_SUFFIX}"


def save_own(
    ledger: Ledger, cluster: str, writes_here: bool, plain: Plain, filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Replacement of `save_weights`: every process calls it. On return, a process of each cluster (`writes_here`) has
    written the file of the cluster's part.
    """
    path = name_own_path(filepath, cluster)
    with ledger.join_pieces(ledger.variables.values()):
        if writes_here:
            variables = [entry.variable for entry in ledger.variables.values()]
            with ledger.session.share_failures(), read_as_placeholders(variables):
                plain(path, *args, **kwargs)
                fill_placeholders(path, variables, cluster)
    ledger.session.meet(f"the end of save_weights({os.fspath(filepath)!r})")


def load_own(cluster: str, plain: Plain, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `load_weights`: loads the file of the cluster's part, if there is one for this name."""
    own = name_own_path(filepath, cluster) if os.fspath(filepath).endswith(WEIGHTS_SUFFIX) else ""
    return plain(own if own and os.path.exists(own) else filepath, *args, **kwargs)


def fill_placeholders(path: str, variables: Sequence[Any], cluster: str) -> None:
    """Replace placeholders in an HDF5 file by datasets with the shape of their variables and marks of absent values."""
    with h5py.File(path, "a") as file:
        found: list[h5py.Dataset] = []
        file.visititems(lambda name, each: found.append(each) if _is_placeholder(each) else None)
        for each in found:
            _replace_dataset(file, each.name, variables[each.shape[0]])
        file.attrs[_ABOUT] = f"the parts of cluster {cluster!r}; all other values are absent (NaN)"


def _is_placeholder(each: Any) -> bool:
    return isinstance(each, h5py.Dataset) and len(each.shape) == 2 and each.shape[1] == 0


def _replace_dataset(file: h5py.File, name: str, variable: Any) -> None:
    """Replace a dataset by one for a variable, which takes no space: HDF5 reads return the fill value."""
    before = file[name]
    dtype, attributes = before.dtype, dict(before.attrs)
    del file[name]
    made = file.create_dataset(name, tuple(variable.shape), dtype, fillvalue=_find_fill_value(dtype, attributes))
    made.attrs.update(attributes)


def _find_fill_value(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> Any:
    """The mark of absent values of a type; for bfloat16, which HDF5 does not support, the bytes of its NaN."""
    if attributes.get("dtype") == "bfloat16":
        return np.frombuffer(b"\xc0\x7f", dtype)[0]
    return None if dtype.kind == "V" else find_absent_mark(dtype)
