"""The part of a run that belongs to this host, and the addresses it must reach: input of all cluster checks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from whale_nebula.config import Config
from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, IdentityError
from whale_nebula.launch.placement import Asked, host_of, is_local
from whale_nebula.launch.resolve import resolve
from whale_nebula.security import Credentials, Files, Identity

GATEWAY = "gateway"


class Target(NamedTuple):
    """Somebody whom `here` must reach at an address; `dials` if it is `here` that dials, and not the other one."""

    here: str
    there: str
    address: str
    dials: bool = True


@dataclass(frozen=True)
class Host:
    """The workers of a cluster that are on this host, and its gateway if that is here, too.

    `workers` are the addresses of all workers of the run.
    """

    config: Config
    path: str
    cluster: str
    here: tuple[str, ...]
    workers: Mapping[str, str]

    @property
    def trains(self) -> bool:
        """Whether any worker is here: a gateway alone needs no TensorFlow."""
        return any(not name.endswith(f"/{GATEWAY}") for name in self.here)

    @property
    def others(self) -> tuple[str, ...]:
        """The other clusters."""
        return tuple(name for name in self.clusters if name != self.cluster)

    @property
    def clusters(self) -> tuple[str, ...]:
        """All clusters of the run."""
        return tuple(dict.fromkeys([*self.config.clusters, *map(cluster_of, self.workers)]))

    def identity(self, name: str) -> Identity:
        """Of a worker or gateway, as certificates have it."""
        return Identity.of_worker(self.config.run_name, name)

    def address(self, name: str) -> str:
        """Where somebody listens who is here."""
        return self.workers[name] if name in self.workers else self.config.gateway_of(self.cluster) or ""

    def files(self, name: str) -> Files | None:
        """Where the certificates of somebody are who is here; None where the config is insecure."""
        if self.config.security.insecure:
            return None
        return Files.of(self.config.security, self.identity(name), os.path.dirname(os.path.abspath(self.path)))

    def credentials(self, name: str) -> Credentials | None:
        """What somebody who is here shows; None if it is not as it should be, which is a check of its own."""
        files = self.files(name)
        try:
            return None if files is None else Credentials.of(files)
        except IdentityError:
            return None

    def targets(self) -> Iterator[Target]:
        """Whom those who are here reach: their gateway, or the workers of other clusters if there is none."""
        own = self.config.gateway_of(self.cluster)
        for name in self.here:
            if name.endswith(f"/{GATEWAY}"):
                for cluster in self.others:
                    if (address := self.config.gateway_of(cluster)) is not None:
                        yield Target(name, f"{cluster}/{GATEWAY}", address)
                continue
            if own is not None and self.others:
                yield Target(name, f"{self.cluster}/{GATEWAY}", own)
            for there, address in self.workers.items():
                near = cluster_of(there) == self.cluster
                if there not in self.here and (near or own is None):
                    yield Target(name, there, address, dials=name > there)


def host(config: Config, path: str, cluster: str, *, worker: int | None = None, gateway: bool = False) -> Host:
    """The host that this is. Without `worker` or `gateway` that is found out by the addresses that it has."""
    if config.clusters and cluster not in config.clusters:
        resolve(config, os.environ, Asked(cluster))  # says what was meant
    own = config.clusters[cluster].gateway if cluster in config.clusters else None
    has_gateway = gateway or (worker is None and own is not None and is_local(host_of(own)))
    try:
        found = resolve(config, os.environ, Asked(cluster, worker, local=is_local)).placement
        here, workers = found.here, found.addresses
    except ConfigError:
        if not has_gateway:
            raise
        here, workers = (), config.addresses
    if has_gateway and worker is None and (gateway or not any(is_local(host_of(workers[each])) for each in here)):
        here = ()
    if has_gateway and own is None:
        mend = f'clusters: {{{cluster}: {{gateway: "10.77.0.1:7100"}}}}'
        raise ConfigError(f"cluster {cluster!r} names no gateway", where=path, mend=mend)
    return Host(config, path, cluster, (*here, *[f"{cluster}/{GATEWAY}"] * has_gateway), workers)
