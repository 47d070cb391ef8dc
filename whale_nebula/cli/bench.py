"""`whale-nebula bench link`: measure the link between two clusters as a run would use it. Needs no TensorFlow."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Codes, Options, Parser, answer, remark
from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError, CredentialsError, TransportError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.launch import attach, gateways
from whale_nebula.launch.link_advice import LinkMeasurement, advise, find_measurement_path, save_measurement
from whale_nebula.launch.link_measurement import format_table, list_far_ends, measure_links
from whale_nebula.launch.placement import Placement, PlacementRequest, assign_ports, is_local, place_all_workers
from whale_nebula.launch.resolve import resolve
from whale_nebula.launch.worker_processes import EchoedOutput, create_identities, start_workers
from whale_nebula.security import Credentials, Identity
from whale_nebula.transport.grpc.links import Place

_DESCRIPTION = """\
Measure the link between clusters the way a run uses it: between the first workers of the clusters, over gRPC and mutual
TLS, through the gateways of the config. Start the command in every cluster at about the same time, each with its own
--cluster, while no run is active. Each pair of clusters takes about eight times --seconds.

The result is compared with the config's links, and stored in the folder line/ next to the config for doctor."""

_EPILOG = """\
examples:
  whale-nebula bench link --config clusters.yaml --cluster gpu      at the first site
  whale-nebula bench link --config clusters.yaml --cluster npu      at the second site
  whale-nebula bench link --config clusters.yaml --cluster gpu --to npu --seconds 10
  whale-nebula bench link --all --clusters gpu,npu                  both ends here: the limit of this machine

exit status:
  0   measured
  1   the other end did not connect in time, or disconnected
  2   wrong command line
  78  wrong config or certificates"""

