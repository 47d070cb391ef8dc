"""Which codec of a way's ladder a step uses: decided by the side that sends, with the first micro-batch of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whale_nebula.codec.objects import Codec
from whale_nebula.codec.way import Way
from whale_nebula.runtime.channels import coding
from whale_nebula.runtime.channels.measuring import distance
from whale_nebula.runtime.channels.state import At, ChannelState

EVERY = 10  # steps, between two looks at the next precision


def begun(way: Way, state: ChannelState, at: At) -> tuple[ChannelState, bool]:
    """Count a step of training; whether the codec is used in this step."""
    if at.training and at.first:
        state = replace(state, steps=state.steps + 1)
    done = state.steps - 1 if at.training else state.steps
    return state, done >= way.start


def climbed(way: Way, state: ChannelState, at: At, x: Any) -> ChannelState:
    """One rung further, where the next precision is near enough."""
    looks = at.training and at.first and (state.steps - 1 - way.start) % EVERY == 0
    if way.auto or not looks or state.rung + 1 >= len(way.rungs):
        return state
    error = relative_error(way.rungs[state.rung + 1], x)
    return replace(state, rung=state.rung + 1) if error <= way.bound else state


def relative_error(codec: Codec | None, x: Any) -> float:
    """How far a precision is from the tensor: the norm of the difference, by the norm of the tensor."""
    precision = coding.precision_of(codec)
    dims, dtype = tuple(int(size) for size in x.shape), x.dtype.name
    return distance(x, precision.decode(precision.encode(x), dims, dtype))
