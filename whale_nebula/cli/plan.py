"""`whale-nebula plan`: find the best plan for a script without scopes, and explain it."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.cli.arguments import Options, Parser, answer, read_script
from whale_nebula.cli.show import CODES
from whale_nebula.errors import ConfigError, OptionError

_DESCRIPTION = """\
Find the best plan for a script: which cluster runs which layers, in how many replicas, and into how many micro-batches
a batch is cut. The script needs no scopes: it is planned as if it called nb.auto_parallel() in its first line.

The script runs as "python script.py" would, up to its first step: model.fit, evaluate, predict, train_on_batch, or a
call of an nb.function. That step is planned, the chosen plan is printed with the next best ones and with what would
change them, and the script ends there: nothing is trained. What the script prints goes to stderr."""

_EPILOG = """\
examples:
  whale-nebula plan train.py --config clusters.yaml    the clusters, their workers, rates and memory, and the lines
  whale-nebula plan train.py --config clusters.yaml --epochs 3
                                                       arguments that are not ours go to the script
  whale-nebula plan train.py --links 10mbit,40ms       what would be best over another line?
  whale-nebula plan train.py --memory 16GiB            no worker may need more
  whale-nebula plan train.py --micro-batch 8           each batch in 8 micro-batches, also where dropout draws anew
  whale-nebula plan train.py --html plan.html          a page with the candidates, and seconds by the lines' rate
  whale-nebula plan train.py --json | jq .considered   the candidates for other programs

A config looks like this; "whale-nebula measure" finds the rates of a machine, which are guessed where nobody says them:
  clusters:
    gpu: {workers: ["10.0.0.1:7101", "10.0.0.2:7101"], flops: 60T, memory: 40GiB}
    npu: {workers: ["10.1.0.1:7101"], flops: 30T, memory: 32GiB}
  links:
    - {between: [gpu, npu], rate: 60mbit, delay: 20ms}

To train by that plan, call nb.auto_parallel() before the model is trained. A script that calls it itself is planned
within the limits that stand there, and within ours where it leaves them open. What scopes say holds, and what they
leave open is planned; whale-nebula show has a step as its scopes say.

exit status:
  0   the plan was shown                   66  there is no such file
  1   the script failed before its step    78  the config is wrong
  2   the command line is wrong            130 interrupted
  3   the script made no step"""

_OPTIONS: Options = {
    "--config": ("FILE", "clusters.yaml, instead of what the script gives nb.init"),
    "--links": ("LINE", "the line between all clusters, such as 60mbit,20ms, instead of what the script gives nb.init"),
    "--clusters": ("NAMES", "the clusters that may take part, such as gpu,npu; else all"),
    "--memory": ("SIZE", "what a worker may need, such as 16GiB"),
    "--micro-batch": ("N", "cut each batch into N micro-batches; else the planner chooses"),
    "--json": (None, "print one JSON object: all numbers of the plan, with the candidates as `considered`"),
    "--html": ("FILE", "write the plan as one HTML file that needs nothing else"),
    "--save": ("FILE", "write the plan as Plan.save does, to be loaded, pinned and compared"),
}


def parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula plan [options] SCRIPT [arguments of the script]"
    return Parser("plan", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    made = parser()
    given, words = read_script(made, argv, _OPTIONS)
    if words.script is None:
        made.error("which script? whale-nebula plan train.py")
    if words.script.endswith(".json"):
        made.error(f"{words.script} is no script: whale-nebula show {words.script} prints a plan that was saved")
    vars(given).update(text=False, mermaid=False, all=False, steps=None, after=None)
    from whale_nebula.cli.show_script import show_script  # not needed for --help
    from whale_nebula.scopes.auto import check_limits, standing_limits
    from whale_nebula.site import Site

    try:
        limits = check_limits(
            Site(words.script, 1),
            clusters=None if given.clusters is None else given.clusters.split(","),
            memory=given.memory,
            micro_batch=made.number("--micro-batch", given.micro_batch),
        )
    except (OptionError, ConfigError) as error:
        made.error(f"{error.what}; {error.mend}")
    with standing_limits(limits):
        return answer(given, lambda: show_script(given, words, "plan"), CODES)
