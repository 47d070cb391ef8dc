"""All checks of one cluster on this host, in the order in which they are mended."""

from __future__ import annotations

from whale_nebula.cli.checks.certificates import certificate_checks
from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.host import Host
from whale_nebula.cli.checks.line import line_checks
from whale_nebula.cli.checks.network import network_checks
from whale_nebula.cli.checks.reach import name_checks, port_checks, reach_checks


def cluster_checks(host: Host) -> list[Check]:
    """What is here first, then the way to the others, then what lies between."""
    names = ", ".join(host.here)
    return [
        Check("this host", "ok", names, f"cluster {host.cluster}, run {host.run}"),
        *certificate_checks(host),
        *name_checks(host),
        *port_checks(host),
        *reach_checks(host),
        *network_checks(host),
        *line_checks(host),
    ]
