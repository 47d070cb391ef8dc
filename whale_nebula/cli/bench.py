"""`whale-nebula bench link`: measure the line between two clusters as a run would use it. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whale_nebula.cli import exits
from whale_nebula.cli.telling import remark, tell
from whale_nebula.cli.words import Parser
from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError, CredentialsError, NebulaError, TransportError
from whale_nebula.errors.suggestions import did_you_mean

if TYPE_CHECKING:
    from whale_nebula.launch.line import LineFound

_DESCRIPTION = """\
Measure the line between clusters over what a run uses: the first worker of each cluster, gRPC, mutual TLS, and the
gateways if the config has them. Start it in every cluster at about the same time, each with its own --cluster; no run
may go on meanwhile. It takes about eight times --seconds for each pair of clusters.

What was found is compared with the config's links, and kept in the folder line/ beside the config for doctor."""

_EPILOG = """\
examples:
  whale-nebula bench link --config clusters.yaml --cluster gpu      in site one
  whale-nebula bench link --config clusters.yaml --cluster npu      in site two
  whale-nebula bench link --config clusters.yaml --cluster gpu --to npu --seconds 10
  whale-nebula bench link --all --clusters gpu,npu                  both ends here: what this machine can carry

exit status:
  0   it was measured
  1   the other end did not come within the config's patience, or went
  2   the command line is wrong
  78  config or certificates are wrong"""

_SECONDS = 4.0
_OPTIONS: dict[str, tuple[str | None, str]] = {
    "--config": ("FILE", "clusters.yaml"),
    "--cluster": ("NAME", "the cluster that this host is in"),
    "--to": ("NAME", "the other cluster; all others, one after the other, if it is not given"),
    "--seconds": ("S", f"about how long each burst of tensors takes: {_SECONDS:g} if it is not given"),
    "--all": (None, "both ends on this machine, as two processes, with certificates that live as long"),
    "--clusters": ("A,B", "with --all and without a config: names for the two ends"),
    "--json": (None, "print one JSON object"),
}


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="whale-nebula bench", description=_DESCRIPTION, epilog=_EPILOG)
    made.usage = "whale-nebula bench link --config FILE --cluster NAME [options]"
    for name, (value, text) in _OPTIONS.items():
        made.option(name, text, value)
    made.add_argument("--told", action="store_true", help=argparse.SUPPRESS)  # by --all, over its standard input
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    made = parser()
    words = list(argv)
    if not words or words[0].startswith("-"):
        made.read(words)
        made.refuse("what? whale-nebula bench link")
    if words[0] != "link":
        made.refuse(f"there is no bench {words[0]!r}: {did_you_mean(words[0], ['link'])}")
    given = made.read(words[1:])
    _check(made, given)
    try:
        return _run(given)
    except NebulaError as error:
        tell(error, as_json=given.json)
        return exits.CONFIG if isinstance(error, ConfigError | CredentialsError) else exits.FAILED


def _check(made: Parser, given: argparse.Namespace) -> None:
    if given.told:
        return
    if given.all and (given.cluster is not None or given.to is not None):
        made.refuse("--all measures on this machine: it goes without --cluster and --to")
    if given.clusters is not None and (not given.all or given.config is not None):
        made.refuse("--clusters goes with --all, and stands for a config: --all --clusters gpu,npu")
    if not given.all and (given.config is None or given.cluster is None):
        made.refuse("which line? --config clusters.yaml --cluster gpu")
    try:
        if not 0 < float(given.seconds or _SECONDS) <= 600:
            raise ValueError
    except ValueError:
        made.refuse(f"--seconds takes a number above 0, up to 600, and {given.seconds!r} is none")


def _run(given: argparse.Namespace) -> int:
    from whale_nebula.cli import bench_ends

    if given.told:
        return bench_ends.be_told()
    config, seconds = load(given.config), float(given.seconds or _SECONDS)
    if config.security.insecure:
        remark(f"insecure: true in {given.config}: nothing is encrypted, as in a run, and nobody proves who he is")
    if given.all:
        names = [name.strip() for name in (given.clusters or "").split(",") if name.strip()]
        found = bench_ends.both_here(config, names, seconds)
        print(_json(found, None) if given.json else "\n\n".join(map(_text_here, found)))
        return exits.DONE
    found = []
    for each in bench_ends.this_end(config, given.config, given.cluster, given.to, seconds):
        found.append(each)
        _keep(each, given.config)
        if not given.json:
            print("\n" + _text(each, config), flush=True)
    if given.json:
        print(_json(found, config))
    return exits.DONE


def _keep(found: LineFound, config: str) -> None:
    """For `doctor`. That there is no place for it is no reason to throw it away."""
    from whale_nebula.launch.line.found import path_of, save

    path = path_of(config, *found.clusters)
    try:
        save(found, path)
    except TransportError as error:
        remark(f"{error.what} in {error.where}: {error.why}")
    else:
        remark(f"kept in {os.path.relpath(path)}")


# ---------------------------------------------------------------------- what is said of it
def _json(found: Sequence[LineFound], config: Config | None) -> str:
    from whale_nebula.launch.line.advice import advise

    lines = []
    for each in found:
        advice = None if config is None else advise(each, config.links.between(*each.clusters))._asdict()
        lines.append({**each.document(), "config": advice})
    return json.dumps({"lines": lines}, indent=1)


def _text_here(found: LineFound) -> str:
    from whale_nebula.launch.line.shown import table

    why = "both ends are on this machine: this is what it can carry, and no line to write in a config"
    return "\n".join([table(found), f"  {why}"])


def _text(found: LineFound, config: Config) -> str:
    from whale_nebula.launch.line.advice import advise, lopsided
    from whale_nebula.launch.line.shown import table

    advice = advise(found, config.links.between(*found.clusters))
    said = [advice.why, advice.write and f"write: {advice.write}", lopsided(found)]
    return "\n".join([table(found), *(f"  {each}" for each in said if each)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
