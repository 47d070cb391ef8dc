"""One fine-tuning of a small BERT that is cut in two: its score, and the bytes that crossed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import keras
import numpy as np

import whale_nebula as nb
from whale_nebula.models import Bert, BertSizes, text
from whale_nebula.models.masking import Masking, pretrain
from whale_nebula.models.understanding import (
    TASKS,
    Encoder,
    Examples,
    Rows,
    generated_task,
    generated_text,
    loss_of,
    score,
    understanding,
)
from whale_nebula.strategies import low_rank_cut

WIDTH, LAYERS, BATCH, LONGEST, WORDS = 96, 4, 32, 28, 160
SIZES = BertSizes(vocabulary=WORDS, length=LONGEST, width=WIDTH, heads=4, layers=LAYERS, inner=192, dropout=0.0)
ROWS, TESTED, EPOCHS, RATE, PRETRAINED = 2048, 1024, 8, 1e-3, 800
NEAR, FAR = "near", "far"


class Setup(NamedTuple):
    """The sizes of a BERT, the steps and the learning rate of its pretraining; the learning rate, the rows and the
    epochs of its fine-tuning, and the mean loss of an epoch below which it ends.
    """

    sizes: BertSizes = SIZES
    pretrained: int = PRETRAINED
    pretraining_rate: float = 2e-3
    rate: float = RATE
    rows: int = ROWS
    epochs: int = EPOCHS
    enough: float = 0.0


SMALL = Setup()
QUICK = Setup(pretrained=8, rows=64, epochs=1)


def compress(contender: str, rank: int) -> Any:
    """The options of the boundary."""
    svd = {"rank": rank, "basis": "svd"}
    equal = round(32 * rank / WIDTH, 2)  # bits a number for the same bytes as float32 at this rank
    options: dict[str, dict[str, Any]] = {
        "svd": svd,
        "removed": svd,
        "svd int8": {**svd, "int8": True, "backward": "int8"},
        "svd int4": {**svd, "int4": True, "backward": "int4"},
        "learned": {"rank": rank, "basis": "learned"},
        "shared": {"rank": rank},
        "axes": {"codec": f"axes >> coded({equal})", "backward": f"axes >> coded({equal})"},
    }
    found = options.get(contender)
    return contextlib.nullcontext() if found is None else nb.compress(**{"backward": None, **found})


def language_model(folder: Path, setup: Setup = SMALL) -> tuple[list[np.ndarray], text.Tokenizer]:
    """The weights of a pretrained BERT, from a file if it exists."""
    lines = generated_text(8000)
    words = text.Tokenizer(text.learn_vocabulary(lines, WORDS, fill=True))
    width = "" if setup == SMALL else f"_{setup.sizes.width}"
    path = folder / f"understand_{setup.pretrained}{width}.npz"
    if path.exists():
        with np.load(path) as file:
            return [file[name] for name in file.files], words
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    bert = Bert(setup.sizes)
    ids = Encoder(words, setup.sizes.length).examples(Examples(lines, [0.0] * len(lines))).ids
    rows = tf.data.Dataset.from_tensor_slices(ids).shuffle(8000, seed=1).batch(BATCH, drop_remainder=True)
    losses = pretrain(
        bert,
        rows,
        Masking.of(words),
        steps=setup.pretrained,
        learning_rate=setup.pretraining_rate,
        verbose=0,
        epochs=4,
    )
    print("pretrained:", [round(loss, 3) for loss in losses.history["loss"]], flush=True)
    folder.mkdir(exist_ok=True)
    np.savez(path, *bert.get_weights())
    return bert.get_weights(), words


def make_rows(task: str, split: str, count: int, words: text.Tokenizer, longest: int = LONGEST) -> Rows:
    """Encode a split as ids."""
    made = generated_task(task, split, count)
    if not isinstance(made, Examples):
        raise SystemExit(f"{task} is not a task of labels")
    return Encoder(words, longest).examples(made)


def cut_model(bert: Bert, task: str, contender: str, layer: int, rank: int) -> keras.Model:
    """The model of a contender, cut after a layer's feed-forward part."""
    if contender == "lora":
        return lora(bert, task, layer, rank)
    model = understanding(bert, TASKS[task])
    if contender == "uncut":
        return model
    if contender == "removed":
        inner = bert.sub_layers[layer].inner
        inner.add = lambda hidden, computed, training: inner.norm(inner.drop(computed, training=training))
    with compress(contender, rank):
        nb.place(model, low_rank_cut(bert, layer, [NEAR, FAR], after="head(/.*)?"))
    return model


