"""`whale-nebula show`: print the plan of a script's step before anything is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from whale_nebula.cli import arguments as exits
from whale_nebula.cli.arguments import Codes, Options, Parser, Words, answer, read_script
from whale_nebula.errors import ConfigError, OptionError, PlanError, StateError

_DESCRIPTION = """\
Show the plan of a script: its stages (ops, parameters, FLOPs, activations, memory), the boundaries between them with
their traffic, tied variables and their cost, and a drawing of the schedule.

The script runs like "python script.py" until its first step with scopes: model.fit, evaluate, predict,
train_on_batch, or a call of an nb.function. That step is captured and planned, the plan is printed, and the script
is stopped: nothing is trained, and callbacks of fit are not called. Output of the script goes to stderr."""

_EPILOG = """\
examples:
  whale-nebula show train.py                          the plan as text
  whale-nebula show train.py --epochs 3 --lr 0.1      unknown options are passed to the script
  whale-nebula show train.py --html plan.html         an interactive page in one file, usable offline
  whale-nebula show train.py --links 10mbit,40ms      the same plan over another link
  whale-nebula show train.py --json | jq .links       for other programs
  whale-nebula show train.py --save plan.json         save the plan; nb.init(plan="plan.json") then enforces it
  whale-nebula show plan.json                         show a saved plan
  whale-nebula show train.py --steps 2                the two steps of a GAN, or training and validation
  whale-nebula show train.py --after fold             the program after a compiler pass
  whale-nebula show train.py -- --json                everything after "--" is passed to the script

Options may come before or after the script. With --steps or --all, each step returns zeros and the script continues
to the next one; it is stopped when it tries to save a model.

exit status:
  0   the plan was shown                   65  the file contains no plan or report
  1   the script failed before its step    66  the file does not exist
  2   wrong command line                   78  wrong config
  3   the script ran no step with scopes   130 interrupted"""

_OPTIONS: Options = {
    "--text": (None, "print the plan as text (the default)"),
    "--json": (None, "print one JSON object with all numbers of the plan, without its program"),
    "--mermaid": (None, "print a Mermaid flowchart, which many Markdown viewers draw"),
    "--all": (None, "plan every distinct step until the script ends"),
    "--html": ("FILE", "write the plan as one self-contained HTML file"),
    "--save": ("FILE", "write the plan with its program, like Plan.save, to load, pin and compare it"),
    "--config": ("FILE", "clusters.yaml; overrides what the script passes to nb.init"),
    "--links": ("LINE", "the link between all clusters, such as 60mbit,20ms; overrides nb.init of the script"),
    "--steps": ("N", "plan the first N distinct steps"),
    "--after": (
        "PASS",
        "print the program after a compiler pass: capture, in-flight, fold, phases, merges, order, cut, layouts, "
        "exchange",
    ),
    "--report": ("FILE", "show a saved report or a metrics file: predicted and measured values"),
}
CODES: Codes = {
    ConfigError: exits.CONFIG,
    OptionError: exits.USAGE,
    PlanError: exits.NO_DATA,
    StateError: exits.NO_DATA,
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    usage = "whale-nebula show [options] SCRIPT [arguments of the script] | PLAN.json | --report FILE"
    parser = Parser("show", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)
    args, words = read_script(parser, argv, _OPTIONS)
    _check(parser, args, words)
    from whale_nebula.cli.show_script import show_report, show_script  # plans and reports are not needed for --help

    if args.report is not None:
        return answer(args, lambda: show_report(args.report, as_json=args.json), CODES)
    return answer(args, lambda: show_script(args, words), CODES)


def _check(parser: Parser, args: argparse.Namespace, words: Words) -> None:
    if sum([args.json, args.mermaid, args.text, args.after is not None]) > 1:
        parser.error("--text, --json, --mermaid and --after cannot be combined: choose one")
    if args.report is None and words.script is None:
        parser.error("missing script: whale-nebula show train.py")
    if args.report is not None and (words.script is not None or args.mermaid or args.html or args.save):
        parser.error("--report shows a file of a run, and can be combined only with --json")
    if args.steps is not None and (args.all or not args.steps.isdecimal() or int(args.steps) < 1):
        parser.error("--steps needs a number of at least 1, and cannot be combined with --all")
