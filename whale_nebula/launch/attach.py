"""The worker's side of the launcher: who am I, and where are the others?"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whale_nebula.config.schema import PATIENCE_SECONDS
from whale_nebula.errors import ConfigError
from whale_nebula.launch.identity import VARIABLE, Identity, SecurityFiles
from whale_nebula.launch.picture import Picture
from whale_nebula.launch.pulse import Heart

LINGER_SECONDS = 1.0
_DEAD = "ZX"


def send(group: int, number: int) -> None:
    """Send a signal to all of a group, if there is anybody."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def members(group: int) -> list[int]:
    """The processes of a group that are alive.

    >>> os.getpid() in members(os.getpgrp())
    True
    """
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and _within(each, group)]


def _within(process: Path, group: int) -> bool:
    with contextlib.suppress(OSError):
        state, _, found = _stat(process)
        return int(found) == group and state not in _DEAD
    return False


def _stat(process: Path) -> list[str]:
    """The state of a process, its parent and its group."""
    return (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:3]


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have, in whatever group or session they are.

    >>> descendants(os.getpid())
    []
    """
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = _stat(each)[:2]
                if state not in _DEAD:
                    children.setdefault(int(parent), []).append(int(each.name))
    found = list(children.get(process, ()))
    for one in found:  # grows meanwhile
        found += children.get(one, ())
    return found


def end_descendants(process: int) -> None:
    """Kill all that a process has started, also what is in a session of its own. A daemon whose parent has ended is not
    found.
    """
    limit = time.monotonic() + LINGER_SECONDS
    while (found := descendants(process)) and time.monotonic() < limit:
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.01)  # they may have started others meanwhile


def end(group: int, linger: float = LINGER_SECONDS) -> None:
    """End what is left of a group: with SIGTERM, and whoever lingers with SIGKILL.

    Its leader must still be there, dead but not waited for: until then nobody else can get the group's number.
    """
    if not members(group):
        return
    send(group, signal.SIGTERM)
    limit = time.monotonic() + linger
    while members(group) and time.monotonic() < limit:
        time.sleep(0.02)
    send(group, signal.SIGKILL)


EXIT_ORPHANED = 71


@dataclass(frozen=True)
class Attachment:
    """What the launcher has given to this process: its place in the run, and a socket to every peer or its address.

    Workers with addresses listen at `listen` and have `security`, which is None only where the config says
    `insecure: true`. Where `gateway` is not None, other clusters are reached through it and not by their addresses.
    `heart` beats where the launcher listens. `everywhere` says that it started the workers of all clusters. `picture`
    is what is drawn on the launcher's terminal, if it has one.
    """

    worker: str
    cluster: str
    peers: Mapping[str, str]  # worker -> cluster
    sockets: Mapping[str, socket.socket]
    run_id: str
    seed: int | None
    listen: str | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)  # worker -> "host:port"
    security: SecurityFiles | None = None
    gateway: str | None = None
    patience: float = PATIENCE_SECONDS
    config: str | None = None
    everywhere: bool = False
    device: str | None = None
    heart: Heart | None = field(default=None, compare=False, repr=False)
    picture: Picture | None = field(default=None, compare=False, repr=False)

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run, this one too, sorted."""
        return tuple(sorted((self.worker, *self.peers)))


@functools.cache
def attach() -> Attachment | None:
    """What the launcher has told this process, or None where no launcher started it; the same at every call.

    From the first call on the process ends itself when its launcher is gone: no worker outlives its run. And its
    heart beats, where the launcher listens for it, until all is done that Python does at its exit.

    >>> attach() is None
    True
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    identity = Identity.from_json(text)
    if os.getppid() != identity.launcher:
        raise ConfigError(
            f"this process is not the worker '{identity.worker}' that {VARIABLE} speaks of",
            why="that worker, or its launcher, has ended, or this process was started by the worker",
            mend=f"start processes of your own without {VARIABLE} in their environment",
        )
    heart = None if identity.pulse is None else Heart(identity.pulse)
    os.set_inheritable(identity.leash, False)
    threading.Thread(target=_end_with_launcher, args=(identity.leash,), name="nebula-leash", daemon=True).start()
    if heart is not None:
        atexit.register(heart.end)  # what was registered first is done last
    return _attachment(identity, heart)


def _attachment(identity: Identity, heart: Heart | None) -> Attachment:
    peers = identity.peers.items()
    return Attachment(
        worker=identity.worker,
        cluster=identity.cluster,
        peers={name: peer.cluster for name, peer in peers},
        sockets={name: _adopt(peer.fd) for name, peer in peers if peer.fd is not None},
        run_id=identity.run_id,
        seed=identity.seed,
        listen=identity.listen,
        addresses={name: peer.address for name, peer in peers if peer.address is not None},
        security=identity.security,
        gateway=identity.gateway,
        patience=identity.patience,
        config=identity.config,
        everywhere=identity.everywhere,
        device=identity.device,
        heart=heart,
        picture=_picture(identity),
    )


def _picture(identity: Identity) -> Picture | None:
    if identity.picture is None or identity.terminal is None:
        return None
    return Picture(identity.picture, identity.terminal)


def _adopt(fd: int) -> socket.socket:
    """The socket behind a descriptor. No process that this one starts gets it: it would outlive us there."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def _end_with_launcher(leash: int) -> None:
    """Nothing is ever written to the leash: a read returns when the launcher is gone, by whatever death.

    What this process has started goes with it: the launcher gave it a process group of its own, and what is in
    another session is found by its parent.
    """
    while os.read(leash, 1):
        pass
    end_descendants(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(EXIT_ORPHANED)
