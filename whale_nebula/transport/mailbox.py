"""Where one worker keeps what has arrived from one other worker until it is asked for."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from whale_nebula.errors import DeadlineError, LocalProtocolError, NebulaError, WireError
from whale_nebula.transport.clock import Clock, MonotonicClock
from whale_nebula.transport.protocol import Key, Payload
from whale_nebula.wire.message import MOST_WAITING

T = TypeVar("T")


class _Item(NamedTuple, Generic[T]):
    """Something that is on its way, and from when on it counts as arrived."""

    due: float
    value: T


class _End(NamedTuple):
    """Why nothing more will come. `at_once`: even what has arrived is no longer given out."""

    due: float
    error: Callable[[], NebulaError]
    at_once: bool


def unsent(here: str, there: str, awaited: str, seconds: float) -> NebulaError:
    """The other worker is there, and what was awaited has not come."""
    return DeadlineError(
        f"worker '{here}' waited {seconds:g} s for worker '{there}'",
        where=awaited,
        why=f"'{there}' is alive as far as this link can tell, but it has not sent this",
        mend=f"look at what '{there}' is doing, or allow more time: 'patience' in the config",
    )


class Mailbox:
    """Tensors by key and messages by kind, from one worker to another, in whatever order they are asked for.

    Every key comes once, and none comes late: a second copy, or a tensor of a step before the newest one
    that was taken (of the same program), is a protocol error of the class `fault`, unless somebody waits
    for it.

    `late` makes the error of a wait that took too long, from what was awaited and for how long; a link that can tell
    more of the worker at its other end sets its own. It is called without the lock.
    """

    def __init__(
        self,
        here: str,
        there: str,
        *,
        fault: type[WireError] = LocalProtocolError,
        clock: Clock | None = None,
    ) -> None:
        self.here = here
        self.there = there
        self._fault = fault
        self._clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        self._tensors: dict[Key, _Item[Payload]] = {}
        self._messages: defaultdict[str, deque[_Item[dict[str, Any]]]] = defaultdict(deque)
        self._newest: dict[int, int] = {}  # program -> newest step of which something was taken
        self._taken: defaultdict[int, set[Key]] = defaultdict(
            set
        )  # program -> keys taken since that step began
        self._awaited: set[Key] = set()
        self._promised: set[Key] = set()
        self._end: _End | None = None
        self._closed = False
        self.late: Callable[[str, float], NebulaError] = self._late

    def put(self, key: Key, value: Payload, due: float = 0.0) -> None:
        """A tensor arrives (at the time `due`, if that is still to come)."""
        with self._changed:
            self._refuse_unexpected(key)
            self._tensors[key] = _Item(due, value)
            self._changed.notify_all()

    def put_message(self, message: dict[str, Any], due: float = 0.0) -> None:
        """A control message arrives."""
        with self._changed:
            waiting = self._messages[message["kind"]]
            if len(waiting) >= MOST_WAITING:
                raise self._fault(
                    f"{MOST_WAITING} messages {message['kind']} wait to be taken",
                    why="each is answered, or said once: no worker sends so many without an answer",
                )
            waiting.append(_Item(due, message))
            self._changed.notify_all()

    def end(self, error: Callable[[], NebulaError], *, due: float = 0.0, at_once: bool = False) -> None:
        """Nothing more will come: whoever waits, now or later, gets this error. The first end stays, but a
        failure (`at_once`) replaces a mere close.
        """
        with self._changed:
            if self._end is None or (at_once and not self._end.at_once):
                self._end = _End(due, error, at_once)
            self._changed.notify_all()

    def close(self, error: Callable[[], NebulaError]) -> bool:
        """The owner leaves: nothing is given out any more. False if it had left before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            if self._end is None or not self._end.at_once or self._end.due > self._clock.now():
                self._end = _End(0.0, error, at_once=True)
            self._changed.notify_all()
            return True

    def check_open(self) -> None:
        """Raise the end's error if there is one by now: for who is about to send."""
        with self._changed:
            self._raise_end(self._clock.now())

    def take(self, key: Key, deadline: float) -> Payload:
        """Wait up to `deadline` seconds for the tensor with this key."""
        with self._changed:
            if key in self._taken[key.program]:
                raise LocalProtocolError(f"{key} was received already", why="every tensor is received once")
            self._awaited.add(key)
            try:
                came = self._wait(lambda: self._tensors.get(key), deadline, promised=key in self._promised)
            finally:
                self._awaited.discard(key)
                self._promised.discard(key)
            if came:
                self._remember(key)
                return self._tensors.pop(key).value
        raise self.late(str(key), deadline)

    def take_message(self, kind: str, deadline: float) -> dict[str, Any]:
        """Wait up to `deadline` seconds for the next message of this kind."""
        with self._changed:
            queue = self._messages[kind]
            if self._wait(lambda: queue[0] if queue else None, deadline):
                return queue.popleft().value
        raise self.late(f"message {kind} from {self.there}", deadline)

    def later(self, key: Key) -> None:
        """Somebody is going to wait for this tensor: it may come though steps after it have begun, and once it has come
        it is given out, though a failure came after it.
        """
        with self._changed:
            self._awaited.add(key)
            self._promised.add(key)

    def _wait(self, find: Callable[[], _Item[Any] | None], deadline: float, *, promised: bool = False) -> bool:
        """Whether it came in time."""
        start = self._clock.now()
        limit = start + deadline
        while True:
            now = self._clock.now()
            item = find()
            if self._end and self._end.at_once and not (promised and item is not None and item.due <= now):
                self._raise_end(now)
            if item is not None and item.due <= now:
                return True
            if item is None:
                self._raise_end(now)
            if now >= limit:
                return False
            times = [
                limit,
                item.due if item else limit,
                self._end.due if self._end and self._end.due > now else limit,
            ]
            self._clock.wait(self._changed, min(times) - now)

    def _raise_end(self, now: float) -> None:
        if self._end is not None and self._end.due <= now:
            raise self._end.error()

    def _late(self, awaited: str, deadline: float) -> NebulaError:
        return unsent(self.here, self.there, awaited, deadline)

    def _refuse_unexpected(self, key: Key) -> None:
        if key in self._tensors or key in self._taken[key.program]:
            raise self._fault(f"{key} came twice", why="every tensor is sent once")
        newest = self._newest.get(key.program, key.step)
        if key.step < newest and key not in self._awaited:
            raise self._fault(
                f"{key} came late", why=f"'{self.here}' is at step {newest} and nobody waits for it"
            )

    def _remember(self, key: Key) -> None:
        if key.step > self._newest.get(key.program, -1):
            self._newest[key.program] = key.step
            self._taken[key.program].clear()
        self._taken[key.program].add(key)
