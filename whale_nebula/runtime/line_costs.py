"""Measure the lines of a run that neither its config nor an earlier measurement describes, between its processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from whale_nebula.errors import NebulaError
from whale_nebula.hardware import Clusters
from whale_nebula.launch import link_advice
from whale_nebula.launch.link_measurement import SIZES, End
from whale_nebula.runtime.clusters import complete_from_lines, config_of
from whale_nebula.runtime.local_sgd.topology import PROGRAMS
from whale_nebula.runtime.run import Run

SECONDS = 0.3
"""For about so long each direction of a line is measured, after bursts that take less."""
_ABOUT_SECONDS = 1.5
"""What measuring a line takes, with its round trips."""
_PROGRAM = PROGRAMS - 1
_LOG = logging.getLogger("whale_nebula.runtime.run")


class Ends(NamedTuple):
    """The workers between which a line is measured; the `first` one leads."""

    first: str
    second: str


def complete_lines(name: str, told: Clusters, run: Run, budget: float) -> Clusters:
    """Complete the cluster object that all processes of a run share by its lines: those that were measured before in
    this run, and those that are unknown, which are measured now, as many as a budget of seconds allows. All processes
    call it at the same point, with the same budget.
    """
    told = complete_from_lines(told, run.lines)
    session, unknown = run.ledger.session, list_unknown(told, run)
    unknown, left = unknown[: (most := math.ceil(budget / _ABOUT_SECONDS))], unknown[most:]
    if left and not run.lines:
        names = ", ".join(" - ".join(ends) for ends in left)
        _LOG.info("lines that are not known, for which measure: %g s leaves no time: %s", budget, names)
    if not unknown:
        return told
    session.expected.add_round(_PROGRAM, max(SIZES))
    session.exchange(f"measuring lines for {name!r}", {}, set(session.links))  # from here on nothing else crosses
    own = [_measure(ends, told, run) for ends in unknown if session.worker in ends]
    sheet = {"shared": {"lines": [each.to_json() for each in own if each.first == session.worker]}}
    heard = session.exchange(f"the lines for {name!r}", sheet, set(session.links))
    for _, each in sorted({session.worker: sheet, **heard}.items()):
        run.lines += [link_advice.LineFound.from_json(text) for text in each["shared"]["lines"]]
    return complete_from_lines(told, run.lines)


def list_unknown(told: Clusters, run: Run) -> Sequence[Ends]:
    """The ends of lines without a rate, in the same order in all processes: between two clusters their first workers,
    inside a cluster its first two.
    """
    workers = {name: [worker for worker, cluster in run.workers.items() if cluster == name] for name in told.names}
    found = []
    for number, (one, own) in enumerate(workers.items()):
        if len(own) > 1 and told.cluster(one).ring.rate_bytes_per_s is None:
            found.append(Ends(*own[:2]))
        for other in list(workers)[number + 1 :]:
            ways = told.between(one, other), told.between(other, one)
            if own and workers[other] and any(way.rate_bytes_per_s is None for way in ways):
                found.append(Ends(own[0], workers[other][0]))
    return found


def _measure(ends: Ends, told: Clusters, run: Run) -> link_advice.LineFound:
    """Measure one line from this end of it, and keep what was found beside the config."""
    session = run.ledger.session
    leads = session.worker == ends.first
    link = session.links[ends.second if leads else ends.first]
    _LOG.info("the line %s - %s is not known, and is measured, for about %g s", *ends, _ABOUT_SECONDS)
    end = End(
        link, leads=leads, seconds=SECONDS, patience=session.patience, tell=_LOG.debug, kind="round", program=_PROGRAM
    )  # fmt: skip
    through = run.config.gateway_of(run.workers[ends.first]) is not None
    found = end.probe(link_advice.THROUGH if through else link_advice.DIRECT, time.time())
    largest = found.crossings[-1]
    _LOG.info(
        "the line %s - %s: %.3g mbit/s there, %.3g back, %.3g ms", *ends, largest.there * 8e-6, largest.back * 8e-6,
        1e3 * found.delay,
    )  # fmt: skip
    config = config_of(run)
    if config is not None and (leads or run.hosts.get(ends.first) != run.hosts.get(ends.second)):
        with suppress(NebulaError):  # a folder that cannot be written is not used
            link_advice.save(found, link_advice.path_of(config, *found.clusters))
    return found
