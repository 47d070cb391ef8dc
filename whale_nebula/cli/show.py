"""`whale-nebula show`: print the plan of a script's step before anything is trained."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whale_nebula.cli import arguments as exits
from whale_nebula.cli.arguments import Options, Parser, Words, misspelt, remark, split, tell
from whale_nebula.config import load, parse_links
from whale_nebula.errors import ConfigError, NebulaError, OptionError, PlanError, StateError

if TYPE_CHECKING:
    from whale_nebula.cli.show_script import Ending, Onlooker
    from whale_nebula.plan.plan import Plan


PLANS = "whale_nebula shown plans 1"

_DESCRIPTION = """\
Show the plan of a script: its stages (ops, parameters, FLOPs, activations, memory), the boundaries between them and
what crosses the line, tied variables and their price, and the schedule, drawn.

The script runs as "python script.py" would, up to its first step with scopes: model.fit, evaluate, predict,
train_on_batch, or a call of an nb.function. That step is captured and planned, the plan is printed, and the script
ends there: nothing is trained, and callbacks of fit are not called. What the script prints goes to stderr."""

_EPILOG = """\
examples:
  whale-nebula show train.py                          the plan as text
  whale-nebula show train.py --epochs 3 --lr 0.1      arguments that are not ours go to the script
  whale-nebula show train.py --html plan.html         a page to move about in: one file, no network
  whale-nebula show train.py --links 10mbit,40ms      what would it be over another line?
  whale-nebula show train.py --json | jq .links       for other programs
  whale-nebula show train.py --save plan.json         to keep: nb.init(plan="plan.json") then holds runs to it
  whale-nebula show plan.json                         a plan that was saved
  whale-nebula show train.py --steps 2                a GAN's two steps, or training and validation
  whale-nebula show train.py --after fold             what a pass has found: what each value is to the batch
  whale-nebula show train.py -- --json                after "--" everything is the script's

Our options may stand before the script or after it. With --steps or --all a step is answered with zeros and the
script goes on to the next one; it is ended when it is about to save a model.

