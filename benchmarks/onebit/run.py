"""1-bit LAMB and Adam between two clusters: bytes and seconds of a step, and loss, compared with other exchanges.

    python benchmarks/onebit/run.py            # 40 minutes; goes on where it was broken off
    python benchmarks/onebit/run.py --quick    # a few steps of each, to see that it runs; writes nothing

A language model trains in two clusters of one process. Steps are timed over an emulated line of 60 Mbit/s and 20 ms;
losses do not depend on the line, and are measured without it.
"""

from __future__ import annotations

import contextlib
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
from common import describe_machine, parser, picture, read_finished_runs, read_text, verdict, write

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer
from whale_nebula.strategies import OneBitAdam, OneBitLamb

HERE = Path(__file__).parent
ROWS = HERE / "results.jsonl"
LINE, WORDS, SENTENCES, LENGTH, BATCH = "60mbit,20ms", 512, 6000, 32, 16
SIZES = Sizes(vocabulary=WORDS, length=LENGTH, width=192, heads=4, blocks=4)
STEPS, FREEZE, TIMED, SEEDS = 240, 48, 6, (1, 2, 3)
NEVER = 10**6


def make_lamb(freeze: int) -> Any:
    """LAMB with one-bit exchange from step `freeze` on."""
    return OneBitLamb(keras.optimizers.schedules.CosineDecay(1e-2, STEPS, 0.1), freeze)


def make_adam(freeze: int) -> Any:
    """Adam with one-bit exchange from step `freeze` on."""
    return OneBitAdam(keras.optimizers.schedules.CosineDecay(1e-3, STEPS, 0.1), freeze)


def make_adam_for_weights(_: int) -> Any:
    """Keras's Adam, for clusters that exchange weights."""
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, STEPS, 0.1))


VARIANTS: Mapping[str, tuple[Any, bool, Mapping[str, Any], Mapping[str, Any]]] = {
    "LAMB, float32": (make_lamb, False, {"exchange": "1bit"}, {}),
    "1-bit LAMB": (make_lamb, True, {"exchange": "1bit"}, {}),
    "Adam, float32": (make_adam, False, {"exchange": "1bit"}, {}),
    "1-bit Adam": (make_adam, True, {"exchange": "1bit"}, {}),
    "Adam, weights each 4 steps, int4": (make_adam_for_weights, False, {"sync_every": 4}, {"int4": True}),
}
"""The optimizer, whether it freezes, and what is said of the replica and of the codec."""


def train(variant: str, seed: int, steps: int, freeze: int, line: str | None) -> dict[str, Any]:
    """The seconds and bytes of each step, and the held-out loss."""
    make, freezes, replica, codec = VARIANTS[variant]
    nb.shutdown()
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    nb.init({"clusters": {"gpu": {}, "npu": {}}}, links=line, seed=seed)
    squeeze = nb.compress(**codec) if codec else contextlib.nullcontext()
    with nb.cluster(), squeeze, nb.replica(**replica), nb.stage(name="all"):
        model = transformer(SIZES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make(freeze if freezes else NEVER), loss)
    x, y = read_text(SENTENCES, WORDS, LENGTH)
    held = 8 * BATCH
    order = np.random.default_rng(seed).permutation(np.arange(held, len(x)))
    taken: list[list[float]] = []
    for step in range(steps):
        rows = order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        model.train_on_batch(x[rows], y[rows])
        report = nb.last_report()
        taken.append([report.step_seconds, sum(link.bytes for link in report.links.values())])
    found = model.evaluate(x[:held], y[:held], batch_size=BATCH, verbose=0)
    return {"loss": float(found), "steps": taken, "parameters": model.count_params()}


