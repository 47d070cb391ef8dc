"""Pretrain a language model for several languages in one cluster, with the text in other clusters.

A small generator runs where the text is. It hides tokens of a sentence, or of a pair of translations, and fills in its
predictions; a larger discriminator in another cluster detects replaced tokens, and predicts the originals. Only ids,
one bit per token and the hidden originals are sent, and no gradient returns, so steps hardly wait for the link. The
generators are then discarded. The discriminator is saved as a `Bert`, and fine-tuned on English and German to tell
which of two sentences is the translation; then it is tested on all pairs of languages.

    python examples/pretrain.py                          # two clusters in this process, over an emulated link
    python examples/pretrain.py --families germanic=en,de romance=es,fr          # a generator for each, three clusters
    python examples/pretrain.py --discriminators 4       # one generator feeds four discriminators
    python examples/pretrain.py --objectives mrtd        # without pairs (trtd) and without the correction (clm)
    python examples/pretrain.py --text FOLDER --languages en de fr cs            # FOLDER has train.en[.gz], val.en ...
    whale-nebula run --all --config examples/pretrain.yaml examples/pretrain.py  # a process per cluster, mutual TLS
    whale-nebula run --all --config examples/pretrain_families.yaml examples/pretrain.py \\
        --families germanic=en,de romance=es,fr
"""

import argparse
import math
import time
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import whale_nebula as nb
from whale_nebula.launch import attach
from whale_nebula.models import Bert, BertSizes, masked_lm, save_bert, text
from whale_nebula.models.pretraining import (
    DISCRIMINATOR,
    Corpus,
    Corruption,
    Discriminator,
    Mixture,
    Objectives,
    Pretraining,
    check_families,
    choice_accuracy,
    choice_model,
    encode_alone,
    encode_choices,
    encode_with_pivot,
    make_adam,
    mix_families,
    tune_choice,
)

LENGTH, WORDS, SHOWN = 32, 512, 10
OBJECTIVES = ("mrtd", "trtd", "clm")
console = Console(highlight=False)


def sizes(options: argparse.Namespace, width: int, layers: int) -> BertSizes:
    """The sizes of a pre-normalised BERT with the common vocabulary."""
    return BertSizes(
        vocabulary=options.words, length=LENGTH, width=width, heads=4, layers=layers, inner=2 * width, dropout=0.0,
        norm="pre", spread=0.1,
    )  # fmt: skip


def read(options: argparse.Namespace) -> tuple[Corpus, text.Tokenizer]:
    """Read the text, and the common vocabulary of all networks."""
    if options.text:
        corpus = Corpus.of_folder(options.text, options.languages, options.rows)
    else:
        corpus = Corpus.by_rule(options.languages, options.rows)
    if options.vocabulary:
        words = text.read_vocabulary(options.vocabulary)
        words.check_fits(options.words, where=str(options.vocabulary))
    else:
        words = text.learn_vocabulary(corpus.lines(), options.words, fill=True)
    return corpus, text.Tokenizer(words)


def mix(options: argparse.Namespace, corpus: Corpus, words: text.Tokenizer) -> dict[str, Mixture]:
    """The mixture of each generator: its languages by temperature, and pairs that begin with one of them."""
    families, pivot = options.families, options.languages[0]
    alone = {name: encode_alone(corpus, words, own, LENGTH) for name, own in families.items()}
    pairs = {name: encode_with_pivot(corpus, words, own, pivot, LENGTH) for name, own in families.items()}
    return mix_families(
        alone,
        batch=options.batch,
        pairs=pairs if "trtd" in options.objectives else None,
        of_pairs=0.9 if "mrtd" in options.objectives else 1.0,
        temperature=options.temperature,
    )


def networks(options: argparse.Namespace, words: text.Tokenizer) -> Pretraining:
    """A generator for each family and one larger discriminator, each with its own optimizer."""
    keras.utils.set_random_seed(1)
    small, large = sizes(options, 64, 1), sizes(options, 96, 2)
    generators = {name: masked_lm(Bert(small, name=f"generator_{name}")) for name in options.families}
    objectives = Objectives(10.0, 50.0 if "clm" in options.objectives else 0.0)
    discriminator = Discriminator(Bert(large, name="kept"), corrects=objectives.originals)
    found = {**generators, DISCRIMINATOR: discriminator}
    adams = {name: make_adam(each, 2e-3, steps=options.steps) for name, each in found.items()}
    return Pretraining(generators, discriminator, Corruption.of(words, heat=1.5), objectives, adams)


