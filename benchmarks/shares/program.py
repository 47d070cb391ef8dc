"""A step whose stages sleep instead of computing; run.py starts it by `whale-nebula run --all`, and it prints the
seconds of steps. Argument: the case, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import whale_nebula as nb

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
CASE = json.loads(sys.argv[1])
ROWS, WIDTH, RATE = CASE["rows"], 8, 0.01


def sleep_for_rows(rows: Any, seconds: float) -> Any:
    """The rows, after the seconds that they take on the calling worker."""

    def rest(given: np.ndarray) -> np.ndarray:
        time.sleep(len(given) * seconds / CASE["speeds"].get(nb.here().worker, 1.0))
        return given

    found = tf.numpy_function(rest, [rows], rows.dtype)
    found.set_shape(rows.shape)
    return found


def make_pipeline() -> Any:
    """The micro-batches of the case; Python functions may couple rows, which must be allowed."""
    return nb.pipeline(CASE["micro_batch"], coupled="allow")


@contextlib.contextmanager
def open_replicas() -> Iterator[None]:
    """The stage in several replicas."""
    with nb.replica(CASE["replicas"]), make_pipeline(), nb.stage(cluster="npu"):
        yield


def make_replicated_step() -> Any:
    """One stage in several replicas."""
    weight = tf.Variable(tf.ones((WIDTH, WIDTH)))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), open_replicas():
            loss = tf.reduce_mean((sleep_for_rows(x, CASE["seconds"]) @ weight) ** 2)
        weight.assign_sub(RATE * tape.gradient(loss, weight))
        return loss

    return step


def make_local_sgd_step() -> Any:
    """A copy in each cluster, with local SGD."""
    weight = tf.Variable(tf.ones((WIDTH, WIDTH)))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.replica(sync_every=CASE["apart"]):
            loss = tf.reduce_mean((sleep_for_rows(x, CASE["seconds"]) @ weight) ** 2)
        weight.assign_sub(RATE * tape.gradient(loss, weight))
        return loss

    return step


def make_generator_step() -> Any:
    """A generator that trains alone and feeds the replicas of a discriminator; no gradient returns."""
    makes, judges = tf.Variable(tf.ones((WIDTH, WIDTH))), tf.Variable(tf.ones((WIDTH, WIDTH)))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second, nb.cluster():
            with nb.replica(1), make_pipeline(), nb.stage(cluster="gpu"):
                made = sleep_for_rows(x, CASE["generator"]) @ makes
                own = tf.reduce_mean(made**2)
            with open_replicas():
                found = tf.reduce_mean((sleep_for_rows(tf.stop_gradient(made), CASE["seconds"]) @ judges) ** 2)
        makes.assign_sub(RATE * first.gradient(own, makes))
        judges.assign_sub(RATE * second.gradient(found, judges))
        return own + found

    return step


def main() -> None:
    """Run the steps; the first ones warm up, and measure workers' speeds if the config has none."""
    nb.init()
    step = (
        make_generator_step()
        if "generator" in CASE
        else make_local_sgd_step()
        if CASE["apart"]
        else make_replicated_step()
    )
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype("float32")
    seconds, busy = [], []
    for _ in range(CASE["warm"] + CASE["steps"]):
        began = time.perf_counter()
        float(step(x))
        seconds.append(time.perf_counter() - began)
        report = nb.last_report()
        busy.append(sum(each.compute_seconds or 0.0 for each in report.stages.values()) / seconds[-1])
    told = {"seconds": seconds[CASE["warm"] :], "busy": busy[CASE["warm"] :]}
    told |= {"notes": [note for note in report.notes if "plan version" in note], "straggler": report.straggler}
    print(json.dumps({"site": nb.here().worker, "micro_batches": report.micro_batches, **told}), flush=True)


main()
