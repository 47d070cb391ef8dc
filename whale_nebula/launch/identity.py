"""The identity that a launcher gives each worker: one environment variable with a JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from whale_nebula.config.place import Place, address, device
from whale_nebula.config.schema import PATIENCE_SECONDS
from whale_nebula.errors import ConfigError
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
            return _read(Place(json.loads(text), source=VARIABLE))
        except (ConfigError, ValueError) as error:
            why = f"{error.what} ({error.where})" if isinstance(error, ConfigError) else repr(error)
            raise ConfigError(
                f"the environment variable {VARIABLE} cannot be read: {why}",
                why="it is written by the launcher for each worker that it starts, and by nobody else",
                mend=f"start workers with 'whale-nebula run', or unset {VARIABLE}",
            ) from None

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run, this one too, sorted."""
        return tuple(sorted((self.worker, *self.peers)))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that a worker gets from its launcher."""
        given = (self.leash, self.pulse, self.drawing, self.terminal)
        return tuple(fd for fd in given if fd is not None)


def _whole(place: Place) -> int:
    return int(place.number(least=0, whole=True))


def _files(place: Place) -> Files:
    table = place.table(Files._fields)
    named = {name: table.key(name).text() for name in ("ca", "cert", "key")}
    return Files.from_dict({**named, "revoked": table.key("revoked").read_or(Place.text, None)})


def _read_each(read: Callable[[Place], str]) -> Callable[[Place], dict[str, str]]:
    def read_all(place: Place) -> dict[str, str]:
        if place.value is None:
            raise place.wrong("nothing is said of the peers", mend='"peers": {}')
        return {name: read(each) for name, each in place.entries().items()}

    return read_all


_READERS: Mapping[str, Callable[[Place], Any]] = {
    "worker": Place.text,
    "cluster": Place.text,
    "peers": _read_each(Place.text),
    "addresses": _read_each(address),
    "run_id": Place.text,
    "leash": _whole,
    "launcher": _whole,
    # the rest may be left out
    "seed": _whole,
    "listen": address,
    "security": _files,
    "insecure": Place.truth,
    "gateway": address,
    "pulse": _whole,
    "patience": lambda place: float(place.number(least=1e-3)),
    "config": Place.text,
    "everywhere": Place.truth,
    "device": device,
    "drawing": _whole,
    "terminal": _whole,
}
_NEEDED = ("worker", "cluster", "peers", "addresses", "run_id", "leash", "launcher")


def _read(place: Place) -> Identity:
    """What is in a mapping, if it fits together. Nothing that was left out may turn off certificates."""
    table = place.table(_READERS)
    given = {name: each for name in _READERS if (each := table.key(name)).value is not None or name in _NEEDED}
    found = Identity(**{name: _READERS[name](each) for name, each in given.items()})
    if found.listen is not None and (found.security is None) != found.insecure:
        raise place.key("security").wrong(
            "a worker that listens has certificates, or is told to be insecure: one of the two",
            mend='"security": {"ca": ..., "cert": ..., "key": ...}',
        )
    if found.listen is None and found.peers:
        raise place.key("listen").wrong("peers have addresses, and this worker has none", mend='"listen": "host:port"')
    if found.peers.keys() != found.addresses.keys():
        raise place.key("addresses").wrong("each peer has an address", mend='"addresses": {"npu/0": "host:port"}')
    if found.worker in found.peers:
        raise place.key("peers").wrong(f"{found.worker!r} is its own peer", mend="name the others only")
    return found
