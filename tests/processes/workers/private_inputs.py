"""Worker: reads its own inputs, and searches every frame that it passes to gRPC for them.

`train_translator`: two clusters train a model, each on its side of the text, without a codec and with one, evaluate
it, and translate. At the end each sends ids of its own side on purpose, to check that the search finds them.

`train_classifier`: the cluster `source` has sentences and labels, and a model whose middle layers are in `target`,
which has neither.

The frames do not depend on the layers of a cluster, so each has a model that is traced fast; with `large` they are a
translator and a BERT.

`train_on_private_inputs`: both workers of cluster `a` read x, `b` and `c` read z, and `c` alone reads y. They train on
arrays, and on datasets of which `a` reads the rows of its micro-batches. Then the first worker fails with an error
whose text is a row.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.frame_search import Checksums, Frame, TextPatterns, record_frames
from tests.processes.worker_reports import report_value
from tests.processes.worker_runs import run_selected
from whale_nebula.errors import CollectiveReadError, NebulaError
from whale_nebula.models import Bert, BertSizes, CausalABNet, SmoothedCrossentropy, text
from whale_nebula.models.decoding import Beam, Found, translation
from whale_nebula.models.understanding import Task, loss_of, understanding
from whale_nebula.runtime.run import current_run
from whale_nebula.strategies import low_rank_cut

PAIRS, BATCH, LONGEST = 32, 8, 16
FIRST, VOCABULARY = 1000, 1536  # ids of words are larger than any number of a frame's header
RESERVED = (*text.SPECIAL, *(f"[reserved{number}]" for number in range(FIRST - len(text.SPECIAL))))
SIDES = ("source", "target")
SIZES = BertSizes(vocabulary=VOCABULARY, length=LONGEST + 1, width=8, heads=2, layers=1, inner=16, dropout=0.0)
STEPS = PAIRS // BATCH
FORM = {"shape": [None, None], "dtype": "int32"}
CONFIG = {
    "inputs": dict.fromkeys(("x/source", "x/target", "y", "source", "target"), FORM),
    "results": "owner",
    "weights": "own",
}


recorded_frames: list[bytes] = []
"""The frames sent since the last call of `take_frames`."""


def wait_for_all() -> None:
    """Meet all others twice: at the second time, each has received all earlier frames."""
    for number in range(2):
        current_run().ledger.session.meet(f"look {number}")


def take_frames() -> list[bytes]:
    """Remove and return the recorded frames; others may be added meanwhile."""
    count = len(recorded_frames)
    frames = [frame for frame in recorded_frames[:count] if frame]
    del recorded_frames[:count]
    return frames


def report_frames(part: str, text_patterns: TextPatterns) -> None:
    """Report the frames sent since the last report, and text found in them."""
    frames = take_frames()
    read = [Frame.read(frame) for frame in frames]
    found = [hit for frame in frames for hit in text_patterns.find_in(frame)]
    steps = [each.message for each in read if each.message.get("about") == "STEP"]
    kinds = Counter(each.description for each in read)
    bundles = [each for each in read if each.description == "SCALAR uint8"]  # several numbers, as bytes
    whole = [each for each in read if "int" in each.dtype and not each.message]
    integers = [list(each.dims) for each in whole if each not in bundles]
    report_value(part, {"found": found[:5], "frames": len(frames), "bytes": sum(map(len, frames)), "kinds": kinds,
                "integers": integers, "bundled": [each.dims[0] for each in bundles],
                "checksums": [sorted(each["inputs"]) for each in steps]})  # fmt: skip


def compress_second_epoch() -> Any:
    """A scope with a codec from the second epoch on."""
    return nb.compress(int4=True, backward="int4", mask=True, start_step=STEPS)


def build_two_sides() -> keras.Model:
    """A model that adds the mean of the source's words to those of the target."""
    source, target = (keras.Input((None,), dtype="int32", name=side) for side in SIDES)
    with nb.cluster(), nb.pipeline(micro_batch=2), compress_second_epoch():
        with nb.stage(cluster="source"):
            hidden = keras.layers.Dense(8)(keras.layers.Embedding(VOCABULARY, 8, mask_zero=True)(source))
        with nb.stage(cluster="target"):
            mean = keras.layers.GlobalAveragePooling1D(keepdims=True)(hidden)
            scores = keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(VOCABULARY, 8)(target) + mean)
    model = keras.Model({"source": source, "target": target}, scores)
    model.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy())
    return model


