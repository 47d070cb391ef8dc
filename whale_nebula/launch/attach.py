"""Identity of a worker process, which its launcher passes in one environment variable as a JSON object."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from whale_nebula.config.schema import PATIENCE_SECONDS
from whale_nebula.errors import ConfigError, CredentialsError
from whale_nebula.launch.heartbeat import HeartbeatSender
from whale_nebula.launch.job import end_descendants
from whale_nebula.launch.worker_output import PictureWriter
from whale_nebula.plain import from_plain
from whale_nebula.security.files import Files
from whale_nebula.security.tenant import Tenant

VARIABLE = "WHALE_NEBULA_WORKER"


@dataclass(frozen=True)
class Identity:
    """Identity of a worker: its name, its connections, and the pipe by which it notices that its launcher has ended.

    `peers` maps all other workers to their clusters, `addresses` to where they listen. `launcher_pipe` is the file
    descriptor of a pipe that the launcher holds open while it runs, `heartbeat_pipe` that of the pipe for heartbeats.
    Workers with addresses `listen`, and have certificate files unless the config is `insecure`; with a `gateway`, other
    clusters are reached through it. `config` is the path of that config. `has_one_launcher` is true if this launcher
    has started the workers of all clusters (`--all`). `device` is the worker's device on its host, if the config names
    one. If the launcher has a terminal, `terminal` is its descriptor, and `drawing` the pipe for a worker's drawings on
    it. `epoch` counts the restarts of the workers, `memory` is an in-memory folder of this host that exists while the
    launcher runs, and `previous_end` is when the previous start ended, in seconds since 1970. The launcher reads the
    last report of each worker from the folder `reports`. In elastic runs, `absent` are the addresses of the workers
    that the run continues without, and to the file `requests_path` the launcher writes the requested numbers of
    workers; `launched` are all workers that the launcher may start, and the `anchor` is the worker whose launcher
    decides on those of other launchers. If the certificates name an account, it is the `tenant`, and `home` its folder.
    A standby process knows only the worker's name and the socket `standby`, from which it receives its identity.

    >>> identity = Identity("gpu/0", "gpu", {}, {}, "run-1", 7, launcher_pipe=6, launcher=100)
    >>> Identity.from_json(identity.to_json()) == identity
    True
    """

    worker: str
    cluster: str
    peers: Mapping[str, str]
    addresses: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    seed: int | None = None
    launcher_pipe: int = 0
    launcher: int = 0
    listen: str | None = None
    security: Files | None = None
    insecure: bool = False
    gateway: str | None = None
    heartbeat_pipe: int | None = None
    patience: float = PATIENCE_SECONDS
    config: str | None = None
    has_one_launcher: bool = False
    device: str | None = None
    drawing: int | None = None
    terminal: int | None = None
    epoch: int = 0
    memory: str | None = None
    previous_end: float | None = None
    reports: str | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    requests_path: str | None = None
    launched: tuple[str, ...] = ()
    anchor: str | None = None
    tenant: Tenant | None = None
    home: str | None = None
    standby: int | None = None

    def to_json(self) -> str:
        """The value of the environment variable."""
        files = self.security and self.security.as_dict()
        return json.dumps({**asdict(self), "security": files}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Parse the variable; text that no launcher wrote is refused."""
        try:
            fields = json.loads(text)
            files = fields.pop("security", None)
            tenant = from_plain(Tenant | None, fields.pop("tenant", None))
            launched = tuple(fields.pop("launched", ()))
            identity = cls(
                **fields, launched=launched, security=Files.from_dict(files) if files else None, tenant=tenant
            )
            fault = identity._find_fault()
        except (ValueError, TypeError, AttributeError, CredentialsError) as error:
            fault = repr(error)
        if fault:
            raise ConfigError(
                f"invalid environment variable {VARIABLE}: {fault}",
                why="only the launcher sets it, for each worker that it starts",
                mend=f"start workers with 'whale-nebula run', or unset {VARIABLE}",
            )
        return identity

    def _find_fault(self) -> str:
        """The first inconsistency of the fields, or "". No missing field may disable certificates."""
        if self.listen is not None and (self.security is None) != (self.insecure is True):
            return "a worker that listens needs either certificates or insecure=true"
        if self.listen is None and self.peers:
            return "the worker has peers, but no address to listen on"
        if self.peers.keys() != self.addresses.keys():
            return "peers and addresses name different workers"
        if type(self.epoch) is not int or self.epoch < 0:
            return f"epoch {self.epoch!r} is not a non-negative integer"
        return f"{self.worker!r} is listed as its own peer" if self.worker in self.peers else ""

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run, this one too, sorted."""
        return tuple(sorted((self.worker, *self.peers)))

    @property
    def all_workers(self) -> tuple[str, ...]:
        """All workers of the config, also those without which the run continues, sorted."""
        return tuple(sorted((*self.workers, *self.absent)))

    def read_requested_counts(self) -> dict[str, int]:
        """The numbers of workers by cluster that the launcher requests for the next start; empty without a request."""
        if self.requests_path is None or not os.path.exists(self.requests_path):
            return {}
        with open(self.requests_path, encoding="utf-8") as file:
            return dict(json.load(file))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that a worker inherits from its launcher."""
        pipes = self.launcher_pipe, self.heartbeat_pipe, self.drawing, self.terminal
        return tuple(fd for fd in (pipes if self.standby is None else (self.standby,)) if fd is not None)


