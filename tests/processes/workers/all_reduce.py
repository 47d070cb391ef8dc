"""Worker: sums with the other workers of its cluster, in the scenario of its argument."""

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

import whale_nebula as nb
from tests.processes.worker_reports import bits, tell
from whale_nebula.errors import NebulaError
from whale_nebula.launch.attach import attach
from whale_nebula.runtime.replicas.collectives import DTYPES, Collectives, Group
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.session.rendezvous import open_among
from whale_nebula.runtime.session.task import prepare_task

happens = sys.argv[1]
SHAPES = [(5, 3), (), (0, 2), (1200, 1000), (7,)]  # the large one travels alone


def drawn(dtype: str, member: int) -> list[tf.Tensor]:
    return [
        tf.cast(tf.random.stateless_normal(shape, [member, number]) * 8, dtype) for number, shape in enumerate(SHAPES)
    ]


def near(dtype: str, found: list[tf.Tensor], members: list[int]) -> bool:
    """Whether these are the sums, but for the order in which they were added up."""
    terms = [[tf.cast(tensor, "float64") for tensor in drawn(dtype, member)] for member in members]
    error = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "float64": 1e-15}.get(dtype, 0.0)
    return all(
        bool(tf.reduce_all(tf.abs(tf.cast(one, "float64") - tf.add_n(list(parts))) <= error * 100))
        for one, parts in zip(found, zip(*terms, strict=True), strict=True)
    )


def everything(collectives: Collectives, count: int) -> None:
    index = collectives.index
    whole = collectives.group(range(count), "all")
    sums = {dtype: whole.sum(drawn(dtype, index)) for dtype in DTYPES}
    tell("right", [dtype for dtype in DTYPES if near(dtype, sums[dtype], list(range(count)))])
    tell("bits", [bits(tensor.numpy() for tensor in sums[dtype]) for dtype in DTYPES if dtype != "bfloat16"])
    tell("half", bits(tf.cast(tensor, "float32").numpy() for tensor in sums["bfloat16"]))
    tell("again", [float(whole.sum([tf.constant(float(index + turn))])[0]) for turn in range(20)])
    inside(whole, index)
    subsets(collectives, index)


def inside(whole: Group, index: int) -> None:
    """Two sums of the same form in a function, of which one process makes more graphs than the others."""

    @tf.function
    def step(x: Any) -> Any:
        (first,) = whole.sum([tf.reduce_sum(x)], "step")
        (second,) = whole.sum([tf.reduce_sum(x) * 10.0], "step")
        return first, second

    rows = [3, 3] if index else [3, 4]
    tell("inside", [[float(part) for part in step(tf.ones([count]) * 12.0 / count)] for count in rows])


def subsets(collectives: Collectives, index: int) -> None:
    """A worker of two groups, and others that are in one: neither waits for the other."""
    found = {}
    for members in ([0, 1], [1, 2], [index]):
        if index in members:
            group = collectives.group(members, "some")
            found[str(members)] = float(group.sum([tf.constant(float(10**index))])[0])
    tell("subsets", found)


def fails(group: Group) -> str:
    try:
        group.sum([tf.ones([4])], "last")
    except NebulaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def made() -> tuple[tf.Variable, Any, keras.random.SeedGenerator, Any]:
    """What a script may have made before it opens the run."""
    variable, seeds = tf.Variable([1.0, 2.0]), keras.random.SeedGenerator(1)
    step = tf.function(lambda x: variable.assign_add(x) * keras.random.uniform([2], 1.0, 1.1, seed=seeds))
    step(tf.ones([2]))
    return variable, step, seeds, iter(tf.data.Dataset.range(4))


def lives(variable: tf.Variable, step: Any, seeds: keras.random.SeedGenerator, rows: Any) -> list[Any]:
    """Use all of it."""
    return [step(tf.ones([2])).numpy().tolist(), variable.numpy().tolist(), int(next(rows)), len(seeds.next())]


attachment = attach()
assert attachment is not None
names = list(attachment.workers)
number, last = names.index(attachment.worker), len(names) - 1
mates = dict.fromkeys(attachment.peers, "127.0.0.1")

if happens == "killed":
    prepare_task(attachment)
    early = made()
    nb.init()
    opened = open_among(current_run().ledger.session, mates)
    assert opened is not None
    tell("early", lives(*early))
    everything(opened, len(names))
    group = opened.group(range(len(names)), "last")
    group.sum([tf.ones([4])], "last")
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    tell("failed", fails(group))
    tell("failed again", fails(group))
else:
    nb.init()
    session = current_run().ledger.session
    opened = open_among(session, mates)
    assert opened is not None
    group = replace(opened, patience=1.0).group(range(len(names)), "last")
    tell("first", float(group.sum([tf.ones([])], "first")[0]))
    if number != last:
        tell("failed", fails(group))
    session.meet("the end of the wait")
