"""Recommenders with tables in other clusters than their dense part: equality, bytes, overlap, memory, speed, AUC.

python benchmarks/recommender/run.py                   # a quarter of an hour
python benchmarks/recommender/run.py --quick           # little of each, to see that it runs; writes nothing
python benchmarks/recommender/run.py --only overlap    # one part; the table is written of the last run of each
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import psutil
import tensorflow as tf
from common import describe_machine, parser, picture, verdict, write

import whale_nebula as nb
from whale_nebula.launch.placement import free_port
from whale_nebula.models.recommender import (
    HashedEmbedding,
    RowTable,
    SplitEmbedding,
    auc,
    dlrm,
    generated_clicks,
    look_ahead,
    most_frequent,
)
from whale_nebula.models.recommender.row_optimizers import make_row_optimizer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BATCH, WIDTH, FIELDS, NUMBERS = 512, 16, 8, 4
PLACES = {r"table\d": "cpu", r"(?!table\d$).*": "gpu"}
Rows = list[list[object]]


def make_model(embedding: Any, *, cut: bool, before: Callable[[Any], Any] | None = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    table = embedding if before is None else lambda ids: before(embedding(ids))
    model = dlrm(table, fields=FIELDS, numbers=NUMBERS, width=WIDTH)
    if cut:
        nb.place(model, PLACES)
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def adagrad() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.1)


# ---------------------------------------------------------------------- bits and bytes
def measure_bytes(quick: bool) -> Rows:
    """Losses of every variant compared with the uncut model, and the bytes of a step."""
    rows: Rows = []
    for values in (1000, 100_000):
        log = generated_clicks(BATCH * (4 if quick else 40), vocabulary=values)
        sample = generated_clicks(20_000, start=1_000_000, vocabulary=values).ids
        ways: dict[str, Callable[[], Any]] = {
            "uncut": lambda: HashedEmbedding(WIDTH, optimizer=adagrad(), name="table0"),
            "vectors": lambda: HashedEmbedding(WIDTH, optimizer=adagrad(), name="table0"),
            "distinct rows": lambda: SplitEmbedding(WIDTH, optimizer=adagrad()),
            **{
                f"{hot} hot ids": lambda hot=hot, sample=sample: SplitEmbedding(
                    WIDTH, optimizer=adagrad(), hot=most_frequent(sample, hot)
                )
                for hot in (500, 5000)
            },
        }
        meant, most = [], 0.0
        for way, make in ways.items():
            with nb.init(links="10gbit,0ms", seed=1):
                model, crossed = make_model(make(), cut=way != "uncut"), []
                look = keras.callbacks.LambdaCallback(
                    on_train_batch_end=_record_after_steps(crossed, _count_crossed_bytes)
                )
                fitted = model.fit(
                    log.inputs, log.clicked, BATCH, verbose=0, shuffle=False, epochs=2,
                    callbacks=[] if way == "uncut" else [look],
                )  # fmt: skip
            losses = fitted.history["loss"]
            if way == "uncut":
                meant = losses
                continue
            most = most or statistics.mean(crossed)
            off = max(abs(a / b - 1) for a, b in zip(losses, meant, strict=True))
            share = statistics.mean(crossed) / most
            hot = int(way.split()[0]) if way.endswith("hot ids") else 0
            hits = float(np.isin(log.ids, most_frequent(sample, hot)).mean()) if hot else 0.0
            found = f"{statistics.mean(crossed) / 1e3:.0f} kB a step, {share:.2f} of vectors"
            found += f"; {hits:.0%} of ids are hot" if hot else ""
            rows.append(
                [
                    f"{way}, {values:,} values a field",
                    f"{found}; losses {off:.0e} off uncut",
                    "1e-5",
                    verdict(off, 1e-5),
                ]
            )
    return rows


def _record_after_steps(found: list[Any], measure: Callable[[], Any]) -> Callable[..., None]:
    def append(batch: int, logs: Any = None) -> None:
        found.append(measure())

    return append


def _count_crossed_bytes() -> int:
    return sum(link.payload_bytes for link in nb.last_report().links.values())


# ---------------------------------------------------------------------- overlap, with stated seconds
class SlowTable(RowTable):
    """A table whose look-ups take a fixed time for each row."""

    seconds = 0.0

    def look_ahead(self, ids: np.ndarray) -> Any:
        """Look ahead, slowly."""
        time.sleep(self.seconds * len(ids))
        return super().look_ahead(ids)

    def pull(self, ids: np.ndarray, seen: Any = None, ahead: Any = None) -> np.ndarray:
        """Look up, slowly for each row that is read now."""
        before = self.fetched_again
        values = super().pull(ids, seen, ahead)
        time.sleep(self.seconds * (len(ids) if ahead is None else self.fetched_again - before))
        return values


def rest(seconds: float) -> Callable[[Any], Any]:
    """The dense part's computing: a third of it in the forward, the rest in the backward."""

    def sleep(share: float) -> Callable[[np.ndarray], np.ndarray]:
        def wait(given: np.ndarray) -> np.ndarray:
            time.sleep(seconds * share * len(given) / BATCH)
            return given

        return wait

    class Rest(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            @tf.custom_gradient
            def through(given: Any) -> Any:
                def back(gradient: Any) -> Any:
                    return tf.ensure_shape(tf.numpy_function(sleep(2 / 3), [gradient], tf.float32), inputs.shape)

                return tf.ensure_shape(tf.numpy_function(sleep(1 / 3), [given], tf.float32), inputs.shape), back

            return through(inputs)

    return Rest(name="rest")


LOOK, DENSE = 0.2, 0.2
"""Seconds of a step of half the CPU servers' look-ups, and of half the accelerators' dense part."""
PLANS: dict[str, dict[str, Any]] = {
    "CPU only": {"look": LOOK / 2, "dense": 2.8 * DENSE, "cut": False},
    "accelerators only": {"look": 1.6 * LOOK, "dense": DENSE / 2, "cut": False},
    "accelerators only, look-ups ahead": {"look": 1.6 * LOOK, "dense": DENSE / 2, "cut": False, "ahead": True},
    "both, in turn": {"look": LOOK, "dense": DENSE},
    "both, look-ups ahead": {"look": LOOK, "dense": DENSE, "ahead": True},
    "both, 8 micro-batches": {"look": LOOK, "dense": DENSE, "micro_batch": 8},
    "both, look-ups ahead, staleness 1": {"look": LOOK, "dense": DENSE, "ahead": True, "staleness": 1},
}


def measure_overlap(quick: bool) -> Rows:
    """Seconds of a step of each plan with equal work."""
    log = generated_clicks(BATCH * (6 if quick else 14), vocabulary=100_000)
    distinct = statistics.mean(len(np.unique(log.ids[at : at + BATCH])) for at in range(0, len(log), BATCH))
    found: dict[str, float] = {}
    for name, plan in PLANS.items():
        with nb.init(links="10gbit,0ms", seed=1):
            layer = SplitEmbedding(WIDTH, optimizer="adagrad", staleness=plan.get("staleness", 0))
            (first,) = layer.layers
            table = SlowTable(WIDTH, make_row_optimizer("adagrad"), staleness=plan.get("staleness", 0))
            table.seconds = plan["look"] / distinct
            first.table = first.steps.table = table
            model = make_model(layer, cut=plan.get("cut", True), before=rest(plan["dense"]))
            data = tf.data.Dataset.from_tensor_slices((log.inputs, log.clicked)).batch(BATCH)
            data = look_ahead(data, layer) if plan.get("ahead") else data
            ends: list[float] = []
            tell = keras.callbacks.LambdaCallback(on_train_batch_end=_record_after_steps(ends, time.perf_counter))
            if plan.get("micro_batch"):
                with nb.pipeline(plan["micro_batch"], coupled="allow"):
                    model.fit(data, verbose=0, callbacks=[tell])
            else:
                model.fit(data, verbose=0, callbacks=[tell])
        found[name] = statistics.median(np.diff(ends)[2:])
    rows: Rows = []
    for name in PLANS:
        accelerators, cpus = (found[each] / found[name] for each in ("accelerators only", "CPU only"))
        said = f"{found[name]:.3f} s a step; {accelerators:.2f} x accelerators only, {cpus:.2f} x CPU only"
        both = name.startswith("both") and name != "both, in turn"
        ok = "reached" if accelerators >= 2.1 and cpus >= 3.3 else "missed"
        rows.append([name, said, "2.1 x, 3.3 x" if both else "", ok if both else ""])
    return rows


# ---------------------------------------------------------------------- memory
ROWS_HELD = 100_000_000


def measure_memory(quick: bool) -> Rows:
    """Two workers' shares of a table, in two processes at once, with as many rows as fit into memory."""
    fits = int(psutil.virtual_memory().available / (1.15 * 123))  # bytes a row, with a reserve
    count = 2_000_000 if quick else min(ROWS_HELD, fits)
    command = [sys.executable, str(HERE / "memory.py"), str(count)]
    started = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for n in (0, 1)]
    told = [json.loads(each.communicate(timeout=3600)[0]) for each in started]
    held, most = (sum(each[name] for each in told) for name in ("GiB", "most GiB"))
    tenths = np.mean([each["us a new row"] for each in told], axis=0)
    look_up = max(each["ms a look-up"] for each in told)
    said = (
        f"{held:.1f} GiB in two processes, {held * 2**30 / count:.0f} bytes a row, index included (at most {most:.1f})"
    )
    said += f"; a new row takes {tenths[0]:.2f} us of a CPU in the first tenth, {tenths[-1]:.2f} in the last"
    said += f", {tenths.max():.2f} where the index grows; {look_up:.1f} ms for a look-up of 4,096 ids"
    whole = sum(each["rows"] for each in told) == count == (2_000_000 if quick else ROWS_HELD)
    return [[f"{count:,} rows x 16 over two workers, SGD", said, f"{ROWS_HELD:,}", "reached" if whole else "missed"]]


