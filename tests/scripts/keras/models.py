"""The registry: `SCRIPTS[name].run(Cut(stages, micro_batches))` gives what a small user's script left.

`Cut(0)` leaves the scope lines away; `check` compares the two. Importing this module registers every script.
"""

from __future__ import annotations

import numpy as np

from tests.parity.compare import assert_parity
from tests.parity.zoo import Outcome
from tests.scripts.keras import (
    callbacks,
    feeding,
    masks,
    metrics,
    mixture,
    nesting,
    optimizers,
    outputs,
    penalties,
    precision,
    retraining,
    state,
    steps,
    wider,
)
from tests.scripts.keras.script import SCRIPTS, Script

MODULES = (
    nesting, steps, outputs, masks, penalties, optimizers, precision, metrics, state, retraining, feeding, callbacks,
    mixture, wider,
)  # fmt: skip

__all__ = ["MODULES", "SCRIPTS", "Script", "check"]


def check(plain: Outcome, cut: Outcome, script: Script) -> None:
    """Parity; where a script computes in few bits, within its own precision."""
    if script.precision == Script.precision:
        assert_parity(plain, cut, script)
        return
    assert sorted(plain.history) == sorted(cut.history)
    for key, values in plain.history.items():
        np.testing.assert_allclose(cut.history[key], values, rtol=script.precision, err_msg=key)
    pairs = zip([*plain.weights, *plain.outputs], [*cut.weights, *cut.outputs], strict=True)
    for number, (a, b) in enumerate(pairs):
        allowed = script.precision * (np.linalg.norm(a) + script.rate * script.steps)
        assert np.linalg.norm(a - b) <= allowed, (number, a, b)
