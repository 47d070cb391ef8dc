"""Simulated threads and a simulated clock: a seed determines which thread runs next.

Code written for threads runs unchanged: while `Scheduler.replace_threading` is open, the given modules use the locks,
conditions, events and threads of this module, of which one runs at a time, chosen at random. When all wait, the clock
advances to the earliest timeout. So a run of minutes takes milliseconds, and the same seed gives the same run.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

YIELD_CHANCE = 0.15  # the probability that taking a free lock yields to another thread
_INSTANT = 0.001


class SimulationEnded(BaseException):
    """The run has ended; raised in waiting threads to unwind them."""


class WorkerKilled(BaseException):
    """The worker whose code runs has been killed; raised in a thread of another one."""


class SimulatedThread:
    """A thread of a run: its worker, and the end of its wait."""

    def __init__(self, name: str, worker: str) -> None:
        self.name = name
        self.worker = worker
        self.acting = worker  # the worker whose code it runs now
        self.held_locks: list[Lock] = []
        self.until: float | None = None
        self.waits = 0  # number of waits
        self.blocked = False
        self.done = False
        self.ident = 0
        self.baton = _thread.allocate_lock()
        self.baton.acquire()


class Scheduler:
    """The threads of one run, which counts as hanging after `limit` simulated seconds."""

    def __init__(self, generator: random.Random, *, limit: float) -> None:
        self.time = 0.0
        self.is_over = False
        self.is_hanging = False
        self.current: SimulatedThread | None = None
        self.unexpected_errors: list[tuple[str, BaseException]] = []  # by thread
        self._generator = generator
        self._limit = limit
        self._ready: list[SimulatedThread] = []
        self._timers: list[tuple[float, int, int, SimulatedThread]] = []
        self._count = 0
        self._threads: list[SimulatedThread] = []
        self._killed: set[str] = set()
        self._frozen: dict[str, float] = {}
        self._awaited: set[SimulatedThread] = set()
        self._finished = _thread.allocate_lock()
        self._finished.acquire()

    def now(self) -> float:
        """Seconds since the run began."""
        return self.time

    # For the creator of a run.

    def spawn(self, work: Callable[[], None], name: str, worker: str = "", *, awaited: bool = False) -> SimulatedThread:
        """Start a thread of a worker or of none; the run is over when all `awaited` ones have ended."""
        thread = SimulatedThread(name, worker)
        self._threads.append(thread)
        if awaited:
            self._awaited.add(thread)
        self._ready.append(thread)
        _thread.start_new_thread(self._run, (thread, work))
        return thread

    def run(self) -> None:
        """Run all threads until the run is over and they have ended."""
        self._switch(None)
        self._finished.acquire()

    def kill(self, worker: str) -> None:
        """Kill a worker: its threads stop, and release their locks."""
        self._killed.add(worker)
        for thread in self._threads:
            if thread.worker == worker:
                self._awaited.discard(thread)
                for lock in list(thread.held_locks):
                    lock.drop()
        if not self._awaited:
            self.is_over = True

    def revive(self, worker: str) -> None:
        """Let new threads of a killed worker run; the killed ones do not continue."""
        for thread in self._threads:
            if thread.worker == worker:
                thread.worker = f"{worker} (gone)"
        self._killed = (self._killed - {worker}) | {f"{worker} (gone)"}

    def freeze(self, worker: str, seconds: float) -> None:
        """Suspend the threads of a worker for this long."""
        self._frozen[worker] = self.time + seconds

    def frozen_seconds(self, worker: str) -> float:
        """The seconds for which a worker is still frozen."""
        return max(0.0, self._frozen.get(worker, 0.0) - self.time)

    def is_alive(self, worker: str) -> bool:
        """Whether a worker was not killed."""
        return worker not in self._killed

    @contextlib.contextmanager
    def replace_threading(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """Context in which these modules use simulated threads and the simulated clock."""
        threads = SimpleNamespace(
            Condition=lambda lock=None: Condition(self, lock),
            Event=lambda: Event(self),
            Lock=lambda: Lock(self),
            RLock=lambda: Lock(self),
            Thread=lambda **options: Thread(self, **options),
        )
        clock = SimpleNamespace(monotonic=self.now, sleep=self.sleep)
        before = [
            (module, name, vars(module)[name]) for module in modules for name in _REPLACED_NAMES if name in vars(module)
        ]
        try:
            for module, name, _ in before:
                setattr(module, name, threads if name == "threading" else clock)
            yield
        finally:
            for module, name, real in before:
                setattr(module, name, real)

    # For the threads of the run.

    @property
    def current_thread(self) -> SimulatedThread:
        """The running thread."""
        if self.current is None:
            raise SimulationEnded
        return self.current

    def is_current(self) -> bool:
        """Whether the caller is the running thread of this run."""
        return self.current is not None and self.current.ident == _thread.get_ident()

    def sleep(self, seconds: float) -> None:
        """Wait for this long."""
        self.block(self.time + max(seconds, _INSTANT))

    def block(self, until: float | None = None) -> None:
        """Wait for `wake`, or until a time."""
        if self.is_over:
            raise SimulationEnded
        current_thread = self.current_thread
        current_thread.blocked, current_thread.waits, current_thread.until = True, current_thread.waits + 1, until
        if until is not None:
            self._set_timer(until, current_thread)
        self._switch(current_thread)

    def wake(self, thread: SimulatedThread) -> None:
        """Let a waiting thread continue."""
        if thread.blocked:
            thread.blocked, thread.until = False, None
            self._ready.append(thread)

    def maybe_yield(self) -> None:
        """Yield to another thread at random."""
        if self._ready and self._generator.random() < YIELD_CHANCE:
            current_thread = self.current_thread
            self._ready.append(current_thread)
            self._switch(current_thread)

    def _set_timer(self, until: float, thread: SimulatedThread) -> None:
        self._count += 1
        heapq.heappush(self._timers, (until, self._count, thread.waits, thread))

    def _run(self, thread: SimulatedThread, work: Callable[[], None]) -> None:
        thread.ident = _thread.get_ident()
        thread.baton.acquire()
        try:
            if not self.is_over:
                work()
        except (SimulationEnded, WorkerKilled):
            pass
        except BaseException as error:
            self.unexpected_errors.append((thread.name, error))
        thread.done = True
        for lock in list(thread.held_locks):
            lock.drop()
        self._awaited.discard(thread)
        self.is_over = self.is_over or not self._awaited
        self._switch(None)

    def _switch(self, current_thread: SimulatedThread | None) -> None:
        """Switch to the next thread; returns when the current one runs again."""
        chosen = self._choose_unfinished() if self.is_over else self._choose_thread()
        if chosen is None or chosen is not current_thread:
            self.current = chosen
            (self._finished if chosen is None else chosen.baton).release()
            if current_thread is None:
                return
            current_thread.baton.acquire()
        if current_thread is not None and self.is_over:
            raise SimulationEnded

    def _choose_unfinished(self) -> SimulatedThread | None:
        """A thread that has not ended; it will, since its next wait raises."""
        while self._threads and self._threads[-1].done:
            self._threads.pop()
        return self._threads[-1] if self._threads else None

    def _choose_thread(self) -> SimulatedThread | None:
        while True:
            while self._ready:
                thread = self._ready.pop(self._generator.randrange(len(self._ready)))
                if thread.worker in self._killed:
                    continue
                if thread.worker in self._frozen and (left := self.frozen_seconds(thread.worker)) > 0:
                    thread.blocked, thread.waits = True, thread.waits + 1
                    self._set_timer(self.time + left, thread)
                    continue
                return thread
            if not self._timers or self._timers[0][0] > self._limit:
                self.is_hanging = self.is_over = True
                return self._choose_unfinished()
            until, _, waits, thread = heapq.heappop(self._timers)
            if thread.blocked and thread.waits == waits:
                self.time = max(self.time, until)
                self.wake(thread)


_REPLACED_NAMES = ("threading", "time")


class Lock:
    """A reentrant lock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: SimulatedThread | None = None
        self._depth = 0
        self._waiting: list[SimulatedThread] = []

    def acquire(self) -> bool:
        scheduler = self._scheduler
        if scheduler.is_over or scheduler.current is None:
            return True
        current_thread = scheduler.current_thread
        if self._owner is not current_thread:
            scheduler.maybe_yield()
            while self._owner is not None:
                self._waiting.append(current_thread)
                scheduler.block()
            self._owner = current_thread
            current_thread.held_locks.append(self)
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not None and self._owner is self._scheduler.current:
            self._depth -= 1
            if self._depth == 0:
                self.drop()

    def drop(self) -> int:
        depth, owner = self._depth, self._owner
        self._owner, self._depth = None, 0
        if owner is not None:
            owner.held_locks.remove(self)
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._scheduler.wake(thread)
        return depth

    def reacquire(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *about: object) -> None:
        self.release()


