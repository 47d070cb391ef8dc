"""Decisions of `nb.auto_parallel`: the inputs that all processes agree on, costs of a program, links and collectives
that are measured because they are unknown, and the search for stages.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from whale_nebula.capture.mirror import find_origin, order_operations
from whale_nebula.capture.step import Captured
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import BatchCoupledError, CaptureError, NebulaError, NotYetError, OptionError, PlanError
from whale_nebula.feed.rows import divide_rows
from whale_nebula.hardware import ClusterInfo, Clusters, Provenance
from whale_nebula.hardware.measurements import fingerprint, read_slowness, slowness_path
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.layout import ALL_REDUCE
from whale_nebula.ir.program import Constraints, Leaf
from whale_nebula.launch import link_advice
from whale_nebula.launch.link_measurement import SIZES, MeasurementEnd
from whale_nebula.launch.placement import is_local
from whale_nebula.passes.batch import explain_coupling
from whale_nebula.plan.splits import CrossingSizes, list_collectives, time_collective
from whale_nebula.planner.chain import Layers, build_layers, size_values
from whale_nebula.planner.cluster_costs import MeasuredBlocks, find_grounds, find_slowest, lacks_speed
from whale_nebula.planner.costs import Costs
from whale_nebula.planner.decision import Decision, describe_excess
from whale_nebula.planner.problem import Options
from whale_nebula.planner.resizes import PlanningInput
from whale_nebula.planner.search import search
from whale_nebula.planner.stored_plans import find_stored_plan
from whale_nebula.report.records import size
from whale_nebula.runtime.block_costs import BlockKeys, find_block_keys, measure_blocks
from whale_nebula.runtime.clusters import add_measurements, complete_from_lines, find_config_path, find_configured
from whale_nebula.runtime.elastic_plans import build_slowed_problem, plan_resizes
from whale_nebula.runtime.local_sgd.topology import PROGRAMS
from whale_nebula.runtime.replicas.collective_costs import fit_collectives, time_collectives
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.variables.attached_memory import ExpectedMemory, find_expected_memory
from whale_nebula.schedule.schedules import DEFAULT
from whale_nebula.scopes.auto import Limits
from whale_nebula.scopes.identity import resolve_cluster


def map_handles(captured: Captured) -> dict[int, str]:
    """The paths of a step's variables by the id of their handle."""
    return {id(variable.handle): path for path, variable in captured.variables.items()}


