"""A local step of one cluster: training on its own rows, then any synchronisation that is due."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.errors import DeadlineError
from whale_nebula.feed.checks import MissingInput
from whale_nebula.feed.inputs import count_rows, slice_rows, unwrap_whole
from whale_nebula.ir.program import Leaf
from whale_nebula.launch.worker_exit import WorkerExit, exit_agreement
from whale_nebula.report.records import LinkReport, MeetingsReport
from whale_nebula.runtime.local_sgd.topology import ClusterSync, Participants, find_seeds, offset_seeds
from whale_nebula.runtime.session.absences import Absences
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.step.clock import Runner, StepOutcome
from whale_nebula.transport import Link, LinkTotals
from whale_nebula.wire.message import build_message

_LEAVING_MESSAGE = "LEAVING"


@dataclass
class LeaveRequests:
    """The workers that were asked to leave, and the steps after which all leave for that, by the number of the program
    that trains; there is one for all programs of a run. Links to clusters that may be lost are skipped when they are
    (`absences`).

    A worker announces its own request, or, if data pass through another worker, asks that one to announce it. `_asked`
    has the reasons by worker, as known to the one that announces them, and `_announced` what was announced.
    """

    worker: str
    links: Mapping[str, Link]
    absences: Absences = field(default_factory=Absences)
    _last_steps: dict[int, int] = field(default_factory=dict)
    _announced: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    _asked: dict[str, str] = field(default_factory=dict)

    def ask(self, announcer: str, why: str) -> None:
        """Let the `announcer`, maybe this worker itself, announce that this worker was asked to leave, and why."""
        if self._asked.get(self.worker) != why:
            self._asked[self.worker] = why
            if announcer != self.worker:
                self.links[announcer].post(build_message(_LEAVING_MESSAGE, program=0, step=0, why=why))

    def announce(self, program: int, step: int) -> None:
        """Announce the workers that were asked to leave: all leave after this step of this program. Each is announced
        once, and again if its reason changes while the step is the same.
        """
        for worker, why in self._asked.items():
            known = self._announced.get(worker)
            if known is None or (known[:2] == (program, step) and known[2] != why):
                for peer, link in self.links.items():
                    with self.absences.tolerate(peer):
                        link.post(build_message(_LEAVING_MESSAGE, program=program, step=step, why=why, worker=worker))
                self._record(worker, program, step, why)

    def receive(self) -> None:
        """Collect what others announce and ask for. Raises if one of them has stopped."""
        for peer, link in self.links.items():
            with self.absences.tolerate(peer), contextlib.suppress(DeadlineError):  # no more messages
                while True:
                    message = link.take(_LEAVING_MESSAGE, 0.0)
                    why, worker = message["why"], message.get("worker")
                    if worker is None:
                        self._asked[peer] = why
                    else:
                        known = worker == self.worker or worker in self.links
                        self._record(worker if known else peer, message["program"], message["step"], why)

    def is_last_step(self, program: int, steps: int) -> bool:
        """Whether a step was the last one of this program before all leave."""
        return program in self._last_steps and steps >= self._last_steps[program]

    def leave(self, program: int) -> None:
        """Stop after the last step of a program, when all have synchronised. Announcements for a later step or a
        different program are discarded, because some workers have not received them yet.
        """
        last = program, self._last_steps[program]
        exit_agreement.conclude_step(
            {worker: why for worker, (*at, why) in self._announced.items() if tuple(at) == last}
        )

    def _record(self, worker: str, program: int, step: int, why: str) -> None:
        self._last_steps[program] = min(step, self._last_steps.get(program, step))
        self._announced[worker] = program, step, why


@dataclass
class LeaveAgreement:
    """Agreement on leaving, for the steps of one program. Rounds have `every` steps, and `extra_rounds` is the maximum
    number of rounds by which another cluster may be ahead. `announcer` is the worker that announces the requests of
    this one: itself, or the one through which the data of all clusters pass, so that no data overtake its
    announcements.

    No worker passes the end of the second next round (and `extra_rounds` more rounds) without having received earlier
    announcements: all leave there. If several workers are asked to leave, the first of these steps counts.
    """

    leave_requests: LeaveRequests
    program: int
    every: int
    extra_rounds: int
    announcer: str

    def check(self, steps: int) -> None:
        """Before a step, after `steps` earlier ones: collect announcements, and announce who was asked to leave. Raises
        if a peer has stopped, and when all have agreed to leave.
        """
        exit_agreement.begin_step()
        self.leave_requests.receive()
        if (word := exit_agreement.announcement) is not None:
            self.leave_requests.ask(self.announcer, word)
        if self.announcer == self.leave_requests.worker:
            self.leave_requests.announce(self.program, steps + self.count_to_common(steps))

    def count_to_common(self, steps: int) -> int:
        """The number of steps, after `steps`, until one that no cluster begins before it has received what is announced
        now.
        """
        return (steps // self.every + 2 + self.extra_rounds) * self.every - steps

    def is_last_step(self, steps: int) -> bool:
        """After a step: whether it was the last one."""
        return self.leave_requests.is_last_step(self.program, steps)


@dataclass
class LocalSgdRunner(Runner):
    """Runner that runs a step of its clusters with an `inner` runner, and then what is due of their synchronisation.
    `make` opens the rounds of each local cluster at the first step. `interval_reason` is the reason for an interval
    that was chosen.
    """

    synchronizes_clusters = True
    inner: Runner
    leaves: Sequence[Leaf]
    participants: Participants
    make: Callable[[], Mapping[str, ClusterSync]]
    interval_reason: str = field(default="", kw_only=True)
    _sent_totals: Mapping[str, LinkTotals] = field(default_factory=dict)
    _seconds: float = 0.0
    _waited_seconds: float | None = None

    @property
    def innermost(self) -> Runner:
        """The runner of a single cluster's step."""
        return self.inner.innermost

    @cached_property
    def rounds(self) -> Mapping[str, ClusterSync]:
        """The rounds of each local cluster, created together with the other clusters at the first step."""
        made = self.make()
        self._sent_totals = count_sent(made)
        return made

    def report(self, outcome: StepOutcome, cluster: str, seconds: float) -> StepOutcome:
        """The outcome of a step of these seconds, with the bytes between clusters since the previous step, and this
        cluster's progress.
        """
        before, self._sent_totals = self._sent_totals, count_sent(self.rounds)
        since = {name: now - before.get(name, LinkTotals()) for name, now in self._sent_totals.items()}
        links = {name: LinkReport(*sent.counts()) for name, sent in since.items()}
        meetings = self._count_step(self.rounds[cluster], seconds)
        return replace(outcome, seconds=seconds, links={**outcome.links, **links}, meetings=meetings)

    def _count_step(self, rounds: ClusterSync, seconds: float) -> MeetingsReport:
        """The totals of a cluster's steps and meetings, after a step of these seconds. Seconds count from the first
        meeting, as steps before it include tracing.
        """
        if self._waited_seconds is None and rounds.round_count >= rounds.fragments:
            self._waited_seconds = rounds.wait_seconds
        elif self._waited_seconds is not None:
            self._seconds += seconds
        met, waited = rounds.round_count / max(1, rounds.fragments), rounds.wait_seconds - (self._waited_seconds or 0.0)
        crossed = sum(link.bytes for link in rounds.ends.count_sent().values())
        others = tuple(name for name in self.participants.names if name != rounds.ends.cluster)
        waited *= bool(self._seconds)
        reason, missed = self.interval_reason, rounds.missed
        return MeetingsReport(others, rounds.steps, met, self._seconds, waited, crossed, reason, missed)


