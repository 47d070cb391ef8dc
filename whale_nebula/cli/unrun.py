"""What `nb.last_report()` gives in a script that is only shown: the plan's stages and links, and no numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whale_nebula.report.records import LinkReport, StageReport
from whale_nebula.report.report import Report

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


class UnrunReport(Report):
    """The report of a step that was planned and not run. It prints, and writes no file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Nothing is written: nothing was measured."""

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Nothing is written: nothing was measured."""

    def __str__(self) -> str:
        return "no report: the script is only shown, and no step was run"


def unrun(plans: Sequence[Plan]) -> UnrunReport:
    """The report of the last of these plans.

    >>> print(unrun([]))
    no report: the script is only shown, and no step was run
    """
    plan = plans[-1] if plans else None
    return UnrunReport(
        program=plan.name if plan is not None else "",
        step=0,
        step_seconds=0.0,
        micro_batches=plan.micro_batch if plan is not None else 1,
        stages={name: StageReport(0.0, 0.0, each.cluster) for name, each in plan.stages.items()} if plan else {},
        links={name: LinkReport() for name in plan.links} if plan else {},
    )
