"""Threads that take turns by a seed, on a clock that nobody waits for.

Code that is written for threads runs as it is: while `Turns.instead_of_threads` is open, the modules that it is given
get the locks, conditions, events and threads of this module, of which one alone runs at a time. Who runs next is drawn;
when all wait, the clock moves on to the first that waits no longer. So a run of minutes takes milliseconds, and the
same seed gives the same run.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

YIELDS = 0.15  # how often who takes a free lock lets another go first
_INSTANT = 0.001


class Over(BaseException):
    """The run has ended: what still waits is unwound."""


class Gone(BaseException):
    """The worker whose code this is has been killed, in a thread that is not its own."""


class Turn:
    """A thread of a run: whose it is, and what it waits for."""

    def __init__(self, name: str, worker: str) -> None:
        self.name = name
        self.worker = worker
        self.acting = worker  # whose code it runs at present
        self.held: list[Lock] = []
        self.until: float | None = None
        self.waits = 0  # how often it has waited
        self.blocked = False
        self.done = False
        self.ident = 0
        self.baton = _thread.allocate_lock()
        self.baton.acquire()


class Turns:
    """The threads of one run. `limit` is when it counts as hanging, in seconds of its own clock."""

    def __init__(self, draw: random.Random, *, limit: float) -> None:
        self.time = 0.0
        self.over = False
        self.hangs = False
        self.current: Turn | None = None
        self.broken: list[tuple[str, BaseException]] = []  # what threads ended by, unexpectedly
        self._draw = draw
        self._limit = limit
        self._ready: list[Turn] = []
        self._timers: list[tuple[float, int, int, Turn]] = []
        self._count = 0
        self._all: list[Turn] = []
        self._gone: set[str] = set()
        self._frozen: dict[str, float] = {}
        self._awaited: set[Turn] = set()
        self._home = _thread.allocate_lock()
        self._home.acquire()

    def now(self) -> float:
        """Seconds since the run began."""
        return self.time

    # For who makes a run.

    def spawn(self, work: Callable[[], None], name: str, worker: str = "", *, awaited: bool = False) -> Turn:
        """A thread of a worker (or of none); the run is over when all that are awaited have ended."""
        turn = Turn(name, worker)
        self._all.append(turn)
        if awaited:
            self._awaited.add(turn)
        self._ready.append(turn)
        _thread.start_new_thread(self._run, (turn, work))
        return turn

    def run(self) -> None:
        """Let all go until it is over; nothing of it is left."""
        self._next(None)
        self._home.acquire()

    def kill(self, worker: str) -> None:
        """A worker is no more: its threads stop where they are, and hold nothing."""
        self._gone.add(worker)
        for turn in self._all:
            if turn.worker == worker:
                self._awaited.discard(turn)
                for lock in list(turn.held):
                    lock.drop()
        if not self._awaited:
            self.over = True

    def revive(self, worker: str) -> None:
        """Threads of this name may run again; those that were killed do not."""
        for turn in self._all:
            if turn.worker == worker:
                turn.worker = f"{worker} (gone)"
        self._gone = (self._gone - {worker}) | {f"{worker} (gone)"}

    def freeze(self, worker: str, seconds: float) -> None:
        """A worker stands still for so long."""
        self._frozen[worker] = self.time + seconds

    def stands(self, worker: str) -> float:
        """For how long a worker still stands still."""
        return max(0.0, self._frozen.get(worker, 0.0) - self.time)

    def lives(self, worker: str) -> bool:
        """Whether it was not killed."""
        return worker not in self._gone

    @contextlib.contextmanager
    def instead_of_threads(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """Give these modules our threads and our clock, as long as this is open."""
        threads = SimpleNamespace(
            Condition=lambda lock=None: Condition(self, lock),
            Event=lambda: Event(self),
            Lock=lambda: Lock(self),
            RLock=lambda: Lock(self),
            Thread=lambda **options: Thread(self, **options),
        )
        clock = SimpleNamespace(monotonic=self.now, sleep=self.sleep)
        before = [(module, name, vars(module)[name]) for module in modules for name in _SWAPPED if name in vars(module)]
        try:
            for module, name, _ in before:
                setattr(module, name, threads if name == "threading" else clock)
            yield
        finally:
            for module, name, real in before:
                setattr(module, name, real)

    # For the threads of the run.

    @property
    def me(self) -> Turn:
        """The thread that runs."""
        if self.current is None:
            raise Over
        return self.current

    def mine(self) -> bool:
        """Whether the caller is the thread that runs, and none of another run or of none."""
        return self.current is not None and self.current.ident == _thread.get_ident()

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        self.block(self.time + max(seconds, _INSTANT))

    def block(self, until: float | None = None) -> None:
        """Wait to be woken, or for a time."""
        if self.over:
            raise Over
        me = self.me
        me.blocked, me.waits, me.until = True, me.waits + 1, until
        if until is not None:
            self._at(until, me)
        self._next(me)

    def wake(self, turn: Turn) -> None:
        """Let one that waits go on."""
        if turn.blocked:
            turn.blocked, turn.until = False, None
            self._ready.append(turn)

    def perhaps_yield(self) -> None:
        """Let another go first, or not."""
        if self._ready and self._draw.random() < YIELDS:
            me = self.me
            self._ready.append(me)
            self._next(me)

    def _at(self, until: float, turn: Turn) -> None:
        self._count += 1
        heapq.heappush(self._timers, (until, self._count, turn.waits, turn))

    def _run(self, turn: Turn, work: Callable[[], None]) -> None:
        turn.ident = _thread.get_ident()
        turn.baton.acquire()
        try:
            if not self.over:
                work()
        except (Over, Gone):
            pass
        except BaseException as error:
            self.broken.append((turn.name, error))
        turn.done = True
        for lock in list(turn.held):
            lock.drop()
        self._awaited.discard(turn)
        self.over = self.over or not self._awaited
        self._next(None)

    def _next(self, me: Turn | None) -> None:
        """Hand over to who is next; comes back when it is this one's turn again."""
        chosen = self._unwound() if self.over else self._choose_turn()
        if chosen is None or chosen is not me:
            self.current = chosen
            (self._home if chosen is None else chosen.baton).release()
            if me is None:
                return
            me.baton.acquire()
        if me is not None and self.over:
            raise Over

    def _unwound(self) -> Turn | None:
        """One that has not ended: it will, since all that it can do now raises."""
        while self._all and self._all[-1].done:
            self._all.pop()
        return self._all[-1] if self._all else None

    def _choose_turn(self) -> Turn | None:
        while True:
            while self._ready:
                turn = self._ready.pop(self._draw.randrange(len(self._ready)))
                if turn.worker in self._gone:
                    continue
                if turn.worker in self._frozen and (left := self.stands(turn.worker)) > 0:
                    turn.blocked, turn.waits = True, turn.waits + 1
                    self._at(self.time + left, turn)
                    continue
                return turn
            if not self._timers or self._timers[0][0] > self._limit:
                self.hangs = self.over = True
                return self._unwound()
            until, _, waits, turn = heapq.heappop(self._timers)
            if turn.blocked and turn.waits == waits:
                self.time = max(self.time, until)
                self.wake(turn)


