"""The route to one other cluster: its gateway's address, rate limiting, the control stream, and the opening of pair
streams.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from whale_nebula.errors import ConfigError, ExpiredError, IdentityError, LinkClosedError, NebulaError, TransportError
from whale_nebula.gateway.control import ControlStreams
from whale_nebula.gateway.journal import Journal
from whale_nebula.gateway.relay import Half, Pair, Side
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.security import CurrentCredentials, Identity
from whale_nebula.security.identity import GATEWAY
from whale_nebula.transport.deadlines import Announce, Deadlines, WaitAnnouncer, log_wait
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.connection import Connection, Lane
from whale_nebula.transport.grpc.dialling import Target, dial
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.transport.grpc.listener import StreamRequest

FREE_BYTES = 512
"""A frame of at most this size, such as an acknowledgement, needs no turn as long as few of them are sent."""
_FREE_SHARE, _FREE_BURST = 0.05, 64 << 10  # of the line's rate for such frames, and their burst in bytes
_BURST_SECONDS = 0.02
_STEP_SECONDS = 0.002
_OVERHEAD = 1.04  # bytes on the WAN link by those of a frame: TLS, HTTP/2, TCP and IP


Flow = Sequence[Hashable]
"""The parts of a flow's name: run (by its audit log, as names may be equal), account, and pair of workers."""


class QueuedFrame:
    """A frame of `size` bytes that waits for its turn on a WAN link; `condition` is notified when it is `granted`."""

    def __init__(self, size: int, condition: threading.Condition) -> None:
        self.size = size
        self.condition = condition
        self.granted = False


