"""Custom steps in several processes compute what `tf.function` computes without scopes: written ones, and random ones.
Those with codecs that lose digits compute what one process does. Some steps run in this process alone.

The written steps are cases in which a cut has been wrong.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.processes.random_steps import PLAIN, REFUSALS, draw_step, loses_digits, run_step, write_forward, write_step
from tests.processes.worker_runs import SEED, list_workers, run_workers_and_reference
from whale_nebula.errors import NebulaWarning

DEADLINE = 900.0
pytestmark = pytest.mark.timeout(DEADLINE)


def read_twice(first: str, second: str) -> list[str]:
    """Two forwards that read a value of no stage, which the first updates: each in these stages."""
    one, two = ([" * scale" * (number in read) for number in "01"] for read in (first, second))
    between = ["n0.assign_add(vc1)", "vc0.assign_sub(gvc0)"]
    return ["scale = tf.tanh(n0.read_value())", *write_forward(0, *one), *between, *write_forward(1, *two)]


WHOLE, HALVES = write_forward(0), write_forward(0, micro_batch=2)


def divide_stage(lines: list[str]) -> list[str]:
    """The lines of a step, with the second stage divided over two devices."""
    return [line.replace("cluster='c1')", "cluster='c1'), nb.split(2)") for line in lines]


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
    "value of the input that both stages read": (
        ["x = tf.tanh(x)", *write_forward(0, second=" * x"), "vc0.assign_sub(gvc0)", "vc1.assign_sub(gvc1)"], "loss0",
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
TRACE = " * (1. + tf.linalg.trace(tf.einsum('bi,bj->bij', hidden * vc1, hidden)))[:, None]"
COLUMNS = " * tf.gather(wc1, tf.cast(tf.abs(x[:, 0]), tf.int32) % 4)[:, ::4]"
SPLITS: Mapping[str, tuple[list[str], str]] = {
    "gradient in pieces that a second forward reads": (
        divide_stage([*HALVES, *write_forward(1, *[" * gvc1"] * 2, micro_batch=2), "vc1.assign_sub(gvc1)"]), "loss1",
    ),
    "trace": (divide_stage([*write_forward(0, second=TRACE), "vc1.assign_sub(gvc1)"]), "loss0"),
    "columns of a table": (
        divide_stage([*write_forward(0, second=COLUMNS), "vc1.assign_sub(gvc1)", "wc1.assign_sub(wc1 ** 2)"]), "loss0",
    ),
}  # fmt: skip
"""Steps whose second stage is divided over two devices."""
THREE = {"c0/0": "c0", "c1/0": "c1", "c1/1": "c1"}
RUNS: Mapping[str, tuple[int | Mapping[str, str], range, bool]] = {
    "pair": (2, range(10), False), "trio": (3, range(500, 700), True), "more": (2, range(10, 400), True),
    "alone": ({}, range(0), False), "more alone": ({}, range(1000, 1200), True),
    "replicas": (THREE, range(800, 1000), True),
}  # fmt: skip
"""By name, the workers (none: this process), the seeds of random steps, and whether only a grid has it."""
MICRO_BATCHES = (1, 2, 1, 3)


@functools.cache
def list_steps(name: str) -> dict[str, str]:
    """The texts of the steps of a run by their names."""
    workers, seeds, _ = RUNS[name]
    clusters = Counter(list_workers(workers or THREE).values())
    drawn = {f"seed{seed}": draw_step(seed, clusters, MICRO_BATCHES[seed % 4]) for seed in seeds}
    if workers:  # between processes, several refusals of nb.split end the run
        drawn = {each: text for each, text in drawn.items() if "nb.split" not in text}
    cases = {"pair": WRITTEN, "alone": SPLITS, "replicas": SPLITS}.get(name, {})
    return {**{each: write_step(*case) for each, case in cases.items()}, **drawn}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "step" in metafunc.fixturenames:
        grid = metafunc.config.getoption("--grid", default=False)
        pairs = [(run, step) for run, (*_, only) in RUNS.items() if grid or not only for step in list_steps(run)]
        ids = [f"{run}-{step}" for run, step in pairs]
        metafunc.parametrize(("run", "step"), pairs, ids=ids, indirect=["run"], scope="module")


Found = tuple[str, Mapping[str, Mapping[str, Any]], Mapping[str, Any]]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The steps of a run: its name, what each worker has found, and the reference, computed in this process."""
    steps, path = list_steps(request.param), tmp_path_factory.mktemp("steps") / "steps.json"
    path.write_text(json.dumps(steps))

    def run_alone() -> dict[str, Any]:
        return {
            name: run_cut(text, name) if loses_digits(text) else run_step(text, PLAIN, name)
            for name, text in steps.items()
        }

    workers = RUNS[request.param][0]
    if not workers:
        return (
            request.param,
            {"alone": {name: run_cut(text, name, "10gbit,0ms") for name, text in steps.items()}},
            run_alone(),
        )
    found, expected = run_workers_and_reference("random_steps", workers, path, alone=run_alone, deadline=DEADLINE)
    return request.param, found.reports, expected


def run_cut(text: str, name: str, links: str | None = None) -> Any:
    """What a step with scopes computes in this process, or the code of its refusal."""
    nb.shutdown()
    try:
        with nb.init(links=links, seed=SEED), warnings.catch_warnings():
            warnings.simplefilter("ignore", NebulaWarning)  # of fewer rows than micro-batches
            return run_step(text, nb, name)
    except REFUSALS as refusal:
        return refusal.code


def test_cut_step_computes_the_same(run: Found, step: str) -> None:
    name, reports, reference = run
    text = list_steps(name)[step]
    for worker, report in reports.items():
        found = report[step]
        if step.startswith("seed") and isinstance(found, str):
            pytest.skip(f"{found}: refused")
        assert not isinstance(reference[step], str), (worker, reference[step], text)
        results, variables = reference[step]
        assert same(found[0], results, is_exact(text)), (worker, text)
        assert found[1] and all(same(value, variables[each], is_exact(text)) for each, value in found[1].items()), (
            worker,
            text,
        )


def is_exact(text: str) -> bool:
    """Whether a step adds in the order of its reference, and divides by the same constants."""
    rows = {rows for _, rows, *_ in ast.literal_eval(text.splitlines()[1].removeprefix("CALLS = "))}
    known = rows <= {2, 4, 8, 16} and not re.search(r"nb.pipeline\([23]", text)
    return "nb.replica" not in text and "nb.split" not in text and (known or loses_digits(text))


def same(found: Any, expected: Any, exact: bool) -> bool:
    """Whether nested lists of numbers are equal, or nearly."""
    pairs = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    return all(one == other if exact else np.isclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)
