"""A worker that reads its own side of a text, and looks at every frame that it hands to gRPC for what it has read.

Both train a translator, without a codec and with one, evaluate it, and translate. At the end each sends ids of its own
side on purpose: what was looked for all the time is then found, over the same line.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.looking import Frame, Look, watched
from tests.processes.telling import tell
from whale_nebula.errors import CollectiveReadError
from whale_nebula.models import Bert, BertSizes, CausalABNet, SmoothedCrossentropy, text
from whale_nebula.models.decoding import Beam, Found, translation
from whale_nebula.runtime.run import current_run

PAIRS, BATCH, LONGEST = 32, 8, 16
FIRST, VOCABULARY = 1000, 1536  # ids of words are larger than any number of a frame's header
RESERVED = (*text.SPECIAL, *(f"[reserved{number}]" for number in range(FIRST - len(text.SPECIAL))))
SIDES = ("source", "target")
SIZES = BertSizes(vocabulary=VOCABULARY, length=LONGEST + 1, width=8, heads=2, layers=1, inner=16, dropout=0.0)
STEPS = PAIRS // BATCH


def met() -> None:
    """Wait for the other process twice: it comes the second time once it has heard of our first, and has all before."""
    for time in range(2):
        current_run().ledger.session.meet(f"look {time}")


def looked(part: str, look: Look) -> None:
    """Tell what was sent since the last look, and what of the text is in it."""
    count = len(taken)  # more may come meanwhile
    frames = [frame for frame in taken[:count] if frame]
    del taken[:count]
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


def translator() -> CausalABNet:
    """A small one, each side in its cluster; its codec begins with the second epoch."""
    codec = nb.compress(int4=True, backward="int4", mask=True, start_step=STEPS)
    with nb.cluster(), nb.pipeline(micro_batch=2), codec:
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


tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # dear, and these graphs run a few times
taken = watched()
nb.init()
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

model = translator()
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
translate = translation(model, Beam(words.start, words.end, LONGEST, width=2, never=tuple(never)))
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
