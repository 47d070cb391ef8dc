"""A clusters.yaml by itself."""

from __future__ import annotations

from importlib.util import find_spec

from whale_nebula.cli.checks.check import Check
from whale_nebula.config import Config, load


def config_checks(path: str) -> list[Check]:
    """A clusters.yaml: what is wrong raises, what is right is counted."""
    config = load(path)
    _check_names(config)
    workers = sum(len(cluster.workers) for cluster in config.clusters.values())
    names = ", ".join(config.clusters) or "none is named"
    counted = f"{path}: {names}; {_counted(workers, 'worker')}, {_counted(len(config.links.pairs), 'link')}"
    checks = [Check("config", "ok", _counted(len(config.clusters), "cluster"), counted)]
    if config.security.insecure:
        checks.append(Check("config", "note", "insecure: true", "links are not encrypted", "leave it out"))
    return checks


def _counted(number: int, what: str) -> str:
    """A number of things.

    >>> _counted(1, "link"), _counted(2, "link")
    ('1 link', '2 links')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def _check_names(config: Config) -> None:
    """Where nothing reads certificates there is another check that says so."""
    if find_spec("cryptography") is not None:
        from whale_nebula.launch.secured import check_names

        check_names(config, [f"{cluster}/0" for cluster in config.clusters])
