"""Worker: reads what is its own, and looks at every frame that it hands to gRPC for what it has read.

`private`: two clusters train a model, each on its side of the text, without a codec and with one, evaluate it, and
translate. At the end each sends ids of its own side on purpose: what was looked for all the time is then found.

`labels`: the cluster `source` has sentences and labels, and a model whose middle lies in `target`, which has neither.

What crosses does not depend on the layers of a cluster: each has a model that is traced soon; with `large` they are a
translator and a BERT.

`keeping`: both workers of cluster `a` read x, `b` and `c` read z, and `c` alone reads y. They train on arrays, and on
datasets of which `a` reads the rows of its micro-batches. Then the first worker fails by an error whose text is a row.
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
from tests.processes.frame_search import Checksums, Frame, Look, watched
from tests.processes.worker_reports import tell
from tests.processes.worker_runs import act
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


taken: list[bytes] = []
"""What has been sent since the last look."""


def met() -> None:
    """Wait for all others twice: each comes the second time once it has all that was sent before."""
    for number in range(2):
        current_run().ledger.session.meet(f"look {number}")


def frames_since() -> list[bytes]:
    """What was sent since the last look; more may come meanwhile."""
    count = len(taken)
    frames = [frame for frame in taken[:count] if frame]
    del taken[:count]
    return frames


def looked(part: str, look: Look) -> None:
    """Tell what was sent since the last look, and what of the text is in it."""
    frames = frames_since()
    read = [Frame.read(frame) for frame in frames]
    found = [hit for frame in frames for hit in look.finds(frame)]
    steps = [each.message for each in read if each.message.get("about") == "STEP"]
    kinds = Counter(each.said for each in read)
    bundles = [each for each in read if each.said == "SCALAR uint8"]  # several numbers, as bytes
    whole = [each for each in read if "int" in each.dtype and not each.message]
    integers = [list(each.dims) for each in whole if each not in bundles]
    tell(part, {"found": found[:5], "frames": len(frames), "bytes": sum(map(len, frames)), "kinds": kinds,
                "integers": integers, "bundled": [each.dims[0] for each in bundles],
                "checksums": [sorted(each["inputs"]) for each in steps]})  # fmt: skip


def codec() -> Any:
    """It begins with the second epoch."""
    return nb.compress(int4=True, backward="int4", mask=True, start_step=STEPS)


def two_sides() -> keras.Model:
    """The mean of the source's words is added to those of the target."""
    source, target = (keras.Input((None,), dtype="int32", name=side) for side in SIDES)
    with nb.cluster(), nb.pipeline(micro_batch=2), codec():
        with nb.stage(cluster="source"):
            hidden = keras.layers.Dense(8)(keras.layers.Embedding(VOCABULARY, 8, mask_zero=True)(source))
        with nb.stage(cluster="target"):
            mean = keras.layers.GlobalAveragePooling1D(keepdims=True)(hidden)
            scores = keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(VOCABULARY, 8)(target) + mean)
    model = keras.Model({"source": source, "target": target}, scores)
    model.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy())
    return model


def translator() -> CausalABNet:
    """A small one, each side in its cluster."""
    with nb.cluster(), nb.pipeline(micro_batch=2), codec():
        source, target = (Bert(SIZES, name=side) for side in SIDES)
        model = CausalABNet(source, target, inner=4, around=lambda side: nb.stage(cluster=side))
    model.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy())  # Adam takes five more seconds to trace
    return model


@nb.function
def leaking_to_target(source: Any, rows: Any) -> Any:
    """Ids of the source cross as they are."""
    with nb.cluster():
        with nb.stage(cluster="source"):
            ids = source + 0
        with nb.stage(cluster="target"):
            return {"sum": tf.reduce_sum(tf.cast(ids, tf.float32))}


@nb.function
def leaking_to_source(target: Any, rows: Any) -> Any:
    """Ids of the target cross as they are."""
    with nb.cluster():
        with nb.stage(cluster="target"):
            ids = target + 0
        with nb.stage(cluster="source"):
            return {"sum": tf.reduce_sum(tf.cast(ids, tf.float32))}


def written(found: Found) -> list[list[int]]:
    """The ids of the best translations, in the cluster that may read them."""
    try:
        return np.asarray(found.best).tolist()
    except CollectiveReadError as refused:
        tell("refused", refused.what)
        return []


def private(large: str = "") -> None:
    """Models whose texts stay at home."""
    nb.init(CONFIG)
    side = nb.here().cluster
    pairs = text.generated("train", PAIRS, sides=[side])
    words = text.Tokenizer(text.learn_vocabulary(pairs.of(side), VOCABULARY, reserved=RESERVED, fill=True))
    encoded = text.encode_pairs(pairs, **{side: words}, longest=LONGEST)
    order = text.make_order(PAIRS, batch=BATCH)
    batches = text.batches(encoded, order, multiple=LONGEST)
    ids = getattr(encoded, side)
    rows = [ids.row(number).tolist() for number in range(PAIRS)]
    look = Look.of(pairs.of(side), rows, FIRST)
    tell("looked for", [len(look.patterns), len(look.words)])

    model = translator() if large else two_sides()
    for part in ("plain", "int4"):
        losses = model.fit(batches, shuffle=False, verbose=0).history["loss"]
        tell(f"{part} loss", [float(loss).hex() for loss in losses])
        met()
        looked(f"fit {part}", look)
    model.evaluate(batches, verbose=0)
    met()
    looked("evaluate", look)

    inputs, _ = next(iter(batches))
    never = (id for id in range(FIRST) if id != words.end)
    translate = translation(
        model if large else translator(), Beam(words.start, words.end, LONGEST, width=2, never=tuple(never))
    )
    best = written(translate(inputs["source"], np.arange(BATCH)))
    tell("translated", len(best))
    met()
    more = [*pairs.of(side), *(words.sentences(best) if best else [])]
    looked("translate", Look.of(more, [*rows, *best], FIRST))

    here = inputs[side]
    for leaking, mine in ((leaking_to_target, "source"), (leaking_to_source, "target")):
        tell(f"leaked from {mine}", float(leaking(here if side == mine else None, np.arange(BATCH))["sum"]))
    met()
    looked("leak", look)
    tell("sum", float(here.numpy().sum()))
    nb.shutdown()
    looked("farewell", look)


