"""The identity that a launcher gives each worker: one environment variable with a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from whale_nebula.config.place import Place, address, device
from whale_nebula.config.schema import PATIENCE_SECONDS
from whale_nebula.errors import ConfigError

VARIABLE = "WHALE_NEBULA_WORKER"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker: its cluster, and the address at which it listens."""

    cluster: str
    address: str


@dataclass(frozen=True, slots=True)
class SecurityFiles:
    """Where a worker's certificates lie: whom it trusts, who it is, its key, and who is trusted no more."""

    ca: str
    cert: str
    key: str
    revoked: str | None = None


@dataclass(frozen=True)
class Identity:
    """Who a worker is, whom it is connected to, and how it notices that its launcher is gone.

    `leash` is the file descriptor of a pipe that the launcher holds open as long as it lives, `pulse` that of the pipe
    into which the worker's heart beats. Workers with addresses `listen`, and have files of certificates unless the
    config says `insecure`; `config` is the path of that config. `everywhere` says that the launcher started the workers
    of all clusters (`--all`). `device` is the one of its host that the worker has, where the config says so. Where the
    launcher has a terminal, `terminal` is that, and `picture` the pipe into which a worker draws for it.

    >>> identity = Identity("gpu/0", "gpu", {}, "run-1", 7, leash=6, launcher=100)
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
    listen: str | None = None
    security: SecurityFiles | None = None
    insecure: bool = False
    gateway: str | None = None
    pulse: int | None = None
    patience: float = PATIENCE_SECONDS
    config: str | None = None
    everywhere: bool = False
    device: str | None = None
    picture: int | None = None
    terminal: int | None = None

    def to_json(self) -> str:
        """The text that goes into the variable."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Read the variable; whatever no launcher wrote is refused."""
        try:
            return _identity(Place(json.loads(text), source=VARIABLE))
        except ConfigError as error:
            raise _unread(f"{error.what} ({error.where})") from None
        except ValueError as error:
            raise _unread(repr(error)) from None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that a worker gets from its launcher."""
        given = (self.leash, self.pulse, self.picture, self.terminal)
        return tuple(fd for fd in given if fd is not None)


def _unread(why: str) -> ConfigError:
    return ConfigError(
        f"the environment variable {VARIABLE} cannot be read: {why}",
        why="it is written by the launcher for each worker that it starts, and by nobody else",
        mend=f"start workers with 'whale-nebula run', or unset {VARIABLE}",
    )


def _identity(place: Place) -> Identity:
    table = place.table(each.name for each in fields(Identity))
    found = Identity(
        worker=table.key("worker").text(),
        cluster=table.key("cluster").text(),
        peers={name: _peer(each) for name, each in _there(table.key("peers")).named().items()},
        run_id=table.key("run_id").text(),
        seed=table.key("seed").given(_whole, None),
        leash=_whole(table.key("leash")),
        launcher=_whole(table.key("launcher")),
        listen=table.key("listen").given(address, None),
        security=table.key("security").given(_files, None),
        insecure=table.key("insecure").given(Place.truth, False),
        gateway=table.key("gateway").given(address, None),
        pulse=table.key("pulse").given(_whole, None),
        patience=table.key("patience").given(_seconds, PATIENCE_SECONDS),
        config=table.key("config").given(Place.text, None),
        everywhere=table.key("everywhere").given(Place.truth, False),
        device=table.key("device").given(device, None),
        picture=table.key("picture").given(_whole, None),
        terminal=table.key("terminal").given(_whole, None),
    )
    _check(place, found)
    return found


def _there(place: Place) -> Place:
    if place.value is None:
        raise place.wrong("nothing is said of the peers", mend='"peers": {}')
    return place


def _peer(place: Place) -> Peer:
    table = place.table(each.name for each in fields(Peer))
    return Peer(table.key("cluster").text(), address(table.key("address")))


def _files(place: Place) -> SecurityFiles:
    table = place.table(each.name for each in fields(SecurityFiles))
    ca, cert, key = (table.key(name).text() for name in ("ca", "cert", "key"))
    return SecurityFiles(ca, cert, key, table.key("revoked").given(Place.text, None))


def _check(place: Place, found: Identity) -> None:
    """What must fit together. Nothing that was left out may turn off certificates."""
    if found.listen is not None and (found.security is None) != found.insecure:
        raise place.key("security").wrong(
            "a worker that listens has certificates, or is told to be insecure: one of the two",
            mend='"security": {"ca": ..., "cert": ..., "key": ...}',
        )
    if found.listen is None and found.peers:
        raise place.key("listen").wrong("peers have addresses, and this worker has none", mend='"listen": "host:port"')
    if found.worker in found.peers:
        raise place.key("peers").wrong(f"{found.worker!r} is its own peer", mend="name the others only")


def _whole(place: Place) -> int:
    return int(place.number(least=0, whole=True))


def _seconds(place: Place) -> float:
    return float(place.number(least=1e-3))