class Condition:
    """A condition variable."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or Lock(scheduler)
        self._waiting: list[SimulatedThread] = []

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        current_thread = scheduler.current_thread
        depth = self._lock.drop()
        self._waiting.append(current_thread)
        try:
            scheduler.block(None if timeout is None else scheduler.now() + max(timeout, _INSTANT))
        finally:
            notified = current_thread not in self._waiting
            if not notified:
                self._waiting.remove(current_thread)
            self._lock.reacquire(depth)
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        limit = None if timeout is None else self._scheduler.now() + timeout
        while not (found := predicate()):
            left = None if limit is None else limit - self._scheduler.now()
            if left is not None and left <= 0:
                return found
            self.wait(left)
        return found

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._scheduler.wake(thread)

    def notify(self, count: int = 1) -> None:
        for thread in self._waiting[:count]:
            self._waiting.remove(thread)
            self._scheduler.wake(thread)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *about: object) -> None:
        self._lock.release()


class Event:
    """An event flag."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._condition = Condition(scheduler)
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
    """A thread of its creator's worker."""

    def __init__(self, scheduler: Scheduler, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
        self.name = name
        self.daemon = daemon
        self._scheduler = scheduler
        self._target = target
        self._ended = Event(scheduler)
        self._worker = "" if scheduler.current is None else scheduler.current.worker

    def start(self) -> None:
        self._scheduler.spawn(self._work, self.name, self._worker)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _work(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()
