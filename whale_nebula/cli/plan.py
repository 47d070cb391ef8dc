"""`whale-nebula plan`: find the best plan for a script without scopes, and explain it."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.cli.arguments import Options, Parser, answer, read_script
from whale_nebula.cli.show import CODES
from whale_nebula.errors import ConfigError, OptionError

_DESCRIPTION = """\
Find the best plan for a script: which cluster runs which layers, with how many replicas and micro-batches. The script
needs no scopes: it is planned as if it called nb.auto_parallel() in its first line.

The script runs like "python script.py" until its first step: model.fit, evaluate, predict, train_on_batch, or a
call of an nb.function. That step is planned, the chosen plan is printed with the runners-up and with what would
change the choice, and the script is stopped: nothing is trained. Output of the script goes to stderr."""

_EPILOG = """\
examples:
  whale-nebula plan train.py --config clusters.yaml    clusters, workers, rates, memory and links from a config
  whale-nebula plan train.py --config clusters.yaml --epochs 3
                                                       unknown options are passed to the script
  whale-nebula plan train.py --links 10mbit,40ms       the best plan over another link
  whale-nebula plan train.py --memory 16GiB            limit the memory of each worker
  whale-nebula plan train.py --micro-batch 8           8 micro-batches, even if dropout then draws other numbers
  whale-nebula plan train.py --html plan.html          a page with the candidates, and step times by bandwidth
  whale-nebula plan train.py --json | jq .considered   the candidates for other programs

Example of a config; "whale-nebula measure" finds the rates of a machine, and missing rates are guessed:
  clusters:
    gpu: {workers: ["10.0.0.1:7101", "10.0.0.2:7101"], flops: 60T, memory: 40GiB}
    npu: {workers: ["10.1.0.1:7101"], flops: 30T, memory: 32GiB}
  links:
    - {between: [gpu, npu], rate: 60mbit, delay: 20ms}

To train with the plan, call nb.auto_parallel() in the script before the model is trained. If the script calls it
already, its limits apply, and options of this command fill in those that it leaves open. Scopes of the script are kept
and completed. whale-nebula show prints the plan of the scopes alone.

exit status:
  0   the plan was shown                   66  the file does not exist
  1   the script failed before its step    78  wrong config
  2   wrong command line                   130 interrupted
  3   the script ran no step"""

_OPTIONS: Options = {
    "--config": ("FILE", "clusters.yaml; overrides what the script passes to nb.init"),
    "--links": ("LINE", "the link between all clusters, such as 60mbit,20ms; overrides nb.init of the script"),
    "--clusters": ("NAMES", "the clusters that may take part, such as gpu,npu; default: all"),
    "--memory": ("SIZE", "memory limit of a worker, such as 16GiB"),
    "--micro-batch": ("N", "the number of micro-batches; default: the planner chooses"),
    "--json": (None, "print one JSON object with all numbers of the plan, and the candidates as `considered`"),
    "--html": ("FILE", "write the plan as one self-contained HTML file"),
    "--save": ("FILE", "write the plan like Plan.save, to load, pin and compare it"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    usage = "whale-nebula plan [options] SCRIPT [arguments of the script]"
    parser = Parser("plan", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)
    args, words = read_script(parser, argv, _OPTIONS)
    if words.script is None:
        parser.error("missing script: whale-nebula plan train.py")
    if words.script.endswith(".json"):
        parser.error(f"{words.script} is not a script: whale-nebula show {words.script} prints a saved plan")
    vars(args).update(text=False, mermaid=False, all=False, steps=None, after=None)
    from whale_nebula.cli.show_script import show_script  # not needed for --help
    from whale_nebula.scopes.auto import check_limits, use_base_limits
    from whale_nebula.site import Site

    try:
        limits = check_limits(
            Site(words.script, 1),
            clusters=None if args.clusters is None else args.clusters.split(","),
            memory=args.memory,
            micro_batch=parser.number("--micro-batch", args.micro_batch),
        )
    except (OptionError, ConfigError) as error:
        parser.error(f"{error.what}; {error.mend}")
    with use_base_limits(limits):
        return answer(args, lambda: show_script(args, words, "plan"), CODES)
