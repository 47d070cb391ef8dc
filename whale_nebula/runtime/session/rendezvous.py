"""Rendezvous: a launched process opens its links, and all processes exchange HELLO."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import whale_nebula
from whale_nebula import __version__
from whale_nebula.config import Config
from whale_nebula.errors import ConfigError, DeadlineError, OtherWorkersError, PlanMismatchError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.launch.attach import Attachment
from whale_nebula.launch.placement import free_port
from whale_nebula.launch.worker_exit import WorkerExit, exit_agreement
from whale_nebula.runtime.replicas.collectives import Collectives, can_open, find_listening_port, open_collectives
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.session.task import find_local_address, list_tasks
from whale_nebula.runtime.variables.remote import Ledger


def open_session(attachment: Attachment, config: Config) -> Session:
    """The session of this process, with links to all peers, which connect in the background."""
    session = Session(attachment.worker, {}, config.patience, private=config.private, epoch=attachment.epoch)
    joining = {worker: each for worker, each in attachment.absent.items() if worker not in attachment.launched}
    if not attachment.peers and not joining:
        return session
    from whale_nebula.security import Credentials
    from whale_nebula.transport.deadlines import Deadlines
    from whale_nebula.transport.grpc.links import GrpcLinks, Place

    security = attachment.security
    place = Place(
        run=attachment.run_id,
        here=attachment.worker,
        peers={peer: attachment.addresses.get(peer) for peer in attachment.peers},
        listen=attachment.listen,
        gateway=attachment.gateway,
        credentials=None if security is None else Credentials.load(security),
        all_workers=attachment.all_workers,
        epoch=attachment.epoch,
        absent=None if attachment.requests_path is None else tuple(sorted(attachment.absent)),
        launched=attachment.launched,
        anchor=attachment.anchor,
        joining=joining,
        max_workers={name: limits.most for name, limits in config.elastic.items()},
    )
    joined = GrpcLinks(
        place,
        expect=session.expected,
        deadlines=Deadlines(patience=config.patience, gateway_grace=config.gateway_grace),
        versions={"whale_nebula": __version__},
        arrive=lambda error: exit_agreement.note_available_workers(error.counts),
    )
    session.links, session.leave = dict(joined.links), joined.close
    session.await_return, session.is_absent = joined.await_return, joined.is_absent
    return session


_log = logging.getLogger("whale_nebula.runtime.session.rendezvous")
_DOING = "opening the collectives of a cluster"


def open_cluster_collectives(session: Session, mates: Mapping[str, str]) -> Collectives | None:
    """TensorFlow's collectives between this worker and its `mates`, which maps the other workers of its cluster to
    their hosts as addressed from here; None in all of them if TensorFlow had already started in one. Tasks are in the
    order of the workers' names. Collective among them.
    """
    workers = sorted([session.worker, *mates])
    index = workers.index(session.worker)
    able = can_open(index, len(workers))
    host = find_local_address(mates[min(mates)]) if mates else "127.0.0.1"
    port = find_listening_port() or free_port()
    own = {"able": able, "address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
    sheets = {session.worker: own, **session.exchange(_DOING, own, mates)}
    too_late = [worker for worker in workers if not sheets[worker]["able"]]
    if too_late:
        _log.info("no collectives between %s: TensorFlow had started in %s", ", ".join(workers), ", ".join(too_late))
        return None
    addresses = [sheets[worker]["address"] for worker in workers]
    found = open_collectives(
        index, addresses, patience=session.patience, lost=lambda: session.find_lost_link_error(mates)
    )
    session.exchange(_DOING, {}, mates)  # afterwards all of them listen
    return found


def join(attachment: Attachment, seed: int | None, config: Config) -> tuple[Ledger, dict[str, str]]:
    """Open the session of this process, and agree with the others on seed and config, in which differences are refused.
    Also returns a text for each worker: the same for those with this one's host and folder, "" for all others.
    """
    session = open_session(attachment, config)
    sheet = _build_sheet(attachment, seed, config)
    try:
        greetings = session.hello(sheet)
        if attachment.heartbeat_sender is not None:
            attachment.heartbeat_sender.send(epoch=session.epoch)
        _agree_on_seed(attachment.worker, seed, greetings)
        _agree_on_config(attachment.worker, sheet, greetings)
    except OtherWorkersError as error:
        exit_agreement.conclude_step(
            {session.worker: " ".join(["", *(f"{worker}={count}" for worker, count in error.counts.items())])}
        )
        raise WorkerExit(error.what) from None
    except DeadlineError as error:
        error.missed = session.find_missing_peers()
        session.fail(error)  # others, whose patience ends later, see that this worker is not missing
        raise
    except (ConfigError, PlanMismatchError) as error:
        session.fail(error, last=True)  # after the greeting, which others may not have received yet
        session.close()
        raise
    hosts = {
        attachment.worker: sheet["host"],
        **{peer: _find_host(attachment, peer, greetings[peer]) for peer in greetings},
    }
    return Ledger(
        session, keeps_own_weights=config.weights == "own", collectives=_open_collectives(attachment, session)
    ), hosts


def _open_collectives(attachment: Attachment, session: Session) -> Collectives | None:
    """TensorFlow's collectives between the workers of this cluster, if there are several and all can take part."""
    mates = [worker for worker in list_tasks(attachment) if worker != attachment.worker]
    addresses = {mate: attachment.addresses.get(mate, "127.0.0.1:0") for mate in mates}
    hosts = {mate: address.rpartition(":")[0] for mate, address in addresses.items()}
    return open_cluster_collectives(session, hosts) if hosts else None


