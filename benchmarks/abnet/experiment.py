"""The common parts of all rows: the text, its vocabularies, two pretrained language models, and the model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import keras
from rows import Row, options

import whale_nebula as nb
from whale_nebula.models import (
    BertSizes,
    CausalABNet,
    MaskedABNet,
    SmoothedCrossentropy,
    Translator,
    load_masked_lm,
    masked_lm,
    save_bert,
    text,
)
from whale_nebula.models.bert import Bert
from whale_nebula.models.decoding import Beam, MaskPredict, translation
from whale_nebula.models.masking import Hiding, Masking, pretrain

SIDES = ("source", "target")
LONGEST, BATCH, VOCABULARY = 40, 32, 3000
SIZES = BertSizes(VOCABULARY, length=LONGEST + 2, width=128, heads=4, layers=2, inner=512, dropout=0.0)


class Setting(NamedTuple):
    """Settings of a row, with defaults for all. `tied`: words are scored by the table of a language model through its
    own head, which is trained further; otherwise by a new output layer.
    """

    pairs: int = 8000
    steps: int = 1500
    inner: int = 256
    rate: float = 3e-3
    dropout: float = 0.0
    tied: bool = False
    pretrained: str = "short"


class Pretraining(NamedTuple):
    """Options of pretraining: how long, and how much of each sentence is hidden."""

    steps: int
    share: float


SETTING = Setting()
PRETRAINED = {"short": Pretraining(1500, 0.15), "long": Pretraining(12000, 0.3)}


class Corpus(NamedTuple):
    """Pairs for training, validation and test; each side's own text for pretraining."""

    train: text.Pairs
    validation: text.Pairs
    test: text.Pairs
    alone: dict[str, list[str]]


def read(folder: Path, languages: tuple[str, str], test: str) -> Corpus:
    """Read aligned files."""
    named = dict(zip(SIDES, languages, strict=True))
    splits = [text.read_folder(folder, split, **named) for split in ("train", "val", test)]
    return Corpus(*splits, {side: list(splits[0].of(side)) for side in SIDES})


def setting(row: Row, steps: int) -> Setting:
    """The settings of a row."""
    return SETTING._replace(**{"steps": steps, **row.own})


def folder_of(kept: Path, pretrained: str) -> Path:
    """The folder of language models with this pretraining."""
    return kept if pretrained == SETTING.pretrained else kept.with_name(f"{kept.name}-{pretrained}")


def prepare(side: str, lines: list[str], folder: Path, how: Pretraining) -> None:
    """Pretrain a side's language model on its own text, once, and save it."""
    if (folder / side / "config.json").exists():
        return
    keras.utils.set_random_seed(1)
    words = text.Tokenizer(text.learn_vocabulary(lines, VOCABULARY, fill=True))
    encoded = text.encode_pairs(text.Pairs(source=lines), source=words, longest=LONGEST)
    order = text.make_order(len(lines), batch=BATCH, lengths=encoded.lengths)
    rows = text.batches(encoded, order).map(lambda inputs, labels: inputs["source"])
    model = masked_lm(Bert(SIZES, name=side))
    masking = Masking.of(words, share=how.share)
    found = pretrain(model, rows, masking, steps=how.steps, learning_rate=1e-3, epochs=10, verbose=2)
    print(side, found.history["loss"], flush=True)
    save_bert(model, folder / side, words.vocabulary)


def tokenizers(folder: Path) -> dict[str, text.Tokenizer]:
    """The tokenizers of the language models."""
    return {side: text.Tokenizer(text.read_vocabulary(folder / side / "vocab.txt")) for side in SIDES}


def encoded(pairs: text.Pairs, words: dict[str, text.Tokenizer]) -> text.Encoded:
    """Encode pairs as ids."""
    return text.encode_pairs(pairs, **words, longest=LONGEST)


def translator(row: Row, folder: Path, setting: Setting, *, micro_batches: int = 1) -> keras.Model:
    """A row's compiled model in its two clusters."""
    asked = options(row, SIZES.width, setting.steps)
    squeeze = nb.compress(**asked) if asked else contextlib.nullcontext()
    with nb.cluster(), nb.pipeline(micro_batch=micro_batches), squeeze:
        model = _made(row, folder, setting)
    steps, warm = setting.steps, setting.steps // 10
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps - warm, warmup_target=setting.rate, warmup_steps=warm)
    optimizer = keras.optimizers.Adam(rate, global_clipnorm=1.0)
    if row.codec.get("basis") != "learned":  # a learned basis has variables, which the first step creates
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, _loss(row))
    return model


def _made(row: Row, folder: Path, setting: Setting) -> keras.Model:
    if row.model == "translator":
        sizes = replace(SIZES, dropout=setting.dropout)
        return Translator(sizes, sizes, tied=setting.tied, around=_around)
    source, target = (load_masked_lm(folder / side, name=side) for side in SIDES)
    kind = MaskedABNet if row.model == "cmlm" else CausalABNet
    tied = setting.tied or row.model == "cmlm"
    model = kind(source.bert, target, inner=setting.inner, dropout=setting.dropout, tied=tied, around=_around)
    if setting.tied:  # train the head further: it was made for bidirectional states
        for layer in (target.guess.dense, target.guess.norm, target.bias):
            layer.trainable = True
    return model


def _around(side: str) -> Any:
    return nb.stage(cluster=side)


def _loss(row: Row) -> Any:
    smoothed = SmoothedCrossentropy(0.1)
    if row.model != "cmlm":
        return smoothed
    return {"words": smoothed, "length": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def batches(row: Row, rows: text.Encoded, order: text.Order, words: dict[str, text.Tokenizer], seed: int) -> Any:
    """The batches for `fit`."""
    found = text.batches(rows, order)
    if row.model != "cmlm":
        return found
    target = words["target"]
    return Hiding(target.mask, (target.pad, target.start, target.end), seed=seed).of_batches(found)


def search(row: Row, model: keras.Model, words: dict[str, text.Tokenizer], *, width: int = 4) -> Any:
    """The function that translates a batch; created once, as it is traced for every length of rows."""
    target = words["target"]
    ends = {"start": target.start, "end": target.end, "longest": LONGEST}
    way = MaskPredict(**ends, mask=target.mask) if row.model == "cmlm" else Beam(**ends, width=width)
    return translation(model, way)


def translated(translate: Any, rows: text.Encoded, words: dict[str, text.Tokenizer]) -> list[str]:
    """Translated sentences, in the order of the rows."""
    order = text.make_order(len(rows), batch=128, lengths=[rows.source.lengths], shuffle=False)
    found: list[str] = []
    for batch in text.batches(rows, order):
        found += words["target"].sentences(translate(batch[0]["source"]).best)
    return order.restored(found)