class FlowQueue:
    """Frames of one flow, the first one first."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedFrame] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, flow: Flow, frame: QueuedFrame) -> None:
        """Append a frame."""
        self._waiting.append(frame)

    def peek(self) -> QueuedFrame:
        """Return the next frame."""
        return self._waiting[0]

    def pop(self) -> QueuedFrame:
        """Remove and return the next frame."""
        return self._waiting.popleft()


class FairQueue:
    """Frames of several flows that share a WAN link fairly, by start-time fair queueing, which needs no clock.

    The next frame is the one that would begin first if all flows had their shares of the WAN link simultaneously. A
    flow with only one frame here at a time is not at a disadvantage, as its worker sends the next once this one has
    left. The name of a flow has several parts: flows with equal first parts share the rate of one flow.

    >>> queue, condition = FairQueue(), threading.Condition()
    >>> for flow, size in (("a", 100_000), ("a", 100_000), ("b", 30_000), ("b", 30_000)):
    ...     queue.add((flow,), QueuedFrame(size, condition))
    >>> [queue.pop().size for _ in range(4)]
    [100000, 30000, 30000, 100000]
    """

    def __init__(self) -> None:
        self._flows: dict[Hashable, FairQueue | FlowQueue] = {}  # flows that wait
        self._order: list[tuple[int, int, Hashable]] = []  # a heap of these by virtual start of the next frame
        self._ends_by_flow: dict[Hashable, int] = {}  # of the last frames of flows that do not wait
        self._virtual_time = 0  # virtual start of the frame taken last
        self._number = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._flows)

    def add(self, flow: Flow, frame: QueuedFrame) -> None:
        """Append a frame to those of the same flow."""
        name, *rest = flow
        if name not in self._flows:
            self._flows[name] = FairQueue() if rest else FlowQueue()
            self._push(name, max(self._virtual_time, self._ends_by_flow.pop(name, 0)))
        self._flows[name].add(rest, frame)

    def _push(self, name: Hashable, start: int) -> None:
        heapq.heappush(self._order, (start, next(self._number), name))

    def peek(self) -> QueuedFrame:
        """Return the next frame."""
        return self._flows[self._order[0][2]].peek()

    def pop(self) -> QueuedFrame:
        """Remove and return the next frame."""
        self._virtual_time, _, name = heapq.heappop(self._order)
        frame = self._flows[name].pop()
        end = self._virtual_time + frame.size
        if self._flows[name]:
            self._push(name, end)
        else:
            del self._flows[name]
            ends = {other: when for other, when in self._ends_by_flow.items() if when > self._virtual_time}
            self._ends_by_flow = {**ends, name: end}
        return frame


def _wait(condition: threading.Condition, seconds: float | None) -> None:
    condition.wait(seconds)


class Pacer:
    """Allocates turns on a WAN link of a rate in bytes per second, for any number of threads and flows.

    On an idle WAN link no thread waits; on a busy one flows take turns by `FairQueue`. Frames of at most `FREE_BYTES`
    never wait while they are few, but are counted.

    >>> waits = []
    >>> pacer = Pacer(1.04e6, now=lambda: sum(waits), wait=lambda condition, seconds: waits.append(seconds))
    >>> for size in (100_000, 100_000, 100, 100_000): pacer.wait_turn(size)
    >>> [round(wait, 3) for wait in waits]
    [0.08, 0.1]
    """

    def __init__(
        self,
        rate: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float | None], None] = _wait,
    ) -> None:
        self.rate = rate
        self._now, self._wait = now, wait
        self._lock = threading.Lock()
        self._queue = FairQueue()
        self._timer: QueuedFrame | None = None  # whose thread is the timer of all waiting threads
        self._free_at = float("-inf")  # when the line will have carried all granted frames
        self._free_bytes = TokenBucket(_FREE_BURST, _FREE_SHARE * (rate or 0.0), now=now)

    def wait_turn(self, size: int, flow: Flow = ("",)) -> None:
        """Wait for a turn to send a frame of this many bytes of a flow."""
        if self.rate is None:
            return
        with self._lock:
            if size <= FREE_BYTES and self._free_bytes.take(size):
                self._count(size)
            else:
                frame = QueuedFrame(size, threading.Condition(self._lock))
                self._queue.add(flow, frame)
                self._wait_granted(frame)

    def _wait_granted(self, frame: QueuedFrame) -> None:
        """Wait until a frame is granted its turn. One of the waiting threads grants the turns of all, by time."""
        while True:
            seconds = self._grant_due()
            if frame.granted:
                break
            self._timer = self._timer or frame
            self._wait(frame.condition, max(seconds, _STEP_SECONDS) if self._timer is frame else None)
        if self._timer is frame:
            self._timer = None
            if self._queue:
                self._queue.peek().condition.notify()

    def _grant_due(self) -> float:
        """Grant the turns for which the line is free; returns the seconds until the next."""
        while self._queue and self._free_at - _BURST_SECONDS <= self._now():
            frame = self._queue.pop()
            self._count(frame.size)
            frame.granted = True
            frame.condition.notify()
        return self._free_at - _BURST_SECONDS - self._now()

    def _count(self, size: int) -> None:
        self._free_at = max(self._free_at, self._now()) + size * _OVERHEAD / (self.rate or float("inf"))


class SharedLines:
    """The WAN links of a host by the clusters to which they lead: gateways of several runs share each of them."""

    def __init__(self) -> None:
        self._pacers: dict[str, Pacer] = {}

    def find_pacer(self, settings: GatewaySettings, cluster: str) -> Pacer:
        """The pacer of a WAN link, whose rate must be the same in all runs."""
        rate = settings.rates.get(cluster)
        pacer = self._pacers.setdefault(cluster, Pacer(rate))
        if pacer.rate != rate:
            rates = " and ".join(
                "no rate" if each is None else f"{each * 8 / 1e6:g}mbit" for each in (pacer.rate, rate)
            )
            raise ConfigError(
                f"two runs configure different rates of the link from {settings.cluster} to {cluster}: {rates}",
                why="the runs share this link",
                mend="set the same rate under 'links' in both configs",
            )
        return pacer


_LOG = logging.getLogger("whale_nebula.gateway")
_HEAD_START_SECONDS = 0.3
_SHORT_SECONDS = 1.0  # shorter waits are not reported
_STALE_SECONDS = 45.0  # after which a stream that the other gateway has dialled is known to be alive or lost
_MAX_BACKOFF_ATTEMPTS = 4  # attempts, after which the backoff is constant: 0.8 s on average
_UNNEEDED = "it is no longer needed"
_FINAL_DIAGNOSES = 2  # the same diagnosis so often is not transient


class Route:
    """The route to the gateway of another cluster. Without its address this side waits for a connection.

    Its control stream is kept open. If a certificate is found invalid when it is opened, the waiting pairs end, and
    `end_pair` is called for each.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        cluster: str,
        control: ControlStreams,
        current: CurrentCredentials | None,
        journal: Journal,
        end_pair: Callable[[Pair, NebulaError], None],
        *,
        lines: SharedLines,
        deadlines: Deadlines,
        announce: Announce = log_wait,
    ) -> None:
        self.cluster, self.control = cluster, control
        self.address = settings.gateways[cluster]
        self.pacer = lines.find_pacer(settings, cluster)
        self.identity = Identity(settings.run, cluster, GATEWAY)
        self._settings, self._current, self._deadlines = settings, current, deadlines
        self._journal, self._end_pair = journal, end_pair
        self._waiting = WaitAnnouncer(f"gateway '{self.identity.worker}'", self.address or "", announce)
        self._closed = threading.Event()
        self._is_open, self._ended_at = False, float("-inf")  # whether our own stream is open, and when it ended
        self._unreachable_since: float | None = None  # since when the other gateway is unreachable
        self._trouble = "" if self.address is not None else "it has to connect, as its address is not configured"
        self._certificate_error: NebulaError | None = None
        self._diagnosis_count = 0
        if self.address is not None:
            self._target = Target.for_peer(settings.run, self.identity.worker, self.address, current, gateway=True)

    def start(self) -> None:
        """Keep a control stream open from now on."""
        if self.address is not None:
            threading.Thread(
                target=self._maintain_control_stream, name=f"nebula-route-{self.cluster}", daemon=True
            ).start()

    def close(self) -> None:
        """Stop dialling, and end the control streams."""
        self._closed.set()
        self.control.close()

    def dial_for_pair(self, pair: Pair, near: Half) -> None:
        """Dial the other gateway for a pair until its near half is joined or over."""
        if self.address is not None and near.is_joinable:
            name = f"nebula-lead-{pair.here}-{pair.there}"
            threading.Thread(target=self._run_pair_dialling, args=(pair, near), name=name, daemon=True).start()

    # ------------------------------------------------------------------ the streams of a pair
    def _run_pair_dialling(self, pair: Pair, near: Half) -> None:
        attempt = refusals = 0
        if pair.yields:
            near.wait_joined(_HEAD_START_SECONDS)
        while near.is_joinable and not self._closed.is_set():
            try:
                self._open_far_half(pair, near)
            except LinkClosedError as error:
                self._end_pair(pair, error)
            except IdentityError as error:
                refusals += not isinstance(error, ExpiredError)  # may be renewed: workers retry for that long
                if refusals >= _FINAL_DIAGNOSES:
                    self._end_pair(pair, error)
            except TransportError as error:
                _LOG.debug("cannot open a stream for %s: %s", pair, error.why or error.what)
            except Exception:  # no thread or no file just now
                _LOG.exception("error while opening a stream for %s, which is retried", pair)
            if self._diagnosis_count >= _FINAL_DIAGNOSES and self._certificate_error is not None and near.is_joinable:
                self._end_pair(pair, self._certificate_error)
            near.wait_joined(self._pause(attempt))
            attempt += 1

    def _open_far_half(self, pair: Pair, near: Half) -> None:
        half = self.make_far_half(pair, Connection(secrets.token_hex(8)), dialled=True)
        with pair.begin_attempt(half, near) as needed:
            if not needed:
                return
            try:
                lanes = max(options.count_lanes(), self._dial(pair, half, 0))
                self._journal.note_opened(pair, half)
            except BaseException as error:
                half.connection.end(str(error).partition("\n")[0])
                raise
            if not pair.use_dialled_half(half, near):
                half.connection.end(_UNNEEDED)
                self._journal.note_ended(pair, half, _UNNEEDED)
                return
        try:
            for number in range(1, lanes):
                self._dial(pair, half, number)
        except NebulaError as error:
            if not half.connection.is_over:
                _LOG.info("%s continues with fewer lanes: %s", pair, error.what)

    def make_far_half(self, pair: Pair, connection: Connection, *, dialled: bool = False) -> Half:
        """The far half of a pair over a connection."""

        def pace(size: int) -> None:
            self.pacer.wait_turn(size, (self._settings.audit, pair.account, (pair.here, pair.there)))

        return Half(
            Side.FAR,
            self.identity.uri,
            connection,
            lambda frame: pair.inspection.check(frame, outward=False),
            pace=pace,
            dialled=dialled,
        )

    def _dial(self, pair: Pair, half: Half, number: int) -> int:
        request, lane = StreamRequest(self._settings.run, pair.here, pair.there, half.connection.name, number), Lane()
        return self._call(request, lane, half.add_lane(number, lane))

    def _call(self, request: StreamRequest, lane: Lane, receive: Callable[[bytes], None]) -> int:
        return dial(self._target, request, lane, receive, deadlines=self._deadlines, rate=self.pacer.rate)

    # ------------------------------------------------------------------ the control stream
    def check_reachability(self) -> bool:
        """Announce that the other gateway is unreachable, after a grace period; True at the first announcement. It is
        retried without limit: workers have their own patience.
        """
        now = time.monotonic()
        if self._is_open or (self.control.is_connected and now - self._ended_at > _STALE_SECONDS):
            self._unreachable_since = None
            self._waiting.finish()
            return False
        self._unreachable_since = now if self._unreachable_since is None else self._unreachable_since
        if now - self._unreachable_since < _SHORT_SECONDS:
            return False
        first = not self._waiting.is_announced
        self._waiting.announce(self._trouble, since=self._unreachable_since)
        return first

    @property
    def trouble(self) -> str:
        """The reason why the other cluster is unreachable; "" if it is reachable."""
        if self._unreachable_since is None or time.monotonic() - self._unreachable_since < _SHORT_SECONDS:
            return ""
        return (
            f"gateway '{self._settings.identity.worker}' cannot reach gateway '{self.identity.worker}': {self._trouble}"
        )

    def _maintain_control_stream(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            try:
                attempt = 0 if self._run_control_stream() else attempt + 1
            except Exception:  # no thread or no file just now
                _LOG.exception("error on the route to gateway '%s', which is retried", self.identity.worker)
                attempt += 1
            self._closed.wait(self._pause(attempt))

    def _pause(self, attempt: int) -> float:
        """The backoff before another attempt. It is short, as a restarted gateway is needed immediately."""
        return self._deadlines.draw_retry_pause(min(attempt, _MAX_BACKOFF_ATTEMPTS))

    def _run_control_stream(self) -> bool:
        """Open the control stream and wait for its end; returns whether it lasted longer than a moment."""
        lane, over = Lane(), threading.Event()
        request = StreamRequest(
            self._settings.run, self._settings.identity.worker, self.identity.worker, secrets.token_hex(8)
        )
        try:
            self._call(request, lane, self.control.receive)
        except NebulaError as error:
            fault = self._find_certificate_fault(error)
            self._trouble = fault.what if fault is not None else error.why or error.what
            return False
        self._certificate_error, self._diagnosis_count = None, 0
        began, self._is_open = time.monotonic(), True
        self.control.add_stream(lane, over.set)
        over.wait()  # also set when this gateway closes it or finds the other one's certificate invalid
        self._is_open, self._ended_at, self._trouble = False, time.monotonic(), lane.reason
        return self._ended_at - began > _SHORT_SECONDS

    def _find_certificate_fault(self, error: NebulaError) -> NebulaError | None:
        """The certificate fault, there or here, that prevents the control stream; recorded when new.

        A failure within TLS is diagnosed by a separate handshake, as gRPC does not report its reason.
        """
        fault: NebulaError | None = None
        if isinstance(error, IdentityError):
            fault = error
        elif not self._closed.is_set():
            fault = self._target.diagnose()
        if fault is None:
            self._certificate_error, self._diagnosis_count = None, 0
            return None
        if type(self._certificate_error) is not type(fault):  # not by its text, which may be the other side's and vary
            fields = {"actor": self.identity.uri, "target": "trunk", "decision": "deny", "reason": str(fault)}
            self._journal.note("refuse", durable=False, **fields)
        self._certificate_error, self._diagnosis_count = (
            fault,
            0 if isinstance(fault, ExpiredError) else self._diagnosis_count + 1,
        )
        return fault
