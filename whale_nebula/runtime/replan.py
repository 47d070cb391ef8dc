"""Monitor steps of `nb.auto_parallel` plans against predictions: report deviations, and plan again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

from whale_nebula.hardware.measurements import save_slowness
from whale_nebula.ir.program import Leaf
from whale_nebula.planner.decision import Decision, Observed, Offer, correct, find_better, find_slowness
from whale_nebula.planner.explanation import describe_shape, stage_names
from whale_nebula.planner.problem import Candidate
from whale_nebula.planner.score import score
from whale_nebula.report.prediction import Basis, PlannedReport
from whale_nebula.report.records import Beside, WorkerReport, duration
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.step.clock import StepOutcome
from whale_nebula.runtime.step.measured import LINE, MIB
from whale_nebula.schedule.lines import Line
from whale_nebula.site import script_site, warn_once

SKIPPED = 2
"""The number of first steps of a plan that are not counted, because they trace, compile and warm up."""
FIRST = 8
"""The number of measured steps before a plan is judged; then again whenever their number has doubled."""
KEPT = 64
MOST = 5
"""The maximum number of plans tried for one program."""
_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass
class PlanWatch:
    """Compares the steps of a program with its decision's predictions for batches of `rows` rows."""

    name: str
    decision: Decision
    run: Run
    leaves: Sequence[Leaf]
    rows: int = 0
    begun: int = 0
    counted: int = 0
    judged: int = 0
    offer: str = ""
    logged: bool = False
    kept: dict[str, deque[float]] = field(default_factory=dict)
    planned: Candidate | None = None

    def add(
        self, outcome: StepOutcome, tensors: Sequence[Any], workers: Mapping[str, WorkerReport]
    ) -> PlannedReport | None:
        """Record a step; returns the comparison with the prediction. Steps whose number of rows differs from the first
        one do not count.
        """
        rows = self._count_rows(outcome, tensors)
        self.begun += 1
        if not self.rows:
            self.rows, self.planned = rows, self._predict(rows)
        if self.planned is None or self.begun <= SKIPPED:
            return None
        if rows == self.rows:
            self._keep(outcome)
        if not self.counted:
            return None
        seconds = outcome.pace.get("step", median(self.kept["step"]))
        found = self._compare(self.planned, seconds, workers)
        if self.counted >= max(FIRST, 2 * self.judged):
            self.judged = self.counted
            self._judge(self.planned, found, outcome)
        return replace(found, offer=self.offer)

    def _count_rows(self, outcome: StepOutcome, tensors: Sequence[Any]) -> int:
        whole = (t.shape[0] for t, leaf in zip(tensors, self.leaves, strict=True) if leaf.batched and len(t.shape))
        return sum(outcome.counts) if sum(outcome.counts) > 1 else next(whole, 1)

    def _predict(self, rows: int) -> Candidate | None:
        if rows == self.decision.problem.rows:
            return self.decision.chosen
        found = score(replace(self.decision.problem, rows=rows), self.decision.chosen.shape)
        return found if isinstance(found, Candidate) else None

    def _keep(self, outcome: StepOutcome) -> None:
        self.counted += 1
        stages = {**outcome.elsewhere.stages, **outcome.stages}
        links = {**outcome.elsewhere.links, **outcome.links}
        taken = {"step": outcome.seconds}
        taken |= {f"stage {n}": s.compute_seconds for n, s in stages.items() if s.compute_seconds is not None}
        taken |= {f"link {name}": each.seconds for name, each in links.items()}
        if self._runs_uncut(outcome):
            taken["stage " + stage_names(self.decision.problem, self.decision.chosen.parts)[0]] = outcome.seconds
        for what, seconds in taken.items():
            self.kept.setdefault(what, deque(maxlen=KEPT)).append(seconds)

    # ------------------------------------------------------------------ comparison with predictions
    def _compare(self, planned: Candidate, seconds: float, workers: Mapping[str, WorkerReport]) -> PlannedReport:
        computes, held, needed = self._predicted
        return PlannedReport(
            self.counted, Beside(seconds, planned.seconds),
            self._compare_medians(computes), self._compare_medians(held),
            {name: Beside(workers[name].peak_bytes, size) for name, size in needed.items() if name in workers},
        )  # fmt: skip

    @cached_property
    def _predicted(self) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, int]]:
        """Seconds of stages and links, by "stage npu" and "link gpu->npu", and bytes by worker."""
        problem, planned = self.decision.problem, self.planned or self.decision.chosen
        names = stage_names(problem, planned.parts)
        rounds = [ceil(planned.shape.micro_batches / part.replicas) for part in planned.parts]
        stages = zip(names, rounds, planned.compute, strict=True)
        computes = {f"stage {name}": count * each for name, count, each in stages}
        lines = problem.named_lines
        held = {f"link {name}": lines[name].seconds(size) for name, size in planned.bytes.items() if name in lines}
        return computes, held, replace(self.decision, candidates=(planned,)).predicted.memory

    def _compare_medians(self, predicted: Mapping[str, float]) -> dict[str, Beside]:
        """Medians of measurements with predictions, by names of stages or links."""
        known = ((what, seconds) for what, seconds in predicted.items() if what in self.kept)
        return {what.partition(" ")[2]: Beside(median(self.kept[what]), seconds) for what, seconds in known}

    # ------------------------------------------------------------------ reactions
    def _judge(self, planned: Candidate, found: PlannedReport, outcome: StepOutcome) -> None:
        """Report a plan that deviates strongly from its prediction. If measurements show a better one, it is reported,
        too, and may be adopted.
        """
        seen = self._observe(planned, found.seconds.measured, outcome)
        better, slowness = None, self.decision.slowness
        if found.is_off and seen.stages:  # stages in one function are not measured separately
            slowness = self._keep_slowness(planned, seen)
            problem = correct(replace(self.decision.problem, rows=self.rows), planned, seen)
            better = find_better(problem, planned.shape, seen.seconds, self.decision.tried)
        takes = self._takes(better)
        if better is not None:
            self.offer = self._describe(better, seen, slowness)
            if takes:
                self._take(better, planned, seen, slowness)
            elif not self.decision.replan:
                self._offer(found)
        elif found.is_off and seen.stages and not self.logged:
            note = "the measurements show no better plan"
            _LOG.info("a step of %s takes %s: %s; %s", self.name, found.headline, found.cause, note)
            self.logged = True

    def _takes(self, better: Offer | None) -> bool:
        """Whether a better plan, on which all processes have agreed, is adopted from the next step on. A pinned plan
        is kept.
        """
        before, run = self.decision, self.run
        if not before.replan or len(before.tried) >= MOST or run.pins.pin_of(self.name) is not None:
            return False
        if run.alone:
            return better is not None
        own = {"plan": "" if better is None else repr(better.candidates[0].shape)}
        plans = run.ledger.session.share(f"planning {self.name!r} again", own)
        return better is not None and all(each == own for each in plans.values())

    def _observe(self, planned: Candidate, seconds: float, outcome: StepOutcome) -> Observed:
        """The step's measurements of all processes."""
        if outcome.basis is not None:
            stages = tuple(_computes(outcome.basis, place) for place in range(len(outcome.basis.stages)))
            return Observed(seconds, stages, {} if self.run.alone else dict(self._lines(planned, outcome.pace)))
        one = self._runs_uncut(outcome)  # its computing time includes the update
        return Observed(seconds, (planned.compute[0] * seconds / planned.seconds,) if one else ())

    def _runs_uncut(self, outcome: StepOutcome) -> bool:
        return self.run.alone and self.decision.uncut and outcome.basis is None

    def _lines(self, planned: Candidate, pace: Mapping[str, float]) -> Iterator[tuple[tuple[int, int], Line]]:
        """The measured links between stages: their rates, and the delays of the first micro-batch."""
        problem, count = self.decision.problem, planned.shape.micro_batches
        for place, (one, other) in enumerate(pairwise(planned.parts)):
            if one.cluster == other.cluster:
                continue
            wires, held = {}, 0.0
            for a, b in ((one.cluster, other.cluster), (other.cluster, one.cluster)):
                name, wire = problem.name_line(a, b), problem.line(a, b)
                mib = pace.get(f"{LINE}{name}")
                wires[a, b] = replace(wire, rate=MIB / mib) if mib else wire
                held += wires[a, b].seconds(planned.bytes.get(name, 0.0) / count)
            away, kept = (pace.get(f"0.{place + n}.first.{what}", 0.0) for n, what in ((0, "away"), (1, "kept")))
            delay = (away - kept - held - pace.get(f"0.{place}.forward", 0.0)) / 2  # it may wait for a forward
            yield from ((ends, replace(wire, delay=max(wire.delay, delay))) for ends, wire in wires.items())

    def _describe(self, better: Offer, seen: Observed, slowness: Mapping[str, float]) -> str:
        """A text that compares a better plan with the current one."""
        shape = better.candidates[0].shape
        names = dict.fromkeys(better.problem.clusters[part.cluster].name for part in shape.parts)
        unseen = " and ".join(name for name in names if name not in slowness)
        text = f"{describe_shape(better.problem, shape)} would take {duration(better.seconds)} instead of "
        return f"{text}{duration(seen.seconds)}{f', if {unseen} computes as fast as configured' * bool(unseen)}"

    def _offer(self, found: PlannedReport) -> None:
        """Report once that a better plan is known."""
        site, mend = script_site(), f"{self.offer}: use nb.auto_parallel(replan=True), or run again"
        what = f"a step of {self.name} takes {found.headline}"
        if self.run.here().lead:
            warn_once(site, what, why=found.cause, mend=mend, key=(self.name, self.rows))

    def _keep_slowness(self, planned: Candidate, seen: Observed) -> dict[str, float]:
        """Store the measured slowdown of clusters on this host, for the next run's planning."""
        run, before = self.run, self.decision
        clusters, found = before.problem.clusters, dict(before.slowness)
        for number, factor in find_slowness(before.problem, planned, seen).items():
            found[clusters[number].name] = factor * found.get(clusters[number].name, 1.0)
        host = run.hosts.get(run.here().worker)
        here = {run.workers[worker] for worker, other in run.hosts.items() if other == host}
        if run.writes_files:
            own = {clusters[part.cluster].name for part in planned.parts} & (found.keys() if run.alone else here)
            shown = {name: found[name] for name in own if name in found}
            save_slowness(shown, before.clusters, run.alone, before.measured)
        return found

    def _take(self, better: Offer, planned: Candidate, seen: Observed, slowness: Mapping[str, float]) -> None:
        """Adopt a better plan from the next step on."""
        before, run = self.decision, self.run
        reason = f"planned again after {self.counted} steps: {self.offer}"
        after = replace(
            before, problem=better.problem, candidates=better.candidates, slowness=slowness, replaces=before,
            tried={**before.tried, planned.shape: seen.seconds}, reasons=(*before.reasons, reason),
        )  # fmt: skip
        run.decisions[:] = [after if each is before else each for each in run.decisions]
        _LOG.info("%s is %s", self.name, reason)


def _computes(basis: Basis, place: int) -> float:
    """Seconds that a stage computes for a micro-batch, in all phases; with replicas, in the slowest."""
    works = [phase.works[place] for phase in basis.phases]
    return sum((work.seconds - work.codecs - work.overhead) * work.most_slow for work in works)
