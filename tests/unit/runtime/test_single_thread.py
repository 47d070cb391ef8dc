"""Calls in a thread that performs them in order."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from whale_nebula.runtime import single_thread
from whale_nebula.runtime.single_thread import SingleThread

_SCRIPT = """
import atexit, runpy
thread = runpy.run_path({path!r})["SingleThread"]("sends")
thread.submit(print, "during the script").result()
atexit.register(lambda: thread.submit(print, "at the end").result(10))
"""


def test_calls_are_performed_at_the_end_of_the_process() -> None:
    """A run that is closed by `atexit` saves its last step, for which clusters that train apart need their threads."""
    script = _SCRIPT.format(path=single_thread.__file__)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines() == ["during the script", "at the end"]


def test_errors_are_passed_on_and_waiting_calls_are_cancelled() -> None:
    """After `close` nothing can be submitted."""
    thread, begun, go = SingleThread("test"), threading.Event(), threading.Event()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(10)
    running = thread.submit(lambda: begun.set() or go.wait(10))
    waiting = thread.submit(print)
    assert begun.wait(10)
    thread.close(cancel=True)
    go.set()
    assert running.result(10) and waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(print)
