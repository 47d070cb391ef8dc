"""The settings of a gateway: its address, its workers, and how it reaches other gateways."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from whale_nebula.config import Config
from whale_nebula.config.place import Place, read_address
from whale_nebula.config.schema import PATIENCE_SECONDS, cluster_of
from whale_nebula.errors import ConfigError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security.files import Files
from whale_nebula.security.identity import GATEWAY, Identity

ASSUMED_WORKERS = 8
"""The assumed number of workers of a cluster that does not list them."""


@dataclass(frozen=True)
class GatewaySettings:
    """The settings of one gateway. Clusters and workers have the run's names.

    `workers` are those of all clusters with their addresses; a cluster may have none if their number is not known yet.
    `gateways` maps the other clusters to their gateways' addresses; with None only the other side can dial. `rates` are
    in bytes per second; None is unlimited. Without `files` nothing is authenticated. The folder `services` contains the
    sockets of the services for accounts and data, to which connections are handed over.

    >>> workers = {"gpu/0": "10.0.0.1:7101"}
    >>> settings = GatewaySettings("mt", "gpu", "10.77.0.1:7100", workers, {"npu": None}, audit=Path("/srv/a.jsonl"))
    >>> GatewaySettings.from_json(settings.to_json()) == settings, settings.identity.worker
    (True, 'gpu/gateway')
    """

    run: str
    cluster: str
    listen: str
    workers: Mapping[str, str]
    gateways: Mapping[str, str | None]
    rates: Mapping[str, float | None] = field(default_factory=dict)
    files: Files | None = None
    audit: Path = Path("audit.jsonl")
    patience: float = PATIENCE_SECONDS
    services: Path | None = None

    @property
    def identity(self) -> Identity:
        """The gateway's identity."""
        return Identity(self.run, self.cluster, GATEWAY)

    @property
    def heads_path(self) -> Path:
        """The file of the heads of other gateways' audit logs."""
        return self.audit.with_name(f"{self.audit.stem}.heads{self.audit.suffix}")

    @property
    def traffic_path(self) -> Path:
        """The file of the accounts' traffic of the day."""
        return self.audit.with_name(f"{self.audit.stem}.traffic.json")

    def count_workers(self, cluster: str) -> int:
        """The number of a cluster's workers, or an assumed number if it is unknown."""
        return sum(cluster_of(worker) == cluster for worker in self.workers) or ASSUMED_WORKERS

    @property
    def roster(self) -> tuple[str, ...] | None:
        """All workers of the run, as frames number them; None if the workers of some cluster are unknown."""
        named = {cluster_of(worker) for worker in self.workers}
        return tuple(sorted(self.workers)) if named >= {self.cluster, *self.gateways} else None

    @classmethod
    def from_config(
        cls, config: Config, cluster: str, path: str | os.PathLike[str], listen: str | None = None
    ) -> GatewaySettings:
        """The settings of a cluster's gateway, according to the config in the file `path`."""
        own_cluster = config.clusters.get(cluster)
        if own_cluster is None:
            raise ConfigError(
                f"the config has no cluster {cluster!r}",
                where=os.fspath(path),
                mend=f"--cluster: {did_you_mean(cluster, list(config.clusters))}",
            )
        address = own_cluster.gateway
        if listen is not None:
            address = listen  # with port 0 any free port
            read_address(Place(f"{listen[:-1]}1" if listen.endswith(":0") else listen, "--listen"))
        if address is None:
            raise ConfigError(
                f"cluster {cluster!r} has no gateway",
                where=os.fspath(path),
                why="the config must contain the address at which the gateway listens",
                mend=f'clusters: {{{cluster}: {{gateway: "10.77.0.1:7100"}}}}',
            )
        base = Path(os.path.abspath(path)).parent
        identity = Identity(config.run_name, cluster, GATEWAY)
        files = None if config.security.insecure else Files.from_config(config.security, identity, base)
        return cls.for_run(config, identity, address, config.addresses, files, base / "audit")

    @classmethod
    def for_run(
        cls,
        config: Config,
        identity: Identity,
        listen: str,
        workers: Mapping[str, str],
        files: Files | None,
        folder: Path,
    ) -> GatewaySettings:
        """The settings of a gateway of a run with these workers; its audit log is in `folder`."""
        cluster = identity.cluster
        others = {name: each.gateway for name, each in config.clusters.items() if name != cluster}
        rates = {name: config.links.between(cluster, name).rate for name in others}
        byte_rates = {name: None if rate is None else rate / 8 for name, rate in rates.items()}
        log = folder / f"{cluster}-gateway.jsonl"
        return cls(identity.run, cluster, listen, workers, others, byte_rates, files, log, config.patience)

    def to_json(self) -> str:
        """The text that a launcher passes to the process."""
        services = None if self.services is None else os.path.abspath(self.services)
        audit = os.path.abspath(self.audit)
        fields = {**asdict(self), "files": self.files and self.files.as_dict(), "audit": audit, "services": services}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> GatewaySettings:
        """The inverse of `to_json`."""
        try:
            fields = json.loads(text)
            files, services = fields.pop("files"), fields.pop("services")
            fields |= {"audit": Path(fields["audit"]), "services": Path(services) if services else None}
            return cls(**fields, files=Files.from_dict(files) if files else None)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                "invalid settings of a gateway",
                why=repr(error),
                mend="whale-nebula gateway --config clusters.yaml --cluster gpu",
            ) from None
