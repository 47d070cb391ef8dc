"""`Patch`: temporary replacement of an attribute of TensorFlow or Keras, by any number of threads; and private parts of
both for ops that a step replaces: random draws and synchronized moments. Each function has a contract test in
tests/contract.

The ops of `tf.random.normal`, `tf.nn.dropout` and similar functions keep their position in a kernel, where it is
unreadable. The kernel is a Philox generator: its key is the op's first seed, its counter starts at the second, and each
draw advances the counter like `RngReadAndSkip`. A variable can therefore produce the same numbers. Keras calls one
function of its TensorFlow backend for the moments of `BatchNormalization(synchronized=True)`: without a `tf.distribute`
strategy they are those of the batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from whale_nebula.tf import require_supported

require_supported()  # the following imports depend on these versions

from keras.src.backend.tensorflow import nn  # noqa: E402
from tensorflow.python.ops import gen_random_ops, resource_variable_ops  # noqa: E402


class Patch:
    """A replacement for an attribute of a class or module. `count` is the number of contexts that currently apply it.

    >>> class Dense:
    ...     def call(self): return "Keras's"
    >>> patch = Patch(Dense, "call", lambda self: "ours")
    >>> with patch.apply(), patch.apply():
    ...     Dense().call()
    'ours'
    >>> Dense().call(), patch
    ("Keras's", Patch(Dense.call))
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.count = 0
        self._original: Any = None
        self._inherited = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Patch({self.owner.__name__}.{self.name})"

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Replace the attribute; the original is restored when the last context that applies the patch exits."""
        with self._lock:
            if self.count == 0:
                self._inherited = self.name not in vars(self.owner)
                self._original = getattr(self.owner, self.name)
                setattr(self.owner, self.name, self.replacement)
            self.count += 1
        try:
            yield
        finally:
            with self._lock:
                self.count -= 1
                if self.count == 0 and self._inherited:
                    delattr(self.owner, self.name)
                elif self.count == 0:
                    setattr(self.owner, self.name, self._original)


@contextlib.contextmanager
def apply_patches(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply several patches."""
    with contextlib.ExitStack() as applied:
        for patch in patches:
            applied.enter_context(patch.apply())
        yield


_PHILOX = 1
_STATELESS = {
    "random_uniform": tf.raw_ops.StatelessRandomUniformV2,
    "random_standard_normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
    "random_uniform_int": tf.raw_ops.StatelessRandomUniformIntV2,
}
_MAKERS: Mapping[str, Any] = MappingProxyType({name: getattr(gen_random_ops, name) for name in _STATELESS})

StateFinder = Callable[[int, int], Any]


def patch_draws(find_state: StateFinder) -> list[Patch]:
    """Call `find_state(seed, seed2)` for a variable of `make_generator_state` wherever a seeded random op is created.

    The op then draws from the variable; if the result is None, the op is created as usual.
    """
    return [Patch(gen_random_ops, name, functools.partial(_draw_by_counter, name, find_state)) for name in _MAKERS]


def _draw_by_counter(name: str, find_state: StateFinder, /, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(_MAKERS[name]).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    seeds = int(options["seed"] or 0), int(options["seed2"] or 0)
    state = find_state(*seeds) if any(seeds) else None
    if state is None:
        return _MAKERS[name](*args, **kwargs)
    others = {key: value for key, value in options.items() if key not in ("seed", "seed2", "shape", "name")}
    with tf.name_scope(options["name"] or name):
        shape = tf.convert_to_tensor(options["shape"])
        resource_variable_ops.variable_accessed(state)
        many = tf.cast(tf.reduce_prod(shape), tf.uint64)  # advances the counter for the next draw
        before = tf.raw_ops.RngReadAndSkip(resource=state.handle, alg=_PHILOX, delta=many)
        counter, key = tf.split(tf.bitcast(before, tf.uint64), [2, 1])
        return _STATELESS[name](shape=shape, counter=counter, key=key, alg=_PHILOX, **others)


def make_generator_state(seed: int, seed2: int, name: str) -> Any:
    """A variable with the initial state of a kernel with these seeds: the counter's two numbers, and the key.

    It is not created by the traced function, so that variable creators are not called.
    """
    with tf.init_scope():
        first = tf.constant([0, seed2, seed], tf.int64)
        return resource_variable_ops.ResourceVariable(first, trainable=False, name=name)


_compute_moments = nn._compute_moments_sync

MomentsFunction = Callable[[Any, Sequence[int], bool], tuple[Any, Any] | None]


def patch_moments(compute_moments: MomentsFunction) -> Patch:
    """Call `compute_moments(tensor, axes, keepdims)` for the mean and the variance of synchronized moments.

    If it returns None, Keras computes them.
    """

    def compute(x: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
        found = compute_moments(x, axes, keepdims)
        return _compute_moments(x, axes, keepdims) if found is None else found

    return Patch(nn, "_compute_moments_sync", compute)


def remove_attribute(op: Any, name: str) -> None:
    """Remove an attribute of an op of the graph being traced."""
    op._clear_attr(name)


def list_readers(tensor: Any) -> list[tuple[Any, int]]:
    """The ops of a graph that read a tensor, each with the number of that input."""
    found = dict.fromkeys(tensor.consumers())
    return [(op, place) for op in found for place, read in enumerate(op.inputs) if read is tensor]
