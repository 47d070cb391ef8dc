"""`nb.clusters`: the cluster object of the run, from its config and measurements of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from whale_nebula.config import load
from whale_nebula.errors import ConfigError
from whale_nebula.hardware import ClusterInfo, Clusters, LinkRate, Provenance
from whale_nebula.hardware.measurements import fingerprint, read_measurement
from whale_nebula.launch.link_advice import (
    LinkMeasurement,
    find_collectives_path,
    find_measurement_path,
    load_measurement,
)
from whale_nebula.launch.placement import is_local
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.schedule.lines import Line
from whale_nebula.scopes.options import check_signature
from whale_nebula.site import calling_site, warn_at


@check_signature
def clusters(source: Clusters | str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Clusters:
    """The clusters of the run as data: devices, links and codecs, with their rates in bytes, seconds and FLOP/s.

    Values of the config take precedence; others are measurements of `whale-nebula measure` on this machine, or None.
    `source`, if given, is read instead of the run: a cluster object as JSON, from a file ("clusters.json") or a dict,
    or a config ("clusters.yaml", or a dict).

    >>> import whale_nebula as nb
    >>> nb.shutdown()
    >>> found = nb.clusters({"clusters": {"gpu": {"flops": "5T"}, "npu": {"flops": "1T"}}})
    >>> found.cluster("gpu").workers[0].device.flops_per_s, nb.clusters(found) is found
    (5000000000000.0, True)
    """
    if isinstance(source, Clusters):
        return source
    if source is None:
        run = current_run()
        return add_measurements(find_configured(run), find_config_path(run))
    if isinstance(source, Mapping):
        if "format" in source or isinstance(source.get("clusters"), list | tuple):
            return Clusters.from_json(source, where=str(calling_site()))
        return add_measurements(Clusters.of(load(source, str(calling_site()))))
    if Path(source).suffix == ".json":
        return Clusters.load(source)
    return add_measurements(Clusters.of(load(source)), source)


def find_configured(run: Run, names: Sequence[str] | None = None) -> Clusters:
    """The clusters of a run, or those with these names, as configured."""
    sizes = run.cluster_sizes
    chosen = run.here().clusters if names is None else names
    return Clusters.of(run.config, run.links, {name: sizes.get(name, 1) for name in chosen})


def find_config_path(run: Run) -> str | None:
    """The path of a run's config, next to which measurements of links are stored; None if it has no file."""
    return run.source or (run.attachment.config if run.attachment is not None else None)


def add_measurements(
    configured: Clusters, config: str | os.PathLike[str] | None = None, *, converts: bool = False
) -> Clusters:
    """A cluster object completed with measurements of this machine and, if there is a `config` file, with those of
    links and collectives that are stored next to it. If this `converts`, those among other numbers of workers are used,
    too.
    """
    found, why = read_measurement()
    if why:
        warn_at(calling_site(), "the stored measurements are not used", why=why, mend="whale-nebula measure --again")
    completed = configured if found is None else found.complete(configured, is_local)
    return completed if config is None else add_stored_measurements(completed, config, converts=converts)


def find_rings(run: Run) -> dict[str, Line]:
    """The lines between neighbours inside clusters, by cluster, if they are configured or were measured on this
    machine.
    """
    configured, (found, _) = find_configured(run), read_measurement()
    known = configured if found is None else found.complete(configured, is_local)
    rings = {each.name: each.ring for each in known.clusters}
    return {name: Line.from_link(ring) for name, ring in rings.items() if ring.rate_bytes_per_s or ring.delay_s}


def add_stored_measurements(known: Clusters, config: str | os.PathLike[str], *, converts: bool = False) -> Clusters:
    """A cluster object completed with the links and collectives that `bench link` or a run has measured and stored next
    to a config. Collectives are used only if they were measured on this machine and with the same number of workers,
    unless this `converts` them.
    """
    for each in known.clusters:
        with contextlib.suppress(ConfigError):  # it is missing, or invalid
            kept = Clusters.load(find_collectives_path(config, each.name))
            kept = kept.resize({each.name: len(each.workers)}) if converts else kept
            fits = all(one.workers == len(each.workers) for own in kept.clusters for one in own.collectives)
            if fits and all(source.machine == fingerprint() for source in kept.measured.values()):
                known = known.complete_from(kept)
    found = []
    for a, b in combinations_with_replacement(known.names, 2):
        line = load_measurement(find_measurement_path(config, a, b))
        found += [line] if line is not None and {a, b} == set(line.clusters) else []
    return complete_from_lines(known, found)


def complete_from_lines(known: Clusters, measured: Sequence[LinkMeasurement]) -> Clusters:
    """A cluster object completed with measured links: those between clusters, and those inside."""
    links: dict[tuple[str, str], LinkRate] = {}
    inside: dict[str, LinkRate] = {}
    sources: dict[str, Provenance] = {}
    for each in (each for each in measured if each.crossings):
        largest, (a, b) = max(each.crossings, key=lambda one: one.size), each.clusters
        date = datetime.fromtimestamp(each.when, UTC).isoformat(timespec="seconds")
        if a == b:
            inside[a] = LinkRate(min(largest.there, largest.back), each.delay)
        else:
            links |= {(a, b): LinkRate(largest.there, each.delay), (b, a): LinkRate(largest.back, each.delay)}
        for one, other in ((a, b), (b, a)):
            sources[f"{one}>{other}"] = Provenance(date, None, f"{each.first} - {each.second}, {each.path}")
    named = tuple(ClusterInfo(name, (), inside.get(name, LinkRate())) for name in known.names)
    return known.complete_from(Clusters(named, links, measured=sources))
