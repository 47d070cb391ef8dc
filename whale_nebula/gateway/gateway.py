"""The gateway process: admits connections, joins the two halves of each pair, and writes the audit log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cryptography.hazmat.primitives import hashes

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import IdentityError, LinkClosedError, NebulaError, TransportError
from whale_nebula.gateway.control import ControlStreams
from whale_nebula.gateway.entry import (
    SAVE_SECONDS,
    Entry,
    FinalErrors,
    Purpose,
    Quotas,
    Traffic,
    admit,
    connections,
    entry,
)
from whale_nebula.gateway.front import Front
from whale_nebula.gateway.journal import Journal
from whale_nebula.gateway.liveness import Health, Liveness, State
from whale_nebula.gateway.relay import REPLACED, Half, Inspection, Pair, Side
from whale_nebula.gateway.route import Lines, Route
from whale_nebula.gateway.site import Site
from whale_nebula.security import Credentials, CurrentCredentials, Identity, Peer, Prover, check_live
from whale_nebula.security.audit import AuditLog, Head, KeptHeads
from whale_nebula.security.identity import GATEWAY, WORKER
from whale_nebula.transport.deadlines import Announce, Deadlines, log_wait
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.listener import Hear, Knock, Listener, Visitor, prove_identity
from whale_nebula.transport.grpc.options import server_credentials
from whale_nebula.transport.handover import DATA, LOGIN, socket_path
from whale_nebula.wire.frame import Header

_LOG = logging.getLogger("whale_nebula.gateway")
_PAIRS_AT_MOST = 4096  # of one other cluster
_STEP_SECONDS, _KEPT_SECONDS = 0.2, 2.0
_CONNECT_SECONDS = 10.0  # with a round trip of 1.4 s, opening a stream takes four times as long
_BEATS = 2.2  # heartbeats that may be missed before a worker is probed


class Gateway:
    """The gateway of a site. It serves from `start` to `stop`, in its own threads. It shares its `lines` with the
    gateways of other runs in this process.
    """

    def __init__(
        self,
        site: Site,
        *,
        lines: Lines | None = None,
        deadlines: Deadlines | None = None,
        announce: Announce = log_wait,
    ) -> None:
        self._lines = lines or Lines()
        self.site = site
        self.address = site.listen
        self._deadlines = deadlines or Deadlines(patience=site.patience, connect=_CONNECT_SECONDS)
        self._current = CurrentCredentials(Credentials.load(site.files)) if site.files is not None else None
        self._used = self._current() if self._current else None
        self._prover = Prover(self._current) if self._current else None
        if self._used is not None:
            self._used.check_identity(site.identity)
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._stopping = threading.Event()
        self._now = time.monotonic
        self._silence = _BEATS * self._deadlines.beat
        self._final_errors = FinalErrors()
        self._quotas = Quotas(site)
        self._traffic = Traffic(site.traffic)
        self._parted: set[str] = set()  # our workers whose last stream was ended gracefully
        self.journal = Journal(AuditLog(site.audit, site.identity, self._current, on_head=self._head))
        current = self._current
        kept = KeptHeads(site.heads, lambda: current().trust) if current else None
        self._routes = {name: self._make_route(name, kept, announce) for name in site.gateways}
        self._liveness = Liveness(
            {name: where for name, where in site.workers.items() if cluster_of(name) == site.cluster},
            self._is_back,
            self._gone_here,
        )
        self._health = Health(lambda visitor: admit(self._current, site, visitor))
        self._listener = Listener(
            site.listen,
            server_credentials(self._current) if self._current else None,
            self._accept,
            deadlines=self._deadlines,
            connections=connections(site),
            others=(self._health.handler,),
            front=self._make_front(),
        )
        self._lookout = threading.Thread(target=self._look_out, name="nebula-lookout", daemon=True)

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
        self.journal.note("listen", target=self.address, clusters=sorted(self.site.gateways))
        self.journal.log.head()  # the other gateways may not have the log's previous end
        for route in self._routes.values():
            self._health.say(route.cluster, False)
            route.start()
        self._lookout.start()
        return self.address

    def stop(self, why: str) -> None:
        """Stop gracefully: streams, then the audit log, whose last head goes to the other gateways, then the port."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._health.close()
        self.journal.stop_opening()
        for seconds in (_STEP_SECONDS, _KEPT_SECONDS):  # a half may be about to join its pair
            for pair in self._list_pairs():
                pair.end("the gateway is stopping")
            if self.journal.wait_ended(seconds):
                break
        self.journal.close(why)
        for route in self._routes.values():
            if route.control.up and not route.control.wait_kept(_KEPT_SECONDS):
                _LOG.warning("gateway '%s' has not stored the last head", route.who.worker)
            route.close()
        self._listener.stop(0.2)
        if self._lookout.ident is not None:
            self._lookout.join(self._deadlines.grace)
        self._traffic.save()

    # ------------------------------------------------------------------ admission
    def _accept(self, knock: Knock, visitor: Visitor, lane: Lane) -> Hear:
        if self._stopping.is_set():
            raise TransportError(f"gateway '{self.site.identity.worker}' is stopping")
        try:
            found = entry(self.site, self._current, knock, visitor)
            lane.guest = found.guest
            if self._prover is not None:
                lane.proof = prove_identity(self._prover, knock, self.site.identity)
            return self._let_in(found, knock, lane)
        except NebulaError as error:
            lane.end(error.what)
            if isinstance(error, IdentityError):
                who = visitor.names[0] if visitor.names else visitor.host
                self.journal.note_refused(who, f"{knock.source} - {knock.destination}", error)
            raise

    def _let_in(self, found: Entry, knock: Knock, lane: Lane) -> Hear:
        if found.purpose is Purpose.CONTROL:
            control = self._routes[found.caller.cluster].control
            control.check_rate()
            control.adopt(lane)
            self.journal.note("trunk", actor=found.caller.uri, decision="allow")
            return control.receive
        asks, wanted = knock.source, knock.destination
        self._final_errors.asks(asks)
        verdict = self._final_errors.find(asks, wanted, once=found.purpose is Purpose.OUT)
        if verdict is not None:
            raise verdict
        side = Side.NEAR if found.purpose is Purpose.OUT else Side.FAR
        self._traffic.check(found.guest if side is Side.NEAR else None)
        if side is Side.FAR and not self._is_awaited(found.here, found.there):
            raise TransportError(f"worker '{found.here}' has not connected to its gateway yet", why="a retry follows")
        self._quotas.take(found.caller, lane, knock.lane)
        if knock.lane:
            known = self._find_pair(found.here, found.there)
            present = None if known is None else known.half(side)
            if present is None or present.connection.name != knock.connection:
                raise TransportError("the connection of this lane no longer exists")
            return present.lane(knock.lane, lane)
        pair = self._pair(found.here, found.there)
        if side is Side.NEAR:
            lane.trouble = self._routes[cluster_of(pair.there)].trouble
        connection = Connection(knock.connection)
        if side is Side.FAR:
            half = self._routes[found.caller.cluster].half(pair, connection)
        else:
            meter = self._traffic.meter(found.guest)

            def check(frame: bytes) -> Header:
                self._traffic.check(found.guest)
                return pair.inspection.check(frame, outward=True)

            half = Half(side, found.caller.uri, connection, check, meter=meter)
        receive = half.lane(0, lane)
        self._take(pair, half)
        if side is Side.NEAR:
            pair.account = "" if found.guest is None else found.guest.account
            self._parted.discard(pair.here)
            self._final_errors.back(pair.here)
            for route in self._routes.values():
                route.control.unsay(pair.here)
            self._liveness.check_new(pair.here)
            self._routes[cluster_of(pair.there)].lead(pair, half)
        return receive

    def _find_pair(self, here: str, there: str) -> Pair | None:
        with self._lock:
            return self._pairs.get((here, there))

    def _is_awaited(self, here: str, there: str) -> bool:
        """Whether a worker of this cluster requests the other one, or was joined with it recently."""
        pair = self._find_pair(here, there)
        return pair is not None and (pair.half(Side.NEAR) is not None or pair.known)

    def _take(self, pair: Pair, half: Half) -> None:
        """Join a half with its pair, once its admission is logged."""
        pair.check_rate()
        if half.side is Side.FAR:
            pair.give_way()
        self.journal.note_opened(pair, half)
        try:
            pair.arrive(half)
        except TransportError as error:
            self.journal.note_ended(pair, half, error.what)
            raise

    def _pair(self, here: str, there: str) -> Pair:
        with self._lock:
            pair = self._pairs.get((here, there))
            if pair is None:
                cluster = cluster_of(there)
                if sum(cluster_of(each) == cluster for _, each in self._pairs) >= _PAIRS_AT_MOST:
                    raise TransportError(
                        f"this gateway has {_PAIRS_AT_MOST} pairs with '{cluster}', which is the limit"
                    )
                inspection = Inspection.of(self.site.roster, here, there)
                yields = self.site.cluster < cluster_of(there)
                remembers, grace = self.site.patience, self._deadlines.grace
                pair = Pair(here, there, inspection, self._note_end, yields=yields, grace=grace, remembers=remembers)
                self._pairs[here, there] = pair
            return pair

    def _remove_pairs(self) -> None:
        """Remove pairs that have ended, with pending messages to their workers."""
        with self._lock:
            self._pairs = {names: pair for names, pair in self._pairs.items() if not pair.retire()}
            workers = {*self.site.workers, *(name for names in self._pairs for name in names)}
        self._final_errors.remove_old(workers)
        self._quotas.remove_unused()

    def _list_pairs(self) -> list[Pair]:
        with self._lock:
            return list(self._pairs.values())

    # ------------------------------------------------------------------ lost workers
    def _note_end(self, pair: Pair, half: Half, why: str) -> None:
        self.journal.note_ended(pair, half, why)
        if half.side is Side.NEAR and why != REPLACED and not self._stopping.is_set():
            (self._parted.add if half.parted else self._parted.discard)(pair.here)
            self._liveness.check_ended(pair.here)

    def _is_back(self, worker: str) -> bool:
        """Whether frames arrive over any of a worker's streams."""
        nears = [
            near for pair in self._list_pairs() if pair.here == worker and (near := pair.half(Side.NEAR)) is not None
        ]
        active = [near for near in nears if not near.connection.over and near.quiet(self._now()) < self._silence]
        return self._stopping.is_set() or bool(active)

    def _gone_here(self, worker: str, state: State, why: str) -> None:
        """A local worker is dead or frozen: notify all workers that it was joined with. A worker that ended its streams
        gracefully has done so itself.
        """
        self._final_errors.forget(worker)
        if worker in self._parted:
            self.journal.note("left", target=worker)
            return
        self.journal.note("gone", target=worker, state=state, reason=why)
        reason = f"its gateway reports that {why}"
        for pair in self._list_pairs():
            if (
                pair.here == worker
                and pair.known
                and self._final_errors.give(pair.there, worker, _gone_error(worker, reason))
            ):
                pair.end(f"worker '{worker}' is gone")
        for route in self._routes.values():
            route.control.send_gone(worker, reason)

    def _gone_there(self, worker: str, why: str) -> None:
        """Handle another gateway's notice about one of its workers; notices about others are ignored."""
        pairs = [pair for pair in self._list_pairs() if pair.there == worker]
        if pairs:
            self._final_errors.forget(worker)
        for pair in pairs:
            if pair.known:
                self._final(pair, _gone_error(worker, why))

    def _final(self, pair: Pair, error: NebulaError) -> None:
        """End a pair permanently: its local worker gets the error at its next request, which it sends at once."""
        if self._final_errors.give(pair.here, pair.there, error):
            self.journal.note("final", target=str(pair), reason=f"{error.code} {error.what}: {error.why}")
            pair.end(error.what)

    # ------------------------------------------------------------------ the rest
    def _make_front(self) -> Front | None:
        """The front, if services share the public port."""
        site = self.site
        if site.services is None:
            return None
        paths = {each: socket_path(site.services, each, site.cluster) for each in (LOGIN, DATA)}
        return Front(site.listen, paths, lambda who, error: self.journal.note_refused(who, "the public port", error))

    def _make_route(self, cluster: str, kept: KeptHeads | None, announce: Announce) -> Route:
        control = ControlStreams(Identity(self.site.run, cluster, GATEWAY), kept, self._gone_there, self._note)
        events = self.journal, self._final
        return Route(
            self.site, cluster, control, self._current, *events, lines=self._lines, deadlines=self._deadlines,
            announce=announce,
        )  # fmt: skip

    def _note(self, action: str, **fields: object) -> None:
        if not self._stopping.is_set():
            self.journal.note(action, **fields)

    def _head(self, head: Head) -> None:
        for route in self._routes.values():
            route.control.send_head(head)

    def _look_out(self) -> None:
        while not self._stopping.wait(self._deadlines.look):
            for look in (
                self._look_at_certificates,
                self._look_at_routes,
                self._look_at_workers,
                self._remove_pairs,
                lambda: self.journal.look_after(self._now()),
                lambda: self._traffic.save(SAVE_SECONDS),
            ):
                try:
                    look()
                except Exception:  # no thread or file available: the next check may succeed, and must take place
                    _LOG.exception("error in a periodic check of gateway '%s'", self.site.identity.worker)

    def _look_at_routes(self) -> None:
        for route in self._routes.values():
            self._health.say(route.cluster, route.control.up)
            if route.look():
                self._end_waits(route)

    def _look_at_workers(self) -> None:
        for worker in {pair.here for pair in self._list_pairs() if pair.half(Side.NEAR) is not None}:
            if not self._is_back(worker):
                self._liveness.check_silent(worker)

    def _look_at_certificates(self) -> None:
        if self._current is not None:
            self._look_at_guests(self._current())

    def _end_waits(self, route: Route) -> None:
        """End waits for a closed route to a cluster: workers retry, and then receive the reason."""
        for pair in self._list_pairs():
            near = pair.half(Side.NEAR)
            if near is not None and near.fresh and cluster_of(pair.there) == route.cluster:
                near.connection.end(route.trouble)

    def _look_at_guests(self, credentials: Credentials) -> None:
        """End all streams of identities whose certificate has expired or was revoked, or whose account has used up its
        bytes of the day.
        """
        halves = [half for pair in self._list_pairs() for side in Side if (half := pair.half(side)) is not None]
        lanes = [lane for route in self._routes.values() for lane in route.control.lanes]
        breaks: list[tuple[Peer, Callable[[str], None]]] = [
            *((lane.guest, lane.end) for lane in lanes if lane.guest is not None),
            *((guest, half.connection.end) for half in halves for guest in half.guests),
        ]
        for peer, end in breaks:
            try:
                check_live(credentials.trust, peer)
                self._traffic.check(peer if peer.identity.role == WORKER else None)
            except IdentityError as error:
                self.journal.note_refused(peer.identity.uri, "a live stream", error)
                end(error.what)
        if credentials is not self._used:
            self._used = credentials
            for half in halves:
                if half.dialled:
                    half.connection.end("this gateway's certificate was renewed")
            for route in self._routes.values():
                route.control.end("this gateway's certificate was renewed")


def _gone_error(worker: str, why: str) -> NebulaError:
    return LinkClosedError(
        f"worker '{worker}' is gone", why=why, mend=f"check the output of '{worker}', and restart all workers"
    )
