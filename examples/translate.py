"""Two separate language models learn to translate together, over a slow link.

The Spanish model is in cluster "source" with the Spanish text, the English model in cluster "target" with the English
text. Each is pretrained in its cluster, and frozen. Then small adapters in both are trained; only hidden states and
their gradients are sent, never words. The same training runs three times: without compression, with the codec of the
Nebula-I paper, and with ours.

    python examples/translate.py                     # both clusters in this process, over an emulated link
    python examples/translate.py --text FOLDER --languages de en     # FOLDER has train.de[.gz], train.en[.gz], test...
    whale-nebula run --all --config examples/translate.yaml examples/translate.py    # a process per cluster, TLS
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from comparison import Clock, compare
from rich.console import Console

import whale_nebula as nb
from whale_nebula.launch import attach
from whale_nebula.models import Bert, BertSizes, CausalABNet, SmoothedCrossentropy, load_bert, save_bert, text
from whale_nebula.models.decoding import Beam, translation
from whale_nebula.models.masking import Masking, pretrain

CONFIG = Path(__file__).with_name("translate.yaml")
SIDES = ("source", "target")
LONGEST, BATCH, EPOCHS = 20, 32, 10
SIZES = BertSizes(vocabulary=800, length=LONGEST + 1, width=128, heads=4, layers=1, inner=512, dropout=0.0)
FORMS = ("described", "placed", "there_are", "liked", "wanted", "bought")  # of generated sentences: no long numbers
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "paper": {"svd": 0.6, "fp16": True, "backward": "int8"},
    "ours": {"codec": "axes >> coded(2.25)", "backward": "axes >> coded(2.25)", "mask": True},
}
DESCRIPTIONS = {
    "none": "no compression",
    "paper": "as in Nebula-I: truncated SVD in half precision; gradients in int8",
    "ours": "principal axes, entropy-coded to 2.25 bits per number, in both directions",
}
console = Console(highlight=False)


class Corpus(NamedTuple):
    """The text: pairs, of which each cluster has its own side, and monolingual text of that side."""

    train: text.Pairs
    test: text.Pairs
    alone: dict[str, list[str]]


class Side(NamedTuple):
    """A language model; in other clusters without weights and tokenizer."""

    bert: Bert
    words: text.Tokenizer | None


def read(options: argparse.Namespace, here: list[str]) -> Corpus:
    """Read the local sides, without opening files of the other side."""
    if options.text is None:
        languages = {"source": "es", "target": "en"}
        train, test = (
            text.generated(split, count, sides=here, forms=FORMS)
            for split, count in (("train", options.pairs), ("test", 128))
        )
        return Corpus(train, test, {side: text.monolingual(languages[side], 8000, forms=FORMS) for side in here})
    files = {"source": options.languages[0], "target": options.languages[1], "sides": here}
    train = text.read_folder(options.text, "train", **files)
    test = text.read_folder(options.text, options.test, **files)
    return Corpus(train.first(options.pairs), test.first(128), {side: list(train.of(side)) for side in here})


def language_model(side: str, corpus: Corpus, options: argparse.Namespace) -> Side:
    """Load a side's BERT, or pretrain it on its own text by masked language modelling."""
    folder = options.berts / side if options.berts else None
    if folder is not None and (folder / "config.json").exists():
        words = text.Tokenizer(text.read_vocabulary(folder / "vocab.txt"))
        return Side(load_bert(folder, name=side, weights=side in corpus.alone), words)
    bert = Bert(SIZES, name=side)
    if side not in corpus.alone:
        return Side(bert, None)
    lines = corpus.alone[side]
    words = text.Tokenizer(text.learn_vocabulary(lines, SIZES.vocabulary, fill=True))
    encoded = text.encode_pairs(text.Pairs(source=lines), source=words, longest=LONGEST)
    order = text.make_order(len(lines), batch=BATCH, lengths=encoded.lengths)
    rows = text.batches(encoded, order).map(lambda inputs, labels: inputs["source"])
    console.print(f"{side}: a language model learns from {len(lines)} sentences of its own text ...")
    masking, epochs = Masking.of(words), min(EPOCHS, options.pretrain)
    history = pretrain(
        bert, rows, masking, steps=options.pretrain, learning_rate=2e-3, epochs=epochs, verbose=0
    ).history
    console.print(f"{side}: {options.pretrain} steps, loss {history['loss'][0]:.2f} -> {history['loss'][-1]:.2f}")
    if folder is not None:
        save_bert(bert, folder, words.vocabulary)
    return Side(bert, words)


def encode(pairs: text.Pairs, sides: dict[str, Side]) -> text.Encoded:
    """Encode pairs as ids."""
    return text.encode_pairs(pairs, source=sides["source"].words, target=sides["target"].words, longest=LONGEST)