def around(name: str, options: argparse.Namespace) -> ExitStack:
    """The scopes of a network: its own cluster, and replicas for the discriminator."""
    scopes, count = ExitStack(), options.discriminators
    if count > 1:
        scopes.enter_context(nb.replica(count if name == DISCRIMINATOR else 1))
        scopes.enter_context(nb.pipeline(count, coupled="allow"))
    scopes.enter_context(nb.stage(cluster=name))
    return scopes


def pretrain(model: Pretraining, mixtures: dict[str, Mixture], options: argparse.Namespace) -> None:
    """Run all steps; as under any `nb.compress`, integers are packed into the bits that they need."""

    @nb.function
    def step(numbers: dict[str, Any], texts: dict[str, Any]) -> dict[str, Any]:
        with tf.GradientTape(persistent=True) as tape, nb.cluster(), nb.compress(fp16=True):
            losses = model.losses(texts, numbers, around=lambda name: around(name, options))
        model.update(tape, losses)
        return losses

    began, every = time.monotonic(), max(1, options.steps // SHOWN)
    for number in range(options.steps):
        drawn = {name: mixture.batch(number) for name, mixture in mixtures.items()}
        texts = {name: tokens if nb.here().runs(name) else None for name, (tokens, _) in drawn.items()}
        losses = step({name: numbers for name, (_, numbers) in drawn.items()}, texts)
        if number % every == every - 1:  # reading a result waits for the step
            shown = ", ".join(f"{name} {float(loss):.3f}" for name, loss in losses.items() if name != DISCRIMINATOR)
            if nb.here().lead:
                console.print(f"  step {number + 1}, {time.monotonic() - began:.0f} s: {shown}")
    report = nb.last_report()
    links = {**report.elsewhere.links, **report.links}
    tokens = options.batch * LENGTH
    there = {name: link.payload_bytes for name, link in links.items() if name.endswith(DISCRIMINATOR)}
    if nb.here().lead and there:
        bits = 8 * sum(there.values()) / tokens
        console.print(
            f"{bits:.2f} bits per token were sent, {math.log2(options.words):.2f} are an id; no gradient returned"
        )


def ask(bert: Bert, corpus: Corpus, words: text.Tokenizer, options: argparse.Namespace) -> dict[str, float]:
    """Fine-tune on one pair of languages; return the share of right choices for each pair."""
    model = choice_model(bert)

    def rows(split: str, first: str, second: str, count: int) -> np.ndarray:
        found = corpus.choices(split, first, second, count)
        return encode_choices(words, found.sentences, found.right, found.wrong, LENGTH)

    tune_choice(model, rows("train", *options.tune_on, options.rows), steps=options.tune, rate=3e-4)
    pairs = [tuple(options.tune_on), *(p for p in combinations(options.languages, 2) if p != tuple(options.tune_on))]
    return {f"{a}-{b}": choice_accuracy(model, rows("test", a, b, options.test)) for a, b in pairs}


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="FOLDER", help="aligned files SPLIT.LANGUAGE[.gz]; by default text is generated")
    add("--languages", nargs="+", help=f"the first is in all pairs of pretraining ({' '.join(text.LANGUAGES)})")
    add("--families", nargs="+", metavar="NAME=LANG,LANG", help="each gets a generator and a cluster (one for all)")
    add("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES),
        help="detect replaced tokens of sentences (mrtd) and of pairs (trtd), predict the originals (clm)")  # fmt: skip
    add("--discriminators", type=int, default=1, metavar="N", help="replicas that share a generator's rows (1)")
    add("--vocabulary", type=Path, metavar="vocab.txt", help="by default it is learned from the text")
    add("--words", type=int, default=WORDS, help="size of the vocabulary (%(default)s)")
    add("--temperature", type=float, default=2.0, help="temperature of mixing languages (%(default)s)")
    add("--line", help="link to emulate between the clusters of one process (60mbit,10ms)")
    add("--rows", type=int, default=4000, help="number of sentences, and of pairs, of each language (%(default)s)")
    add("--batch", type=int, default=32, help="rows per step of all generators together (%(default)s)")
    add("--steps", type=int, default=6000, help="steps of pretraining (%(default)s)")
    add("--tune", type=int, default=500, metavar="STEPS", help="steps of fine-tuning (%(default)s)")
    add("--tune-on", nargs=2, metavar=("FROM", "TO"), help="languages of fine-tuning (the first two)")
    add("--test", type=int, default=400, metavar="ROWS", help="test sentences for each pair of languages (%(default)s)")
    add("--out", type=Path, default=Path("build/pretrain"), help="folder of the BERT (%(default)s)")
    add("--quick", action="store_true", help="a few steps on little text, as a smoke test")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.batch, options.steps, options.tune, options.test = 200, 16, 4, 2, 16
    if options.text and not options.languages:
        parser.error("--text FOLDER requires --languages, the suffixes of its file names")
    options.languages = options.languages or list(text.LANGUAGES)
    options.tune_on = options.tune_on or options.languages[:2]
    given = options.families or [f"generator={','.join(options.languages)}"]
    options.families = {name: own.split(",") for name, _, own in (each.partition("=") for each in given)}
    if len(set(options.languages)) < 3 or not {*options.tune_on} < {*options.languages}:
        parser.error("--languages requires three or more, and --tune-on two of them; the others are for the test")
    if not {"mrtd", "trtd"} & {*options.objectives}:
        parser.error("--objectives clm requires mrtd or trtd, whose rows it corrects")
    if min(options.steps, options.tune, options.test, options.discriminators) < 1 or options.rows < 2:
        parser.error("--steps, --tune, --test and --discriminators must be at least 1, and --rows at least 2")
    if options.discriminators > 1 and (len(options.families) > 1 or options.batch % options.discriminators):
        parser.error("--discriminators N requires one family, and a --batch that is a multiple of N")
    if options.line and attach() is not None:
        parser.error("--line is only for one process; between processes the link is real")
    options.line = options.line or "60mbit,10ms"
    return options


