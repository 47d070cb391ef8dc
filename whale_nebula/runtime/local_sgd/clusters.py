"""Local SGD for the engine: clusters that train separate copies, and the lifecycle of a run's rounds.

Rounds are opened for a set of weights, settled (all clusters synchronise) before reads of these weights, and restarted
after writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import google_crc32c
import keras
import numpy as np
import tensorflow as tf

from whale_nebula.capture.step import Captured
from whale_nebula.codec.encoding import parse_encoding
from whale_nebula.config import Links
from whale_nebula.errors import NotYetError, PlanMismatchError
from whale_nebula.ir.canonical import describe_first_difference, digest_lines
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.outer_optimizer import Numbers
from whale_nebula.ir.program import ASYNC, LocalSgd
from whale_nebula.runtime.local_sgd.async_mode import Pushes, Server
from whale_nebula.runtime.local_sgd.attendance import DecidedEnds, accept_return, continue_without
from whale_nebula.runtime.local_sgd.one_bit import ExchangedWeights, OneBitRounds, find_exchanged, make_one_bit_rounds
from whale_nebula.runtime.local_sgd.one_bit_collectives import CollectiveEnds, MemberRounds
from whale_nebula.runtime.local_sgd.step import (
    AllClustersRunner,
    LeaveAgreement,
    LeaveRequests,
    OwnClusterRunner,
    VariableCopies,
)
from whale_nebula.runtime.local_sgd.sync_rounds import Rounds
from whale_nebula.runtime.local_sgd.topology import (
    Attendance,
    ClusterSync,
    Differences,
    Ends,
    FlatVariables,
    Participants,
    find_participants,
    find_seeds,
    find_weights,
    name_sender,
    offset_seeds,
    read_numbers,
)
from whale_nebula.runtime.run import Run
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.step.clock import Runner
from whale_nebula.schedule.rounds import Timetable, choose_fragments
from whale_nebula.site import script_site, warn_once
from whale_nebula.transport import MemoryNetwork

_LOG = logging.getLogger("whale_nebula.runtime.run")
_MAX_NUMBER_BYTES = 8
"""The maximum bytes of a number in transit: a large share by topk takes more bytes than all numbers uncompressed."""
_MAX_HEADER_BYTES = 1 << 10
"""The maximum bytes of a codec's header."""


