"""The way to one other cluster: its gateway's address, the line's rate, the trunk, and how streams are opened."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from whale_nebula.errors import IdentityError, LinkClosedError, NebulaError, TransportError
from whale_nebula.gateway.half import Half, Side
from whale_nebula.gateway.pacer import Pacer
from whale_nebula.gateway.pair import Pair
from whale_nebula.gateway.site import Site
from whale_nebula.gateway.trunk import Trunk
from whale_nebula.security import CurrentCredentials, Identity
from whale_nebula.security.identity import GATEWAY
from whale_nebula.transport.deadlines import Announce, Deadlines, Waiting, log_wait
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.dialling import dial
from whale_nebula.transport.grpc.links import target
from whale_nebula.transport.grpc.metadata import Knock

_LOG = logging.getLogger("whale_nebula.gateway")
_DRAWN = random.SystemRandom()
_HEAD_START_SECONDS = 0.3
_SHORT_SECONDS = 1.0  # less is not worth a word
_STALE_SECONDS = 45.0  # after which a stream that the other gateway has dialled is known to be alive, or is gone
_SLOWEST = 4  # attempts, from which on pauses grow no longer: 0.8 s on average
_NEEDLESS = "it is not needed any more"
_SURE = 2  # the same diagnosis so often: it is not mended just now


@dataclass(frozen=True)
class Told:
    """Whom a road tells: of a half that is to be used, or is not after all; of an error that ends a pair; and what
    else is to be written down.
    """

    opened: Callable[[Pair, Half], None]
    ended: Callable[[Pair, Half, str], None]
    final: Callable[[Pair, NebulaError], None]
    noted: Callable[..., None]


class Road:
    """The way to the gateway of another cluster. Without its address this side waits to be dialled.

    Its trunk is kept up: what is wrong with a certificate when it is opened ends the pairs that wait.
    """

    def __init__(
        self,
        site: Site,
        cluster: str,
        trunk: Trunk,
        current: CurrentCredentials | None,
        told: Told,
        *,
        deadlines: Deadlines,
        announce: Announce = log_wait,
    ) -> None:
        self.cluster, self.trunk = cluster, trunk
        self.address = site.gateways[cluster]
        self.pacer = Pacer(site.rates.get(cluster))
        self.who = Identity(site.run, cluster, GATEWAY)
        self._site, self._current, self._told, self._deadlines = site, current, told, deadlines
        self._waiting = Waiting(f"gateway '{self.who.worker}'", self.address or "", announce)
        self._closed = threading.Event()
        self._stands, self._fell = False, float("-inf")  # whether our own stream stands, and when it fell
        self._down: float | None = None  # since when the other gateway is not there
        self._trouble = "" if self.address is not None else "it is the one that dials"
        self._wrong: NebulaError | None = None
        self._times = 0
        if self.address is not None:
            self._target = target(site.run, self.who.worker, self.address, current, gateway=True)

    def start(self) -> None:
        """Keep the trunk up from now on."""
        if self.address is not None:
            threading.Thread(target=self._keep, name=f"nebula-road-{self.cluster}", daemon=True).start()

    def close(self) -> None:
        """Dial no more, and end the trunk."""
        self._closed.set()
        self.trunk.close()

    def lead(self, pair: Pair, near: Half) -> None:
        """Dial the other gateway for a pair until its near half is joined or over."""
        if self.address is not None and near.fresh:
            name = f"nebula-lead-{pair.here}-{pair.there}"
            threading.Thread(target=self._lead, args=(pair, near), name=name, daemon=True).start()

    # ------------------------------------------------------------------ the streams of a pair
    def _lead(self, pair: Pair, near: Half) -> None:
        attempt = refusals = 0
        if pair.yields:
            near.wait(_HEAD_START_SECONDS)
        while near.fresh and not self._closed.is_set():
            try:
                self._open(pair, near)
            except LinkClosedError as error:
                self._told.final(pair, error)
            except IdentityError as error:
                refusals += 1
                if refusals >= _SURE:
                    self._told.final(pair, error)
            except TransportError as error:
                _LOG.debug("no stream for %s: %s", pair, error.why or error.what)
            if self._times >= _SURE and self._wrong is not None and near.fresh:
                self._told.final(pair, self._wrong)
            near.wait(self._pause(attempt))
            attempt += 1

    def _open(self, pair: Pair, near: Half) -> None:
        half = self.half(pair, Connection(secrets.token_hex(8)), dialled=True)
        with pair.attempt(near) as needed:
            if not needed:
                return
            try:
                lanes = max(options.lanes(), self._dial(pair, half, 0))
                self._told.opened(pair, half)
            except NebulaError as error:
                half.connection.end(error.what)
                raise
            if not pair.reach(half, near):
                half.connection.end(_NEEDLESS)
                self._told.ended(pair, half, _NEEDLESS)
                return
        try:
            for number in range(1, lanes):
                self._dial(pair, half, number)
        except NebulaError as error:
            half.connection.end(f"a further lane did not open: {error.what}")

    def half(self, pair: Pair, connection: Connection, *, dialled: bool = False) -> Half:
        """The far half of a pair over a connection."""
        return Half(
            Side.FAR,
            self.who.uri,
            connection,
            lambda frame: pair.inspection.check(frame, outward=False),
            pace=partial(self.pacer.take, flow=(pair.here, pair.there)),
            dialled=dialled,
        )

    def _dial(self, pair: Pair, half: Half, number: int) -> int:
        knock = Knock(self._site.run, pair.here, pair.there, half.connection.name, number)
        lane = Lane()
        return self._call(knock, lane, half.lane(number, lane))

    def _call(self, knock: Knock, lane: Lane, hear: Callable[[bytes], None]) -> int:
        return dial(self._target, knock, lane, hear, deadlines=self._deadlines, rate=self.pacer.rate)

    # ------------------------------------------------------------------ the trunk
    def look(self) -> bool:
        """Say it if the other gateway is not there, which is no matter for as long as a moment; True when it is said
        first. There is no end to this patience: workers have one of their own.
        """
        now = time.monotonic()
        if self._stands or (self.trunk.up and now - self._fell > _STALE_SECONDS):
            self._down = None
            self._waiting.off()
            return False
        self._down = now if self._down is None else self._down
        if now - self._down < _SHORT_SECONDS:
            return False
        first = not self._waiting.goes_on
        self._waiting.on(self._trouble, since=self._down)
        return first

    @property
    def trouble(self) -> str:
        """Why nobody beyond can be reached, while that is so."""
        if self._down is None or time.monotonic() - self._down < _SHORT_SECONDS:
            return ""
        return f"gateway '{self._site.identity.worker}' does not reach gateway '{self.who.worker}': {self._trouble}"

    def _keep(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            attempt = 0 if self._go() else attempt + 1
            self._closed.wait(self._pause(attempt))

    def _pause(self, attempt: int) -> float:
        """How long to wait before another attempt: a gateway that is started again is wanted at once."""
        return self._deadlines.again(min(attempt, _SLOWEST), _DRAWN.random())

    def _go(self) -> bool:
        """Open the trunk and stay as long as it lasts; whether that was longer than a moment."""
        lane, over = Lane(), threading.Event()
        knock = Knock(self._site.run, self._site.identity.worker, self.who.worker, secrets.token_hex(8))
        try:
            self._call(knock, lane, self.trunk.hear)
        except NebulaError as error:
            wrong = self._find_wrong(error)
            self._trouble = wrong.what if wrong is not None else error.why or error.what
            return False
        self._wrong, self._times = None, 0
        began, self._stands = time.monotonic(), True
        self.trunk.adopt(lane, over.set)
        over.wait()  # ended, too, when this gateway closes it or finds the other one's certificate no longer good
        self._stands, self._fell, self._trouble = False, time.monotonic(), lane.why
        return self._fell - began > _SHORT_SECONDS

    def _find_wrong(self, error: NebulaError) -> NebulaError | None:
        """What is wrong with a certificate, there or here, where the trunk does not open; written down when it is new.

        What fails within TLS is looked into by a handshake of our own, as gRPC does not show it.
        """
        found: NebulaError | None = None
        if isinstance(error, IdentityError):
            found = error
        elif self._target.diagnose is not None and not self._closed.is_set():
            found = self._target.diagnose()
        if found is None:
            self._wrong, self._times = None, 0
            return None
        if type(self._wrong) is not type(found):  # its text may be the other side's, and another one each time
            said = {"actor": self.who.uri, "target": "trunk", "decision": "deny", "reason": str(found)}
            self._told.noted("refuse", durable=False, **said)
        self._wrong, self._times = found, self._times + 1
        return found
