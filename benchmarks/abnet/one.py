"""One run: a row with one seed. Trains over a free line, translates, scores; prints a line of JSON and keeps the
translations.

    python benchmarks/abnet/one.py svd6 1 --text FOLDER --languages fr en

All that crosses goes through the row's codec as between clusters; only the line takes no time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import experiment
import keras
import tensorflow as tf
from common import describe_machine
from rows import ROWS

import whale_nebula as nb
from whale_nebula.models import text

CHECKS, SCORED_PAIRS = 5, 128


class TranslationScorer(keras.callbacks.Callback):
    """Callback that sums up the bytes that crossed, and scores translations a few times during training."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look, self.curve = look, list[list[float]]()
        self.bytes = {"source->target": 0, "target->source": 0}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the end of a step."""
        for name, link in nb.last_report().links.items():
            self.bytes[name] += link.bytes

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Score after a part of the run."""
        self.curve.append([epoch + 1, round(float(logs["loss"]), 4), round(self.look(), 2)])
        print(*self.curve[-1], file=sys.stderr, flush=True)


def train(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Train, translate, score."""
    row, setting = ROWS[name], experiment.setting(ROWS[name], asked.steps)
    folder = experiment.folder_of(asked.kept, setting.pretrained)
    keras.utils.set_random_seed(seed)
    corpus, words = experiment.read(asked.text, tuple(asked.languages), asked.test), experiment.tokenizers(folder)
    rows = experiment.encoded(corpus.train.first(setting.pairs), words)
    few = corpus.validation.first(SCORED_PAIRS)
    held, tested = experiment.encoded(few, words), experiment.encoded(corpus.test, words)
    model = experiment.translator(row, folder, setting)
    epochs = 1 + setting.steps * experiment.BATCH // len(rows)
    order = text.make_order(len(rows), batch=experiment.BATCH, seed=seed, epochs=epochs, lengths=rows.lengths)
    greedy = experiment.search(row, model, words, width=1)
    watch = TranslationScorer(lambda: text.bleu(experiment.translated(greedy, held, words), list(few.target)).value)
    began = time.perf_counter()
    data = experiment.batches(row, rows, order, words, seed)
    each = setting.steps // CHECKS
    model.fit(data, epochs=CHECKS, steps_per_epoch=each, shuffle=False, verbose=0, callbacks=[watch])
    trained = time.perf_counter() - began
    found = experiment.translated(experiment.search(row, model, words), tested, words)
    save_translations(asked.kept, name, seed, found)
    score = text.bleu(found, list(corpus.test.target))
    return {
        "row": name, "seed": seed, "steps": each * CHECKS, "bleu": round(score.value, 3), "signature": score.signature,
        "curve": [[done * each, *rest] for done, *rest in watch.curve], "bytes": watch.bytes,
        "codecs": {boundary: said.codec for boundary, said in nb.last_report("train_step").boundaries.items()},
        "seconds": round(trained, 1), "trained": sum(int(tf.size(each)) for each in model.trainable_variables),
        **({"setting": setting._asdict()} if row.own else {}),
    }  # fmt: skip


def save_translations(folder: Path, name: str, seed: int, found: list[str]) -> None:
    """Save the translations, for the bootstrap."""
    (folder / "found").mkdir(parents=True, exist_ok=True)
    (folder / "found" / f"{name}-{seed}.txt").write_text("\n".join(found) + "\n", "utf-8")


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of run.py and its parts."""
    parser.add_argument("--text", type=Path, required=True, metavar="FOLDER", help="with train.fr[.gz] ...")
    parser.add_argument("--languages", nargs=2, default=["fr", "en"], metavar=("FROM", "TO"))
    parser.add_argument("--test", default="test_2016_flickr", help="the split to score with")
    parser.add_argument("--steps", type=int, default=experiment.SETTING.steps)
    parser.add_argument("--kept", type=Path, default=Path("build/abnet"), help="language models and translations")
    return parser


def main() -> int:
    """Run, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("seed", type=int)
    asked = options(parser).parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    about = describe_machine()
    print(json.dumps({**train(asked.row, asked.seed, asked), "machine": about}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
