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
from whale_nebula.planner.decision import Decision, Observation, Offer, correct_problem, find_better_plan, find_slowness
from whale_nebula.planner.explanation import describe_shape, stage_names
from whale_nebula.planner.problem import Candidate, Excess
from whale_nebula.planner.score import score
from whale_nebula.report.prediction import Basis, PlannedReport
from whale_nebula.report.records import PredictionGap, WorkerReport, duration
from whale_nebula.runtime.elastic_plans import AdvanceSearch
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.step.clock import StepOutcome
from whale_nebula.runtime.step.measurements import LINE, MIB
from whale_nebula.schedule.lines import Line
from whale_nebula.site import script_site, warn_once

SKIPPED_STEPS = 2
"""The number of first steps of a plan that are not counted, because they trace, compile and warm up."""
FIRST_JUDGED = 8
"""The number of measured steps before a plan is judged; then again whenever their number has doubled."""
HISTORY_LENGTH = 64
MAX_PLANS = 5
"""The maximum number of plans tried for one program."""
_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass
class PlanWatch:
    """Compares the steps of a program with the predictions of its decision, and looks for better plans.

    `rows` is the number of rows of the first step's batch, for which `candidate` is the decided plan with its predicted
    costs, None if it does not fit in memory with so many. `samples` are measured seconds by "step", "stage NAME" and
    "link A->B"; `offer` is a text on a better plan. `advance` searches plans for other numbers of workers.
    """

    name: str
    decision: Decision
    run: Run
    leaves: Sequence[Leaf]
    rows: int = 0
    step_count: int = 0
    counted_steps: int = 0
    judged_steps: int = 0
    offer: str = ""
    is_logged: bool = False
    samples: dict[str, deque[float]] = field(default_factory=dict)
    candidate: Candidate | None = None

    def __post_init__(self) -> None:
        self.advance = AdvanceSearch(self.run, self.name)

    def add(
        self, outcome: StepOutcome, tensors: Sequence[Any], workers: Mapping[str, WorkerReport]
    ) -> PlannedReport | None:
        """Record a step; returns the comparison of all counted ones with the prediction, None if there are none yet.
        Steps with a different number of rows than the first one do not count.
        """
        rows = self._count_rows(outcome, tensors)
        self.step_count += 1
        self.advance.poll()
        if self.step_count == SKIPPED_STEPS:
            self.advance.begin(self.decision)
        if not self.rows:
            self.rows, self.candidate = rows, self._predict(rows)
        if self.candidate is None or self.step_count <= SKIPPED_STEPS:
            return None
        if rows == self.rows:
            self._record(outcome)
        if not self.counted_steps:
            return None
        seconds = outcome.pace.get("step", median(self.samples["step"]))
        found = self._compare(self.candidate, seconds, workers)
        if self.counted_steps >= max(FIRST_JUDGED, 2 * self.judged_steps):
            self.judged_steps = self.counted_steps
            self._judge(self.candidate, found, outcome)
        return replace(found, offer=self.offer, found_on=self.decision.found_on)

    def _count_rows(self, outcome: StepOutcome, tensors: Sequence[Any]) -> int:
        whole = (t.shape[0] for t, leaf in zip(tensors, self.leaves, strict=True) if leaf.batched and len(t.shape))
        return sum(outcome.counts) if sum(outcome.counts) > 1 else next(whole, 1)

    def _predict(self, rows: int) -> Candidate | None:
        found: Candidate | Excess = self.decision.chosen
        if rows != self.decision.problem.rows:
            found = score(replace(self.decision.problem, rows=rows), self.decision.chosen.shape)
        if not isinstance(found, Candidate):
            return None
        alone = self.run.alone and self.decision.uncut
        return replace(found, seconds=self.decision.predict_traced_step(found)) if alone else found

    def _record(self, outcome: StepOutcome) -> None:
        self.counted_steps += 1
        stages = {**outcome.elsewhere.stages, **outcome.stages}
        links = {**outcome.elsewhere.links, **outcome.links}
        taken = {"step": outcome.seconds}
        taken |= {f"stage {n}": s.compute_seconds for n, s in stages.items() if s.compute_seconds is not None}
        taken |= {f"link {name}": each.seconds for name, each in links.items()}
        if self._runs_uncut(outcome):
            taken["stage " + stage_names(self.decision.problem, self.decision.chosen.parts)[0]] = outcome.seconds
        for what, seconds in taken.items():
            self.samples.setdefault(what, deque(maxlen=HISTORY_LENGTH)).append(seconds)

    # ------------------------------------------------------------------ comparison with predictions
    def _compare(self, candidate: Candidate, seconds: float, workers: Mapping[str, WorkerReport]) -> PlannedReport:
        computes, link_seconds, needed = self._predicted
        return PlannedReport(
            self.counted_steps, PredictionGap(seconds, candidate.seconds),
            self._compare_medians(computes), self._compare_medians(link_seconds),
            {name: PredictionGap(workers[name].peak_bytes, size) for name, size in needed.items() if name in workers},
        )  # fmt: skip

    @cached_property
    def _predicted(self) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, int]]:
        """Seconds of stages and links, by "stage npu" and "link gpu->npu", and bytes by worker."""
        problem, candidate = self.decision.problem, self.candidate or self.decision.chosen
        names = stage_names(problem, candidate.parts)
        rounds = [ceil(candidate.shape.micro_batches / part.replicas) for part in candidate.parts]
        stages = zip(names, rounds, candidate.compute, strict=True)
        computes = {f"stage {name}": count * each for name, count, each in stages}
        if self.run.alone and self.decision.uncut:  # runs as it was traced, without the calls of a stage
            computes = dict.fromkeys(computes, candidate.seconds)
        lines = problem.named_lines
        link_seconds = {
            f"link {name}": lines[name].seconds(size) for name, size in candidate.bytes.items() if name in lines
        }
        return computes, link_seconds, replace(self.decision, candidates=(candidate,)).predicted.memory

    def _compare_medians(self, predicted: Mapping[str, float]) -> dict[str, PredictionGap]:
        """Medians of measurements with predictions, by names of stages or links."""
        known = ((what, seconds) for what, seconds in predicted.items() if what in self.samples)
        return {what.partition(" ")[2]: PredictionGap(median(self.samples[what]), seconds) for what, seconds in known}

    # ------------------------------------------------------------------ reactions
    def _judge(self, candidate: Candidate, found: PlannedReport, outcome: StepOutcome) -> None:
        """Report a plan that deviates strongly from its prediction. If measurements show a better one, it is reported,
        too, and may be adopted.
        """
        observed = self._observe(candidate, found.seconds.measured, outcome)
        better, slowness = None, self.decision.slowness
        if found.is_off and observed.stages:  # stages in one function are not measured separately
            slowness = self._keep_slowness(candidate, observed)
            problem = correct_problem(replace(self.decision.problem, rows=self.rows), candidate, observed)
            better = find_better_plan(problem, candidate.shape, observed.seconds, self.decision.measured_shapes)
        adopts = self._will_adopt(better)
        if better is not None:
            self.offer = self._describe(better, observed, slowness)
            if adopts:
                self._adopt(better, candidate, observed, slowness)
            elif not self.decision.replan:
                self._report_offer(found)
        elif found.is_off and observed.stages and not self.is_logged:
            note = "the measurements show no better plan"
            _LOG.info("a step of %s takes %s: %s; %s", self.name, found.headline, found.cause, note)
            self.is_logged = True

    def _will_adopt(self, better: Offer | None) -> bool:
        """Whether the better plan that was found, if any, is adopted from the next step on: if all processes have found
        the same one, which they compare here, and the present one is not pinned.
        """
        before, run = self.decision, self.run
        if not before.replan or len(before.measured_shapes) >= MAX_PLANS or run.pins.find_pin(self.name) is not None:
            return False
        if run.alone:
            return better is not None
        own = {"plan": "" if better is None else repr(better.candidates[0].shape)}
        plans = run.ledger.session.share(f"planning {self.name!r} again", own)
        return better is not None and all(each == own for each in plans.values())

    def _observe(self, candidate: Candidate, seconds: float, outcome: StepOutcome) -> Observation:
        """The measurements of a step: its seconds, those of its stages if known, and the links between them."""
        if outcome.basis is not None:
            stages = tuple(_sum_compute_seconds(outcome.basis, place) for place in range(len(outcome.basis.stages)))
            return Observation(
                seconds, stages, {} if self.run.alone else dict(self._list_measured_lines(candidate, outcome.pace))
            )
        one = self._runs_uncut(outcome)  # its computing time includes the update
        return Observation(seconds, (candidate.compute[0] * seconds / candidate.seconds,) if one else ())

    def _runs_uncut(self, outcome: StepOutcome) -> bool:
        return self.run.alone and self.decision.uncut and outcome.basis is None

    def _list_measured_lines(
        self, candidate: Candidate, pace: Mapping[str, float]
    ) -> Iterator[tuple[tuple[int, int], Line]]:
        """The measured links between stages: their rates, and the delays of the first micro-batch."""
        problem, count = self.decision.problem, candidate.shape.micro_batches
        for place, (one, other) in enumerate(pairwise(candidate.parts)):
            if one.cluster == other.cluster:
                continue
            lines, link_seconds = {}, 0.0
            for a, b in ((one.cluster, other.cluster), (other.cluster, one.cluster)):
                name, line = problem.name_line(a, b), problem.line(a, b)
                mib = pace.get(f"{LINE}{name}")
                lines[a, b] = replace(line, rate=MIB / mib) if mib else line
                link_seconds += lines[a, b].seconds(candidate.bytes.get(name, 0.0) / count)
            away, kept = (pace.get(f"0.{place + n}.first.{what}", 0.0) for n, what in ((0, "away"), (1, "kept")))
            delay = (away - kept - link_seconds - pace.get(f"0.{place}.forward", 0.0)) / 2  # it may wait for a forward
            yield from ((ends, replace(line, delay=max(line.delay, delay))) for ends, line in lines.items())

    def _describe(self, better: Offer, observed: Observation, slowness: Mapping[str, float]) -> str:
        """A text that compares a better plan with the current one."""
        shape = better.candidates[0].shape
        names = dict.fromkeys(better.problem.clusters[part.cluster].name for part in shape.parts)
        unseen = " and ".join(name for name in names if name not in slowness)
        text = f"{describe_shape(better.problem, shape)} would take {duration(better.seconds)} instead of "
        return f"{text}{duration(observed.seconds)}{f', if {unseen} computes as fast as configured' * bool(unseen)}"

    def _report_offer(self, found: PlannedReport) -> None:
        """Report once that a better plan is known."""
        site, mend = script_site(), f"{self.offer}: use nb.auto_parallel(replan=True), or run again"
        what = f"a step of {self.name} takes {found.headline}"
        if self.run.here().lead:
            warn_once(site, what, why=found.cause, mend=mend, key=(self.name, self.rows))

    def _keep_slowness(self, candidate: Candidate, observed: Observation) -> dict[str, float]:
        """The measured slowdowns of clusters. Those of clusters on this host are stored for the planning of later runs,
        and the plans for other numbers of workers are searched again with them.
        """
        run, before = self.run, self.decision
        clusters, found = before.problem.clusters, dict(before.slowness)
        for number, factor in find_slowness(before.problem, candidate, observed).items():
            found[clusters[number].name] = factor * found.get(clusters[number].name, 1.0)
        host = run.hosts.get(run.here().worker)
        here = {run.workers[worker] for worker, other in run.hosts.items() if other == host}
        if run.writes_files:
            own = {clusters[part.cluster].name for part in candidate.parts} & (found.keys() if run.alone else here)
            shown = {name: found[name] for name in own if name in found}
            save_slowness(shown, before.clusters, run.alone, before.measured)
        self.advance.begin(before, found)
        return found

    def _adopt(self, better: Offer, candidate: Candidate, observed: Observation, slowness: Mapping[str, float]) -> None:
        """Adopt a better plan from the next step on. A search for the resizes of this one ends."""
        self.advance.end()
        before, run = self.decision, self.run
        reason = f"planned again after {self.counted_steps} steps: {self.offer}"
        after = replace(
            before, problem=better.problem, candidates=better.candidates, slowness=slowness, replaces=before,
            measured_shapes={**before.measured_shapes, candidate.shape: observed.seconds}, found_on="",
            reasons=(*before.reasons, reason),
        )  # fmt: skip
        run.decisions[:] = [after if each is before else each for each in run.decisions]
        _LOG.info("%s is %s", self.name, reason)


def _sum_compute_seconds(basis: Basis, place: int) -> float:
    """Seconds that a stage computes for a micro-batch, in all phases; those of its slowest replica if it has some."""
    works = [phase.works[place] for phase in basis.phases]
    return sum((work.seconds - work.codecs - work.overhead) * work.max_slowdown for work in works)
