"""A worker of a run that keeps results where they are made."""

from __future__ import annotations

import numpy as np

import whale_nebula as nb
from tests.processes.lesson import X, Y, fit, hexed, measured, taught
from tests.processes.telling import bits, tell
from whale_nebula.errors import CollectiveReadError


def seen(result: object) -> object:
    """The bits of a result, or what reading it raises."""
    try:
        return bits([np.asarray(result)])
    except CollectiveReadError as refused:
        return refused.what


nb.init({"results": "owner"})
model = taught()
tell("history", fit(model, epochs=1))
tell("evaluate", hexed(model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)))
tell("predict", seen(model.predict(X, batch_size=12, verbose=0)))
tell("sent", {name: link.raw_bytes for name, link in nb.last_report().links.items()})
tell("one batch", seen(model.predict_on_batch(X[:4])))
found = measured(X[:7])
tell("function", {name: seen(value) for name, value in found.items()})
tell("said", {name: repr(value) for name, value in found.items()})
nb.shutdown()
