"""`whale-nebula run`: start a script as the workers of a cluster, or of all clusters, and be there until they end."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from whale_nebula.cli import exits
from whale_nebula.cli.ending import ended
from whale_nebula.cli.intent import Intent
from whale_nebula.cli.signals import Asking, attended
from whale_nebula.cli.telling import remark, tell
from whale_nebula.cli.words import Parser
from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError, NebulaError
from whale_nebula.launch import gateways
from whale_nebula.launch.hosts import is_local, listening, settled
from whale_nebula.launch.identity import SecurityFiles
from whale_nebula.launch.picture import Board
from whale_nebula.launch.placed import Output, identities, run_name, start_placed
from whale_nebula.launch.relay import Sink
from whale_nebula.launch.resolve import PORT, Asked, Placement, Resolved, cluster_of, everything, resolve
from whale_nebula.report.screen import Screen, terminal

_DESCRIPTION = """\
Run a script as the workers of this host: one process for each, which join those of the other clusters.

Who they are and where the others listen is said by the config, or by what started this command: TF_CONFIG, Slurm, or
the variables of a Kubernetes JobSet. With --all every worker of every cluster is started on this machine, joined over
mutual TLS with certificates that live as long as the run.

What workers write comes out as it is, a line at a time; on a terminal each line begins with the worker's name. The
first SIGTERM, SIGINT or SIGHUP lets them leave between two steps, the second one ends them at once. When a worker fails
the others are ended, too; none is ever left behind."""

_EPILOG = """\
examples:
  whale-nebula run --all --clusters gpu,npu train.py             both clusters on this machine
  whale-nebula run --all --config clusters.yaml train.py         all clusters of a config on this machine
  whale-nebula run --config clusters.yaml --cluster gpu train.py            in site one
  whale-nebula run --config clusters.yaml --cluster npu train.py --lr 0.1   in site two
  whale-nebula run --config clusters.yaml --cluster gpu --worker 1 train.py one worker of several
  srun whale-nebula run --config clusters.yaml --cluster gpu train.py       in a Slurm job
  whale-nebula run --explain --config clusters.yaml --cluster gpu           who says where workers are
  whale-nebula run --dry-run --json --all --config clusters.yaml train.py   what would be started

Our options stand before the script; all that follows it is the script's.

exit status:
  0    every worker ended well             75   they were asked to end, and left between two steps
  2    the command line is wrong           78   config, environment or certificates are wrong
  66   there is no such script             130, 143, 129  ended at once by a second signal
  else that of the worker that failed first; 128 + n where a signal ended it (137: killed, or frozen)"""

_FLAGS = {
    "--all": "start every worker of every cluster on this machine",
    "--explain": "say who knows where the workers are, and why others do not; start nothing",
    "--dry-run": "say what would be started, and start nothing",
    "--json": "print one JSON object: the answer, or after a run how it ended, as the last line",
}
_VALUED = {
    "--config": ("FILE", "clusters.yaml"),
    "--cluster": ("NAME", "the cluster that this host is in"),
    "--worker": ("N", "the worker of the cluster that this is, from 0"),
    "--clusters": ("A,B", "with --all and without a config: the clusters that the script's stages name"),
    "--port": ("PORT", f"under Slurm and JobSet: where workers listen, {PORT} unless given"),
}


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="whale-nebula run", description=_DESCRIPTION, epilog=_EPILOG)
    made.usage = "whale-nebula run [options] SCRIPT [arguments of the script]"
    made.options(_FLAGS, _VALUED)
    return made


def words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the script with its arguments.

    >>> words(["--config", "c.yaml", "--all", "train.py", "--all", "x"])
    (['--config', 'c.yaml', '--all'], ['train.py', '--all', 'x'])
    """
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        at += 2 if argv[at] in _VALUED else 1
    script = at + 1 if at < len(argv) and argv[at] == "--" else at
    return list(argv[:at]), list(argv[script:])


def main(argv: Sequence[str]) -> int:
    """Run the command; gives the exit status."""
    made = parser()
    options, script = words(argv)
    given = made.read(options)
    _check(made, given, script)
    if script and not os.path.isfile(script[0]):
        what = f"there is no script {script[0]!r}"
        tell(ConfigError(what, mend="whale-nebula run [options] path/to/train.py"), as_json=given.json)
        return exits.NO_FILE
    try:
        return _run(given, script)
    except NebulaError as error:
        tell(error, as_json=given.json)
        return exits.CONFIG


def _check(made: Parser, given: argparse.Namespace, script: Sequence[str]) -> None:
    if not script and not given.explain:
        made.refuse("which script? whale-nebula run [options] train.py")
    if given.all and (given.cluster is not None or given.worker is not None):
        made.refuse("--all starts all workers of all clusters: it goes without --cluster and --worker")
    if given.clusters is not None and (not given.all or given.config is not None):
        made.refuse("--clusters goes with --all, and stands for a config: --all --clusters gpu,npu")
    for name, text in (("--worker", given.worker), ("--port", given.port)):
        if text is not None and not (text.isdecimal() and int(text) < 65536):
            made.refuse(f"{name} takes a number, and {text!r} is none")


