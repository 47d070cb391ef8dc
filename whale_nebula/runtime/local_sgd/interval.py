"""The interval of `nb.replica(sync_every="auto")`: the smallest number of steps that hides an exchange of all
differences. The seconds of a step are those of the planner's cost model, with measured blocks, for each cluster's own
rows; the seconds of an exchange are derived from the bytes of the codec, and from the rates and delays of the links.
All processes use the same numbers, so they choose the same interval.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whale_nebula.capture.step import Captured, Signature
from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.codec.sizes import choose_codec, cost
from whale_nebula.errors import PlanError
from whale_nebula.hardware import Clusters, LinkRate
from whale_nebula.ir.program import ASYNC, LocalSgd
from whale_nebula.planner.chain import Layers, build_layers
from whale_nebula.planner.cluster_costs import Measured, build_problem
from whale_nebula.planner.decision import Unplanned
from whale_nebula.planner.problem import Candidate, Options, Part, Shape
from whale_nebula.planner.score import score
from whale_nebula.report.records import duration, size
from whale_nebula.runtime.auto_parallel import shapes_of_batch
from whale_nebula.runtime.clusters import find_configured
from whale_nebula.runtime.decisions import (
    StepKnowledge,
    agree_on_planning_input,
    count_rows,
    measure_in_clusters,
    set_rows,
)
from whale_nebula.runtime.local_sgd.topology import (
    Participants,
    count_encoded_bytes,
    count_numbers,
    find_dims,
    find_participants,
    find_weights,
)
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.schedule.rounds import MAX_INTERVAL, choose_delay, choose_fragments, list_ranges

MAX_SHARE = 0.5
"""The maximum share of the steps between two rounds that an exchange may take."""
MAX_WAIT_SHARE = 0.02
"""The share of these steps by which they may additionally wait for an exchange."""
_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass(frozen=True)
class Exchange:
    """An exchange of the differences of `numbers` weights, encoded by `codec`, over these links. `coding` is the time
    to encode and decode a number, in seconds. In the mode "async" each difference `is_answered` by a server.

    >>> line = {("gpu", "npu"): LinkRate(7.5e6, 0.02)}
    >>> Exchange(1_000_000, lines=line).seconds(1_000_000), Exchange(1_000_000, "int8", line).seconds(1_000_000) < 0.2
    (0.553..., True)
    """

    numbers: int
    codec: str = "none"
    lines: Mapping[tuple[str, str], LinkRate] | None = None
    coding: float = 0.0
    is_answered: bool = False

    def seconds(self, count: int) -> float:
        """Seconds until this many numbers, and in async mode their answer, are encoded, have crossed the slowest link,
        and are decoded.
        """
        sent = count_encoded_bytes(self.codec, count)
        trip = max((line.seconds(sent) for line in (self.lines or {}).values()), default=0.0)
        return (trip + self.coding * count) * (1 + self.is_answered)

    @property
    def slowest(self) -> str:
        """The name of the link on which the exchange takes longest, "gpu->npu"."""
        sent, lines = count_encoded_bytes(self.codec, self.numbers), self.lines or {}
        one, other = max(lines, key=lambda ends: lines[ends].seconds(sent))
        return f"{one}->{other}"

    def waits(self, local_sgd: LocalSgd, step: float) -> float:
        """Seconds for which steps of `step` seconds wait for the exchange in an interval of these options."""
        if self.is_answered:
            return max(0.0, self.seconds(self.numbers) - local_sgd.every * step)
        count = local_sgd.fragments or choose_fragments(self.numbers, local_sgd.every)
        sizes = (end - begin for begin, end in list_ranges(self.numbers, count))
        return sum(max(0.0, self.seconds(each) - local_sgd.delay * step) for each in sizes if each)

    def is_hidden(self, local_sgd: LocalSgd, step: float) -> bool:
        """Whether the steps of an interval hide the exchange."""
        between = local_sgd.every * step
        return (
            self.seconds(self.numbers) <= MAX_SHARE * between
            and self.waits(local_sgd, step) <= MAX_WAIT_SHARE * between
        )


def set_interval(local_sgd: LocalSgd, every: int) -> LocalSgd:
    """The options with this interval, and with a delay for it unless one is given."""
    return replace(local_sgd, every=every, delay=choose_delay(every) if local_sgd.delay < 0 else local_sgd.delay)


def find_interval(local_sgd: LocalSgd, exchange: Exchange, step: float) -> LocalSgd:
    """The options with the smallest interval that hides an exchange behind steps of `step` seconds, or the largest one
    allowed.

    >>> from whale_nebula.ir.program import UNDECIDED
    >>> slow = Exchange(1_000_000, lines={("gpu", "npu"): LinkRate(7.5e6, 0.02)})
    >>> find_interval(LocalSgd(UNDECIDED, delay=UNDECIDED), slow, 0.05).every
    23
    >>> find_interval(LocalSgd(UNDECIDED), Exchange(9), 0.05).every
    1
    """
    tried = (set_interval(local_sgd, every) for every in range(_find_least_interval(local_sgd), MAX_INTERVAL + 1))
    return next((each for each in tried if exchange.is_hidden(each, step)), set_interval(local_sgd, MAX_INTERVAL))


def _find_least_interval(local_sgd: LocalSgd) -> int:
    """The smallest interval with a step for each fragment, in which each is applied before it is sent again."""
    return max(local_sgd.fragments, local_sgd.delay + 1, 1)


# ---------------------------------------------------------------------- for a captured step
def choose_interval(name: str, captured: Captured, layout: Signature, tensors: Sequence[Any] | None = None) -> Captured:
    """The captured step with the interval that is chosen for its weights, if it has `sync_every="auto"`: the same for
    each step of these weights in a run, and in a resumed run. A step that does not train uses the interval of the
    training, if one was chosen before. `tensors` are its first batch, if there is one. Collective for a step that
    trains.
    """
    local_sgd, run = captured.program.local_sgd, current_run()
    if local_sgd is None or not local_sgd.is_undecided:
        return captured
    handles = {id(variable.handle) for variable in captured.variables.values()}
    known = next((chosen for chosen, own in run.intervals if own & handles), None)
    if known is None:
        participants = find_participants(local_sgd, run)
        if not captured.program.requests or len(participants.names) == 1:
            return captured
        known = _choose_interval(name, captured, local_sgd, layout, tensors, run, participants)
        weights = find_weights(captured.program, captured.variables, ()).values()
        run.intervals.append((known, frozenset(id(variable.handle) for variable in weights)))
        if run.checkpoints is not None:
            run.checkpoints.intervals[name] = known.every
        _LOG.info("%s: %s", name, known.chosen)
    found = replace(set_interval(local_sgd, known.every), chosen=known.chosen)
    before = () if captured.decision is None else (captured.decision.reason,)
    reason = " ".join((*before, f"{known.chosen[0].upper()}{known.chosen[1:]}."))
    return replace(captured, program=replace(captured.program, local_sgd=found), decision=Unplanned(reason))


def _choose_interval(
    name: str,
    captured: Captured,
    local_sgd: LocalSgd,
    layout: Signature,
    tensors: Sequence[Any] | None,
    run: Run,
    participants: Participants,
) -> LocalSgd:
    """The options with an interval and the reason for it: that of the resumed run, or a new one."""
    saved = None if run.checkpoints is None else run.checkpoints.intervals.get(name)
    if saved is not None and saved >= _find_least_interval(local_sgd):
        chosen = set_interval(local_sgd, saved)
        return replace(
            chosen, chosen=f"the clusters synchronise every {_format_steps(saved)}, as before this run was saved"
        )
    if len(captured.program.requests) > 1:
        raise _interval_error(
            local_sgd, "the step requests gradients more than once, so its duration cannot be predicted"
        )
    shapes, program = shapes_of_batch(layout, tensors), captured.program
    rows = count_rows(program.leaves, shapes)
    agreed = agree_on_planning_input(name, find_configured(run, participants.names), StepKnowledge(rows), run)
    clusters, rows = agreed.clusters, agreed.known.rows
    exchange = _build_exchange(captured, local_sgd, clusters, participants, run)
    layers = build_layers(program, rows, set_rows(program.leaves, shapes, rows))
    if layers is None:
        raise _interval_error(local_sgd, "no op of the step reads a variable, so its duration cannot be predicted")
    options = Options()
    measured, *_ = measure_in_clusters(name, captured, layers, shapes, clusters, options, run, tensors)
    _check_speeds(local_sgd, clusters, measured)
    seconds = _predict_steps(captured, layers, clusters, measured, participants)
    slowest = max(seconds, key=seconds.__getitem__)
    found = find_interval(local_sgd, exchange, seconds[slowest])
    return replace(found, chosen=_explain(found, exchange, slowest, seconds[slowest]))


def _build_exchange(
    captured: Captured, local_sgd: LocalSgd, clusters: Clusters, participants: Participants, run: Run
) -> Exchange:
    """The exchange of a step's weights. Raises if the rate of a link is not known."""
    names = participants.names
    pairs = [(a, b) for a in names for b in names if a != b and (local_sgd.mode != ASYNC or names[0] in (a, b))]
    lines = {(a, b): clusters.between(a, b) for a, b in pairs}
    unknown = next((ends for ends, line in lines.items() if line.rate_bytes_per_s is None), None)
    if unknown is not None and not run.alone:
        where = f"links: [{{between: [{', '.join(unknown)}], rate: 60mbit, delay: 20ms}}] in the config"
        why = f"the rate of the link {'->'.join(unknown)} is not known"
        raise _interval_error(local_sgd, why, f"{where}, or whale-nebula bench link")
    count = count_numbers(find_weights(captured.program, captured.variables, ()))
    dims = find_dims(count)
    used = choose_codec(parse_encoding(local_sgd.codec).codec, "float32", dims)
    each = clusters.codecs.get(str(used))
    taken = cost(used, dims) if used is not None else None
    coding = 4 * each if each is not None else 0.0 if taken is None else taken.seconds / count
    return Exchange(count, local_sgd.codec, lines, coding if used is not None else 0.0, local_sgd.mode == ASYNC)