@dataclass
class OwnClusterRunner(LocalSgdRunner):
    """Runner for the one cluster of this process; the other clusters are in other processes."""

    takes_partial_inputs = True
    cluster: str = field(kw_only=True)
    session: Session = field(kw_only=True)
    leave_agreement: LeaveAgreement = field(kw_only=True)
    settle: Callable[[], None] = field(kw_only=True)

    def count_to_common(self) -> int:
        """The number of steps until one that no cluster begins before it has received what is announced now."""
        return self.leave_agreement.count_to_common(self.rounds[self.cluster].steps)

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step; a failure is announced to all workers."""
        try:
            return self._run(tensors)
        except WorkerExit:  # all other processes do the same
            raise
        except BaseException as failure:
            self.session.fail(failure)
            raise

    def _run(self, tensors: Sequence[Any]) -> StepOutcome:
        rounds = self.rounds[self.cluster]
        rounds.begin()
        self.leave_agreement.check(rounds.steps)
        waited = rounds.wait_seconds
        own = select_own_rows(self.leaves, tensors, self.participants, self.cluster)
        outcome = self.inner.run(own if self.inner.takes_partial_inputs else unwrap_whole(self.leaves, own))
        rounds.send_due()
        rounds.apply_due()
        if self.leave_agreement.is_last_step(rounds.steps):
            self.settle()
            self.leave_agreement.leave_requests.leave(self.leave_agreement.program)
        return self.report(outcome, self.cluster, outcome.seconds + rounds.wait_seconds - waited)


def select_own_rows(
    leaves: Sequence[Leaf], tensors: Sequence[Any], participants: Participants, cluster: str
) -> list[Any]:
    """A cluster's share of a batch."""
    if not any(leaf.batched for leaf in leaves):
        return list(tensors)
    participants.rows(cluster, count_rows(leaves, tensors))  # refuses too few rows, or different numbers in inputs
    cut = (leaf.batched and not isinstance(each, MissingInput) for leaf, each in zip(leaves, tensors, strict=True))
    return [
        slice_rows(each, participants.rows, cluster) if own else each for each, own in zip(tensors, cut, strict=True)
    ]


