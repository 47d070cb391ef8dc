"""How a run ended, in one line and a number."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

from whale_nebula.cli import exits
from whale_nebula.cli.signals import Asking
from whale_nebula.cli.telling import remark
from whale_nebula.launch import Outcome, Result
from whale_nebula.launch.relay import last_sentence, last_word


def ended(result: Result, asking: Asking, *, as_json: bool) -> int:
    """Say how a run ended, if it did not end well; gives the exit status."""
    code, worker, why = _ending(result, asking)
    if as_json:
        codes = {name: exits.shown(each) for name, each in result.codes.items()}
        print(json.dumps({"code": code, "worker": worker, "why": why, "codes": codes}), flush=True)
    elif worker is not None:
        for line in _others(result, worker):
            remark(line)
        remark(f"worker {worker} {_with_mend(why, result.outcomes[worker].err)}")
    elif why:
        remark(why)
    return code


def _others(result: Result, first: str) -> Iterator[str]:
    """Who failed after the first: the last word of each, but of those that the launcher ended."""
    for name, outcome in result.outcomes.items():
        if name != first and outcome.code not in (0, exits.LEFT) and (outcome.code > 0 or name in result.frozen):
            yield f"worker {name} failed, too: {_how(result, outcome)}"


def _with_mend(why: str, errors: str) -> str:
    """The last that is said is our error as a whole: tracebacks may lie between it and the reader."""
    word = last_word(errors)
    return why.removesuffix(word) + last_sentence(errors) if word and why.endswith(word) else why


def _ending(result: Result, asking: Asking) -> tuple[int, str | None, str]:
    if asking.second is not None:
        return exits.SIGNALLED + asking.second, None, "the workers were killed"
    if result.late:
        left = [name for name, code in result.codes.items() if code == -signal.SIGKILL]
        return exits.shown(-signal.SIGKILL), None, f"did not leave in time, and were killed: {', '.join(left)}"
    if result.culprit is None:
        return exits.DONE, None, ""
    outcome = result.outcomes[result.culprit]
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