def decide(
    name: str,
    captured: Captured,
    shapes: Sequence[tuple[int, ...]],
    limits: Limits,
    run: Run,
    tensors: Sequence[Any] | None,
    check: Callable[[Decision], object],
    absent: Collection[int],
    homes: Mapping[int, frozenset[str]],
) -> Decision | None:
    """Search for the best plan of a step; None if the step has nothing to assign to stages. All processes call it at
    the same point, and decide the same. `shapes` and `tensors` are those of the first batch, `check` raises the
    refusals of passes, `absent` has the numbers of the inputs that this process lacks, and `homes`, by number, the
    clusters of inputs that some processes lack.
    """
    rows = count_rows(captured.program.leaves, shapes)
    constraints = captured.constraints
    here = [None if number in absent else shape for number, shape in enumerate(shapes)]
    known = StepKnowledge(rows, here, expect_attached_memory(captured))
    configured = find_clusters(limits, constraints, run)
    clusters, has_collectives, known = agree_on_planning_input(name, configured, known, run)
    shapes = [own if agreed is None else tuple(agreed) for own, agreed in zip(shapes, known.shapes, strict=True)]
    rows, bytes_beside = known.rows, {path: each.bytes for path, each in known.attached_memory.items()}
    layers = build_layers(captured.program, rows, set_rows(captured.program.leaves, shapes, rows), bytes_beside)
    if layers is None:
        return None
    options = Options(
        constraints.micro_batch or limits.micro_batch, constraints.replicas or limits.replica,
        constraints.pipeline.recompute or limits.recompute, in_flight=constraints.pipeline.in_flight,
        split=limits.split if has_collectives or limits.split else False,
    )  # fmt: skip
    if constraints.pipeline.schedule != DEFAULT:
        options = replace(options, schedules=(constraints.pipeline.schedule,))
    if limits.memory is not None:
        options = replace(options, memory=float(limits.memory))
    reasons = [f"the scopes fix: {'; '.join(words)}"] if (words := constraints.describe()) else []
    reasons += describe_measured(clusters)
    reasons += [
        f"{size(each.bytes)} are added for {path}, from {each.assumption}"
        for path, each in sorted(known.attached_memory.items())
    ]
    names = [leaf.name for leaf in captured.program.leaves]
    reasons += [f"input {names[number]!r} is in {' and '.join(sorted(own))} alone" for number, own in homes.items()]
    whole = explain_whole_batch(captured, layers)
    if options.micro_batch is None and whole:
        options, reasons = replace(options, micro_batch=1), [*reasons, f"the batch is not divided: {whole}"]
    measured, slowness, keys = measure_in_clusters(name, captured, layers, shapes, clusters, options, run, tensors)
    slow = [f"cluster {each} computes {times:.2g} times as long as its rates predict, as measured in an earlier run: "
            f"{slowness_path()}" for each, times in sorted(slowness.items())]  # fmt: skip
    read_costs = None if keys is None or run.alone else keys.read_costs
    given = PlanningInput(layers, options, measured, limits.compress, constraints, homes, read_costs)
    first = Decision(
        layers, build_slowed_problem(given, clusters, slowness), (), find_grounds(layers, clusters, measured),
        str(limits.site), tuple(reasons), constraints=constraints, planning_input=given,
        resizes=tuple(plan_resizes(given, clusters, slowness, limits, run)),
    )  # fmt: skip
    first = replace(first, handles=map_handles(captured), program=name, replan=bool(limits.replan))
    found = _search(first, limits, functools.partial(_explain_refusal, first, check))
    return replace(
        found, reasons=(*found.reasons, *slow), clusters=clusters, slowness=slowness, measured=frozenset(measured),
        emulated=run.alone,
    )  # fmt: skip


def describe_measured(clusters: Clusters) -> list[str]:
    """Sentences on the measured links, and on measured all-reduces inside clusters, each with its date."""
    names = [cluster.name for cluster in clusters.clusters]
    found = [
        f"the link {a}->{b} is {clusters.between(a, b)}, as measured on {clusters.measured[f'{a}>{b}'].date}"
        for a, b in itertools.product(sorted(names), repeat=2)
        if f"{a}>{b}" in clusters.measured
    ]
    for cluster in clusters.clusters:
        for each in cluster.collectives:
            at = clusters.measured.get(f"{cluster.name}.collectives.{each.kind}")
            if each.kind == ALL_REDUCE and at is not None:
                found.append(f"inside {cluster.name} an {each}, as measured on {at.date}")
    return found


def check_constraints(constraints: Constraints, limits: Limits, run: Run) -> None:
    """Refuse scopes and limits that cannot both hold, and clusters that the config does not name."""
    run.check_named({name: each.scope_text for each in constraints.stages for name in each.clusters})
    run.check_named(dict.fromkeys(limits.clusters or (), str(limits.site)), "nb.auto_parallel may use")
    if limits.compress is not None and (constraints.stages or constraints.clusters):
        raise OptionError(
            f"nb.auto_parallel(compress={limits.compress!r}) cannot be combined with scopes: "
            f"{constraints.describe()[0]}",
            where=str(limits.site),
            why="in a script with scopes, nb.compress determines which tensors are compressed",
            mend="use nb.compress(...) inside nb.cluster, and remove compress= here",
        )


def explain_whole_batch(captured: Captured, layers: Layers) -> str:
    """The reason why a step's batch is not divided unless the user asks for it; "" if it may be."""
    if len(captured.program.requests) > 1:
        return "the step requests gradients more than once"
    if layers.is_random:
        return (
            "the model draws random numbers (dropout), which would differ in each micro-batch; micro_batch= allows it"
        )
    if not any(leaf.batched for leaf in captured.program.leaves):
        return "no argument of the step has rows"
    operations = order_operations(captured.graph.get_operations())
    return explain_coupling(captured.program, lambda number: find_origin(operations[number]))


