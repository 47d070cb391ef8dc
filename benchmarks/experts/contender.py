"""A worker of the benchmark: layers of experts split over two, dense ones with equal arithmetic, or collectives alone.

contender.py experts|dense|exact PORT
contender.py collectives PORT KIND,BYTES ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from benchmarks.replica.step_server import blocks, serve
from whale_nebula.models import SwitchFeedForward
from whale_nebula.runtime.split.shards import CollectiveGroup
from whale_nebula.tf import collectives as tf_collectives

EXPERTS, WORKERS, ROWS, LENGTH, WIDTH, HIDDEN = 8, 2, 32, 128, 256, 1024
"""Of what is timed: 4,096 tokens, two layers of eight experts; each has as much room as an even load takes."""
CASES: list[dict[str, Any]] = [
    {"k": k, "capacity_factor": factor, "min_capacity": 1, "row_groups": groups}
    for k, factor, groups in [(1, 8.0, 8), (1, 0.6, 8), (2, 8.0, 8), (2, 0.6, 8), (1, 0.6, None)]
]
"""Of what is compared: ample room, and so little that tokens are left out."""


def make_layers(options: dict[str, Any], count: int, width: int, hidden: int) -> list[SwitchFeedForward]:
    """Layers of experts, the same in every process."""
    keras.utils.set_random_seed(1)
    layers = [SwitchFeedForward(EXPERTS, hidden, name=f"experts{number}", **options) for number in range(count)]
    for layer in layers:
        layer.build((None, None, width))
    return layers


def make_tokens(rows: int, length: int, width: int) -> Any:
    """An input, the same in every process."""
    return tf.constant(np.random.default_rng(1).standard_normal((rows, length, width)).astype("float32"))


def run_exact(port: int) -> None:
    """Print the layers' outputs, case by case."""
    for _, say in blocks(port, "exact"):
        found = []
        for options in CASES:
            (layer,), x = make_layers(options, 1, 16, 32), make_tokens(16, 12, 16)

            @nb.function
            def compute(x: Any, layer: Any = layer) -> Any:
                with nb.cluster(["a"]), nb.split(axis=0):
                    return layer(x)

            found.append(np.asarray(compute(x)).tolist())
        say(found)


def make_step(kind: str) -> tuple[Callable[..., Any], Any]:
    """A training step of two layers with its input. A dense worker has half of the tokens."""
    x = make_tokens(ROWS if kind == "experts" else ROWS // WORKERS, LENGTH, WIDTH)
    if kind == "experts":
        made: list[Any] = make_layers({"capacity_factor": 1.0, "row_groups": EXPERTS}, 2, WIDTH, HIDDEN)
    else:
        dense = keras.layers.Dense
        made = [keras.Sequential([dense(HIDDEN, activation="relu"), dense(WIDTH)]) for _ in range(2)]
    optimizer = keras.optimizers.SGD(1e-3)

    def compute(x: Any) -> Any:
        hidden = x
        for layer in made:
            hidden = hidden + layer(hidden, training=True)
        return tf.reduce_mean(tf.square(hidden))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            if kind == "experts":
                with nb.cluster(["a"]), nb.split(axis=0):
                    loss = compute(x)
            else:
                loss = compute(x)
        weights = [weight for layer in made for weight in layer.trainable_variables]
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return step, x


def run_experts(port: int) -> None:
    """Report the bytes of a step, then run steps."""
    step, x = make_step("experts")
    function = nb.function(step)
    crossing = [f"{each.kind},{each.bytes}" for each in nb.plan(function, x).collectives for _ in range(each.times)]
    serve(port, crossing, lambda: float(function(x)))


def run_collectives(port: int, crossing: Sequence[str]) -> None:
    """Run only collectives: as many, with as many bytes between two workers."""
    tf.zeros([])  # starts TensorFlow, as this task
    task = tf_collectives.find_task()
    group = CollectiveGroup(WORKERS, task.index if task else 0, "alone")
    named = [word.split(",") for word in crossing]
    calls = [(kind, max(2, int(nbytes) // 4)) for kind, nbytes in named]
    pieces = [tf.zeros([2 if kind in ("all-to-all", "reduce-scatter") else 1, n]) for kind, n in calls]

    def run(kind: str, n: int, piece: Any) -> Any:
        if kind == "all-to-all":
            return group.exchange([piece], 1, [n, n], 0, [1, 1])
        if kind == "reduce-scatter":
            return group.scatter([piece], 0, [1, 1])
        return group.gather([piece], 0, [1, 1]) if kind == "all-gather" else group.sum([piece])

    @tf.function
    def step(*pieces: Any) -> Any:
        found = [run(kind, n, piece)[0] for (kind, n), piece in zip(calls, pieces, strict=True)]
        return tf.add_n([tf.reduce_max(each[:1]) for each in found])

    serve(port, "collectives", lambda: float(step(*pieces)))


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    nb.init()
    if kind == "exact":
        run_exact(port)
    elif kind == "experts":
        run_experts(port)
    elif kind == "collectives":
        run_collectives(port, sys.argv[3:])
    else:
        step, x = make_step(kind)
        function = tf.function(step)
        serve(port, kind, lambda: float(function(x)))


if __name__ == "__main__":
    main()
