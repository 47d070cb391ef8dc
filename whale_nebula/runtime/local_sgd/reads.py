"""Reads and writes of a whole model under local SGD: reads first synchronise all clusters, writes restart the rounds.

They are put on the instance, as those of a run of several processes are: see `runtime.variables.reads`. A run
that is over is asked for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from whale_nebula import scopes
from whale_nebula.capture.keras_scopes import bears_scopes
from whale_nebula.runtime.run import Run, opened_run

READS = (
    "get_weights", "save", "save_weights", "export", "evaluate", "predict", "test_on_batch", "predict_on_batch",
)  # fmt: skip
WRITES = ("set_weights", "load_weights")
TRAINS = ("fit", "train_on_batch")
"""What trains apart inside the scopes, and writes alike in every process outside them."""


def meet_before_reads(models: Iterable[Any], run: Run) -> None:
    """In a run whose clusters train apart, let reads of these models settle what they have not told each other yet, and
    writes of them start anew.
    """
    for model in models if run.rounds is not None else ():
        for name in (*READS, *WRITES, *TRAINS):
            plain = getattr(model, name)
            if not hasattr(plain, "nebula_meets"):
                changed = functools.wraps(plain)(functools.partial(_call_after_meeting, plain, name))
                changed.nebula_meets = True  # type: ignore[attr-defined]
                changed.nebula_collective = True  # type: ignore[attr-defined]
                object.__setattr__(model, name, changed)


def _call_after_meeting(plain: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a model's method when all clusters have the same weights; after one that writes them, the rounds begin anew.

    Inside the scopes the step itself meets the others. A model that was built in them is never outside.
    """
    inside = name in TRAINS and (
        scopes.apart_of(scopes.open_frames()) or bears_scopes(getattr(plain, "__self__", None))
    )
    run = None if inside else opened_run()
    if run is not None:
        run.settle()
    found = plain(*args, **kwargs)
    run = None if inside or name in READS else opened_run()
    if run is not None and run.rounds is not None:
        run.rounds.restart()
    return found