def train(codec: str, rows: text.Encoded, sides: dict[str, Side], steps: int) -> tuple[keras.Model, Clock]:
    """Add adapters to both language models, and train them: the only part that concerns two clusters."""
    keras.utils.set_random_seed(1)
    compressed = nb.compress(**CODECS[codec]) if CODECS[codec] else contextlib.nullcontext()
    with nb.cluster(), compressed:
        source, target = (sides[side].bert for side in SIDES)
        model = CausalABNet(source, target, inner=256, tied=False, around=lambda side: nb.stage(cluster=side))
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - steps // 10, warmup_target=6e-3, warmup_steps=steps // 10
    )
    optimizer = keras.optimizers.Adam(rate)
    optimizer.build(model.trainable_variables)  # else Keras builds it in the first step, which is then traced twice
    model.compile(optimizer, SmoothedCrossentropy(0.1))
    order, clock = text.make_order(len(rows), batch=BATCH, epochs=1 + steps * BATCH // len(rows)), Clock()
    model.fit(
        text.batches(rows, order),
        epochs=EPOCHS,
        steps_per_epoch=steps // EPOCHS,
        shuffle=False,
        verbose=2 * nb.here().lead,
        callbacks=[clock],
    )
    return model, clock


def translate_pairs(model: keras.Model, rows: text.Encoded, words: text.Tokenizer | None) -> list[str] | None:
    """Translate sentences: source ids in, in the source's cluster; words out, in the target's."""
    ends = words or text.Vocabulary(text.SPECIAL)  # every vocabulary starts with these
    translate = translation(model, Beam(ends.start, ends.end, LONGEST, width=4))
    order = text.make_order(len(rows), batch=BATCH, shuffle=False)
    found: list[str] = []
    for (inputs, _), numbers in zip(text.batches(rows, order), order.batches, strict=True):
        batch = translate(inputs["source"], np.arange(len(numbers)))
        if nb.here().runs("target"):
            found += words.sentences(batch.best)
    return found or None


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="FOLDER", help="aligned files SPLIT.LANGUAGE[.gz]; by default text is generated")
    add("--languages", nargs=2, metavar=("FROM", "TO"), help="languages of the files")
    add("--test", default="test", metavar="SPLIT", help="split to score with (%(default)s)")
    add("--berts", type=Path, metavar="FOLDER", help="load FOLDER/source and FOLDER/target, or save them there")
    add("--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="training runs (all)")
    add("--line", help="link to emulate between the clusters of one process (60mbit,10ms)")
    add("--pairs", type=int, default=8000, help="training pairs (%(default)s)")
    add("--pretrain", type=int, default=250, metavar="STEPS", help="for each language model (%(default)s)")
    add("--steps", type=int, default=360, help="steps of each training run (%(default)s)")
    add("--out", type=Path, default=Path("build/translate"), help="folder of the plot (%(default)s)")
    options = parser.parse_args()
    if options.steps < EPOCHS or options.steps % EPOCHS:
        parser.error(f"--steps {options.steps}: must be a multiple of {EPOCHS}, as the loss is shown {EPOCHS} times")
    if options.pretrain < 1 or options.pairs < BATCH:
        parser.error(f"--pretrain must be at least 1, and --pairs at least {BATCH} (one batch)")
    if (options.text is None) != (options.languages is None):
        parser.error("--text FOLDER and --languages FROM TO must be used together; without them text is generated")
    if options.line and attach() is not None:
        parser.error("--line is only for one process; between processes the link is real")
    options.line = options.line or "60mbit,10ms"
    return options


def main() -> None:
    """Pretrain once; then train, translate and score once for each codec."""
    options = parse_options()
    alone = attach() is None  # between processes the launcher has the config, and the link is real
    nb.init(CONFIG if alone else None, links=options.line if alone else None)
    corpus = read(options, [side for side in SIDES if nb.here().runs(side)])
    sides = {side: language_model(side, corpus, options) for side in SIDES}
    rows, tests = (encode(pairs, sides) for pairs in (corpus.train, corpus.test))
    runs = {}
    for codec in options.codecs:
        console.rule(f"translator, {codec}: {DESCRIPTIONS[codec]}")
        model, clock = train(codec, rows, sides, options.steps)
        runs[codec] = clock.make_result(nb.last_report())
        found = translate_pairs(model, tests, sides["target"].words)
        if found:  # only in the target's cluster
            runs[codec].score = text.bleu(found, list(corpus.test.target))
            for ours, theirs in zip(found[:3], corpus.test.target, strict=False):
                console.print(f"  translation {ours or '(nothing)'}\n  [dim]reference   {theirs}[/dim]")
    if nb.here().runs("target"):
        link = f"an emulated link of {options.line}" if alone else "the link between the processes"
        compare(runs, f"training over {link}", options.out, console)


if __name__ == "__main__":
    try:
        main()
    except nb.errors.NebulaError as error:  # for example a missing file: what, why and the fix
        raise SystemExit(f"{error}") from error