def recount_split_costs(decision: Decision, cut: Cut, shapes: Sequence[tuple[int, ...]]) -> Decision:
    """The decision with the seconds of its split stages by the bytes that the passes have found. If a plan without
    splits is then faster, that one comes first.
    """
    problem, chosen = decision.problem, decision.chosen
    rows = divide_rows(problem.rows, chosen.shape.micro_batches)
    crossed = CrossingSizes(cut, rows, set_rows(cut.program.leaves, shapes, problem.rows))
    sent = list_collectives(cut, crossed, len(rows))
    more = 0.0
    for part, stage in zip(chosen.parts, decision.assignment.stages, strict=True):
        inside, own = problem.clusters[part.cluster].inner_line, [each for each in sent if each.stage == stage.key]
        counted = math.fsum(each.times * time_collective(each, part.shards, inside) for each in own)
        more += counted - Costs(problem, len(rows)).collect_seconds(part) * len(rows)
    volume = size(sum(each.times * each.bytes for each in sent))
    reasons = (
        *decision.reasons,
        f"to divide variables, a worker sends {volume} to the others of its stage in a step",
    )
    first = replace(chosen, seconds=max(chosen.seconds + more, 0.0))
    others = [each for each in decision.candidates[1:] if all(part.shards == 1 for part in each.parts)]
    if problem.options.split is None and others and others[0].seconds < first.seconds:
        return replace(decision, candidates=tuple(others))
    return replace(decision, candidates=(first, *decision.candidates[1:]), reasons=reasons)


def _search(decision: Decision, limits: Limits, explain_refusal: Callable[[], str], whole: bool = False) -> Decision:
    """The decision with the best plans of its problem. Raises if none fits; the error is about the whole batch if it
    cannot be divided.
    """
    stored, date = find_stored_plan(decision.problem) if decision.resizes else ((), "")
    if stored:
        reasons = *decision.reasons, f"this plan was found in advance, on {date}, by the same measurements"
        return replace(decision, candidates=stored, reasons=reasons, found_on=date)
    found = search(decision.problem)
    if found.candidates:
        return replace(decision, candidates=found.candidates)
    if refused := explain_refusal():
        return _search(_forbid_micro_batches(decision, refused), limits, str, whole=True)
    what, why, mend = describe_excess(found.excess, decision.problem, whole)
    raise PlanError(what, where=str(limits.site), why="; ".join(filter(None, (why, *decision.reasons))), mend=mend)


def _forbid_micro_batches(decision: Decision, refused: str) -> Decision:
    """The decision whose micro-batches are refused, to be searched again without them."""
    problem = replace(decision.problem, options=replace(decision.problem.options, micro_batch=1))
    return replace(decision, problem=problem, reasons=(*decision.reasons, f"the batch is not divided: {refused}"))


def _explain_refusal(decision: Decision, check: Callable[[Decision], object]) -> str:
    """The reason why the batch cannot be divided, if no number of micro-batches is given; "" if it can."""
    problem = decision.problem
    if problem.options.micro_batch is not None or len(problem.micro_batch_counts) == 1:
        return ""
    options = replace(problem.options, micro_batch=problem.micro_batch_counts[1], memory=math.inf)
    clusters = tuple(replace(cluster, memory=math.inf) for cluster in problem.clusters)
    roomy = replace(problem, options=options, clusters=clusters)
    tried = replace(decision, problem=roomy, candidates=search(roomy, 1).candidates)
    try:
        if tried.candidates:
            check(tried)
    except BatchCoupledError as refused:
        return refused.what
    except (CaptureError, PlanError, NotYetError):
        pass  # a different cause, which is reported elsewhere
    return ""


