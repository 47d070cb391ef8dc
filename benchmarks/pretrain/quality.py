"""The quality of pretraining, measured by finding translations in languages on which it was not tuned.

    python benchmarks/pretrain/quality.py                     # what is missing of all rows, on the generated corpus
    python benchmarks/pretrain/quality.py --text FOLDER --languages en de fr cs    # on aligned files train.en[.gz] ...
    python benchmarks/pretrain/quality.py --table             # what there is so far
    python benchmarks/pretrain/quality.py --quick             # one row of a few steps; writes nothing

Each result is a line of quality.jsonl at once: it can be interrupted, and continued with the same command. All runs are
in one process without clusters; tests verify that clusters change no bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, picture, read_finished_runs, write

from whale_nebula.models import Bert, BertSizes, masked_lm, text
from whale_nebula.models.pretraining import (
    DISCRIMINATOR,
    Corpus,
    Corruption,
    Discriminator,
    Mixture,
    Objectives,
    Pretraining,
    choice_accuracy,
    choice_model,
    encode_alone,
    encode_choices,
    encode_with_pivot,
    guess_loss,
    hide_tokens,
    make_adam,
    mix_families,
    tune_choice,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "quality.jsonl"
LENGTH, BATCH, HEAT, TUNED = 32, 32, 1.5, ("en", "es")
CONTENDERS = {
    "one generator": "MRTD + TRTD + CLM, one generator",
    "families": "the same, a generator for each family (M3)",
    "mlm": "MLM alone, on the same rows, as many FLOPs",
    "fresh": "not pretrained",
}
SEEDS = (1, 2, 3)
Found = dict[str, Any]
Step = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def sizes(words: int, width: int, layers: int) -> BertSizes:
    """The sizes of a pre-normalised BERT."""
    return BertSizes(
        vocabulary=words,
        length=LENGTH,
        width=width,
        heads=4,
        layers=layers,
        inner=2 * width,
        dropout=0.0,
        norm="pre",
        spread=0.1,
    )


def flops(bert: BertSizes, how: Corruption, heads: Sequence[str]) -> float:
    """Multiplications and additions of a token in the forward's matrix products."""
    layer = 8 * bert.width**2 + 4 * bert.width * bert.inner + 4 * LENGTH * bert.width
    scores = 2 * bert.width * (bert.width + bert.vocabulary)
    each = {"guess": scores * how.count(LENGTH) / LENGTH, "correct": scores, "doubt": 2 * bert.width**2}
    return bert.layers * layer + sum(each[name] for name in heads)