# ---------------------------------------------------------------------- a model whose middle is elsewhere
CLASSES = VOCABULARY  # labels are as large as ids, or no look could tell them from other numbers
AT_HOME = {"inputs": {"x": FORM, "y": {"shape": [None], "dtype": "int32"}}, "results": "owner", "weights": "own"}


def middle_elsewhere() -> keras.Model:
    """Layers, and singular vectors of the boundary to the middle one."""
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


def middle_of_bert() -> keras.Model:
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


def labels(large: str = "") -> None:
    """Sentences and labels stay at home, where the model begins and ends."""
    nb.init(AT_HOME)
    home = nb.here().runs("source")
    draw = np.random.default_rng(0)
    ids = draw.integers(FIRST, VOCABULARY, (PAIRS, LONGEST)).astype("int32")
    meant = draw.integers(FIRST, CLASSES, PAIRS).astype("int32")
    rows = [*ids.tolist(), *(meant[at : at + BATCH].tolist() for at in range(0, PAIRS, BATCH))]
    numbers = tf.data.Dataset.range(0, PAIRS, BATCH)

    def batch(start: Any) -> Any:
        """Sentences, labels, and of each row its weight, which both know: a dataset needs something to hold."""
        found = [tf.constant(each)[start : start + BATCH] if home else None for each in (ids, meant)]
        return (*found, tf.ones(BATCH))

    model = middle_of_bert() if large else middle_elsewhere()
    history = model.fit(numbers.map(batch), epochs=2, shuffle=False, verbose=0).history
    tell("loss", [float(loss).hex() for loss in history["loss"]])
    met()
    looked("fit", Look.of([], rows, FIRST))

    @nb.function
    def leaking(x: Any, y: Any, rows: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="source"):
                crossing = y + 0
            with nb.stage(cluster="target"):
                return {"sum": tf.reduce_sum(tf.cast(crossing, tf.float32))}

    leaking(*batch(0))
    met()
    looked("leak", Look.of([], rows, FIRST))


# ---------------------------------------------------------------------- inputs of three clusters
KEPT = {"x/x": {"shape": [None, 3], "dtype": "int32"}, "x/z": {"shape": [None, 2]}, "y": {"shape": [None, 1]}}
KEPT_ROWS, KEPT_BATCH = 8, 4
DEADLINE = 30.0
ROW = "paciente 4711: positivo"
NAME = "host-of-the-hospital"
HERE = (NAME, str(Path(__file__).parent), os.getcwd(), ROW)


def three_stages() -> keras.Model:
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


def dataset(arrays: dict[str, Any]) -> Any:
    """The rows of this cluster, of which each process reads its own."""
    rows = {name: array for name, array in arrays.items() if array is not None}

    def row(number: Any) -> Any:
        found = {name: tf.gather(array, number) for name, array in rows.items()}
        return {"x": found.get("x"), "z": found.get("z")}, found.get("y")

    return nb.shard(tf.data.Dataset.range(KEPT_ROWS).map(row).batch(KEPT_BATCH))


def keeping() -> None:
    """Three clusters that keep their inputs at home."""
    socket.gethostname = lambda: NAME
    nb.init({"inputs": KEPT, "results": "owner"})
    here = nb.here()
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x": draw.integers(0, 50, (KEPT_ROWS, 3)).astype("int32"),
        "z": draw.normal(size=(KEPT_ROWS, 2)).astype("float32"),
        "y": draw.normal(size=(KEPT_ROWS, 1)).astype("float32"),
    }
    checksums = Checksums.of(arrays)

    def tell_sums(part: str) -> None:
        """Tell of which inputs a checksum went to which worker since the last look, and what of this host."""
        frames = frames_since()
        sent = {(name, Frame.read(frame).reader) for frame in frames for name in checksums.finds(frame)}
        named = sorted({each for each in HERE if any(each.encode() in frame for frame in frames)})
        tell(f"{here.worker} {part}", {"sums": sorted(sent), "named": named, "frames": len(frames)})

    read = {"a": "x", "b": "z", "c": "zy"}[here.cluster]
    own = {name: array if name in read else None for name, array in arrays.items()}
    kept = three_stages()
    kept.fit({"x": own["x"], "z": own["z"]}, own["y"], batch_size=KEPT_BATCH, epochs=2, shuffle=False, verbose=0)
    met()
    tell_sums("arrays")
    kept.fit(dataset(own), epochs=1, verbose=0)
    met()
    tell_sums("dataset")
    session = current_run().ledger.session
    if here.worker == "a/0":
        for link in session.links.values():  # the others have told by then: a failure overtakes all else
            link.take("SESSION", DEADLINE)
        try:
            raise ValueError(f"cannot tokenize {ROW!r}")
        except ValueError as failure:
            session.fail(failure)
        limit = time.monotonic() + DEADLINE
        while time.monotonic() < limit and sum(b'"FAIL"' in frame for frame in taken) < len(session.links):
            time.sleep(0.01)  # they leave by threads of their own
    else:
        try:
            session.meet("the end")
        except NebulaError as failed:
            tell(f"{here.worker} heard", str(failed))
    tell_sums("failure")


if __name__ == "__main__":
    taken = watched()
    act((private, labels, keeping))
