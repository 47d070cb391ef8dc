"""The engine's interface to local SGD: the other clusters, and the hooks around a cluster's own step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from whale_nebula.capture.places import warn_once
from whale_nebula.capture.step import Captured
from whale_nebula.errors import NebulaWarning, NotYetError
from whale_nebula.ir.canonical import digest_lines, first_difference
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.program import Apart
from whale_nebula.runtime.local_sgd.opening import Opened
from whale_nebula.runtime.local_sgd.step import LeavesTogether, TakesTurns, TrainsApart
from whale_nebula.runtime.local_sgd.topology import Sites, sites_of, weights_of
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.step.clock import Runner
from whale_nebula.site import script_site


@dataclass(frozen=True)
class OfClusters:
    """A step of which each cluster trains, or only runs, a copy."""

    apart: Apart
    captured: Captured
    run: Run
    sites: Sites
    models: Sequence[Any]

    @property
    def near(self) -> Session:
        """The conversation with the other workers of this cluster."""
        session: Session = self.run.ledger.session
        return session.among(self.mates)

    @property
    def mates(self) -> tuple[str, ...]:
        """The other workers of this cluster."""
        here = self.run.here()
        return () if here.alone else tuple(w for w in self.sites.workers[here.cluster] if w != here.worker)

    @property
    def far(self) -> tuple[str, ...]:
        """The workers of the other clusters."""
        own = self.run.here().cluster
        return tuple(worker for worker, cluster in self.run.workers.items() if cluster != own)

    def check(self, cut: Cut) -> None:
        """Every worker of this cluster has a copy of all that is trained: what it tells the others is one thing."""
        own = [worker.name for worker in cut.workers]
        weights = weights_of(self.captured.program, self.captured.variables, self.models)
        self._check_weights(weights)
        for path in weights if self.captured.program.requests else ():
            lacking = next((worker for worker in own if worker not in cut.held[path]), None)
            if lacking is not None:
                raise NotYetError(
                    "a cluster that trains apart with workers that have no copy of all of it",
                    where=self.apart.where,
                    why=f"worker {lacking} of {', '.join(own)} does not have {path!r}",
                    mend="nb.replica(sync_every=...) around one stage and without a count: as many copies as workers",
                )

    def _check_weights(self, weights: Mapping[str, Any]) -> None:
        """What would be another thing after a meeting."""
        if not self.captured.program.requests or len(self.sites.names) == 1:
            return
        wide = next((path for path, variable in weights.items() if variable.dtype.size > _BYTES), None)
        if wide is not None:
            raise NotYetError(
                f"weights of {weights[wide].dtype.name} that are trained apart",
                where=f"{wide}, {self.apart.where}",
                why="differences cross as float32",
                mend='dtype="float32" for that layer, or leave sync_every out',
            )
        if any(getattr(getattr(model, "optimizer", None), "use_ema", False) for model in self.models):
            raise NotYetError(
                "an optimizer with use_ema=True whose clusters train apart",
                where=self.apart.where,
                why="each cluster would write averages of its own over what all share",
                mend="use_ema=False, or leave sync_every out",
            )

    def alone(self) -> None:
        """A process that is all of its cluster: variables have their values now, and all of them are here."""
        if self.run.alone:
            return
        self.captured.begin(lambda variable: True)
        own = self.run.here().worker
        held = dict.fromkeys(self.captured.variables, (own,))
        self.run.ledger.settle(self.captured.variables, held, self.far)

    def around(self, inner: Runner) -> Runner:
        """What runs the cluster's step, and then what is due between the clusters; steps that do not train meet nobody,
        nor does a cluster that is the only one.
        """
        program, variables, run = self.captured.program, self.captured.variables, self.run
        if not program.requests or len(self.sites.names) == 1:
            return inner
        weights = weights_of(program, variables, self.models)
        opened: Opened = run.rounds
        make = partial(opened.here, self.apart, self.sites, weights, variables)
        if run.alone:
            return TakesTurns(inner, program.leaves, self.sites, make, variables=variables, copies=opened.copies)
        own, session = run.here().cluster, run.ledger.session
        leaving = LeavesTogether(opened.asked, run.programs, self.apart.every, self.apart.staleness)
        return TrainsApart(
            inner, program.leaves, self.sites, make, cluster=own, session=session, leaving=leaving, settle=opened.settle
        )


def of_clusters(apart: Apart, captured: Captured, run: Run, name: str, models: Sequence[Any]) -> OfClusters:
    """Who trains this apart. Those that do agree on what it is that they tell each other of."""
    if run.rounds is None:
        run.rounds = Opened(run)
        run.closers.append(run.rounds.close)
    found = OfClusters(apart, captured, run, sites_of(apart, run), models)
    if captured.program.requests and len(found.sites.names) == 1:
        _tell_alone(apart, found.sites.names[0])
    if captured.program.requests and not run.alone:
        lines = _lines(apart, captured, models, found.sites)
        session = run.ledger.session
        try:
            session.agree(name, digest_lines(lines), lines, first_difference)
        except BaseException as failure:
            session.fail(failure)
            raise
    return found


_BYTES = 4


def _tell_alone(apart: Apart, name: str) -> None:
    """There is nobody to meet."""
    warning = NebulaWarning(
        f"nb.replica(sync_every={apart.every}) meets nobody: {name!r} is the only cluster",
        where=apart.where,
        why="each cluster trains a copy, and there is one; the step runs as it would without it",
        mend='name them, nb.cluster(["gpu", "npu"]), or give a config that does: nb.init("clusters.yaml")',
    )
    warn_once(script_site(), warning, apart.where)


def _lines(apart: Apart, captured: Captured, models: Sequence[Any], sites: Sites) -> tuple[str, ...]:
    """What must be the same in all clusters: how they train apart, how fast each is, and their weights."""
    weights = weights_of(captured.program, captured.variables, models)
    speeds = (f"cluster {name} of speed {speed:g}" for name, speed in sites.speeds.items())
    held = (f"weight {path} {variable.dtype.name}{list(variable.shape)}" for path, variable in weights.items())
    return (f"apart {apart}", *speeds, *held)
