"""Restart the workers of a job after a failure: diagnosis of the failure, the restart policy, and the loop that applies
it.

Each start has a number, the *epoch*. Workers of several launchers agree on the highest at the rendezvous, and report it
to their launchers, which count on from there: so a process of an earlier epoch is recognised and refused.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.config.schema import PATIENCE_SECONDS, Restarts
from whale_nebula.errors import (
    AccountError,
    DeadlineError,
    EpochOverError,
    LinkClosedError,
    NebulaError,
    PeerRestartedError,
    RemoteFailureError,
    StaleWorkerError,
)
from whale_nebula.launch.job import Job, Outcome, Result
from whale_nebula.launch.worker_exit import EXIT_TEMPFAIL, find_last_error_line


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker that failed first in a job and how, in words.

    `recurring` is the code of an error of any worker that a restart would repeat, if there was one. `signatures` are
    texts of all workers that failed by themselves and how, without numbers, which vary between failures; workers that
    only lost another one have none. `trained` is how long the job had trained in seconds, None if it took no step, and
    `saved` the newest step saved by then; `lost` are the workers that were missed, if any, and `follows` means that the
    worker has failed because another one had.

    >>> str(Failure("npu/0", "ended by SIGKILL", trained=3.0))
    'worker npu/0 failed first: ended by SIGKILL'
    """

    worker: str
    description: str
    recurring: str = ""
    signatures: frozenset[str] = frozenset()
    trained: float | None = None
    saved: int | None = None
    lost: frozenset[str] = frozenset()
    follows: bool = False

    def __str__(self) -> str:
        return f"worker {self.worker} failed first: {self.description}"


def find_failure(result: Result) -> Failure | None:
    """The failure of a job; None if no worker failed, also if all were asked to leave."""
    first = find_first_failed(result)
    if first is None or first.code == EXIT_TEMPFAIL:
        return None
    failed = [outcome for outcome in result.outcomes.values() if outcome.code not in (0, EXIT_TEMPFAIL)]
    codes = (code for outcome in failed for code in (outcome.status.error, outcome.status.cause))
    recurring = AccountError.code if result.excess else next((code for code in codes if code in RECURRING), "")
    signatures = frozenset(_describe_signature(result, each) for each in failed if _fails_itself(result, each, first))
    lost = frozenset(next((outcome.status.lost for outcome in (first, *failed) if outcome.status.lost), ()))
    follows = first.status.error in (*_LOST_PEER_CODES, RemoteFailureError.code)
    return Failure(
        first.worker, describe_exit(result, first), recurring, signatures, result.trained, result.saved, lost, follows
    )


def _fails_itself(result: Result, outcome: Outcome, first: Outcome) -> bool:
    """Whether a worker has failed by itself: the launcher did not end it, and it did not lose another worker."""
    by_signal = outcome.code < 0 and outcome is not first and outcome.worker not in result.frozen
    return not by_signal and outcome.status.error not in _LOST_PEER_CODES


def _describe_signature(result: Result, outcome: Outcome) -> str:
    return f"{outcome.worker}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', describe_exit(result, outcome))}"


def find_first_failed(result: Result) -> Outcome | None:
    """The outcome of the worker that failed first, otherwise of one that left; None if all ended well.

    If the first that ended reports that another one had failed before it, that one failed first.
    """
    if result.culprit is None:
        return None
    line = find_last_error_line(result.outcomes[result.culprit].err)
    failed = [name for name, outcome in result.outcomes.items() if outcome.code > 0 and outcome.code != EXIT_TEMPFAIL]
    named = (name for name in failed if line.startswith(f"{RemoteFailureError.code} worker '{name}' failed: "))
    return result.outcomes[next(named, result.culprit)]


def describe_exit(result: Result, outcome: Outcome) -> str:
    """How a worker exited, in words."""
    if outcome.worker in result.frozen:
        return "it was frozen, and was killed"
    if outcome.code < 0 and result.excess:
        return f"it was killed: {result.excess}"
    if outcome.code < 0:
        known = -outcome.code in list(signal.Signals)
        return f"ended by {signal.Signals(-outcome.code).name if known else f'signal {-outcome.code}'}"
    line = find_last_error_line(outcome.err)
    return f"exit code {outcome.code}" + (f": {line}" if line else "")


def _list_recurring(kind: type[NebulaError]) -> Iterator[str]:
    if kind.recurs:
        yield kind.code
    for each in kind.__subclasses__():
        yield from _list_recurring(each)


RECURRING = frozenset(_list_recurring(NebulaError))
"""The codes of errors that a restart of the same script repeats."""
_LOST_PEER_CODES = frozenset(
    kind.code for kind in (LinkClosedError, DeadlineError, PeerRestartedError, EpochOverError, StaleWorkerError)
)


LONG_SECONDS = 600.0
"""Seconds of training after which a failure counts as the first one again, even without checkpoints."""
MOST_WAIT_SECONDS = 60.0


class Verdict(NamedTuple):
    """Decision on a restart: `should_restart`, then after `wait` seconds as restart `number`; otherwise the reason
    `why` not, which is empty if no restarts were configured, and whether all of them were `used_up`.
    """

    should_restart: bool
    wait: float = 0.0
    number: int = 0
    why: str = ""
    used_up: bool = False


