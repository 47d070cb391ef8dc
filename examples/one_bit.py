"""Two clusters train one language model, and exchange their momenta at one bit per number.

    python examples/one_bit.py                       # two clusters in this process, over an emulated link
    python examples/one_bit.py --warm-up 1000        # in float32 in all steps, for comparison
    python examples/one_bit.py --optimizer adam
    whale-nebula run --all --clusters gpu,npu examples/one_bit.py       # a process for each cluster, mutual TLS

Each cluster has a copy of the model, and trains on its half of each batch. After each step their optimizers exchange
momenta: uncompressed during the warm-up, then as signs and a scale, with error feedback.
"""

import argparse
import time
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.launch import attach
from whale_nebula.models import Sizes, text, transformer
from whale_nebula.strategies import OneBitAdam, OneBitLamb

SIZES = Sizes(vocabulary=512, length=32, width=128, heads=4, blocks=4)
SENTENCES, BATCH, LINE = 6000, 16, "60mbit,20ms"
OPTIMIZERS = {"lamb": (OneBitLamb, 1e-2), "adam": (OneBitAdam, 1e-3)}
console = Console(highlight=False)


class StepRecorder(keras.callbacks.Callback):
    """Callback that records the time and bytes of each step, and prints progress."""

    def __init__(self, warm_up: int) -> None:
        super().__init__()
        self.steps: list[tuple[float, int]] = []
        self._warm_up = warm_up

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record a step."""
        report = nb.last_report()
        self.steps.append((report.step_seconds, sum(link.bytes for link in report.links.values())))
        if nb.here().lead and (batch % 20 == 0 or batch == self._warm_up):
            console.print(f"step {batch}: mean loss so far {logs['loss']:.3f}, {self.steps[-1][1] / 1e3:.0f} kB sent")

    def table(self) -> Table:
        """Medians of the steps in the warm-up and after it."""
        table = Table("momenta sent", "steps", "seconds per step", "kB per step")
        for name, steps in (
            ("in float32", self.steps[: self._warm_up]),
            ("at one bit per number", self.steps[self._warm_up :]),
        ):
            if steps:
                seconds, crossed = np.median(steps, axis=0)
                table.add_row(name, str(len(steps)), f"{seconds:.3f}", f"{crossed / 1e3:.0f}")
        return table


def make_rows(length: int) -> tuple[np.ndarray, np.ndarray]:
    """A generated text as rows of tokens, with the next token of each."""
    lines = text.monolingual("en", SENTENCES)
    ids = text.Tokenizer(text.learn_vocabulary(lines, SIZES.vocabulary)).encode(lines).flat_values.numpy()
    count = (len(ids) - 1) // length
    return ids[: count * length].reshape(count, length), ids[1 : count * length + 1].reshape(count, length)


def main() -> None:
    """Train, and print the costs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=120, help="training steps (%(default)s)")
    arguments.add_argument(
        "--warm-up", type=int, default=24, metavar="STEPS", help="with momenta in float32 (%(default)s)"
    )
    arguments.add_argument("--optimizer", choices=list(OPTIMIZERS), default="lamb")
    given = arguments.parse_args()
    kind, rate = OPTIMIZERS[given.optimizer]
    try:
        optimizer = kind(keras.optimizers.schedules.CosineDecay(rate, max(given.steps, 1), 0.1), given.warm_up)
    except nb.errors.OptionError as error:
        arguments.error(f"--warm-up: {error.what}")

    launched = attach() is not None
    nb.init(None if launched else {"clusters": {"gpu": {}, "npu": {}}}, links=None if launched else LINE, seed=1)
    with nb.cluster(), nb.replica(exchange="1bit"), nb.stage():
        model = transformer(SIZES)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    x, y = make_rows(SIZES.length)
    held, train = slice(0, 4 * BATCH), slice(4 * BATCH, (4 + given.steps) * BATCH)
    recorder, began = StepRecorder(given.warm_up), time.monotonic()
    model.fit(x[train], y[train], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[recorder])
    took = time.monotonic() - began
    found = model.evaluate(x[held], y[held], batch_size=BATCH, verbose=0)
    if nb.here().lead:
        console.print(recorder.table())
        console.print(f"{took:.0f} s in total; loss on held-out rows: [bold]{found:.3f}[/bold]")


if __name__ == "__main__":
    main()
