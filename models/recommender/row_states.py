"""Saved states of tables of rows: validation, and merging of the states of several workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from whale_nebula.errors import WeightsError

from .shares import Share

PendingPush = tuple[np.ndarray, np.ndarray]
"""The distinct ids of a push whose update is still to be made, and their gradients."""
State = dict[str, Any]


def check_state(state: State, width: int, optimizer: str) -> None:
    """Refuse a state that does not match a table of this width and optimizer."""
    if missing := [each for each in ("ids", "counts", "values", "steps", "optimizer", "width") if each not in state]:
        raise WeightsError(
            f"this is not the state of an embedding table: {missing[0]!r} is missing",
            mend="pass the result of state_dict()",
        )
    for name, mine in (("width", width), ("optimizer", optimizer)):
        if state[name] != mine:
            raise WeightsError(
                f"the saved rows have {name} {state[name]!r}, but the table has {mine!r}",
                mend=f"create the table with {name}={state[name]!r}",
            )


def read_share(state: State) -> Share | None:
    """The share whose rows a state has; None for a table that was not used in the process that saved it."""
    saved = state.get("share")
    return None if saved is None else Share(*map(int, saved))


def pack_pending(pending: Iterable[PendingPush]) -> State:
    """Pending updates as arrays of a state; empty if there are none."""
    pairs = list(pending)
    if not pairs:
        return {}
    ids, gradients = zip(*pairs, strict=True)
    lengths = np.array([len(each) for each in ids])
    return {"waiting": lengths, "waiting_ids": np.concatenate(ids), "waiting_gradients": np.concatenate(gradients)}


def unpack_pending(state: State) -> list[PendingPush]:
    """The pending updates of a state."""
    if "waiting" not in state:
        return []
    ends = np.cumsum(state["waiting"])[:-1]
    ids, gradients = (np.split(np.asarray(state[f"waiting_{name}"]), ends) for name in ("ids", "gradients"))
    return list(zip(ids, gradients, strict=True))


def join_states(states: Sequence[State], share: Share) -> State:
    """Merge states, which have had the same updates, to one with the rows of a share; if several have an id, the first
    one's row is used.
    """
    ids, picked = _pick([np.asarray(state["ids"], np.int64) for state in states], share)
    names = ("counts", "values")
    arrays = {name: np.concatenate([np.asarray(state[name]) for state in states])[picked] for name in names}
    pending = []
    for pushes in zip(*map(unpack_pending, states), strict=True):
        pushed, places = _pick([each for each, _ in pushes], share)
        pending.append((pushed, np.concatenate([each for _, each in pushes])[places]))
    return {**states[0], "ids": ids, **arrays, "share": list(share), **pack_pending(pending)}


def _pick(ids: Sequence[np.ndarray], share: Share) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids of a share among several arrays, and the first place of each in their concatenation."""
    joined = np.concatenate(ids)
    places = np.flatnonzero(share.owns(joined))
    found, first = np.unique(joined[places], return_index=True)
    return found, places[first]
