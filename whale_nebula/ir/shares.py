"""Shares of a step by speed: how many micro-batches each replica of a stage takes, and in which order.

An order is a period of replica numbers: micro-batch m goes to `order[m mod len(order)]`. The empty one is the plain
one, in which all take turns. Which replica takes a micro-batch changes how long a step takes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd

Order = tuple[int, ...]

MOST = 8
"""A batch is cut for the sake of shares into at most so many micro-batches for each replica."""

NEAR = 1.05
"""A stage that takes so many times the ideal is near enough: no more micro-batches are made for it."""


def shares(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """How many of `count` micro-batches each replica takes, so that the last one is done as early as can be.

    Each goes to who would be done with it first. Everyone has at least one, where there are enough.

    >>> shares([1, 2], 3), shares([1, 2], 4), shares([1, 1, 8], 20)
    ((1, 2), (1, 3), (2, 2, 16))
    """
    found = [int(replica < count) for replica in range(len(speeds))]
    for _ in range(count - sum(found)):
        found[min(range(len(speeds)), key=lambda r: ((found[r] + 1) / speeds[r], r))] += 1
    return tuple(found)


def order(given: Sequence[int]) -> Order:
    """A period in which each replica has its share, spread as evenly as goes; the plain one where all have the same.

    >>> order([1, 2]), order([2, 4]), order([3, 3]), order([1, 3, 1])
    ((1, 0, 1), (1, 0, 1), (), (1, 0, 1, 2, 1))
    """
    if len(set(given)) <= 1:
        return ()
    common = reduce(gcd, given)
    weights = [share // common for share in given]
    credit = [0] * len(weights)
    found = []
    for _ in range(sum(weights)):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        first = max(range(len(weights)), key=lambda replica: (credit[replica], -replica))
        credit[first] -= sum(weights)
        found.append(first)
    return tuple(found)


def by_speed(speeds: Sequence[float], count: int) -> Order:
    """The order of a stage whose replicas have these speeds; the plain one where none is known, or all are alike.

    >>> by_speed([1, 2], 3), by_speed([2, 2], 3), by_speed([], 3)
    ((1, 0, 1), (), ())
    """
    return order(shares(speeds, count)) if len(set(speeds)) > 1 else ()


def taken(given: Order, replicas: int, count: int) -> tuple[int, ...]:
    """How many of `count` micro-batches each of so many replicas takes by an order.

    >>> taken((1, 0, 1), 2, 4), taken((), 3, 4)
    ((1, 3), (2, 1, 1))
    """
    turns = given or tuple(range(replicas))
    found = [0] * replicas
    for number in range(count):
        found[turns[number % len(turns)]] += 1
    return tuple(found)


def spacing(given: Order, replicas: int, *, least: bool = False) -> float:
    """In how many micro-batches of an order there is one for the replica that has the fewest of them; with `least`, for
    the one that has most.

    >>> spacing((1, 0, 1), 2), spacing((1, 0, 1), 2, least=True), spacing((), 4)
    (3.0, 1.5, 4.0)
    """
    found = taken(given, replicas, len(given) or replicas)
    return sum(found) / (max(found) if least else min(found))


def seconds(given: Sequence[int], speeds: Sequence[float]) -> tuple[float, ...]:
    """How long each replica works on its share, where a speed of one does one micro-batch in a second.

    >>> seconds([1, 3], [1, 2])
    (1.0, 1.5)
    """
    return tuple(share / speed for share, speed in zip(given, speeds, strict=True))


def excess(speeds: Sequence[float], count: int) -> float:
    """How many times as long as the ideal a stage takes, because micro-batches are whole.

    >>> excess([1, 2], 3), excess([1, 2], 2)
    (1.0, 1.5)
    """
    return max(seconds(shares(speeds, count), speeds)) * sum(speeds) / count


def enough(stages: Sequence[Sequence[float]], least: int = 1) -> int:
    """The smallest number of micro-batches, from `least` up, with which the shares of all stages are near enough to
    their speeds; where none within reason is, the one that comes nearest.

    >>> enough([[1, 2]]), enough([[1, 8]]), enough([[1, 2], [1, 3]]), enough([[1, 1]], least=2), enough([])
    (3, 9, 9, 2, 1)
    """
    uneven = [speeds for speeds in stages if len(set(speeds)) > 1]
    first = max([least, *map(len, uneven)])
    tries = range(first, 1 + max([first, *(MOST * len(speeds) for speeds in uneven)]))
    worst = {count: max((excess(speeds, count) for speeds in uneven), default=1.0) for count in tries}
    near = (count for count in tries if worst[count] <= NEAR)
    return next(near, min(tries, key=lambda count: worst[count]))