def build_translator() -> CausalABNet:
    """A small translator, each side in its cluster."""
    with nb.cluster(), nb.pipeline(micro_batch=2), compress_second_epoch():
        source, target = (Bert(SIZES, name=side) for side in SIDES)
        model = CausalABNet(source, target, inner=4, around=lambda side: nb.stage(cluster=side))
    model.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy())  # Adam takes five more seconds to trace
    return model


@nb.function
def send_ids_to_target(source: Any, rows: Any) -> Any:
    """Ids of the source cross as they are."""
    with nb.cluster():
        with nb.stage(cluster="source"):
            ids = source + 0
        with nb.stage(cluster="target"):
            return {"sum": tf.reduce_sum(tf.cast(ids, tf.float32))}


@nb.function
def send_ids_to_source(target: Any, rows: Any) -> Any:
    """Ids of the target cross as they are."""
    with nb.cluster():
        with nb.stage(cluster="target"):
            ids = target + 0
        with nb.stage(cluster="source"):
            return {"sum": tf.reduce_sum(tf.cast(ids, tf.float32))}


def read_best_ids(found: Found) -> list[list[int]]:
    """The ids of the best translations, in the cluster that may read them."""
    try:
        return np.asarray(found.best).tolist()
    except CollectiveReadError as refused:
        report_value("refused", refused.what)
        return []


def train_translator(large: str = "") -> None:
    """Train, evaluate and translate with private texts, and leak ids at the end."""
    nb.init(CONFIG)
    side = nb.here().cluster
    pairs = text.generated("train", PAIRS, sides=[side])
    words = text.Tokenizer(text.learn_vocabulary(pairs.of(side), VOCABULARY, reserved=RESERVED, fill=True))
    encoded = text.encode_pairs(pairs, **{side: words}, longest=LONGEST)
    order = text.make_order(PAIRS, batch=BATCH)
    batches = text.batches(encoded, order, multiple=LONGEST)
    ids = getattr(encoded, side)
    rows = [ids.row(number).tolist() for number in range(PAIRS)]
    text_patterns = TextPatterns.of(pairs.of(side), rows, FIRST)
    report_value("looked for", [len(text_patterns.patterns), len(text_patterns.words)])

    model = build_translator() if large else build_two_sides()
    for part in ("plain", "int4"):
        losses = model.fit(batches, shuffle=False, verbose=0).history["loss"]
        report_value(f"{part} loss", [float(loss).hex() for loss in losses])
        wait_for_all()
        report_frames(f"fit {part}", text_patterns)
    model.evaluate(batches, verbose=0)
    wait_for_all()
    report_frames("evaluate", text_patterns)

    inputs, _ = next(iter(batches))
    never = (id for id in range(FIRST) if id != words.end)
    translate = translation(
        model if large else build_translator(), Beam(words.start, words.end, LONGEST, width=2, never=tuple(never))
    )
    best = read_best_ids(translate(inputs["source"], np.arange(BATCH)))
    report_value("translated", len(best))
    wait_for_all()
    more = [*pairs.of(side), *(words.sentences(best) if best else [])]
    report_frames("translate", TextPatterns.of(more, [*rows, *best], FIRST))

    here = inputs[side]
    for send_labels, mine in ((send_ids_to_target, "source"), (send_ids_to_source, "target")):
        report_value(f"leaked from {mine}", float(send_labels(here if side == mine else None, np.arange(BATCH))["sum"]))
    wait_for_all()
    report_frames("leak", text_patterns)
    report_value("sum", float(here.numpy().sum()))
    nb.shutdown()
    report_frames("farewell", text_patterns)


