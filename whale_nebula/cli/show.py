"""`whale-nebula show`: print the plan of a script's step before anything is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from whale_nebula.cli import arguments as exits
from whale_nebula.cli.arguments import Codes, Options, Parser, Words, answer, read_script
from whale_nebula.errors import ConfigError, OptionError, PlanError, StateError

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
CODES: Codes = {
    ConfigError: exits.CONFIG,
    OptionError: exits.USAGE,
    PlanError: exits.NO_DATA,
    StateError: exits.NO_DATA,
}


def parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula show [options] SCRIPT [arguments of the script] | PLAN.json | --report FILE"
    return Parser("show", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = parser()
    given, words = read_script(made, argv, _OPTIONS)
    _check(made, given, words)
    from whale_nebula.cli.show_script import show_report, show_script  # plans and reports are not needed for --help

    if given.report is not None:
        return answer(given, lambda: show_report(given.report, as_json=given.json), CODES)
    return answer(given, lambda: show_script(given, words), CODES)


def _check(made: Parser, given: argparse.Namespace, words: Words) -> None:
    if sum([given.json, given.mermaid, given.text, given.after is not None]) > 1:
        made.error("--text, --json, --mermaid and --after print one thing in different ways: choose one")
    if given.report is None and words.script is None:
        made.error("which script? whale-nebula show train.py")
    if given.report is not None and (words.script is not None or given.mermaid or given.html or given.save):
        made.error("--report shows a file that a run left: it goes with --json, and with nothing else")
    if given.steps is not None and (given.all or not given.steps.isdigit() or int(given.steps) < 1):
        made.error("--steps takes a number from 1 up, and does not go with --all")
