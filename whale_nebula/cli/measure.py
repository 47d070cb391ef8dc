"""`whale-nebula measure`: measure this machine and its links for the planner, and store the results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from whale_nebula.cli import arguments, bench
from whale_nebula.cli.arguments import Options, Parser, answer, remark
from whale_nebula.config import Config, load
from whale_nebula.errors import ConfigError, RunError, TransportError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.hardware import Clusters, Provenance
from whale_nebula.hardware.measurements import Measurement, cache_path, fingerprint, read_measurement, save_measurement
from whale_nebula.launch import link_advice, link_measurement
from whale_nebula.launch.placement import is_local

_DESCRIPTION = """\
Measure what the planner needs to know about this machine: FLOP/s by kind of kernel (matmul, conv, element-wise), memory
bandwidth, the overhead of a call, the cost of codecs, and collectives between processes. Results are stored for this
user and read by nb.clusters(). They are measured again on another machine, or with --again.

With --config, also print the config's clusters as the planner sees them. Values of the config (kind, cores, flops,
memory and its rate, link rates) take precedence. With --cluster, links to other clusters without a configured rate are
measured, if the other end runs the same command at the same time, and stored in the folder line/ next to the config."""

_EPILOG = """\
examples:
  whale-nebula measure                                              this machine; takes some seconds
  whale-nebula measure --again                                      measure again
  whale-nebula measure --config clusters.yaml --save clusters.json  also the clusters of a config
  whale-nebula measure --config clusters.yaml --cluster gpu         at one site, and with npu at the other

in Python:
  nb.clusters()                   the cluster object of the run, with measurements of this machine
  nb.clusters("clusters.json")    a cluster object written by --save

