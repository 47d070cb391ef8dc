"""`python -m whale_nebula.launch.child script.py ...`: run a script as a worker, seeded before it builds anything.

Processes of one run must start from the same weights, so each sets the run's seed before the script's first line. A
script that fails announces that to the other workers, which would otherwise wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import runpy
import sys
from functools import partial

from whale_nebula.config import load
from whale_nebula.errors import NebulaError
from whale_nebula.launch.attach import Attachment, attach
from whale_nebula.launch.seeding import call_before_load, call_when_loaded, seed_all
from whale_nebula.launch.worker_exit import (
    WorkerExit,
    exit_agreement,
    format_failure_line,
    request_exit_on_signals,
    select_own_lines,
)
from whale_nebula.security.code import import_from_source

_RELEASE_SECONDS = 0.5


def main(argv: list[str]) -> None:
    """Seed this process and run the script as `__main__`."""
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    atexit.register(_release_iterators)
    attachment = attach()
    if attachment is not None:
        _prepare(attachment)
    if attachment is not None and _needs_approval(attachment):
        import_from_source(argv[0])
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except BaseException as failure:
        _note_exit(attachment, exit_code(failure), failure)
        _report_failure(failure, attachment)
        if attachment is not None and sys.excepthook is sys.__excepthook__:
            sys.excepthook = partial(_write_failure, attachment.worker, argv[0])
        raise
    _note_exit(attachment, 0)


def _release_iterators() -> None:
    """Destroy iterators over datasets: at the exit of Python, they could delay the exit by up to a minute."""
    iterators = sys.modules.get("whale_nebula.tf.iterators")
    if iterators is not None:
        iterators.release_iterators(_RELEASE_SECONDS)


def _needs_approval(attachment: Attachment) -> bool:
    """Whether the config requires approvals; an invalid config is reported by `nb.init`."""
    with contextlib.suppress(NebulaError):
        return attachment.config is not None and load(attachment.config).approvals is not None
    return False


def _prepare(attachment: Attachment) -> None:
    request_exit_on_signals()
    exit_agreement.read_requested_counts = attachment.read_requested_counts
    if attachment.heartbeat_sender is not None:
        exit_agreement.on_first_step = partial(
            attachment.heartbeat_sender.send, stepped=True, changed_variables=_watch_environment()
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe to the launcher, which shows lines as they come
    if attachment.seed is not None:
        seed_all(attachment.seed)
    if attachment.device is not None or attachment.cluster in attachment.peers.values():
        task = "whale_nebula.runtime.session.task"  # needs TensorFlow, and must run before it computes
        call_when_loaded("keras", lambda: importlib.import_module(task).prepare(attachment))


def _watch_environment() -> list[str]:
    """The names of the environment variables that the script has changed before it imports TensorFlow: a list that is
    empty until then.
    """
    before = dict(os.environ)
    changed: list[str] = []

    def compare() -> None:
        names = sorted(before.keys() | os.environ.keys())
        changed[:] = [name for name in names if before.get(name) != os.environ.get(name)]

    call_before_load("tensorflow", compare)
    return changed


def _write_failure(worker: str, path: str, kind: type[BaseException], failure: BaseException, trace: object) -> None:
    """Write the reason of a script's end to standard error, unbuffered, with the worker's name."""
    sys.stderr.write(f"{format_failure_line(worker)}\n{select_own_lines(failure, path)}")
    sys.stderr.flush()


def _note_exit(attachment: Attachment | None, code: int | None, failure: BaseException | None = None) -> None:
    """Note the exit code and the error's code for the last heartbeat message, by which the launcher knows them even if
    it must kill this process; send the numbers of workers on which an exit was agreed.
    """
    heartbeat_sender = None if attachment is None else attachment.heartbeat_sender
    if heartbeat_sender is not None:
        heartbeat_sender.code = code
        if isinstance(failure, NebulaError):
            heartbeat_sender.error, heartbeat_sender.cause, heartbeat_sender.lost = (
                failure.code,
                getattr(failure, "cause", ""),
                list(failure.missed or filter(None, [failure.peer])),
            )
        if isinstance(failure, WorkerExit) and exit_agreement.counts:
            heartbeat_sender.send(counts=exit_agreement.counts)


def exit_code(failure: BaseException) -> int | None:
    """The exit code of Python after an uncaught error; None if a signal ends the process.

    >>> ends = ValueError(), SystemExit(75), SystemExit(-1), SystemExit(), SystemExit("no"), KeyboardInterrupt()
    >>> [exit_code(each) for each in ends]
    [1, 75, 255, 0, 1, None]
    """
    if isinstance(failure, SystemExit):
        return failure.code & 0xFF if isinstance(failure.code, int) else int(failure.code is not None)
    return None if isinstance(failure, KeyboardInterrupt) else 1


def _report_failure(failure: BaseException, attachment: Attachment | None) -> None:
    """Report an error or an exit code other than 0 to the other workers, unless all have agreed to leave together."""
    if isinstance(failure, WorkerExit) and attachment is not None:
        sys.stderr.write(f"whale-nebula: worker {attachment.worker} leaves: {failure}\n")
        if exit_agreement.is_agreed:
            return
    if not (isinstance(failure, SystemExit) and failure.code in (None, 0)):
        importlib.import_module("whale_nebula.runtime.run").report_failure(failure)


if __name__ == "__main__":
    main(sys.argv[1:])
