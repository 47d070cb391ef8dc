"""The worker's side of the launcher: read this worker's identity and the addresses of all others."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
from dataclasses import dataclass, field

from whale_nebula.errors import ConfigError
from whale_nebula.launch.identity import VARIABLE, Identity
from whale_nebula.launch.job import end_descendants
from whale_nebula.launch.processes import Picture
from whale_nebula.launch.pulse import Heart

EXIT_ORPHANED = 71


@dataclass(frozen=True)
class Attachment(Identity):
    """The identity of this very process: `heart` beats where the launcher listens, and `picture` is what is drawn on
    the launcher's terminal, if it has one.
    """

    heart: Heart | None = field(default=None, compare=False, repr=False)
    picture: Picture | None = field(default=None, compare=False, repr=False)


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
    fd, terminal = identity.drawing, identity.terminal
    picture = None if fd is None or terminal is None else Picture(fd, terminal)
    return Attachment(**vars(identity), heart=heart, picture=picture)


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
