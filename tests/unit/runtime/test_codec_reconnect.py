"""Codec states survive a broken line: real links on a cable that is cut during a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.simulation.carrier import Cable, Passage
from tests.unit.transport.link_pairs import build_step_message
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step.local import EmulatedStep
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import Key, LinkTotals
from whale_nebula.wire.greeting import Greeting

ENDS = ("gpu", "npu")
SAMPLES, BATCH, WIDTH, STEPS, PARTS, PATIENCE = 12, 4, 32, 9, 2, 20.0
DRAWN = np.random.default_rng(3)
X = DRAWN.standard_normal((SAMPLES, 6)).astype("float32")
Y = np.tanh(X @ DRAWN.standard_normal((6, 2))).astype("float32")
OPTIONS: dict[str, dict[str, Any]] = {
    "delta": {"int8": True, "delta": "ids"},
    "shared rank": {"rank": 8, "int8": True, "backward": "int4"},
}


class TensorLink:
    """A link's end that takes what a step in one process sends: tensors by reference, and sizes without any."""

    def __init__(self, link: PeerLink) -> None:
        self.link = link
        self.on_sent = None
        self.announced = -1

    def send(self, key: Key, array: Any, *, raw_bytes: int | None = None, size: int | None = None) -> None:
        if key.step != self.announced:
            self.announced = key.step
            self.link.post({**build_step_message(key.step), "program": key.program})
        sent = np.zeros(size or 0, np.uint8) if array is None else array.numpy() if tf.is_tensor(array) else array
        self.link.send(key, sent, raw_bytes=raw_bytes)

    def receive(self, key: Key, patience: float) -> Any:
        return self.link.receive(key, patience)

    def fail(self, reason: Any) -> None:
        self.link.fail(reason)

    def totals(self) -> LinkTotals:
        return self.link.totals()


class ConnectionBreaker:
    """Loses every so-and-so-many-th frame from one side, and with it the connection."""

    def __init__(self, source: str, every: int) -> None:
        self.source, self.every = source, every
        self.cuts = 0
        self.cable: Cable | None = None
        self.links: list[PeerLink] = []

    def __call__(self, passage: Passage) -> Iterable[bytes]:
        if self.cable is None or passage.source != self.source or passage.number % self.every != self.every - 1:
            return (passage.frame,)
        self.cuts += 1
        self.cable.disconnect()
        return ()

    def close(self) -> None:
        closing = [threading.Thread(target=link.close) for link in self.links]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(PATIENCE)


def connect_by(plan: ConnectionBreaker) -> Callable[[EmulatedStep], None]:
    """Join the clusters of a step by links over a cable, once."""

    def connect(step: EmulatedStep) -> None:
        cable = plan.cable = Cable(*ENDS, plan)
        deadlines = Deadlines(patience=PATIENCE)
        greetings = ((end, Greeting("run", end.here, end.there)) for end in cable.ends)
        plan.links = [PeerLink(end, greeting, ENDS, deadlines=deadlines) for end, greeting in greetings]
        step.links = dict(zip(permutations(ENDS), map(TensorLink, plan.links), strict=True))  # type: ignore[arg-type]

    return connect


def train(options: dict[str, Any]) -> tuple[list[float], list[bytes], list[Any]]:
    """Losses, weights and what both sides hold, after some steps over samples that come again."""
    keras.utils.set_random_seed(4)
    kernels = [tf.Variable(keras.random.normal((6, WIDTH))), tf.Variable(keras.random.normal((WIDTH, 2)))]

    @nb.function
    def build_step_message(x: Any, y: Any, ids: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(PARTS), nb.compress(**options):
            with nb.stage(cluster=ENDS[0]):
                hidden = tf.tanh(x @ kernels[0])
            with nb.stage(cluster=ENDS[1]):
                loss = tf.reduce_mean(tf.square(hidden @ kernels[1] - y)) + 0.0 * tf.reduce_sum(tf.cast(ids, "float32"))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(0.05 * gradient)
        return loss

    losses = []
    for number in range(STEPS):
        rows = np.arange(BATCH) + BATCH * number % SAMPLES
        losses.append(float(build_step_message(X[rows], Y[rows], rows.astype("int64"))))
    held = [list_state(state) for state in current_run().channels.values()]
    return losses, [kernel.numpy().tobytes() for kernel in kernels], held


def list_state(state: Any) -> Any:
    """A state as bytes, but for what its side alone uses."""
    cache = None if state.cache is None else {k: v.tobytes() for k, v in state.cache.as_arrays().items()}
    basis = None if state.structure is None else np.asarray(state.structure.q).tobytes()
    return state.version, state.steps, cache, basis


@pytest.mark.grid
@pytest.mark.parametrize(("name", "source"), [("delta", "gpu"), ("shared rank", "npu")])
def test_run_with_broken_connections_is_bit_identical(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with nb.init(seed=2):
        whole = train(OPTIONS[name])
    assert any(cache or basis for _, _, cache, basis in whole[2]), "there is something to remember"
    plan = ConnectionBreaker(source, every=11)
    monkeypatch.setattr(EmulatedStep, "_connect", connect_by(plan))
    nb.shutdown()
    with nb.init(seed=2):
        broken = train(OPTIONS[name])
    plan.close()
    assert plan.cuts >= 2, "and the line was cut while it was used"
    assert plan.cable is not None and abs(plan.cable.connection) > plan.cuts, "and made again"
    assert broken == whole