def main() -> None:
    """Pretrain, save, fine-tune, test."""
    options = parse_options()
    check_families(options.families, options.languages)
    alone = attach() is None  # between processes the launcher has the config, and the link is real
    clusters = {name: {} for name in (*options.families, DISCRIMINATOR)}
    if alone and options.discriminators > 1:
        clusters[DISCRIMINATOR] = {"workers": [f"127.0.0.1:{7101 + n}" for n in range(options.discriminators)]}
    nb.init({"clusters": clusters} if alone else None, links=options.line if alone else None)
    corpus, words = read(options)
    model = networks(options, words)
    if nb.here().lead:
        console.print(f"{', '.join(options.families)} and {DISCRIMINATOR} train with {', '.join(options.objectives)}")
    pretrain(model, mix(options, corpus, words), options)
    kept = nb.here().runs(DISCRIMINATOR)
    nb.shutdown()
    if not kept:
        return
    bert = model.discriminator.bert
    save_bert(bert, options.out, words.vocabulary)
    console.print(f"the discriminator is saved as a BERT in {options.out}; fine-tuning on {'-'.join(options.tune_on)}")
    runs = {"pretrained": bert, "not pretrained": Bert(bert.sizes, name="fresh")}
    found = {name: ask(each, corpus, words, options) for name, each in runs.items()}
    table = Table(title="choosing the right one of two translations: accuracy in % (50 is chance)")
    names = list(found["pretrained"])
    for column in ("", f"{names[0]}: tuned on", *names[1:]):
        table.add_column(column, justify="right" if column else "left")
    for name, scores in found.items():
        table.add_row(name, *(f"{100 * score:.1f}" for score in scores.values()))
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except nb.errors.NebulaError as error:  # for example a missing file: what, why and the fix
        raise SystemExit(f"{error}") from error
