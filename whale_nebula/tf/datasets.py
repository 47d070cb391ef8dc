"""Private parts of tf.data for `nb.shard`: the structure of a dataset, and its reconstruction on other rows.

Only datasets of the kinds listed here are analysed. Each function has a contract test in tests/contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.tf import require_supported
from whale_nebula.tf.private import list_op_types

require_supported()  # the following imports depend on these versions

from tensorflow.python.data.ops import (  # noqa: E402
    batch_op,
    dataset_ops,
    map_op,
    padded_batch_op,
    prefetch_op,
    repeat_op,
    shuffle_op,
    skip_op,
    take_op,
)
from tensorflow.python.data.util import nest  # noqa: E402
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction  # noqa: E402
from tensorflow.python.framework import op_def_registry  # noqa: E402
from tensorflow.python.framework.none_tensor import NoneTensorSpec  # noqa: E402

_KINDS: dict[type, str] = {
    map_op._MapDataset: "map",
    map_op._ParallelMapDataset: "map",
    batch_op._BatchDataset: "batch",
    batch_op._ParallelBatchDataset: "batch",
    padded_batch_op._PaddedBatchDataset: "padded_batch",
    prefetch_op._PrefetchDataset: "prefetch",
    repeat_op._RepeatDataset: "repeat",
    shuffle_op._ShuffleDataset: "shuffle",
    skip_op._SkipDataset: "skip",
    take_op._TakeDataset: "take",
    dataset_ops._OptionsDataset: "options",
}
_DETERMINISTIC = {"default": None, "true": True, "false": False}
_STATELESS_ENOUGH_OPS = frozenset({
    "Assert", "Case", "EagerPyFunc", "HashTableV2", "If", "LookupTableFindV2", "LookupTableSizeV2", "MatchingFiles",
    "Placeholder", "Print", "PrintV2", "PyFunc", "ReadFile", "ReadVariableOp", "ResourceGather",
    "StatefulPartitionedCall", "VarHandleOp", "While",
})  # fmt: skip
"""The stateful ops that neither draw nor write: skipping a row does not affect others."""


def find_kind(dataset: Any) -> str:
    """The tf.data method that created a dataset; "" for an unknown one."""
    return _KINDS.get(type(dataset), "")


def find_input(dataset: Any) -> tf.data.Dataset:
    """The input dataset of a dataset of a known kind."""
    return dataset._input_dataset


class Mapping(NamedTuple):
    """Arguments of `Dataset.map`: a function of flat tensors, its output structure, and the other options."""

    function: Any
    output_spec: Any
    options: dict[str, Any]


def read_mapping(dataset: Any) -> Mapping | None:
    """The mapping of a dataset; None if its function cannot be called again."""
    function = dataset._map_func.function
    if not isinstance(function, ConcreteFunction):
        return None
    options: dict[str, Any] = {"name": dataset._name}
    if isinstance(dataset, map_op._ParallelMapDataset):
        options["num_parallel_calls"] = dataset._num_parallel_calls
        options["deterministic"] = _DETERMINISTIC[dataset._deterministic]
        options["use_unbounded_threadpool"] = dataset._use_unbounded_threadpool
    elif dataset._force_synchronous:
        options["synchronous"] = True
    return Mapping(function, dataset.element_spec, options)


class Batching(NamedTuple):
    """Arguments of `batch` or `padded_batch`; for the latter with shapes and padding values of the tensors."""

    size: Any
    options: dict[str, Any]
    shapes: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()


def read_batching(dataset: Any) -> Batching:
    """The batching of a dataset."""
    options: dict[str, Any] = {"name": dataset._name, "drop_remainder": dataset._drop_remainder}
    if isinstance(dataset, padded_batch_op._PaddedBatchDataset):
        shapes, values = nest.flatten(dataset._padded_shapes), nest.flatten(dataset._padding_values)
        return Batching(dataset._batch_size, options, tuple(shapes), tuple(values))
    if isinstance(dataset, batch_op._ParallelBatchDataset):
        options["num_parallel_calls"] = dataset._num_parallel_calls
        options["deterministic"] = _DETERMINISTIC[dataset._deterministic]
    return Batching(dataset._batch_size, options)


class _ShuffledDataset(dataset_ops.UnaryUnchangedStructureDataset):
    """A dataset in the shuffled order of a given one, with the same seeds."""

    def __init__(self, source: Any, like: Any) -> None:
        self._input_dataset, self._name = source, like._name
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=source._variant_tensor,
            buffer_size=like._buffer_size,
            seed=like._seed,
            seed2=like._seed2,
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            reshuffle_each_iteration=like._reshuffle_each_iteration,
            **self._common_args,
        )
        super().__init__(source, variant)


_REAPPLY: dict[str, Callable[[Any, Any], Any]] = {
    "shuffle": _ShuffledDataset,
    "repeat": lambda source, like: source.repeat(like._count),
    "take": lambda source, like: source.take(like._count),
    "skip": lambda source, like: source.skip(like._count),
    "prefetch": lambda source, like: source.prefetch(int(like._buffer_size)),
    "options": lambda source, like: source.with_options(like.options()),
}
CONTENT_INDEPENDENT_KINDS = frozenset(_REAPPLY)
"""The kinds that do not depend on the elements."""


def reapply(dataset: Any, source: Any) -> tf.data.Dataset:
    """Apply the transformation of a dataset, of a kind in `CONTENT_INDEPENDENT_KINDS`, to a different dataset."""
    return _REAPPLY[find_kind(dataset)](source, dataset)


def find_lasting_op(function: Any) -> str:
    """The type of an op in a function that draws or writes, so that a call changes later ones; "" if there is none."""
    for op_type in list_op_types(function.graph):
        known = op_def_registry.get(op_type)
        if known is None or (known.is_stateful and op_type not in _STATELESS_ENOUGH_OPS):
            return op_type
    return ""


def flatten_structure(structure: Any) -> list[Any]:
    """The parts of an element, or of its spec, as in tf.data: a list is one part."""
    return list(nest.flatten(structure))


def pack_structure(structure: Any, parts: Sequence[Any]) -> Any:
    """The parts packed into their structure."""
    return nest.pack_sequence_as(structure, list(parts))


def is_none_spec(spec: Any) -> bool:
    """Whether a part of an element is None."""
    return isinstance(spec, NoneTensorSpec)


class IdentityDataset(dataset_ops.UnaryUnchangedStructureDataset):
    """An identical dataset, as a base of our classes that must be a `tf.data.Dataset`."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, dataset._variant_tensor)


def describe_iterator(iterator: Any) -> tuple[Any, Any]:
    """The arguments for passing an iterator to a TensorFlow function: its description and its handle."""
    return iterator._type_spec, iterator._iterator_resource
