"""A process that a launcher started joins the others: sockets become links, and all say HELLO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import whale_nebula
from whale_nebula.config import Config
from whale_nebula.errors import ConfigError
from whale_nebula.errors.foreign_text import escape_foreign_text
from whale_nebula.launch.attach import Attachment
from whale_nebula.runtime.collective import host_digest
from whale_nebula.runtime.collectives import Collectives
from whale_nebula.runtime.early import tasks_of
from whale_nebula.runtime.elsewhere import Ledger
from whale_nebula.runtime.expected import Expected
from whale_nebula.runtime.linking import join_links
from whale_nebula.runtime.session import Session
from whale_nebula.runtime.tasks import open_among


def join(attachment: Attachment, seed: int | None, config: Config) -> tuple[Ledger, dict[str, str]]:
    """Open the session of this process; all name the same seed, or none. Gives a digest of every worker's host too."""
    expected = Expected()
    joined = join_links(attachment, expected, config)
    session = Session(attachment.worker, joined.links, config.patience, expected, joined.close, private=config.private)
    sheet = _sheet(attachment, seed, config)
    told = session.hello(sheet)
    _agree_on_seed(attachment.worker, seed, told)
    _agree_on_config(attachment.worker, sheet, told)
    hosts = {attachment.worker: sheet["host"], **{peer: str(theirs["host"]) for peer, theirs in told.items()}}
    return Ledger(session, own=config.weights == "own", collectives=_collectives(attachment, session)), hosts


def _collectives(attachment: Attachment, session: Session) -> Collectives | None:
    """TensorFlow's sums between the workers of this cluster, where it has several, and each can be asked in time."""
    mates = [worker for worker in tasks_of(attachment) if worker != attachment.worker]
    addresses = {mate: attachment.addresses.get(mate, "127.0.0.1:0") for mate in mates}
    hosts = {mate: address.rpartition(":")[0] for mate, address in addresses.items()}
    return open_among(session, hosts) if hosts else None


def _sheet(attachment: Attachment, seed: int | None, config: Config) -> dict[str, Any]:
    return {
        "run": attachment.run_id,
        "whale_nebula": whale_nebula.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "host": host_digest(attachment.run_id),
        **_told_of(config),
        "seed": seed,
        "launched": attachment.seed,
    }


def _agree_on_seed(worker: str, seed: int | None, told: Mapping[str, Mapping[str, Any]]) -> None:
    """A seed that a script names must be named by all; the launcher's was set before the script began."""
    named = {worker: str(seed), **{peer: str(sheet["seed"]) for peer, sheet in told.items()}}
    if len(set(named.values())) > 1:
        said = ", ".join(f"{each}: {escape_foreign_text(named[each])}" for each in sorted(named))
        raise ConfigError(
            f"the processes name different seeds: {said}",
            why="they would start from different weights",
            mend="nb.init(seed=1) in every process, or in none",
        )


_ALIKE = {
    "results": "who is sent a tensor that a step returns is a part of the plan, and all have the same plan",
    "weights": "whether a save gathers the model is something that all do together",
    "inputs": "every process traces the same step, by these forms of the inputs that it does not have",
}
"""What every config of a run must say alike, and why."""


def _told_of(config: Config) -> dict[str, Any]:
    forms = {name: [form.dtype, list(form.shape)] for name, form in sorted(config.inputs.items())}
    return {"results": config.results, "weights": config.weights, "inputs": forms}


def _agree_on_config(worker: str, own: Mapping[str, Any], told: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse configs that differ where they must not."""
    for key, why in _ALIKE.items():
        named = {each: str(sheet.get(key)) for each, sheet in sorted({worker: own, **told}.items())}
        if len(set(named.values())) > 1:
            raise ConfigError(
                f"the configs of the processes do not say the same of {key!r}: "
                + "; ".join(f"{each}: {escape_foreign_text(said)}" for each, said in named.items()),
                why=why,
                mend=f"write the same {key!r} into the config of every cluster",
            )
