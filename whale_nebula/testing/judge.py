"""What must not come of a simulated run, whatever goes wrong in it."""

from __future__ import annotations

from collections.abc import Mapping

from whale_nebula.errors import NebulaError, RunError
from whale_nebula.faults import Action
from whale_nebula.testing.case import PATIENCE, Case, Found, Outcome
from whale_nebula.testing.lesson import undisturbed
from whale_nebula.testing.line_faults import Ill

DEADLY = (Action.KILL, Action.RAISE)


def planned(error: BaseException) -> bool:
    """Whether a failpoint raised it."""
    return isinstance(error, RunError) and "failpoint" in str(error)


def fatal(case: Case) -> bool:
    """Whether such a case may stop a run; all others must go on."""
    frozen = [f for f in case.faults if f.action is Action.FREEZE and (not f.seconds or f.seconds >= PATIENCE)]
    longest = max([0.0, *(fault.seconds for fault in case.lines), *(fault.seconds for fault in case.faults)])
    return (
        bool(frozen)
        or any(fault.action in DEADLY for fault in case.faults)
        or any(fault.ill is Ill.LOSE for fault in case.lines)
        or longest >= PATIENCE / 2
    )


def judge(found: Found) -> list[str]:
    """What must not be: a hang, another model, a stop without a name, one that ends well where others do not."""
    case, outcomes = found.case, found.outcomes
    living = {worker: each for worker, each in outcomes.items() if each.killed is None}
    wrong = ["it hangs"] if found.hangs else []
    expected = dict(zip(case.row, undisturbed(case.workers, case.steps), strict=True))
    for worker, each in outcomes.items():
        if each.held is not None and (each.held.tobytes() != expected[worker].tobytes() or each.leftover):
            wrong.append(f"{worker} has come to something else ({each.leftover} tensors are left)")
    for worker, each in living.items():
        if each.held is None and each.error is None and not found.hangs:
            wrong.append(f"{worker} has no end")
        if each.error is not None:
            wrong += _misnamed(case, worker, each.error)
    if not fatal(case) and not found.went_on:
        wrong.append(f"it stopped: {next((str(e.error) for e in outcomes.values() if e.error), 'nobody said why')}")
    applied = [each.applied for each in outcomes.values()]
    if max(applied) - min(applied) > 1 and not case.restart:
        wrong.append(f"steps applied: {applied}")
    if any(each.held is not None for each in living.values()) and min(a.applied for a in living.values()) < case.steps:
        wrong.append(f"one has ended well, and not all have taken all steps: {applied}")
    return wrong + _late(found, living)


def _misnamed(case: Case, worker: str, error: BaseException) -> list[str]:
    if not isinstance(error, NebulaError):
        return [f"{worker} stopped by {error!r}"]
    others = [each for each in case.row if each != worker]
    named = planned(error) or any(each in str(error) for each in others)
    return [] if named else [f"{worker} stopped without a name: {error}"]


def _late(found: Found, living: Mapping[str, Outcome]) -> list[str]:
    """The peers of a worker that is dead or has failed stop within two seconds."""
    (only,) = found.struck if len(found.struck) == 1 else (None,)
    if found.when is None or only is None or found.case.restart:
        return []  # something else may have kept them
    limit = found.when + 2.0
    late = {worker: each.at - found.when for worker, each in living.items() if each.error and each.at > limit}
    return [f"{worker} stopped {seconds:.1f} s after another" for worker, seconds in late.items()]
