"""A thread that performs calls in order, also at the end of the process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SingleThread:
    """A daemon thread that performs calls in the order in which they are submitted. Python stops the threads of a
    `ThreadPoolExecutor` before it calls the functions of `atexit`, but not this one: a run that is closed by `atexit`
    needs it to save its last step. It starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Perform a call after all earlier ones; returns its future result."""
        if self._closed:
            raise RuntimeError(f"thread {self._name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=_perform, args=(self._calls,), name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(*arguments)))
        return future

    def close(self, *, cancel: bool = False, wait: bool = False) -> None:
        """Stop the thread after all submitted calls, or, with `cancel`, after the one that it performs now; the others
        are cancelled. With `wait` it returns then.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while cancel and (call := self._calls.get_nowait()) is not None:
                call[0].cancel()
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()


def _perform(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function())
        except BaseException as error:  # as in a ThreadPoolExecutor
            future.set_exception(error)
        del call, future, function  # results are released although the thread waits
