"""The workers of a cluster tell each other over their links, which know who is who, where their tasks listen."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from whale_nebula.runtime.collectives import Collectives, can_open, listening_port, open_collectives
from whale_nebula.runtime.reach import comes_from, free_port
from whale_nebula.runtime.session import Session

_log = logging.getLogger("whale_nebula.runtime.tasks")
_DOING = "opening the collectives of a cluster"


def open_among(session: Session, mates: Mapping[str, str]) -> Collectives | None:
    """The collectives of this worker and its `mates` (worker to the host by which this one calls it).

    Tasks are in the order of the workers' names. None in all of them if TensorFlow had started in one before: they do
    without, then. All mates call this at the same point.
    """
    workers = sorted([session.worker, *mates])
    index = workers.index(session.worker)
    able = can_open(index, len(workers))
    host = comes_from(mates[min(mates)]) if mates else "127.0.0.1"
    own = {"able": able, "address": _address(host, listening_port() or free_port())}
    told = {session.worker: own, **session.exchange(_DOING, own, mates)}
    started = [worker for worker in workers if not told[worker]["able"]]
    if started:
        _log.info("no collectives between %s: TensorFlow had started in %s", ", ".join(workers), ", ".join(started))
        return None
    addresses = [told[worker]["address"] for worker in workers]
    found = open_collectives(index, addresses, patience=session.patience, lost=lambda: session.lost(mates))
    session.exchange(_DOING, {}, mates)  # from here on all of them listen
    return found


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
