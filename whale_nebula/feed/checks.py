"""Checks of a step's inputs between clusters: absent inputs, the input named by `ids=`, and fingerprints of batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias

import google_crc32c
import numpy as np

from whale_nebula.errors import AbsentInputError, OptionError
from whale_nebula.errors.text import did_you_mean, list_names
from whale_nebula.feed.rows import Rows
from whale_nebula.ir.program import Leaf
from whale_nebula.tf import tf


def absent_error(name: str, reader: str, where: str) -> AbsentInputError:
    """The error for a read of an input that is absent here; `reader` names the stage and the cluster."""
    what = f"input {name!r} is None in this process, but {reader or 'the step'} reads it here"
    why = "'inputs' of the config allows None only in clusters that do not read the input"
    mend = f"yield {name!r} in this cluster as well\nor move the ops that read it into a stage of a cluster that has it"
    return AbsentInputError(what, where=where or name, why=why, mend=mend)


def no_rows_error(leaves: Sequence[Leaf]) -> AbsentInputError:
    """The error for a step that has none of its inputs in this process."""
    names = ", ".join(repr(leaf.name) for leaf in leaves)
    what = f"all inputs of this step are None in this process: {names}"
    why = "the number of rows of the step is taken from the inputs that are not None"
    mend = "yield at least one of them in every cluster, such as row ids, which nb.init(ids=...) compares"
    return AbsentInputError(what, where=leaves[0].name, why=why, mend=mend)


@dataclass(frozen=True, eq=False)
class MissingInput:
    """A substitute for the tensor of an input that is absent in this process. Every read of it raises.

    >>> MissingInput("y", tf.TensorSpec([None, 4], tf.int32)).fill_rows(2).shape.as_list()
    [2, 4]
    """

    name: str
    spec: tf.TensorSpec

    @property
    def dtype(self) -> tf.DType:
        """The element type, by the config."""
        return self.spec.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape, by the config."""
        return self.spec.shape

    def fill_rows(self, rows: int) -> Any:
        """Zeros with this number of rows, for ops that only read the number of rows."""
        shape = [rows, *self.spec.shape[1:]] if self.spec.shape.rank else []
        return tf.zeros([1 if size is None else size for size in shape], self.spec.dtype)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise absent_error(self.name, "", "")

    __array__ = _refuse
    __tf_tensor__ = _refuse


def find_absent(tensors: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of the inputs that are absent in this process."""
    return tuple(number for number, tensor in enumerate(tensors) if isinstance(tensor, MissingInput))


def parse_ids(ids: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names that `ids` lists.

    >>> parse_ids("x/id"), parse_ids(["x/id", "y"]), parse_ids(None)
    (('x/id',), ('x/id', 'y'), ())
    """
    return (ids,) if isinstance(ids, str) else tuple(ids or ())


def check_named_inputs(ids: Sequence[str], inputs: Sequence[str], where: str) -> bool:
    """Whether a step has an input that `ids` names. Raises if it has only other inputs, as then no row would be
    compared.

    >>> check_named_inputs(["x/id"], ["x/id", "y"], "train.py:3"), check_named_inputs(["x/id"], [], "train.py:3")
    (True, False)
    """
    if not ids or set(ids) & set(inputs):
        return True
    if not inputs:
        return False
    given = repr(ids[0]) if len(ids) == 1 else repr(list(ids))
    inner = [each for each in inputs if each.endswith(f"/{ids[0]}")]
    why = f"its inputs are {list_names(inputs)}; without ids among them no row would be compared"
    mend = f'nb.init(ids="{inner[0]}")' if inner else did_you_mean(ids[0], inputs)
    raise OptionError(f"nb.init(ids={given}) names no input of this step", where=where, why=why, mend=mend)


def refuse_unshared_ids(
    ids: Collection[str], readers: Mapping[str, Collection[str]], clusters: Mapping[str, str]
) -> None:
    """Refuse ids that no two clusters would compare: only the `readers` of an input receive its checksum.

    >>> refuse_unshared_ids(["id"], {"id": ["gpu/0", "npu/0"], "x": ["gpu/0"]}, {"gpu/0": "gpu", "npu/0": "npu"})
    """
    for name in sorted(readers.keys() & set(ids)):
        if len({clusters[worker] for worker in readers[name]}) < 2 <= len(set(clusters.values())):
            raise OptionError(
                f"nb.init(ids={name!r}): by 'inputs' of the config, only the workers that read this input have it",
                where=f"inputs.{name}",
                why="no two clusters read it, so no checksum of it could be compared",
                mend=f"remove {name!r} from 'inputs' in every config, and pass it in every cluster\n"
                "or use a different input for ids=, which all clusters have",
            )


Fingerprint: TypeAlias = int | list[int | None]
"""A checksum of an input, or one of each micro-batch of it: None for those with absent rows."""


def is_same(own: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints agree, as far as both are known.

    >>> is_same(7, 7), is_same(7, 8), is_same([1, None, 3], [1, 2, None]), is_same([1, None], [2, None])
    (True, False, True, False)
    >>> is_same([1], [1, 2])
    False
    """
    if isinstance(own, int) or isinstance(other, int):
        return own == other or isinstance(own, int) != isinstance(other, int)
    known = (a == b for a, b in zip(own, other, strict=False) if a is not None and b is not None)
    return len(own) == len(other) and all(known)


def compute_fingerprints(
    leaves: Sequence[Leaf],
    tensors: Sequence[Any],
    only: Collection[str] = (),
    secret: Collection[str] = (),
    rows: Mapping[int, Rows] | None = None,
    counts: Sequence[int] = (),
) -> dict[str, Fingerprint]:
    """Checksums of inputs by name, for all that are in this process or those in `only`, but never for one in `secret`.
    An input some of whose `rows` may be absent has one for each micro-batch of `counts` rows.

    >>> leaf = Leaf(0, "x", None)
    >>> compute_fingerprints([leaf], [np.zeros(2)]) == compute_fingerprints([leaf], [np.zeros(2)])
    True
    >>> compute_fingerprints([leaf], [np.zeros(2)]) == compute_fingerprints([leaf], [np.ones(2)])
    False
    """
    parts = [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
    found: dict[str, Fingerprint] = {}
    for number, (leaf, tensor) in enumerate(zip(leaves, tensors, strict=True)):
        if isinstance(tensor, MissingInput) or leaf.name in secret or (only and leaf.name not in only):
            continue
        array, known = np.asarray(tensor), (rows or {}).get(number)
        if known is None or not leaf.batched:
            found[leaf.name] = _checksum(array)
        else:
            found[leaf.name] = [_checksum(array[part]) if known.present[part].all() else None for part in parts]
    return found


def _checksum(array: np.ndarray) -> int:
    if array.dtype == object:
        return google_crc32c.value(repr(array.tolist()).encode())
    return google_crc32c.value(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
