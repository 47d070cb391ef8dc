"""The approvals of a run whose cluster runs approved programs alone: the plan of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whale_nebula.errors import NotApprovedError
from whale_nebula.errors.text import list_names
from whale_nebula.plan.file import parse, plan_difference
from whale_nebula.plan.pins import Pins
from whale_nebula.plan.plan import Plan
from whale_nebula.security.approval import Found, read_plan
from whale_nebula.security.approved import check_process

_WORDS = "here", "in the approved plan"


@dataclass
class Approvals:
    """The approvals in a folder, of which one is of the code of this process."""

    folder: Path
    found: Sequence[Found]
    pins: dict[Path, Pins] = field(default_factory=dict)

    def check(self, plan: Plan) -> None:
        """Refuse a step that is not planned as it was approved, or comes of code that was not."""
        chosen = check_process(self.folder, self.found)
        steps = {} if chosen.approval is None else chosen.approval.plans
        pins = self.pins.setdefault(chosen.folder, Pins(dict.fromkeys(steps, (plan, ""))))
        step = pins.pin_of(plan.name)
        if step is None:
            raise NotApprovedError(
                f"{plan.name} is not approved",
                where=str(chosen.folder),
                why=f"the steps that were approved are {list_names(steps)}",
            )
        pins.met.add(step)
        approved = parse(Plan, read_plan(chosen, step), str(chosen.folder))
        difference = plan_difference(plan, approved, _WORDS)
        if difference is not None:
            raise NotApprovedError(
                f"{plan.name} is not planned as it was approved", where=str(chosen.folder), why=difference
            )
