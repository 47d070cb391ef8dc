"""Worker: sums with the other workers of its cluster, in the scenario of its first argument."""

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

import whale_nebula as nb
from tests.processes.worker_reports import digest_tensors, report_value
from whale_nebula.errors import NebulaError
from whale_nebula.launch.attach import attach
from whale_nebula.runtime.replicas.collectives import DTYPES, Collectives, Group
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.session.rendezvous import open_cluster_collectives
from whale_nebula.runtime.session.task import prepare_task

scenario = sys.argv[1]
SHAPES = [(5, 3), (), (0, 2), (1200, 1000), (7,)]  # the large one travels alone


def draw_tensors(dtype: str, member: int) -> list[tf.Tensor]:
    return [
        tf.cast(tf.random.stateless_normal(shape, [member, number]) * 8, dtype) for number, shape in enumerate(SHAPES)
    ]


def are_sums(dtype: str, found: list[tf.Tensor], members: list[int]) -> bool:
    """Whether these are the sums, up to rounding."""
    terms = [[tf.cast(tensor, "float64") for tensor in draw_tensors(dtype, member)] for member in members]
    error = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "float64": 1e-15}.get(dtype, 0.0)
    return all(
        bool(tf.reduce_all(tf.abs(tf.cast(one, "float64") - tf.add_n(list(parts))) <= error * 100))
        for one, parts in zip(found, zip(*terms, strict=True), strict=True)
    )


def run_all_sums(collectives: Collectives, count: int) -> None:
    index = collectives.index
    whole = collectives.group(range(count), "all")
    sums = {dtype: whole.sum(draw_tensors(dtype, index)) for dtype in DTYPES}
    report_value("right", [dtype for dtype in DTYPES if are_sums(dtype, sums[dtype], list(range(count)))])
    report_value(
        "bits", [digest_tensors(tensor.numpy() for tensor in sums[dtype]) for dtype in DTYPES if dtype != "bfloat16"]
    )
    report_value("half", digest_tensors(tf.cast(tensor, "float32").numpy() for tensor in sums["bfloat16"]))
    report_value("again", [float(whole.sum([tf.constant(float(index + turn))])[0]) for turn in range(20)])
    sum_in_function(whole, index)
    sum_in_subsets(collectives, index)


def sum_in_function(whole: Group, index: int) -> None:
    """Two sums of the same shape in a function that one process traces more often than the others."""

    @tf.function
    def step(x: Any) -> Any:
        (first,) = whole.sum([tf.reduce_sum(x)], "step")
        (second,) = whole.sum([tf.reduce_sum(x) * 10.0], "step")
        return first, second

    rows = [3, 3] if index else [3, 4]
    report_value("inside", [[float(part) for part in step(tf.ones([count]) * 12.0 / count)] for count in rows])


def sum_in_subsets(collectives: Collectives, index: int) -> None:
    """Sums in two groups that share a worker: neither waits for the other."""
    found = {}
    for members in ([0, 1], [1, 2], [index]):
        if index in members:
            group = collectives.group(members, "some")
            found[str(members)] = float(group.sum([tf.constant(float(10**index))])[0])
    report_value("subsets", found)


def describe_failure(group: Group) -> str:
    try:
        group.sum([tf.ones([4])], "last")
    except NebulaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def create_early_state() -> tuple[tf.Variable, Any, keras.random.SeedGenerator, Any]:
    """Objects that a script may create before it opens the run."""
    variable, seeds = tf.Variable([1.0, 2.0]), keras.random.SeedGenerator(1)
    step = tf.function(lambda x: variable.assign_add(x) * keras.random.uniform([2], 1.0, 1.1, seed=seeds))
    step(tf.ones([2]))
    return variable, step, seeds, iter(tf.data.Dataset.range(4))


def use_early_state(variable: tf.Variable, step: Any, seeds: keras.random.SeedGenerator, rows: Any) -> list[Any]:
    """Use all of these objects."""
    return [step(tf.ones([2])).numpy().tolist(), variable.numpy().tolist(), int(next(rows)), len(seeds.next())]


attachment = attach()
assert attachment is not None
names = list(attachment.workers)
number, last = names.index(attachment.worker), len(names) - 1
mates = dict.fromkeys(attachment.peers, "127.0.0.1")

if scenario == "killed":
    prepare_task(attachment)
    early_state = create_early_state()
    nb.init()
    own_collectives = open_cluster_collectives(current_run().ledger.session, mates)
    assert own_collectives is not None
    report_value("early", use_early_state(*early_state))
    run_all_sums(own_collectives, len(names))
    group = own_collectives.group(range(len(names)), "last")
    group.sum([tf.ones([4])], "last")
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    report_value("failed", describe_failure(group))
    report_value("failed again", describe_failure(group))
else:
    nb.init()
    session = current_run().ledger.session
    own_collectives = open_cluster_collectives(session, mates)
    assert own_collectives is not None
    group = replace(own_collectives, patience=1.0).group(range(len(names)), "last")
    report_value("first", float(group.sum([tf.ones([])], "first")[0]))
    if number != last:
        report_value("failed", describe_failure(group))
    session.meet("the end of the wait")
