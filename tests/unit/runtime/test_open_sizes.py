"""Batches with varying lengths of sentences: a free line counts the bytes of an emulated one."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest

import whale_nebula as nb

LENGTHS = (5, 9, 3, 9)


class Kept(keras.callbacks.Callback):
    """What each step put on the links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, tuple[int, int]]] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.links.append({name: (link.bytes, link.frames) for name, link in nb.last_report().links.items()})


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    for length in LENGTHS:
        yield draw.integers(1, 20, (6, length)), draw.standard_normal((6, length, 2)).astype("float32")


def carried(links: str | None, micro_batch: int) -> list[dict[str, tuple[int, int]]]:
    """Bytes and frames of each step."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None,), dtype="int32")
    with nb.cluster(), nb.pipeline(micro_batch):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Embedding(20, 8)(inputs)
            turned = keras.layers.Permute((2, 1))(hidden)
        with nb.stage(cluster="npu"):
            again = keras.layers.Permute((2, 1))(turned)
            outputs = keras.layers.Dense(2)(keras.layers.Concatenate()([again, hidden]))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    kept = Kept()
    with nb.init(links=links):
        model.fit(batches(), steps_per_epoch=len(LENGTHS), verbose=0, callbacks=[kept])
    return kept.links


@pytest.mark.grid
@pytest.mark.parametrize("micro_batch", [pytest.param(1, marks=pytest.mark.grid), 4])
def test_what_a_free_line_would_carry_is_counted_length_by_length(micro_batch: int) -> None:
    free = carried(None, micro_batch)
    assert free == carried("10gbit,0ms", micro_batch)
    assert len({step["gpu->npu"] for step in free}) == len(set(LENGTHS))


def test_as_many_micro_batches_are_in_flight_as_the_line_needs() -> None:
    """No size is planned, so the way of the first micro-batch says how long the line is."""
    keras.utils.set_random_seed(1)
    with nb.cluster(), nb.pipeline(6):
        inputs = keras.Input((None, 4))
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(8)(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    with nb.init(links="1gbit,20ms"):
        for length in (5, 9, 3, 9, 7):
            model.train_on_batch(np.ones((6, length, 4)), np.ones((6, length, 1)))
        ran = [span.what.split()[0] for span in nb.last_report().timeline() if span.lane == "gpu"]
    assert ran.index("backward") == 6, ran
