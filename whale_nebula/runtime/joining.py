"""A process that a launcher started joins the others: sockets become links, and all say HELLO."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula
from whale_nebula.errors import ConfigError
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.collective import host_name
from whale_nebula.runtime.elsewhere import Ledger
from whale_nebula.runtime.session import Session
from whale_nebula.transport import SocketLink

PATIENCE = 120.0


def join(
    attachment: Attachment, seed: int | None, patience: float = PATIENCE
) -> tuple[Ledger, dict[str, str]]:
    """Open the session of this process; all processes leave it with the same seed. Gives every worker's host too."""
    workers = attachment.workers
    links = {
        peer: SocketLink(sock, attachment.worker, peer, workers, patience=patience)
        for peer, sock in attachment.sockets.items()
    }
    session = Session(attachment.worker, links, patience)
    sheet = _sheet(attachment, seed)
    told = session.hello(sheet)
    _agree_on_seed(attachment, seed, told)
    hosts = {attachment.worker: sheet["host"], **{peer: str(theirs["host"]) for peer, theirs in told.items()}}
    return Ledger(session), hosts


def _sheet(attachment: Attachment, seed: int | None) -> dict[str, Any]:
    return {
        "run": attachment.run_id,
        "whale_nebula": whale_nebula.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "threads": [
            tf.config.threading.get_intra_op_parallelism_threads(),
            tf.config.threading.get_inter_op_parallelism_threads(),
        ],
        "host": host_name(),
        "seed": seed,
        "launched": attachment.seed,
    }


def _agree_on_seed(attachment: Attachment, seed: int | None, told: Mapping[str, Mapping[str, Any]]) -> None:
    """A seed that a script names must be named by all; the launcher's was set before the script began."""
    named = {attachment.worker: seed, **{peer: sheet["seed"] for peer, sheet in told.items()}}
    if len(set(named.values())) > 1:
        raise ConfigError(
            f"the processes name different seeds: {', '.join(f'{w}: {s}' for w, s in sorted(named.items()))}",
            why="they would start from different weights",
            mend="nb.init(seed=1) in every process, or in none",
        )
    if seed is not None:
        keras.utils.set_random_seed(seed)
