"""Two clusters train one language model over a link of 60 Mbit/s and 20 ms, which is emulated in this process.

The task: predict the next token of rows like 3 7 11 15 ... (modulo 32), whose stride must be inferred.
"""

import sys

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer

SIZES = Sizes(vocabulary=32, length=32, width=64, heads=4, blocks=4)
ROWS, BATCH, MICRO_BATCHES, EPOCHS = 1024, 64, 4, 8
LINE, BITS_A_SECOND = "60mbit,20ms", 60e6
console = Console(highlight=False)


def progressions(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens, with the next token of each; seeded, so that every run has the same rows."""
    random = np.random.default_rng(0)
    start, stride = random.integers(0, 32, (rows, 1)), random.integers(1, 9, (rows, 1))
    tokens = (start + stride * np.arange(SIZES.length + 1)) % SIZES.vocabulary
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def language_model(*, cut: bool) -> keras.Model:
    """The model with blocks 0 and 1 in cluster gpu, and 2 and 3 in cluster npu; or without any scopes."""
    keras.utils.set_random_seed(1)
    if cut:
        with nb.cluster(), nb.pipeline(micro_batch=MICRO_BATCHES):
            model = transformer(SIZES, around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"))
    else:
        model = transformer(SIZES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3, epsilon=1e-5), loss)  # from here on it is plain Keras
    return model


def train(model: keras.Model) -> float:
    """Train by Keras's own `fit`; returns the last epoch's loss."""
    x, y = progressions(ROWS)
    return model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False).history["loss"][-1]


def make_report_table(report: nb.Report) -> Table:
    """A table of the last step: computation, waiting, and bytes on the link."""
    table = Table("", "", title=f"the last step, in {report.micro_batches} micro-batches", show_header=False)
    for name, stage in report.stages.items():
        if stage.compute_seconds is not None:  # not timed if there is only one stage
            table.add_row(f"stage {name}", f"computes {stage.compute_seconds:.3f} s, waits {stage.wait_seconds:.3f} s")
    for name, link in report.links.items():
        seconds = 8 * link.bytes / BITS_A_SECOND
        table.add_row(f"link {name}", f"carries {link.bytes / 1e3:.0f} kB, which takes {seconds:.3f} s")
    predicted = report.predicted_seconds or 0.0
    table.add_row("step", f"took {report.step_seconds:.3f} s; the simulator predicts {predicted:.3f} s")
    return table


def main() -> int:
    """Plan, train over the link, show a step, and train again without scopes."""
    nb.init(links=LINE)
    model = language_model(cut=True)

    console.rule("1. the plan: what runs where, and what is sent")
    console.print(nb.plan(model, *progressions(BATCH)).to_text(), markup=False, soft_wrap=True)

    console.rule(f"2. fit, across clusters gpu and npu and a link of {LINE}")
    across = train(model)
    console.print(make_report_table(nb.last_report()))

    console.rule("3. fit, the same model without scopes: plain Keras, no link")
    uncut = train(language_model(cut=False))

    same = abs(across - uncut) <= 1e-3 * uncut
    verdict = "the same model" if same else "[red]NOT the same model[/red]"
    console.print(f"\nloss across two clusters {across:.6f}, uncut {uncut:.6f}: [bold]{verdict}[/bold]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