_SWAPPED = ("threading", "time")


class Lock:
    """A lock that who holds it may take again."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._owner: Turn | None = None
        self._depth = 0
        self._waiting: list[Turn] = []

    def acquire(self) -> bool:
        turns = self._turns
        if turns.over or turns.current is None:
            return True
        me = turns.me
        if self._owner is not me:
            turns.perhaps_yield()
            while self._owner is not None:
                self._waiting.append(me)
                turns.block()
            self._owner = me
            me.held.append(self)
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not None and self._owner is self._turns.current:
            self._depth -= 1
            if self._depth == 0:
                self.drop()

    def drop(self) -> int:
        depth, owner = self._depth, self._owner
        self._owner, self._depth = None, 0
        if owner is not None:
            owner.held.remove(self)
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            self._turns.wake(turn)
        return depth

    def again(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *about: object) -> None:
        self.release()


class Condition:
    """A condition over a lock of its own."""

    def __init__(self, turns: Turns, lock: Lock | None = None) -> None:
        self._turns = turns
        self._lock = lock or Lock(turns)
        self._waiting: list[Turn] = []

    def wait(self, timeout: float | None = None) -> bool:
        turns = self._turns
        me = turns.me
        depth = self._lock.drop()
        self._waiting.append(me)
        try:
            turns.block(None if timeout is None else turns.now() + max(timeout, _INSTANT))
        finally:
            told = me not in self._waiting
            if not told:
                self._waiting.remove(me)
            self._lock.again(depth)
        return told

    def wait_for(self, whether: Callable[[], Any], timeout: float | None = None) -> Any:
        limit = None if timeout is None else self._turns.now() + timeout
        while not (found := whether()):
            left = None if limit is None else limit - self._turns.now()
            if left is not None and left <= 0:
                return found
            self.wait(left)
        return found

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            self._turns.wake(turn)

    def notify(self, count: int = 1) -> None:
        for turn in self._waiting[:count]:
            self._waiting.remove(turn)
            self._turns.wake(turn)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *about: object) -> None:
        self._lock.release()


class Event:
    """Something that happens once."""

    def __init__(self, turns: Turns) -> None:
        self._condition = Condition(turns)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            self._condition.wait_for(self.is_set, timeout)
        return self._set


class Thread:
    """A thread of whoever makes it."""

    def __init__(self, turns: Turns, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
        self.name = name
        self.daemon = daemon
        self._turns = turns
        self._target = target
        self._ended = Event(turns)
        self._worker = "" if turns.current is None else turns.current.worker

    def start(self) -> None:
        self._turns.spawn(self._work, self.name, self._worker)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _work(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()
