"""One worker of a pretraining that sleeps instead of computing; run.py starts all by `whale-nebula run --all`.

Generators process their share of a step's rows at once, each in its own cluster, and discriminators theirs. Argument:
the case, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

import whale_nebula as nb

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
CASE = json.loads(sys.argv[1])
WIDTH, RATE = 8, 0.01


def add_sleep(rows: Any, seconds: float) -> Any:
    """The rows, after `seconds` for each."""

    def rest(given: np.ndarray) -> np.ndarray:
        time.sleep(len(given) * seconds)
        return given

    found = tf.numpy_function(rest, [rows], rows.dtype)
    found.set_shape(rows.shape)
    return found


def around(name: str, replicas: int) -> ExitStack:
    """The scope of a cluster, with replicas if there are several discriminators."""
    scopes = ExitStack()
    if CASE["discriminators"] > 1:
        scopes.enter_context(nb.replica(replicas))
    scopes.enter_context(nb.pipeline(CASE["micro_batch"], coupled="allow"))
    scopes.enter_context(nb.stage(cluster=name))
    return scopes


def main() -> None:
    """Run the steps, and print the seconds of each."""
    nb.init()
    names = [f"g{number}" for number in range(CASE["generators"])]
    makes = {name: tf.Variable(tf.ones((WIDTH, WIDTH))) for name in names}
    judges = tf.Variable(tf.ones((WIDTH, WIDTH)))

    @nb.function
    def step(x: dict[str, Any]) -> Any:
        with tf.GradientTape(persistent=True) as tape, nb.cluster():
            made, own = [], {}
            for name in names:
                with around(name, 1):
                    made.append(add_sleep(x[name], CASE["generator"]) @ makes[name])
                    own[name] = tf.reduce_mean(made[-1] ** 2)
            with around("npu", CASE["discriminators"]):
                rows = [tf.stop_gradient(each) for each in made]
                whole = rows[0] if len(rows) == 1 else tf.concat(rows, 0)
                found = tf.reduce_mean((add_sleep(whole, CASE["discriminator"]) @ judges) ** 2)
        for name in names:
            makes[name].assign_sub(RATE * tape.gradient(own[name], makes[name]))
        judges.assign_sub(RATE * tape.gradient(found, judges))
        return found

    x = {name: np.ones((CASE["rows"] // len(names), WIDTH), "float32") for name in names}
    seconds = []
    for _ in range(CASE["warm"] + CASE["steps"]):
        began = time.perf_counter()
        float(step(x))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"site": nb.here().worker, "seconds": seconds[CASE["warm"] :]}), flush=True)


main()
