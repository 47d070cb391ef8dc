"""Reads and writes of a whole model under local SGD: reads first synchronise all clusters, writes restart the rounds.

They are put on the instance, as those of a run of several processes are: see `runtime.collective`. A run that is over
is asked for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from whale_nebula import scopes
from whale_nebula.runtime.run import Run, opened_run

READS = (
    "get_weights", "save", "save_weights", "export", "evaluate", "predict", "test_on_batch", "predict_on_batch",
)  # fmt: skip
WRITES = ("set_weights", "load_weights")
TRAINS = ("fit", "train_on_batch")
"""What trains apart inside the scopes, and writes alike in every process outside them."""

Method = Callable[..., Any]


def meet_before_reads(models: Iterable[Any], run: Run) -> None:
    """In a run whose clusters train apart, let reads of these models settle what they have not told each other yet, and
    writes of them start anew.
    """
    for model in models if run.rounds is not None else ():
        for names, change in ((READS, _reading), (WRITES, _writing), (TRAINS, _training)):
            for name in names:
                _replace(model, name, change)


def _replace(model: Any, name: str, change: Callable[[Method], Method]) -> None:
    plain = getattr(model, name)
    if not hasattr(plain, "nebula_meets"):
        changed = functools.wraps(plain)(change(plain))
        changed.nebula_meets = True  # type: ignore[attr-defined]
        changed.nebula_collective = True  # type: ignore[attr-defined]
        object.__setattr__(model, name, changed)


def _settle() -> None:
    run = opened_run()
    if run is not None:
        run.settle()


def _restart() -> None:
    run = opened_run()
    if run is not None and run.rounds is not None:
        run.rounds.restart()


def _reading(plain: Method) -> Method:
    def read(*args: Any, **kwargs: Any) -> Any:
        _settle()
        return plain(*args, **kwargs)

    return read


def _writing(plain: Method) -> Method:
    def write(*args: Any, **kwargs: Any) -> Any:
        _settle()
        found = plain(*args, **kwargs)
        _restart()
        return found

    return write


def _training(plain: Method) -> Method:
    writing = _writing(plain)

    def train(*args: Any, **kwargs: Any) -> Any:
        """Inside the scopes the step itself meets the others. A model that was built in them is never outside."""
        return (plain if scopes.apart_of(scopes.open_frames()) or _bears(plain) else writing)(*args, **kwargs)

    return train


def _bears(method: Method) -> bool:
    from whale_nebula.capture.keras_scopes import bears_scopes

    return bool(bears_scopes(getattr(method, "__self__", None)))
