"""All checks of one cluster on this host, in the order in which they are mended."""

from __future__ import annotations

from collections.abc import Iterator

from whale_nebula.cli.checks.certificates import certificate_checks
from whale_nebula.cli.checks.check import Check
from whale_nebula.cli.checks.host import Host
from whale_nebula.cli.checks.line import line_checks
from whale_nebula.cli.checks.network import network_checks
from whale_nebula.cli.checks.reach import name_checks, port_checks, reach_checks
from whale_nebula.errors import ConfigError
from whale_nebula.launch import gateways


def cluster_checks(host: Host) -> list[Check]:
    """What is here first, then the way to the others, then what lies between."""
    names = ", ".join(host.here)
    return [
        Check("this host", "ok", names, f"cluster {host.cluster}, run {host.run}"),
        *gateway_checks(host),
        *certificate_checks(host),
        *name_checks(host),
        *port_checks(host),
        *reach_checks(host),
        *network_checks(host),
        *line_checks(host),
    ]


def gateway_checks(host: Host) -> Iterator[Check]:
    """Whether every cluster has a gateway, or none: this one as the config says, the others as far as it does."""
    try:
        gateways.check(host.config, host.cluster)
    except ConfigError as error:
        yield Check("gateways", "bad", error.what, error.why, error.mend)
    silent = [name for name in host.others if host.gateway_of(name) is None]
    if host.gateway_of(host.cluster) is not None and silent:
        why = "right if its gateway cannot be reached from here: then it is the one that dials"
        yield Check("gateways", "note", f"{', '.join(silent)} names none", why)
