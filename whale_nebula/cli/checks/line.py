"""The line to each other cluster, and what was seen of the other end: as `bench link` has last found it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from whale_nebula.cli.checks.certificates import days
from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.host import Host
from whale_nebula.launch.line.advice import advise, delay_text, lopsided, rate_text
from whale_nebula.launch.line.found import LineFound, path_of, saved
from whale_nebula.launch.line.sheet import unlike, versions

_OLD = timedelta(days=7)
_APART_NOTE, _APART_BAD = 1.0, 60.0


def line_checks(host: Host) -> Iterator[Check]:
    """For each other cluster: rate and delay, clocks, and versions."""
    ours = versions()
    code = f"whale_nebula {ours['whale_nebula']}, TensorFlow {ours['tensorflow'] or 'not installed'}"
    yield Check("versions here", "ok", f"code {ours['code']}", f"{code}: the same in every cluster")
    for cluster in host.others:
        found = saved(path_of(host.path, host.cluster, cluster))
        if found is None or set(found.clusters) != {host.cluster, cluster}:
            yield _unmeasured(host, cluster)
        else:
            yield from _measured(host, cluster, found, ours)


def _unmeasured(host: Host, cluster: str) -> Check:
    mend = f"whale-nebula bench link --config {host.path} --cluster {host.cluster}, and there with --cluster {cluster}"
    return Check(f"line to {cluster}", "note", "not measured yet", f"the config says {_said(host, cluster)}", mend)


def _measured(host: Host, cluster: str, found: LineFound, ours: Mapping[str, Any]) -> Iterator[Check]:
    age = timedelta(seconds=max(0.0, time.time() - found.when))
    ago = f"measured {days(age)} ago"
    yield _line(host, cluster, found, ago, old=age > _OLD)
    yield clocks(found, cluster, ago)
    theirs = found.sheets.get(found.second if found.clusters[1] == cluster else found.first, {})
    yield alike(cluster, ours, theirs, ago)


def _line(host: Host, cluster: str, found: LineFound, ago: str, *, old: bool) -> Check:
    advice = advise(found, host.config.links.between(*found.clusters))
    text, label = f"{rate_text(found.bits)}, {delay_text(found.delay)}", f"line to {cluster}"
    if not advice.agrees:
        return Check(label, "warning", text, f"{advice.why}; {ago}", advice.write)
    if old:
        return Check(label, "note", text, ago, f"whale-nebula bench link --config {host.path} --cluster {host.cluster}")
    return Check(label, "ok", text, "; ".join(filter(None, [advice.why, lopsided(found), ago])))


def clocks(found: LineFound, cluster: str, ago: str) -> Check:
    """How far the clocks of the two ends were apart."""
    apart, label = abs(found.clock), f"clock of {cluster}"
    if apart < _APART_NOTE:
        return Check(label, "ok", f"{1e3 * apart:.0f} ms apart", ago)
    ahead = (found.clock > 0) == (found.clusters[1] == cluster)
    text = f"{apart:.1f} s {'ahead' if ahead else 'behind'}"
    why = f"{ago}; certificates are good by the clock of each host, and a clock five minutes behind refuses new ones"
    return Check(label, "warning" if apart < _APART_BAD else "bad", text, why, "timedatectl set-ntp true on both hosts")


def alike(cluster: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], ago: str) -> Check:
    """Whether the other end had what is here: unlike versions trace unlike programs."""
    differ = unlike(ours, theirs)
    if not differ:
        return Check(f"versions at {cluster}", "ok", "as here", ago)
    said = "; ".join(f"{name} {there}, here {here}" for name, (here, there) in differ.items())
    if list(differ) == ["code"]:
        why = f"{ago}; the release is the same, and its source is not: a run compares what both trace"
        return Check(f"versions at {cluster}", "note", said, why, "install the same commit in every cluster")
    mend = "install the same of both in every cluster, then run bench link again to see it"
    return Check(f"versions at {cluster}", "warning", said, f"{ago}; a run would refuse to start", mend)


def _said(host: Host, cluster: str) -> str:
    said = host.config.links.between(host.cluster, cluster)
    return "nothing of it" if str(said) == "free" else str(said)