exit status:
  0   the plan was shown                   65  the file holds no plan, or no report
  1   the script failed before its step    66  there is no such file
  2   the command line is wrong            78  the config is wrong
  3   the script made no step with scopes  130 interrupted"""

_OPTIONS: Options = {
    "--text": (None, "print the plan as text (so it is unless you say otherwise)"),
    "--json": (None, "print one JSON object: all numbers of the plan, but not its program"),
    "--mermaid": (None, "print a Mermaid flowchart, which many places that show Markdown draw"),
    "--all": (None, "plan every step that differs, until the script ends"),
    "--html": ("FILE", "write the plan as one HTML file that needs nothing else"),
    "--save": ("FILE", "write the plan as Plan.save does: with its program, to be loaded, pinned and compared"),
    "--config": ("FILE", "clusters.yaml, instead of what the script gives nb.init"),
    "--links": ("LINE", "the line between all clusters, such as 60mbit,20ms, instead of what the script gives nb.init"),
    "--steps": ("N", "plan the first N steps that differ"),
    "--after": (
        "PASS",
        "print the program as a pass of the compiler leaves it: capture, in-flight, fold, phases, merges, order, cut",
    ),
    "--report": ("FILE", "show a saved report, or a file of metrics: predicted beside measured"),
}


def parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula show [options] SCRIPT [arguments of the script] | PLAN.json | --report FILE"
    return Parser("show", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    made = parser()
    words = split(argv, _OPTIONS)
    for word, meant in misspelt(argv, words, made.names):
        remark(f"{word} was handed to the script; did you mean {meant}? (What is the script's may stand behind --.)")
    given = made.read(words.options)
    _check(made, given, words)
    try:
        if given.report is None:
            return _show(given, words)
        if not os.path.exists(given.report):
            return _no_file(given.report, given.json, _NO_REPORT)
        from whale_nebula.cli.show_script import show_report

        return show_report(given.report, as_json=given.json)
    except ConfigError as error:
        return tell(error, as_json=given.json, code=exits.CONFIG)
    except OptionError as error:
        made.error(f"--after: {error.what}; {error.mend}")
    except (PlanError, StateError) as error:
        return tell(error, as_json=given.json, code=exits.NO_DATA)


def _check(made: Parser, given: argparse.Namespace, words: Words) -> None:
    if sum([given.json, given.mermaid, given.text, given.after is not None]) > 1:
        made.error("--text, --json, --mermaid and --after print one thing in different ways: choose one")
    if given.report is None and words.script is None:
        made.error("which script? whale-nebula show train.py")
    if given.report is not None and (words.script is not None or given.mermaid or given.html or given.save):
        made.error("--report shows a file that a run left: it goes with --json, and with nothing else")
    if given.steps is not None and (given.all or not given.steps.isdigit() or int(given.steps) < 1):
        made.error("--steps takes a number from 1 up, and does not go with --all")


def _show(given: argparse.Namespace, words: Words) -> int:
    from whale_nebula.cli.show_script import Onlooker, check, run
    from whale_nebula.plan.plan import Plan

    path = words.script or ""
    if not os.path.isfile(path):
        return _no_file(path, given.json)
    if path.endswith(".json"):
        _print([Plan.load(path)], given)
        return exits.DONE
    check(path)
    onlooker = Onlooker(math.inf if given.all else int(given.steps or 1), given.config, given.links)
    if given.config is not None:  # what is wrong with it is said before a script runs for minutes
        load(given.config)
    if given.links is not None:
        parse_links(given.links)
    with contextlib.closing(onlooker):
        ending = run(path, words.arguments, onlooker)
    if onlooker.plans:
        if onlooker.ended:
            remark(f"{onlooker.ended}: it was ended here")
        _print(onlooker.plans, given)
        return exits.DONE
    return _nothing(path, ending, onlooker, given.json)


def _nothing(path: str, ending: Ending, onlooker: Onlooker, as_json: bool) -> int:
    """The script ended, and there is no plan."""
    if isinstance(ending.error, KeyboardInterrupt):
        return exits.INTERRUPTED
    if ending.error is not None or ending.status:
        _tell_failed(path, ending, as_json)
        return exits.FAILED
    what = f"{path} made no step with scopes, so there is nothing to show"
    why = onlooker.ended or "a step is model.fit, evaluate, predict, train_on_batch, or a call of an nb.function"
    mend = 'with nb.cluster(), nb.stage(cluster="gpu"): around the layers of each stage'
    return tell(PlanError(what, where=path, why=why, mend=mend), as_json=as_json, code=exits.NOTHING)


def _tell_failed(path: str, ending: Ending, as_json: bool) -> None:
    """Its traceback, or what it had to say, is on stderr already."""
    how = f"ended with status {ending.status}" if ending.error is None else f"raised {type(ending.error).__name__}"
    what = f"{path} {how} before its first step with scopes"
    if not as_json:
        remark(what)
    elif isinstance(ending.error, NebulaError):
        tell(ending.error, as_json=True)
    else:
        why = None if ending.error is None else str(ending.error)
        tell(PlanError(what, where=path, why=why, mend="stderr has what it said"), as_json=True)


def _no_file(path: str, as_json: bool, mend: str = "whale-nebula show path/to/train.py") -> int:
    kind = StateError if mend == _NO_REPORT else PlanError
    return tell(kind(f"there is no file {path!r}", mend=mend), as_json=as_json, code=exits.NO_FILE)


_NO_REPORT = (
    "whale-nebula show --report FILE reads what a run has left: "
    'nb.last_report().save("step.json"), or nb.init(metrics="run.jsonl")'
)


# ---------------------------------------------------------------------- what is printed
def _print(plans: Sequence[Plan], given: argparse.Namespace) -> None:
    for number, plan in enumerate(plans):
        if given.html is not None:
            path, text = _numbered_path(given.html, number), plan.to_html()
            try:
                Path(path).write_text(text, "utf-8")
            except OSError as error:
                raise PlanError(f"{path} cannot be written", why=error.strerror, mend="--html plan.html") from None
            remark(f"wrote {path} ({len(text.encode()) / 1024:.0f} KiB)")
        if given.save is not None:
            plan.save(_numbered_path(given.save, number))
            remark(f"saved {_numbered_path(given.save, number)}")
    silent = given.html is not None or given.save is not None
    if given.json and (given.all or int(given.steps or 1) > 1):
        print(json.dumps({"format": PLANS, "plans": [json.loads(plan.to_json()) for plan in plans]}, indent=1))
    elif given.json:
        print(plans[0].to_json())
    elif given.after is not None:
        print("\n\n".join(plan.text_after(given.after) for plan in plans))
    elif given.mermaid:
        print("\n".join(plan.to_mermaid() for plan in plans))
    elif given.text or not silent:
        print("\n\n".join(plan.to_text() for plan in plans))


def _numbered_path(path: str, number: int) -> str:
    """The file of one of several plans: plan.html, plan-2.html ...

    >>> _numbered_path("out/plan.html", 0), _numbered_path("out/plan.html", 1)
    ('out/plan.html', 'out/plan-2.html')
    """
    stem, dot = os.path.splitext(path)
    return f"{stem}-{number + 1}{dot}" if number else path
