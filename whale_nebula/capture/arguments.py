"""Arguments of a step: specs of inputs from the config, so that every process traces the same step, independent of
which inputs it has; and keys of other arguments.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.config import InputSpec
from whale_nebula.errors import AbsentInputError, InputMismatchError, NebulaError, OptionError
from whale_nebula.feed.checks import MissingInput
from whale_nebula.site import script_site


@dataclass(frozen=True)
class DeclaredInputs:
    """The shapes and dtypes that the config declares, by input name; `is_single_process` is whether all clusters are in
    this process.

    >>> declared = DeclaredInputs({"x/target": InputSpec((None, 64), "int32")}, is_single_process=False)
    >>> declared.expand_argument("x", None)
    {'target': None}
    >>> declared.make_placeholder("x/target").shape.as_list()
    [None, 64]
    """

    declared_specs: Mapping[str, InputSpec] = field(default_factory=dict)
    is_single_process: bool = True

    def expand_argument(self, name: str, argument: Any) -> Any:
        """Replace an argument that is None by the structure implied by the declared names of its inputs."""
        inner = [path.removeprefix(f"{name}/") for path in self.declared_specs if path.startswith(f"{name}/")]
        if argument is not None or name in self.declared_specs or not inner:
            return argument
        return _nest_by_path(inner)

    def make_placeholder(self, path: str) -> MissingInput | None:
        """The placeholder for an input that is None, if the config declares its shape and dtype."""
        if path not in self.declared_specs:
            return None
        if self.is_single_process:
            raise AbsentInputError(
                f"input {path!r} is None, and all clusters are in this process",
                where=path,
                why="an input can be None only in a process whose cluster does not read it",
                mend=f'pass {path!r} here: in a single process, nb.here().runs("gpu") is true for every cluster',
            )
        form = self.declared_specs[path]
        return MissingInput(path, tf.TensorSpec(form.shape, form.dtype))

    def spec(self, path: str, tensor: Any) -> tf.TensorSpec:
        """The spec of an input that is present; it must agree with the config, if declared there."""
        if path not in self.declared_specs:
            return tf.TensorSpec(tensor.shape, tensor.dtype)
        form = self.declared_specs[path]
        spec = tf.TensorSpec(form.shape, form.dtype)
        free = tf.TensorShape([None, *spec.shape[1:]] if spec.shape.rank else [])  # any number of rows
        if tensor.dtype != spec.dtype or not free.is_compatible_with(tensor.shape):
            shape = [None, *tensor.shape[1:]] if tensor.shape.rank else []
            written = ", ".join("null" if size is None else str(size) for size in shape)
            raise InputMismatchError(
                f"input {path!r} is {tensor.dtype.name}{shape}, "
                f"but the config specifies {spec.dtype.name}{list(spec.shape)}",
                where=path,
                why="clusters without this input trace the step with the shape and dtype in the config",
                mend=f"inputs: {{{path}: {{shape: [{written}], dtype: {tensor.dtype.name}}}}}",
            )
        return spec


def _nest_by_path(paths: list[str]) -> Any:
    found: dict[str, Any] = {}
    for path in paths:
        first, _, rest = path.partition("/")
        found.setdefault(first, []).append(rest)
    inside = {name: _nest_by_path(rests) if any(rests) else None for name, rests in found.items()}
    return tuple(inside.values()) if all(name.isdigit() for name in inside) else inside


_VALUES = (int, float, complex, str, bytes, enum.Enum, type)


class IdentityKey:
    """A weak reference as a key: it equals only one of the same living object.

    An id would not suffice: Python reuses it for another object, which would then equal this one.

    >>> class Model: ...
    >>> model = Model()
    >>> IdentityKey(model) == IdentityKey(model), IdentityKey(model) == IdentityKey(Model())
    (True, False)
    """

    def __init__(self, thing: Any) -> None:
        self._hash = id(thing)
        try:
            self._found: Any = weakref.ref(thing)
        except TypeError:  # objects without weak references are kept alive
            self._found = lambda: thing

    @property
    def alive(self) -> bool:
        """Whether the object still exists."""
        return self._found() is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.alive and self._found() is other._found()

    def __hash__(self) -> int:
        return self._hash


def make_key(leaf: Any) -> Hashable:
    """A hashable key of an argument: by type and value, otherwise by identity.

    >>> make_key(1) == make_key(True), make_key("a") == make_key("a"), make_key(None)
    (False, True, None)
    """
    if leaf is None:
        return None
    return (type(leaf), leaf) if isinstance(leaf, _VALUES) else IdentityKey(leaf)


def are_alive(keys: tuple[Hashable, ...]) -> bool:
    """Whether the objects of these keys (`make_key`) still exist, so that a call with them is possible.

    >>> are_alive((make_key(1), make_key([])))
    True
    """
    return all(key.alive for key in keys if isinstance(key, IdentityKey))


@contextlib.contextmanager
def explain_missing_target(call: str, model: Any, batch: Sequence[Any]) -> Iterator[None]:
    """Context around the trace of a train step for `call`, such as "nb.plan": an error that follows from a missing y,
    or from a batch in one tuple, is replaced by one that says so.

    The call is not refused in advance: a model with only losses of its own needs no y, and its x may be a tuple.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        if len(batch) != 1 or getattr(model, "loss", None) is None:
            raise
        message = error.what if isinstance(error, NebulaError) else str(error).strip().splitlines()[0]
        where = str(script_site())
        if isinstance(batch[0], tuple) and 1 < len(batch[0]) < 4:
            what = f"{call} got a tuple as x; x, y and sample_weight are separate arguments"
            raise OptionError(what, where=where, why=message, mend=f"{call}(model, *batch)") from error
        if any(word in message for word in _MISSING_TARGET_WORDS):
            what = f"{call} got only x, but the loss of model {model.name!r} needs y"
            raise OptionError(what, where=where, why=message, mend=f"{call}(model, x, y)") from error
        raise


_MISSING_TARGET_WORDS = ("None values", "NoneType", "y_true", "got None")
