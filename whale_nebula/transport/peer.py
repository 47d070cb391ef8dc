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
    FaultPolicy,
    Link,
    absent_error,
    closed_by_error,
    closed_here_error,
    failed_error,
    lost_error,
    refuse_reserved,
    silent_error,
)  # fmt: skip
from whale_nebula.transport.deadlines import Announce, Deadlines, Meter, OwnAbsence, WaitAnnouncer, log_wait
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
    `waiters` and `own_absence` are shared by all links of a process. `arrive` is called if the absent workers in a
    peer's greeting differ from those in `greeting`; without it, such a peer ends the link.
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
        own_absence: OwnAbsence | None = None,
        arrive: Callable[[OtherWorkersError], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        here, there = greeting.worker, greeting.peer
        waiters = waiters or Waiters()
        inbox = Mailbox(
            here, there, fault=RemoteProtocolError, window=budget // 5, waiters=waiters, due=self._find_due_bytes
        )
        super().__init__(inbox)
        self._inbox.explain_timeout = self._explain_timeout
        self._inbox.on_room = self._wake_writer
        self._roster = Roster(workers)
        self._numbers = self._roster.find_number(here), self._roster.find_number(there)
        self._expect = expect
        self._budget = budget
        self._deadlines = deadlines or Deadlines()
        self._conversation = Conversation(
            *self._numbers, greeting, expect=self._find_bound, budget=budget, window=window,
            accepts_data=lambda: self._inbox.accepts_data, prover=prover, sealed=sealed,
        )  # fmt: skip
        self._outbox = Outbox(
            self._conversation, budget, heartbeat_interval=self._deadlines.heartbeat_interval, now=now,
            enter_wait=waiters.enter_wait,
        )  # fmt: skip
        self._changed = self._outbox.changed
        self._farewell = self._build_item({"kind": BYE})
        self._carrier = carrier
        self._now = now
        self._meter = Meter()
        self._prover = prover
        self._arrive, self._own_absence = arrive, own_absence or OwnAbsence()
        # why the last greeting was refused, if that is transient: a certificate is renewed, an old process ends
        self._transient_refusal: ExpiredError | StaleWorkerError | None = None
        self._stale_since: float | None = None  # since when a worker of an earlier epoch has this connection
        self._waiting = WaitAnnouncer(f"worker '{there}'", carrier.where, announce, now=now)
        self._received_at = self._disconnected_at = now()  # from the worker itself, authenticated
        self._check_seconds = min(self._deadlines.check_interval, self._deadlines.silence / 8)
        self._first_chunk_at: float | None = None  # when the first chunk of the current item was sent
        self._was_connected = self._bye_received = self._closed = False
        self._failed = self._fail_received = self._fail_answered = False
        self._is_distrusted = False  # received frames are no longer trusted
        self._faults = FaultPolicy()
        self._greeting_faults = FaultPolicy(_GREETINGS)  # in a row
        self._end_event = threading.Event()
        self._writer = threading.Thread(target=self._run_writer, name=f"nebula-write-{there}", daemon=True)
        self._watcher = threading.Thread(target=self._run_watcher, name=f"nebula-watch-{there}", daemon=True)
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
        header, data, raw = describe_payload(self._roster.build_header(key), array)
        item = OutgoingItem(header, data)
        self._queue_item(item)
        raw = raw if raw_bytes is None else raw_bytes
        self._count(LinkTotals(data.nbytes, item.size, raw, count_frames(data.nbytes)))

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a control message for the writer."""
        refuse_reserved(message)
        item = self._build_item(message)
        self._queue_item(item)
        self._count_message(item.payload.size)

    def begin_session(self, epoch: int) -> None:
        """Begin the session in this epoch: from now on, processes of other epochs are refused."""
        super().begin_session(epoch)
        with self._changed:
            self._conversation.begin_session(epoch)

    def fail(self, reason: Mapping[str, Any], *, last: bool = False) -> None:
        """Notify the other worker of a failure and its cause: ahead of the queue, which is dropped as the link ends, or
        after it, as the `last` message.
        """
        failpoint("failure.telling")
        cut = {name: value[:_LONGEST_REASON] if isinstance(value, str) else value for name, value in reason.items()}
        item = self._build_item({"kind": FAIL, "reason": cut, "last": last})
        with self._changed:
            if last and self._failed:
                return
            self._failed = True
            if not last:
                self._outbox.drop_queued()
            if self._outbox.queue_last(item) if last else self._outbox.queue_urgent(item):
                self._count_message(item.payload.size)

    def send_farewell(self) -> None:
        """Send a farewell without waiting. Of several links that end together, all send theirs before any is closed."""
        if self._inbox.close(lambda: closed_here_error(self.here, self.there)):
            failpoint("link.parting")
            self._queue_farewell()

    def close(self) -> None:
        """Flush the queue and a farewell, wait for its acknowledgement and the other side's farewell, and end."""
        self.send_farewell()
        if self._closed:
            return
        self._closed = True
        failpoint("link.draining", self._carrier.drop)
        self._drain()
        self._stop()
        for thread in (self._writer, self._watcher):
            thread.join(self._deadlines.grace)
        failpoint("link.closed")

    def _build_item(self, message: Mapping[str, Any]) -> OutgoingItem:
        payload = np.frombuffer(encode_message(message), np.uint8)
        return OutgoingItem(build_message_header(payload.size, *self._numbers), payload)

    def _queue_item(self, item: OutgoingItem) -> None:
        self._inbox.check_open()
        # an invalid item is raised here, in the caller's thread, not in the writer's
        pack_header(next(split_payload(item.header, item.payload))[0], 0)
        stall = self._deadlines.find_stall_timeout(self._outbox.queued_bytes, self._meter.rate)
        if not self._outbox.put(item, stall, self.there):
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
            sent, received, since = self._measure_progress(), self._conversation.expected_number, self._now()
            last_received = since  # when the other side last received something; what it sends does not extend the wait
            while not self._end_event.is_set():  # the writer ends after the last acknowledgement
                now = self._now()
                remaining = since + self._deadlines.grace - now
                stall = self._deadlines.find_stall_timeout(max(self._budget, self._undelivered_bytes), self._meter.rate)
                if remaining <= 0 and not self._is_worth_waiting():
                    return
                if now - last_received >= stall:
                    break
                self._changed.wait(min(max(remaining, 0.1), last_received + stall - now))
                if self._measure_progress() != sent:
                    sent, since = self._measure_progress(), self._now()
                    last_received = since
                if self._conversation.expected_number != received:
                    received, since = self._conversation.expected_number, self._now()
            else:
                return
        error = DeadlineError(
            f"worker '{self.there}' has received nothing for {round(stall, 1):g} s",
            where=self._carrier.where,
            why=f"'{self.here}' closes its link, and {self._undelivered_bytes} bytes were not acknowledged",
            mend=f"check what '{self.there}' is doing, or increase 'patience' in the config",
        )
        _LOG.warning("%s", error)
        self.lost(error)

    def _measure_progress(self) -> tuple[int, int]:
        return self._outbox.written_bytes, self._conversation.unacknowledged_bytes

    @property
    def _undelivered_bytes(self) -> int:
        """The bytes that are queued, or were sent and not acknowledged."""
        return self._outbox.queued_bytes + self._conversation.unacknowledged_bytes

    def _is_worth_waiting(self) -> bool:
        """Whether more than a farewell is unacknowledged and the other worker still needs it, so that waiting is
        worthwhile.
        """
        ending = self._failed or self._fail_received or self._bye_received
        return self._was_connected and not ending and self._undelivered_bytes > self._farewell.size + _SEAL_BYTES

    @property
    def _is_over(self) -> bool:
        """Whether nothing more has to be sent: both sides have ended, and all frames have arrived or are not needed."""
        if self._is_distrusted:
            return self._conversation.ready and not self._outbox.has_urgent
        if self._fail_received:
            return self._outbox.is_finishing and (self._fail_answered or not self._conversation.ready)
        is_ended = self._bye_received or self._failed
        return is_ended and self._outbox.is_drained and self._conversation.unacknowledged_bytes == 0

    def _stop(self) -> None:
        self._outbox.stop()
        self._end_event.set()
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake the writer after a change that may require a frame."""
        with self._changed:
            self._changed.notify_all()

    # Called by the sending thread.

    def _run_writer(self) -> None:
        try:
            while (next_frame := self._take_next()) is not None:
                self._send_frame(*next_frame)
        except Exception as error:  # after any error, no caller may wait for what will not be sent
            _LOG.error("the link from %s to %s failed on this side: %s", self.here, self.there, error)
            why = f"the sender of this side has failed: {error!r}"
            self.lost(error if isinstance(error, NebulaError) else lost_error(self.there, why))
        finally:
            self._stop()
            self._carrier.close()

    def _take_next(self) -> tuple[int, OutgoingFrame] | None:
        """The next frame and its connection; None after the last one."""
        with self._changed:
            while not self._end_event.is_set() and not (self._fail_received and self._is_over):
                try:
                    outgoing = self._outbox.take_next()
                except LocalProtocolError as error:
                    if self._failed:
                        raise
                    self._end_link(error, {"what": error.what, "why": error.why})
                    continue
                if outgoing is not None and self._outbox.connection is not None:
                    self._meter.start(self._now())
                    self._fail_answered |= self._fail_received
                    return self._outbox.connection, outgoing
                if self._is_over:
                    return None
                self._changed.wait(self._outbox.find_heartbeat_delay())
            return None

    def _end_link(self, error: NebulaError, reason: Mapping[str, Any]) -> None:
        """End the link for this reason, and report it to both sides."""
        self._inbox.end(lambda: error.with_traceback(None), at_once=True)
        self.fail(reason)
        self._outbox.finish()

    def _send_frame(self, connection: int, outgoing: OutgoingFrame) -> None:
        started = self._now()
        item, is_first_and_last = outgoing.item, (self._first_chunk_at is None, outgoing.last)
        tensor = item is not None and item.header.kind != Kind.CONTROL
        if tensor:
            chunk_failpoint("before", *is_first_and_last, self._carrier.drop)
        if not self._carrier.send(connection, *outgoing.packet):  # it will be retransmitted
            with self._changed:
                self._outbox.mark_broken(connection)
        if item is None:
            return
        self._outbox.release_budget(outgoing.share)
        if not tensor:
            return
        chunk_failpoint("after", *is_first_and_last, self._carrier.drop)
        began = started if self._first_chunk_at is None else self._first_chunk_at
        self._first_chunk_at = None if outgoing.last else began
        if outgoing.last and self.on_sent is not None:
            self.on_sent(self._roster.read_key(item.header), item.size, began, self._now())

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
            self._stale_since = None
            self._conversation.disconnect()
            self._outbox.disconnect()
            self._meter.stop()
            self._disconnected_at = self._now()
            self._changed.notify_all()

    def lost(self, error: NebulaError) -> None:
        """End the link with this error: the carrier has given up, or this side has."""
        with self._changed:
            if not self._bye_received:
                error.peer = error.peer or self.there
                self._inbox.end(lambda: error.with_traceback(None))
        self._waiting.abandon()
        self._stop()

    def message(self, data: bytes) -> None:
        """Process one received frame."""
        with self._changed:
            greeted = self._conversation.ready
            if self._conversation.error is not None or (self._is_distrusted and greeted):
                return  # the error was reported: this connection is about to end
            opened, beyond_tensors, error = self._process_frame(data)
            if greeted or opened:  # frames count only after the greeting
                self._received_at = self._now()
            if beyond_tensors or error is not None or self._conversation.has_due_acknowledgement:
                self._changed.notify_all()  # the writer has something to do
        if opened:
            self._carrier.opened()
        if error is not None:
            self._handle_fault(error, greeted)

    def _process_frame(self, data: bytes) -> tuple[bool, bool, NebulaError | None]:
        """Process a frame; returns whether the conversation is now open, whether there was more than tensors, and the
        error.
        """
        opened = beyond_tensors = False
        try:
            for event in self._conversation.receive(data):
                opened |= isinstance(event, Opened)
                beyond_tensors |= not isinstance(event, TensorArrived)
                if isinstance(event, TensorArrived | MessageArrived):
                    if not self._deliver(event):
                        return opened, True, None
                elif isinstance(event, Answer):
                    self._outbox.answer(event.packets)
                elif isinstance(event, Acknowledged):
                    has_more = self._conversation.unacknowledged_bytes > 0
                    self._meter.count_arrived(event.bytes, self._now(), more=has_more)
                else:
                    self._resume(event)
        except NebulaError as error:
            return opened, True, error
        except Exception as error:
            return opened, True, _wrap_unexpected(error)
        return opened, beyond_tensors, self._conversation.error

    def _resume(self, event: Opened) -> None:
        self._was_connected, self._transient_refusal, self._greeting_faults = True, None, FaultPolicy(_GREETINGS)
        failpoint("connection.opened", self._carrier.drop)
        if event.resend:
            failpoint("frames.again", self._carrier.drop)
        self._outbox.queue_resent(event.resend)
        if event.resumed:
            _LOG.info("%s and %s resume: %d frames are retransmitted", self.here, self.there, len(event.resend))

    def _deliver(self, event: TensorArrived | MessageArrived) -> bool:
        """Deliver complete messages to the mailbox. A fault in one ends the link, since its frame was acknowledged and
        is not retransmitted.
        """
        message = isinstance(event, MessageArrived)
        failpoint("message.received" if message else "tensor.received", self._carrier.drop)
        try:
            if isinstance(event, MessageArrived):
                check_message(event.message)
                self._deliver_message(event.message, event.header.whole)
            else:
                self._inbox.put(self._roster.read_key(event.header), read_payload(event))
        except NebulaError as error:
            self._distrust_peer(error)
            return False
        except Exception as error:
            self._distrust_peer(_wrap_unexpected(error))
            return False
        return True

    def _deliver_message(self, message: dict[str, Any], size: int) -> None:
        if message["kind"] == BYE:
            self._inbox.end(partial(closed_by_error, self.there))
            self._queue_farewell()
            self._bye_received = True
        elif message["kind"] == FAIL:
            last = message.get("last", False)
            self._inbox.end(partial(failed_error, self.there, message.get("reason")), at_once=not last, takes=last)
            self._fail_received = True
            if not last:
                self._outbox.drop_queued()  # the peer has ended: wake senders that wait for room
        else:
            self._inbox.put_message(message, size=size)

    def _find_bound(self, header: Header) -> Bound | None:
        """The plan's limit of the size of an incoming tensor, checked before memory is allocated."""
        if self._expect is None:
            return None
        key = self._roster.read_key(header)
        bound = self._expect(key)
        if bound is None:
            raise RemoteProtocolError(f"{key} was received, but is not in the plan")
        return bound

    def _find_due_bytes(self, key: Key) -> float:
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
        is_silent = self._now() - self._received_at >= self._deadlines.silence
        if is_silent and isinstance(error, StaleWorkerError) and error.fresh:  # its launcher died, too
            what = f"worker '{self.there}' was restarted by a new launcher"
            error = PeerRestartedError(what, why=error.what)
        if isinstance(error, OtherWorkersError):
            (self._arrive or self.lost)(error)
            self._carrier.drop(error.what)
            return
        if isinstance(error, StaleWorkerError):  # it ends once it has received our epoch
            with self._changed:
                self._transient_refusal, self._stale_since = error, self._now()
            if error.absent:
                self._own_absence.reported_at = self._now()
            return
        has_restarted = isinstance(error, PeerRestartedError | EpochOverError)
        is_recoverable = isinstance(error, RemoteProtocolError) and not has_restarted
        faults = self._faults if greeted else self._greeting_faults
        is_final = not is_recoverable or faults.should_give_up(error, self._conversation.expected_number)
        if is_final:
            self._distrust_peer(error)
        if is_final and not (greeted and is_recoverable):
            self._stop()
            return
        self._carrier.drop(error.what)

    def _distrust_peer(self, error: NebulaError) -> None:
        """Stop trusting the peer: report it to both sides, as far as they can be reached."""
        with self._changed:
            if self._is_distrusted:
                return
            self._is_distrusted = True
            error.where = error.where or f"from worker '{self.there}'"
            self._end_link(error, {"what": f"invalid data from '{self.there}'", "why": error.what})
            self._changed.notify_all()

    # Called by the watcher thread.

    def _run_watcher(self) -> None:
        while not self._end_event.wait(self._check_seconds):
            try:
                self._check_liveness()
            except Exception:  # a transient lack of memory or files must not end the supervision
                _LOG.exception("%s cannot supervise its link to %s", self.here, self.there)

    def _check_liveness(self) -> None:
        """Check that frames arrive from the other worker, and that the wait for it is within the patience."""
        with self._changed:
            silent_seconds, ready, bye = self._now() - self._received_at, self._conversation.ready, self._bye_received
            rate, disconnected_seconds = self._meter.rate, self._now() - self._disconnected_at
            certificate = self._conversation.peer_certificate
            stale = self._stale_since is not None and self._now() - self._stale_since >= _SHORT_SECONDS
        if stale and self._transient_refusal is not None:
            self._carrier.drop(self._transient_refusal.what)
        if certificate is not None and not bye:
            self._check_certificate(certificate, ready)
        if rate is not None:
            self._carrier.pace(rate)
        absent_seconds = self._now() - self._own_absence.reported_at
        absent = not ready and self.epoch is None and absent_seconds < self._deadlines.patience
        if bye:
            self._waiting.abandon()
        elif silent_seconds >= self._deadlines.patience and not absent:
            refusal = self._transient_refusal or self._carrier.state().refusal
            self.lost(refusal or self._silence_error(self._deadlines.patience, self._describe_trouble(ready)))
        elif (
            silent_seconds < self._deadlines.silence - self._check_seconds
            if ready
            else disconnected_seconds < _SHORT_SECONDS and not absent
        ):
            self._waiting.finish()
        else:
            limit = None if absent else self._deadlines.patience
            self._waiting.announce(self._describe_trouble(ready), limit=limit, since=self._received_at)

    def _check_certificate(self, certificate: str, ready: bool) -> None:
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

    def _describe_trouble(self, ready: bool) -> str:
        state = self._carrier.state()
        if ready:
            return "no messages from it"
        if isinstance(self._transient_refusal, StaleWorkerError):
            return self._transient_refusal.what
        return state.trouble or ("it has not sent its greeting yet" if state.connected else "there is no connection")

    def _explain_timeout(self, awaited: str, seconds: float) -> NebulaError:
        """The error for a late item: the other worker is not connected, is silent, or has not sent it."""
        with self._changed:
            silent_seconds, ready = self._now() - self._received_at, self._conversation.ready
        if self._was_connected and ready and silent_seconds < self._deadlines.silence:
            return unsent_item_error(self.here, self.there, awaited, seconds)
        return self._silence_error(silent_seconds if self._was_connected else seconds, self._describe_trouble(ready))

    def _silence_error(self, seconds: float, why: str) -> NebulaError:
        """The error for a worker that has been silent for too long, or was never connected."""
        error = (silent_error if self._was_connected else absent_error)(self.there, self._carrier, seconds, why)
        error.peer = self.there
        return error


def _wrap_unexpected(error: Exception) -> RemoteProtocolError:
    """Wrap an unexpected exception in the processing of received data, so that it is reported."""
    _LOG.error("cannot process received data, which is reported as an error of the other side", exc_info=error)
    return RemoteProtocolError("cannot process received data", why=f"{type(error).__name__}: {str(error)[:200]}")
