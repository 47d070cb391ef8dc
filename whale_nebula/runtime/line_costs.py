"""Measure links between the processes of a run, and collectives of the workers of a cluster, if neither the config nor
an earlier measurement has them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from whale_nebula.errors import NebulaError
from whale_nebula.hardware import ClusterInfo, Clusters, Provenance
from whale_nebula.hardware.measurements import fingerprint
from whale_nebula.launch import link_advice
from whale_nebula.launch.link_measurement import SIZES, MeasurementEnd
from whale_nebula.runtime.clusters import complete_from_lines, config_of
from whale_nebula.runtime.local_sgd.topology import PROGRAMS
from whale_nebula.runtime.replicas.collective_costs import fit_collectives, time_collectives
from whale_nebula.runtime.run import Run

SECONDS = 0.3
"""The approximate seconds for which each direction of a link is measured, after shorter bursts."""
_ABOUT_SECONDS = 1.5
"""The approximate seconds of a link's measurement, including its round trips."""
COLLECTIVE_SIZES, COLLECTIVE_RUNS = (1 << 12, 1 << 16, 1 << 20), 5
COLLECTIVE_SECONDS = 1.0
"""The maximum seconds for which collectives inside a cluster are measured, or the budget if that is less."""
_PROGRAM = PROGRAMS - 1
_LOG = logging.getLogger("whale_nebula.runtime.run")


class LinkEnds(NamedTuple):
    """The workers between which a link is measured; the `first` one leads."""

    first: str
    second: str


def complete_collectives(name: str, clusters: Clusters, run: Run, budget: float, able: Collection[str]) -> Clusters:
    """Complete the cluster object that all processes of a run share with the collectives of clusters with several
    workers: those that were measured earlier in this run, and unknown ones, which are measured now. `able` are the
    clusters whose workers have collectives. All processes call it at the same point, with the same budget.
    """
    for each in run.collectives:
        clusters = clusters.complete_from(each)
    unknown = [each.name for each in clusters.clusters if each.name in able and _has_unknown_collectives(each)]
    if not unknown or not budget:
        return clusters
    session, cluster = run.ledger.session, run.here().cluster
    first = {name: next(worker for worker, own in run.workers.items() if own == name) for name in unknown}
    found = _time_collectives(cluster, run, budget) if cluster in unknown else None
    leads = found is not None and session.worker == first[cluster]
    part = {"collectives": found.to_json() if found is not None and leads else ""}
    for _, each in sorted(session.share(f"the collectives for {name!r}", part).items()):
        if text := each["collectives"]:
            run.collectives.append(Clusters.from_json(text, where=name))
            clusters = clusters.complete_from(run.collectives[-1])
    config, others = config_of(run), run.hosts.get(first.get(cluster, "")) != run.hosts.get(session.worker)
    if config is not None and found is not None and (leads or others):
        path = link_advice.find_collectives_path(config, cluster)
        with suppress(NebulaError, OSError):  # a folder that cannot be written is not used
            path.parent.mkdir(exist_ok=True)
            found.save(path)
    return clusters


def _has_unknown_collectives(cluster: ClusterInfo) -> bool:
    """Whether the collectives of several workers are unknown."""
    return len(cluster.workers) > 1 and not cluster.inside.takes_time and not cluster.collectives


def _time_collectives(cluster: str, run: Run, budget: float) -> Clusters:
    """Measure the collectives among the workers of this process's cluster."""
    workers, joined = run.cluster_sizes[cluster], run.ledger.collectives
    most = min(budget, COLLECTIVE_SECONDS)
    _LOG.info("measuring the collectives of the %d workers of %s, which are not known", workers, cluster)
    group = joined.group(range(workers), "seconds of collectives")

    def has_time(seconds: float) -> bool:
        """Whether the slowest of all workers has time for the next size."""
        return bool(group.gather(np.array([1e3 * min(seconds, 1e3)], np.int32)).max() <= 1e3 * most)

    with joined.explain_failures(f"measuring the collectives of {cluster}"):
        timed = time_collectives(workers, COLLECTIVE_SIZES, COLLECTIVE_RUNS, has_time)
    among = fit_collectives(timed, COLLECTIVE_SIZES, workers)
    for each in among.collectives:
        _LOG.info("inside %s: %s", cluster, each)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    sources = {
        f"{cluster}.collectives.{kind}": Provenance(date, spread, fingerprint())
        for kind, spread in among.spreads.items()
    }
    return Clusters((ClusterInfo(cluster, (), collectives=among.collectives),), measured=sources)


