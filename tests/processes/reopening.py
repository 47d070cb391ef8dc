"""Another run between the same two processes: a pair that failed once is of no more use, and starting is dear."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import time
from pathlib import Path
from typing import Any

import whale_nebula as nb
import whale_nebula.runtime.run
from whale_nebula.launch import attach

_number = itertools.count()
SECONDS = 60.0


def reopen(folder: Path, **options: Any) -> nb.Run:
    """Leave the run that is open, if one is, and open the next one, as `reconnect` has prepared it."""
    reconnect(folder)
    return nb.init(**options)


def reconnect(folder: Path) -> None:
    """Leave the run that is open, if one is; in the next one both workers listen at other ports.

    Behind gateways they dial these again, and listen nowhere.
    """
    nb.shutdown()
    launched = attach()
    assert launched is not None
    (peer,) = launched.peers
    number = next(_number)
    own = _free_address()
    _tell(folder / f"run{number}-{launched.cluster}", own)
    theirs = _hear(folder / f"run{number}-{launched.peers[peer]}")
    again = launched if launched.gateway else dataclasses.replace(launched, listen=own, addresses={peer: theirs})
    whale_nebula.runtime.run.attach = lambda: again


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _tell(path: Path, text: str) -> None:
    """Write a file that is there only once it is whole."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _hear(path: Path) -> str:
    limit = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"nobody has written {path}"
        time.sleep(0.02)
    return path.read_text()
