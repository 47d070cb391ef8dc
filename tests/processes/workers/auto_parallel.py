"""Worker: trains a model under `nb.auto_parallel`: without scopes, with a layer that is called twice, too large for one
cluster; with few scopes; or with inputs that one cluster has.
"""

import sys
from functools import partial

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.forced_plans import force_plans
from tests.processes.worker_reports import report_value
from whale_nebula.runtime.run import current_run

KIB = 1500
"""The memory of a worker: too little for the model, enough for a half of it."""


def train_without_scopes(memory: str = f"{KIB}KiB", *texts: str) -> None:
    """Report the plan and the results of training; with texts of plans, the model is replanned by these."""
    ran = force_plans(setattr, texts) if texts else []
    nb.auto_parallel(memory=memory, replan=bool(texts))
    first, tied, second, third = (keras.layers.Dense(192, activation="relu") for _ in range(4))
    inputs = hidden = keras.Input((64,))
    frozen = keras.layers.Dense(32, trainable=False)
    for layer in (first, tied, second, tied, third, frozen, keras.layers.Dense(4)):
        hidden = layer(hidden)
    model = keras.Model(inputs, hidden)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    draw = np.random.default_rng(0)
    x, y = draw.random((96, 64)).astype("float32"), draw.random((96, 4)).astype("float32")
    fit = partial(model.fit, x, y, batch_size=32, verbose=0, shuffle=False)
    evaluate = partial(model.evaluate, x, y, batch_size=32, verbose=0)
    if not texts:
        report_value("untrained", evaluate())  # in one cluster: an evaluation needs less memory than the training
    plan = nb.plan(model, x[:32], y[:32])
    report_value("lines", sorted(each for each in plan.explain().splitlines() if "as measured on" in each))
    history = [fit(epochs=2).history, evaluate(), fit(epochs=1).history]
    report_value("stages", {name: stage.cluster for name, stage in plan.stages.items()})
    report_value("memory", max(plan.predicted.memory.values()))
    report_value("history", history)
    report_value("evaluated", evaluate())
    with nb.gathered():
        report_value("weights", [float(np.abs(each).sum()) for each in model.get_weights()])
    if texts:
        report_value("ran", ran)
        report_value("frozen", current_run().ledger.variables[id(frozen.kernel.value)].holders)
        report_value("last", {name: stage.cluster for name, stage in nb.plan(model, x[:32], y[:32]).stages.items()})


def train_with_few_scopes(last: str = "c1") -> None:
    """Report the plan of a model with few scopes, and its history."""
    nb.auto_parallel(memory="1GiB")
    draw = np.random.default_rng(0)
    x, y = draw.random((96, 64)).astype("float32"), draw.random((96, 4)).astype("float32")
    hidden = inputs = keras.Input((64,))
    with nb.stage(name="first"):  # a cluster is found for it, and the layer in no stage goes somewhere
        hidden = keras.layers.Dense(96, activation="relu")(hidden)
    hidden = keras.layers.Dense(96, activation="relu")(hidden)
    with nb.stage(cluster=last):
        hidden = keras.layers.Dense(4)(hidden)
    model = keras.Model(inputs, hidden)
    model.compile("sgd", "mse")
    plan = nb.plan(model, x[:32], y[:32])
    report_value("scoped", {name: stage.cluster for name, stage in plan.stages.items()})
    report_value("scoped history", model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False).history)


def plan_collectives(config: str) -> None:
    """Report the collectives of a plan for several workers of a cluster, without training."""
    with nb.init(config):
        nb.auto_parallel()
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(4)(inputs))
        model.compile("sgd", "mse")
        for _ in range(2):
            plan = nb.plan(model, np.zeros((8, 4), "float32"), np.zeros((8, 4), "float32"))
        report_value("sums", [each for each in " ".join(plan.explain().split()).split(". ") if "all-reduce" in each])
        report_value("kept", [str(each) for each in nb.clusters().cluster("c0").collectives])


def train_with_private_inputs(memory: str) -> None:
    """Report the training of a model whose sentences and labels only c0 has; it needs them at both ends, and a mask of
    the sentences in between.
    """
    nb.auto_parallel(memory=memory, micro_batch=1)
    ids = keras.Input((8,), dtype="int32", name="ids")
    hidden = keras.layers.Embedding(64, 96)(ids)
    mask = keras.ops.cast(keras.ops.expand_dims(keras.ops.not_equal(ids, 0), -1), "float32")
    for _ in range(3):
        hidden = keras.layers.Dense(192, activation="relu")(hidden) * mask
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    draw, here = np.random.default_rng(0), nb.here().runs("c0")
    x, y = draw.integers(0, 64, (48, 8)).astype("int32"), draw.random((48, 1)).astype("float32")
    numbers = tf.data.Dataset.range(48).batch(16)
    found = lambda each, at: tf.gather(each, at) if here else None  # noqa: E731
    rows = numbers.map(lambda at: (found(x, at), found(y, at), tf.ones(tf.shape(at))))
    history = model.fit(rows, epochs=2, verbose=0).history
    stages = nb.last_report().stages
    report_value("history", {name: history[name] for name in ("loss", "mae")})
    report_value("evaluated", model.evaluate(rows, verbose=0))
    report_value("stages", len(stages))


PRIVATE_CONFIG = {
    "inputs": {"x": {"shape": [None, 8], "dtype": "int32"}, "y": {"shape": [None, 1], "dtype": "float32"}},
    "measure": "0s",
}

if __name__ == "__main__":
    if sys.argv[1] == "at_home":
        with nb.init(PRIVATE_CONFIG):
            train_with_private_inputs(sys.argv[2])
        sys.exit()
    if sys.argv[1] == "scoped":
        with nb.init({"measure": "0s"}):
            train_with_few_scopes()
        sys.exit()
    if sys.argv[1] == "sums":
        plan_collectives(sys.argv[2])
        sys.exit()
    with nb.init({"measure": "0s" if sys.argv[2:] else "1s"}):
        train_without_scopes(*sys.argv[1:])