# ---------------------------------------------------------------------- middle layers in another cluster
CLASSES = VOCABULARY  # labels are as large as ids, to be distinguishable from other numbers
CLASSIFIER_CONFIG = {
    "inputs": {"x": FORM, "y": {"shape": [None], "dtype": "int32"}},
    "results": "owner",
    "weights": "own",
}


def build_classifier() -> keras.Model:
    """A classifier whose middle layer is in `target`, with singular vectors at the boundary to it."""
    ids = keras.Input((LONGEST,), dtype="int32")
    home, away = SIDES
    with nb.cluster(), nb.pipeline(micro_batch=2), nb.compress(rank=4, basis="svd", backward=None):
        with nb.stage(cluster=home):
            hidden = keras.layers.Dense(8)(keras.layers.Embedding(VOCABULARY, 8, mask_zero=True)(ids))
        with nb.stage(cluster=away):
            mean = keras.layers.Dense(8)(keras.layers.GlobalAveragePooling1D()(hidden))
        with nb.stage(cluster=home, name="head"):
            scores = keras.layers.Dense(CLASSES)(mean)
    made = keras.Model(ids, scores)
    made.compile(keras.optimizers.SGD(0.1), loss_of(Task("labels", classes=CLASSES)))
    return made


def build_bert_classifier() -> keras.Model:
    """A classifier whose first layers, head and loss are in `source`, and what is between them in `target`."""
    sizes = BertSizes(vocabulary=VOCABULARY, length=LONGEST, width=8, heads=2, layers=3, inner=16, dropout=0.0)
    bert = Bert(sizes)
    made = understanding(bert, Task("labels", classes=CLASSES))
    home, away = SIDES
    with nb.pipeline(micro_batch=2), nb.compress(rank=4, basis="svd", backward=None):
        clusters = [home, away, nb.stage(cluster=home, name="head")]
        nb.place(made, low_rank_cut(bert, [0, 2], clusters, after="head(/.*)?"))
    made.compile(keras.optimizers.SGD(0.1), loss_of(Task("labels", classes=CLASSES)))
    return made


def train_classifier(large: str = "") -> None:
    """Train with private sentences and labels in the cluster where the model begins and ends."""
    nb.init(CLASSIFIER_CONFIG)
    home = nb.here().runs("source")
    draw = np.random.default_rng(0)
    ids = draw.integers(FIRST, VOCABULARY, (PAIRS, LONGEST)).astype("int32")
    meant = draw.integers(FIRST, CLASSES, PAIRS).astype("int32")
    rows = [*ids.tolist(), *(meant[at : at + BATCH].tolist() for at in range(0, PAIRS, BATCH))]
    numbers = tf.data.Dataset.range(0, PAIRS, BATCH)

    def batch(start: Any) -> Any:
        """Sentences, labels, and the weight of each row, which both have, because a dataset must not be empty."""
        found = [tf.constant(each)[start : start + BATCH] if home else None for each in (ids, meant)]
        return (*found, tf.ones(BATCH))

    model = build_bert_classifier() if large else build_classifier()
    history = model.fit(numbers.map(batch), epochs=2, shuffle=False, verbose=0).history
    report_value("loss", [float(loss).hex() for loss in history["loss"]])
    wait_for_all()
    report_frames("fit", TextPatterns.of([], rows, FIRST))

    @nb.function
    def send_labels(x: Any, y: Any, rows: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="source"):
                crossing = y + 0
            with nb.stage(cluster="target"):
                return {"sum": tf.reduce_sum(tf.cast(crossing, tf.float32))}

    send_labels(*batch(0))
    wait_for_all()
    report_frames("leak", TextPatterns.of([], rows, FIRST))