EXIT_ORPHANED = 71


@dataclass(frozen=True)
class Attachment(Identity):
    """The identity of this process, with `heartbeat_sender`, which sends heartbeats to the launcher, and `picture`,
    which draws on its terminal, if it has one.
    """

    heartbeat_sender: HeartbeatSender | None = field(default=None, compare=False, repr=False)
    picture: PictureWriter | None = field(default=None, compare=False, repr=False)


@functools.cache
def attach() -> Attachment | None:
    """The attachment of this process to its launcher, or None without a launcher; cached.
    From the first call on, this process exits when its launcher has exited: no worker outlives its run. If the launcher
    monitors heartbeats, they are sent until Python's exit handlers are done. A standby process waits here until it is
    to be a worker.

    >>> attach() is None
    True
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    identity = Identity.from_json(text)
    if os.getppid() != identity.launcher:
        raise ConfigError(
            f"this process is not worker '{identity.worker}', which {VARIABLE} identifies",
            why="that worker, or its launcher, has ended, or this process was started by the worker",
            mend=f"remove {VARIABLE} from the environment of processes that you start",
        )
    if identity.standby is not None:
        identity = _await_identity(identity.standby)
    heartbeat_sender = None if identity.heartbeat_pipe is None else HeartbeatSender(identity.heartbeat_pipe)
    os.set_inheritable(identity.launcher_pipe, False)
    pipe = identity.launcher_pipe
    threading.Thread(target=_end_with_launcher, args=(pipe,), name="nebula-launcher-pipe", daemon=True).start()
    if heartbeat_sender is not None:
        atexit.register(heartbeat_sender.announce_exit)  # what is registered first is called last
    fd, terminal = identity.drawing, identity.terminal
    picture = None if fd is None or terminal is None else PictureWriter(fd, terminal)
    return Attachment(**vars(identity), heartbeat_sender=heartbeat_sender, picture=picture)


_IMPORTED_IN_ADVANCE = (
    "tensorflow",
    "keras",
    "whale_nebula.runtime.keras",
    "whale_nebula.runtime.keras_hook",
    "whale_nebula.runtime.checkpoint.checkpoints",
    "whale_nebula.runtime.session.rendezvous",
    "whale_nebula.runtime.step.distributed",
    "whale_nebula.transport.grpc.links",
)
_MOST_DESCRIPTORS = 8


def _await_identity(standby: int) -> Identity:
    """Import what workers need, report that this standby process is ready, and wait for its identity. It exits if the
    launcher ends.
    """
    for name in _IMPORTED_IN_ADVANCE:
        importlib.import_module(name)
    with socket.socket(fileno=standby) as connection:
        with suppress(BrokenPipeError):
            connection.send(b"!")
        mark, received, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
        if not mark:
            os._exit(EXIT_ORPHANED)
        with connection.makefile() as file:
            identity = Identity.from_json(file.readline())
    numbers: dict[int | None, int] = dict(zip(identity.descriptors, received, strict=True))
    return replace(
        identity, launcher_pipe=numbers[identity.launcher_pipe], heartbeat_pipe=numbers.get(identity.heartbeat_pipe),
        drawing=numbers.get(identity.drawing), terminal=numbers.get(identity.terminal),
    )  # fmt: skip


def _end_with_launcher(launcher_pipe: int) -> None:
    """Wait for the end of the launcher, which holds the other end of the pipe open and writes nothing, and end this
    process with its descendants: those in its process group, which the launcher created, and, found by the numbers of
    their parents, those in other groups and sessions.
    """
    while os.read(launcher_pipe, 1):
        pass
    end_descendants(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(EXIT_ORPHANED)
