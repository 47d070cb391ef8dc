"""Label inference from the gradient that crosses: by the position of the cut, its rank, and noise.

    python benchmarks/understand/inference.py             # what is missing: ten minutes
    python benchmarks/understand/inference.py --table     # what there is so far
    python benchmarks/understand/inference.py --quick     # two steps of one case; writes nothing

The cut is that of `basis="svd"`, written in TensorFlow, so that the gradient of each row can be taken as it crosses. A
cut after layer 1 of 4 is what the lower cluster receives if the labels are in the upper one. A cut after layer 3 or 4
is what the middle of a U-shaped model receives from the cluster with the head, the labels, and the layers above the
cut.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import describe_machine, write
from benchmarks.understand.tuning import BATCH, QUICK, SIZES, SMALL, WIDTH, Setup, language_model, make_rows
from whale_nebula.capture.bottlenecks import singular_vectors
from whale_nebula.models import Bert
from whale_nebula.models.understanding import TASKS, loss_of, understanding

ROOT = Path(__file__).resolve().parents[2]
SETUP = SMALL._replace(epochs=6)
TASK, PROBED, KNOWN = "opinion", 256, 10
LOOKS = (0, 64, 192, 320)
RESULTS = Path(__file__).with_name("inference.jsonl")
CASES = [(cut, rank, 0.0) for rank in (8, WIDTH, 2) for cut in (3, 2, 0)] + [
    (cut, 8, noise) for noise in (10.0, 3.0, 1.0) for cut in (3, 2)
]


class Cut(tf.Module):
    """A classifier in two parts, with a low-rank boundary."""

    def __init__(self, weights: list[np.ndarray], layer: int, rank: int, noise: float) -> None:
        super().__init__()
        self.bert = Bert(SIZES)
        self.bert.set_weights(weights)
        self.model = understanding(self.bert, TASKS[TASK])
        self.layer, self.noise = layer, noise
        vectors = singular_vectors(self.bert.sub_layers[layer].inner.narrow.kernel.numpy(), rank)
        self.down, self.up = keras.Variable(vectors.T, name="down"), keras.Variable(vectors, name="up")

    @property
    def variables_of_all(self) -> list[Any]:
        """The trained variables."""
        return [*self.model.trainable_variables, self.down, self.up]

    def near(self, ids: Any) -> Any:
        """The boundary tensor (rows, tokens, rank)."""
        hidden, visible = self.bert.embedding(ids), self.bert.visible(ids)
        for attention, inner in self.bert.sub_layers[: self.layer]:
            hidden = inner(attention(hidden, visible))
        attention, inner = self.bert.sub_layers[self.layer]
        hidden = attention(hidden, visible)
        return tf.tensordot(hidden + inner.narrow(inner.wide(hidden)), self.down.value, 1)

    def far(self, crossed: Any, ids: Any) -> Any:
        """The logits."""
        visible = self.bert.visible(ids)
        hidden = self.bert.sub_layers[self.layer].inner.norm(tf.tensordot(crossed, self.up.value, 1))
        for attention, inner in self.bert.sub_layers[self.layer + 1 :]:
            hidden = inner(attention(hidden, visible))
        return self.model.get_layer("head")(hidden)

    @tf.custom_gradient
    def _noisy(self, crossed: Any) -> Any:
        def back(gradient: Any) -> Any:
            size = tf.sqrt(tf.reduce_mean(gradient[:, 0] ** 2))  # for the first token, which the head reads
            return gradient + self.noise * size * tf.random.normal(tf.shape(gradient))

        return tf.identity(crossed), back

    @tf.function
    def gradients(self, ids: Any, labels: Any) -> Any:
        """The loss, the gradient that crosses with its noise, and those of all variables."""
        with tf.GradientTape() as tape:
            crossed = self.near(ids)
            loss = loss_of(TASKS[TASK])(labels, self.far(self._noisy(crossed), ids))
        variables = [each.value for each in self.variables_of_all]
        back, *own = tape.gradient(loss, [crossed, *variables], unconnected_gradients="zero")
        return loss, back, own


def clusters(rows: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> float:
    """The accuracy of two clusters of directions as the two labels, in the better assignment."""
    best = (-np.inf, 0.5)
    for _ in range(8):
        means = rows[rng.choice(len(rows), 2, replace=False)]
        for _ in range(20):
            near = rows @ means.T
            which = near.argmax(1)
            sums = [rows[which == each].sum(0) if (which == each).any() else means[each] for each in (0, 1)]
            means = np.stack([each / max(1e-12, float(np.linalg.norm(each))) for each in sums])
        share = float((which == labels).mean())
        best = max(best, (float(near.max(1).sum()), max(share, 1 - share)))
    return best[1]


def match_neighbours(rows: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> float:
    """The share of labels found by the nearest of a few known rows."""
    shares = []
    for _ in range(5):
        known = rng.choice(len(rows), KNOWN, replace=False)
        rest = np.setdiff1d(np.arange(len(rows)), known)
        found = labels[known][(rows[rest] @ rows[known].T).argmax(1)]
        shares.append(float((found == labels[rest]).mean()))
    return float(np.mean(shares))


def run_attack(cut: int, rank: int, noise: float, weights: Any, words: Any, setup: Setup = SETUP) -> dict[str, Any]:
    """Train, and attack the gradients of some rows at intervals."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    train, dev = make_rows(TASK, "train", setup.rows, words), make_rows(TASK, "dev", 1024, words)
    model = Cut(weights, cut, rank, noise)
    batches = setup.rows // BATCH
    rate = keras.optimizers.schedules.PolynomialDecay(setup.rate, setup.epochs * batches, 0.0)
    optimizer = keras.optimizers.Adam(rate)
    optimizer.build(model.variables_of_all)
    looks, step = [], 0
    probed = min(PROBED, setup.rows)
    for _ in range(setup.epochs):
        for numbers in np.array_split(rng.permutation(setup.rows), batches):
            if step in LOOKS:
                _, back, _ = model.gradients(train.ids[:probed], train.labels[:probed])
                rows = back.numpy().reshape(probed, -1)
                rows = rows / np.maximum(1e-30, np.linalg.norm(rows, axis=1, keepdims=True))
                labels = train.labels[:probed].astype(int)
                looks.append(
                    [step, round(clusters(rows, labels, rng), 3), round(match_neighbours(rows, labels, rng), 3)]
                )
            loss, _, gradients = model.gradients(train.ids[numbers], train.labels[numbers])
            optimizer.apply_gradients(zip(gradients, model.variables_of_all, strict=True))
            step += 1
    scores = np.concatenate([model.far(model.near(ids), ids).numpy() for ids in np.array_split(dev.ids, 8)])
    accuracy = float((scores.argmax(1) == dev.labels).mean())
    found = {"cut": cut, "rank": rank, "noise": noise, "looks": looks, "loss": float(loss), "accuracy": accuracy}
    print(found, flush=True)
    return found


def main() -> None:
    """Run the missing cases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--quick", action="store_true", help="two steps of one case; writes nothing")
    options = parser.parse_args()
    if options.quick:
        run_attack(*CASES[0], *language_model(ROOT / "build", QUICK), QUICK)
        return
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(each["cut"], each["rank"], each["noise"]) for each in found}
    missing = [] if options.table else [case for case in CASES if case not in done]
    if missing:
        weights, words = language_model(ROOT / "build")
        for case in missing:
            found.append(run_attack(*case, weights, words))
            with RESULTS.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    found.sort(key=lambda each: CASES.index((each["cut"], each["rank"], each["noise"])))
    head = ["cut after layer", "rank", "noise", *(f"after {step} steps" for step in LOOKS), "accuracy of the model"]
    lines: list[list[object]] = [head]
    for each in found:
        looks = [f"{100 * one:.0f}, {100 * other:.0f}" for _, one, other in each["looks"]]
        rank = "whole" if each["rank"] == WIDTH else each["rank"]
        lines.append([f"{each['cut'] + 1} of 4", rank, each["noise"], *looks, f"{100 * each['accuracy']:.1f}"])
    write(__file__, {"machine": describe_machine(), "found": found}, lines, "inference")


if __name__ == "__main__":
    main()
