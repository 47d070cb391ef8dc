"""How a job failed: which worker was the first, by what, and whether that would come again."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

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
from whale_nebula.launch.ending import EXIT_LEFT, last_word
from whale_nebula.launch.job import Outcome, Result


@dataclass(frozen=True, slots=True)
class Failure:
    """By what a job failed: the worker that failed first and how, in words.

    `recurring` is the code of an error that would come again at once, of any worker, if there was one. `ways` are all
    workers that failed by themselves and how, without numbers, which differ from time to time; not those that only lost
    another worker, of which they know no more. `trained` is for how many seconds the job had trained, None if it took
    no step, and `saved` the newest step that was saved by then; `lost` is the worker that the first one missed, if it
    is one.

    >>> str(Failure("npu/0", "ended by SIGKILL", trained=3.0))
    'worker npu/0 failed first: ended by SIGKILL'
    """

    worker: str
    how: str
    recurring: str = ""
    ways: frozenset[str] = frozenset()
    trained: float | None = None
    saved: int | None = None
    lost: str = ""

    def __str__(self) -> str:
        return f"worker {self.worker} failed first: {self.how}"


def find_failure(result: Result) -> Failure | None:
    """By what a job failed; None where no worker did, be it that all were asked to leave."""
    first = find_first(result)
    if first is None or first.code == EXIT_LEFT:
        return None
    failed = [outcome for outcome in result.outcomes.values() if outcome.code not in (0, EXIT_LEFT)]
    codes = (code for outcome in failed for code in (outcome.told.error, outcome.told.cause))
    recurring = AccountError.code if result.excess else next((code for code in codes if code in RECURRING), "")
    ways = frozenset(_describe_way(result, each) for each in failed if _fails_itself(result, each, first))
    lost = next((outcome.told.lost for outcome in (first, *failed) if outcome.told.lost), "")
    return Failure(first.worker, describe(result, first), recurring, ways, result.trained, result.saved, lost)


def _fails_itself(result: Result, outcome: Outcome, first: Outcome) -> bool:
    """Whether a worker has failed for a reason of its own: the launcher did not end it, and it missed no other one."""
    by_signal = outcome.code < 0 and outcome is not first and outcome.worker not in result.frozen
    return not by_signal and outcome.told.error not in _AWAY


def _describe_way(result: Result, outcome: Outcome) -> str:
    return f"{outcome.worker}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', describe(result, outcome))}"


def find_first(result: Result) -> Outcome | None:
    """How the worker ended that failed first; of one that left, where none failed; None where all ended well.

    Where the first that ended says that another one has failed before it, that one failed first.
    """
    if result.culprit is None:
        return None
    word = last_word(result.outcomes[result.culprit].err)
    failed = [name for name, outcome in result.outcomes.items() if outcome.code > 0 and outcome.code != EXIT_LEFT]
    named = (name for name in failed if word.startswith(f"{RemoteFailureError.code} worker '{name}' failed: "))
    return result.outcomes[next(named, result.culprit)]


def describe(result: Result, outcome: Outcome) -> str:
    """How a worker ended, in words."""
    if outcome.worker in result.frozen:
        return "it was frozen, and was killed"
    if outcome.code < 0 and result.excess:
        return f"it was killed: {result.excess}"
    if outcome.code < 0:
        known = -outcome.code in list(signal.Signals)
        return f"ended by {signal.Signals(-outcome.code).name if known else f'signal {-outcome.code}'}"
    word = last_word(outcome.err)
    return f"exit code {outcome.code}" + (f": {word}" if word else "")


def _list_recurring(kind: type[NebulaError]) -> Iterator[str]:
    if kind.recurs:
        yield kind.code
    for each in kind.__subclasses__():
        yield from _list_recurring(each)


RECURRING = frozenset(_list_recurring(NebulaError))
"""The codes of errors that come again when the same script is started again."""
_AWAY = frozenset(
    kind.code for kind in (LinkClosedError, DeadlineError, PeerRestartedError, EpochOverError, StaleWorkerError)
)