# ---------------------------------------------------------------------- pace beside parameter servers
ROUNDS = 3


def measure_pace(quick: bool) -> Rows:
    """Rows a second of three processes, alternating with TensorFlow's three."""
    rows: Rows = []
    for batch, steps in ((512, 60 if quick else 150), (4096, 20 if quick else 60)):
        ours, theirs = [], []
        for _ in range(1 if quick else ROUNDS):
            theirs.append(_run_server(batch, steps))
            ours.append(_run_ours(batch, steps, 0))
        own, base = statistics.median(ours), statistics.median(theirs)
        said = f"{own / base:.2f} x ({own:,.0f} rows a second beside {base:,.0f})"
        rows.append([f"pace, batch {batch}", said, "1.5 x", verdict(own / base, 1.5, least=True)])
    return rows


def measure_workers(quick: bool) -> Rows:
    """Rows a second with one table over two workers of a cluster, alternating with two clusters with a table each."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 if quick else ROUNDS):
        for together, paces in found.items():
            paces.append(_run_ours(BATCH, 60 if quick else 150, 0, together=together))
    apart, one = (statistics.median(paces) for paces in found.values())
    said = f"{one / apart:.2f} x two clusters with a table each ({one:,.0f} rows a second beside {apart:,.0f})"
    return [[f"pace, batch {BATCH}, one table over two workers", said, "", ""]]


def _run_ours(batch: int, steps: int, staleness: int, *, together: bool = False) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "clusters.yaml"
        sizes = {"cpu": 2, "gpu": 1}
        clusters = {name: {"workers": [f"127.0.0.1:{free_port()}" for _ in range(n)]} for name, n in sizes.items()}
        config.write_text(json.dumps({"clusters": clusters}), "utf-8")
        where = ["--config", config] if together else ["--clusters", "cpu0,cpu1,gpu"]
        words = ["run", "--all", *where, HERE / "program.py", batch, steps, staleness, int(together)]
        command = [sys.executable, "-m", "whale_nebula", *map(str, words)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    lines = [line[line.index('{"rows a') :] for line in ended.stdout.splitlines() if '{"rows a' in line]
    if not lines:
        raise SystemExit(f"program.py ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    return float(json.loads(lines[0])["rows a second"])


def _run_server(batch: int, steps: int) -> float:
    cluster = json.dumps({job: [f"127.0.0.1:{free_port()}"] for job in ("chief", "worker", "ps")})
    command = [sys.executable, str(HERE / "server.py"), cluster]
    others = [subprocess.Popen([*command, job], stderr=subprocess.DEVNULL, cwd=ROOT) for job in ("worker", "ps")]
    try:
        last = [*command, "chief", str(batch), str(steps)]
        ended = subprocess.run(last, capture_output=True, text=True, timeout=240, cwd=ROOT)
    finally:
        for each in others:
            each.kill()
            each.wait()
    if ended.returncode:
        raise SystemExit(f"server.py ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    return float(json.loads(ended.stdout.splitlines()[-1])["rows a second"])


# ---------------------------------------------------------------------- what late updates cost
def measure_staleness(quick: bool) -> Rows:
    """AUC after the same rows, of three seeds, with deferred updates of rows."""
    count = 4000 if quick else 20_000
    found: dict[int, list[float]] = {0: [], 1: [], 4: []}
    for seed in range(1 if quick else 3):
        log = generated_clicks(count, vocabulary=1000, seed=seed)
        held = generated_clicks(12_000, vocabulary=1000, seed=seed, start=count)
        for staleness, scores in found.items():
            layer = HashedEmbedding(WIDTH, optimizer=adagrad(), staleness=staleness, seed=seed, name="table0")
            model = make_model(layer, cut=False)
            model.fit(log.inputs, log.clicked, BATCH, epochs=2, verbose=0, shuffle=False)
            layer.table.update()
            scores.append(auc(model.predict(held.inputs, verbose=0), held.clicked))
    noise = 2 * (statistics.stdev(found[0]) if len(found[0]) > 1 else 0.0)
    rows: Rows = []
    for staleness, scores in found.items():
        off = [one - zero for one, zero in zip(scores, found[0], strict=True)]
        said = f"AUC {statistics.mean(scores):.4f}; beside staleness 0 of its seed: "
        said += ", ".join(f"{each:+.4f}" for each in off) if staleness else f"(two deviations of seeds: {noise:.4f})"
        bar = verdict(abs(statistics.mean(off)), noise) if staleness else ""
        rows.append([f"staleness {staleness}", said, "noise of seeds" if staleness else "", bar])
    return rows


PARTS: dict[str, Callable[[bool], Rows]] = {
    "bytes": measure_bytes,
    "overlap": measure_overlap,
    "staleness": measure_staleness,
    "memory": measure_memory,
    "pace": measure_pace,
    "workers": measure_workers,
}


def draw(parts: dict[str, Rows]) -> None:
    """Bars of what crosses by table, and of a step's seconds by plan."""
    with picture(HERE / "recommender.svg", 2) as every:
        for axes, part, unit in zip(every, ("bytes", "overlap"), ("kB a step", "seconds a step"), strict=True):
            rows = parts.get(part, [])
            names, found = [row[0] for row in rows], [float(row[1].split()[0]) for row in rows]
            axes.barh(names, found, color="C0")
            axes.invert_yaxis()
            axes.set_xlabel(unit)


def main() -> None:
    """Measure, and write the results."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=list(PARTS))
    given = arguments.parse_args()
    path, about = HERE / "result.json", describe_machine()
    for part in [given.only] if given.only else list(PARTS):
        rows = PARTS[part](given.quick)
        for row in rows:
            print(*row, sep=" | ", flush=True)
        if given.quick:
            continue
        result = json.loads(path.read_text("utf-8")) if path.exists() else {"parts": {}}
        result["machine"], result["parts"][part] = about, rows
        table = [["what", "found", "bar", ""], *(row for part in PARTS for row in result["parts"].get(part, []))]
        write(__file__, result, table)
        draw(result["parts"])


if __name__ == "__main__":
    main()
