"""Failpoints: named places in the library at which a plan of faults makes something happen.

They do nothing unless a plan is given, in code (`with planned(FaultPlan.parse("update.begun=kill@3")): ...`) or by
the environment variable WHALE_NEBULA_FAILPOINTS, which each process reads once.

>>> from whale_nebula.testing.fault_plan import FaultPlan
>>> failpoint("step.before")
>>> with planned(FaultPlan()) as plan:
...     failpoint("step.before")
>>> plan.reached
Counter({'step.before': 1})
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping

from whale_nebula.testing.fault_plan import Drop, FaultPlan
from whale_nebula.testing.points import POINTS

VARIABLE = "WHALE_NEBULA_FAILPOINTS"
_LOG = logging.getLogger("whale_nebula.testing")

_plan: FaultPlan | None = None


def failpoint(name: str, drop: Drop | None = None) -> None:
    """Be at a failpoint; `drop` breaks the connection that is there, if one is."""
    if _plan is not None:
        _plan.reach(name, drop)


def chunk_failpoint(when: str, first: bool, last: bool, drop: Drop) -> None:
    """Be before or after a chunk is sent; the only chunk of a tensor is its first and its last."""
    if _plan is None:
        return
    if first:
        _plan.reach(f"chunk.first.{when}", drop)
    if last:
        _plan.reach(f"chunk.last.{when}", drop)
    if not first and not last:
        _plan.reach(f"chunk.middle.{when}", drop)


def names() -> Mapping[str, str]:
    """Every failpoint, and where it is.

    >>> names()["update.after"]
    'the update is applied, its scalars have crossed'
    """
    return {name: point.what for name, point in POINTS.items()}


@contextlib.contextmanager
def planned(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Let a plan hold, for the whole process, while this is open."""
    global _plan
    before, _plan = _plan, plan
    try:
        yield plan
    finally:
        _plan = before


def _from_environment(environment: Mapping[str, str]) -> FaultPlan | None:
    text = environment.get(VARIABLE)
    if not text:
        return None
    identity = environment.get("WHALE_NEBULA_WORKER")
    plan = FaultPlan.parse(text, worker=json.loads(identity).get("worker") if identity else None)
    _LOG.warning("faults are planned in this process: %s", ", ".join(map(str, plan.faults)) or "none")
    return plan


_plan = _from_environment(os.environ)
