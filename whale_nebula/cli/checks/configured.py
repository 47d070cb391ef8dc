"""A clusters.yaml by itself."""

from __future__ import annotations

from whale_nebula.cli.checks.check import Check
from whale_nebula.config import load


def config_checks(path: str) -> list[Check]:
    """A clusters.yaml: what is wrong raises, what is right is counted."""
    config = load(path)
    workers = sum(len(cluster.workers) for cluster in config.clusters.values())
    found = f"{len(config.clusters)} cluster{'s' * (len(config.clusters) != 1)}"
    names = ", ".join(config.clusters) or "none is named"
    checks = [Check("config", "ok", found, f"{path}: {names}; {workers} workers, {len(config.links.pairs)} links")]
    if config.security.insecure:
        checks.append(Check("config", "note", "insecure: true", "links are not encrypted", "leave it out"))
    return checks
