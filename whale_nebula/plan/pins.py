"""Pinned and approved plans: refuse a step whose plan differs from the saved one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale_nebula.errors import NotApprovedError, OptionError, PlanError, PlanMismatchError
from whale_nebula.errors.text import list_names
from whale_nebula.plan.plan import Plan, parse_plan
from whale_nebula.security.approval import FoundApproval, check_process, read_plan
from whale_nebula.site import Site, script_site, warn_at

Pinned = str | os.PathLike[str] | Plan
"""A plan to compare a step with, or the file that it was saved in."""


@dataclass
class Pins:
    """The pinned plans of a run by the name of their step, each with its origin; `site` opened the run."""

    plans: Mapping[str, tuple[Plan, str]] = field(default_factory=dict)
    site: str = ""
    seen_steps: set[str] = field(default_factory=set)
    renumbered: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.plans)

    def find_pin(self, name: str) -> str | None:
        """The name under which a step is pinned: its own, or the only one that differs just in Keras's number.

        Keras names a model without a name after its class, with a number that counts within a process: `functional_1`.
        """
        if name in self.plans:
            return name
        if name not in self.renumbered:
            alike = [
                known
                for known in self.plans
                if _strip_number(known) == _strip_number(name) and known not in self.seen_steps
            ]
            if len(alike) != 1:
                return None
            self.renumbered[name] = alike[0]
        return self.renumbered[name]

    def check(self, plan: Plan, pin: str) -> None:
        """Refuse a plan that is not the pinned one."""
        pinned, source = self.plans[pin]
        self.seen_steps.add(pin)
        difference = plan.difference(pinned, ("now", "in the pinned plan"))
        if difference is not None:
            raise PlanMismatchError(
                f"the plan of {plan.name} differs from the pinned plan{f' of {pin}' if pin != plan.name else ''}",
                where=source,
                why=difference,
                mend="undo the change; or pin the new plan: whale-nebula show train.py --save plan.json, "
                "or nb.plan(model, x, y).save(path);\nor remove plan= from nb.init; if only the numbers that Keras "
                'adds to names differ: keras.Model(..., name="mine"), and a name for each layer and the optimizer',
            )

    def warn_unpinned(self, name: str) -> None:
        """Warn once that a step has no pin, unless another step of its model has one."""
        model, _, step = _strip_number(name).rpartition(".")
        pinned = [_strip_number(known).rpartition(".") for known in self.plans]
        if name in self.seen_steps or any(model and each == model and other != step for each, _, other in pinned):
            return
        self.seen_steps.add(name)
        warn_at(
            script_site(),
            f"{name} has no pinned plan, so it runs with a new plan",
            why=f"pins are found by the step's name; pinned steps: {list_names(self.plans)}",
            mend="give the model the name that was pinned: keras.Model(..., name=...); or pin this step, too: "
            "nb.init(plan=[..., path])",
        )

    def close(self) -> None:
        """At the end of the run, warn of pins without a matching step."""
        for name, (_, source) in self.plans.items():
            if name not in self.seen_steps:
                steps = f"steps that ran with scopes: {list_names(sorted(self.seen_steps))}" if self.seen_steps else ""
                file, _, line = self.site.rpartition(":")
                what = f"{name} has a pinned plan, but no step of that name has run"
                warn_at(Site(file, int(line)), what, why=steps, mend=f"remove {source} from plan=")


def _strip_number(name: str) -> str:
    """The name of a step without the number that Keras added to its model.

    >>> _strip_number("functional_1.train_step"), _strip_number("net.train_step"), _strip_number("step_2")
    ('functional.train_step', 'net.train_step', 'step_2')
    """
    return re.sub(r"_\d+(?=\.\w+$)", "", name)


def read_pins(pinned_plan: Any, site: str) -> Pins:
    """Read the pinned plans: a path or a plan, or several."""
    several = isinstance(pinned_plan, Iterable) and not isinstance(pinned_plan, (str, os.PathLike))
    plans: dict[str, tuple[Plan, str]] = {}
    for each in pinned_plan if several else [] if pinned_plan is None else [pinned_plan]:
        plan, source = _read_pinned(each, site)
        if plan.name in plans:
            raise OptionError(
                f"two plans pin {plan.name}: {plans[plan.name][1]} and {source}",
                where=site,
                why="a step has only one plan",
                mend=f"remove one of them: nb.init(plan={source!r})",
            )
        plans[plan.name] = plan, source
    return Pins(plans, site)


def _read_pinned(pinned_plan: Any, site: str) -> tuple[Plan, str]:
    if isinstance(pinned_plan, Plan):
        return pinned_plan, site
    if isinstance(pinned_plan, (str, os.PathLike)):
        if not os.path.exists(pinned_plan):
            raise PlanError(
                f"the pinned plan {os.fspath(pinned_plan)!r} does not exist",
                where=site,
                why=f"relative paths start at {os.getcwd()}",
                mend=f"write it with whale-nebula show train.py --save {os.path.basename(pinned_plan)}, "
                "or nb.plan(model, x, y).save(path)",
            )
        return Plan.load(pinned_plan), os.fspath(pinned_plan)
    raise OptionError(
        f"plan={pinned_plan!r} is neither a path nor a plan",
        where=site,
        why="plan= takes files that Plan.save has written",
        mend='nb.init(plan="plan.json"), or a list with one plan for each step',
    )


@dataclass
class Approvals:
    """The approvals in a folder, one of which must be for the code of this process."""

    folder: Path
    approvals: Sequence[FoundApproval]
    pins: dict[Path, Pins] = field(default_factory=dict)

    def check(self, plan: Plan) -> None:
        """Refuse a step whose plan, or whose code, was not approved."""
        chosen = check_process(self.folder, self.approvals)
        steps = {} if chosen.approval is None else chosen.approval.plans
        pins = self.pins.setdefault(chosen.folder, Pins(dict.fromkeys(steps, (plan, ""))))
        step = pins.find_pin(plan.name)
        if step is None:
            raise NotApprovedError(
                f"{plan.name} is not approved",
                where=str(chosen.folder),
                why=f"approved steps: {list_names(steps)}",
            )
        pins.seen_steps.add(step)
        approved = parse_plan(read_plan(chosen, step), str(chosen.folder))
        difference = plan.difference(approved, ("here", "in the approved plan"))
        if difference is not None:
            raise NotApprovedError(
                f"the plan of {plan.name} differs from the approved plan", where=str(chosen.folder), why=difference
            )
