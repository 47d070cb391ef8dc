"""`nb.replica(sync_every="auto")`: the interval that is chosen, and the run with it beside that with the number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import PlanError
from whale_nebula.hardware import LinkRate
from whale_nebula.ir.program import UNDECIDED, LocalSgd
from whale_nebula.runtime.local_sgd.interval import MAX_SHARE, MAX_WAIT_SHARE, Exchange, find_interval
from whale_nebula.runtime.run import current_run
from whale_nebula.schedule.rounds import MAX_INTERVAL

RNG = np.random.default_rng(0)
X = RNG.random((44, 8)).astype("float32")
Y = np.tanh(X @ RNG.random((8, 2)).astype("float32"))
CLUSTERS = {"gpu": {"flops": "1G"}, "npu": {"flops": "5M"}}
LINE = "60mbit,5ms"


def model() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(64, activation="tanh")(inputs))
    made = keras.Model(inputs, keras.layers.Dense(2)(hidden), name="mine")
    made.compile("adam", "mse")
    return made


def train(every: Any, *, links: str = LINE, epochs: int = 1, **options: Any) -> tuple[keras.Model, Any]:
    """A model that two clusters have trained apart, with rows that are left over; and the report of the last step."""
    nb.shutdown()
    nb.init({"clusters": CLUSTERS, **options}, links=links)
    made = model()
    with nb.cluster(), nb.replica(sync_every=every):
        made.fit(X, Y, batch_size=12, epochs=epochs, shuffle=False, verbose=0)
        return made, nb.last_report("mine.train_step")


def find_every() -> int:
    """The interval of the rounds of this run."""
    [rounds] = current_run().rounds.list_rounds()
    [every] = {each.table.every for each in rounds.values()}
    return int(every)


def test_auto_interval_trains_like_the_same_fixed_interval() -> None:
    ours, report = train("auto")
    every, found = find_every(), ours.get_weights()
    assert 1 < every < 4 and len(current_run().intervals) == 1  # of the rows that are left over, too
    reason = report.meetings.chosen
    assert f"every {every} steps, chosen by sync_every='auto'" in reason and reason in str(report)
    with nb.cluster(), nb.replica(sync_every="auto"):
        plan = nb.plan(ours, X[:12], Y[:12])
        assert reason in plan.to_text() and plan.explain().lower() == f"{reason.lower()}."
        assert "every" in nb.plan(keras.Model(ours.inputs, ours.outputs), X[:12]).to_text()
    theirs, fixed_report = train(every)
    assert fixed_report.meetings.chosen == "" and find_every() == every
    for own, other in zip(found, theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.grid
def test_resumed_run_keeps_its_interval(tmp_path: Path) -> None:
    saved = {"checkpoint": {"folder": str(tmp_path), "every": 4}}
    train("auto", **saved)
    every = find_every()
    _, report = train("auto", links="60mbit,40ms", epochs=2, **saved)
    assert find_every() == every and "as before this run was saved" in report.meetings.chosen


def test_auto_parallel_explains_itself_and_the_interval() -> None:
    nb.init({"clusters": CLUSTERS}, links="6mbit,1ms")
    made = model()
    with nb.auto_parallel(), nb.cluster(), nb.replica(sync_every="auto"):
        explanation = nb.plan(made, X, Y).explain()
    assert "does not change the scopes of this step" in explanation and "The clusters synchronise every" in explanation
    made.evaluate(X, Y, verbose=0)


def find(rate: float | None, *, codec: str = "none", step: float = 0.05, **options: Any) -> LocalSgd:
    line = {("gpu", "npu"): LinkRate(rate, 0.02), ("npu", "gpu"): LinkRate(rate)}
    mode = "async" if options.get("staleness") else "sync"
    exchange = Exchange(1_000_000, codec, line, coding=1e-9 * (codec != "none"), is_answered=mode == "async")
    apart = LocalSgd(UNDECIDED, codec=codec, mode=mode, **{"delay": UNDECIDED, **options})
    found = find_interval(apart, exchange, step)
    between, smaller = found.every * step, find_interval(apart, exchange, 2 * step)
    assert smaller.every <= found.every
    if found.every < MAX_INTERVAL:
        assert (
            exchange.seconds(1_000_000) <= MAX_SHARE * between
            and exchange.waits(found, step) <= MAX_WAIT_SHARE * between
        )
    return found


def test_smallest_interval_that_hides_the_exchange_is_chosen() -> None:
    plain = find(7.5e6)
    assert (plain.every, plain.delay) == (23, 2)  # 0.55 s are half of 23 steps
    assert find(7.5e6, codec="int8").every < find(7.5e6, codec="fp16").every < plain.every
    assert find(7.5e6, fragments=40).every >= 40 and find(7.5e6, delay=30).every == 31
    assert find(7.5e6, delay=0).every == MAX_INTERVAL > find(7.5e7, delay=0).every  # all of it is waited for
    assert find(None, step=2.0).every == 1 and find(7.5e3).every == MAX_INTERVAL
    assert find(7.5e6, delay=0, staleness=1, fragments=1).every == 2 * 23 - 1  # there, and the answer


@pytest.mark.parametrize(
    ("config", "mend"),
    [
        ({"measure": "0s", "clusters": {"gpu": {"flops": "1G"}, "npu": {}}}, "flops: 5T of clusters.npu"),
        ({"clusters": CLUSTERS}, "nb.replica(sync_every=100)"),
    ],
    ids=["how fast a cluster is", "what two gradients take"],
)
def test_auto_interval_without_measurements_is_refused(config: dict[str, Any], mend: str) -> None:
    nb.init(config, links=LINE)
    weight = tf.Variable([[1.0]] * 8)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.replica(sync_every="auto"):
            for _ in range(2 if "100" in mend else 1):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((x @ weight) ** 2)
                weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    with pytest.raises(PlanError) as refused:
        step(X)
    assert mend in str(refused.value) and "test_interval.py" in str(refused.value)


def test_plan_reports_a_link_too_slow_for_any_interval() -> None:
    nb.init({"clusters": CLUSTERS}, links="8kbit,1ms")
    with nb.cluster(), nb.replica(sync_every="auto"):
        assert "does not hide it" in nb.plan(model(), X, Y).explain()
