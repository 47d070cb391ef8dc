"""Replace TensorFlow's stateful random ops by draws from variables, during the trace.

Such an op counts its draws in its kernel, and every copy of it begins at the same seed. A micro-batch that ran a copy
of its own would draw what the others draw. A variable is one for all of them, whoever runs them and in however many
processes: it moves on with each micro-batch, is put back when a step fails, and gives the numbers that the kernel
would have given. Ops without any seed draw what no other draws, and stay as they are; so do those in the bodies of
loops, branches and functions (`reduce` refuses there what would be drawn twice).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.capture.tracing import current
from whale_nebula.tf import random as tf_random


def find_draw_counter(seed: int, seed2: int) -> Any:
    """The variable of an op with these seeds; None where the op is to stay as it is."""
    trace = current()
    if trace is None or trace.busy or trace.plain or trace.vectorizing or tf.executing_eagerly():
        return None
    if tf.compat.v1.get_default_graph() is not trace.graph:
        return None
    state = tf_random.fresh_state(seed, seed2, f"{STATE}_{seed}_{seed2}")
    trace.draws.append(state)
    return state


STATE = "nebula_draws"
"""How the variables' names begin; the seeds come behind, so that processes with other seeds notice it."""
