"""Custom steps in several processes compute what `tf.function` computes without scopes: written ones, and random ones.

The written steps are cases in which a cut has been wrong.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.processes.random_steps import PLAIN, draw_step, run_step, write_forward, write_step
from tests.processes.worker_runs import FinishedRun, list_workers, run_workers_and_reference

DEADLINE = 900.0
pytestmark = pytest.mark.timeout(DEADLINE)


def read_twice(first: str, second: str) -> list[str]:
    """Two forwards that read a value of no stage, which the first updates: each in these stages."""
    one, two = ([" * scale" * (number in read) for number in "01"] for read in (first, second))
    between = ["n0.assign_add(vc1)", "vc0.assign_sub(gvc0)"]
    return ["scale = tf.tanh(n0.read_value())", *write_forward(0, *one), *between, *write_forward(1, *two)]


WHOLE, HALVES = write_forward(0), write_forward(0, micro_batch=2)
LOOP = "tf.foldl(lambda state, _: tf.tanh(state * vc0), tf.range(2), x)"
LOOKUP = "x * tf.nn.embedding_lookup(vc0, tf.cast(tf.abs(x), tf.int32) % 4)"
WATCHED = [WHOLE[0], "    tape.watch(x)", *WHOLE[1:-1], "moved = x + .1 * tf.sign(tape.gradient(loss0, x))"]
MOVED = [line.replace("x *", "tf.debugging.check_numerics(moved, 'not finite') *") for line in write_forward(1)]
CHANGED = ["sc0.assign(3.)", "tf.debugging.assert_greater(0. * loss0 + sc0, 2.5)", "sc0.assign(1.)"]
WRITTEN: Mapping[str, tuple[list[str], str]] = {
    "scalar gradients of two clusters": (
        [*WHOLE, "vc0.assign_sub(gvc0 * (gsc0 + gsc1))", "sc1.assign(tf.stack([gsc0, gsc1])[0])"],
        "tf.stack([gsc0, gsc1])",
    ),
    "gradients of two clusters": (
        [*WHOLE, "n0.assign_add(gvc0 * gvc1)"], "tf.concat([gvc0, gvc1], 0), n0 + 0.",
    ),
    "branch that writes two metrics, of which one is held by one cluster": (
        [*WHOLE, "m0.assign_add(loss0)", "n0.assign_add(gvc0)",
         "if loss0 > 0.:", "    m0.assign(0.)", "    n0.assign(tf.zeros(4))"], "m0 + 0.",
    ),
    "branch that reads one cluster and is chosen by another": (
        [*WHOLE, "if gsc1 > -9.:", "    n0.assign_add(tf.fill([4], sc0))"], "n0 + 0.",
    ),
    "branches that write a variable with values of the other cluster": (
        [*WHOLE, "if loss0 > .02:", "    vc0.assign_add(vc0 * tf.reduce_sum(vc1))",
         "if loss0 > .01:", "    vc1.assign(tf.fill([4], tf.reduce_sum(vc0)))"], "loss0",
    ),
    "branch that adds values of both clusters to a variable of none": (
        [*WHOLE, "if loss0 > .01:", "    m0.assign_add(tf.reduce_sum(vc0) + tf.reduce_sum(vc1))"], "m0 + 0.",
    ),
    "assertion on an updated variable": ([*WHOLE, *CHANGED], "loss0"),
    "assertion that holds after the update only": ([*HALVES, *CHANGED], "loss0"),
    "assertion on gradients and the loss": (
        [*HALVES, "tf.debugging.assert_less(tf.where(gsc1 > sc0, gsc0, loss0), 1e9)"], "gsc0",
    ),
    "assertion on a metric": (
        [*WHOLE, "m0.assign_add(9. + loss0)", "tf.debugging.assert_greater(m0, loss0)"], "m0 + 0.",
    ),
    "metric of the batch before a second forward": (
        [*HALVES, "m0.assign_sub(tf.reduce_max(tf.stack([loss0, loss0])))", "for _ in tf.range(2):",
         "    m0.assign(.5 * m0 + tf.where(sc1 > loss0, loss0, 0.))", "sc1.assign_add(tf.tanh(sc0))",
         *write_forward(1, micro_batch=2)], "m0 + 0., loss1",
    ),
    "metric of the batch that a second forward reads": (
        [*WHOLE, "if loss0 > 0.:", "    m0.assign_add(tf.reduce_mean(x))", *write_forward(1, " * m0")], "loss1",
    ),
    **{f"write after a {name} of a second forward": (
        [*WHOLE, "first = gvc0", "vc0.assign_add(first)",
         *(line.replace("x * vc0", read) for line in write_forward(1)), "vc0.assign_sub(first)"], "loss1",
    ) for name, read in (("loop", LOOP), ("lookup", LOOKUP))},
    "check in a second forward of moved inputs": ([*WATCHED, *MOVED, "vc0.assign_sub(gvc0)"], "loss1"),
    **{f"value of no stage, read in stages {first}, then in {second}": (read_twice(first, second), "loss0, loss1")
       for first, second in (("1", "0"), ("1", "01"), ("01", "01"))},
}  # fmt: skip
"""By name, the lines of a step, and the returned expression."""
RUNS: Mapping[str, tuple[int | Mapping[str, str], range, bool]] = {
    "pair": (2, range(12), False), "trio": (3, range(500, 700), True), "more": (2, range(12, 400), True),
    "replicas": ({"c0/0": "c0", "c1/0": "c1", "c1/1": "c1"}, range(800, 900), True),
}  # fmt: skip
"""By name, the workers, the seeds of random steps, and whether only a grid has it."""


@functools.cache
def list_steps(name: str) -> dict[str, str]:
    """The texts of the steps of a run by their names."""
    workers, seeds, _ = RUNS[name]
    clusters = Counter(list_workers(workers).values())
    drawn = {
        f"seed{seed}": draw_step(seed, clusters, 2 if seed % 4 == 0 or name == "replicas" else 1) for seed in seeds
    }
    written = {each: write_step(lines, returned) for each, (lines, returned) in WRITTEN.items()}
    return {**written, **drawn} if name == "pair" else drawn


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "step" in metafunc.fixturenames:
        grid = metafunc.config.getoption("--grid", default=False)
        pairs = [(run, step) for run, (*_, only) in RUNS.items() if grid or not only for step in list_steps(run)]
        ids = [f"{run}-{step}" for run, step in pairs]
        metafunc.parametrize(("run", "step"), pairs, ids=ids, indirect=["run"], scope="module")


@pytest.fixture(scope="module")
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, FinishedRun, Mapping[str, Any]]:
    """The steps of a run in several processes, and without scopes in this process meanwhile."""
    steps, path = list_steps(request.param), tmp_path_factory.mktemp("steps") / "steps.json"
    path.write_text(json.dumps(steps))

    def run_plain() -> dict[str, Any]:
        return {name: run_step(text, PLAIN, name) for name, text in steps.items()}

    workers = RUNS[request.param][0]
    return request.param, *run_workers_and_reference("random_steps", workers, path, alone=run_plain, deadline=DEADLINE)


def test_cut_step_computes_the_same_without_scopes(run: tuple[str, FinishedRun, Mapping[str, Any]], step: str) -> None:
    name, finished, plain = run
    (results, variables), text = plain[step], list_steps(name)[step]
    exact = name != "replicas" and "nb.pipeline(2)" not in text
    for worker, report in finished.reports.items():
        found = report[step]
        if step.startswith("seed") and isinstance(found, str):
            pytest.skip(f"{found}: refused")
        assert same(found[0], results, exact), (worker, text)
        assert found[1] and all(same(value, variables[name], exact) for name, value in found[1].items()), (worker, text)


def same(found: Any, expected: Any, exact: bool) -> bool:
    """Whether nested lists of numbers are equal, or nearly."""
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    return all(one == other if exact else np.isclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)
