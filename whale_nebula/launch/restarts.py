"""Start the workers of a job again after a failure: the rule by which it is decided, and the loop that does it.

Each start has a number, the *epoch*. Workers of several launchers agree on the highest when they meet, and tell their
launchers, which go on counting from there: so a process of an earlier epoch can be told apart and kept out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.config.schema import PATIENCE_SECONDS, Restarts
from whale_nebula.launch.failures import Failure, find_failure
from whale_nebula.launch.job import Job, Result

LONG_SECONDS = 600.0
"""After so much training a failure counts as the first one again, also where nothing is saved."""
MOST_WAIT_SECONDS = 60.0


class Verdict(NamedTuple):
    """Whether the workers are started again, after how many seconds, as the how-many-th restart; or why they are not.
    Nothing is said where nobody has asked for restarts.
    """

    again: bool
    wait: float = 0.0
    number: int = 0
    why: str = ""
    used_up: bool = False


class Rule:
    """Decides whether a job that failed is started again. It waits twice as long each time, at most a minute and half
    the `patience` of the workers, so that those of other launchers are still there. A failure counts as the first one
    again after a start that got further than all before it: a newer step was saved, on a disk or in memory.

    >>> rule, killed = Rule(Restarts(most=3)), Failure("npu/0", "ended by SIGKILL", trained=3.0)
    >>> [rule.judge(killed).wait for _ in range(3)], rule.judge(killed).why
    ([1.0, 2.0, 4.0], 'restarts are used up: 3 of 3 were made')
    >>> rule.judge(Failure("npu/0", "exit code 1: NB-500 no", recurring="NB-500")).why
    'it is not started again: NB-500 would come again'
    """

    def __init__(self, allowed: Restarts, patience: float = PATIENCE_SECONDS) -> None:
        self.allowed = allowed
        self._longest = min(MOST_WAIT_SECONDS, patience / 2)
        self._made = 0
        self._saved = -1
        self._early: frozenset[str] = frozenset()

    def judge(self, failure: Failure, *, others: bool = False) -> Verdict:
        """What to do after a failure, which counts; `others` says that the next start is of other workers."""
        most = self.allowed.most
        if self.is_further(failure):
            self._made = 0
        self._saved = max(self._saved, -1 if failure.saved is None else failure.saved)
        if others:
            self._early = frozenset()
        if not most:
            return Verdict(False)
        if failure.recurring:
            return Verdict(False, why=f"it is not started again: {failure.recurring} would come again")
        if self._is_repeated(failure):
            return Verdict(False, why="it is not started again: it has failed so twice before its first step")
        if self._made >= most:
            return Verdict(False, why=f"restarts are used up: {self._made} of {most} were made", used_up=True)
        wait = min(self.allowed.wait * 2.0**self._made, self._longest)
        self._made += 1
        return Verdict(True, wait, self._made)

    def is_further(self, failure: Failure) -> bool:
        """Whether a start that has failed makes up for those before: a newer step was saved, or it trained for long."""
        saved, trained = failure.saved, failure.trained
        return (saved is not None and saved > self._saved) or (trained is not None and trained >= LONG_SECONDS)

    def _is_repeated(self, failure: Failure) -> bool:
        """Whether a worker fails before its first step like the last time. One that only missed another may go on."""
        if failure.trained is not None:
            self._early = frozenset()
            return False
        before, self._early = self._early, failure.ways or self._early
        return bool(before & failure.ways)


@dataclass(frozen=True)
class Ended:
    """How the last start ended, of which `epoch`. Where all failed, `why` says why there is no other start, if anybody
    wants to know, and `first` how the first start failed, if there were several.
    """

    result: Result
    epoch: int = 0
    why: str = ""
    first: Failure | None = None
    used_up: bool = False


class Attempts:
    """Starts a job, and starts it again as long as the rule says so.

    `start` gives the job of an epoch; `rest` waits so many seconds, and says whether to go on; `is_stopped` whether
    somebody has asked for the end; `tell` is told in a line of each failure after which it goes on. `changes` says in
    words why workers are started again at once, as others than before, or nothing; `is_left`
    whether no worker is to be started here any more. `note_failure` is told of each failure, and whether that start got
    further than those before; it gives a line where the next start is of other workers.
    """

    def __init__(
        self,
        rule: Rule,
        start: Callable[[int], AbstractContextManager[Job]],
        *,
        rest: Callable[[float], bool],
        is_stopped: Callable[[], bool],
        tell: Callable[[str], None],
        changes: Callable[[Result], str] = lambda result: "",
        is_left: Callable[[], bool] = lambda: False,
        note_failure: Callable[[Failure, bool], str] = lambda failure, further: "",
    ) -> None:
        self._rule, self._start, self._rest, self._is_stopped, self._tell = rule, start, rest, is_stopped, tell
        self._changes, self._is_left, self._note_failure = changes, is_left, note_failure

    def run(self, patience: float) -> Ended:
        """Wait until the end of the last start."""
        epoch, first = 0, None
        while True:
            with self._start(epoch) as job:
                result = job.wait(float("inf"), patience=patience)
            joined = [outcome.told.epoch for outcome in result.outcomes.values()]
            epoch = max([epoch, *(each for each in joined if each is not None)])
            failure = find_failure(result)
            changed = "" if self._is_stopped() else self._changes(result)
            if changed and self._is_left():
                self._tell(changed)
                return Ended(result, epoch)
            if changed:
                epoch += 1
                self._tell(f"{f'{failure}; ' if failure else ''}{changed}, as epoch {epoch}")
                continue
            if failure is None or self._is_stopped():
                return Ended(result, epoch)
            lost = self._note_failure(failure, self._rule.is_further(failure))
            verdict = self._rule.judge(failure, others=bool(lost))
            if not verdict.again:
                return Ended(result, epoch, verdict.why, first, verdict.used_up)
            first = first or failure
            epoch += 1
            restart = f"restart {verdict.number} of {self._rule.allowed.most}"
            self._tell(f"{failure}; {restart} begins after {verdict.wait:g} s, as epoch {epoch}")
            if lost:
                self._tell(lost)
            if not self._rest(verdict.wait):
                return Ended(result, epoch - 1)
