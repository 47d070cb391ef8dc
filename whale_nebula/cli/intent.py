"""`whale-nebula run --dry-run` and `--explain`: what would be started, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from whale_nebula.config import Config
from whale_nebula.launch.placed import run_name, seed_of
from whale_nebula.launch.resolve import Resolved, cluster_of


@dataclass(frozen=True)
class Intent:
    """What a command line comes to."""

    found: Resolved
    config: Config
    path: str | None
    script: Sequence[str]
    everywhere: bool = False

    @staticmethod
    def explained(found: Resolved) -> str:
        """Who knew where the workers are, as JSON."""
        return json.dumps({"answered": found.source, "declined": dict(found.declined)})

    def to_json(self) -> str:
        """One JSON object."""
        placement = self.found.placement
        return json.dumps(
            {
                "run": run_name(self.config),
                "answered": self.found.source,
                "config": self.path,
                "insecure": self.config.security.insecure,
                "seed": seed_of(self.config),
                "patience": self.config.patience,
                "script": list(self.script),
                "workers": [
                    {
                        "worker": worker,
                        "cluster": cluster_of(worker),
                        "address": address,
                        "here": worker in placement.here,
                        "gateway": self._gateway(worker),
                    }
                    for worker, address in placement.addresses.items()
                ],
            },
            indent=1,
        )

    def to_text(self) -> str:
        """The same in lines."""
        placement = self.found.placement
        width = max(map(len, placement.addresses))
        lines = [f"run {run_name(self.config)!r} of {' '.join(self.script)}, seed {seed_of(self.config)}"]
        for worker, address in placement.addresses.items():
            state = "starts here" if worker in placement.here else "is elsewhere"
            gateway = self._gateway(worker)
            behind = f", behind gateway {gateway}" if gateway else ""
            lines.append(f"  {worker:<{width}}  {state:<12}  {address}{behind}")
        return "\n".join([*lines, f"{self._secured()}; {self.found.source} says where the workers are"])

    def _gateway(self, worker: str) -> str | None:
        cluster = self.config.clusters.get(cluster_of(worker))
        return None if cluster is None else cluster.gateway

    def _secured(self) -> str:
        if self.config.security.insecure:
            return "insecure: links are not encrypted"
        return "certificates for this run only" if self.everywhere else "certificates as the config says"
