"""A language model that begins with short rows, for which less is sent and computed.

    python examples/curriculum.py                     # two clusters in this process, over an emulated line
    python examples/curriculum.py --without           # full rows from the first step on, to compare
    python examples/curriculum.py --pace root         # rows grow faster at first; --mode pack keeps all tokens
    python examples/curriculum.py --micro-batches auto    # the planner chooses their number for each length
    whale-nebula run --all --clusters gpu,npu examples/curriculum.py     # a process for each cluster, mutual TLS

The learning rate is a function of tokens, so it decays as with full rows. Both variants are compared by the loss on
held-out full rows.
"""

import argparse
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.launch import attach
from whale_nebula.models import Sizes, text, transformer
from whale_nebula.strategies import ByTokens, Curriculum

WORDS, SENTENCES, BATCH, MICRO_BATCHES, LINE = 512, 6000, 16, 4, "60mbit,20ms"
console = Console(highlight=False)


class StepRecorder(keras.callbacks.Callback):
    """Callback that records each step by the length of its rows."""

    def __init__(self, curriculum: Curriculum) -> None:
        super().__init__()
        self.steps: dict[int, list[tuple[float, int, int]]] = {}
        self._curriculum, self._seen = curriculum, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record a step."""
        report, length = nb.last_report(), self._curriculum.length(self._seen)
        crossed = sum(link.bytes for link in report.links.values())
        if length not in self.steps and nb.here().lead:
            console.print(f"step {self._seen}: {length} tokens per row, mean loss so far {logs['loss']:.3f}")
        self.steps.setdefault(length, []).append((report.step_seconds, crossed, report.micro_batches))
        self._seen += 1

    def table(self) -> Table:
        """A row for each length; the first steps, which are traced, are not counted."""
        table = Table("tokens per row", "steps", "seconds per step", "kB per step", "micro-batches")
        for length, steps in self.steps.items():
            seconds, crossed, count = np.median(steps, axis=0)
            table.add_row(str(length), str(len(steps)), f"{seconds:.3f}", f"{crossed / 1e3:.0f}", f"{count:.0f}")
        return table


def make_rows(length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text of many sentences as rows of tokens, with the next token of each."""
    lines = text.monolingual("en", SENTENCES)
    ids = text.Tokenizer(text.learn_vocabulary(lines, WORDS)).encode(lines).flat_values.numpy()
    count = (len(ids) - 1) // length
    return ids[: count * length].reshape(count, length), ids[1 : count * length + 1].reshape(count, length)


def main() -> None:
    """Train, and print the costs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--start", type=int, default=16, help="tokens of a row in the first step")
    arguments.add_argument("--end", type=int, default=128, help="tokens of a row from --grow on")
    arguments.add_argument("--grow", type=int, default=120, metavar="STEPS", help="for so many steps rows grow")
    arguments.add_argument("--steps", type=int, default=200, help="of the whole training")
    arguments.add_argument("--pace", choices=["linear", "root"], default="linear")
    arguments.add_argument("--mode", choices=["truncate", "pack"], default="truncate")
    arguments.add_argument("--micro-batches", choices=[str(MICRO_BATCHES), "auto"], default=str(MICRO_BATCHES))
    arguments.add_argument("--without", action="store_true", help="full rows from the first step on")
    given = arguments.parse_args()

    start = given.end if given.without else given.start
    try:
        curriculum = Curriculum(
            start, given.end, given.grow, step=16, pace=given.pace, mode=given.mode,
            micro_batch="auto" if given.micro_batches == "auto" else None,
        )  # fmt: skip
    except nb.errors.OptionError as error:
        arguments.error(error.what)
    nb.init(seed=1, links=LINE if attach() is None else None)
    sizes = Sizes(vocabulary=WORDS, length=given.end, width=64, heads=4, blocks=4)
    with nb.cluster(), nb.pipeline(micro_batch=MICRO_BATCHES):
        model = transformer(sizes, around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"), shorter=True)
    rate = ByTokens(keras.optimizers.schedules.CosineDecay(3e-3, given.steps, 0.1), curriculum)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)

    x, y = make_rows(given.end)
    held = 2 * BATCH
    data = tf.data.Dataset.from_tensor_slices((x[held:], y[held:])).shuffle(len(x), seed=1)
    data = data.batch(BATCH, drop_remainder=True).repeat()
    recorder, began = StepRecorder(curriculum), time.monotonic()
    model.fit(data, steps_per_epoch=given.steps, shuffle=False, verbose=0, callbacks=[curriculum, recorder])
    took = time.monotonic() - began
    found = model.evaluate(x[:held], y[:held], batch_size=BATCH, verbose=0)
    if nb.here().lead:
        console.print(recorder.table())
        console.print(f"{took:.0f} s in all; loss on full rows that were held back: [bold]{found:.3f}[/bold]")


if __name__ == "__main__":
    main()