@dataclass
class OpenRounds:
    """All rounds of a run; steps that train the same set of weights share one. `names` are the participants.
    `own_cluster` is the one whose copy the variables of this process hold, and `own_workers` its workers: the first
    participant if the process runs all. `absent` are the participants that miss meetings now, by the rule `attendance`.
    """

    run: Run
    copies: VariableCopies = field(default_factory=VariableCopies)
    _rounds_by_weights: dict[frozenset[int], Mapping[str, ClusterSync]] = field(default_factory=dict)
    _options: dict[frozenset[int], tuple[LocalSgd, ExchangedWeights | None]] = field(default_factory=dict)
    _variables: dict[int, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    own_cluster: str = ""
    own_workers: tuple[str, ...] = ()
    attendance: Attendance = field(default_factory=Attendance)
    absent: set[str] = field(default_factory=set)
    _opened_count: int = 0

    def note_own(self, participants: Participants) -> None:
        """Record the participant that this process belongs to."""
        self.own_cluster = participants.find_own(self.run)
        self.own_workers = participants.workers[self.own_cluster]

    @property
    def first_present(self) -> str:
        """The first participant that is not absent."""
        return next((name for name in self.names if name not in self.absent), "")

    def note_absent(self, clusters: Collection[str]) -> None:
        """Go on without those of these clusters that were present until now."""
        fresh = [name for name in self.names if name in clusters and name not in self.absent]
        if fresh:
            self.absent.update(fresh)
            continue_without(self.run, fresh)

    def _apply_attendance(self, participants: Participants) -> None:
        """Apply the rule on absence of these participants, some of which may be absent from the start."""
        self.attendance = participants.attendance
        if self.attendance.decider:
            self.absent.update(name for name in participants.names if name not in participants.workers)
            lost = frozenset() if self.attendance.restarts_together else self.attendance.may_miss
            absences = self.run.ledger.session.absences
            absences.clusters, absences.on_loss = lost, partial(accept_return, self.run)

    def list_rounds(self) -> list[Mapping[str, ClusterSync]]:
        """The rounds of each set of weights, by the clusters that are in this process."""
        return list(self._rounds_by_weights.values())

    def trains_any(self, variables: Iterable[Any]) -> bool:
        """Whether the clusters train any of these variables."""
        trained = frozenset[int]().union(*self._rounds_by_weights)
        return any(id(getattr(each, "value", each)) in trained for each in variables)

    def read_shared(self) -> dict[int, Numbers]:
        """The weights that all clusters share, by the ids of the variables of this process."""
        each_first = [next(iter(rounds.values())) for rounds in self._rounds_by_weights.values()]
        return {
            id(variable): numbers.copy()
            for first in each_first
            if first.shared is not None
            for variable, numbers in first.flat.divide(first.shared)
        }

    @cached_property
    def leave_requests(self) -> LeaveRequests:
        """The requests of all workers of this run to leave."""
        session = self.run.ledger.session
        return LeaveRequests(session.worker, session.links, session.absences)

    def open_rounds(
        self, local_sgd: LocalSgd, participants: Participants, weights: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Mapping[str, ClusterSync]:
        """The rounds of these weights in this process, by cluster: of its own cluster, or of all clusters if it runs
        all. `variables` are all variables that the step touches.
        """
        key = frozenset(id(variable) for variable in weights.values())
        exchanged = find_exchanged(weights, variables, local_sgd.where) if local_sgd.exchange else None
        options = replace(local_sgd, where=""), exchanged
        if key in self._rounds_by_weights and self._options[key] != options:
            self.settle()
            for each in self._rounds_by_weights.pop(key).values():
                each.close()
        is_open = key in self._rounds_by_weights
        if not is_open:
            self._options[key], self.names = options, participants.names
            self._apply_attendance(participants)
            self._check_disjoint(key, weights, local_sgd)
        fresh = {path: variable for path, variable in variables.items() if id(variable) not in self._variables}
        self._variables.update({id(variable): variable for variable in fresh.values()})
        if is_open and not self.run.alone:
            offset_seeds(fresh, participants.names.index(self.own_cluster))
        if not is_open:
            self._opened_count += 1
            make = self._make_all_clusters if self.run.alone else self._make_own_cluster
            self._rounds_by_weights[key] = make(local_sgd, participants, weights, fresh, exchanged)
        return self._rounds_by_weights[key]

    def propagate_writes(self, held: Mapping[int, Any]) -> None:
        """Propagate what the script has written to variables since the last step to the copies of other clusters in
        this process, as before a step. Some variables have `held` values instead of the present ones, by their ids.
        """
        self.copies.propagate_writes(self._variables.values(), held)

    def settle(self) -> None:
        """Synchronise the weights of all clusters; every process calls it at the same point."""
        with self.run.share_failures():
            self._settle()

    def synchronize_before_leaving(self) -> None:
        """Synchronise before all workers leave after this step, unless checkpoints contain exchanges in flight."""
        if self.run.checkpoints is None:
            self.settle()

    def _settle(self) -> None:
        self.copies.propagate_writes(self._variables.values())
        for rounds in self._rounds_by_weights.values():
            if all(each.is_synchronized for each in rounds.values()):
                continue
            if not self.run.alone and not self.attendance.decider:  # which compares them in each exchange
                self._compare_weights(*rounds.values())
            for each in rounds.values():
                each.send_remaining()
            for each in rounds.values():
                each.receive_remaining()
            self.copies.record_values(self._variables.values())

    def _compare_weights(self, rounds: ClusterSync) -> None:
        """Synchronise all processes, and verify that their shared weights were bit-identical."""
        session, shared = self.run.ledger.session, rounds.digest()
        sheets = session.exchange(
            f"a synchronisation of all clusters after {rounds.steps} steps", {"shared": shared}, session.links
        )
        differing = next((peer for peer, sheet in sheets.items() if sheet.get("shared") != shared), None)
        if differing is not None:
            raise PlanMismatchError(
                f"{session.worker} and {differing} no longer have the same weights, after {rounds.steps} steps",
                where=differing,
                why="all compute the shared weights from the same bytes, so a device has computed them differently",
                mend="start all workers from a checkpoint, such as a file that model.save_weights(...) wrote before",
            )

    def restart(self) -> None:
        """Restart after variables were replaced by the same values in every process."""
        self.copies.propagate_writes(self._variables.values())
        for rounds in self._rounds_by_weights.values():
            first = next(iter(rounds.values()))
            self.copies.reset_copies(first.flat.variables)
        self.copies.record_values(self._variables.values())
        for rounds in self._rounds_by_weights.values():
            for each in rounds.values():
                each.restart()

    def close(self) -> None:
        """Stop all threads."""
        for each in [each for rounds in self._rounds_by_weights.values() for each in rounds.values()]:
            each.close()

    def _check_disjoint(self, key: frozenset[int], weights: Mapping[str, Any], local_sgd: LocalSgd) -> None:
        """Verify that no weight belongs to other rounds."""
        met = [known for known in self._rounds_by_weights if known & key]
        if met:
            shared = next(path for path, variable in weights.items() if id(variable) in met[0])
            raise NotYetError(
                "two steps with sync_every that train some of the same weights",
                where=local_sgd.where,
                why=f"{shared!r} is also trained by an earlier step, together with other weights",
                mend="use one step (a function, or fit) for everything that is trained with sync_every",
            )

    # ------------------------------------------------------------------ all clusters in this process
    def _make_all_clusters(
        self, local_sgd: LocalSgd, participants: Participants, weights: Mapping[str, Any], variables: Mapping[str, Any],
        exchanged: ExchangedWeights | None,
    ) -> Mapping[str, ClusterSync]:  # fmt: skip
        lines = self.run.links if local_sgd.copies == 1 else Links()  # links are between clusters
        specs = {(a, b): lines.between(a, b) for a in participants.names for b in participants.names if a != b}
        network = MemoryNetwork(specs)
        lead_workers = {cluster: f"{cluster}/0" for cluster in participants.names}
        made = {}
        for place, (cluster, first) in enumerate(lead_workers.items()):
            others = {other: peer for other, peer in lead_workers.items() if peer != first}
            links = {peer: network.link(first, peer, cluster, other) for other, peer in others.items()}
            ends = Ends(first, cluster, lead_workers, links, self.run.config.patience, number=self._opened_count)
            held = weights
            if place:
                own = self.copies.find_copies(cluster, variables, place)
                held = {path: own[id(variable)] for path, variable in weights.items()}
            copy = partial(self._copy_of, cluster if place else "")
            made[cluster] = _make_rounds(local_sgd, participants, held, ends, exchanged, copy=copy, models_own=weights)
        return made

    def _copy_of(self, cluster: str, variable: Any) -> Any:
        """A cluster's copy of a variable of the model or its optimizer."""
        return self.copies.copies_by_cluster[cluster][id(variable)] if cluster else variable

    # ------------------------------------------------------------------ clusters in other processes
    def _make_own_cluster(
        self, local_sgd: LocalSgd, participants: Participants, weights: Mapping[str, Any], variables: Mapping[str, Any],
        exchanged: ExchangedWeights | None,
    ) -> Mapping[str, ClusterSync]:  # fmt: skip
        session, own = self.run.ledger.session, participants.find_own(self.run)
        lead_workers = {cluster: workers[0] for cluster, workers in participants.workers.items()}
        mates = [worker for worker in participants.workers[own] if worker != session.worker]
        ends = Ends(session.worker, own, lead_workers, session.links, session.patience, mates, self._opened_count)
        if self.attendance.decider:
            ends = DecidedEnds(
                **{**vars(ends), "links": dict(session.links)}, order=participants.names,
                decider=self.attendance.decider, absences=session.absences, away=set(self.absent),
            )  # fmt: skip
        if local_sgd.copies > 1 and self.run.ledger.collectives is not None:
            ends = CollectiveEnds.connect(self.run.ledger.collectives, ends)
        rounds = _make_rounds(
            local_sgd,
            participants,
            weights,
            ends,
            exchanged,
            waits=True,
            copy=partial(self._copy_of, ""),
            models_own=weights,
            note_absent=self.note_absent,
        )
        session.expected.add_round(ends.program, _MAX_NUMBER_BYTES * rounds.flat.total + _MAX_HEADER_BYTES)
        self._start_alike(rounds, find_seeds(variables))
        offset_seeds(variables, participants.names.index(own))
        return {own: rounds}

    def _start_alike(self, rounds: ClusterSync, seeds: Mapping[str, Any]) -> None:
        """Give all clusters the first worker's seeds and weights; if they are already equal, they are not sent."""
        session, ends = self.run.ledger.session, rounds.ends
        whole = (0, rounds.flat.total)
        own = {
            "weights": google_crc32c.value(rounds.flat.read(whole).tobytes()),
            "seeds": [[int(number) for number in seed.numpy()] for seed in seeds.values()],
        }
        sheets = session.exchange("the initial weights of all clusters", own, session.links)
        sheets = {**sheets, session.worker: own}
        first = next(iter(ends.lead_workers.values()))
        for seed, numbers in zip(seeds.values(), sheets[first]["seeds"], strict=True):
            seed.assign(tf.constant(numbers, seed.dtype))
        if len({sheet["weights"] for sheet in sheets.values()}) == 1:
            return
        _LOG.info("%s: the clusters have different weights, and all start with those of %s", session.worker, first)
        if session.worker == first:
            data = rounds.flat.read(whole).view(np.uint8)
            for peer in session.links:
                ends.send_start(peer, data)
        else:
            with name_sender(first):
                rounds.flat.write(whole, read_numbers(ends.receive_start(first), rounds.flat.total))


def _make_rounds(
    local_sgd: LocalSgd, participants: Participants, weights: Mapping[str, Any], ends: Ends,
    exchanged: ExchangedWeights | None, waits: bool = False, *, copy: Callable[[Any], Any],
    models_own: Mapping[str, Any], note_absent: Callable[[Collection[str]], None] = lambda absent: None,
) -> ClusterSync:  # fmt: skip
    """The synchronisation of a cluster between its steps. `weights` are its variables, or copies of the model's own
    variables (`models_own`), and `copy` returns the cluster's copy of one. A parameter server in this process `waits`
    at the end of the run. `note_absent` is called with the absent clusters of an exchange.
    """
    if exchanged is not None:
        kind = MemberRounds if isinstance(ends, CollectiveEnds) else OneBitRounds
        return make_one_bit_rounds(
            kind, weights, ends, Differences(parse_encoding("none")), participants.shares, exchanged, copy, models_own
        )
    flat, encoding = FlatVariables(tuple(weights.values())), parse_encoding(local_sgd.codec)
    if local_sgd.mode == ASYNC:
        serves = ends.worker == ends.server
        server = Server(ends, encoding, participants.shares, local_sgd.staleness, waits) if serves else None
        return Pushes(flat, ends, Differences(encoding), every=local_sgd.every, server=server)
    table = Timetable(
        local_sgd.every, local_sgd.fragments or choose_fragments(flat.total, local_sgd.every), local_sgd.delay
    )
    return Rounds(
        flat, ends, Differences(encoding), table=table, outer=local_sgd.outer, shares=participants.shares,
        note_absent=note_absent,
    )  # fmt: skip


@dataclass(frozen=True)
class ClusterCopy:
    """Training or evaluation of a step on a cluster's own copy of the weights."""

    local_sgd: LocalSgd
    captured: Captured
    run: Run
    participants: Participants
    models: Sequence[Any]

    @property
    def cluster_session(self) -> Session:
        """The session with the other workers of this cluster only."""
        session: Session = self.run.ledger.session
        return session.select_peers(self.mates)

    @property
    def mates(self) -> tuple[str, ...]:
        """The other workers of this cluster."""
        here = self.run.here()
        return () if here.alone else tuple(w for w in self._own_workers if w != here.worker)

    @property
    def other_cluster_workers(self) -> tuple[str, ...]:
        """The workers of the other clusters."""
        return tuple(worker for worker in self.run.workers if worker not in self._own_workers)

    @property
    def _own_workers(self) -> tuple[str, ...]:
        return self.participants.workers[self.participants.find_own(self.run)]

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for the report: if no cluster may miss meetings, or all are restarted when one is lost, or workers of
        a cluster exchange momenta without collectives.
        """
        rule = self.participants.attendance
        if rule.why_none:
            return (f"no cluster may miss a meeting, although elastic has min: 0: {rule.why_none}",)
        if rule.restarts_together:
            return ("if a cluster is lost, all are restarted, because one launcher has started them",)
        if self.local_sgd.copies == 1 or self.run.alone or self.run.ledger.collectives is not None:
            return ()
        return ("each worker sends all of its momenta to the others over links: TensorFlow had started before nb.init",)

    def check(self, cut: Cut) -> None:
        """Verify that the weights can be averaged, and that every worker of this cluster has all of them, because the
        cluster sends a single difference.
        """
        own = [worker.name for worker in cut.workers]
        weights = find_weights(self.captured.program, self.captured.variables, self.models)
        self._check_weights(weights)
        for path in weights if self.captured.program.requests else ():
            lacking = next((worker for worker in own if worker not in cut.variable_workers[path]), None)
            if lacking is not None:
                raise NotYetError(
                    "sync_every in a cluster where a worker does not have a complete copy of the model",
                    where=self.local_sgd.where,
                    why=f"worker {lacking} of {', '.join(own)} does not have {path!r}",
                    mend="use nb.replica(sync_every=...) around one stage and without a count: each worker gets a copy",
                )

    def _check_weights(self, weights: Mapping[str, Any]) -> None:
        """Refuse weights that a synchronisation cannot average."""
        if not self.captured.program.requests or len(self.participants.names) == 1:
            return
        wide = next((path for path, variable in weights.items() if variable.dtype.size > _MAX_WEIGHT_BYTES), None)
        if wide is not None:
            raise NotYetError(
                f"weights of {weights[wide].dtype.name} with sync_every",
                where=f"{wide}, {self.local_sgd.where}",
                why="differences are sent as float32",
                mend='use dtype="float32" for that layer, or remove sync_every=',
            )
        if self.local_sgd.exchange:
            self._check_exchange(weights)
        if any(getattr(getattr(model, "optimizer", None), "use_ema", False) for model in self.models):
            raise NotYetError(
                "an optimizer with use_ema=True and sync_every",
                where=self.local_sgd.where,
                why="each cluster would overwrite the shared weights with its own averages",
                mend="use_ema=False, or remove sync_every=",
            )

    def _check_exchange(self, weights: Mapping[str, Any]) -> None:
        """Verify that momenta are exchanged in float32 and after each step."""
        odd = next((path for path, variable in weights.items() if variable.dtype != tf.float32), None)
        optimizers = [getattr(model, "optimizer", None) for model in self.models]
        scaled = any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in optimizers)
        if odd is not None or scaled:
            dtype = "" if odd is None else weights[odd].dtype.name
            raise NotYetError(
                f"exchanged momenta of {dtype}" if odd else "exchanged momenta of an optimizer that scales the loss",
                where=self.local_sgd.where,
                why=f"{odd} is of {dtype}" if odd else "a cluster that skips a step would have no momenta to send",
                mend='dtype="float32", or keras.config.set_dtype_policy("mixed_bfloat16")',
            )

    def initialize_variables(self) -> None:
        """Initialise all variables of a process that is an entire cluster, and register them as held by it."""
        if self.run.alone:
            return
        self.captured.initialize_variables(lambda variable: True)
        own = self.run.here().worker
        held = dict.fromkeys(self.captured.variables, (own,))
        self.run.ledger.register_program(self.captured.variables, held, self.other_cluster_workers)

    def wrap_runner(self, inner: Runner) -> Runner:
        """The runner of a cluster's step with the synchronisation after it; `inner` itself if the step does not train,
        or there is only one cluster.
        """
        program, variables, run = self.captured.program, self.captured.variables, self.run
        if not program.requests or len(self.participants.names) == 1:
            return inner
        weights = find_weights(program, variables, self.models)
        opened: OpenRounds = run.rounds
        make = partial(opened.open_rounds, self.local_sgd, self.participants, weights, variables)
        if run.alone:
            return AllClustersRunner(
                inner,
                program.leaves,
                self.participants,
                make,
                variables=variables,
                copies=opened.copies,
                interval_reason=self.local_sgd.chosen,
            )
        own, session = self.participants.find_own(run), run.ledger.session
        leaving = LeaveAgreement(
            opened.leave_requests,
            run.programs,
            self.local_sgd.every,
            self.local_sgd.staleness,
            self.participants.deciding_worker or session.worker,
        )
        return OwnClusterRunner(
            inner,
            program.leaves,
            self.participants,
            make,
            cluster=own,
            session=session,
            leave_agreement=leaving,
            settle=opened.synchronize_before_leaving,
            interval_reason=self.local_sgd.chosen,
        )


def make_cluster_copy(
    local_sgd: LocalSgd, captured: Captured, run: Run, name: str, models: Sequence[Any]
) -> ClusterCopy:
    """The copy of this process's cluster for a step with `sync_every`; if it trains, all clusters agree on the settings
    of the exchange. Every process calls it at the same point.
    """
    if run.rounds is None:
        run.rounds = OpenRounds(run)
        run.close_at_end(run.rounds.close)
    found = ClusterCopy(local_sgd, captured, run, find_participants(local_sgd, run), models)
    if len(found.participants.names) > 1 or not run.rounds.own_cluster:
        run.rounds.note_own(found.participants)
    if captured.program.requests and len(found.participants.names) == 1:
        _warn_alone(local_sgd, found.participants.names[0])
    if captured.program.requests and not run.alone:
        lines = _list_settings(local_sgd, captured, models, found.participants)
        with run.share_failures():
            run.ledger.session.agree(name, digest_lines(lines), lines, describe_first_difference)
    return found


_MAX_WEIGHT_BYTES = 4


def _warn_alone(local_sgd: LocalSgd, name: str) -> None:
    """Warn that no other cluster takes part."""
    warn_once(
        script_site(),
        f"nb.replica({local_sgd.option}) has no effect: {name!r} is the only cluster",
        where=local_sgd.where,
        why="each cluster trains a copy, and there is only one; the step runs as without it",
        mend='name the clusters, nb.cluster(["gpu", "npu"]), or use a config that does: nb.init("clusters.yaml")',
        key=local_sgd.where,
    )


def _list_settings(
    local_sgd: LocalSgd,
    captured: Captured,
    models: Sequence[Any],
    participants: Participants,
) -> tuple[str, ...]:
    """The settings that must be the same in all clusters: options, speeds, who may miss meetings, and weights."""
    weights = find_weights(captured.program, captured.variables, models)
    speeds = (f"cluster {name} of speed {speed:g}" for name, speed in participants.speeds.items())
    held = (f"weight {path} {variable.dtype.name}{list(variable.shape)}" for path, variable in weights.items())
    may_miss = participants.attendance.may_miss
    missing = (f"cluster {name} may miss meetings" for name in participants.names if name in may_miss)
    return (f"apart {local_sgd}", *speeds, *missing, *held)
