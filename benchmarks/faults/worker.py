"""A worker of a fault run: trains a small model and prints the result. It may receive damaged frames."""

from __future__ import annotations

import argparse
import random
import threading
import time
from typing import Any

import keras

import whale_nebula as nb
from tests.parity_harness import data
from tests.processes.worker_reports import digest_tensors, report_value
from whale_nebula.errors import NebulaError
from whale_nebula.runtime.run import current_run
from whale_nebula.transport.grpc.carrier import GrpcCarrier
from whale_nebula.wire.frame import HEADER_BYTES, unpack_header

ROWS = 8


class ProgressCallback(keras.callbacks.Callback):
    """Callback that prints the progress and slows steps down."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self._pause = pause

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        report_value(f"step {batch}", time.monotonic())
        time.sleep(self._pause)


class FaultyReceiver:
    """A faulty carrier: one of every so many frames is damaged, lost, or repeated."""

    def __init__(self, ill: str, every: int) -> None:
        self._ill, self._every = ill, every
        self._draw = random.Random(1)
        self._count = 0
        self._damaged_count = 0
        self._recorded_frames: list[bytes] = []
        self._receive = GrpcCarrier._receive

    def __call__(self, carrier: Any, connection: Any, frame: bytes) -> None:
        self._count += 1
        plain = len(frame) >= HEADER_BYTES and unpack_header(frame[:HEADER_BYTES], sealed=True)[0].conversation != 0
        if not plain or self._count % self._every:
            self._receive(carrier, connection, frame)
        else:
            self._damaged_count += 1
            report_value("struck", self._damaged_count)
            self._receive_damaged(carrier, connection, frame)
        if plain and len(self._recorded_frames) < 100:
            self._recorded_frames.append(frame)

    def _receive_damaged(self, carrier: Any, connection: Any, frame: bytes) -> None:
        if self._ill == "reorder":
            threading.Timer(0.02, self._receive, (carrier, connection, frame)).start()
            return
        data = bytearray(frame)
        data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        heard = {
            "corrupt": (bytes(data),),
            "truncate": (frame[: self._draw.randrange(len(frame))],),
            "duplicate": (frame, frame),
            "replay": (*self._draw.sample(self._recorded_frames, min(2, len(self._recorded_frames))), frame),
        }
        for each in heard[self._ill]:
            self._receive(carrier, connection, each)


def model(wide: int) -> keras.Model:
    """Two stages with a boundary of `wide` KiB each way."""
    inputs = keras.Input((64,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.RepeatVector(wide)(keras.layers.Dense(64, activation="relu")(inputs))
        with nb.stage(cluster="npu"):
            hidden = keras.layers.Dropout(0.1)(keras.layers.GlobalAveragePooling1D()(hidden))
            outputs = keras.layers.Dense(16)(hidden)
    return keras.Model(inputs, outputs)


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--wide", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--ill", default="")
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--mark", help="by which its processes are found")
    given = parser.parse_args()
    if given.ill:
        ears = FaultyReceiver(given.ill, given.every)
        GrpcCarrier._receive = lambda *heard: ears(*heard)  # type: ignore[method-assign]
    trained = model(given.wide)
    trained.compile(keras.optimizers.Adam(0.01), "mse")
    rows = ROWS * given.steps
    x, y = data(rows, 64), data(rows, 16, seed=1)
    try:
        history = trained.fit(
            x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[ProgressCallback(given.pause)]
        )
        report_value("loss", [float(loss).hex() for loss in history.history["loss"]])
        report_value("weights", digest_tensors(trained.get_weights()))
        ledger = current_run().ledger
        links = ledger.session.links.values() if ledger else ()
        report_value("connections", max((link.state().connections for link in links), default=0))
    except NebulaError as failure:
        report_value("error", str(failure))
        raise


if __name__ == "__main__":
    main()
