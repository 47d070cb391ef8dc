"""Pinned plans: a run that was given saved plans refuses a step that is planned in another way now."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whale_nebula.errors import NebulaWarning, OptionError, PlanMismatchError
from whale_nebula.ir.face import Plan
from whale_nebula.ir.plan_difference import plan_difference
from whale_nebula.suggest import listed

Pinned = str | os.PathLike[str] | Plan
"""A plan to hold a step against, or the file that it was saved in."""

_WORDS = "now", "in the pinned plan"


@dataclass
class Pins:
    """The pinned plans of a run by the name of their step, each with where it comes from."""

    plans: Mapping[str, tuple[Plan, str]] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.plans

    def __bool__(self) -> bool:
        return bool(self.plans)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that is not the pinned one of its name."""
        pinned, source = self.plans[plan.name]
        self.met.add(plan.name)
        difference = plan_difference(plan, pinned, _WORDS)
        if difference is not None:
            raise PlanMismatchError(
                f"{plan.name} is not planned as it was pinned",
                where=source,
                why=difference,
                mend="change it back; or pin it anew: whale-nebula show train.py --save plan.json, "
                "or nb.plan(model, x, y).save(path);\nor leave plan= out of nb.init",
            )

    def miss(self, name: str) -> None:
        """Say once that a step has no pin, unless another step of its model has one."""
        subject = name.rpartition(".")[0]
        if name in self.met or any(subject and known.rpartition(".")[0] == subject for known in self.plans):
            return
        self.met.add(name)
        pinned = listed(self.plans)
        _warn(f"{name} has no pinned plan", f"those pinned are {pinned}", "pin it too: nb.init(plan=[..., path])")

    def close(self) -> None:
        """At the end of the run, say which pins no step was held against."""
        for name, (_, source) in self.plans.items():
            if name not in self.met:
                steps = f"the steps that ran with scopes are {listed(sorted(self.met))}" if self.met else ""
                _warn(f"{name} has a pinned plan, and no such step was run", steps, f"leave {source} out of plan=")


def _warn(what: str, why: str, mend: str) -> None:
    warnings.warn(NebulaWarning(what, why=why, mend=mend), stacklevel=3)


def pins(given: Any, site: str) -> Pins:
    """Read the pinned plans: a path or a plan, or several."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, os.PathLike))
    plans: dict[str, tuple[Plan, str]] = {}
    for each in given if several else [] if given is None else [given]:
        plan, source = _read(each, site)
        if plan.name in plans:
            raise OptionError(
                f"two plans pin {plan.name}: {plans[plan.name][1]} and {source}",
                where=site,
                why="a step has one plan",
                mend=f"leave one of them out: nb.init(plan={source!r})",
            )
        plans[plan.name] = plan, source
    return Pins(plans)


def _read(given: Any, site: str) -> tuple[Plan, str]:
    if isinstance(given, Plan):
        return given, site
    if isinstance(given, (str, os.PathLike)):
        return Plan.load(given), os.fspath(given)
    raise OptionError(
        f"plan={given!r} is neither a path nor a plan",
        where=site,
        why="it names files that Plan.save has written",
        mend='nb.init(plan="plan.json"), or a list of them: one for each step',
    )
