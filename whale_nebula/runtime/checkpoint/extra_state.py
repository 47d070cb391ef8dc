"""The state of a run other than variables: states of codecs, of a `fit`'s callbacks, and of user objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.checkpoint.manifest import STATES
from whale_nebula.codec.axes import Held
from whale_nebula.codec.deltas import Cache
from whale_nebula.codec.structures import Shared
from whale_nebula.runtime.checkpoint.fit_position import BEFORE_STEP, encode_callbacks, restore_callbacks
from whale_nebula.runtime.checkpoint.objects import (
    Put,
    SavedState,
    Spread,
    check_object,
    decode_value,
    encode_value,
    holds_variables,
    is_spread,
    list_variables,
    read_object,
    write_object,
)
from whale_nebula.runtime.checkpoint.slices import Entry, Source, make_whole_entry
from whale_nebula.runtime.exchange.state import ChannelState

_LOG = logging.getLogger("whale_nebula.runtime.run")
_STRUCTURES: Mapping[str, type] = {kind.__name__: kind for kind in (Shared, Held)}
PLACE, WRITTEN = "place", "written"
"""The keys of the place in a `fit` where the state was taken, and of the name of a variable that the loop writes
between its steps, of which the next write may be missing.
"""
_PLAIN = ("steps", "rung", "version", "codec", "error")


def encode_state(state: ChannelState, put: Put) -> dict[str, Any]:
    """Encode a channel's state as a document; `put` stores its arrays. A user-defined structure is not saved: the
    document says that the state begins anew.
    """
    document: dict[str, Any] = {name: getattr(state, name) for name in _PLAIN}
    if state.cache is not None:
        document["held"] = {name: put(array) for name, array in state.cache.as_arrays().items()}
        document["limit"] = state.cache.limit
    kind = type(state.structure).__name__
    if kind in _STRUCTURES:
        parts = state.structure._asdict().items()
        arrays = {name: put(value) for name, value in parts if isinstance(value, tf.Tensor | tf.Variable | np.ndarray)}
        plain = {name: value for name, value in parts if name not in arrays}
        numpy = [name for name, value in parts if isinstance(value, np.ndarray)]
        document["structure"] = {"kind": kind, "arrays": arrays, "numpy": numpy, "plain": plain}
    elif state.structure is not None:
        document["reset"] = True
    return document


def decode_state(document: Mapping[str, Any], get: Callable[[str], Any]) -> ChannelState | None:
    """Decode a channel's state; None if its structure was not saved. `get` reads arrays by name."""
    if document.get("reset"):
        return None
    cache = structure = None
    if "held" in document:
        cache = Cache.from_arrays({n: get(name).numpy() for n, name in document["held"].items()}, document["limit"])
    if "structure" in document:
        saved = document["structure"]
        arrays = {n: get(name).numpy() if n in saved["numpy"] else get(name) for n, name in saved["arrays"].items()}
        structure = _STRUCTURES[saved["kind"]](**arrays, **saved["plain"])
    return ChannelState(structure=structure, cache=cache, **{name: document[name] for name in _PLAIN})


def make_put(worker: str, entries: list[Entry]) -> Put:
    """A function that adds an array to a worker's entries and returns its name."""

    def put(array: Any) -> str:
        entries.append(make_whole_entry(f"{STATES}{worker}/{len(entries)}", array))
        return entries[-1].name

    return put


