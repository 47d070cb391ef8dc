"""The devices of a stage as workers of one cluster: each process runs one, and TensorFlow's collectives join them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.errors import NotYetError, StateError
from whale_nebula.runtime.replicas.collectives import DTYPES
from whale_nebula.runtime.split.groups import Sizes, Tensors, cut_piece, cut_pieces, pad_piece
from whale_nebula.tf import collectives as tf_collectives
from whale_nebula.tf.collectives import hash_key

_CARRIED = {"bool": "int32", "int8": "int32", "uint8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64"}
"""Element types for which there are no collectives, and those in which they cross."""


def _find_carried_dtype(dtype: Any) -> Any:
    """The element type in which tensors of one cross."""
    if dtype.name not in DTYPES and dtype.name not in _CARRIED:
        raise NotYetError(f"nb.split where a tensor of {dtype.name} crosses between devices", mend="cast it")
    return tf.as_dtype(_CARRIED.get(dtype.name, dtype))


class Keys:
    """Numbers that stand for the names of collectives: alike in every process, and no two the same in one."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> int:
        """The number of a name."""
        key = hash_key(name)
        with self._lock:
            if self._names.setdefault(key, name) != name:
                raise StateError(f"the collectives {name!r} and {self._names[key]!r} have the same key")
        return key


_KEYS = Keys()


class CollectiveGroup:
    """One of `count` workers that run the same function of a stage, as its `name` says; this is number `index`.

    A collective has a key for each size that it is called with: TensorFlow keeps the shape that it saw first.
    """

    holds_pieces = True

    def __init__(self, count: int, index: int, name: str) -> None:
        self.count, self.index, self.name = count, index, name
        self._made = 0
        self._last: Any = None

    @property
    def here(self) -> Sequence[int]:
        """The one of this process."""
        return (self.index,)

    def sum(self, tensors: Tensors) -> Tensors:
        """The sum over all devices."""
        return [self._run(tensors[0], lambda tensor, keys: tf_collectives.reduce(tensor, self.count, *keys, op="Add"))]

    def maximum(self, tensors: Tensors) -> Tensors:
        """The maximum over all devices, entry by entry."""
        return [self._run(tensors[0], lambda tensor, keys: tf_collectives.reduce(tensor, self.count, *keys, op="Max"))]

    def gather(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """What all devices have, one behind the other along an axis. All send as much as the longest."""
        longest = _longest(sizes)
        padded = pad_piece(tensors[0], axis, 0, longest - sizes[self.index])
        found = self._run(padded[tf.newaxis], lambda tensor, keys: tf_collectives.gather(tensor, self.count, *keys))
        return [self._join(found, axis, sizes)]

    def scatter(self, tensors: Tensors, axis: int, sizes: Sizes) -> Tensors:
        """Of the sum over all devices, to each its piece: they exchange pieces, and each adds up its own."""
        found = self._exchange(self._stack(tensors[0], axis, sizes))
        return [cut_piece(tf.reduce_sum(found, 0), axis, 0, sizes[self.index])]

    def exchange(self, tensors: Tensors, axis: int, sizes: Sizes, other: int, others: Sizes) -> Tensors:
        """Pieces along one axis become pieces along another."""
        padded = pad_piece(tensors[0], axis, 0, _longest(sizes) - sizes[self.index])
        found = self._exchange(self._stack(padded, other, others))
        return [cut_piece(self._join(found, axis, sizes), other, 0, others[self.index])]

    def _stack(self, tensor: Any, axis: int, sizes: Sizes) -> Any:
        """The piece for each device, as long as the longest."""
        longest, pieces = _longest(sizes), zip(cut_pieces(tensor, axis, sizes), sizes, strict=True)
        return tf.stack([pad_piece(piece, axis, 0, longest - size) for piece, size in pieces])

    def _join(self, stacked: Any, axis: int, sizes: Sizes) -> Any:
        """The pieces of all devices, without what fills them up, as one."""
        pieces = [cut_piece(stacked[number], axis, 0, size) for number, size in enumerate(sizes)]
        return tf.concat(pieces, axis)

    def _exchange(self, stacked: Any) -> Any:
        return self._run(stacked, lambda tensor, keys: tf_collectives.exchange(tensor, self.count, *keys))

    def _run(self, tensor: Any, do: Callable[[Any, tuple[int, Any]], Any]) -> Any:
        """One collective. On GPUs all members must begin theirs in the same order, so each waits for the one before."""
        carried = _find_carried_dtype(tensor.dtype)
        self._made += 1
        group = _KEYS.of(f"{self.name} {self._made}")
        device = tf_collectives.find_device()
        with tf.device(device), tf.control_dependencies([self._last] * (self._last is not None)):
            given = tf.cast(tensor, carried)
            found = do(given, (group, tf.size(given) + 1))
        if device != tf_collectives.CPU:
            self._last = found
        return tf.cast(found, tensor.dtype)


def _longest(sizes: Sizes) -> Any:
    return max(sizes) if all(isinstance(size, int) for size in sizes) else tf.reduce_max(tf.stack(sizes))


_MOST_AXES = 8


class Broadcast:
    """Tensors of any form from the first of some workers to the others, between steps of their functions."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._keys = [_KEYS.of(f"{name} {what}") for what in ("head", "body")]
        self._functions: dict[Any, Any] = {}

    def give(self, tensor: Any) -> Any:
        """What the first one has."""
        tensor = tf.convert_to_tensor(tensor)
        self._function(tensor.dtype, self._send, tf.TensorSpec(None, tensor.dtype))(tensor)
        return tensor

    def take(self, dtype: Any) -> Any:
        """What the first one gave, on another."""
        dtype = tf.as_dtype(dtype)
        return self._function(dtype, lambda: self._receive(dtype))()

    def _function(self, dtype: Any, body: Callable[..., Any], *signature: Any) -> Any:
        if dtype not in self._functions:
            self._functions[dtype] = tf.function(body, input_signature=list(signature), autograph=False)
        return self._functions[dtype]

    def _send(self, tensor: Any) -> Any:
        shape = tf.shape(tensor)
        head = tf.concat([[tf.size(shape)], shape, tf.zeros([_MOST_AXES - tf.size(shape)], tf.int32)], 0)
        given = tf.cast(tensor, _find_carried_dtype(tensor.dtype))
        with tf.device(tf_collectives.find_device()):
            sent = tf_collectives.send(head, self.count, self._keys[0], 1)
            return sent, tf_collectives.send(given, self.count, self._keys[1], tf.size(given) + 1)

    def _receive(self, dtype: Any) -> Any:
        carried = _find_carried_dtype(dtype)
        with tf.device(tf_collectives.find_device()):
            head = tf_collectives.receive([1 + _MOST_AXES], tf.int32, self.count, self._keys[0], 1)
            shape = head[1 : 1 + head[0]]
            size = tf.reduce_prod(shape) + 1
            return tf.cast(tf_collectives.receive(shape, carried, self.count, self._keys[1], size), dtype)