def measure(steps: int, freeze: int, seeds: tuple[int, ...], found: list[dict[str, Any]], keep: bool) -> None:
    """Measure the missing rows; each is saved at once."""
    wanted = [("timed", variant, 0) for variant in VARIANTS] + [
        ("learned", variant, seed) for seed in seeds for variant in VARIANTS
    ]
    have = {(row["kind"], row["way"], row["seed"]) for row in found}
    for kind, variant, seed in wanted:
        if (kind, variant, seed) in have:
            continue
        if kind == "timed":  # without the traced steps; some before and some after the end of the warm-up
            row = train(variant, 1, 4 + 2 * TIMED, 4 + TIMED // 2, LINE)
        else:
            row = train(variant, seed, steps, freeze, None)
            row["steps"] = [[0.0, sent] for _, sent in row["steps"]]
        found.append({"kind": kind, "way": variant, "seed": seed, **row})
        print(f"{kind} {variant} seed {seed}: loss {row['loss']:.3f}", flush=True)
        if keep:
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")


def describe(found: list[dict[str, Any]]) -> list[list[Any]]:
    """Bytes and seconds of a final step and of the whole run, and the loss, relative to float32."""
    head = [
        "exchange",
        "bytes of a step",
        "of the whole run",
        "seconds of a step",
        "beside float32",
        "of the whole run",
    ]
    rows: list[list[Any]] = [[*head, "loss, held back", "bars"]]
    base: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        learned = [row for row in found if (row["kind"], row["way"]) == ("learned", variant)]
        (timed,) = [row for row in found if (row["kind"], row["way"]) == ("timed", variant)]
        after = statistics.median(each[0] for each in timed["steps"][-TIMED // 2 * 2 :][-TIMED:])
        if "each 4" in variant:
            after = statistics.mean(each[0] for each in timed["steps"][-2 * (TIMED // 3) * 2 :][-8:])
        sent = [sum(each[1] for each in row["steps"]) for row in learned]
        last = statistics.mean(each[1] for each in learned[0]["steps"][-4:])
        kind = "LAMB" if "LAMB" in variant else "Adam"
        own = {"after": after, "sent": sent[0], "last": last}
        base.setdefault(kind, own)
        first = base[kind]
        warm = FREEZE / STEPS if VARIANTS[variant][1] else 0.0
        whole = warm + (1 - warm) * after / first["after"]
        losses = [row["loss"] for row in learned]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        bars = ""
        if VARIANTS[variant][1]:
            bars = f"bytes 1/24: {verdict(last / first['last'], 1 / 24)}; time 1/8: {verdict(whole, 1 / 8)}"
        rows.append([
            variant, f"1/{first['last'] / last:.1f}", f"{sent[0] / first['sent']:.3f}", f"{after:.3f} s",
            f"{after / first['after']:.3f}", f"{whole:.3f}", f"{statistics.mean(losses):.3f} ± {spread:.3f}", bars,
        ])  # fmt: skip
    return rows


def draw(rows: list[list[Any]]) -> None:
    """Plot the final loss by the bytes and by the seconds of the whole run."""
    with picture(HERE / "onebit.svg", 2) as every:
        for axes, column, said in zip(every, (2, 5), ("bytes", "seconds"), strict=True):
            for number, row in enumerate(rows[1:]):
                loss, spread = map(float, row[6].split(" ± "))
                axes.errorbar(float(row[column]), loss, spread, color=f"C{number}", marker="o", capsize=2, label=row[0])
            axes.set(xscale="log", xlabel=f"{said} of the whole run, beside float32", ylabel="loss, held back")


def main() -> int:
    """Measure what is missing, and write the table."""
    quick = parser(__doc__).parse_args().quick
    found = [] if quick else read_finished_runs(ROWS)
    measure(8 if quick else STEPS, 4 if quick else FREEZE, SEEDS[:1] if quick else SEEDS, found, not quick)
    rows = describe(found)
    print("\n".join(" | ".join(map(str, row)) for row in rows))
    if not quick:
        write(__file__, {"machine": describe_machine(), "parameters": found[0]["parameters"], "table": rows}, rows)
        draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
