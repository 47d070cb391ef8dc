"""The cheapest way to part a small network in two: ops that run early from ops that run late."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping

Edges = Mapping[tuple[Hashable, Hashable], int]
FREELY = 1 << 62
"""The capacity of an edge that is never cut."""


def far_side(edges: Edges, source: Hashable, sink: Hashable) -> set[Hashable]:
    """The nodes on the sink's side of a minimum cut; where several cuts are as cheap, the fewest nodes.

    A cut costs the edges that lead from the source's side to the sink's.

    >>> sorted(far_side({("early", "a"): 5, ("a", "b"): 9, ("b", "late"): 7}, "early", "late"))
    ['a', 'b', 'late']
    >>> sorted(far_side({("early", "a"): 7, ("a", "b"): 9, ("b", "late"): 7}, "early", "late"))
    ['late']
    """
    left: dict[Hashable, dict[Hashable, int]] = {source: {}, sink: {}}
    for (start, end), capacity in edges.items():
        left.setdefault(start, {})[end] = left.get(start, {}).get(end, 0) + capacity
        left.setdefault(end, {}).setdefault(start, 0)
    while path := _path(left, source, sink):
        most = min(left[start][end] for start, end in path)
        for start, end in path:
            left[start][end] -= most
            left[end][start] += most
    return _reaching(left, sink)


def _path(
    left: Mapping[Hashable, Mapping[Hashable, int]], source: Hashable, sink: Hashable
) -> list[tuple[Hashable, Hashable]]:
    """A shortest way on which more can flow, as its edges from the last to the first; empty if there is none."""
    before: dict[Hashable, Hashable] = {source: source}
    queue = deque([source])
    while queue and sink not in before:
        node = queue.popleft()
        for end, capacity in left[node].items():
            if capacity > 0 and end not in before:
                before[end] = node
                queue.append(end)
    path = []
    node = sink
    while node != source and node in before:
        path.append((before[node], node))
        node = before[node]
    return path


def _reaching(left: Mapping[Hashable, Mapping[Hashable, int]], sink: Hashable) -> set[Hashable]:
    """The nodes from which more could flow to the sink. An edge and its way back know each other's node."""
    found = {sink}
    queue = deque([sink])
    while queue:
        node = queue.popleft()
        fresh = [start for start in left[node] if start not in found and left[start][node] > 0]
        found.update(fresh)
        queue.extend(fresh)
    return found