def complete_lines(name: str, clusters: Clusters, run: Run, budget: float) -> Clusters:
    """Complete the cluster object that all processes of a run share with its links: those that were measured earlier in
    this run, and unknown ones, which are measured now, as many as a budget of seconds allows. All processes call it at
    the same point, with the same budget.
    """
    clusters = complete_from_lines(clusters, run.lines)
    session, unknown = run.ledger.session, list_unknown_links(clusters, run)
    unknown, left = unknown[: (most := math.ceil(budget / _ABOUT_SECONDS))], unknown[most:]
    if left and not run.lines:
        names = ", ".join(" - ".join(ends) for ends in left)
        _LOG.info("unknown links, for which measure: %g s leaves no time: %s", budget, names)
    if not unknown:
        return clusters
    session.expected.add_round(_PROGRAM, max(SIZES))
    session.exchange(f"measuring links for {name!r}", {}, set(session.links))  # from here on, no other data crosses
    own = [_measure_link(ends, clusters, run) for ends in unknown if session.worker in ends]
    part = {"lines": [each.to_json() for each in own if each.first == session.worker]}
    for _, each in sorted(session.share(f"the links for {name!r}", part).items()):
        run.lines += [link_advice.LinkMeasurement.from_json(text) for text in each["lines"]]
    return complete_from_lines(clusters, run.lines)


def list_unknown_links(clusters: Clusters, run: Run) -> Sequence[LinkEnds]:
    """The ends of links without a rate, in the same order in all processes: the first workers of two clusters, or the
    first two workers of one cluster.
    """
    workers = {name: [worker for worker, cluster in run.workers.items() if cluster == name] for name in clusters.names}
    found = []
    for number, (one, own) in enumerate(workers.items()):
        if len(own) > 1 and clusters.cluster(one).ring.rate_bytes_per_s is None:
            found.append(LinkEnds(*own[:2]))
        for other in list(workers)[number + 1 :]:
            ways = clusters.between(one, other), clusters.between(other, one)
            if own and workers[other] and any(way.rate_bytes_per_s is None for way in ways):
                found.append(LinkEnds(own[0], workers[other][0]))
    return found


def _measure_link(ends: LinkEnds, clusters: Clusters, run: Run) -> link_advice.LinkMeasurement:
    """Measure one link from this end, and store the result next to the config."""
    session = run.ledger.session
    leads = session.worker == ends.first
    link = session.links[ends.second if leads else ends.first]
    _LOG.info("measuring the link %s - %s, which is not known, for about %g s", *ends, _ABOUT_SECONDS)
    end = MeasurementEnd(
        link, leads=leads, seconds=SECONDS, patience=session.patience, report=_LOG.debug, kind="round", program=_PROGRAM
    )  # fmt: skip
    through = run.config.gateway_of(run.workers[ends.first]) is not None
    found = end.probe(link_advice.THROUGH if through else link_advice.DIRECT, time.time())
    largest = found.crossings[-1]
    _LOG.info(
        "the link %s - %s: %.3g mbit/s there, %.3g back, %.3g ms", *ends, largest.there * 8e-6, largest.back * 8e-6,
        1e3 * found.delay,
    )  # fmt: skip
    config = config_of(run)
    if config is not None and (leads or run.hosts.get(ends.first) != run.hosts.get(ends.second)):
        with suppress(NebulaError):  # a folder that cannot be written is not used
            link_advice.save(found, link_advice.path_of(config, *found.clusters))
    return found
