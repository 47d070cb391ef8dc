"""The mailbox of one peer: stores received messages and tensors until they are requested."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from whale_nebula.errors import DeadlineError, LocalProtocolError, NebulaError, WireError
from whale_nebula.transport.deadlines import Clock, MonotonicClock
from whale_nebula.transport.protocol import Key, Payload
from whale_nebula.wire.buffers import count_held_bytes
from whale_nebula.wire.message import MAX_UNREAD_MESSAGES

T = TypeVar("T")

_STEPLESS_KINDS = ("control", "round")  # kinds of tensors that belong to no step
_MESSAGE_FACTOR = 32  # the most bytes of objects that a byte of JSON may become
_MAX_MESSAGE_MEMORY = 32 << 20  # bytes of objects of unread messages, by that factor
_MAX_ROUNDS = 8  # tensors of local SGD that may arrive beyond the window
_OVERRUN_BYTES = 12 << 20  # may still arrive beyond the window after the sender is stopped


class _Item(NamedTuple, Generic[T]):
    """An item in transit, the time from which it counts as arrived, and its share of the window."""

    due: float
    value: T
    cost: int = 0


class _End(NamedTuple):
    """The reason why no more messages will arrive. `at_once`: unread messages are discarded, too. `takes`: messages may
    still be sent to the other side.
    """

    due: float
    error: Callable[[], NebulaError]
    at_once: bool
    takes: bool = False


def unsent_item_error(here: str, there: str, awaited: str, seconds: float) -> NebulaError:
    """The error for a message that a live worker has not sent in time."""
    return DeadlineError(
        f"worker '{here}' waited {seconds:g} s for worker '{there}'",
        where=awaited,
        why=f"'{there}' is connected and alive, but has not sent this",
        mend=f"check what '{there}' is doing, or increase 'patience' in the config",
    )


class Waiters:
    """The threads of a process that wait at its links, to receive or for room to send.

    While a process waits, it blocks no sender at any of its links, so processes cannot wait for each other in a cycle.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Register a callback that is called when a first thread begins to wait."""
        self._callbacks.append(callback)

    @contextlib.contextmanager
    def enter_wait(self) -> Iterator[None]:
        """Context of a wait; no lock of a link may be held."""
        with self._lock:
            self.count += 1
            first = self.count == 1
        try:
            for callback in self._callbacks if first else ():
                callback()
            yield
        finally:
            with self._lock:
                self.count -= 1


class Mailbox:
    """Received tensors by key and messages by kind, from one worker, in whatever order they are requested.

    Every key arrives once, and none arrives late: a second copy, or a tensor of a step before the newest one that was
    taken (of the same program), is a protocol error of the class `fault`, unless a thread waits for it.

    `explain_timeout` creates the error of a wait that timed out, from the awaited item and the time; a link with more
    information about its peer sets its own. It is called without the lock.

    A `window` (bytes) applies back-pressure: `accepts_data` is false while more unrequested bytes than that are stored,
    unless one of `waiters` waits. Then only bytes beyond those that are `due` count: the bytes of a tensor that the
    plan and the rows of the step account for, 0 before this process has begun the step. A sender sends all of a step
    before anything of the next, so no receiver waits for data that is held back. `on_room` is called, without the lock,
    when `accepts_data` becomes true. Data that exceeds the window by more than any correct sender would send is
    refused.
    """

    def __init__(
        self,
        here: str,
        there: str,
        *,
        fault: type[WireError] = LocalProtocolError,
        clock: Clock | None = None,
        window: int | None = None,
        waiters: Waiters | None = None,
        due: Callable[[Key], float] = lambda key: math.inf,
    ) -> None:
        self.window = window
        self.unrequested_bytes = 0
        self.on_room: Callable[[], None] = lambda: None
        self._waiters = waiters or Waiters()
        self._waiters.add_callback(lambda: self.on_room() if self._is_full else None)
        self._due_bytes = due
        self._early_bytes: dict[Key, int] = {}  # bytes beyond what is due, or that arrived before their step began
        self._stepless_bytes = 0  # bytes of tensors of no step that arrived while the window was full
        self.here = here
        self.there = there
        self._fault = fault
        self._clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._tensors: dict[Key, _Item[Payload]] = {}
        self._messages: defaultdict[str, deque[_Item[dict[str, Any]]]] = defaultdict(deque)
        self._newest_steps: dict[int, int] = {}  # program -> newest step of which a tensor was taken
        self._taken_keys: defaultdict[int, set[Key]] = defaultdict(set)  # program -> keys taken since that step began
        self._awaited_keys: set[Key] = set()
        self._announced_keys: set[Key] = set()
        self._end: _End | None = None
        self._closed = False
        self.explain_timeout: Callable[[str, float], NebulaError] = partial(unsent_item_error, here, there)

    @property
    def accepts_data(self) -> bool:
        """Whether more may be received: there is room, or a thread waits. May be read without the lock."""
        if not self._is_full or self._closed or self._end is not None:
            return True
        return self._waiters.count > 0 and (not self._early_bytes or self._has_room_for_early())

    def _has_room_for_early(self) -> bool:
        with self._changed:
            beyond = sum(max(size - self._due_bytes(key), 0) for key, size in self._early_bytes.items())
            return self.window is None or beyond <= self.window

    @property
    def _is_full(self) -> bool:
        return self.window is not None and self.unrequested_bytes > self.window

    def put(self, key: Key, value: Payload, due: float = 0.0) -> None:
        """Store a received tensor, which counts as arrived at the time `due`."""
        with self._changed:
            failed = self._end is not None and self._end.at_once
            if self.window is not None and (self._closed or (failed and key not in self._announced_keys)):
                return  # it would never be read
            if key in self._tensors or key in self._taken_keys[key.program]:
                raise self._fault(f"{key} was received twice", why="every tensor is sent once")
            newest = self._newest_steps.get(key.program, key.step)
            if key.step < newest and key not in self._awaited_keys:
                raise self._fault(
                    f"{key} is late", why=f"'{self.here}' is at step {newest}, and no thread waits for it"
                )
            cost = 0
            if self.window is not None and key not in self._awaited_keys:
                cost = count_held_bytes(value.nbytes)
                self._count_unrequested(key, cost, self.window)
                if value.nbytes > self._due_bytes(key):
                    self._early_bytes[key] = cost
            self._tensors[key] = _Item(due, value, cost)
            self._changed.notify_all()

    def put_message(self, message: dict[str, Any], due: float = 0.0, *, size: int = 0) -> None:
        """Store a received control message; with a window, its `size` in bytes of JSON counts."""
        with self._changed:
            if self._closed:
                return
            queue = self._messages[message["kind"]]
            if len(queue) >= MAX_UNREAD_MESSAGES:
                raise self._fault(
                    f"more than {MAX_UNREAD_MESSAGES} unread messages {message['kind']}",
                    why="each message is answered or sent once: no worker sends so many without an answer",
                )
            cost = 0 if self.window is None else count_held_bytes(size * _MESSAGE_FACTOR)
            unread = sum(item.cost for items in self._messages.values() for item in items)
            if unread > _MAX_MESSAGE_MEMORY:
                raise self._fault(
                    f"received a message of {size} bytes while {unread // _MESSAGE_FACTOR} bytes of messages are unread"
                )
            self.unrequested_bytes += cost
            queue.append(_Item(due, message, cost))
            self._changed.notify_all()

    def end(
        self, error: Callable[[], NebulaError], *, due: float = 0.0, at_once: bool = False, takes: bool = False
    ) -> None:
        """No more messages will arrive: current and later waits raise this error, and so do later sends, unless the
        other side `takes` them. The first end is kept, but a failure (`at_once`) replaces a graceful close.
        """
        with self._changed:
            if self._end is None or (at_once and not self._end.at_once):
                self._end = _End(due, error, at_once, takes)
            self._changed.notify_all()

    def close(self, error: Callable[[], NebulaError]) -> bool:
        """Close the mailbox: nothing is delivered any more. False if it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            if self._end is None or not self._end.at_once or self._end.due > self._clock.now():
                self._end = _End(0.0, error, at_once=True)
            self._changed.notify_all()
            return True

    def check_open(self) -> None:
        """Raise the error of the end, if there is one, before a send."""
        with self._changed:
            if self._end is None or not self._end.takes:
                self._raise_end(self._clock.now())

    def take(self, key: Key, deadline: float) -> Payload:
        """Wait up to `deadline` seconds for the tensor with this key."""
        with self._changed:
            if key in self._taken_keys[key.program]:
                raise LocalProtocolError(f"{key} was already received", why="every tensor is received once")
            self._awaited_keys.add(key)
        find = partial(self._tensors.get, key)
        with self._enter_request(find, deadline), self._changed:
            try:
                arrived = self._wait(find, deadline, announced=key in self._announced_keys)
            finally:
                self._awaited_keys.discard(key)
                self._announced_keys.discard(key)
            if arrived:
                if key.step > self._newest_steps.get(key.program, -1):
                    self._begin_step(key.program, key.step)
                self._taken_keys[key.program].add(key)
                item = self._tensors.pop(key)
                self._release(key, item.cost)
                return item.value
        raise self.explain_timeout(str(key), deadline)

    def take_message(self, kind: str, deadline: float, waited: float = 0.0) -> dict[str, Any]:
        """Wait up to `deadline` seconds for the next message of this kind; an error adds those `waited` before."""
        with self._changed:
            queue = self._messages[kind]
        with self._enter_request(lambda: queue[0] if queue else None, deadline), self._changed:
            if self._wait(lambda: queue[0] if queue else None, deadline):
                item = queue.popleft()
                self.unrequested_bytes -= item.cost
                return item.value
        raise self.explain_timeout(f"message {kind} from {self.there}", waited + deadline)

    def announce_receive(self, key: Key) -> None:
        """Announce a wait for this tensor: it may arrive after later steps have begun, and once it has arrived it is
        delivered even after a failure. It does not count against the window.
        """
        full = self._is_full
        with self._changed:
            self._awaited_keys.add(key)
            self._announced_keys.add(key)
            item = self._tensors.get(key)
            if item is not None and item.cost:
                self._release(key, item.cost)
                self._tensors[key] = item._replace(cost=0)
        if full and not self._is_full:
            self.on_room()

    @contextlib.contextmanager
    def _enter_request(self, find: Callable[[], _Item[Any] | None], deadline: float) -> Iterator[None]:
        """Context of a wait and of taking the item: until it arrives, this process counts as waiting, so that it can
        arrive; `on_room` is called if taking it made room.
        """
        with self._changed:
            waits = deadline > 0 and find() is None
        full = self._is_full
        with self._waiters.enter_wait() if waits else contextlib.nullcontext():
            yield
        if full and not self._is_full:
            self.on_room()

    def _begin_step(self, program: int, step: int) -> None:
        """Note that a step's first tensor is taken. With a window, drop unrequested tensors of earlier steps."""
        self._newest_steps[program] = step
        self._taken_keys[program].clear()
        if self.window is None:
            return
        past = [
            key
            for key in self._tensors
            if key.program == program and key.step < step and key.kind not in _STEPLESS_KINDS
        ]
        for key in past:
            if key not in self._awaited_keys:
                self._release(key, self._tensors.pop(key).cost)

    def _count_unrequested(self, key: Key, cost: int, window: int) -> None:
        """Count a tensor that was not requested yet, and refuse more than a sender that follows the plan would send. Of
        kinds that belong to no step, such a sender sends only a few beyond the window: those that precede one for which
        a thread waits.
        """
        if key.kind in _STEPLESS_KINDS:
            most = window + _OVERRUN_BYTES + (_MAX_ROUNDS * cost if key.kind == "round" else 0)
            if self.unrequested_bytes > window and self._stepless_bytes > most:
                raise self._fault(
                    f"{key} was received, and {self._stepless_bytes} bytes are stored here that were not requested"
                )
            self._stepless_bytes += cost if self.unrequested_bytes > window else 0
        self.unrequested_bytes += cost

    def _release(self, key: Key, cost: int) -> None:
        """Subtract a tensor from the count: it was requested."""
        self._early_bytes.pop(key, None)
        self.unrequested_bytes -= cost
        if self.window is not None and self.unrequested_bytes <= self.window:
            self._stepless_bytes = 0

    def _wait(self, find: Callable[[], _Item[Any] | None], deadline: float, *, announced: bool = False) -> bool:
        """Wait for an item; returns whether it arrived in time."""
        start = self._clock.now()
        limit = start + deadline
        while True:
            now = self._clock.now()
            item = find()
            if self._end and self._end.at_once and not (announced and item is not None and item.due <= now):
                self._raise_end(now)
            if item is not None and item.due <= now:
                return True
            if item is None:
                self._raise_end(now)
            if now >= limit:
                return False
            ends = self._end.due if self._end and self._end.due > now else limit
            self._clock.wait(self._changed, min(limit, ends, item.due if item else limit) - now)

    def _raise_end(self, now: float) -> None:
        if self._end is not None and self._end.due <= now:
            raise self._end.error()
