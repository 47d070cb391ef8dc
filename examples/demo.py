"""Two clusters train one language model over a line of 60 Mbit/s and 20 ms, emulated in this process: `make demo`.

The task: rows like 3 7 11 15 ... (modulo 32), and the model says what comes next. It has to find each row's stride.
"""

import sys

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer

SIZES = Sizes(vocabulary=32, length=32, width=64, heads=4, blocks=4)
ROWS, BATCH, MICRO_BATCHES, EPOCHS = 1024, 64, 4, 4
LINE = "60mbit,20ms"
console = Console(highlight=False)


def progressions(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens, and the token that follows each: seeded, so that every run sees the same."""
    random = np.random.default_rng(0)
    start, stride = random.integers(0, 32, (rows, 1)), random.integers(1, 9, (rows, 1))
    tokens = (start + stride * np.arange(SIZES.length + 1)) % SIZES.vocabulary
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def language_model(*, cut: bool) -> keras.Model:
    """The model, with blocks 0 and 1 in cluster gpu and 2 and 3 in cluster npu; or without any scopes."""
    keras.utils.set_random_seed(1)
    if cut:
        with nb.cluster(), nb.pipeline(micro_batch=MICRO_BATCHES):
            model = transformer(SIZES, around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"))
    else:
        model = transformer(SIZES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3, epsilon=1e-5), loss)  # from here on nothing changes
    return model


def train(model: keras.Model) -> float:
    """Keras's own `fit`; gives the last epoch's loss."""
    x, y = progressions(ROWS)
    return model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False).history["loss"][-1]


def table(report: nb.Report) -> Table:
    """What the last step did: who computed, who waited, what crossed the line."""
    shown = Table("", "", title=f"the last step, in {report.micro_batches} micro-batches", show_header=False)
    for name, stage in report.stages.items():
        shown.add_row(f"stage {name}", f"computes {stage.compute_seconds:.3f} s, waits {stage.wait_seconds:.3f} s")
    for name, link in report.links.items():
        shown.add_row(f"link {name}", f"{link.bytes / 1e3:.1f} kB: {link.bytes * 8 / 60e6:.3f} s of a {LINE} line")
    shown.add_row("step", f"measured {report.step_seconds:.3f} s, predicted {report.predicted_seconds or 0:.3f} s")
    return shown


def main() -> int:
    """Plan, train across the line, look, and train again without it."""
    nb.init(links=LINE)
    model = language_model(cut=True)
    x, y = progressions(BATCH)

    console.rule("the plan: what runs where, and what crosses")
    console.print(nb.plan(model, x, y).to_text(), markup=False)

    console.rule(f"training across clusters gpu and npu, joined by {LINE}")
    cut_loss = train(model)
    console.print(table(nb.last_report()))

    console.rule("the same model without scopes: plain Keras, no line")
    plain_loss = train(language_model(cut=False))
    same = abs(cut_loss - plain_loss) <= 1e-3 * plain_loss
    verdict = "the same model" if same else "NOT the same model"
    console.print(f"\nloss across two clusters {cut_loss:.6f}, uncut {plain_loss:.6f}: [bold]{verdict}[/bold]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
