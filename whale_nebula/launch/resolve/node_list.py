"""Slurm's short forms: `gpu[01-04,07]` for nodes, `2(x3),1` for the tasks on each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from whale_nebula.errors import ConfigError

_MOST = 100_000
_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def nodes(text: str) -> list[str]:
    """All the names that a node list stands for, in its order.

    >>> nodes("gpu[01-03,07]"), nodes("a,b[1-2]c[0,5]")
    (['gpu01', 'gpu02', 'gpu03', 'gpu07'], ['a', 'b1c0', 'b1c5', 'b2c0', 'b2c5'])
    """
    parts = _PART.findall(text)
    if not parts or ",".join(parts) != text:
        raise _unread(text, "gpu[01-04,07]")
    found: list[str] = []
    for part in parts:
        found += itertools.islice(_expanded(text, part), _MOST + 1 - len(found))
        if len(found) > _MOST:
            raise _unread(text, "gpu[01-04,07]")
    return found


def _expanded(text: str, part: str) -> Iterator[str]:
    pieces = _BRACKETS.split(part)
    fixed, ranges = pieces[::2], [_numbers(text, each) for each in pieces[1::2]]
    for numbers in itertools.product(*ranges):
        yield "".join(a + b for a, b in itertools.zip_longest(fixed, numbers, fillvalue=""))


def _numbers(text: str, ranges: str) -> list[str]:
    found: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or high < low or high - low >= _MOST:
            raise _unread(text, "gpu[01-04,07]")
        found += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return found


def tasks(text: str) -> list[int]:
    """How many tasks each node has.

    >>> tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for each in text.split(","):
        match = _TASKS.fullmatch(each)
        if match is None or int(match[2] or 1) > _MOST:
            raise _unread(text, "2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _unread(text: str, example: str) -> ConfigError:
    return ConfigError(
        f"Slurm's {text[:80]!r} cannot be read",
        why=f"it is written like {example}",
        mend="list the workers in the config: --config clusters.yaml --cluster gpu --worker 0",
    )
