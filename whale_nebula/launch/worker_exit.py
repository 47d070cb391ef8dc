"""How a worker exits: together with all others on request, or with an error that its launcher prints.

On SIGTERM, SIGINT or SIGHUP, all workers exit together between two steps. A worker that receives a signal announces it
with its next step. After that step all workers know, and each exits before its next step, so all have taken the same
steps. A process that has not begun its steps exits at once.

A worker that fails writes a line with its name, then the traceback. Its launcher holds back the text of an error of
this library (what, where, why, mend) and prints it once, after the output of all other workers.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from itertools import takewhile
from types import FrameType
from typing import Any

from whale_nebula.errors import NebulaError
from whale_nebula.errors.text import LIMIT, list_counts, remove_folders

EXIT_TEMPFAIL = 75
"""EX_TEMPFAIL of sysexits.h: the run can be started again."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerExit(SystemExit):
    """Exit of a worker on request, or together with another one.

    >>> str(WorkerExit("SIGTERM")), WorkerExit("SIGTERM").code
    ('SIGTERM', 75)
    """

    def __init__(self, why: str) -> None:
        super().__init__(EXIT_TEMPFAIL)
        self.why = why

    def __str__(self) -> str:
        return self.why


_RESIZE = "OTHERS"
_LONGEST_WORD = 4096
_COUNT = re.compile(r"([A-Za-z0-9][\w.-]*(?:/\d{1,9})?)=(\d{1,9})")


class ExitAgreement:
    """Agreement of the workers on leaving together: why this process was asked to leave (`exit_reason`), whether all
    have agreed, and the numbers of workers with which the run continues (`counts` by cluster, and 0 or 1 by worker).
    `read_requested_counts` reads those that the launcher requests; `on_first_step` is called once the first step is
    over.

    >>> exit_agreement = ExitAgreement()
    >>> exit_agreement.begin_step()  # a step
    >>> exit_agreement.request_exit("SIGTERM")
    >>> exit_agreement.conclude_step({"gpu/0": exit_agreement.exit_reason, "npu/0": None})
    >>> exit_agreement.begin_step()  # the next one
    Traceback (most recent call last):
    ...
    whale_nebula.launch.worker_exit.WorkerExit: gpu/0 was asked to stop: SIGTERM
    """

    def __init__(self) -> None:
        self.exit_reason: str | None = None
        self.on_first_step: Callable[[], None] | None = None
        self.counts: dict[str, int] = {}
        self.read_requested_counts: Callable[[], Mapping[str, int]] = dict
        self._available_counts: dict[str, int] = {}
        self._stepping = False
        self._agreed_reason = ""

    @property
    def is_agreed(self) -> bool:
        """Whether all workers have agreed to leave."""
        return bool(self._agreed_reason)

    def request_exit(self, why: str) -> None:
        """Leave after the next step that all take; before the first step, leave at once. Safe in a signal handler."""
        self.exit_reason = why
        if not self._stepping:
            raise WorkerExit(f"it was asked to stop before its first step: {why}")

    def note_available_workers(self, counts: Mapping[str, int]) -> None:
        """Record that absent workers are available again: leave after a step, to be restarted with them."""
        self._available_counts.update(counts)

    @property
    def announcement(self) -> str | None:
        """The announcement to the other workers: why this one was asked to leave, and the numbers of workers with which
        the run is to continue.

        >>> exit_agreement = ExitAgreement()
        >>> exit_agreement.note_available_workers({"npu/1": 1})
        >>> exit_agreement.announcement
        'OTHERS npu/1=1'
        """
        counts = {**self._available_counts, **self.read_requested_counts()}
        why = self.exit_reason or (_RESIZE if counts else None)
        return why and " ".join([why, *(f"{cluster}={count}" for cluster, count in counts.items())])

    def begin_step(self) -> None:
        """Called before each step; raises `WorkerExit` if this process is to leave."""
        if self._agreed_reason:
            raise WorkerExit(self._agreed_reason)
        if self._stepping and self.on_first_step is not None:
            self.on_first_step()
            self.on_first_step = None
        self._stepping = True

    def conclude_step(self, announcements: Mapping[str, object]) -> None:
        """Conclude a step in which every worker announced its `announcement`: all workers now have the same state.

        >>> exit_agreement = ExitAgreement()
        >>> exit_agreement.conclude_step({"gpu/0": "SIGTERM npu=1", "npu/0": None})
        >>> exit_agreement.counts
        {'npu': 1}
        """
        reasons = []
        for worker, text in sorted((worker, str(text)) for worker, text in announcements.items() if text):
            words = (_COUNT.fullmatch(word) for word in text[:_LONGEST_WORD].split(" "))
            counts = {found[1]: int(found[2]) for found in words if found is not None}
            if counts:
                self.counts.update(counts)
                reasons.append(f"{worker} requests to continue {list_counts(counts)}")
            else:  # a peer's word is printed on a terminal: only these are accepted
                why = next((number.name for number in _SIGNALS if text == number.name), "a signal")
                reasons.append(f"{worker} was asked to stop: {why}")
        self._agreed_reason = self._agreed_reason or "; ".join(reasons)


