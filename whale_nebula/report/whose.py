"""Whose a predicted number is, where it stands beside a measured one: the simulator has all replicas of a stage, and a
process of several measures its own part.
"""

from __future__ import annotations

from whale_nebula.report.report import ALONE, Report


def of_stage(report: Report, stage: str) -> str:
    """In words, beside what a stage is going to compute; nothing where that is what was measured.

    >>> of_stage(Report("fit", 9, 0.5, 2, {}, {}), "npu")
    ''
    """
    return " for the busiest replica" if report.worker != ALONE and _copies(report, stage) > 1 else ""


def of_link(report: Report, link: str) -> str:
    """In words, beside what a link is going to carry: its bytes are those of all workers of the cluster that sends."""
    cluster = link.partition("->")[0]
    told = {**report.elsewhere.stages, **report.stages}
    shared = any(each.cluster == cluster and _copies(report, name) > 1 for name, each in told.items())
    return f" for all workers of {cluster}" if report.worker != ALONE and shared else ""


def _copies(report: Report, stage: str) -> int:
    basis = report.basis
    if basis is None or stage not in basis.stages:
        return 1
    return max((phase.works[basis.stages.index(stage)].replicas for phase in basis.phases), default=1)
