"""A link to a worker in another process, over a carrier that may break: the session survives reconnections.

One thread sends, the carrier's threads receive, a third checks timeouts. All of them share one condition, which also
guards the conversation and is never held while a frame is passed to the carrier.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from whale_nebula.errors import (
    DeadlineError,
    EpochOverError,
    ExpiredError,
    IdentityError,
    LocalProtocolError,
    NebulaError,
    OtherWorkersError,
    PeerRestartedError,
    RemoteProtocolError,
    StaleWorkerError,
)
from whale_nebula.faults import chunk_failpoint, failpoint
from whale_nebula.transport.base import (
    BYE,
    FAIL,
    Carrier,
    CarrierState,
    Faults,
    Link,
    absent_error,
    closed_by_error,
    closed_here_error,
    failed_error,
    lost_error,
    refuse_reserved,
    silent_error,
)
from whale_nebula.transport.deadlines import Announce, Deadlines, Meter, Waiting, log_wait
from whale_nebula.transport.mailbox import Mailbox, Waiters, unsent_item_error
from whale_nebula.transport.outbox import Outbox, OutgoingFrame, OutgoingItem
from whale_nebula.transport.protocol import ExpectKey, Key, LinkTotals, Payload, Roster, describe_payload, read_payload
from whale_nebula.wire.buffers import Acknowledged, Bound, MessageArrived, TensorArrived
from whale_nebula.wire.conversation import BUDGET_BYTES, Answer, Conversation, Opened
from whale_nebula.wire.frame import Header, Kind, count_frames, pack_header, split_payload
from whale_nebula.wire.greeting import Greeting, Prover
from whale_nebula.wire.message import build_message_header, check_message, encode_message

_LOG = logging.getLogger("whale_nebula.transport")
_SEAL_BYTES = 16
_GREETINGS = 8  # attempts at a valid greeting
_SHORT_SECONDS = 1.0  # a reconnection within this time is not reported
_LONGEST_REASON = 4096


class PeerLink(Link):
    """One worker's end of a link to a worker in another process, over a carrier.

    `greeting` has the identities of both workers and of the run. `expect` returns what the plan allows for a key (None:
    unexpected). `budget` is how many bytes may be queued before `send` blocks. It also limits the bytes that are kept
    until they are acknowledged; and once a fifth of it has arrived unrequested, back-pressure stops the other side.
    `window` is how many bytes may arrive out of order, for carriers of several lanes. With a `prover` both sides
    authenticate each other, and with `sealed` frames are encrypted end to end. `announce` is called for every wait.
    `waiters` are shared by all links of a process. `arrive` is called if the numbers of workers in a peer's greeting
    differ from those in `greeting`; without it, such a peer ends the link.
    """

    def __init__(
        self,
        carrier: Carrier,
        greeting: Greeting,
        workers: Iterable[str],
        *,
        expect: ExpectKey | None = None,
        budget: int = BUDGET_BYTES,
        window: int = BUDGET_BYTES,
        prover: Prover | None = None,
        sealed: bool = False,
        deadlines: Deadlines | None = None,
        announce: Announce = log_wait,
        waiters: Waiters | None = None,
        arrive: Callable[[OtherWorkersError], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        here, there = greeting.worker, greeting.peer
        waiters = waiters or Waiters()
        inbox = Mailbox(here, there, fault=RemoteProtocolError, window=budget // 5, waiters=waiters, due=self._find_due)
        super().__init__(inbox)
        self._inbox.late = self._explain_timeout
        self._inbox.on_flow = self._wake_writer
        self._roster = Roster(workers)
        self._numbers = self._roster.number(here), self._roster.number(there)
        self._expect = expect
        self._budget = budget
        self._deadlines = deadlines or Deadlines()
        self._conversation = Conversation(
            *self._numbers,
            greeting,
            expect=self._find_bound,
            budget=budget,
            window=window,
            accepts_data=lambda: self._inbox.flows,
            prover=prover,
            sealed=sealed,
        )
        self._outbox = Outbox(self._conversation, budget, beat=self._deadlines.beat, now=now, waiting=waiters.waiting)
        self._changed = self._outbox.changed
        self._farewell = self._parcel({"kind": BYE})
        self._carrier = carrier
        self._now = now
        self._meter = Meter()
        self._prover = prover
        self._arrive = arrive
        # why the last greeting was refused, if that is transient: a certificate is renewed, an old process ends
        self._transient_refusal: ExpiredError | StaleWorkerError | None = None
        self._stale: float | None = None  # since when a worker of an earlier epoch has this connection
        self._waiting = Waiting(f"worker '{there}'", carrier.where, announce, now=now)
        self._received_at = self._down = now()  # from the worker itself, authenticated
        self._tick = min(self._deadlines.look, self._deadlines.silence / 8)
        self._began: float | None = None  # when the first chunk of the current parcel was sent
        self._met = False
        self._bye_received = False
        self._closed = False
        self._failed = False
        self._fail_received = False
        self._fail_answered = False
        self._is_distrusted = False  # received frames are no longer trusted
        self._faults = Faults()
        self._greeting_faults = Faults(_GREETINGS)  # in a row
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, name=f"nebula-write-{there}", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"nebula-watch-{there}", daemon=True)
        carrier.start(self)
        self._writer.start()
        self._watcher.start()

    def state(self) -> CarrierState:
        """The state of its carrier."""
        return self._carrier.state()

    # Called by its owner.

    def send(self, key: Key, array: Payload, *, raw_bytes: int | None = None, size: int | None = None) -> None:
        """Queue a tensor for the writer. `size` is not needed here: the array has one."""
        self._check(key, self.here, self.there)
        header, data, raw = describe_payload(self._roster.header(key), array)
        parcel = OutgoingItem(header, data)
        self._put(parcel)
        raw = raw if raw_bytes is None else raw_bytes
        self._count(LinkTotals(data.nbytes, parcel.size, raw, count_frames(data.nbytes)))

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a control message for the writer."""
        refuse_reserved(message)
        parcel = self._parcel(message)
        self._put(parcel)
        self._count_message(parcel.payload.size)

    def begin_session(self, epoch: int) -> None:
        """Begin a session, whose epoch distinguishes restarted processes."""
        super().begin_session(epoch)
        with self._changed:
            self._conversation.begin_session(epoch)

    def fail(self, reason: Mapping[str, Any], *, last: bool = False) -> None:
        """Notify the other worker of a failure and its cause: ahead of the queue, which is dropped as the link ends, or
        after it, as the `last` message.
        """
        failpoint("failure.telling")
        cut = {name: value[:_LONGEST_REASON] if isinstance(value, str) else value for name, value in reason.items()}
        parcel = self._parcel({"kind": FAIL, "reason": cut, "last": last})
        with self._changed:
            if last and self._failed:
                return
            self._failed = True
            if not last:
                self._outbox.forget()
            if self._outbox.queue_last(parcel) if last else self._outbox.queue_urgent(parcel):
                self._count_message(parcel.payload.size)

    def part(self) -> None:
        """Send a farewell without waiting. Of several links that end together, all send theirs before any is closed."""
        if self._inbox.close(lambda: closed_here_error(self.here, self.there)):
            failpoint("link.parting")
            self._queue_farewell()

    def close(self) -> None:
        """Flush the queue and a farewell, wait for its acknowledgement and the other side's farewell, and end."""
        self.part()
        if self._closed:
            return
        self._closed = True
        failpoint("link.draining", self._carrier.drop)
        self._drain()
        self._end()
        for thread in (self._writer, self._watcher):
            thread.join(self._deadlines.grace)
        failpoint("link.closed")

    def _parcel(self, message: Mapping[str, Any]) -> OutgoingItem:
        payload = np.frombuffer(encode_message(message), np.uint8)
        return OutgoingItem(build_message_header(payload.size, *self._numbers), payload)

    def _put(self, parcel: OutgoingItem) -> None:
        self._inbox.check_open()
        # an invalid parcel is raised here, in the caller's thread, not in the writer's
        pack_header(next(split_payload(parcel.header, parcel.payload))[0], 0)
        stall = self._deadlines.stall(self._outbox.waiting, self._meter.rate)
        if not self._outbox.put(parcel, stall, self.there):
            self._inbox.check_open()

    def _queue_farewell(self) -> None:
        """Send a farewell, unless this side has failed: the failure is its last message."""
        if self._failed:
            self._outbox.finish()
        elif self._outbox.finish(self._farewell):
            self._count_message(self._farewell.payload.size)

    def _drain(self) -> None:
        """Wait for the end of the conversation while it can still be reached."""
        with self._changed:
            sent, received, since = self._progress(), self._conversation.expected_number, self._now()
            taken = since  # when the other side last received something; what it sends does not extend the wait
            while not self._ended.is_set():  # the writer ends after the last acknowledgement
                now = self._now()
                left = since + self._deadlines.grace - now
                stall = self._deadlines.stall(max(self._budget, self._unsent), self._meter.rate)
                if left <= 0 and not self._is_worth_waiting():
                    return
                if now - taken >= stall:
                    break
                self._changed.wait(min(max(left, 0.1), taken + stall - now))
                if self._progress() != sent:
                    sent, since = self._progress(), self._now()
                    taken = since
                if self._conversation.expected_number != received:
                    received, since = self._conversation.expected_number, self._now()
            else:
                return
        error = DeadlineError(
            f"worker '{self.there}' has received nothing for {round(stall, 1):g} s",
            where=self._carrier.where,
            why=f"'{self.here}' closes its link, and {self._unsent} bytes were not acknowledged",
            mend=f"check what '{self.there}' is doing, or increase 'patience' in the config",
        )
        _LOG.warning("%s", error)
        self.lost(error)

    def _progress(self) -> tuple[int, int]:
        return self._outbox.written, self._conversation.unacknowledged_bytes

    @property
    def _unsent(self) -> int:
        """The bytes that were not acknowledged yet."""
        return self._outbox.waiting + self._conversation.unacknowledged_bytes

    def _is_worth_waiting(self) -> bool:
        """Whether more than a farewell is unacknowledged and the other worker still needs it, so that waiting is
        worthwhile.
        """
        ending = self._failed or self._fail_received or self._bye_received
        return self._met and not ending and self._unsent > self._farewell.size + _SEAL_BYTES

    @property
    def _over(self) -> bool:
        """Whether both sides have sent a farewell and all frames were acknowledged, or the peer has ended."""
        if self._is_distrusted:
            return self._conversation.ready and not self._outbox.urgent
        if self._fail_received:
            return self._outbox.finishing and (self._fail_answered or not self._conversation.ready)
        return (
            (self._bye_received or self._failed)
            and self._outbox.drained
            and self._conversation.unacknowledged_bytes == 0
        )

    def _end(self) -> None:
        self._outbox.stop()
        self._ended.set()
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake the writer after a change that may require a frame."""
        with self._changed:
            self._changed.notify_all()

    # Called by the sending thread.

    def _write(self) -> None:
        try:
            while (found := self._next()) is not None:
                self._send_frame(*found)
        except Exception as error:  # after any error, no caller may wait for what will not be sent
            _LOG.error("the link from %s to %s failed on this side: %s", self.here, self.there, error)
            why = f"the sender of this side has failed: {error!r}"
            self.lost(error if isinstance(error, NebulaError) else lost_error(self.there, why))
        finally:
            self._end()
            self._carrier.close()

    def _next(self) -> tuple[int, OutgoingFrame] | None:
        """The next frame and its connection; None after the last one."""
        with self._changed:
            while not self._ended.is_set() and not (self._fail_received and self._over):
                try:
                    shipment = self._outbox.next()
                except LocalProtocolError as error:
                    if self._failed:
                        raise
                    self._end_link(error, {"what": error.what, "why": error.why})
                    continue
                if shipment is not None and self._outbox.connection is not None:
                    self._meter.busy(self._now())
                    self._fail_answered |= self._fail_received
                    return self._outbox.connection, shipment
                if self._over:
                    return None
                self._changed.wait(self._outbox.find_heartbeat_delay())
            return None

    def _end_link(self, error: NebulaError, reason: Mapping[str, Any]) -> None:
        """End the link for this reason, and report it to both sides."""
        self._inbox.end(lambda: error.with_traceback(None), at_once=True)
        self.fail(reason)
        self._outbox.finish()

    def _send_frame(self, connection: int, shipment: OutgoingFrame) -> None:
        started = self._now()
        parcel, ends = shipment.parcel, (self._began is None, shipment.last)
        tensor = parcel is not None and parcel.header.kind != Kind.CONTROL
        if tensor:
            chunk_failpoint("before", *ends, self._carrier.drop)
        if not self._carrier.send(connection, *shipment.packet):  # it will be retransmitted
            with self._changed:
                self._outbox.broken(connection)
        if parcel is None:
            return
        self._outbox.done(shipment.share)
        if not tensor:
            return
        chunk_failpoint("after", *ends, self._carrier.drop)
        began = started if self._began is None else self._began
        self._began = None if shipment.last else began
        if shipment.last and self.on_sent is not None:
            self.on_sent(self._roster.key(parcel.header), parcel.size, began, self._now())

    # Called by the carrier's threads.

    def up(self, connection: int) -> None:
        """Start the greeting on a new connection."""
        failpoint("connection.up", self._carrier.drop)
        with self._changed:
            self._outbox.connect(connection, self._conversation.connect())
            self._changed.notify_all()

    def down(self, why: str) -> None:
        """The connection is lost; the conversation is kept."""
        failpoint("connection.down")
        with self._changed:
            self._stale = None
            self._conversation.disconnect()
            self._outbox.disconnect()
            self._meter.idle()
            self._down = self._now()
            self._changed.notify_all()

    def lost(self, error: NebulaError) -> None:
        """The carrier has given up."""
        with self._changed:
            if not self._bye_received:
                error.peer = error.peer or self.there
                self._inbox.end(lambda: error.with_traceback(None))
        self._waiting.drop()
        self._end()

    def message(self, data: bytes) -> None:
        """Process one received frame."""
        with self._changed:
            greeted = self._conversation.ready
            if self._conversation.error is not None or (self._is_distrusted and greeted):
                return  # the error was reported: this connection is about to end
            opened, beyond_tensors, error = self._take(data)
            if greeted or opened:  # frames count only after the greeting
                self._received_at = self._now()
            if (
                beyond_tensors or error is not None or self._conversation.has_due_acknowledgement
            ):  # the writer has something to do
                self._changed.notify_all()
        if opened:
            self._carrier.opened()
        if error is not None:
            self._handle_fault(error, greeted)

    def _take(self, data: bytes) -> tuple[bool, bool, NebulaError | None]:
        """Process a frame; returns whether the conversation is now open, whether there was more than tensors, and the
        error.
        """
        opened = beyond_tensors = False
        try:
            for event in self._conversation.receive(data):
                opened |= isinstance(event, Opened)
                beyond_tensors |= not isinstance(event, TensorArrived)
                if isinstance(event, TensorArrived | MessageArrived):
                    if not self._accept(event):
                        return opened, True, None
                elif isinstance(event, Answer):
                    self._outbox.answer(event.packets)
                elif isinstance(event, Acknowledged):
                    self._meter.count_arrived(
                        event.bytes, self._now(), more=self._conversation.unacknowledged_bytes > 0
                    )
                else:
                    self._resume(event)
        except NebulaError as error:
            return opened, True, error
        except Exception as error:
            return opened, True, _wrap_unexpected(error)
        return opened, beyond_tensors, self._conversation.error

    def _resume(self, event: Opened) -> None:
        self._met, self._transient_refusal, self._greeting_faults = True, None, Faults(_GREETINGS)
        failpoint("connection.opened", self._carrier.drop)
        if event.resend:
            failpoint("frames.again", self._carrier.drop)
        self._outbox.again(event.resend)
        if event.resumed:
            _LOG.info("%s and %s resume: %d frames are retransmitted", self.here, self.there, len(event.resend))

    def _accept(self, event: TensorArrived | MessageArrived) -> bool:
        """Deliver complete messages to the mailbox. A fault in one ends the link, since its frame was acknowledged and
        is not retransmitted.
        """
        message = isinstance(event, MessageArrived)
        failpoint("message.received" if message else "tensor.received", self._carrier.drop)
        try:
            if isinstance(event, MessageArrived):
                check_message(event.message)
                self._accept_message(event.message, event.header.whole)
            else:
                self._inbox.put(self._roster.key(event.header), read_payload(event))
        except NebulaError as error:
            self._refuse(error)
            return False
        except Exception as error:
            self._refuse(_wrap_unexpected(error))
            return False
        return True

    def _accept_message(self, message: dict[str, Any], size: int) -> None:
        if message["kind"] == BYE:
            self._inbox.end(partial(closed_by_error, self.there))
            self._queue_farewell()
            self._bye_received = True
        elif message["kind"] == FAIL:
            last = message.get("last", False)
            self._inbox.end(partial(failed_error, self.there, message.get("reason")), at_once=not last, takes=last)
            self._fail_received = True
            if not last:
                self._outbox.forget()  # the peer has ended: wake senders that wait for room
        else:
            self._inbox.put_message(message, size=size)

    def _find_bound(self, header: Header) -> Bound | None:
        """The plan's limit of the size of an incoming tensor, checked before memory is allocated."""
        if self._expect is None:
            return None
        key = self._roster.key(header)
        bound = self._expect(key)
        if bound is None:
            raise RemoteProtocolError(f"{key} was received, but is not in the plan")
        return bound

    def _find_due(self, key: Key) -> float:
        """The number of bytes that the plan and the step allow for a received tensor."""
        bound = self._expect(key) if self._expect is not None else None
        return math.inf if bound is None else bound.due

    def _handle_fault(self, error: NebulaError, greeted: bool) -> None:
        """Handle an invalid frame: after random damage it is retransmitted on the next connection; after any other
        fault it would be invalid again.
        """
        if isinstance(error, ExpiredError):  # it may be renewed at any time
            self._transient_refusal = error
            self._carrier.drop(error.what)
            return
        silent = self._now() - self._received_at >= self._deadlines.silence
        if (
            silent and isinstance(error, StaleWorkerError) and error.fresh
        ):  # the previous process is dead, and so its launcher
            what = f"worker '{self.there}' was restarted by a new launcher"
            error = PeerRestartedError(what, why=error.what)
        if isinstance(error, OtherWorkersError):
            (self._arrive or self.lost)(error)
            self._carrier.drop(error.what)
            return
        if isinstance(error, StaleWorkerError):  # it ends once it has received our epoch
            with self._changed:
                self._transient_refusal, self._stale = error, self._now()
            return
        heals = isinstance(error, RemoteProtocolError) and not isinstance(error, PeerRestartedError | EpochOverError)
        faults = self._faults if greeted else self._greeting_faults
        hopeless = not heals or faults.should_give_up(error, self._conversation.expected_number)
        if hopeless:
            self._refuse(error)
        if hopeless and not (greeted and heals):
            self._end()
            return
        self._carrier.drop(error.what)

    def _refuse(self, error: NebulaError) -> None:
        """Stop trusting the peer: report it to both sides, as far as they can be reached."""
        with self._changed:
            if self._is_distrusted:
                return
            self._is_distrusted = True
            error.where = error.where or f"from worker '{self.there}'"
            self._end_link(error, {"what": f"invalid data from '{self.there}'", "why": error.what})
            self._changed.notify_all()

    # Called by the supervising thread.

    def _watch(self) -> None:
        while not self._ended.wait(self._tick):
            try:
                self._check_liveness()
            except Exception:  # a transient lack of memory or files must not end the supervision
                _LOG.exception("%s cannot supervise its link to %s", self.here, self.there)

    def _check_liveness(self) -> None:
        """Check that frames arrive from the other worker, and that the wait for it is within the patience."""
        with self._changed:
            quiet, ready, bye = self._now() - self._received_at, self._conversation.ready, self._bye_received
            rate, away = self._meter.rate, self._now() - self._down
            certificate = self._conversation.peer_certificate
            stale = self._stale is not None and self._now() - self._stale >= _SHORT_SECONDS
        if stale and self._transient_refusal is not None:
            self._carrier.drop(self._transient_refusal.what)
        if certificate is not None and not bye:
            self._check_peer(certificate, ready)
        if rate is not None:
            self._carrier.pace(rate)
        if bye:
            self._waiting.drop()
        elif quiet >= self._deadlines.patience:
            refusal = self._transient_refusal or self._carrier.state().refusal
            self.lost(refusal or self._silence_error(self._deadlines.patience, self._trouble(ready)))
        elif quiet < self._deadlines.silence - self._tick if ready else away < _SHORT_SECONDS:
            self._waiting.off()
        else:
            self._waiting.on(self._trouble(ready), limit=self._deadlines.patience, since=self._received_at)

    def _check_peer(self, certificate: str, ready: bool) -> None:
        """End the connection to a worker whose certificate has expired, which may be renewed, and the link to one whose
        certificate was revoked.
        """
        try:
            if self._prover is not None:
                self._prover.check_live(certificate, self.there)
        except IdentityError as error:
            if ready:
                _LOG.warning("%s closes its connection to %s: %s", self.here, self.there, error.what)
                self._carrier.drop(error.what)
            if isinstance(error, ExpiredError):
                self._transient_refusal = error
            else:
                self.lost(error)

    def _trouble(self, ready: bool) -> str:
        state = self._carrier.state()
        if ready:
            return "no messages from it"
        if isinstance(self._transient_refusal, StaleWorkerError):
            return self._transient_refusal.what
        return state.trouble or ("it has not sent its greeting yet" if state.connected else "there is no connection")

    def _explain_timeout(self, awaited: str, seconds: float) -> NebulaError:
        """The error for a late item: the other worker is not connected, is silent, or has not sent it."""
        with self._changed:
            quiet, ready = self._now() - self._received_at, self._conversation.ready
        if self._met and ready and quiet < self._deadlines.silence:
            return unsent_item_error(self.here, self.there, awaited, seconds)
        return self._silence_error(quiet if self._met else seconds, self._trouble(ready))

    def _silence_error(self, seconds: float, why: str) -> NebulaError:
        """The error for a worker that has been silent for too long, or was never connected."""
        error = (silent_error if self._met else absent_error)(self.there, self._carrier.where, seconds, why)
        error.peer = self.there
        return error


def _wrap_unexpected(error: Exception) -> RemoteProtocolError:
    """Wrap an unexpected exception in the processing of received data, so that it is reported."""
    _LOG.error("cannot process received data, which is reported as an error of the other side", exc_info=error)
    return RemoteProtocolError("cannot process received data", why=f"{type(error).__name__}: {str(error)[:200]}")
