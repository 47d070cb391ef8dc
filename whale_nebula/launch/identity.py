"""The identity that a launcher gives each worker: one environment variable with a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from whale_nebula.config.schema import PATIENCE_SECONDS
from whale_nebula.errors import ConfigError, CredentialsError
from whale_nebula.security.files import Files

VARIABLE = "WHALE_NEBULA_WORKER"


@dataclass(frozen=True)
class Identity:
    """Who a worker is, whom it is connected to, and how it notices that its launcher is gone.

    `peers` are the clusters of all other workers, and `addresses` where these listen. `leash` is the file descriptor of
    a pipe that the launcher holds open as long as it lives, `pulse` that of the pipe into which the worker's heart
    beats. Workers with addresses `listen`, and have files of certificates unless the config says `insecure`; where
    `gateway` is given, other clusters are reached through it. `config` is the path of that config. `everywhere` says
    that the launcher started the workers of all clusters (`--all`). `device` is the one of its host that the worker
    has, where the config says so. Where the launcher has a terminal, `terminal` is that, and `drawing` the pipe into
    which a worker draws for it.

    >>> identity = Identity("gpu/0", "gpu", {}, {}, "run-1", 7, leash=6, launcher=100)
    >>> Identity.from_json(identity.to_json()) == identity
    True
    """

    worker: str
    cluster: str
    peers: Mapping[str, str]
    addresses: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    seed: int | None = None
    leash: int = 0
    launcher: int = 0
    listen: str | None = None
    security: Files | None = None
    insecure: bool = False
    gateway: str | None = None
    pulse: int | None = None
    patience: float = PATIENCE_SECONDS
    config: str | None = None
    everywhere: bool = False
    device: str | None = None
    drawing: int | None = None
    terminal: int | None = None

    def to_json(self) -> str:
        """The text that goes into the variable."""
        files = self.security and self.security.as_dict()
        return json.dumps({**asdict(self), "security": files}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Read the variable; whatever no launcher wrote is refused."""
        try:
            told = json.loads(text)
            files = told.pop("security", None)
            found = cls(**told, security=Files.from_dict(files) if files else None)
            fault = found._find_fault()
        except (ValueError, TypeError, AttributeError, CredentialsError) as error:
            fault = repr(error)
        if fault:
            raise ConfigError(
                f"the environment variable {VARIABLE} cannot be read: {fault}",
                why="it is written by the launcher for each worker that it starts, and by nobody else",
                mend=f"start workers with 'whale-nebula run', or unset {VARIABLE}",
            )
        return found

    def _find_fault(self) -> str:
        """What does not fit together. Nothing that was left out may turn off certificates."""
        if self.listen is not None and (self.security is None) != (self.insecure is True):
            return "a worker that listens has certificates, or is told to be insecure: one of the two"
        if self.listen is None and self.peers:
            return "peers have addresses, and this worker has none"
        if self.peers.keys() != self.addresses.keys():
            return "each peer has an address"
        return f"{self.worker!r} is its own peer" if self.worker in self.peers else ""

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run, this one too, sorted."""
        return tuple(sorted((self.worker, *self.peers)))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that a worker gets from its launcher."""
        given = (self.leash, self.pulse, self.drawing, self.terminal)
        return tuple(fd for fd in given if fd is not None)
