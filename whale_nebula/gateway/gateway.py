"""The gateway process: admits connections, joins the two halves of each pair, and writes the audit log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cryptography.hazmat.primitives import hashes

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import IdentityError, LinkClosedError, NebulaError, TransportError
from whale_nebula.gateway.admission import (
    SAVE_SECONDS,
    Admission,
    PairErrors,
    Purpose,
    Quotas,
    Traffic,
    admit_health_request,
    admit_stream,
    count_connections,
    find_account,
)
from whale_nebula.gateway.control import ControlStreams
from whale_nebula.gateway.front import Front
from whale_nebula.gateway.journal import Journal
from whale_nebula.gateway.liveness import Health, Liveness, State
from whale_nebula.gateway.relay import REPLACED, Half, Inspection, Pair, Side
from whale_nebula.gateway.route import Route, SharedLines
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.security import Credentials, CurrentCredentials, Identity, Peer, Prover, check_live
from whale_nebula.security.audit import AuditLog, Head, KeptHeads
from whale_nebula.security.identity import GATEWAY, WORKER
from whale_nebula.transport.deadlines import Announce, Deadlines, log_wait
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.listener import Dialler, FrameHandler, Listener, StreamRequest, prove_identity
from whale_nebula.transport.grpc.options import make_server_credentials
from whale_nebula.transport.handover import DATA, LOGIN, socket_path
from whale_nebula.wire.frame import Header

_LOG = logging.getLogger("whale_nebula.gateway")
_MAX_PAIRS = 4096  # of one other cluster
_STEP_SECONDS, _HEAD_SECONDS = 0.2, 2.0
_CONNECT_SECONDS = 10.0  # with a round trip of 1.4 s, opening a stream takes four times as long
_MISSED_HEARTBEATS = 2.2  # heartbeats that may be missed before a worker is probed


class Gateway:
    """The gateway with these settings. It serves from `start` to `stop`, in its own threads. It shares its `lines` with
    the gateways of other runs in this process.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        lines: SharedLines | None = None,
        deadlines: Deadlines | None = None,
        announce: Announce = log_wait,
    ) -> None:
        self._lines = lines or SharedLines()
        self.settings = settings
        self.address = settings.listen
        self._deadlines = deadlines or Deadlines(patience=settings.patience, connect=_CONNECT_SECONDS)
        self._current = CurrentCredentials(Credentials.load(settings.files)) if settings.files is not None else None
        self._used_credentials = self._current() if self._current else None
        self._prover = Prover(self._current) if self._current else None
        if self._used_credentials is not None:
            self._used_credentials.check_identity(settings.identity)
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._stopping = threading.Event()
        self._now = time.monotonic
        self._silence = _MISSED_HEARTBEATS * self._deadlines.heartbeat_interval
        self._pair_errors = PairErrors()
        self._quotas = Quotas(settings)
        self._traffic = Traffic(settings.traffic_path)
        self._gracefully_ended: set[str] = set()  # our workers whose last stream was ended gracefully
        self.journal = Journal(AuditLog(settings.audit, settings.identity, self._current, on_head=self._send_head))
        current = self._current
        stored_heads = KeptHeads(settings.heads_path, lambda: current().trust) if current else None
        self._routes = {name: self._make_route(name, stored_heads, announce) for name in settings.gateways}
        self._liveness = Liveness(
            {name: where for name, where in settings.workers.items() if cluster_of(name) == settings.cluster},
            self._is_active,
            self._handle_lost_worker,
        )
        self._health = Health(lambda dialler: admit_health_request(self._current, settings, dialler))
        self._listener = Listener(
            settings.listen,
            make_server_credentials(self._current) if self._current else None,
            self._accept,
            deadlines=self._deadlines,
            connections=count_connections(settings),
            other_handlers=(self._health.handler,),
            front=self._make_front(),
        )
        self._monitor = threading.Thread(target=self._run_monitor, name="nebula-lookout", daemon=True)

    @property
    def trusts(self) -> str:
        """The trusted authorities, in words."""
        if self._current is None:
            return "every process"
        credentials = self._current()
        keys = ", ".join(each.fingerprint(hashes.SHA256()).hex()[:16] for each in credentials.trust.authorities)
        return f"the authority {keys}, until {credentials.not_after:%Y-%m-%d %H:%M} UTC"

    def start(self) -> str:
        """Start to serve; returns the address."""
        try:
            self.address = self._listener.start()
        except NebulaError:
            self.journal.close("it could not listen at its address")
            raise
        self.journal.note("listen", target=self.address, clusters=sorted(self.settings.gateways))
        self.journal.log.sign_head()  # the other gateways may not have the log's previous end
        for route in self._routes.values():
            self._health.set_status(route.cluster, False)
            route.start()
        self._monitor.start()
        return self.address

    def stop(self, why: str) -> None:
        """Stop gracefully: streams, then the audit log, whose last head goes to the other gateways, then the port."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._health.close()
        self.journal.refuse_new_halves()
        for seconds in (_STEP_SECONDS, _HEAD_SECONDS):  # a half may be about to join its pair
            for pair in self._list_pairs():
                pair.end("the gateway is stopping")
            if self.journal.wait_all_ended(seconds):
                break
        self.journal.close(why)
        for route in self._routes.values():
            if route.control.is_connected and not route.control.wait_head_stored(_HEAD_SECONDS):
                _LOG.warning(
                    "gateway '%s' has not stored the last head of this audit log: audit verify cannot check its end",
                    route.identity.worker,
                )
            route.close()
        self._listener.stop(0.2)
        if self._monitor.ident is not None:
            self._monitor.join(self._deadlines.grace)
        self._traffic.save()

    # ------------------------------------------------------------------ admission
    def _accept(self, request: StreamRequest, dialler: Dialler, lane: Lane) -> FrameHandler:
        if self._stopping.is_set():
            raise TransportError(f"gateway '{self.settings.identity.worker}' is stopping")
        try:
            admission = admit_stream(self.settings, self._current, request, dialler)
            lane.certified_peer = admission.certified_peer
            if self._prover is not None:
                lane.proof = prove_identity(self._prover, request, self.settings.identity)
            return self._admit(admission, request, lane)
        except NebulaError as error:
            lane.end(error.what)
            if isinstance(error, IdentityError):
                actor = dialler.names[0] if dialler.names else dialler.host
                target, account = f"{request.source} - {request.destination}", find_account(dialler.certificate)
                self.journal.note_refused(actor, target, error, account)
            raise

    def _admit(self, admission: Admission, request: StreamRequest, lane: Lane) -> FrameHandler:
        if admission.purpose is Purpose.CONTROL:
            control = self._routes[admission.caller.cluster].control
            control.check_rate()
            control.add_stream(lane)
            self.journal.note("trunk", actor=admission.caller.uri, decision="allow")
            return control.receive
        requester, requested = request.source, request.destination
        self._pair_errors.mark_alive(requester)
        stored_error = self._pair_errors.find(requester, requested, remove=admission.purpose is Purpose.OUT)
        if stored_error is not None:
            raise stored_error
        side = Side.NEAR if admission.purpose is Purpose.OUT else Side.FAR
        self._traffic.check(admission.certified_peer if side is Side.NEAR else None)
        if side is Side.FAR and not self._is_awaited(admission.here, admission.there):
            raise TransportError(
                f"worker '{admission.here}' has not connected to its gateway yet", why="a retry follows"
            )
        self._quotas.take(admission.caller, lane, request.lane)
        if request.lane:
            existing_pair = self._find_pair(admission.here, admission.there)
            existing_half = None if existing_pair is None else existing_pair.find_half(side)
            if existing_half is None or existing_half.connection.name != request.connection:
                raise TransportError("the connection of this lane no longer exists")
            return existing_half.add_lane(request.lane, lane)
        pair = self._find_or_create_pair(admission.here, admission.there)
        if side is Side.NEAR:
            lane.trouble = self._routes[cluster_of(pair.there)].trouble
        connection = Connection(request.connection)
        if side is Side.FAR:
            half = self._routes[admission.caller.cluster].make_far_half(pair, connection)
        else:
            meter = self._traffic.make_meter(admission.certified_peer)

            def check(frame: bytes) -> Header:
                self._traffic.check(admission.certified_peer)
                return pair.inspection.check(frame, outward=True)

            half = Half(side, admission.caller.uri, connection, check, meter=meter)
        receive = half.add_lane(0, lane)
        self._join_half(pair, half)
        if side is Side.NEAR:
            pair.account = "" if admission.certified_peer is None else admission.certified_peer.account
            self._gracefully_ended.discard(pair.here)
            self._pair_errors.clear_errors_about(pair.here)
            for route in self._routes.values():
                route.control.withdraw_lost(pair.here)
            self._liveness.check_new(pair.here)
            self._routes[cluster_of(pair.there)].dial_for_pair(pair, half)
        return receive

    def _find_pair(self, here: str, there: str) -> Pair | None:
        with self._lock:
            return self._pairs.get((here, there))

    def _is_awaited(self, here: str, there: str) -> bool:
        """Whether a worker of this cluster requests the other one, or was joined with it recently."""
        pair = self._find_pair(here, there)
        return pair is not None and (pair.find_half(Side.NEAR) is not None or pair.is_known)

    def _join_half(self, pair: Pair, half: Half) -> None:
        """Join a half with its pair, once its admission is logged."""
        pair.check_rate()
        if half.side is Side.FAR:
            pair.yield_to_incoming()
        self.journal.note_opened(pair, half)
        try:
            pair.add_half(half)
        except TransportError as error:
            self.journal.note_ended(pair, half, error.what)
            raise

    def _find_or_create_pair(self, here: str, there: str) -> Pair:
        with self._lock:
            pair = self._pairs.get((here, there))
            if pair is None:
                cluster = cluster_of(there)
                if sum(cluster_of(each) == cluster for _, each in self._pairs) >= _MAX_PAIRS:
                    raise TransportError(f"this gateway has {_MAX_PAIRS} pairs with '{cluster}', which is the limit")
                inspection = Inspection.for_pair(self.settings.roster, here, there)
                yields = self.settings.cluster < cluster_of(there)
                memory_seconds, grace = self.settings.patience, self._deadlines.grace
                pair = Pair(
                    here, there, inspection, self._note_end, yields=yields, grace=grace, memory_seconds=memory_seconds
                )
                self._pairs[here, there] = pair
            return pair

    def _remove_pairs(self) -> None:
        """Remove pairs that have ended, with pending messages to their workers."""
        with self._lock:
            self._pairs = {names: pair for names, pair in self._pairs.items() if not pair.retire()}
            workers = {*self.settings.workers, *(name for names in self._pairs for name in names)}
        self._pair_errors.remove_old(workers)
        self._quotas.remove_unused()

    def _list_pairs(self) -> list[Pair]:
        with self._lock:
            return list(self._pairs.values())

    # ------------------------------------------------------------------ lost workers
    def _note_end(self, pair: Pair, half: Half, why: str) -> None:
        self.journal.note_ended(pair, half, why)
        if half.side is Side.NEAR and why != REPLACED and not self._stopping.is_set():
            (self._gracefully_ended.add if half.was_closed_gracefully else self._gracefully_ended.discard)(pair.here)
            self._liveness.check_ended(pair.here)

    def _is_active(self, worker: str) -> bool:
        """Whether frames arrive over any of a worker's streams."""
        nears = [
            near
            for pair in self._list_pairs()
            if pair.here == worker and (near := pair.find_half(Side.NEAR)) is not None
        ]
        active = [
            near for near in nears if not near.connection.is_over and near.measure_silence(self._now()) < self._silence
        ]
        return self._stopping.is_set() or bool(active)

    def _handle_lost_worker(self, worker: str, state: State, why: str) -> None:
        """A local worker is dead or frozen: notify all workers that it was joined with. A worker that ended its streams
        gracefully has done so itself.
        """
        self._pair_errors.mark_lost(worker)
        if worker in self._gracefully_ended:
            self.journal.note("left", target=worker)
            return
        self.journal.note("gone", target=worker, state=state, reason=why)
        reason = f"its gateway reports that {why}"
        for pair in self._list_pairs():
            if (
                pair.here == worker
                and pair.is_known
                and self._pair_errors.store(pair.there, worker, _lost_worker_error(worker, reason))
            ):
                pair.end(f"worker '{worker}' is gone")
        for route in self._routes.values():
            route.control.announce_lost(worker, reason)

    def _handle_lost_remote_worker(self, worker: str, why: str) -> None:
        """Handle another gateway's notice about one of its workers; notices about others are ignored."""
        pairs = [pair for pair in self._list_pairs() if pair.there == worker]
        if pairs:
            self._pair_errors.mark_lost(worker)
        for pair in pairs:
            if pair.is_known:
                self._end_pair(pair, _lost_worker_error(worker, why))

    def _end_pair(self, pair: Pair, error: NebulaError) -> None:
        """End a pair permanently: its local worker gets the error at its next request, which it sends at once."""
        if self._pair_errors.store(pair.here, pair.there, error):
            self.journal.note("final", target=str(pair), reason=f"{error.code} {error.what}: {error.why}")
            pair.end(error.what)

    # ------------------------------------------------------------------ the rest
    def _make_front(self) -> Front | None:
        """The front, if services share the public port."""
        settings = self.settings
        if settings.services is None:
            return None
        paths = {each: socket_path(settings.services, each, settings.cluster) for each in (LOGIN, DATA)}
        return Front(
            settings.listen, paths, lambda who, error: self.journal.note_refused(who, "the public port", error)
        )

    def _make_route(self, cluster: str, stored_heads: KeptHeads | None, announce: Announce) -> Route:
        control = ControlStreams(
            Identity(self.settings.run, cluster, GATEWAY), stored_heads, self._handle_lost_remote_worker, self._note
        )
        events = self.journal, self._end_pair
        return Route(
            self.settings, cluster, control, self._current, *events, lines=self._lines, deadlines=self._deadlines,
            announce=announce,
        )  # fmt: skip

    def _note(self, action: str, **fields: object) -> None:
        if not self._stopping.is_set():
            self.journal.note(action, **fields)

    def _send_head(self, head: Head) -> None:
        for route in self._routes.values():
            route.control.send_head(head)

    def _run_monitor(self) -> None:
        while not self._stopping.wait(self._deadlines.check_interval):
            for check in (
                self._check_certificates,
                self._check_routes,
                self._check_workers,
                self._remove_pairs,
                lambda: self.journal.check_periodically(self._now()),
                lambda: self._traffic.save(SAVE_SECONDS),
            ):
                try:
                    check()
                except Exception:  # no thread or file available: the next check may succeed, and must take place
                    _LOG.exception("error in a periodic check of gateway '%s'", self.settings.identity.worker)

    def _check_routes(self) -> None:
        for route in self._routes.values():
            self._health.set_status(route.cluster, route.control.is_connected)
            if route.check_reachability():
                self._end_waiting_halves(route)

    def _check_workers(self) -> None:
        for worker in {pair.here for pair in self._list_pairs() if pair.find_half(Side.NEAR) is not None}:
            if not self._is_active(worker):
                self._liveness.check_silent(worker)

    def _check_certificates(self) -> None:
        if self._current is not None:
            self._check_streams(self._current())

    def _end_waiting_halves(self, route: Route) -> None:
        """End waits for a closed route to a cluster: workers retry, and then receive the reason."""
        for pair in self._list_pairs():
            near = pair.find_half(Side.NEAR)
            if near is not None and near.is_joinable and cluster_of(pair.there) == route.cluster:
                near.connection.end(route.trouble)

    def _check_streams(self, credentials: Credentials) -> None:
        """End all streams of identities whose certificate has expired or was revoked, or whose account has used up its
        bytes of the day.
        """
        halves = [half for pair in self._list_pairs() for side in Side if (half := pair.find_half(side)) is not None]
        lanes = [lane for route in self._routes.values() for lane in route.control.lanes]
        endings: list[tuple[Peer, Callable[[str], None]]] = [
            *((lane.certified_peer, lane.end) for lane in lanes if lane.certified_peer is not None),
            *((certified_peer, half.connection.end) for half in halves for certified_peer in half.certified_peers),
        ]
        for peer, end in endings:
            try:
                check_live(credentials.trust, peer)
                self._traffic.check(peer if peer.identity.role == WORKER else None)
            except IdentityError as error:
                self.journal.note_refused(peer.identity.uri, "a live stream", error, peer.account)
                end(error.what)
        if credentials is not self._used_credentials:
            self._used_credentials = credentials
            for half in halves:
                if half.dialled:
                    half.connection.end("this gateway's certificate was renewed")
            for route in self._routes.values():
                route.control.end("this gateway's certificate was renewed")


def _lost_worker_error(worker: str, why: str) -> NebulaError:
    return LinkClosedError(
        f"worker '{worker}' is gone", why=why, mend=f"check the output of '{worker}', and restart all workers"
    )
