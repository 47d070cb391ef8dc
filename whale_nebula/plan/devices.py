"""What a picture of a plan says of the devices of a split stage, in few words: what lies how, and what crosses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from whale_nebula.plan.records import PlanStage
from whale_nebula.report.records import size

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

_SHOWN = 2
"""So many variables are named, the largest ones."""
_VARIABLE = re.compile(r"variable (\S+) \w+\[([\d,]*)\]")


def list_device_facts(plan: Plan, stage: PlanStage) -> Iterator[tuple[str, str]]:
    """How many devices there are and what each holds, how the largest variables lie, and what crosses between devices
    in a step, by its kind. Nothing of a stage that is not split.
    """
    if stage.shards < 2:
        return
    yield "devices", f"{stage.shards}, {size(stage.shard_bytes)} each"
    sizes = {found[1]: _count_entries(found[2]) for found in map(_VARIABLE.match, plan.lines) if found}
    held = sorted((path for path in stage.variables if path in plan.layouts), key=lambda path: -sizes.get(path, 0))
    shown = held if len(held) == _SHOWN + 1 else held[:_SHOWN]
    yield from ((path, plan.layouts[path]) for path in shown)
    if len(held) > len(shown):
        yield "in pieces, too", f"{len(held) - len(shown)} variables"
    own = [each for each in plan.collectives if each.stage == stage.name]
    for kind in dict.fromkeys(each.kind for each in sorted(own, key=lambda each: -each.bytes * each.times)):
        alike = [each for each in own if each.kind == kind]
        total, times = sum(each.bytes * each.times for each in alike), sum(each.times for each in alike)
        yield kind, f"{size(total)} in {times}"


def _count_entries(shape: str) -> int:
    return prod(int(entries) for entries in shape.split(",") if entries)
