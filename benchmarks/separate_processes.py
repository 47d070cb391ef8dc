"""Runs in separate processes, several at a time; the result of each is a line of JSON in a file, so that long
benchmarks can be interrupted and continued.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Key = TypeVar("Key")
Process = subprocess.Popen[str]


def one_thread() -> dict[str, str]:
    """The environment of a single-threaded process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start_script(words: Sequence[object], **pipes: Any) -> Process:
    """Start a Python script with one thread."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=one_thread(), start_new_session=True, **pipes
    )


def run_all(
    wanted: Iterable[Key],
    start: Callable[[Key], Process | None],
    on_result: Callable[[Key, Process], None],
    *,
    jobs: int,
    limit: float,
) -> None:
    """Start all wanted runs, and pass on the result of each as it ends; runs longer than `limit` are killed.

    `start` returns None to skip a run. The processes are ended in any case.
    """
    waiting = list(wanted)
    running: dict[Key, Process] = {}
    began: dict[Key, float] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                key = waiting.pop(0)
                if (process := start(key)) is not None:
                    running[key], began[key] = process, time.monotonic()
            for key in [each for each in running if _over(running[each], began[each], limit)]:
                on_result(key, running.pop(key))
            time.sleep(0.5)
    finally:
        for process in running.values():
            process.kill()


def _over(process: Process, began: float, limit: float) -> bool:
    """Whether a process has ended, or has exceeded the limit."""
    if process.poll() is None and time.monotonic() - began > limit:
        process.kill()
        process.wait()
    return process.poll() is not None