def decide_after_refusal(before: Decision, limits: Limits, refused: NebulaError) -> Decision:
    """Decide again after the passes have refused a choice: without splits, then with the whole batch."""
    asked = limits.micro_batch or before.constraints.micro_batch
    if before.splits and not limits.split:
        problem = replace(before.problem, options=replace(before.problem.options, split=False))
        reasons = (*before.reasons, f"variables are not split: {refused.what}")
        return _search(replace(before, problem=problem, reasons=reasons), limits, str)
    if not asked and before.chosen.shape.micro_batches > before.problem.micro_batch_counts[0]:
        return _search(_forbid_micro_batches(before, refused.what), limits, str, whole=True)
    raise refused


def find_clusters(limits: Limits, constraints: Constraints, run: Run) -> Clusters:
    """The configured clusters that may take part; without a config, also those that scopes name."""
    names = list(dict.fromkeys(map(resolve_cluster, limits.clusters or run.here().clusters)))
    if limits.clusters is None and run.alone and not run.config.clusters:
        named = [*constraints.clusters, *(name for each in constraints.stages for name in each.clusters)]
        names = list(dict.fromkeys([*(named or names), *run.clusters]))
    chosen = [name for name in names if name in constraints.clusters] if constraints.clusters else names
    return find_configured(run, chosen or names)


def expect_attached_memory(captured: Captured) -> dict[str, ExpectedMemory]:
    """The memory that objects other than a step's variables are expected to use, by the path of the variable."""
    found = {path: find_expected_memory(variable) for path, variable in captured.variables.items()}
    return {path: each for path, each in found.items() if each is not None}


class StepKnowledge(NamedTuple):
    """What a process knows about a step: the rows of the batch; the shapes of its inputs, None for one that it lacks;
    and the memory of objects other than variables.
    """

    rows: int
    shapes: Sequence[Sequence[int] | None] = ()
    attached_memory: Mapping[str, ExpectedMemory] = {}

    def merge(self, other: StepKnowledge) -> StepKnowledge:
        """The merged knowledge of two processes: the larger value if both have one."""
        pairs = itertools.zip_longest(self.shapes, other.shapes)
        shapes = [one if two is None else two if one is None else tuple(map(max, one, two)) for one, two in pairs]
        beside = {path: max(own, other.attached_memory.get(path, own)) for path, own in self.attached_memory.items()}
        return StepKnowledge(max(self.rows, other.rows), shapes, beside)

    @classmethod
    def from_plain(cls, plain: Any) -> StepKnowledge:
        """Parse what another process has sent."""
        rows, shapes, beside = plain
        known = {str(path): ExpectedMemory(float(count), str(text)) for path, (count, text) in beside.items()}
        return cls(int(rows), [None if each is None else tuple(map(int, each)) for each in shapes], known)


class Agreement(NamedTuple):
    """The input of planning on which all processes agree: clusters with measurements, whether TensorFlow's collectives
    are available in all of them, and what is known about the step.
    """

    clusters: Clusters
    collectives: bool
    known: StepKnowledge


def agree_on_planning_input(name: str, clusters: Clusters, known: StepKnowledge, run: Run) -> Agreement:
    """Exchange and merge the knowledge of all processes, which call it at the same point; links and collectives that
    are unknown to all are measured between them.
    """
    completed = add_measurements(clusters, find_config_path(run), converts=bool(run.config.elastic))
    if run.alone:
        return Agreement(completed, True, known)
    own = run.here().cluster
    has_collectives = run.ledger.collectives is not None or run.cluster_sizes.get(own, 1) == 1
    part = {
        "clusters": completed.to_json(),
        "collectives": has_collectives,
        "measure": run.config.measure,
        "known": known,
    }
    every = dict(sorted(run.ledger.session.share(f"the planning of {name!r}", part).items()))
    for each in every.values():
        clusters = clusters.complete_from(Clusters.from_json(each["clusters"], where=name))
    budget = min(float(each["measure"]) for each in every.values())
    unable = {cluster_of(worker) for worker, each in every.items() if not each["collectives"]}
    clusters = complete_collectives(name, clusters, run, budget, set(clusters.names) - unable)
    clusters = complete_lines(name, clusters, run, budget)
    parts = [StepKnowledge.from_plain(each["known"]) for each in every.values()]
    return Agreement(clusters, not unable, functools.reduce(StepKnowledge.merge, parts))