def lora(bert: Bert, task: str, layer: int, rank: int) -> keras.Model:
    """Cut in a low-rank bypass of the layer's last product: the frozen product and the residual stay local."""
    model = understanding(bert, TASKS[task])
    inner = bert.sub_layers[layer].inner
    drawn = keras.initializers.RandomNormal(stddev=1 / np.sqrt(192))
    with nb.cluster():
        with nb.stage(cluster=NEAR):
            tokens = keras.Input((None,), dtype="int32")
            visible, hidden = bert.visible(tokens), bert.embedding(tokens)
            for number, (attention, feed) in enumerate(bert.sub_layers[: layer + 1]):
                hidden = attention(hidden, visible)
                hidden = feed(hidden) if number < layer else hidden
            down = keras.layers.Dense(rank, use_bias=False, kernel_initializer=drawn)(inner.wide(hidden))
        with nb.stage(cluster=FAR):
            up = keras.layers.Dense(WIDTH, kernel_initializer="zeros")
            hidden = inner.norm(up(down))
            for attention, feed in bert.sub_layers[layer + 1 :]:
                hidden = feed(attention(hidden, visible))
            outputs = model.get_layer("head")(hidden)
    up.bias.assign(inner.narrow.bias)
    return keras.Model(tokens, outputs)


def tune(
    task: str,
    contender: str,
    layer: int,
    rank: int,
    seed: int,
    weights: Any,
    words: Any,
    setup: Setup = SMALL,
) -> dict[str, Any]:
    """Fine-tune and score; the bytes are those of the last step, in both directions."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    bert = Bert(setup.sizes)
    bert.set_weights(weights)
    model = cut_model(bert, task, contender, layer, rank)
    longest = setup.sizes.length
    train, dev = make_rows(task, "train", setup.rows, words, longest), make_rows(task, "dev", TESTED, words, longest)
    steps = setup.epochs * (setup.rows // BATCH)
    rate = keras.optimizers.schedules.PolynomialDecay(setup.rate, steps, 0.0)
    model.compile(keras.optimizers.Adam(rate), loss_of(TASKS[task]))
    order = np.random.default_rng(seed).permutation(setup.rows)
    seconds: list[float] = []
    cut = contender != "uncut"
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seconds.append(nb.last_report("train_step").step_seconds)
    )

    def end_if_learned(epoch: int, logs: Any) -> None:
        model.stop_training = logs["loss"] < setup.enough

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=end_if_learned), *([clock] if cut else [])]
    history = model.fit(
        train.ids[order], train.labels[order], batch_size=BATCH, epochs=setup.epochs, verbose=0, callbacks=callbacks
    ).history["loss"]
    found: dict[str, Any] = {"task": task, "contender": contender, "layer": layer, "rank": rank, "seed": seed}
    if cut:
        links = nb.last_report("train_step").links
        for way, name in (("there", f"{NEAR}->{FAR}"), ("back", f"{FAR}->{NEAR}")):
            found[way], found[f"raw {way}"] = links[name].payload_bytes, links[name].raw_bytes
        found["step"] = round(median(seconds[1:]), 4)
    found["loss"] = [round(loss, 4) for loss in history]
    predicted = model.predict(dev.ids, batch_size=256, verbose=0)
    return found | {name: round(value, 4) for name, value in score(TASKS[task], predicted, dev.labels).items()}
