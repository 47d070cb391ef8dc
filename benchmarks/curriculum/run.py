"""Training with a curriculum by length, compared with full rows: steps, time to a loss, and stability.

    python benchmarks/curriculum/run.py            # half an hour; goes on where it was broken off
    python benchmarks/curriculum/run.py --quick    # a few steps of each, to see that it runs; writes nothing
    python benchmarks/curriculum/run.py --by-length    # micro-batches chosen by length: five minutes

A language model of two stages over an emulated line of 60 Mbit/s and 20 ms; the variants of one seed train alternately.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from common import describe_machine, parser, picture, read_finished_runs, read_text, verdict, write

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer
from whale_nebula.strategies import ByTokens, Curriculum

HERE = Path(__file__).parent
ROWS = HERE / "results.jsonl"
LINE, WORDS, SENTENCES, LENGTH, BATCH, RATE = "60mbit,20ms", 512, 8000, 128, 16, 3e-3
SIZES = Sizes(vocabulary=WORDS, length=LENGTH, width=64, heads=4, blocks=4)
STEPS, GROW, LOOK, SEEDS = 240, 140, 10, (1, 2, 3)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "full rows": {"start": LENGTH},
    "linear": {"start": 16},
    "root": {"start": 16, "pace": "root"},
    "packed": {"start": 16, "mode": "pack"},
}
LARGE, LARGE_STEPS, LARGE_RATE = 4, 120, 4
"""So many times the batch, for so many steps, at so many times the rate."""
SPIKE = 1.1
BY_LENGTH: Mapping[str, Mapping[str, Any]] = {
    "4 micro-batches": {},
    "micro-batches chosen": {"micro_batch": "auto"},
}
EACH = 8
"""The steps of each length in this comparison."""


class StepRecorder(keras.callbacks.Callback):
    """Callback that keeps time and loss of each step, and the held-out loss every so many steps."""

    def __init__(self, curriculum: Curriculum, held: Any, *, cut: bool) -> None:
        super().__init__()
        self.steps: list[list[float]] = []
        self.held: list[list[float]] = []
        self._curriculum, self._rows, self._cut, self._mean = curriculum, held, cut, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record a step; Keras's loss is the mean since the last validation, which resets it."""
        number = len(self.steps)
        since = number % LOOK
        loss = logs["loss"] * (since + 1) - (self._mean * since if since else 0.0)
        self._mean = logs["loss"]
        report = nb.last_report() if self._cut else None
        crossed = sum(link.bytes for link in report.links.values()) if report else 0
        took, due = (report.step_seconds, report.predicted_seconds or 0.0) if report else (0.0, 0.0)
        self.steps.append([self._curriculum.length(number), took, due, crossed, loss])
        if (number + 1) % LOOK == 0:
            found = self.model.evaluate(*self._rows, batch_size=BATCH, verbose=0)
            self.held.append([number + 1, float(found)])