def find_homes(name: str, absent: Collection[int], run: Run) -> dict[int, frozenset[str]]:
    """The clusters whose workers all have an input, by its number, for each input that some processes lack. All
    processes call it at the same point; `absent` has the numbers of the inputs that this process lacks.
    """
    if run.alone or not run.config.inputs:
        return {}
    lacking: dict[int, set[str]] = {}
    for worker, each in run.ledger.session.share(f"the inputs of {name!r}", {"absent": sorted(absent)}).items():
        for number in each["absent"]:
            lacking.setdefault(int(number), set()).add(cluster_of(worker))
    return {
        number: frozenset(run.cluster_sizes) - lacking_clusters for number, lacking_clusters in sorted(lacking.items())
    }


# -------------------------------------------------------------- links and collectives
_DIRECTION_SECONDS = 0.3
"""The approximate seconds for which each direction of a link is measured, after shorter bursts."""
_ABOUT_SECONDS = 1.5
"""The approximate seconds of a link's measurement, including its round trips."""
COLLECTIVE_SIZES, COLLECTIVE_RUNS = (1 << 12, 1 << 16, 1 << 20), 5
COLLECTIVE_SECONDS = 1.0
"""The maximum seconds for which collectives inside a cluster are measured, or the budget if that is less."""
_PROGRAM = PROGRAMS - 1
_LOG = logging.getLogger("whale_nebula.runtime.run")


class LinkEnds(NamedTuple):
    """The workers between which a link is measured; the `first` one leads."""

    first: str
    second: str


def complete_collectives(name: str, clusters: Clusters, run: Run, budget: float, able: Collection[str]) -> Clusters:
    """Complete the cluster object that all processes of a run share with the collectives of clusters with several
    workers: those that were measured earlier in this run, and unknown ones, which are measured now. `able` are the
    clusters whose workers have collectives. All processes call it at the same point, with the same budget.
    """
    for each in run.measured_collectives:
        clusters = clusters.complete_from(each)
    unknown = [each.name for each in clusters.clusters if each.name in able and _has_unknown_collectives(each)]
    if not unknown or not budget:
        return clusters
    session, cluster = run.ledger.session, run.here().cluster
    first = {name: next(worker for worker, own in run.workers.items() if own == name) for name in unknown}
    found = _time_collectives(cluster, run, budget) if cluster in unknown else None
    leads = found is not None and session.worker == first[cluster]
    part = {"collectives": found.to_json() if found is not None and leads else ""}
    for _, each in sorted(session.share(f"the collectives for {name!r}", part).items()):
        if text := each["collectives"]:
            run.measured_collectives.append(Clusters.from_json(text, where=name))
            clusters = clusters.complete_from(run.measured_collectives[-1])
    config, others = find_config_path(run), run.hosts.get(first.get(cluster, "")) != run.hosts.get(session.worker)
    if config is not None and found is not None and (leads or others):
        path = link_advice.find_collectives_path(config, cluster)
        with suppress(NebulaError, OSError):  # a folder that cannot be written is not used
            path.parent.mkdir(exist_ok=True)
            found.save(path)
    return clusters


def _has_unknown_collectives(cluster: ClusterInfo) -> bool:
    """Whether the collectives of several workers are unknown."""
    return len(cluster.workers) > 1 and not cluster.inside.takes_time and not cluster.collectives


