"""What a launcher tells each worker that it starts: one environment variable with a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from whale_nebula.errors import ConfigError

VARIABLE = "WHALE_NEBULA_WORKER"


@dataclass(frozen=True)
class Peer:
    """Another worker: its cluster, and the number of the file descriptor of the socket to it."""

    cluster: str
    fd: int


@dataclass(frozen=True)
class Identity:
    """Who a worker is, whom it is connected to, and how it notices that its launcher is gone.

    `leash` is the file descriptor of a pipe that the launcher holds open as long as it lives.

    >>> identity = Identity("gpu/0", "gpu", {"npu/0": Peer("npu", 5)}, "run-1", 7, leash=6, launcher=100)
    >>> Identity.from_json(identity.to_json()) == identity
    True
    """

    worker: str
    cluster: str
    peers: Mapping[str, Peer]
    run_id: str
    seed: int | None
    leash: int
    launcher: int

    def to_json(self) -> str:
        """The text that goes into the variable."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Read the variable; whatever no launcher wrote is refused."""
        try:
            fields: dict[str, Any] = json.loads(text)
            peers = {name: Peer(**peer) for name, peer in fields.pop("peers").items()}
            return cls(peers=peers, **fields)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"the environment variable {VARIABLE} cannot be read: {error!r}",
                why="it is written by the launcher for each worker that it starts, and by nobody else",
                mend=f"start workers with 'whale-nebula run', or unset {VARIABLE}",
            ) from None
