"""How a run ended, in one line and a number."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

from whale_nebula.cli import exits
from whale_nebula.cli.signals import Asking
from whale_nebula.cli.telling import remark
from whale_nebula.errors import RemoteFailureError
from whale_nebula.launch import Outcome, Result
from whale_nebula.launch.sentence import last_sentence, last_word, same_cause

_FAILED = RemoteFailureError.code


def ended(result: Result, asking: Asking, *, as_json: bool) -> int:
    """Say how a run ended, if it did not end well; gives the exit status."""
    code, worker, why = _ending(result, asking)
    for line in _others(result, worker):
        remark(line)
    if worker is not None:
        remark(f"worker {worker} {_with_mend(why, result.outcomes[worker].err)}")
    elif why and not as_json:
        remark(why)
    if as_json:
        codes = {name: exits.shown(each) for name, each in result.codes.items()}
        print(json.dumps({"code": code, "worker": worker, "why": why, "codes": codes}), flush=True)
    return code


def _others(result: Result, first: str | None) -> Iterator[str]:
    """Who failed besides the first: what each has said, but of those that the launcher ended.

    Most only say that the first one failed; they need not say it again.
    """
    cause = "" if first is None else result.outcomes[first].err
    for name, outcome in result.outcomes.items():
        if name == first or outcome.code in (0, exits.LEFT) or (outcome.code < 0 and name not in result.frozen):
            continue
        how = _how(result, outcome)
        same = outcome.code > 0 and same_cause(cause, outcome.err)
        said = f"exit code {outcome.code}, for the same reason" if same else _with_mend(how, outcome.err)
        yield f"worker {name} failed{', too' if first is not None else ''}: {said}"


def _with_mend(why: str, errors: str) -> str:
    """Our error as a whole: tracebacks may lie between it and the reader."""
    word = last_word(errors)
    return why.removesuffix(word) + last_sentence(errors) if word and why.endswith(word) else why


def _first(result: Result, culprit: str) -> str:
    """Who failed first: where the first that ended says that another one has failed before it, that one."""
    word = last_word(result.outcomes[culprit].err)
    failed = [name for name, outcome in result.outcomes.items() if outcome.code > 0 and outcome.code != exits.LEFT]
    return next((name for name in failed if word.startswith(f"{_FAILED} worker '{name}' failed: ")), culprit)


def _ending(result: Result, asking: Asking) -> tuple[int, str | None, str]:
    if asking.second is not None:
        return exits.SIGNALLED + asking.second, None, "the workers were killed"
    if result.late:
        left = [name for name, code in result.codes.items() if code == -signal.SIGKILL]
        return exits.shown(-signal.SIGKILL), None, f"did not leave in time, and were killed: {', '.join(left)}"
    if result.culprit is None:
        return exits.DONE, None, ""
    outcome = result.outcomes[_first(result, result.culprit)]
    if outcome.code == exits.LEFT:
        return exits.LEFT, None, "the workers left, and can be started again"
    return exits.shown(outcome.code), outcome.worker, f"failed first: {_how(result, outcome)}"


def _how(result: Result, outcome: Outcome) -> str:
    if outcome.worker in result.frozen:
        return "it was frozen, and was killed"
    code = outcome.code
    how = f"exit code {code}" if code >= 0 else f"ended by {_name(-code)}"
    return f"{how}: {word}" if code >= 0 and (word := last_word(outcome.err)) else how


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