def _time_collectives(cluster: str, run: Run, budget: float) -> Clusters:
    """Measure the collectives among the workers of this process's cluster."""
    workers, joined = run.cluster_sizes[cluster], run.ledger.collectives
    most = min(budget, COLLECTIVE_SECONDS)
    _LOG.info("measuring the collectives of the %d workers of %s, which are not known", workers, cluster)
    group = joined.group(range(workers), "seconds of collectives")

    def has_time(seconds: float) -> bool:
        """Whether the slowest of all workers has time for the next size."""
        return bool(group.gather(np.array([1e3 * min(seconds, 1e3)], np.int32)).max() <= 1e3 * most)

    with joined.explain_failures(f"measuring the collectives of {cluster}"):
        timed = time_collectives(workers, COLLECTIVE_SIZES, COLLECTIVE_RUNS, has_time)
    among = fit_collectives(timed, COLLECTIVE_SIZES, workers)
    for each in among.collectives:
        _LOG.info("inside %s: %s", cluster, each)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    sources = {
        f"{cluster}.collectives.{kind}": Provenance(date, spread, fingerprint())
        for kind, spread in among.spreads.items()
    }
    return Clusters((ClusterInfo(cluster, (), collectives=among.collectives),), measured=sources)


def complete_lines(name: str, clusters: Clusters, run: Run, budget: float) -> Clusters:
    """Complete the cluster object that all processes of a run share with its links: those that were measured earlier in
    this run, and unknown ones, which are measured now, as many as a budget of seconds allows. All processes call it at
    the same point, with the same budget.
    """
    clusters = complete_from_lines(clusters, run.measured_links)
    session, unknown = run.ledger.session, list_unknown_links(clusters, run)
    unknown, left = unknown[: (most := math.ceil(budget / _ABOUT_SECONDS))], unknown[most:]
    if left and not run.measured_links:
        names = ", ".join(" - ".join(ends) for ends in left)
        _LOG.info("unknown links, for which measure: %g s leaves no time: %s", budget, names)
    if not unknown:
        return clusters
    session.expected.add_round(_PROGRAM, max(SIZES))
    session.exchange(f"measuring links for {name!r}", {}, set(session.links))  # from here on, no other data crosses
    own = [_measure_link(ends, clusters, run) for ends in unknown if session.worker in ends]
    part = {"lines": [each.to_json() for each in own if each.first == session.worker]}
    for _, each in sorted(session.share(f"the links for {name!r}", part).items()):
        run.measured_links += [link_advice.LinkMeasurement.from_json(text) for text in each["lines"]]
    return complete_from_lines(clusters, run.measured_links)


def list_unknown_links(clusters: Clusters, run: Run) -> Sequence[LinkEnds]:
    """The ends of links without a rate, in the same order in all processes: the first workers of two clusters, or the
    first two workers of one cluster.
    """
    workers = {name: [worker for worker, cluster in run.workers.items() if cluster == name] for name in clusters.names}
    found = []
    for number, (one, own) in enumerate(workers.items()):
        if len(own) > 1 and clusters.cluster(one).ring.rate_bytes_per_s is None:
            found.append(LinkEnds(*own[:2]))
        for other in list(workers)[number + 1 :]:
            ways = clusters.between(one, other), clusters.between(other, one)
            if own and workers[other] and any(way.rate_bytes_per_s is None for way in ways):
                found.append(LinkEnds(own[0], workers[other][0]))
    return found


def _measure_link(ends: LinkEnds, clusters: Clusters, run: Run) -> link_advice.LinkMeasurement:
    """Measure one link from this end, and store the result next to the config."""
    session = run.ledger.session
    leads = session.worker == ends.first
    link = session.links[ends.second if leads else ends.first]
    _LOG.info("measuring the link %s - %s, which is not known, for about %g s", *ends, _ABOUT_SECONDS)
    end = MeasurementEnd(
        link, leads=leads, seconds=_DIRECTION_SECONDS, patience=session.patience, report=_LOG.debug, kind="round",
        program=_PROGRAM,
    )  # fmt: skip
    one, other = run.workers[ends.first], run.workers[ends.second]
    through = one != other and run.config.gateway_of(one) is not None
    found = end.probe(link_advice.THROUGH if through else link_advice.DIRECT, time.time())
    largest = found.crossings[-1]
    _LOG.info(
        "the link %s - %s: %.3g mbit/s there, %.3g back, %.3g ms", *ends, largest.there * 8e-6, largest.back * 8e-6,
        1e3 * found.delay,
    )  # fmt: skip
    config = find_config_path(run)
    if config is not None and (leads or run.hosts.get(ends.first) != run.hosts.get(ends.second)):
        with suppress(NebulaError):  # a folder that cannot be written is not used
            link_advice.save_measurement(found, link_advice.find_measurement_path(config, *found.clusters))
    return found


