"""What codecs remember, as a document and arrays, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.axes import Held
from whale_nebula.codec.deltas import Cache
from whale_nebula.codec.structures import Shared
from whale_nebula.runtime.checkpoint.objects import Put
from whale_nebula.runtime.exchange.state import ChannelState

_STRUCTURES: Mapping[str, type] = {kind.__name__: kind for kind in (Shared, Held)}
_PLAIN = ("steps", "rung", "version", "codec", "error")


def encode_state(state: ChannelState, put: Put) -> dict[str, Any]:
    """A channel's state as a document. A structure of the user's own is left out: it begins anew."""
    document: dict[str, Any] = {name: getattr(state, name) for name in _PLAIN}
    if state.held is not None:
        document["held"] = {name: put(array) for name, array in state.held.as_arrays().items()}
        document["limit"] = state.held.limit
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
    """The state that a document tells of; None where it begins anew. `get` finds arrays by their names."""
    if document.get("reset"):
        return None
    state = ChannelState(**{name: document[name] for name in _PLAIN})
    held = structure = None
    if "held" in document:
        held = Cache.of_arrays({n: get(name).numpy() for n, name in document["held"].items()}, document["limit"])
    if "structure" in document:
        said = document["structure"]
        arrays = {n: get(name).numpy() if n in said["numpy"] else get(name) for n, name in said["arrays"].items()}
        structure = _STRUCTURES[said["kind"]](**arrays, **said["plain"])
    return ChannelState(
        state.steps, state.rung, state.version, structure, held, state.codec, state.error,
    )  # fmt: skip
