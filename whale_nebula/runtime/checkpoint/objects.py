"""User objects that are saved with a run, and their states as documents."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.errors import OptionError

Put = Callable[[Any], str]
"""A function that stores an array and returns the name by which it is read."""
_ARRAY, _TUPLE, _DICT = "array", "tuple", "dict"


class Stateful(Protocol):
    """The interface by which objects of other types are saved."""

    def state_dict(self) -> Any:
        """The state: numbers, strings, arrays, and lists and dicts of these."""

    def load_state_dict(self, state: Any) -> None:
        """Restore a state."""


@dataclass(frozen=True)
class SavedState:
    """The state of an object as one worker has saved it; `get` reads an array by its name."""

    document: Any
    get: Callable[[str], Any]

    def read(self) -> Any:
        """The complete state."""
        return decode_value(self.document, self.get)

    def read_plain(self) -> Any:
        """The state with None instead of arrays."""
        return decode_value(self.document, lambda name: None)


class Spread(Stateful, Protocol):
    """An object of which each worker has a part, and which only steps change. If a run resumes with other workers, the
    parts are redistributed. It may be large, so it is read only when it is saved, and not copied: the arrays of its
    `state_dict` must not be modified afterwards.
    """

    def load_parts(self, parts: Mapping[str, SavedState], worker: str, complete: bool) -> None:
        """Restore the states that workers have saved, by their names; this `worker` selects its own part when it
        trains. `complete` is true unless other workers have saved more, in files that are missing here.
        """


def encode_value(value: Any, put: Put) -> Any:
    """Encode a value as JSON, with its arrays stored separately.

    >>> encode_value({"best": np.float32(0.5), "seen": (1, 2)}, lambda array: "a")
    {'dict': [['best', 0.5], ['seen', {'tuple': [1, 2]}]]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray | tf.Tensor | tf.Variable):
        return {_ARRAY: put(value)}
    if isinstance(value, Mapping):
        return {_DICT: [[_encode_key(key), encode_value(each, put)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [encode_value(each, put) for each in value]}
    if isinstance(value, list):
        return [encode_value(each, put) for each in value]
    if isinstance(value, float):  # JSON has no infinity
        return {"float": value.hex()} if value != value or value in (float("inf"), -float("inf")) else value
    if value is None or isinstance(value, bool | int | str):
        return value
    raise OptionError(
        f"a state contains a {type(value).__name__}, which cannot be saved",
        why="it may contain numbers, strings, arrays, and lists, tuples and dicts of these",
        mend="return only such values from the state_dict() of the object",
    )


def decode_value(document: Any, get: Callable[[str], Any]) -> Any:
    """Decode a document of `encode_value`; `get` reads an array by its name, or returns None to leave it out."""
    if isinstance(document, list):
        return [decode_value(each, get) for each in document]
    if not isinstance(document, dict):
        return document
    ((kind, inner),) = document.items()
    if kind == _ARRAY:
        found = get(inner)
        return None if found is None else found.numpy()
    if kind == _DICT:
        return {_decode_key(key): decode_value(each, get) for key, each in inner}
    if kind == _TUPLE:
        return tuple(decode_value(each, get) for each in inner)
    return float.fromhex(inner)


def _encode_key(key: Any) -> Any:
    return key.item() if isinstance(key, np.generic) else key


def _decode_key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def check_object(name: str, value: Any) -> None:
    """Refuse an object whose state cannot be saved and restored."""
    if not (isinstance(value, np.random.Generator | random.Random) or _variables_of(value) or _has_state(value)):
        raise OptionError(
            f"nb.state({name}=...) got a {type(value).__name__}, which has no state that can be saved",
            why="it must be a tf.Variable, a Keras object or a tf.Module with variables, a np.random.Generator, a "
            "random.Random, or an object with state_dict() and load_state_dict(state)",
            mend="add these two methods to the object",
        )


def holds_variables(value: Any) -> bool:
    """Whether an object is saved as variables, which the script may write at any time."""
    return bool(list_variables(value))


def is_spread(value: Any) -> bool:
    """Whether each worker has a part of an object."""
    return callable(getattr(value, "load_parts", None))


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def list_variables(value: Any) -> list[Any]:
    """The variables as which an object is saved; none if it has a state of its own."""
    return [] if _has_state(value) else _variables_of(value)


def _variables_of(value: Any) -> list[Any]:
    found = getattr(value, "variables", None)
    if isinstance(value, tf.Variable | keras.Variable):
        found = [value]
    elif not isinstance(found, list | tuple):  # a generator of random numbers has one, its state
        found = [each for each in [getattr(value, "state", None)] if isinstance(each, tf.Variable | keras.Variable)]
    return [each if isinstance(each, tf.Variable) else getattr(each, "value", each) for each in found]


def read_object(value: Any) -> Any:
    """The state of an object as plain values and arrays, which later changes of the object do not affect."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if _has_state(value):
        return value.state_dict() if is_spread(value) else copy_state(value.state_dict())
    return [variable.read_value() for variable in _variables_of(value)]


def copy_state(state: Any) -> Any:
    """A deep copy of a state, whose lists and arrays may belong to the object."""
    if isinstance(state, np.ndarray):
        return state.copy()
    if isinstance(state, tf.Variable):
        return state.read_value()
    if isinstance(state, Mapping):
        return {key: copy_state(each) for key, each in state.items()}
    if isinstance(state, list | tuple):
        return (list if isinstance(state, list) else tuple)(map(copy_state, state))
    return state


def write_object(value: Any, state: Any) -> None:
    """Restore a state that `read_object` returned."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif _has_state(value):
        value.load_state_dict(state)
    else:
        for variable, array in zip(_variables_of(value), state, strict=True):
            variable.assign(array)
