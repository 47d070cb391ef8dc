"""Which ops of a trace are not the user's: inputs, captures, gradients to come, and feeds of ours."""

from __future__ import annotations

from whale_nebula.capture.tracing import Tracing
from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT


def roles(trace: Tracing) -> dict[str, tuple[str, str]]:
    """Op name to (role, name) for the ops of a trace that only hold something."""
    found = {leaf.op.name: (INPUT, leaf.op.name) for leaf in trace.leaves}
    for _, internal in trace.graph.captures:
        found[internal.op.name] = (CAPTURE, internal.op.name)
    for request in trace.requests:
        for _, tensors in request.holders:
            found.update({t.op.name: (HOLDER, t.op.name) for t in tensors})
        found.update({feed.op.name: (FEED, "arrival") for _, feed in request.arrivals})
    found.update({tensor.op.name: (FEED, name) for name, tensor in trace.feeds.items()})
    return found
