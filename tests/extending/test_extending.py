"""The programs of docs/extending.md: each extends the package from outside, and trains with the extension."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.codec.registry import CODECS
from whale_nebula.passes import pipeline
from whale_nebula.passes.rules.registry import RULES
from whale_nebula.report.watchers import OUTPUTS
from whale_nebula.schedule import SCHEDULES
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.greeting import Greeting
from whale_nebula.wire.message import build_message

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
X = np.random.default_rng(0).random((16, 8), np.float32)
Y = np.tanh(X.sum(1, keepdims=True))
DEADLINE = 20.0


def run_section(title: str) -> dict[str, Any]:
    """Run the program of a section; gives its names."""
    section = PAGE.read_text("utf-8").split(f"\n## {title}\n")[1].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {"__name__": "extension"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names


@pytest.fixture(autouse=True)
def restored_tables() -> Iterator[None]:
    """What a program enters is taken out again."""
    nb.shutdown()
    tables: list[dict[str, Any]] = [CODECS, SCHEDULES, OUTPUTS, RULES]
    before, passes = [dict(table) for table in tables], pipeline.PIPELINE
    yield
    nb.shutdown()
    pipeline.PIPELINE = passes
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def train(*scopes: Any, hidden: Callable[[Any], Any] = keras.ops.tanh, uncut: bool = False) -> list[float]:
    """The losses of three epochs."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    first, last = keras.layers.Dense(12), keras.layers.Dense(1)
    if uncut:
        outputs = last(hidden(first(inputs)))
    else:
        with nb.cluster(), scopes[0]:
            with nb.stage(cluster="gpu"):
                between = hidden(first(inputs))
            with nb.stage(cluster="npu"):
                outputs = last(between)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]


def test_codec_of_the_page_trains() -> None:
    run_section("A codec")
    with nb.init(links="1gbit,0ms"):
        losses = train(nb.compress("thirds", backward="thirds"))
        crossed = nb.last_report().boundaries.values()
        assert [each.codec for each in crossed] == ["thirds", "thirds"]
        assert all(each.payload_bytes < 0.4 * each.raw_bytes for each in crossed)
    assert losses[-1] < losses[0]


def test_schedule_of_the_page_equals_the_uncut_model() -> None:
    run_section("A schedule")
    assert train(nb.pipeline(4, schedule="two")) == pytest.approx(train(uncut=True), rel=1e-5)


def test_report_output_of_the_page_writes_every_step(tmp_path: Path) -> None:
    run_section("An output of reports")
    with nb.init(outputs={"seconds": tmp_path / "seconds.txt"}):
        train(nb.pipeline(2))
    assert len((tmp_path / "seconds.txt").read_text().splitlines()) == 6
    with pytest.raises(nb.errors.OptionError, match="there is no output 'minutes'"):
        nb.init(outputs={"minutes": "x"})


def test_op_rule_of_the_page_allows_micro_batches() -> None:
    def bessel(x: Any) -> Any:
        return keras.layers.Lambda(tf.math.special.bessel_i0)(keras.ops.tanh(x))

    with pytest.raises(nb.errors.BatchCoupledError, match="BesselI0"):
        train(nb.pipeline(2), hidden=bessel)
    nb.shutdown()
    run_section("An op rule")
    assert train(nb.pipeline(2), hidden=bessel) == pytest.approx(train(uncut=True, hidden=bessel), rel=1e-5)


@pytest.mark.grid
def test_op_rule_of_the_page_shards_the_op() -> None:
    """Without it the op is run whole, and a note says so and what it costs; with it in pieces, by the same numbers."""

    def plan() -> tuple[nb.Plan, list[float]]:
        nb.shutdown()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        with nb.cluster(), nb.split(2):
            wide = keras.layers.Dense(64)(inputs)
            wide = keras.layers.Lambda(tf.math.special.bessel_i0)(keras.ops.tanh(wide))
        with nb.cluster(), nb.split(2, axis=0):
            outputs = keras.layers.Dense(1)(wide)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        found = nb.plan(model, X[:8], Y[:8])
        nb.shutdown()
        return found, model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    whole, losses = plan()
    (note,) = (note for note in whole.notes if note.startswith("BesselI0 runs unsharded on every device"))
    assert "test_extending.py:" in note and note.endswith("; each device sends 1.0 KiB per step for that")
    run_section("An op rule")
    pieces, same = plan()
    assert not any("is run whole" in note for note in pieces.notes) and same == pytest.approx(losses, rel=1e-5)
    assert {each.kind for each in pieces.collectives} == {"all-reduce"}


def test_pass_of_the_page_adds_a_note() -> None:
    run_section("A pass")
    inputs = keras.Input((8,))
    with nb.cluster(), nb.stage(cluster="gpu"):
        outputs = keras.layers.Dense(1)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    plan = nb.plan(model, X, Y)
    (note,) = (note for note in plan.notes if note.startswith("stage gpu has"))
    assert plan.text_after("count") == f"== count\n{note}"
    assert train(nb.pipeline(2)) == pytest.approx(train(uncut=True), rel=1e-5)


def test_carrier_of_the_page_trains_like_one_process() -> None:
    """Two halves of a linear model over a link of it: activations there, gradients back."""
    carrier = run_section("A carrier")["StreamCarrier"]
    workers = ("gpu/0", "npu/0")
    ends = [carrier(sock, there) for sock, there in zip(socket.socketpair(), workers[::-1], strict=True)]
    gpu, npu = (
        PeerLink(end, Greeting("run", here, end.there), workers, deadlines=Deadlines(patience=DEADLINE, grace=2.0))
        for end, here in zip(ends, workers, strict=True)
    )
    w = np.linspace(-1, 1, 8 * 4, dtype=np.float32).reshape(8, 4)
    v = np.ones((4, 1), np.float32)
    alone_w, alone_v = w.copy(), v.copy()

    def key(kind: Any, step: int, source: str, destination: str) -> Key:
        return Key(kind, 1, step, 0, 0, 0, source, destination)

    def run_second_half() -> None:
        for step in range(5):
            npu.post(build_message("SESSION", "STEP", program=1, step=step, rows=16, inputs={}))
            hidden = npu.receive(key("forward", step, *workers), DEADLINE)
            error = 2 / 16 * (hidden @ v - Y)
            npu.send(key("backward", step, *workers[::-1]), (error @ v.T).astype(np.float32))
            v[:] -= 0.1 * hidden.T @ error

    thread = threading.Thread(target=run_second_half)
    thread.start()
    for step in range(5):
        gpu.post(build_message("SESSION", "STEP", program=1, step=step, rows=16, inputs={}))
        gpu.send(key("forward", step, *workers), X @ w)
        w -= 0.1 * X.T @ gpu.receive(key("backward", step, *workers[::-1]), DEADLINE)
    thread.join(DEADLINE)
    for _ in range(5):
        hidden = X @ alone_w
        error = 2 / 16 * (hidden @ alone_v - Y)
        alone_w -= 0.1 * X.T @ (error @ alone_v.T).astype(np.float32)
        alone_v -= 0.1 * hidden.T @ error
    assert [end.state().connected for end in ends] == [True, True]
    closing = threading.Thread(target=gpu.close)
    closing.start()
    npu.close()
    closing.join(DEADLINE)
    np.testing.assert_array_equal(w, alone_w)
    np.testing.assert_array_equal(v, alone_v)
