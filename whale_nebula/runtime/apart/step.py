"""A step of one cluster among those that train apart: its own rows, then what is due between them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from whale_nebula.feed.absent import Missing
from whale_nebula.feed.batch import rows_of
from whale_nebula.feed.inputs import sliced, whole
from whale_nebula.ir.program import Leaf
from whale_nebula.launch.leaving import Leaving
from whale_nebula.report.records import LinkReport, MeetingsReport
from whale_nebula.runtime.apart.leaving import LeavesTogether
from whale_nebula.runtime.apart.meetings import Meetings
from whale_nebula.runtime.apart.sites import Sites
from whale_nebula.runtime.distributed import DistributedStep
from whale_nebula.runtime.outcome import StepOutcome
from whale_nebula.runtime.session import Session


class Runner(Protocol):
    """What runs a cluster's own step."""

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        ...


@dataclass
class Since:
    """Counts from the first meeting on: before it steps are traced, each in its own time."""

    seconds: float = 0.0
    _waited: float | None = None

    def step(self, rounds: Meetings, seconds: float) -> MeetingsReport:
        """Where a cluster stands with the others after one more step, which took so long."""
        if self._waited is None and rounds.met >= rounds.fragments:
            self._waited = rounds.waited
        elif self._waited is not None:
            self.seconds += seconds
        met, waited = rounds.met / max(1, rounds.fragments), rounds.waited - (self._waited or 0.0)
        crossed = sum(link.bytes for link in rounds.ends.sent().values())
        others = tuple(rounds.ends.others)
        return MeetingsReport(others, rounds.steps, met, self.seconds, waited * bool(self.seconds), crossed)


@dataclass
class TrainsApart:
    """One cluster's part in this process; the others are in processes of their own."""

    inner: Runner
    leaves: Sequence[Leaf]
    sites: Sites
    cluster: str
    session: Session
    make: Callable[[], Meetings]
    leaving: LeavesTogether
    settle: Callable[[], None]
    _rounds: Meetings | None = None
    _sent: Mapping[str, LinkReport] = field(default_factory=dict)
    _since: Since = field(default_factory=Since)

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step; what fails here is told to all."""
        try:
            return self._run(tensors)
        except Leaving:  # so do all others
            raise
        except BaseException as failure:
            self.session.fail(failure)
            raise

    def _run(self, tensors: Sequence[Any]) -> StepOutcome:
        rounds = self.rounds
        rounds.begin()
        self.leaving.look(rounds.steps)
        waited = rounds.waited
        own = own_rows(self.leaves, tensors, self.sites, self.cluster)
        outcome = self.inner.run(own if isinstance(self.inner, DistributedStep) else whole(self.leaves, own))
        rounds.tell()
        rounds.take()
        if self.leaving.now(rounds.steps):
            self.settle()
            self.leaving.leave()
        before, self._sent = self._sent, rounds.ends.sent()
        links = {name: less(sent, before.get(name)) for name, sent in self._sent.items()}
        seconds = outcome.seconds + rounds.waited - waited
        meetings = self._since.step(rounds, seconds)
        return replace(outcome, seconds=seconds, links={**outcome.links, **links}, meetings=meetings)

    @property
    def rounds(self) -> Meetings:
        """Those of its weights, made together with the other clusters at the first step."""
        if self._rounds is None:
            self._rounds = self.make()
            self._sent = self._rounds.ends.sent()
        return self._rounds


def own_rows(leaves: Sequence[Leaf], tensors: Sequence[Any], sites: Sites, cluster: str) -> list[Any]:
    """A cluster's share of a batch."""
    if not any(leaf.batched for leaf in leaves):
        return list(tensors)
    sites.rows(cluster, rows_of(leaves, tensors))  # refuses rows that are not enough, or not as many in each input
    cut = (leaf.batched and not isinstance(each, Missing) for leaf, each in zip(leaves, tensors, strict=True))
    return [sliced(each, sites.rows, cluster) if own else each for each, own in zip(tensors, cut, strict=True)]


def less(now: LinkReport, before: LinkReport | None) -> LinkReport:
    """What has gone since."""
    was = before or LinkReport()
    return LinkReport(
        now.payload_bytes - was.payload_bytes, now.bytes - was.bytes, now.raw_bytes - was.raw_bytes,
        now.frames - was.frames,
    )  # fmt: skip