def _check_speeds(local_sgd: LocalSgd, clusters: Clusters, measured: Measured) -> None:
    """Refuse clusters whose step cannot be predicted: their FLOP rate is not known, and no block was measured."""
    for cluster in clusters.clusters:
        known = all(worker.device.flops_per_s is not None for worker in cluster.workers)
        if cluster.name not in measured and not known:
            raise _interval_error(
                local_sgd,
                f"the speed of cluster {cluster.name} is not known, and its steps are not measured in this process",
                f"flops: 5T of clusters.{cluster.name} in the config, or measure: 10s",
            )
        blocks = measured.get(cluster.name)
        if blocks is not None and not known and all(math.isnan(each) for each in blocks.forward[0]):
            raise _interval_error(
                local_sgd,
                f"no block of the step was measured in cluster {cluster.name}",
                f"measure: 10s in the config, or flops: 5T of clusters.{cluster.name}",
            )


def _interval_error(local_sgd: LocalSgd, why: str, mend: str = "") -> PlanError:
    others = f"{mend}; or a number: " if mend else ""
    return PlanError(
        'no interval can be chosen for sync_every="auto"',
        where=local_sgd.where,
        why=why,
        mend=f"{others}nb.replica(sync_every=100)",
    )


def _predict_steps(
    captured: Captured, layers: Layers, clusters: Clusters, measured: Measured, participants: Participants
) -> dict[str, float]:
    """The predicted seconds of a step of each cluster with its own rows, as one stage, on all its workers or as many as
    the scopes specify.
    """
    constraints = captured.constraints
    counts = [constraints.replicas, *(stage.replicas for stage in constraints.stages)]
    count = max((each for each in counts if each), default=0)
    problem = build_problem(layers, clusters, Options(), measured)
    problem = replace(problem, clusters=tuple(replace(each, memory=math.inf) for each in problem.clusters))
    found = {}
    for number, each in enumerate(problem.clusters):
        begin, end = participants.rows(each.name, layers.rows)
        copies = min(count or each.workers, max(1, end - begin))
        micro_batches = max(constraints.pipeline.micro_batch, copies)
        shape = Shape((Part(number, 0, len(layers.chain), copies),), micro_batches, constraints.pipeline.recompute)
        scored = score(replace(problem, rows=max(1, end - begin)), shape)
        if isinstance(scored, Candidate):
            found[each.name] = scored.seconds
    return found


def _explain(chosen: LocalSgd, exchange: Exchange, cluster: str, step: float) -> str:
    takes, between = exchange.seconds(exchange.numbers), chosen.every * step
    how = f"an exchange takes {duration(takes)}" + f" on {exchange.slowest}" * bool(takes)
    how += f" ({size(count_encoded_bytes(exchange.codec, exchange.numbers))})"
    how += f", {_format_steps(chosen.every)} of {cluster} take {duration(between)}"
    met = f"the clusters synchronise every {_format_steps(chosen.every)}, chosen by sync_every='auto': {how}"
    if exchange.is_hidden(chosen, step):
        return f"{met}; the limit is {MAX_SHARE:.0%} of them" + f", and a piece {_format_steps(chosen.delay)}" * bool(
            chosen.delay
        )
    waits = duration(exchange.waits(chosen, step))
    return f"{met}; even the longest interval does not hide it, and clusters wait {waits}: use nb.compress"


def _format_steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"