# ---------------------------------------------------------------------- inputs of three clusters
INPUTS = {"x/x": {"shape": [None, 3], "dtype": "int32"}, "x/z": {"shape": [None, 2]}, "y": {"shape": [None, 1]}}
INPUT_ROWS, INPUT_BATCH = 8, 4
DEADLINE = 30.0
ROW = "paciente 4711: positivo"
NAME = "host-of-the-hospital"
LOCAL_NAMES = (NAME, str(Path(__file__).parent), os.getcwd(), ROW)


def build_three_stages() -> keras.Model:
    """Three stages, the first of them by two replicas."""
    x, z = keras.Input((3,), dtype="int32", name="x"), keras.Input((2,), name="z")
    with nb.cluster(), nb.pipeline(micro_batch=2):
        with nb.replica(2), nb.stage(cluster="a"):
            hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(x))
        with nb.stage(cluster="b"):
            hidden = keras.layers.Dense(3)(keras.layers.Concatenate()([hidden, z]))
        with nb.stage(cluster="c"):
            out = keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, z]))
    made = keras.Model({"x": x, "z": z}, out, name="kept")
    made.compile("sgd", "mse")
    return made


def make_dataset(arrays: dict[str, Any]) -> Any:
    """A dataset of this cluster's rows, of which each process reads its own."""
    rows = {name: array for name, array in arrays.items() if array is not None}

    def row(number: Any) -> Any:
        found = {name: tf.gather(array, number) for name, array in rows.items()}
        return {"x": found.get("x"), "z": found.get("z")}, found.get("y")

    return nb.shard(tf.data.Dataset.range(INPUT_ROWS).map(row).batch(INPUT_BATCH))


def train_on_private_inputs() -> None:
    """Train three clusters with private inputs, then fail in the first worker."""
    socket.gethostname = lambda: NAME
    nb.init({"inputs": INPUTS, "results": "owner"})
    here = nb.here()
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x": draw.integers(0, 50, (INPUT_ROWS, 3)).astype("int32"),
        "z": draw.normal(size=(INPUT_ROWS, 2)).astype("float32"),
        "y": draw.normal(size=(INPUT_ROWS, 1)).astype("float32"),
    }
    checksums = Checksums.of(arrays)

    def report_checksums(part: str) -> None:
        """Report checksums of inputs by receiver, and names of this host, in the frames since the last report."""
        frames = take_frames()
        sent = {(name, Frame.read(frame).destination) for frame in frames for name in checksums.find_in(frame)}
        named = sorted({each for each in LOCAL_NAMES if any(each.encode() in frame for frame in frames)})
        report_value(f"{here.worker} {part}", {"sums": sorted(sent), "named": named, "frames": len(frames)})

    read = {"a": "x", "b": "z", "c": "zy"}[here.cluster]
    own = {name: array if name in read else None for name, array in arrays.items()}
    kept = build_three_stages()
    kept.fit({"x": own["x"], "z": own["z"]}, own["y"], batch_size=INPUT_BATCH, epochs=2, shuffle=False, verbose=0)
    wait_for_all()
    report_checksums("arrays")
    kept.fit(make_dataset(own), epochs=1, verbose=0)
    wait_for_all()
    report_checksums("dataset")
    session = current_run().ledger.session
    if here.worker == "a/0":
        for link in session.links.values():  # the others have reported by then: a failure overtakes other frames
            link.take("SESSION", DEADLINE)
        try:
            raise ValueError(f"cannot tokenize {ROW!r}")
        except ValueError as failure:
            session.fail(failure)
        limit = time.monotonic() + DEADLINE
        while time.monotonic() < limit and sum(b'"FAIL"' in frame for frame in recorded_frames) < len(session.links):
            time.sleep(0.01)  # other threads send them
    else:
        try:
            session.meet("the end")
        except NebulaError as failed:
            report_value(f"{here.worker} heard", str(failed))
    report_checksums("failure")


if __name__ == "__main__":
    recorded_frames = record_frames()
    run_selected((train_translator, train_classifier, train_on_private_inputs))