def _build_sheet(attachment: Attachment, seed: int | None, config: Config) -> dict[str, Any]:
    return {
        "run": attachment.run_id,
        "whale_nebula": whale_nebula.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "host": digest_host(attachment.run_id, attachment.worker, attachment.home),
        **describe_config(config),
        "seed": seed,
        "launched": attachment.seed,
        "workers": list(attachment.all_workers),
    }


def _agree_on_seed(worker: str, seed: int | None, greetings: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse different seeds of scripts and configs; the launcher's was set before the script started."""
    named = {worker: str(seed), **{peer: str(sheet.get("seed")) for peer, sheet in greetings.items()}}
    if len(set(named.values())) > 1:
        seeds = ", ".join(f"{each}: {escape_foreign_text(named[each])}" for each in sorted(named))
        raise ConfigError(
            f"the processes have different seeds: {seeds}",
            why="they would start with different weights",
            mend="use the same seed in every process: in nb.init(seed=1), or in its config",
        )


_COMMON_KEYS = {
    "results": "the receivers of a step's results are part of the plan, which must be the same in all processes",
    "weights": "all processes must take part when a save gathers the model",
    "inputs": "every process traces the same step, with these shapes and dtypes for inputs that it does not have",
    "elastic": "the number of workers with which the run may continue must be the same in all processes",
}
"""The keys that must be the same in every config of a run, and why."""


def describe_config(config: Config) -> dict[str, Any]:
    """The parts of a config that must be the same in all processes, for their comparison."""
    forms = {name: [form.dtype, list(form.shape)] for name, form in sorted(config.inputs.items())}
    limits = {name: [each.least, each.most] for name, each in sorted(config.elastic.items())}
    return {"results": config.results, "weights": config.weights, "inputs": forms, "elastic": limits}


def _agree_on_config(worker: str, own: Mapping[str, Any], greetings: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse configs that differ in keys that must be the same."""
    for key, why in _COMMON_KEYS.items():
        named = {each: str(sheet.get(key)) for each, sheet in sorted({worker: own, **greetings}.items())}
        if len(set(named.values())) > 1:
            raise ConfigError(
                f"the configs of the processes differ in {key!r}: "
                + "; ".join(f"{each}: {escape_foreign_text(value)}" for each, value in named.items()),
                why=why,
                mend=f"write the same {key!r} into the config of every cluster",
            )


def digest_host(run: str, worker: str, home: str | None = None) -> str:
    """Digest that identifies a worker's host and folder: processes that share a file system write a file once.
    Processes of an account share its `home`, and nothing with others.

    It reveals neither, because the kernel's random boot number prevents guessing them. A process on this host can
    compute the digest of every worker, and a process elsewhere that of none, so repeating another worker's digest
    proves nothing.
    """
    path = os.path.realpath(home or ".")
    folder = os.stat(path)  # with its numbers: two containers of one host may have the same name and path
    place = f"{_read_boot_number()}\n{socket.gethostname()}\n{path}\n{folder.st_dev} {folder.st_ino}"
    return hashlib.sha256(f"{run}\n{worker}\n{place}".encode()).hexdigest()[:32]


def _find_host(attachment: Attachment, peer: str, sheet: Mapping[str, Any]) -> str:
    """The digest of this worker for a peer that proves to have the same host and folder, otherwise "". Without a boot
    number a digest can be guessed: then only workers of this launcher or of this cluster are trusted.
    """
    near = attachment.has_one_launcher or attachment.peers[peer] == attachment.cluster
    proven = sheet.get("host") == digest_host(attachment.run_id, peer, attachment.home) and (
        near or bool(_read_boot_number())
    )
    return digest_host(attachment.run_id, attachment.worker, attachment.home) if proven else ""


def _read_boot_number() -> str:
    try:
        return _BOOT.read_text()
    except OSError:
        return ""


_BOOT = Path("/proc/sys/kernel/random/boot_id")
