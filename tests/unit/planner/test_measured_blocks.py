"""Blocks of a step are measured by running: on copies, once for all equal ones, and never twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.hardware.measured import BlockTime, blocks_path, keep_blocks, read_blocks
from whale_nebula.planner.decision import Decision
from whale_nebula.runtime import block_costs
from whale_nebula.runtime.run import current_run

ROWS = 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class Printing(keras.layers.Layer):
    """Does something on which no copy of a variable helps."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.scale * tf.ensure_shape(tf.py_function(lambda each: told.append(1) or each, [x], x.dtype), x.shape)


told: list[int] = []


def decide(*layers: keras.layers.Layer, **config: Any) -> tuple[Decision, keras.Model]:
    """What is decided for a model of these layers and a head, in a run of its own."""
    nb.shutdown()
    nb.init({"clusters": {"gpu": {}, "npu": {}}, "measure": "60s", **config})
    model = keras.Sequential([keras.Input((48,)), *layers, keras.layers.Dense(2, name="head")])
    model.compile(keras.optimizers.Adam(), "mse")
    x, y = np.ones((ROWS, 48), "float32"), np.ones((ROWS, 2), "float32")
    with nb.auto_parallel():
        nb.plan(model, x, y)
    return current_run().decisions[0], model


def alike() -> list[keras.layers.Layer]:
    """Three layers of the same form."""
    return [keras.layers.Dense(48, activation="relu", name=f"d{number}") for number in range(3)]


def test_blocks_that_are_alike_are_measured_once_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = decide(*alike())
    assert first.grounds.measured == 1.0 and first.predicted.share_measured == 1.0
    cluster = first.problem.clusters[0]
    assert cluster.forward[:, 1].tolist() == cluster.forward[:, 2].tolist() and cluster.update[1] == cluster.update[2]
    kept = json.loads(blocks_path().read_text())["blocks"]
    # With three numbers of rows 2 forwards, 3 backwards, and all together in three ways; a few updates, and adding.
    # Were none alike, there would be 4 forwards and 4 backwards.
    assert len(kept) <= 3 * (2 + 3 + 3) + 6
    monkeypatch.setattr(block_costs, "time_calls", None)
    again, _ = decide(*alike(), clusters={"gpu": {"cores": 1}, "npu": {"cores": 4}})
    one, four = again.problem.clusters
    assert np.array_equal(one.backward, cluster.backward)
    assert one.crossing == pytest.approx(4 * four.crossing) and one.message == pytest.approx(4 * four.message) != 0.0


def test_what_others_have_measured_is_not_read() -> None:
    keep_blocks({"a": BlockTime(1.0, 0.1, "2026-01-02")})
    keep_blocks({"b": BlockTime(2.0, 0.1, "2026-01-03")})
    assert sorted(read_blocks()) == ["a", "b"]
    document = json.loads(blocks_path().read_text())
    for text in (json.dumps({**document, "machine": "another"}), json.dumps({**document, "format": "0"}), "{", "[]"):
        blocks_path().write_text(text)
        assert read_blocks() == {}
    keep_blocks({"c": BlockTime(3.0, 0.1, "2026-01-04")})
    assert read_blocks() == {"c": BlockTime(3.0, 0.1, "2026-01-04")}


def test_variables_stay_as_they_are_and_what_has_other_effects_is_not_run() -> None:
    told.clear()
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(48), keras.layers.Dropout(0.5), Printing()]
    decision, model = decide(*layers)
    fresh = keras.models.clone_model(model)
    for variable, other in zip(model.non_trainable_variables, fresh.non_trainable_variables, strict=True):
        if "seed" not in variable.path:
            np.testing.assert_array_equal(variable.numpy(), other.numpy())
    begun = {float(np.abs(each.numpy()).sum()) for each in model.optimizer.variables}
    assert begun == {0.0, float(np.float32(1e-3))}  # slots, the count of steps, and the learning rate
    assert not told and 0.0 < decision.grounds.measured < 1.0
    assert np.isfinite(decision.problem.clusters[0].backward).all()


@pytest.mark.parametrize(
    "config",
    [{"measure": "0s"}, {"clusters": {"gpu": {"flops": "1G"}, "npu": {"flops": "1G", "memory_rate": "1GB/s"}}}],
    ids=["none is asked for", "the config says flops"],
)
def test_nothing_is_measured_where(config: dict[str, Any]) -> None:
    decision, _ = decide(*alike(), **config)
    assert decision.grounds.measured == 0.0 and not blocks_path().exists()
    assert decision.emulated and decision.seconds_here >= decision.chosen.seconds
    assert (decision.grounds.said > 0.5) == ("clusters" in config)
    usual, slow = (cluster.update.sum() for cluster in decision.problem.clusters)
    assert slow == pytest.approx(usual * (20 if "clusters" in config else 1))


@pytest.mark.grid
def test_one_cluster_may_be_said_and_the_other_measured() -> None:
    decision, _ = decide(*alike(), clusters={"gpu": {"flops": "1G"}, "npu": {}})
    assert 0.0 < decision.grounds.measured < 1.0
    assert decision.problem.clusters[0].forward.sum() != decision.problem.clusters[1].forward.sum()