@dataclass
class ExtraState:
    """The states of one worker. `channels` are those of codecs by name, `callbacks` those of the running `fit`,
    `objects` those of `nb.state` by name, and `histories` has the results of each finished `fit` by its number.
    `source` is the checkpoint from which the run resumes.

    Objects are saved as they were when the last step returned, because a resumed loop repeats its draws for the next
    step. Variables among them are saved a second time (`late`) before the next step: values that a loop wrote to them
    in between are restored at that point. `has_begun`: that step has been reached. `held_callbacks` are states of some
    callbacks, by their places, which are saved instead of the present ones. `restored_variables` are the variables of
    objects that were restored when a custom loop resumed, by `id`: what the loop writes to them from there on stays.
    """

    worker: str
    channels: MutableMapping[str, Any]
    callbacks: Sequence[Any] = ()
    objects: dict[str, Any] = field(default_factory=dict)
    histories: dict[int, Any] = field(default_factory=dict)
    source: Source | None = None
    has_begun: bool = False
    held_callbacks: Mapping[int, Any] = field(default_factory=dict)
    restored_variables: dict[int, Any] = field(default_factory=dict)
    _read: dict[str, Any] = field(default_factory=dict)

    def read_objects(self, *, spread: bool) -> None:
        """Read the states of user objects after a step. `Spread` objects are read only with `spread`, when they are to
        be saved.
        """
        self._read = {n: read_object(value) for n, value in self.objects.items() if spread or not is_spread(value)}

    def encode(self, entries: list[Entry], ended: bool) -> dict[str, Any]:
        """Encode all states as documents, by kind; their arrays are added to `entries`. If no step is about to begin
        (`ended`), variables among the objects are saved once, with their present values.
        """
        put = make_put(self.worker, entries)
        late = {name: read_object(value) for name, value in self.objects.items() if holds_variables(value)}
        spread = {n: read_object(v) for n, v in self.objects.items() if is_spread(v) and n not in self._read}
        objects = {**self._read, **spread, **(late if ended else {})}
        return {
            "codecs": {name: encode_state(state, put) for name, state in sorted(self.channels.items())},
            "callbacks": encode_callbacks(self.callbacks, put, self.held_callbacks),
            "histories": encode_value(self.histories, put),
            "objects": {name: encode_value(value, put) for name, value in sorted(objects.items())},
            "late": {} if ended else {name: encode_value(value, put) for name, value in sorted(late.items())},
        }

    def _find_saved(self, kind: str, *, own: bool = False) -> Any:
        """The saved document of a kind ("codecs"): that of this worker; if it had no part, that of the first worker,
        unless it must be this worker's `own`. None if there is none.
        """
        parts = {} if self.source is None else self.source.parts
        part = parts.get(self.worker) or (parts[min(parts)] if parts and not own else None)
        return None if part is None else part.memory.get(kind)

    @property
    def _get(self) -> Callable[[str], Any]:
        return self.source.read if self.source is not None else str

    def restore_codecs(self) -> None:
        """Restore the states of this worker's codecs."""
        found: Mapping[str, Any] = self._find_saved("codecs", own=True) or {}
        for name, document in found.items():
            state = decode_state(document, self._get)
            if state is None:
                _LOG.warning("the codec state of %s is of a kind that is not saved: it starts empty", name)
            else:
                self.channels[name] = state

    @property
    def saved_place(self) -> str:
        """The place in a `fit` at which the state of the checkpoint was taken (`fit_position.BEFORE_STEP`)."""
        return self._find_saved(PLACE) or BEFORE_STEP

    def restore_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Restore the states of a `fit`'s callbacks."""
        restore_callbacks(callbacks, self._find_saved("callbacks") or [], self._get)

    def keep_history(self, fit: int, callbacks: Sequence[Any]) -> None:
        """Keep the history of a finished `fit`."""
        self.histories[fit] = next(each.history for each in callbacks if isinstance(each, keras.callbacks.History))

    def count_epochs(self, fit: int) -> int:
        """The number of epochs that a finished `fit` has trained, by its history."""
        self.histories = self.histories or decode_value(self._find_saved("histories"), self._get) or {}
        return max(map(len, self.histories.get(fit, {}).values()), default=0)

    def restore_history(self, fit: int, callbacks: Sequence[Any], first_epoch: int) -> None:
        """Restore the history of this `fit`, which began with this epoch, if it was finished, and trains nothing."""
        count = self.count_epochs(fit)
        for each in callbacks:
            if isinstance(each, keras.callbacks.History) and fit in self.histories:
                each.history, each.epoch = self.histories[fit], list(range(first_epoch, first_epoch + count))

    def add_object(self, name: str, value: Any) -> None:
        """Register an object of `nb.state` for saving, and restore its state if the run resumes."""
        check_object(name, value)
        self.objects[name] = value
        if is_spread(value):
            self._restore_parts(name, value)
            return
        saved: Mapping[str, Any] = self._find_saved("objects") or {}
        if name in saved:
            write_object(value, decode_value(saved[name], self._get))
            if self.source is not None and not self.source.manifest.position.fit:
                self.restored_variables |= {id(each): each for each in list_variables(value)}

    @property
    def written_between_steps(self) -> str:
        """The name of a variable that the saved loop wrote between its steps, if the next write is missing."""
        return self._find_saved(WRITTEN) or ""

    def restore_late(self) -> None:
        """Before the first step: restore what the saved run wrote to variables of `objects` after its last step."""
        saved: Mapping[str, Any] = {} if self.has_begun else self._find_saved("late") or {}
        self.has_begun = True
        for name in saved.keys() & self.objects.keys():
            write_object(self.objects[name], decode_value(saved[name], self._get))

    def _restore_parts(self, name: str, value: Spread) -> None:
        """Restore an object that is spread over workers from the states that each has saved."""
        if self.source is None:
            return
        saved = {worker: part.memory.get("objects", {}) for worker, part in self.source.parts.items()}
        parts = {worker: SavedState(each[name], self._get) for worker, each in saved.items() if name in each}
        value.load_parts(parts, self.worker, complete=self.source.parts.keys() == self.source.manifest.workers.keys())
