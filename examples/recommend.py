"""Click prediction with embedding tables in a cluster with memory, and the network in a cluster with accelerators.

    python examples/recommend.py                      # two clusters in this process, over an emulated link
    python examples/recommend.py --look-up vectors    # send a vector for each id, for comparison: same results
    python examples/recommend.py --hot 2000           # rows of the most frequent ids are next to the network
    python examples/recommend.py --micro-batch 4      # look-ups, transfers and the network overlap
    python examples/recommend.py --staleness 1        # updates of rows are a step late, in parallel to the network
    python examples/recommend.py --criteo train.txt   # Criteo's file instead of a generated log
    whale-nebula run --all --clusters cpu,gpu examples/recommend.py      # a process for each cluster, mutual TLS
    whale-nebula run --all --config clusters.yaml examples/recommend.py  # several workers of cpu share the rows

New ids get rows. For each batch the rows of its distinct ids are sent, and the sums of their gradients return. The ids
of the next batch are looked up in the meantime.
"""

import argparse
import functools
import itertools
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.launch import attach
from whale_nebula.models import recommender

WIDTH, VALUES, LINE = 16, 1000, "200mbit,2ms"
NETWORKS = ("dlrm", "wide_and_deep", "multi_view")
console = Console(highlight=False)


def read_log(given: argparse.Namespace) -> tuple[recommender.Clicks, recommender.Clicks]:
    """The training rows, and held-out rows."""
    held = max(given.rows // 5, given.batch)
    if given.criteo is None:
        made = functools.partial(recommender.generated_clicks, vocabulary=VALUES)
        return made(given.rows), made(held, start=given.rows)
    blocks = list(itertools.islice(recommender.iterate_criteo(given.criteo, rows=given.rows), 2))
    if len(blocks) < 2:
        raise nb.errors.DataError(
            f"{given.criteo} has only {len(blocks[0]) if blocks else 0} rows", mend="use a smaller --rows"
        )
    return blocks[0], blocks[1]


def make_model(given: argparse.Namespace, log: recommender.Clicks) -> tuple[keras.Model, list[Any]]:
    """The model, and its table layers."""
    sizes: dict[str, Any] = {"fields": log.ids.shape[1], "numbers": log.numbers.shape[1]}
    tables: list[Any]
    embedding: Any
    adagrad = keras.optimizers.Adagrad(0.1)
    if given.look_up == "vectors":
        embedding = recommender.HashedEmbedding(WIDTH, optimizer=adagrad, staleness=given.staleness, name="table0")
        tables = [embedding]
    else:
        hot = recommender.most_frequent(log.ids, given.hot)
        options: dict[str, Any] = {"optimizer": adagrad, "staleness": given.staleness}
        embedding = recommender.SplitEmbedding(WIDTH, tables=given.tables, hot=hot, **options)
        tables = [*embedding.layers]
    if given.network == "dlrm":
        return recommender.dlrm(embedding, width=WIDTH, **sizes), tables
    if given.network == "multi_view":
        half = sizes["fields"] // 2
        views = [list(range(half)), list(range(half, sizes["fields"]))]
        return recommender.multi_view(embedding, views=views, **sizes), tables
    wide = recommender.HashedEmbedding(1, optimizer="ftrl", name="table_wide")
    return recommender.wide_and_deep(embedding, wide, **sizes), [*tables, wide]


class StepRecorder(keras.callbacks.Callback):
    """Callback that records the time and bytes of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, int, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record a step."""
        report = nb.last_report()
        links = {**report.elsewhere.links, **report.links}
        forth, back = (sum(each.bytes for name, each in links.items() if name.startswith(f)) for f in ("cpu", "gpu"))
        self.steps.append((report.step_seconds, forth, back))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the results of an epoch."""
        if nb.here().lead:
            console.print(f"epoch {epoch + 1}: loss {logs['loss']:.4f}")


def find_best_auc(log: recommender.Clicks) -> str:
    """The AUC of a log's true probabilities, which is the maximum, if they are known."""
    return "" if log.chances is None else f" (maximum {recommender.auc(log.chances, log.clicked):.4f})"


def main() -> None:
    """Train, and print costs and scores."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=100_000, help="training rows; a fifth more is held out")
    arguments.add_argument("--batch", type=int, default=500, help="rows per step")
    arguments.add_argument("--epochs", type=int, default=2)
    arguments.add_argument("--network", choices=NETWORKS, default="dlrm")
    arguments.add_argument("--look-up", choices=("distinct", "vectors"), default="distinct", help="what is sent")
    arguments.add_argument("--tables", type=int, default=1, help="tables to which ids are distributed")
    arguments.add_argument("--hot", type=int, default=0, metavar="IDS", help="frequent ids next to the network")
    arguments.add_argument("--staleness", type=int, default=0, metavar="STEPS", help="delay of updates of rows")
    arguments.add_argument("--micro-batch", type=int, default=1, metavar="COUNT", help="micro-batches, which overlap")
    arguments.add_argument("--no-ahead", action="store_true", help="do not look up ids a step ahead")
    arguments.add_argument("--criteo", metavar="FILE", help="train.txt[.gz] of Criteo's challenge")
    given = arguments.parse_args()

    launched = attach() is not None
    nb.init(None if launched else {"clusters": {"cpu": {}, "gpu": {}}}, links=None if launched else LINE, seed=1)
    try:
        log, held = read_log(given)
        model, tables = make_model(given, log)
    except nb.errors.NebulaError as error:
        arguments.error("; ".join(filter(None, (error.what, error.why, error.mend))))
    places: dict[str, Any] = {r"table(\d+|_wide)": "cpu", r"(?!table(\d+|_wide)$).*": "gpu"}
    nb.place(model, {**places, r"(table(\d+|_wide))": nb.split(axis=0)})  # over the workers of cpu, if it has several
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.BinaryCrossentropy(from_logits=True))

    recorder, began = StepRecorder(), time.monotonic()
    data = tf.data.Dataset.from_tensor_slices((log.inputs, log.clicked)).batch(given.batch)
    if not given.no_ahead:
        data = recommender.look_ahead(data, *tables)
    with nb.pipeline(given.micro_batch, coupled="allow"):  # a look-up runs Python, which plans cannot analyse
        model.fit(data, epochs=given.epochs, shuffle=False, verbose=0, callbacks=[recorder])
    took = time.monotonic() - began
    found = recommender.auc(model.predict(held.inputs, batch_size=given.batch, verbose=0), held.clicked)

    seconds, forth, back = np.median(recorder.steps, axis=0)
    here = [layer for layer in tables if len(layer.table)]
    for layer in here:
        console.print(f"{layer.name}: {len(layer.table):,} rows, {layer.table.reserved_bytes / 2**20:.0f} MiB")
    if nb.here().lead:
        table = Table("steps", "ms per step", "kB to gpu", "kB to cpu")
        table.add_row(str(len(recorder.steps)), f"{1e3 * seconds:.1f}", f"{forth / 1e3:.0f}", f"{back / 1e3:.0f}")
        console.print(table)
        console.print(f"{took:.0f} s in total; AUC on held-out rows: [bold]{found:.4f}[/bold]{find_best_auc(held)}")


if __name__ == "__main__":
    main()
