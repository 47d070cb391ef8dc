"""A clusters.yaml by itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from whale_nebula.cli.checks.check import Check
from whale_nebula.config import Config, load
from whale_nebula.launch.resolve.placement import same_address


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
    return [*checks, *_shared_addresses(config), *_certificates(config, path)]


def _shared_addresses(config: Config) -> Iterator[Check]:
    """Two workers that would listen at one place: neither can be reached for sure, and a run refuses them."""
    named = {f"{name}/{n}": w.address for name, c in config.clusters.items() for n, w in enumerate(c.workers)}
    for why in same_address(named):
        yield Check("config", "bad", "workers", why, "give each worker an address of its own")


def _certificates(config: Config, path: str) -> Iterator[Check]:
    """Whether the authority's certificate, which every process reads, is where it is looked for."""
    if config.security.insecure or find_spec("cryptography") is None or len(config.clusters) < 2:
        return
    from whale_nebula.launch.secured import configured

    found = configured(config, [f"{cluster}/0" for cluster in config.clusters], path)
    missing = sorted({each.ca for each in found.values() if not Path(each.ca).exists()})
    if missing:
        why = f"no {missing[0]}: a run over several hosts needs certificates (run --all makes its own)"
        mend = f"whale-nebula certs init --config {path}, then whale-nebula certs issue --all --config {path}"
        yield Check("certificates", "note", "none here", why, mend)


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