# -------------------------------------------------------------- blocks
def measure_in_clusters(
    name: str,
    captured: Captured,
    layers: Layers,
    shapes: Sequence[tuple[int, ...]],
    clusters: Clusters,
    options: Options,
    run: Run,
    tensors: Sequence[Any] | None,
) -> tuple[dict[str, MeasuredBlocks], dict[str, float], BlockKeys | None]:
    """The seconds of blocks by cluster, the slowdowns of clusters, and the keys of what was measured here, None if
    nothing was. Blocks are measured here for the workers that this process is, or, in one process, that are on this
    machine, unless their FLOP/s are configured; measurements of earlier runs are used again. Those of other workers are
    received from them: all processes call it at the same point.
    """
    own = [each for each in clusters.workers if is_local(each.machine)]
    if not run.alone:
        own = [each for each in clusters.workers if each.name == run.ledger.session.worker]
    unknown = [each for each in own if lacks_speed(clusters, each)]
    program, count = captured.program, len(layers.chain)
    found = keys = None
    if unknown:
        points = _list_row_counts(options, layers)
        sizes = {rows: size_values(program, rows, set_rows(program.leaves, shapes, rows)) for rows in points}
        has_earlier = bool(run.config.elastic) and run.here().epoch > 0  # measurements of the start before
        keys, budget = find_block_keys(captured, layers, sizes), run.config.measure
        blocks = measure_blocks(name, captured, layers, sizes, budget, tensors, completes=not has_earlier, keys=keys)
        found = find_slowest([blocks], layers.rows)
    if run.alone:
        tables = {} if found is None else {cluster_of(each.name): found for each in unknown}
        return tables, read_slowness(clusters, True, tables), keys
    here = run.here().cluster
    shown = read_slowness(clusters, False, () if found is None else {here})
    part = {"blocks": {} if found is None else found.to_plain(), "slowness": shown.get(here, 0.0)}
    every: dict[str, list[MeasuredBlocks]] = {}
    slowness: dict[str, float] = {}
    for worker, costs in run.ledger.session.share(f"the costs of {name!r}", part).items():
        cluster = cluster_of(worker)
        every.setdefault(cluster, []).append(MeasuredBlocks.from_plain(costs["blocks"], count))
        slowness[cluster] = max(slowness.get(cluster, 0.0), costs["slowness"])
    slowest = {cluster: find_slowest(known, layers.rows) for cluster, known in every.items()}
    tables = {cluster: table for cluster, table in slowest.items() if table is not None}
    return tables, {cluster: factor for cluster, factor in slowness.items() if factor}, keys


def _list_row_counts(options: Options, layers: Layers) -> list[int]:
    """The numbers of rows for which blocks are measured: those of possible micro-batches."""
    if options.micro_batch is not None:
        rows = math.ceil(layers.rows / max(1, min(options.micro_batch, layers.rows)))
        return sorted({rows, math.ceil(rows / 2)})
    return sorted({math.ceil(layers.rows / parts) for parts in (1, 4, 16)})


def count_rows(leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]]) -> int:
    """The number of rows of a batch of these shapes; 1 if no input has rows."""
    return next((shape[0] for shape, leaf in zip(shapes, leaves, strict=True) if leaf.batched and shape), 1)


def set_rows(leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]], rows: int) -> list[tuple[int, ...]]:
    """The shapes of a batch with this number of rows."""
    pairs = zip(shapes, leaves, strict=True)
    return [(rows, *shape[1:]) if leaf.batched and shape else shape for shape, leaf in pairs]