exit status:
  0   measured, or already known
  1   could not be measured
  2   wrong command line
  78  wrong config"""

_OPTIONS: Options = {
    "--config": ("FILE", "clusters.yaml: its clusters, and which of their workers are on this machine"),
    "--cluster": ("NAME", "the cluster of this host, whose links are measured"),
    "--again": (None, "measure again what was measured before"),
    "--quick": (None, "small sizes and few runs: faster and less exact; results are shown, not stored"),
    "--json": (None, "print the cluster object as JSON"),
    "--save": ("PATH", "write the cluster object as JSON to a file"),
}
_LINE_SECONDS, _LINE_PATIENCE = 1.0, 5.0


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser("measure", _DESCRIPTION, _OPTIONS, epilog=_EPILOG)
    args = parser.read(list(argv))
    if args.cluster is not None and args.config is None:
        parser.error("--cluster needs --config: --config clusters.yaml --cluster gpu")
    return answer(args, lambda: _run(args), bench.CODES)


def _run(args: argparse.Namespace) -> int:
    config = load(args.config)
    if args.cluster is not None and args.cluster not in config.clusters:
        raise ConfigError(
            f"unknown cluster {args.cluster!r}",
            where=args.config,
            mend=f"--cluster: {did_you_mean(args.cluster, config.clusters)}",
        )
    clusters = Clusters.of(config) if config.clusters else Clusters.of(config, sizes={"local": 1})
    measurement = _complete_measurement(clusters, again=args.again, quick=args.quick)
    if args.cluster is not None:
        _measure_links(config, args.config, args.cluster, again=args.again)
    from whale_nebula.runtime.clusters import add_stored_measurements

    completed = measurement.complete(clusters, is_local)
    if args.config is not None:
        completed = add_stored_measurements(completed, args.config)
    if args.save is not None:
        completed.save(args.save)
        remark(f"saved in {args.save}")
    print(completed.to_json() if args.json else completed)
    return arguments.DONE


# ---------------------------------------------------------------------- this machine
def _complete_measurement(clusters: Clusters, *, again: bool, quick: bool) -> Measurement:
    """The stored measurements of this machine, completed by new ones that these clusters need. They are stored, too,
    unless they are `quick`.
    """
    known, why = (None, "") if again or quick else read_measurement()
    if why:
        remark(f"{why}; measuring again")
    found = known or Measurement(fingerprint())
    for part, measure in _list_missing(clusters, found):
        remark(f"measuring {part} ...")
        found = measure(found, quick)
    if found is known:
        dates = sorted(each.date for each in found.sources.values())
        remark(
            f"measured {f'on {dates[0]}' if dates else 'before'}, stored in {cache_path()}; --again measures it again"
        )
    elif not quick:
        try:
            remark(f"saved in {save_measurement(found)}")
        except OSError as error:
            remark(f"cannot save in {cache_path()}: {error.strerror}")
    _report_unsteady(found)
    return found


_UNSTEADY = 0.3


def _report_unsteady(found: Measurement) -> None:
    """Report how many numbers differed by more than `_UNSTEADY` between their runs, and the one that differed most."""
    spreads = {name: each.spread for name, each in found.sources.items() if each.spread is not None}
    unsteady = [name for name, spread in spreads.items() if spread > _UNSTEADY]
    if unsteady:
        worst = max(unsteady, key=spreads.__getitem__)
        remark(
            f"{len(unsteady)} of {len(spreads)} numbers differed by more than {_UNSTEADY:.0%} between runs, most "
            f"{worst} ({spreads[worst]:.0%}): use --again while nothing else runs"
        )


_Measure = Callable[[Measurement, bool], Measurement]


def _list_missing(clusters: Clusters, found: Measurement) -> Iterator[tuple[str, _Measure]]:
    """The names and functions of the measurements that these clusters need, and that are unknown; why others are not
    made is reported.
    """
    local = [worker for worker in clusters.workers if is_local(worker.machine)]
    if not local:
        remark("no worker of this config is on this machine, so its kernels are not measured")
    elif found.device is None and any(worker.device.flops_per_s is None for worker in local):
        yield "kernels, memory and calls", _measure_device
    elif found.device is None:
        remark("the config has flops of all workers on this machine, so its kernels are not measured")
    if not found.codecs:
        yield "codecs", _measure_codecs
    with_collectives = [each for each in clusters.clusters if len(each.workers) > 1]
    for cluster in with_collectives:
        if not all(worker in local for worker in cluster.workers):
            remark(
                f"collectives of {cluster.name} are not measured: its workers are on several machines; a run "
                "under nb.auto_parallel measures them"
            )
    if not found.collectives and any(all(worker in local for worker in each.workers) for each in with_collectives):
        yield "collectives between two processes", _measure_collectives


def _measure_device(found: Measurement, quick: bool) -> Measurement:
    from whale_nebula.measure import device

    measured = device.measure_device(device.QUICK if quick else device.FULL, remark)
    return _add_sources(replace(found, device=measured.device), "device", measured.spreads)


def _measure_codecs(found: Measurement, quick: bool) -> Measurement:
    from whale_nebula.measure import device

    measured = device.measure_codecs(device.QUICK if quick else device.FULL, remark)
    return _add_sources(replace(found, codecs=measured.seconds_per_byte), "codecs", measured.spreads)


def _measure_collectives(found: Measurement, quick: bool) -> Measurement:
    from whale_nebula.measure import collectives

    measured = collectives.measure_collectives(collectives.QUICK if quick else collectives.FULL, remark)
    return _add_sources(replace(found, collectives=measured.collectives), "collectives", measured.spreads)


def _add_sources(found: Measurement, part: str, spreads: Mapping[str, float]) -> Measurement:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    new = {f"{part}.{name}": Provenance(date, spread, found.machine) for name, spread in spreads.items()}
    return replace(found, sources={**found.sources, **new})


# ---------------------------------------------------------------------- links
def _measure_links(config: Config, path: str, cluster: str, *, again: bool) -> None:
    """Measure each link of a cluster without a configured rate, and store the result next to the config."""
    for other in config.clusters:
        result_path = link_advice.find_measurement_path(path, cluster, other)
        if other == cluster:
            continue
        if config.links.between(cluster, other).rate is not None:
            remark(f"the config has the rate of the link to {other}, so it is not measured")
        elif link_advice.load_measurement(result_path) is not None and not again:
            remark(f"the rate of the link to {other} is already known: {os.path.relpath(result_path)}")
        else:
            _measure_link(config, path, cluster, other, result_path)


def _measure_link(config: Config, path: str, cluster: str, other: str, result_path: Path) -> None:
    if not (config.clusters[cluster].workers and config.clusters[other].workers):
        remark(f"the link to {other} is not measured: the config must have addresses of workers at both ends")
        return
    remark(f"measuring the link to {other} ...")
    place = bench.find_place(config, path, cluster, other)
    patience = min(config.patience, _LINE_PATIENCE)
    try:
        for found in link_measurement.measure_links(place, seconds=_LINE_SECONDS, patience=patience, report=remark):
            link_advice.save_measurement(found, result_path)
    except (TransportError, RunError) as error:
        remark(f"the link to {other} is not measured: {error.what}; start this command there at the same time")