_SECONDS = 4.0
CODES: Codes = {ConfigError: arguments.CONFIG, CredentialsError: arguments.CONFIG}
_OPTIONS: Options = {
    "--config": ("FILE", "clusters.yaml"),
    "--cluster": ("NAME", "the cluster of this host"),
    "--to": ("NAME", "the other cluster; default: all others, one after the other"),
    "--seconds": ("S", f"approximate duration of each burst of tensors; default: {_SECONDS:g}"),
    "--all": (None, "run both ends on this machine, as two processes, with temporary certificates"),
    "--clusters": ("A,B", "with --all and without a config: names of the two ends"),
    "--json": (None, "print one JSON object"),
    "--attached": (None, argparse.SUPPRESS),  # for the ends that --all starts
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    usage = "whale-nebula bench link --config FILE --cluster NAME [options]"
    parser = Parser("bench", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)
    words = list(argv)
    if not words or words[0].startswith("-"):
        parser.read(words)
        parser.error("missing command: whale-nebula bench link")
    if words[0] != "link":
        parser.error(f"unknown command {words[0]!r}: {did_you_mean(words[0], ['link'])}")
    args = parser.read(words[1:])
    if not args.attached:
        _check(parser, args)
    return answer(args, lambda: _run_end(float(args.seconds)) if args.attached else _run(args), CODES)


def _check(parser: Parser, args: argparse.Namespace) -> None:
    if args.all and (args.cluster is not None or args.to is not None):
        parser.error("--all measures on this machine, and cannot be combined with --cluster or --to")
    if args.clusters is not None and (not args.all or args.config is not None):
        parser.error("--clusters needs --all and replaces --config: --all --clusters gpu,npu")
    if not args.all and (args.config is None or args.cluster is None):
        parser.error("missing config or cluster: --config clusters.yaml --cluster gpu")
    try:
        if not 0 < float(args.seconds or _SECONDS) <= 600:
            raise ValueError
    except ValueError:
        parser.error(f"--seconds needs a number greater than 0 and at most 600, not {args.seconds!r}")


def _run(args: argparse.Namespace) -> int:
    config, seconds = load(args.config), float(args.seconds or _SECONDS)
    if config.security.insecure:
        remark(f"insecure: true in {args.config}: connections are neither encrypted nor authenticated, as in a run")
    if args.all:
        names = [name.strip() for name in (args.clusters or "").split(",") if name.strip()]
        found = measure_on_this_machine(config, names, seconds)
        why = "both ends are on this machine: this is its own limit, not the rate of a link"
        print(_to_json(found, None) if args.json else "\n\n".join(f"{format_table(each)}\n  {why}" for each in found))
        return arguments.DONE
    found, place = [], find_place(config, args.config, args.cluster, args.to)
    addresses = ", ".join(f"{there} at {place.gateway or where}" for there, where in place.peers.items())
    remark(f"{place.here} measures the link to {addresses}; start the command there, too")
    for each in measure_links(place, seconds=seconds, patience=config.patience, report=remark):
        found.append(each)
        path = find_measurement_path(args.config, *each.clusters)
        try:
            save_measurement(each, path)  # for `doctor`
        except TransportError as error:  # the measurement is valid nevertheless
            remark(f"{error.what} in {error.where}: {error.why}")
        else:
            remark(f"saved in {os.path.relpath(path)}")
        if not args.json:
            print("\n" + _to_text(each, config), flush=True)
    if args.json:
        print(_to_json(found, config))
    return arguments.DONE


# ---------------------------------------------------------------------- places and results
def _to_json(found: Sequence[LinkMeasurement], config: Config | None) -> str:
    lines = []
    for each in found:
        advice = None if config is None else advise(each, config.links.between(*each.clusters))._asdict()
        lines.append({**each.document(), "config": advice})
    return json.dumps({"lines": lines}, indent=1)


def _to_text(found: LinkMeasurement, config: Config) -> str:
    advice = advise(found, config.links.between(*found.clusters))
    lines = [advice.why, advice.write and f"write: {advice.write}"]
    return "\n".join([format_table(found), *(f"  {each}" for each in lines if each)])


_HERE_PATIENCE = 60.0
_COMMAND = ("-m", "whale_nebula.cli.main", "bench", "link", "--attached")


def find_place(config: Config, path: str, cluster: str, to: str | None) -> Place:
    """The place from which the first worker of a cluster measures its links: to the cluster `to`, or to all others."""
    placement = resolve(config, os.environ, PlacementRequest(cluster, 0, is_local=is_local)).placement
    here, gateway = f"{cluster}/0", config.clusters[cluster].gateway if cluster in config.clusters else None
    peers = {there: placement.addresses[there] for there in list_far_ends(list(placement.addresses), cluster, to)}
    if not peers:
        clusters = [name for name in placement.clusters if name != cluster]
        mend = f"--to: {did_you_mean(to, clusters)}" if to and clusters else "clusters: {gpu: ..., npu: ...}"
        raise ConfigError(
            "the link has no other end", where=path, why=f"no other cluster than {cluster} has workers", mend=mend
        )
    gateways.check_gateways(config, cluster)
    files = gateways.configured_files(config, [here], path).get(here)
    credentials = None if files is None else Credentials.load(files)
    if credentials is not None:
        credentials.check_identity(Identity.of_worker(config.run_name, here))
    alone, everyone = Placement((here,), placement.addresses), tuple(placement.addresses)
    # With a gateway both ends dial.
    listen = None if gateway else gateways.choose_listen_addresses(config, alone, remark)[here]
    return Place(config.run_name, here, peers, listen, gateway, credentials, all_workers=everyone)


# ---------------------------------------------------------------------- both ends on this machine
def measure_on_this_machine(config: Config, clusters: Sequence[str], seconds: float) -> list[LinkMeasurement]:
    """Start a process for each cluster of the config, or for `clusters`, and measure the link of each pair."""
    known = list(config.clusters) or list(clusters)
    if len(known) < 2:
        why, mend = "a link connects two clusters", "bench link --all --clusters gpu,npu"
        raise ConfigError(f"{len(known) or 'no'} cluster is named", why=why, mend=mend)
    workers = tuple(f"{cluster}/0" for cluster in known)
    complete = place_all_workers(config, clusters, is_local)
    placement = assign_ports(Placement(workers, {each: complete.addresses[each] for each in workers}))
    limit = _HERE_PATIENCE + len(workers) ** 2 * (30 * seconds + 10)
    with gateways.issue_for_run(config, workers) as files:
        ends = create_identities(placement, config, files, gateways=False, has_one_launcher=True)
        with start_workers([*_COMMAND, "--seconds", f"{seconds}"], ends, output=EchoedOutput(echo=_echo)) as job:
            result = job.wait(limit).check()
    lines = [
        LinkMeasurement.from_json(text) for outcome in result.outcomes.values() for text in json.loads(outcome.out)
    ]
    found = {(each.first, each.second): each for each in lines}  # both ends report the same
    return [found[pair] for pair in sorted(found)]


def _echo(worker: str, name: str, line: str) -> None:
    if name == "err":
        print(line, end="", file=sys.stderr)


def _run_end(seconds: float) -> int:
    """Run as one of the ends that `measure_on_this_machine` has started; the first of them reports progress."""
    end = attach()
    if end is None or end.listen is None:
        raise ConfigError("no launcher has started this end", mend="whale-nebula bench link --all --clusters gpu,npu")
    credentials = None if end.security is None else Credentials.load(end.security)
    place = Place(end.run_id, end.worker, end.addresses, end.listen, credentials=credentials)
    report: Callable[[str], None] = remark if end.worker == end.workers[0] else lambda text: None
    found = list(measure_links(place, seconds=seconds, patience=_HERE_PATIENCE, report=report))
    print(json.dumps([each.to_json() for each in found]), flush=True)
    return arguments.DONE