exit_agreement = ExitAgreement()
"""The agreement of this process."""


def request_exit_on_signals() -> None:
    """Let SIGTERM and SIGINT, and SIGHUP unless it is ignored (nohup), request this process to leave; repeated signals
    have no effect.

    Some platforms signal both the launcher and the workers, and the launcher forwards its signals. A second signal to
    the launcher kills the workers. A forked process, such as one that reads data, is ended by a signal as usual.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]

    def request_exit(number: int, frame: FrameType | None) -> None:
        if exit_agreement.exit_reason is None:
            exit_agreement.request_exit(signal.Signals(number).name)

    forks = _ForkHooks({number: signal.signal(number, request_exit) for number in handled})
    os.register_at_fork(
        before=forks.block_signals, after_in_parent=forks.unblock_signals, after_in_child=forks.restore_handlers
    )


_DEFAULT_HANDLERS: Mapping[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""Python's own handlers of the signals for which `set_signal_handler` sets one."""


def set_signal_handler(number: signal.Signals, request: Callable[[str], None]) -> bool:
    """Let SIGTERM or SIGINT call `request` with the signal's name; returns whether it does now. A handler that the user
    has set is kept, and only the main thread can set one. A forked process, such as one of a process pool, is ended by
    the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(number) is not _DEFAULT_HANDLERS[number]:
        return False
    _restore_handlers_in_forks()
    signal.signal(number, _SignalHandler(request))
    return True


def restore_signal_handler(number: signal.Signals) -> None:
    """Undo `set_signal_handler`, unless another handler was set since."""
    if isinstance(signal.getsignal(number), _SignalHandler):
        signal.signal(number, _DEFAULT_HANDLERS[number])


class _SignalHandler:
    """A handler of a signal that calls `request` with its name."""

    def __init__(self, request: Callable[[str], None]) -> None:
        self._request = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._request(signal.Signals(number).name)


@cache
def _restore_handlers_in_forks() -> None:
    """Register, once, that forked processes do not inherit our handlers of signals."""
    forks = _ForkHooks({})

    def restore() -> None:
        for number in _DEFAULT_HANDLERS:
            restore_signal_handler(number)
        forks.unblock_signals()

    os.register_at_fork(before=forks.block_signals, after_in_parent=forks.unblock_signals, after_in_child=restore)


class _ForkHooks:
    """Restores the previous handlers in forked processes. Signals are blocked meanwhile, so none is lost."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self._handlers = handlers
        self._thread = threading.local()

    def block_signals(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def unblock_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.unblock_signals()


_CONTINUATION = re.compile(r"  (why|mend): |   {5,}")
_OUR_ERRORS = re.compile(r"whale_nebula\.errors\.\w+: NB-\d{3} ")
_COMPARED = LIMIT // 2
_CODE = re.compile(r"NB-\d{3} ")
_FAILURE_SUFFIX = " failed with an error"


def format_failure_line(worker: str) -> str:
    """The line above the traceback of the error with which a worker fails.

    >>> format_failure_line("gpu/0")
    'whale-nebula: worker gpu/0 failed with an error'
    """
    return f"whale-nebula: worker {worker}{_FAILURE_SUFFIX}"


class LastErrorFilter:
    r"""Filter of the lines that a launcher holds back: the error of this library with which the worker fails.

    >>> error = ["whale_nebula.errors.StateError: NB-305 no", "  mend: x"]
    >>> lines = [format_failure_line("gpu/0"), "Traceback", *error, "after"]
    >>> error_filter = LastErrorFilter("gpu/0")
    >>> [line for line in lines if error_filter.holds_back(line)] == error
    True
    """

    def __init__(self, worker: str) -> None:
        self._head = format_failure_line(worker)
        self._ends = self._in_own_error = False

    def holds_back(self, line: str) -> bool:
        """Whether the next line of the worker's standard error is held back."""
        line = line.rstrip("\r\n")
        self._in_own_error = self._ends and bool(
            _OUR_ERRORS.match(line) or (self._in_own_error and _CONTINUATION.match(line))
        )
        self._ends = self._ends or line == self._head
        return self._in_own_error


def find_last_message(errors: str) -> str:
    r"""The last message of a process with its reason and fix, which are the indented lines below it.

    >>> print(find_last_message("Traceback ...\nConfigError: NB-500 no\n  why: so\n       it is\n  mend: look\ngone\n"))
    NB-500 no
      why: so
           it is
      mend: look
    """
    last = find_last_error_line(errors)
    lines = errors.splitlines()
    at = max((number for number, line in enumerate(lines) if line.strip().endswith(last)), default=len(lines))
    return "\n".join([last, *takewhile(_CONTINUATION.match, lines[at + 1 :])])


def find_last_error_line(errors: str) -> str:
    r"""The line that most likely explains why a process ended: the last with an error's code, otherwise the last line;
    of those after the line above its traceback, if it has written one.

    >>> find_last_error_line("Traceback ...\nwhale_nebula.errors.LinkClosedError: NB-401 worker 'npu/0' is gone\n")
    "NB-401 worker 'npu/0' is gone"
    >>> find_last_error_line(f"NebulaWarning: NB-900 x\n{format_failure_line('gpu/0')}\nValueError: no\n")
    'ValueError: no'
    >>> find_last_error_line("Traceback ...\n  File x\nValueError: no\n\n"), find_last_error_line("")
    ('ValueError: no', '')
    """
    written = [line.strip() for line in errors.splitlines() if line.strip()]
    heads = [number for number, line in enumerate(written) if line.endswith(_FAILURE_SUFFIX)]
    lines = written[heads[-1] + 1 :] if heads else written
    coded = [found[0] for line in lines if (found := re.search(r"NB-\d{3} .*", line))]
    return (coded or lines or [""])[-1]


def is_same_cause(errors: str, other: str) -> bool:
    r"""Whether the last error line of a worker only repeats that of another worker.

    The text was either received from that worker, without folders and truncated, or describes the same difference
    between two workers, in which each worker names itself first.

    >>> message = "InputMismatchError: NB-304 a and b differ (b)\n  mend: shuffle\n"
    >>> is_same_cause(message, "NB-302 worker 'gpu/0' failed: a and b differ (b)\n")
    True
    >>> is_same_cause(message, "NB-304 b and a differ (a)\n"), is_same_cause(message, "NB-304 c and a differ (a)\n")
    (True, False)
    >>> is_same_cause("DataError: NB-220 /srv/es.txt is empty\n", "NB-302 worker 'gpu/0' failed: es.txt is empty\n")
    True
    """
    lines = map(find_last_error_line, (errors, other))
    texts = [re.sub(r" \([^()]*\)$", "", line.partition(" ")[2]) if _CODE.match(line) else "" for line in lines]
    cause, other_cause = map(remove_folders, texts)  # without code and location; "" if it is not one of our errors
    return bool(cause) and (cause[:_COMPARED] in other_cause or sorted(cause.split()) == sorted(other_cause.split()))


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep


def select_own_lines(error: BaseException, path: str) -> str:
    """The part of a traceback that begins in the script at `path`; frames of this library above are removed.

    Errors of this library contain the location and reason, so only the user's lines of their tracebacks are kept. If
    there are none, as when the script only calls another library, all lines are kept.

    >>> print(select_own_lines(ValueError("no"), "train.py"), end="")
    ValueError: no
    """
    ours, trace = isinstance(error, NebulaError), error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next  # None if the script does not compile
    exception = traceback.TracebackException(type(error), error, trace or error.__traceback__)
    written = [frame for frame in exception.stack if not _is_installed(frame.filename)]
    if trace is None or (ours and written):
        exception.stack = traceback.StackSummary.from_list(written)
    return "".join(exception.format(chain=not ours))


def _is_installed(file: str) -> bool:
    return file.startswith((_OURS, _PYTHONS, "<")) or "site-packages" in file or "__autograph_generated" in file