def train(way: str, seed: int, steps: int, *, times: int = 1, rate: float = RATE, cut: bool = True) -> StepRecorder:
    """Train one variant with `times` the batch."""
    nb.shutdown()
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    curriculum = Curriculum(**{"end": LENGTH, "steps": GROW * steps // STEPS, "step": 16, **WAYS[way]})
    if cut:
        nb.init(links=LINE, seed=seed)
        with nb.cluster(), nb.pipeline(micro_batch=4):
            model = transformer(
                SIZES, around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"), shorter=True
            )
    else:
        model = transformer(SIZES, shorter=True)
    schedule = ByTokens(keras.optimizers.schedules.CosineDecay(rate, steps, 0.1), curriculum)
    model.compile(keras.optimizers.Adam(schedule), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = read_text(SENTENCES, WORDS, LENGTH)
    held = 4 * BATCH
    data = tf.data.Dataset.from_tensor_slices((x[held:], y[held:])).shuffle(len(x), seed=seed).repeat()
    data = data.batch(times * BATCH).apply(curriculum)
    recorder = StepRecorder(curriculum, (x[:held], y[:held]), cut=cut)
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[recorder])
    return recorder


def measure(steps: int, large: int, seeds: tuple[int, ...], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure the missing rows; each is saved at once."""
    have = {(row["kind"], row["way"], row["seed"]) for row in found}
    for seed in seeds:
        for kind, ways in (("small", list(WAYS)), ("large", ["full rows", "linear"])):
            for way in ways:
                if (kind, way, seed) in have:
                    continue
                how = {} if kind == "small" else {"times": LARGE, "rate": LARGE_RATE * RATE, "cut": False}
                recorder = train(way, seed, steps if kind == "small" else large, **how)
                found.append({"kind": kind, "way": way, "seed": seed, "steps": recorder.steps, "held": recorder.held})
                print(f"{kind} {way} seed {seed}: held-back loss {recorder.held[-1][1]:.3f}", flush=True)
                if steps == STEPS:
                    with ROWS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found[-1]) + "\n")
    return found


def find(found: list[dict[str, Any]], kind: str, way: str) -> list[dict[str, Any]]:
    """The rows of one variant, by seed."""
    return sorted((row for row in found if (row["kind"], row["way"]) == (kind, way)), key=lambda row: row["seed"])


def summarise_row(row: Mapping[str, Any]) -> dict[int, tuple[float, ...]]:
    """For each length the median of the steps' seconds, of their ratio to the prediction, and of the bytes sent;
    without the first ones, which are traced.
    """
    by: dict[int, list[tuple[float, float, float]]] = {}
    for length, took, due, sent, _ in row["steps"]:
        by.setdefault(int(length), []).append((took, took / due if due else np.nan, sent))
    found = {}
    for length, steps in by.items():
        took, beside, sent = np.array(steps).T
        known = beside[np.isfinite(beside)]
        found[length] = (
            float(np.median(took)),
            float(np.median(known)) if known.size else np.nan,
            float(np.median(sent)),
        )
    return found


def reach(row: Mapping[str, Any], target: float) -> tuple[float, float, float] | None:
    """Seconds, tokens (in full steps) and bytes until the held-out loss first reaches the target; a traced step counts
    as an ordinary one of its length.
    """
    usual = summarise_row(row)
    for step, loss in row["held"]:
        if loss <= target:
            lengths = [int(each[0]) for each in row["steps"][: int(step)]]
            seconds, sent = (sum(usual[length][part] for length in lengths) for part in (0, 2))
            return seconds, sum(lengths) / LENGTH, sent
    return None


def make_model() -> Any:
    """The model in two stages, with four micro-batches."""
    with nb.cluster(), nb.pipeline(micro_batch=4):
        model = transformer(SIZES, around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"), shorter=True)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def measure_by_length() -> list[list[Any]]:
    """Seconds of a step by length, with micro-batches chosen by length and with four; the first two steps of each
    length do not count.
    """
    nb.init(links=LINE, seed=1)
    pace = {number * EACH: length for number, length in enumerate((16, 64, LENGTH))}
    x, y = read_text(SENTENCES, WORDS, LENGTH)
    seen: dict[str, dict[int, list[Any]]] = {}
    for way, options in BY_LENGTH.items():
        curriculum, model, reports = Curriculum(16, LENGTH, max(pace), pace=pace, **options), make_model(), list[Any]()
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, to=reports, **__: to.append(nb.last_report())
        )
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        model.fit(data, steps_per_epoch=len(pace) * EACH, verbose=0, callbacks=[curriculum, look])
        seen[way] = {length: [] for length in pace.values()}
        for step, report in enumerate(reports):
            if step % EACH >= 2:
                seen[way][curriculum.length(step)].append(report)
    rows: list[list[Any]] = [["rows of", *(head for way in BY_LENGTH for head in (f"seconds, {way}", "as"))]]
    for length in pace.values():
        row: list[Any] = [length]
        for way in BY_LENGTH:
            took = [each.step_seconds for each in seen[way][length]]
            row += [f"{statistics.median(took):.3f}", seen[way][length][-1].micro_batches]
        rows.append(row)
    return rows


def describe_steps(found: list[dict[str, Any]]) -> list[list[Any]]:
    """Steps by length, with the simulator's predictions."""
    rows: list[list[Any]] = [
        ["rows of", "bytes, of a full step", "off", "seconds, of a full step", "beside the prediction", "bar 10 %"]
    ]
    usual = [summarise_row(row) for row in find(found, "small", "linear")]
    for length in sorted(usual[0]):
        sent, took = (statistics.median(each[length][part] / each[LENGTH][part] for each in usual) for part in (2, 0))
        beside, share = statistics.median(each[length][1] for each in usual), length / LENGTH
        off = max(abs(sent / share - 1), 0.0 if np.isnan(beside) else abs(beside - 1))
        told = [f"{sent:.3f}", f"{sent / share - 1:+.1%}", f"{took:.3f}", "" if np.isnan(beside) else f"{beside:.3f}"]
        rows.append([length, *told, verdict(off, 0.10)])
    return rows


def describe_times(found: list[dict[str, Any]]) -> list[list[Any]]:
    """The costs of reaching the final loss of full rows."""
    rows: list[list[Any]] = [
        ["way", "seconds, of those with full rows", "tokens", "bytes", "held-back loss at the end", "bar 0.75"]
    ]
    base = find(found, "small", "full rows")
    targets = [row["held"][-1][1] for row in base]
    whole = [reach(row, target) for row, target in zip(base, targets, strict=True)]
    for way in WAYS:
        some = find(found, "small", way)
        ratios = [
            None
            if (got := reach(row, target)) is None or full is None
            else [a / b for a, b in zip(got, full, strict=True)]
            for row, target, full in zip(some, targets, whole, strict=True)
        ]
        reached = [each for each in ratios if each is not None]
        last = [row["held"][-1][1] for row in some]
        told = ["not reached"] * 3 if len(reached) < len(ratios) else [
            f"{statistics.mean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in zip(*reached, strict=True)
        ]  # fmt: skip
        bar = (
            ""
            if way == "full rows"
            else verdict(statistics.mean(r[0] for r in reached) if len(reached) == len(ratios) else 9.0, 0.75)
        )
        rows.append(
            [way, *told, f"{statistics.mean(last):.3f} ± {statistics.stdev(last) if len(last) > 1 else 0:.3f}", bar]
        )
    return rows


def describe_steadiness(found: list[dict[str, Any]]) -> list[list[Any]]:
    """Losses of steps with four times the batch and rate: how often one is far above the minimum so far."""
    rows: list[list[Any]] = [
        ["way", f"steps over {SPIKE} × the lowest loss before", "highest such ratio", "held-back loss at the end"]
    ]
    for way in ("full rows", "linear"):
        shares, highest, last = [], [], []
        for row in find(found, "large", way):
            losses = np.array([each[4] for each in row["steps"]])
            ratio = losses[1:] / np.minimum.accumulate(losses)[:-1]
            shares.append(float(np.mean(ratio > SPIKE)))
            highest.append(float(ratio.max()))
            last.append(row["held"][-1][1])
        rows.append([way, f"{statistics.mean(shares):.1%}", f"{max(highest):.2f}", f"{statistics.mean(last):.3f}"])
    return rows


def draw(found: list[dict[str, Any]]) -> None:
    """Plot held-out loss by seconds, and losses of steps with the large batch."""
    with picture(HERE / "curriculum.svg", 2) as (left, right):
        for number, way in enumerate(WAYS):
            for row in find(found, "small", way):
                usual = summarise_row(row)
                seconds = np.cumsum([usual[int(each[0])][0] for each in row["steps"]])
                at = [seconds[int(step) - 1] for step, _ in row["held"]]
                label = way if row["seed"] == SEEDS[0] else None
                left.plot(at, [loss for _, loss in row["held"]], color=f"C{number}", label=label, linewidth=1)
        for number, way in enumerate(("full rows", "linear")):
            for row in find(found, "large", way):
                label = way if row["seed"] == SEEDS[0] else None
                right.plot([each[4] for each in row["steps"]], color=f"C{number}", label=label, linewidth=0.7)
        left.set(xlabel="seconds of steps", ylabel="loss on full rows, held back", title="a batch of 16, 60 Mbit/s")
        right.set(xlabel="step", ylabel="loss of the step", title="4 times the batch and the rate")


def main() -> int:
    """Measure what is missing, and write all tables."""
    arguments = parser(__doc__)
    arguments.add_argument("--by-length", action="store_true", help="only micro-batches chosen by length")
    given = arguments.parse_args()
    quick = given.quick
    if given.by_length:
        table = measure_by_length()
        print("\n".join(" | ".join(map(str, row)) for row in table))
        if not quick:
            write(__file__, {"machine": describe_machine(), "table": table}, table, part="by_length")
        return 0
    kept = [] if quick else read_finished_runs(ROWS)
    found = measure(20, 20, SEEDS[:1], kept) if quick else measure(STEPS, LARGE_STEPS, SEEDS, kept)
    tables = {"steps": describe_steps(found), "steadiness": describe_steadiness(found)}
    times = describe_times(found)
    for table in (*tables.values(), times):
        print("\n".join(" | ".join(map(str, row)) for row in table), end="\n\n")
    if not quick:
        for name, table in tables.items():
            write(__file__, {"machine": describe_machine(), "table": table}, table, part=name)
        write(__file__, {"machine": describe_machine(), "table": times}, times)
        draw(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
