"""Plans of an elastic run for the numbers of workers that it may get next, which are searched while it trains."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import whale_nebula
from whale_nebula.hardware import Clusters, WorkerInfo
from whale_nebula.hardware.measurements import read_slowness
from whale_nebula.launch.placement import is_local
from whale_nebula.planner.cluster_costs import find_slowest, lacks_speed
from whale_nebula.planner.decision import Decision, slow_down
from whale_nebula.planner.explanation import describe_need, describe_shape, describe_sufficient_memory
from whale_nebula.planner.problem import Problem
from whale_nebula.planner.resizes import (
    PlannedResize,
    PlanningInput,
    Resize,
    drop_collectives,
    list_next_resizes,
)
from whale_nebula.planner.stored_plans import (
    digest_problem,
    format_problem,
    list_unknown,
    read_plans,
    restore_candidates,
)
from whale_nebula.report.records import duration
from whale_nebula.runtime.clusters import add_measurements, find_config_path
from whale_nebula.runtime.run import Run, assign_absent
from whale_nebula.scopes.auto import Limits
from whale_nebula.site import script_site, warn_once

_LOG = logging.getLogger("whale_nebula.runtime.run")
_SEARCH = ("-m", "whale_nebula.planner.stored_plans")


# ---------------------------------------------------------------------- the problems
def build_slowed_problem(planning_input: PlanningInput, clusters: Clusters, slowness: Mapping[str, float]) -> Problem:
    """The planning problem for these clusters, with their measured slowdowns."""
    times = {number: slowness[name] for number, name in enumerate(clusters.names) if name in slowness}
    return slow_down(planning_input.build_problem(clusters), times)


def plan_resizes(
    planning_input: PlanningInput, clusters: Clusters, slowness: Mapping[str, float], limits: Limits, run: Run
) -> Iterator[PlannedResize]:
    """The numbers of workers that an elastic run may get next, each with its planning problem, by the `clusters` and
    the `slowness` of the present workers, on which all processes have agreed. A cluster to which scopes or inputs are
    bound neither leaves nor comes.
    """
    counts = {**run.cluster_sizes, **dict.fromkeys(run.replacements, 0)}
    for resize in list_next_resizes(counts, run.config.elastic):
        comes_or_goes = not resize.count or not resize.before
        if comes_or_goes and planning_input.names_cluster(resize.cluster):
            continue
        known = _find_clusters(resize, clusters, planning_input, limits, run)
        factors = _find_slowness(known, clusters, slowness, planning_input, run)
        yield PlannedResize(resize, known, build_slowed_problem(planning_input, known, factors))


def _find_clusters(
    resize: Resize, clusters: Clusters, planning_input: PlanningInput, limits: Limits, run: Run
) -> Clusters:
    """The clusters of a start with other numbers of workers, as its processes would agree on them."""
    present = [name for name, count in resize.counts.items() if count]
    if not run.alone:
        present.sort(key=lambda name: f"{name}/0")
    homes = assign_absent(run.config, present)
    names = list(dict.fromkeys(homes.get(name, name) for name in limits.clusters or present))
    bound = planning_input.constraints.clusters
    chosen = [name for name in names if name in bound] if bound else names
    sizes = {name: resize.counts.get(name, 1) for name in chosen or names}
    configured, known = Clusters.of(run.config, run.links, sizes), clusters.resize(resize.counts)
    own = add_measurements(configured, find_config_path(run), converts=True)
    return configured.complete_from(drop_collectives(known)).complete_from(own).complete_from(known)


def _find_slowness(
    known: Clusters, clusters: Clusters, slowness: Mapping[str, float], planning_input: PlanningInput, run: Run
) -> dict[str, float]:
    """The slowdowns of a resize: those of this run for clusters whose workers stay, and stored ones for other clusters
    of this machine.
    """
    workers = {each.name: each.workers for each in clusters.clusters}
    stored = read_slowness(known, run.alone, frozenset(planning_input.measured))
    found = {}
    for each in known.clusters:
        stays = workers.get(each.name) == each.workers
        here = any(is_local(worker.machine) for worker in each.workers)
        factor = slowness.get(each.name) if stays else stored.get(each.name) if here else None
        if factor is not None:
            found[each.name] = factor
    return found


def _refresh_resizes(decision: Decision, slowness: Mapping[str, float], run: Run) -> tuple[PlannedResize, ...]:
    """The resizes of a decision by what is known now: with slowdowns that were measured since, and with the stored
    measurements of blocks of this host, which the next start will read.
    """
    planning_input, found = decision.planning_input, []
    if planning_input is None:
        return decision.resizes
    read_costs = planning_input.read_costs
    stored = None if read_costs is None else find_slowest([read_costs()], planning_input.layers.rows)
    for each in decision.resizes:
        here = {c.name for c in each.clusters.clusters if any(_is_measured(each.clusters, w) for w in c.workers)}
        measured = {**planning_input.measured, **({} if stored is None else dict.fromkeys(here, stored))}
        known = replace(planning_input, measured=measured)
        factors = _find_slowness(each.clusters, decision.clusters, slowness, known, run)
        found.append(replace(each, problem=build_slowed_problem(known, each.clusters, factors)))
    return tuple(found)


def _is_measured(clusters: Clusters, worker: WorkerInfo) -> bool:
    """Whether the blocks of a worker are measured on this machine."""
    return is_local(worker.machine) and lacks_speed(clusters, worker)


# ---------------------------------------------------------------------- the search
@dataclass
class AdvanceSearch:
    """A search, in one process of low priority on each host, for plans for other numbers of workers; it reports the
    numbers for which there is no plan. The process is ended by `end`, also when the run is closed.
    """

    run: Run
    name: str
    decision: Decision | None = None
    process: subprocess.Popen[bytes] | None = None
    reported: set[str] = field(default_factory=set)

    @property
    def is_needed(self) -> bool:
        """Whether this process, the first one of its host, searches."""
        return bool(self.run.config.elastic) and not self.run.alone and self.run.writes_files

    def begin(self, decision: Decision, slowness: Mapping[str, float] | None = None) -> None:
        """Search the plans for the resizes of a decision, unless they are stored, with the slowdowns that the run has
        measured since. An earlier search is ended.
        """
        if not self.is_needed:
            return
        self.end()
        factors = decision.slowness if slowness is None else slowness
        decision = replace(decision, resizes=_refresh_resizes(decision, factors, self.run))
        self.decision = decision
        problems = list_unknown([own for _, own in decision.list_resize_problems()])
        if not problems:
            self._report(decision)
            return
        if self.end not in self.run.closers:
            self.run.close_at_end(self.end)
        folder = Path(whale_nebula.__file__).parents[1]
        with tempfile.TemporaryFile() as lines:
            lines.write("".join(f"{format_problem(own)}\n" for own in problems).encode())
            lines.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, *_SEARCH], stdin=lines, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd=folder, env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )  # fmt: skip

    def poll(self) -> None:
        """Report the result of a search that has ended. Called after each step."""
        if self.process is None or self.process.poll() is None:
            return
        self.process = None
        if self.decision is not None:
            self._report(self.decision)

    def end(self) -> None:
        """End a search that runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _report(self, decision: Decision) -> None:
        """Log the plan of each resize, and warn of fewer workers for which there is none."""
        plans = read_plans()
        for planned, problem in decision.list_resize_problems():
            resize, stored = planned.resize, plans.get(digest_problem(problem))
            if stored is None or problem.options != decision.problem.options or resize.text in self.reported:
                continue
            self.reported.add(resize.text)
            if candidates := restore_candidates(problem, stored):
                shape, seconds = describe_shape(problem, candidates[0].shape), duration(candidates[0].seconds)
                _LOG.info("%s %s is planned in advance: %s, predicted %s", self.name, resize.text, shape, seconds)
            elif resize.count < resize.before:
                what, why = describe_need(stored.excess, problem)
                ways = [f"elastic: {{{resize.cluster}: {{min: {resize.count + 1}}}}}"]
                if stored.excess is not None:
                    ways.append(describe_sufficient_memory(stored.excess))
                why = f"elastic: allows so few, and the run would end there; {why}"
                site, key = script_site(), (self.name, resize.text)
                warn_once(site, f"{self.name} {resize.text}: {what}", why=why, mend="; or ".join(ways), key=key)
