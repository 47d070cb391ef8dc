"""The forms that the config gives to inputs, so that every process traces the same step, whichever of them it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.config import InputSpec
from whale_nebula.errors import AbsentInputError, InputMismatchError
from whale_nebula.feed.missing import Missing


@dataclass(frozen=True)
class Declared:
    """Shapes and element types by the names of inputs; `alone` says that all clusters are in this process.

    >>> forms = Declared({"x/target": InputSpec((None, 64), "int32")}, alone=False)
    >>> forms.unfolded("x", None)
    {'target': None}
    >>> forms.missing("x/target").shape.as_list()
    [None, 64]
    """

    forms: Mapping[str, InputSpec] = field(default_factory=dict)
    alone: bool = True

    def unfolded(self, name: str, argument: Any) -> Any:
        """An argument that is None as a whole has the structure that the names of its inputs tell."""
        inner = [path.removeprefix(f"{name}/") for path in self.forms if path.startswith(f"{name}/")]
        if argument is not None or name in self.forms or not inner:
            return argument
        return _nested(inner)

    def missing(self, path: str) -> Missing | None:
        """What stands for an input that is None, if the config names it."""
        if path not in self.forms:
            return None
        if self.alone:
            raise AbsentInputError(
                f"input {path!r} is None, and all clusters are in this process",
                where=path,
                why="only a process of another cluster may leave it out",
                mend=f"give {path!r} here: nb.here().runs(\"gpu\") is true for every cluster in one process",
            )
        form = self.forms[path]
        return Missing(path, tf.TensorSpec(form.shape, form.dtype))

    def spec(self, path: str, tensor: Any) -> tf.TensorSpec:
        """The form of an input that is here, which must be as the config says, if it says anything."""
        if path not in self.forms:
            return tf.TensorSpec(tensor.shape, tensor.dtype)
        form = self.forms[path]
        spec = tf.TensorSpec(form.shape, form.dtype)
        if tensor.dtype != spec.dtype or not _free(spec.shape).is_compatible_with(tensor.shape):
            raise _unlike(path, spec, tensor)
        return spec


def _free(shape: tf.TensorShape) -> tf.TensorShape:
    """A shape whose rows do not matter."""
    return tf.TensorShape([None, *shape[1:]] if shape.rank else [])


def _nested(paths: list[str]) -> Any:
    found: dict[str, Any] = {}
    for path in paths:
        first, _, rest = path.partition("/")
        found.setdefault(first, []).append(rest)
    inside = {name: _nested(rests) if any(rests) else None for name, rests in found.items()}
    return tuple(inside.values()) if all(name.isdigit() for name in inside) else inside


def _unlike(path: str, spec: tf.TensorSpec, tensor: Any) -> InputMismatchError:
    shape = [None, *tensor.shape[1:]] if tensor.shape.rank else []
    written = ", ".join("null" if size is None else str(size) for size in shape)
    return InputMismatchError(
        f"input {path!r} is {tensor.dtype.name}{shape}, and the config says {spec.dtype.name}{list(spec.shape)}",
        where=path,
        why="clusters that do not have it trace the step by what the config says",
        mend=f"inputs: {{{path}: {{shape: [{written}], dtype: {tensor.dtype.name}}}}}",
    )