@dataclass
class VariableCopies:
    """The variables of all clusters except the first, if one process runs all: copies of the model's variables, by the
    ids of these. `last_values` are the values of the model's variables after the last step, and `seeds` the ids of
    those that differ between clusters.
    """

    copies_by_cluster: dict[str, dict[int, Any]] = field(default_factory=dict)
    last_values: dict[int, Any] = field(default_factory=dict)
    seeds: set[int] = field(default_factory=set)

    def find_copies(self, cluster: str, variables: Mapping[str, Any], place: int) -> dict[int, Any]:
        """A cluster's copies of these variables, created from the model's variables on first use."""
        own = self.copies_by_cluster.setdefault(cluster, {})
        fresh = {path: variable for path, variable in variables.items() if id(variable) not in own}
        made = {path: tf.Variable(variable, trainable=False) for path, variable in fresh.items()}
        offset_seeds(made, place)
        self.seeds.update(id(seed) for seed in find_seeds(fresh).values())
        own.update({id(variable): made[path] for path, variable in fresh.items()})
        return own

    def record_values(self, variables: Iterable[Any]) -> None:
        """Record the values of the model's variables, if they have copies: what differs from these values later was
        written by the script.
        """
        if self.copies_by_cluster:
            self.last_values.update({id(variable): variable.read_value() for variable in variables})

    def propagate_writes(self, variables: Iterable[Any], held: Mapping[int, Any] | None = None) -> None:
        """Propagate writes to the model's variables (a learning rate, a layer's weights) to all copies, because every
        process of a run makes these writes. Some variables have `held` values instead of the present ones, by their
        ids.
        """
        for variable in variables if self.copies_by_cluster else ():
            before = None if id(variable) in self.seeds else self.last_values.get(id(variable))
            value = variable.read_value() if held is None else held.get(id(variable), variable.read_value())
            if before is not None and not _is_same(before.numpy(), value.numpy()):
                for own in self.copies_by_cluster.values():
                    if id(variable) in own:
                        own[id(variable)].assign(value)

    def reset_copies(self, variables: Collection[Any]) -> None:
        """Set all copies to the values of the model's variables, which were replaced."""
        for own in self.copies_by_cluster.values():
            for variable in variables:
                if id(variable) in own:
                    own[id(variable)].assign(variable)


@dataclass
class AllClustersRunner(LocalSgdRunner):
    """Runner that runs a step for each cluster in turn, in one process. Results are those of the first cluster, for its
    rows.
    """

    variables: Mapping[str, Any] = field(kw_only=True)
    copies: VariableCopies = field(kw_only=True)

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        rounds = self.rounds
        self.copies.propagate_writes(self.variables.values())
        for each in rounds.values():
            each.begin()
        began = time.perf_counter()
        first, *others = self.participants.names
        for cluster in others:
            with self._use_copies(cluster):
                self.inner.run(select_own_rows(self.leaves, tensors, self.participants, cluster))
        outcome = self.inner.run(select_own_rows(self.leaves, tensors, self.participants, first))
        for each in rounds.values():
            each.send_due()
        for each in rounds.values():
            each.apply_due()
        self.copies.record_values(self.variables.values())
        return self.report(outcome, first, time.perf_counter() - began)

    @contextlib.contextmanager
    def _use_copies(self, cluster: str) -> Iterator[None]:
        """Swap a cluster's copies into the model's variables while this is open."""
        own = self.copies.find_copies(cluster, self.variables, self.participants.names.index(cluster))
        first = {path: tf.identity(variable) for path, variable in self.variables.items()}
        for variable in self.variables.values():
            variable.assign(own[id(variable)])
        try:
            yield
            for variable in self.variables.values():
                own[id(variable)].assign(variable)
        finally:
            for path, variable in self.variables.items():
                variable.assign(first[path])


def _is_same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def count_sent(rounds: Mapping[str, ClusterSync]) -> Mapping[str, LinkTotals]:
    """The totals of the links from these clusters to others, by link."""
    return {name: totals for each in rounds.values() for name, totals in each.ends.count_sent().items()}
