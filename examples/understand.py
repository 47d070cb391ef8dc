"""Fine-tune a BERT on private sentences, with most of its layers in another cluster.

Cluster "home" has the sentences and their labels. It runs the embedding, the first layers, and the head with its loss;
cluster "away" runs the layers between. At each cut the output of a linear layer is sent in the basis of the layer's
singular vectors: 8 numbers per token instead of 96, in both directions. The same training runs three times:
uncompressed, with the low rank, and with the low rank in four bits.

    python examples/understand.py                        # both clusters in this process, over an emulated link
    python examples/understand.py --task similar         # a regression; --help lists the tasks
    python examples/understand.py --rank 4 --cut 1       # a lower rank, a deeper cut
    python examples/understand.py --middle away far      # the layers between are in two clusters
    python examples/understand.py --labels away          # no U shape: only the first layers are at home
    python examples/understand.py --bert FOLDER --glue FOLDER --task sst-2    # Hugging Face's folder, GLUE's files
    python examples/understand.py --bert FOLDER --squad FOLDER                # train-v1.1.json, dev-v1.1.json
    whale-nebula run --all --config examples/understand.yaml examples/understand.py    # a process per cluster, TLS
    whale-nebula run --all --config examples/understand_three.yaml examples/understand.py --middle away far
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.launch import attach
from whale_nebula.models import Bert, BertSizes, load_bert, text
from whale_nebula.models.masking import Masking, pretrain
from whale_nebula.models.understanding import (
    GLUE,
    TASKS,
    Encoder,
    Examples,
    Question,
    Rows,
    Spans,
    Task,
    exact_match,
    generated_task,
    generated_text,
    loss_of,
    read_glue,
    read_spans,
    read_squad,
    score,
    span_f1,
    understanding,
)
from whale_nebula.strategies import low_rank_cut

HOME, AWAY = "home", "away"
BATCH, WORDS = 32, 160
SIZES = BertSizes(vocabulary=WORDS, length=48, width=96, heads=4, layers=4, inner=192, dropout=0.0)
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "rank": {"backward": None},
    "rank+int4": {"int4": True, "backward": "int4"},
}
console = Console(highlight=False)


class Split(NamedTuple):
    """The rows of a split, and their ids; only processes of "home" have it."""

    rows: Examples | list[Question]
    ids: Rows | Spans


class RunResult(NamedTuple):
    """The result of a training run."""

    seconds: float
    kilobytes: float
    loss: float
    scores: dict[str, float]


def find_task(options: argparse.Namespace) -> Task:
    """The task of the command line."""
    return GLUE[options.task][0] if options.glue else TASKS[options.task]


def language_model(options: argparse.Namespace) -> tuple[Bert, text.Tokenizer]:
    """A BERT that both clusters have: from a folder, or pretrained on public text, identically in each process."""
    if options.bert:
        words = text.Tokenizer(text.read_vocabulary(options.bert))
        bert = load_bert(options.bert)
        check_cut(options, bert.sizes)
        return bert, words
    check_cut(options, SIZES)
    lines = generated_text(4000)
    words = text.Tokenizer(text.learn_vocabulary(lines, WORDS, fill=True))
    keras.utils.set_random_seed(1)
    bert = Bert(SIZES)
    encoder = Encoder(words, 20)
    rows = encoder.examples(Examples(lines, [0.0] * len(lines))).ids
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH, drop_remainder=True)
    console.print(f"a language model learns from {len(lines)} public sentences ...")
    losses = pretrain(
        bert, batches, Masking.of(words), steps=options.pretrain, learning_rate=2e-3, epochs=2, verbose=0
    ).history["loss"]
    console.print(f"{options.pretrain} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return bert, words


def read(options: argparse.Namespace, encoder: Encoder, split: str, count: int) -> Split:
    """Read the sentences and labels of a split; only "home" calls this."""
    rows: Any
    if options.squad:
        rows = read_squad(options.squad / f"{split}-v1.1.json")
    elif options.glue:
        matched = "_matched" if options.task == "mnli" and split == "dev" else ""
        rows = read_glue(options.glue, options.task, split + matched)
    else:
        rows = generated_task(options.task, split, count)
    if len(rows) < count:
        option = "--rows" if split == "train" else "--test"
        raise SystemExit(f"{option} {count}: the split {split} has {len(rows)} rows, so use {option} {len(rows)}")
    if isinstance(rows, Examples):
        second = None if rows.second is None else rows.second[:count]
        rows = Examples(rows.first[:count], rows.labels[:count], second)
    else:
        rows = rows[:count]
    ids: Any = encoder.examples(rows) if isinstance(rows, Examples) else encoder.questions(rows)
    longest = int((ids.ids != encoder.words.pad).sum(1).max())  # padding that all rows share is not sent
    shorter = {name: getattr(ids, name)[:, :longest] for name in ids._fields if name != "labels"}
    return Split(rows, ids._replace(**shorter))


def make_batches(ids: Any, count: int, epochs: int, task: Task, *, shuffle: bool) -> tf.data.Dataset:
    """Batches of ids, labels and row weights; only weights in processes without the sentences."""
    columns = [1] if task.spans else []  # an answer has two labels; its row's weight is broadcast to both
    order = np.concatenate(
        [np.random.default_rng(epoch).permutation(count) if shuffle else np.arange(count) for epoch in range(epochs)]
    )

    def batch(numbers: Any) -> Any:
        found = [None, None] if ids is None else [tf.gather(each, numbers) for each in (ids.ids, ids.labels)]
        return (*found, tf.ones([tf.shape(numbers)[0], *columns]))

    return tf.data.Dataset.from_tensor_slices(order).batch(BATCH, drop_remainder=shuffle).map(batch).prefetch(2)


def cut(bert: Bert, model: keras.Model, options: argparse.Namespace, codec: str) -> None:
    """Assign layers to clusters, and codecs to their boundaries: the only part that concerns clusters."""
    end, count = find_last_layer(options), len(options.middle)
    layers = [options.cut + (end - options.cut) * number // count for number in range(count + 1)]
    clusters = [HOME, *options.middle, nb.stage(cluster=HOME, name="head")]
    if options.labels == AWAY:
        layers, clusters = layers[:-1], clusters[:-1]
    places = low_rank_cut(bert, layers, clusters, after="head(/.*)?")
    if codec == "none":
        nb.place(model, places)
        return
    with nb.compress(rank=options.rank, basis="svd", **CODECS[codec]):
        nb.place(model, places)


def check_cut(options: argparse.Namespace, sizes: BertSizes) -> None:
    """Refuse a cut that is impossible for a BERT of these sizes."""
    options.sizes = sizes
    deepest = find_last_layer(options) - len(options.middle)
    if deepest < 0:
        raise SystemExit(f"--middle {' '.join(options.middle)}: too many for a BERT with {sizes.layers} layers")
    if not 0 <= options.cut <= deepest:
        raise SystemExit(f"--cut {options.cut}: this BERT can be cut after layer 0 to {deepest}")


def find_last_layer(options: argparse.Namespace) -> int:
    """The last layer of the last middle cluster, which also has the head if the head is not at home."""
    return int(options.sizes.layers) - (options.labels == HOME)


def train(
    options: argparse.Namespace, codec: str, splits: dict[str, Split], weights: list[np.ndarray]
) -> tuple[keras.Model, RunResult]:
    """Fine-tune from the same pretrained weights, and score."""
    task = find_task(options)
    bert = Bert(options.sizes)
    bert.set_weights(weights)
    keras.utils.set_random_seed(1)
    model = understanding(bert, task)
    cut(bert, model, options, codec)
    steps = options.epochs * (options.rows // BATCH)
    rate = keras.optimizers.schedules.PolynomialDecay(options.rate, steps, 0.0)
    model.compile(keras.optimizers.Adam(rate), loss_of(task))
    taken: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: taken.append(nb.last_report("train_step").step_seconds)
    )
    ids = splits["train"].ids if splits else None
    began = time.monotonic()
    history = model.fit(
        make_batches(ids, options.rows, options.epochs, task, shuffle=True),
        epochs=options.epochs,
        steps_per_epoch=options.rows // BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    ).history["loss"]
    report = nb.last_report("train_step")
    links = {**report.elsewhere.links, **report.links}
    crossed = sum(link.bytes for link in links.values()) / 1e3
    console.print(f"  {time.monotonic() - began:.0f} s, loss {history[0]:.3f} -> {history[-1]:.3f}")
    scores = score_model(model, options, splits)
    return model, RunResult(median(taken[1:] or taken), crossed, history[-1], scores)


def score_model(model: keras.Model, options: argparse.Namespace, splits: dict[str, Split]) -> dict[str, float]:
    """The scores on held-out rows; available at home, or where the head is."""
    task, split = find_task(options), splits.get("dev")
    ids = split.ids if split else None
    predicted = model.predict(make_batches(ids, options.test, 1, task, shuffle=False), verbose=0)
    if split is None:
        return {}
    if isinstance(split.ids, Spans) and isinstance(split.rows, list):
        found = read_spans(np.asarray(predicted), split.ids, split.rows)
        meant = [[answer for _, answer in each.answers] for each in split.rows]
        return {"exact match": exact_match(found, meant), "F1": span_f1(found, meant)}
    return score(task, np.asarray(predicted), split.ids.labels)


def make_table(runs: dict[str, RunResult], title: str) -> Table:
    """A row for each run, with its compression ratio relative to the first."""
    names = list(dict.fromkeys(name for run in runs.values() for name in run.scores))
    table = Table(title=title)
    for column in ("codec", "s per step", "kB per step", "compression", "loss", *names):
        table.add_column(column, justify="left" if column == "codec" else "right")
    first = next(iter(runs.values()))
    for name, run in runs.items():
        fewer = f"{first.kilobytes / run.kilobytes:.1f} x" if run.kilobytes else ""
        scores = [f"{100 * run.scores[each]:.1f}" if each in run.scores else "" for each in names]
        table.add_row(name, f"{run.seconds:.3f}", f"{run.kilobytes:.1f}", fewer, f"{run.loss:.3f}", *scores)
    return table


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    generated = ", ".join(TASKS)
    add("--task", default="opinion", help=f"task: {generated}; with --glue: {', '.join(GLUE)} (%(default)s)")
    add("--glue", type=Path, metavar="FOLDER", help="folder of GLUE's files; by default tasks are generated")
    add("--squad", type=Path, metavar="FOLDER", help="folder of SQuAD's files; the task is answer")
    add("--bert", type=Path, metavar="FOLDER", help="a Hugging Face BERT; by default a small one is pretrained")
    add("--cut", type=int, default=1, metavar="LAYER", help="last layer at home, counted from 0 (%(default)s)")
    add("--rank", type=int, default=8, help="numbers that are sent for each token (%(default)s)")
    add("--middle", nargs="+", default=[AWAY], metavar="CLUSTER", help="clusters with the layers between (away)")
    add("--labels", choices=(HOME, AWAY), default=HOME, help="cluster with the labels and the head (%(default)s)")
    add("--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="training runs (all)")
    add("--line", help="link to emulate between the clusters of one process (60mbit,10ms)")
    add("--rows", type=int, default=2048, help="training rows (%(default)s)")
    add("--test", type=int, default=512, help="test rows (%(default)s)")
    add("--epochs", type=int, default=6, help="epochs of fine-tuning (%(default)s)")
    add("--rate", type=float, default=1e-3, help="initial learning rate (%(default)s)")
    add("--pretrain", type=int, default=600, metavar="STEPS", help="for the language model (%(default)s)")
    options = parser.parse_args()
    if options.squad:
        if options.glue or options.task not in (parser.get_default("task"), "answer"):
            parser.error("--squad FOLDER excludes --glue and other tasks than answer")
        options.task = "answer"
    known = GLUE if options.glue else TASKS
    if options.task not in known:
        parser.error(f"--task {options.task}: {'with' if options.glue else 'without'} --glue use {', '.join(known)}")
    if (options.glue or options.squad) and not options.bert:
        parser.error(
            f"{'--glue' if options.glue else '--squad'} requires --bert FOLDER: a vocabulary of your text would reveal "
            "parts of it to the other cluster"
        )
    if options.labels == AWAY and attach() is not None:
        parser.error(
            "--labels away is only for one process; between processes examples/understand.yaml keeps labels at home"
        )
    if min(options.rows, options.test) < BATCH or options.epochs < 1 or options.rank < 1 or options.pretrain < 2:
        parser.error(f"--rows and --test must be at least {BATCH} (one batch), --pretrain 2, --epochs and --rank 1")
    if not 0 < options.rate < float("inf"):
        parser.error(f"--rate {options.rate}: must be a positive number")
    if HOME in options.middle or len(set(options.middle)) < len(options.middle):
        parser.error(f"--middle {' '.join(options.middle)}: must be distinct clusters other than {HOME}")
    if options.line and attach() is not None:
        parser.error("--line is only for one process; between processes the link is real")
    options.line = options.line or "60mbit,10ms"
    return options


def main() -> None:
    """Prepare a language model; then fine-tune and score once for each codec."""
    options = parse_options()
    alone = attach() is None  # between processes the launcher has the config, and the link is real
    bert, words = language_model(options)
    weights = bert.get_weights()
    clusters: Any = {name: {} for name in (HOME, *options.middle)}
    nb.init({"clusters": clusters} if alone else None, links=options.line if alone else None)
    splits: dict[str, Split] = {}
    if nb.here().runs(HOME):
        encoder = Encoder(words, options.sizes.length)
        splits = {name: read(options, encoder, name, n) for name, n in (("train", options.rows), ("dev", options.test))}
    runs = {}
    for codec in options.codecs:
        console.rule(f"{options.task}, codec {codec}")
        _, runs[codec] = train(options, codec, splits, weights)
    if nb.here().runs(HOME):
        link = f"an emulated link of {options.line}" if alone else "the link between the processes"
        console.print(make_table(runs, f"{options.task}, rank {options.rank} of {options.sizes.width}, over {link}"))


if __name__ == "__main__":
    try:
        main()
    except nb.errors.NebulaError as error:  # for example a missing file: what, why and the fix
        raise SystemExit(f"{error}") from error