class RestartPolicy:
    """Restart policy with exponential backoff: at most a minute and half the `patience` of the workers, so that those
    of other launchers still wait. A start that made progress resets the count.

    >>> policy, killed = RestartPolicy(Restarts(most=3)), Failure("npu/0", "ended by SIGKILL", trained=3.0)
    >>> [policy.decide(killed).wait for _ in range(3)], policy.decide(killed).why
    ([1.0, 2.0, 4.0], 'no restarts left: 3 of 3 were used')
    >>> policy.decide(Failure("npu/0", "exit code 1: NB-500 no", recurring="NB-500")).why
    'not restarted: NB-500 would recur'
    """

    def __init__(self, allowed: Restarts, patience: float = PATIENCE_SECONDS) -> None:
        self.allowed = allowed
        self._longest = min(MOST_WAIT_SECONDS, patience / 2)
        self._restarts_made = 0
        self._saved = -1
        self._early_signatures: frozenset[str] = frozenset()

    def decide(self, failure: Failure, *, has_other_workers: bool = False) -> Verdict:
        """Decide on a failure and count it; `has_other_workers` means that the next start has other workers."""
        most = self.allowed.most
        if self.made_progress(failure):
            self._restarts_made = 0
        self._saved = max(self._saved, -1 if failure.saved is None else failure.saved)
        if has_other_workers:
            self._early_signatures = frozenset()
        if not most:
            return Verdict(False)
        if failure.recurring:
            return Verdict(False, why=f"not restarted: {failure.recurring} would recur")
        if self._is_repeated(failure):
            return Verdict(False, why="not restarted: the same failure occurred twice before the first step")
        if self._restarts_made >= most:
            return Verdict(False, why=f"no restarts left: {self._restarts_made} of {most} were used", used_up=True)
        wait = self.allowed.find_delay(self._restarts_made, self._longest)
        self._restarts_made += 1
        return Verdict(True, wait, self._restarts_made)

    def made_progress(self, failure: Failure) -> bool:
        """Whether a failed start made progress: a newer step was saved, or it trained for long."""
        saved, trained = failure.saved, failure.trained
        return (saved is not None and saved > self._saved) or (trained is not None and trained >= LONG_SECONDS)

    def _is_repeated(self, failure: Failure) -> bool:
        """Whether a worker failed before the first step as it did the last time, by the signatures of failures. Those
        of workers that only lost another worker do not count.
        """
        if failure.trained is not None:
            self._early_signatures = frozenset()
            return False
        before, self._early_signatures = self._early_signatures, failure.signatures or self._early_signatures
        return bool(before & failure.signatures)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended in this launcher: the result of the last start, its `epoch`, and, if it failed, the reason `why`
    it is not restarted, how the `first` start failed, if there were several, and whether all restarts were `used_up`.
    """

    result: Result
    epoch: int = 0
    why: str = ""
    first: Failure | None = None
    used_up: bool = False


class Attempts:
    """Starts a job, and restarts it as long as the policy allows.

    `start` starts the job of an epoch; `wait` waits for some seconds, and returns whether to continue; `is_stopped`
    returns whether the end was requested; `report` is called with a line on each failure that is followed by a restart.
    `describe_change` returns in words why a changed set of workers is started at once, or ""; `is_leaving` whether no
    more workers are to be started here. `note_failure` is called with each failure, and whether that start made
    progress; it returns a line if the next start has other workers.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        start: Callable[[int], AbstractContextManager[Job]],
        *,
        wait: Callable[[float], bool],
        is_stopped: Callable[[], bool],
        report: Callable[[str], None],
        describe_change: Callable[[Result], str] = lambda result: "",
        is_leaving: Callable[[], bool] = lambda: False,
        note_failure: Callable[[Failure, bool], str] = lambda failure, progressed: "",
    ) -> None:
        self._policy, self._start, self._wait, self._is_stopped, self._report = policy, start, wait, is_stopped, report
        self._describe_change, self._is_leaving, self._note_failure = describe_change, is_leaving, note_failure

    def run(self, patience: float) -> RunEnd:
        """Wait until the end of the last start."""
        epoch, first = 0, None
        while True:
            with self._start(epoch) as job:
                result = job.wait(float("inf"), patience=patience)
            joined = [outcome.status.epoch for outcome in result.outcomes.values()]
            epoch = max([epoch, *(each for each in joined if each is not None)])
            failure = find_failure(result)
            change = "" if self._is_stopped() else self._describe_change(result)
            if change and self._is_leaving():
                self._report(change)
                return RunEnd(result, epoch)
            if change:
                epoch += 1
                self._report(f"{f'{failure}; ' if failure else ''}{change}, as epoch {epoch}")
                continue
            if failure is None or self._is_stopped():
                return RunEnd(result, epoch)
            exclusion = self._note_failure(failure, self._policy.made_progress(failure))
            verdict = self._policy.decide(failure, has_other_workers=bool(exclusion))
            if not verdict.should_restart:
                return RunEnd(result, epoch, verdict.why, first, verdict.used_up)
            first = first or failure
            epoch += 1
            restart = f"restart {verdict.number} of {self._policy.allowed.most}"
            self._report(f"{failure}; {restart} begins after {verdict.wait:g} s, as epoch {epoch}")
            for other in result.outcomes.values():
                if (
                    other.worker != failure.worker
                    and other.code not in (0, EXIT_TEMPFAIL)
                    and find_last_error_line(other.err)
                ):
                    self._report(f"worker {other.worker} ended afterwards: {describe_exit(result, other)}")
            if exclusion:
                self._report(exclusion)
            if not self._wait(verdict.wait):
                return RunEnd(result, epoch - 1)