def _run(given: argparse.Namespace, script: Sequence[str]) -> int:
    written = config = load(given.config)
    config = gateways.at_hand(config, is_local) if given.all else config
    found = _placed(given, config)
    if given.explain:
        print(Intent.explained(found) if given.json else found.explained())
        return exits.DONE
    _agrees(given, written, config, found.placement)
    if given.dry_run:
        intent = Intent(found, config, given.config, script, everywhere=given.all)
        print(intent.to_json() if given.json else intent.to_text())
        return exits.DONE
    if config.security.insecure:
        remark(f"insecure: true in {given.config}: links are not encrypted, and nobody proves who he is")
    asking = Asking(config.patience)
    with attended(asking), _secured(given, config, found.placement) as security:
        return _start(given, config, found.placement, security, script, asking)


def _agrees(given: argparse.Namespace, written: Config, config: Config, placement: Placement) -> None:
    """Whether what is told so far can be a run at all."""
    from whale_nebula.launch import secured

    secured.check_names(config, placement.addresses)
    if not given.all:
        gateways.check(config, cluster_of(placement.here[0]))
    elif gateways.names(written) and not gateways.names(config):
        remark("no gateway runs here, as not every cluster of the config names one")


def _placed(given: argparse.Namespace, config: Config) -> Resolved:
    if given.all:
        names = [name.strip() for name in (given.clusters or "").split(",") if name.strip()]
        return Resolved(settled(everything(config, names, is_local)), "--all", {})
    worker = None if given.worker is None else int(given.worker)
    found = resolve(config, os.environ, Asked(given.cluster, worker, int(given.port or PORT), is_local))
    return found._replace(placement=settled(found.placement))


@contextlib.contextmanager
def _secured(
    given: argparse.Namespace, config: Config, placement: Placement
) -> Iterator[Mapping[str, SecurityFiles]]:
    """The certificates of all workers of this host, looked at before anything starts."""
    from whale_nebula.launch import secured

    if given.all or len(placement.addresses) == 1:
        with secured.for_one_run(config, [*placement.here, *gateways.names(config)]) as made:
            yield made
    else:
        files = secured.configured(config, placement.here, given.config)
        secured.check(files, run_name(config))
        yield files


def _start(
    given: argparse.Namespace,
    config: Config,
    placement: Placement,
    security: Mapping[str, SecurityFiles],
    script: Sequence[str],
    asking: Asking,
) -> int:
    listen = _listen(config, placement)
    workers = identities(placement, config, security, listen=listen, path=given.config, everywhere=given.all)
    sys.stdout.flush()
    argv = ["-m", "whale_nebula.launch.child", *script]
    with contextlib.ExitStack() as others:
        output = others.enter_context(_output())
        if given.all:
            others.enter_context(gateways.running(config, placement, security))
            _tell_of_gateways(gateways.names(config))
        job = others.enter_context(start_placed(argv, workers, output=output, notice=remark))
        asking.job = job
        result = job.wait(float("inf"), patience=config.patience)
    return ended(result, asking, as_json=given.json)


@contextlib.contextmanager
def _output() -> Iterator[Output]:
    """Where workers write to. On a terminal their lines bear names, and below them there is room for a table."""
    named = frozenset(name for name, stream in (("out", sys.stdout), ("err", sys.stderr)) if stream.isatty())
    stream = terminal()
    if stream is None:
        yield Output()
        return
    screen = Screen(stream)
    screen.open()
    try:
        sinks = {name: Sink(fd, screen if name in named else None) for name, fd in (("out", 1), ("err", 2))}
        yield Output(sinks, named, Board(stream.fileno(), screen))
    finally:
        screen.close()


def _tell_of_gateways(names: Sequence[str]) -> None:
    """Say what is not as it is between hosts."""
    if names:
        remark(f"{' and '.join(names)} run here, too; their audit logs go with the run (between hosts they stay)")


def _listen(config: Config, placement: Placement) -> dict[str, str]:
    """Where the workers listen. Only who asks for certificates may listen more widely than the config says."""
    own = config.clusters.get(cluster_of(placement.here[0]))
    found = listening(placement, written=own is not None and bool(own.workers))
    for worker, listen in found.items():
        address = placement.addresses[worker]
        if listen != address and config.security.insecure:
            raise ConfigError(
                f"{address} is no address of this host, so worker {worker} cannot listen there",
                why="it would listen everywhere, and with insecure: true to everybody",
                mend="start it on its own host, or use certificates: leave out security.insecure",
            )
        if listen != address:
            remark(f"{address} is no address of this host: worker {worker} listens at {listen}")
    return found