def train(step: Step, mixtures: dict[str, Mixture], steps: int) -> dict[str, float]:
    """Train `steps` steps; returns the mean losses of the last twentieth."""
    late: list[dict[str, Any]] = []
    for number in range(steps):
        drawn = {name: mixture.batch(number) for name, mixture in mixtures.items()}
        texts, numbers = ({name: tf.constant(each[at]) for name, each in drawn.items()} for at in (0, 1))
        losses = step(texts, numbers)
        if number >= steps - max(1, steps // 20):
            late.append(losses)
    return {name: float(np.mean([float(each[name]) for each in late])) for name in late[0]}


def make_generator_step(model: Pretraining) -> Step:
    """A step of generators and a discriminator."""

    @tf.function
    def step(texts: Any, numbers: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            losses = model.losses(texts, numbers)
        model.update(tape, losses)
        return losses

    return step


def make_masked_step(bert: Bert, how: Corruption, steps: int) -> Step:
    """A step of masked language modelling."""
    model = masked_lm(bert)
    adam = make_adam(model, 2e-3, steps=steps)

    @tf.function
    def step(texts: Any, numbers: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = hide_tokens(texts["all"], numbers["all"], how)
            scores = model({"tokens": hidden.shown, "places": hidden.places}, training=True)
            loss = guess_loss(hidden.originals, scores, hidden.weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"mlm": loss}

    return step


def mix(corpus: Corpus, words: text.Tokenizer, families: dict[str, list[str]], seed: int) -> dict[str, Mixture]:
    """The mixture of each generator: nine tenths are pairs with the first language."""
    pivot = next(iter(corpus.pairs))
    alone = {name: encode_alone(corpus, words, own, LENGTH) for name, own in families.items()}
    pairs = {name: encode_with_pivot(corpus, words, own, pivot, LENGTH) for name, own in families.items()}
    return mix_families(alone, batch=BATCH, pairs=pairs, of_pairs=0.9, seed=seed)


def pretrain(contender: str, corpus: Corpus, words: text.Tokenizer, seed: int, steps: int) -> tuple[Bert, Found]:
    """Pretrain a contender; returns its BERT, losses, and steps."""
    languages = list(corpus.pairs)
    keras.utils.set_random_seed(seed)
    small, large = sizes(words.size, 64, 1), sizes(words.size, 96, 2)
    how = Corruption.of(words, heat=HEAT, seed=seed)
    bert = Bert(large, name="kept")
    if contender == "fresh":
        return bert, {"steps": 0}
    both = flops(small, how, ["guess"]) + flops(large, how, ["doubt", "correct"])
    if contender == "mlm":
        steps = round(steps * both / flops(large, how, ["guess"]))
        return bert, {
            "steps": steps,
            "losses": train(make_masked_step(bert, how, steps), mix(corpus, words, {"all": languages}, seed), steps),
        }
    halves = {"one": languages[:2], "two": languages[2:]}
    families = halves if contender == "families" else {"all": languages}
    generators = {name: masked_lm(Bert(small, name=f"generator_{name}")) for name in families}
    networks = {**generators, DISCRIMINATOR: Discriminator(bert)}
    adams = {name: make_adam(each, 2e-3, steps=steps) for name, each in networks.items()}
    model = Pretraining(generators, networks[DISCRIMINATOR], how, Objectives(10.0, 50.0), adams)
    return bert, {
        "steps": steps,
        "losses": train(make_generator_step(model), mix(corpus, words, families, seed), steps),
    }


def measure(contender: str, corpus: Corpus, words: text.Tokenizer, seed: int, options: argparse.Namespace) -> Found:
    """Pretrain, tune on one pair of languages, and test on all."""
    began = time.monotonic()
    bert, found = pretrain(contender, corpus, words, seed, options.steps)
    model = choice_model(bert)

    def rows(split: str, first: str, second: str, count: int) -> np.ndarray:
        made = corpus.choices(split, first, second, count)
        return encode_choices(words, made.sentences, made.right, made.wrong, LENGTH)

    tuned = tuple(options.tune_on)
    losses = tune_choice(model, rows("train", *tuned, 2000), steps=options.tune, rate=3e-4, seed=seed)
    pairs = [tuned, *(each for each in combinations(corpus.pairs, 2) if each != tuned)]
    right = {"-".join(each): choice_accuracy(model, rows("test", *each, options.test)) for each in pairs}
    return {**found, "tuned": float(np.mean(losses[-20:])), "right": right, "seconds": time.monotonic() - began}


def cells(own: Sequence[Found], tuned: str) -> list[object]:
    """The accuracy on the tuned pair, and on all others, in per cent, with the spread over seeds."""
    if not own:
        return ["not measured"] * 3
    known = [100 * each["right"][tuned] for each in own]
    others = [100 * statistics.mean(v for name, v in each["right"].items() if name != tuned) for each in own]
    spread = [f"{statistics.mean(each):.1f}" + (f" ± {statistics.stdev(each):.1f}" if len(each) > 1 else "")
              for each in (known, others)]  # fmt: skip
    return [own[0]["steps"], *(f"{each} ({len(own)})" for each in spread)]


def write_table(found: list[Found]) -> None:
    """Write a line for each contender and corpus."""
    rows: list[list[object]] = [["text", "contender", "steps", "pair that it is tuned on", "other pairs (zero-shot)"]]
    for corpus in dict.fromkeys(each["corpus"] for each in found):
        for contender, said in CONTENDERS.items():
            own = [each for each in found if (each["corpus"], each["contender"]) == (corpus, contender)]
            rows.append([corpus, said, *cells(own, own[0]["tuned_on"] if own else "")])
    write(__file__, {"machine": describe_machine(), "rows": len(found)}, rows, "quality")


def draw(found: list[Found]) -> None:
    """Plot accuracies of each contender: points are seeds, lines their means."""
    corpora = list(dict.fromkeys(each["corpus"] for each in found))
    with picture(HERE / "quality.svg", len(corpora)) as every:
        for axes, corpus in zip(every, corpora, strict=True):
            for place, contender in enumerate(CONTENDERS):
                own = [each for each in found if (each["corpus"], each["contender"]) == (corpus, contender)]
                for shade, tuned in enumerate((True, False)):
                    scores = [[v for name, v in each["right"].items() if (name == each["tuned_on"]) == tuned]
                              for each in own]  # fmt: skip
                    right = [100 * statistics.mean(each) for each in scores]
                    if not right:
                        continue
                    label = ("pair that is tuned on", "other pairs")[shade] if place == 0 else None
                    at = place + 0.2 * (shade - 0.5)
                    axes.plot([at] * len(right), right, "o", color=f"C{shade}", alpha=0.6, label=label)
                    axes.hlines(statistics.mean(right), at - 0.08, at + 0.08, color=f"C{shade}")
            axes.axhline(50, color="black", linestyle="--", linewidth=1, label="chance")
            axes.set_xticks(range(len(CONTENDERS)), CONTENDERS, fontsize=8)
            axes.set(ylabel="right, of 100", title=corpus, ylim=(40, 110))


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--table", action="store_true", help="only write the table")
    add("--quick", action="store_true", help="one row of a few steps; writes nothing")
    add("--text", type=Path, metavar="FOLDER", help="aligned files train.LANGUAGE[.gz] and val.LANGUAGE[.gz]")
    add("--languages", nargs="+", default=list(text.LANGUAGES))
    add("--tune-on", nargs=2, default=list(TUNED))
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--seeds", nargs="+", type=int, default=list(SEEDS))
    add("--rows", type=int, default=4000)
    add("--words", type=int, default=512)
    add("--steps", type=int, default=6000)
    add("--tune", type=int, default=500)
    add("--test", type=int, default=400)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.steps, options.tune, options.test = 200, 3, 2, 16
        options.seeds, options.contenders = [1], ["families"]
    if not options.table:
        folder = options.text
        corpus = (
            Corpus.of_folder(folder, options.languages, options.rows) if folder
            else Corpus.by_rule(options.languages, options.rows)
        )  # fmt: skip
        words = text.Tokenizer(text.learn_vocabulary(corpus.lines(), options.words, fill=True))
        name = folder.name if folder else "generated"
        for seed in options.seeds:
            for contender in options.contenders:
                case = {"corpus": name, "contender": contender, "seed": seed, "tuned_on": "-".join(options.tune_on)}
                if any(case.items() <= each.items() for each in read_finished_runs(RESULTS)) and not options.quick:
                    continue
                row = {**case, **measure(contender, corpus, words, seed, options)}
                print(json.dumps(row), flush=True)
                if not options.quick:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    if not options.quick:
        write_table(read_finished_runs(RESULTS))
        draw(read_finished_runs(RESULTS))


if __name__ == "__main__":
    main()
