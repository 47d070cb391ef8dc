"""Methods of a Keras model that need all of it: in a run of several processes, every process calls them together.

They are put on the instance when the first step is made that reads its variables, so nothing of Keras is patched.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from whale_nebula.runtime.elsewhere import Ledger
from whale_nebula.runtime.own_parts import Plain, load_own, save_own
from whale_nebula.runtime.run import Run

WRITES = ("save", "save_weights", "export")


def make_collective(model: Any, ledger: Ledger, writes_here: bool, cluster: str = "", first: bool = True) -> None:
    """Let a model's reads and saves gather it first; only one process of a host writes files.

    Where each cluster keeps its own parts, the `first` worker of each saves those, and all of them load them.
    """
    _replace(model, "get_weights", functools.partial(_reading, ledger, lambda: _ids(model)))
    if ledger.own:
        _replace(model, "save_weights", functools.partial(_marked, save_own(ledger, cluster, first)))
        _replace(model, "load_weights", functools.partial(_marked, load_own(cluster)))
    for name in WRITES:
        _replace(model, name, functools.partial(_writing, ledger, writes_here))


def remember_results(model: Any) -> Callable[[Any], Any]:
    """Let a model's `get_metrics_result` give what its last step returned; gives what is to be called with that.

    Keras ends epochs and evaluations with the results of its metrics, read from their variables. A process that does
    not hold these has nothing to read; what a step returns comes from whoever computes it, the same in every process.
    """
    plain = model.get_metrics_result
    if hasattr(plain, "nebula_remember"):
        remembered: Callable[[Any], Any] = plain.nebula_remember
        return remembered
    last: list[Any] = []

    @functools.wraps(plain)
    def get_metrics_result() -> Any:
        if not last or not tf.executing_eagerly():
            return plain()
        return last[0] if isinstance(last[0], dict) else {}

    def remember(logs: Any) -> Any:
        last[:] = [logs]
        return logs

    get_metrics_result.nebula_remember = remember  # type: ignore[attr-defined]
    object.__setattr__(model, "get_metrics_result", get_metrics_result)
    return remember


def make_all_collective(models: Iterable[Any], run: Run) -> None:
    """Do so with those of these models that have variables of this run's programs; alone there is nobody to ask."""
    if run.alone:
        return
    kept = run.ledger.kept.keys()
    for model in models:
        if model.built and not kept.isdisjoint(_ids(model)):
            make_collective(model, run.ledger, run.writes_files, run.here().cluster, run.first_of_cluster)


def _ids(model: Any) -> set[int]:
    return {id(getattr(variable, "value", variable)) for variable in model.weights}


def _replace(model: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    plain = getattr(model, name)
    if not hasattr(plain, "nebula_collective"):
        object.__setattr__(model, name, make(plain))


def _reading(ledger: Ledger, only: Callable[[], set[int]], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> Any:
        with ledger.gathered(only()):
            return plain(*args, **kwargs)

    whole.nebula_collective = True  # type: ignore[attr-defined]
    return whole


def _marked(change: Callable[[Plain], Plain], plain: Plain) -> Plain:
    changed = functools.wraps(plain)(change(plain))
    changed.nebula_collective = True  # type: ignore[attr-defined]
    return changed


def _writing(ledger: Ledger, writes_here: bool, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Gather the model and leave the file to the process of this host that writes it; it is there on return."""

    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> None:
        with ledger.gathered():
            with ledger.told():
                if writes_here:
                    plain(*args, **kwargs)
            ledger.session.meet(f"the end of {plain.__name__}")

    whole.nebula_collective = True  # type: ignore[attr-defined]
    return whole


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_digest(run: str) -> str:
    """What tells this host and folder from others in a run: processes that share a file system write a file once.

    It names neither, and the random number that a kernel draws when it starts keeps anybody from guessing them.
    """
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{run}\n{boot}\n{socket.gethostname()}\n{os.path.realpath('.')}".encode()).hexdigest()[:32]
