"""Another run between the same two processes: a pair that failed once is of no more use, and starting is dear."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import time
from pathlib import Path
from typing import Any

import whale_nebula as nb
import whale_nebula.run
from whale_nebula.launch import attach

_number = itertools.count()
SECONDS = 60.0


def reopen(folder: Path, **options: Any) -> nb.Run:
    """Leave the run that is open, if one is, and open the next one over a new socket."""
    reconnect(folder)
    return nb.init(**options)


def reconnect(folder: Path) -> None:
    """Leave the run that is open, if one is; the next one will be over a new socket."""
    nb.shutdown()
    launched = attach()
    assert launched is not None
    (peer,) = launched.peers
    path = str(folder / f"run{next(_number)}.sock")
    connection = _listen(path) if launched.worker < peer else _dial(path)
    whale_nebula.run.attach = lambda: dataclasses.replace(launched, sockets={peer: connection})


def _listen(path: str) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(SECONDS)
        return listener.accept()[0]


def _dial(path: str) -> socket.socket:
    limit = time.monotonic() + SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > limit:
                raise
            time.sleep(0.02)
