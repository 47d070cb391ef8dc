"""Train a model by a plan, and report the planner's prediction; prediction.py and grid.py start it.

It runs in one process with an emulated line (--line), or in each site by `whale-nebula run`. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whale_nebula.launch import attach

if (own := attach()) is not None:  # pin each cluster to its own core, before TensorFlow starts
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[own.workers.index(own.worker) % len(cores)]})

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.hardware import measurements
from whale_nebula.models import BertSizes, Translator
from whale_nebula.models.transformer import Sizes, transformer
from whale_nebula.planner.costs import Costs
from whale_nebula.planner.explanation import stage_names
from whale_nebula.planner.problem import Candidate, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import SearchResult, search
from whale_nebula.runtime import decisions
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step import clock

CLUSTERS = ("gpu", "npu")
SKIPPED = 3
COUNTS_TENSORS = os.environ.get("TF_CPU_ALLOCATOR_USE_BFC") == "true"
"""Whether TensorFlow counts what it allocates on a CPU, as it does on a GPU."""
Made = tuple[keras.Model, Any, Any, str]
"""A model, a batch of inputs and targets, and its loss."""


def make_transformer(rows: int, scale: int = 1) -> Made:
    """A language model of six blocks."""
    sizes = Sizes(2000, 32, 192 * scale, 4, 6)
    draw = np.random.default_rng(2)
    tokens, targets = (draw.integers(0, 2000, (rows, 32), dtype="int32") for _ in range(2))
    return transformer(sizes), tokens, targets, "words"


def make_translator(rows: int, scale: int = 1) -> Made:
    """An encoder and a decoder of three layers each."""
    sizes = BertSizes(vocabulary=1500, length=24, width=192 * scale, heads=4, layers=3, inner=512 * scale, dropout=0.0)
    draw = np.random.default_rng(2)
    source, target, words = (draw.integers(1, 1500, (rows, 24), dtype="int32") for _ in range(3))
    return Translator(sizes, sizes, tied=False), {"source": source, "target": target}, words, "words"


def make_convolutions(rows: int, scale: int = 1) -> Made:
    """Eight convolutions and a classifier."""
    found: list[keras.Layer] = [keras.Input((24, 24, 3))]
    for width in (24, 24, 48, 48, 96, 96, 96, 96):
        found.append(
            keras.layers.Conv2D(width * scale, 3, strides=1 + (width != 24) * (len(found) in (3, 5)), padding="same")
        )
        found.append(keras.layers.ReLU())
    model = keras.Sequential([*found, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    draw = np.random.default_rng(2)
    images = draw.standard_normal((rows, 24, 24, 3)).astype("float32")
    return model, images, draw.integers(0, 10, rows), "words"


def make_classes(rows: int, scale: int = 1) -> Made:
    """A few dense layers and a very large number of classes."""
    dense = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *dense, keras.layers.Dense(20_000 * scale)])
    draw = np.random.default_rng(2)
    return model, draw.standard_normal((rows, 256)).astype("float32"), draw.integers(0, 20_000 * scale, rows), "words"


MODELS: dict[str, tuple[Callable[..., Made], int]] = {
    "transformer": (make_transformer, 32),
    "translator": (make_translator, 32),
    "convolutions": (make_convolutions, 64),
    "classes": (make_classes, 64),
}


def build_manual_plan(problem: Problem, plan: str) -> tuple[Problem, Shape]:
    """A manual plan, and the problem with its schedule: "0.5,4" has half of the computation in the first cluster, and 4
    micro-batches; "0.5,4,gpipe" has another schedule, and "one" runs on one device.
    """
    blocks = len(problem.chain)
    if plan == "one":
        return problem, Shape((Part(0, 0, blocks),))
    share, count, *schedules = plan.split(",")
    options = replace(problem.options, schedules=tuple(schedules) or problem.options.schedules)
    costs = problem.clusters[0]
    taken = np.cumsum((costs.forward + costs.backward)[0] + problem.rows * (costs.forward + costs.backward)[1])
    cuts = [cut for cut in range(1, blocks) if problem.chain.cuttable[cut]]
    cut = min(cuts, key=lambda each: abs(taken[each - 1] / taken[-1] - float(share)))
    return replace(problem, options=options), Shape((Part(0, 0, cut), Part(1, cut, blocks)), int(count))


def force_plan(plan: str) -> None:
    """Make the planner choose a manual plan."""

    def choose(problem: Problem, most: int = 8, **others: Any) -> SearchResult:
        found = score(*build_manual_plan(problem, plan))
        return SearchResult((found,)) if isinstance(found, Candidate) else SearchResult((), found)

    decisions.search = choose if plan != "planner" else search


def predict_plans(problem: Problem, chosen: Candidate, plans: Sequence[str]) -> dict[str, Any]:
    """The predicted seconds of manual plans, and those of them that are the `chosen` plan, on whichever clusters."""
    found = {plan: score(*build_manual_plan(problem, plan)) for plan in plans}
    fit = {plan: each for plan, each in found.items() if isinstance(each, Candidate)}
    same = [plan for plan, each in fit.items() if describe_division(each) == describe_division(chosen)]
    return {"seconds": {plan: each.seconds for plan, each in fit.items()}, "same": same}


def describe_division(candidate: Candidate) -> tuple[object, ...]:
    """The stages of a plan without their clusters, its micro-batches, and its schedule if there are several."""
    stages = [(part.end, part.replicas, part.shards) for part in candidate.parts]
    count = candidate.shape.micro_batches
    return stages, count, candidate.shape.recompute, candidate.schedule if count > 1 else ""


class Timer(keras.callbacks.Callback):
    """Callback that keeps the report of every step, and the time between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Any] = []
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Record the end of a step."""
        self.reports.append(nb.last_report())
        self.ends.append(time.perf_counter())
        if batch == SKIPPED:
            Path("/proc/self/clear_refs").write_text("5")
            if COUNTS_TENSORS:
                tf.config.experimental.reset_memory_stats("CPU:0")


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scale", type=int, default=1, help="so many times as wide")
    parser.add_argument("--rows", type=int, default=1, help="so many times as many rows")
    parser.add_argument("--line", help="emulate this line in one process")
    parser.add_argument("--processor", action="store_true", help="time pieces by what the process computes")
    parser.add_argument("--timeline", action="store_true", help="print the spans of a step, too")
    parser.add_argument("--predict", nargs="+", metavar="PLAN", help="print predictions of these plans; train nothing")
    a = parser.parse_args()
    keras.utils.set_random_seed(1)
    if a.processor:
        time_by_processor()
    if a.line is not None:
        rate, _, delay = a.line.partition(",")
        link = {"between": list(CLUSTERS)} | ({"rate": rate, "delay": delay} if rate != "free" else {})
        measured = {"measure": "300s"} if a.processor else {}  # of which a busy machine may give this process little
        nb.init({"clusters": {name: {} for name in CLUSTERS}, "links": [link], **measured})
    make, rows = MODELS[a.model]
    force_plan(a.plan)
    nb.auto_parallel()
    model, x, y, _ = make(rows * a.rows, a.scale)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if a.predict:
        stages = nb.plan(model, x, y).considered[0].stages
        (decision,) = current_run().decisions
        told = predict_plans(decision.problem, decision.chosen, a.predict)
        chosen = {
            "planner": decision.chosen.seconds,
            "chosen": stages,
            "share_measured": decision.predicted.share_measured,
        }
        print(json.dumps({"site": nb.here().cluster, **chosen, **told}), flush=True)
        return
    began, base = time.perf_counter(), _memory("VmRSS")
    options = tf.data.Options()
    options.autotune.enabled = False  # the end of an iterator seems to wait for its tuning thread
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(a.steps).with_options(options)
    timer = Timer()
    model.fit(dataset, epochs=1, verbose=0, callbacks=[timer])
    decision = current_run().decisions[0]
    chosen, reports = decision.chosen, timer.reports[SKIPPED:]
    seconds = [each.step_seconds for each in reports]
    low, middle, high = statistics.quantiles(seconds, n=4)
    walls = np.diff(timer.ends[SKIPPED:])
    count = chosen.shape.micro_batches
    told = {
        "site": nb.here().cluster,
        "predicted": decision.seconds_here,
        "measured": middle, "low": low, "high": high, "wall": float(np.median(walls)),
        "planned_in": timer.ends[0] - began,
        "shape": repr(replace(chosen.shape)),
        "stages": [part.end for part in chosen.parts], "micro_batches": count, "binds": decision.considered[0].binds,
        "share_measured": decision.predicted.share_measured,
        "compute_predicted": [each * count for each in chosen.compute],
        "update_predicted": [
            float(decision.problem.clusters[part.cluster].update[part.begin : part.end].sum()) for part in chosen.parts
        ],
        "compute_measured": {
            name: statistics.median(each.stages[name].compute_seconds or 0.0 for each in reports)
            for name in reports[-1].stages
        },
        "parts_predicted": predict_parts(decision), "parts_measured": sum_parts(reports),
        "schedule": chosen.schedule, "in_flight": chosen.in_flight,
        "by_report": reports[-1].predicted_seconds,
        "memory_predicted": dict(decision.predicted.memory),
        "memory_measured": _memory("VmHWM") - base, "memory_most": _memory("VmHWM"),
        "tensors_most": tf.config.experimental.get_memory_info("CPU:0")["peak"] if COUNTS_TENSORS else 0,
        "variables": {name: each.variable_bytes for name, each in reports[-1].workers.items()},
        "bytes_predicted": dict(chosen.bytes),
        "bytes_measured": {name: each.bytes for name, each in reports[-1].links.items()},
    }  # fmt: skip
    if a.timeline:
        told["spans"] = [[s.lane, s.what, s.start, s.end, s.bytes] for s in reports[len(reports) // 2].spans]
    print(json.dumps(told), flush=True)


def predict_parts(decision: Any) -> dict[str, float]:
    """Predicted seconds of a step of each stage: its forwards, backwards, gradients of weights and update."""
    problem, chosen, found = decision.problem, decision.chosen, {}
    costs = Costs(problem, chosen.shape.micro_batches, chosen.shape.recompute)
    for part, name in zip(chosen.parts, stage_names(problem, chosen.parts), strict=True):
        turns = chosen.shape.micro_batches / part.replicas
        forward, backward = costs.part_seconds(part)
        later = costs.part_deferred_seconds(part) if chosen.schedule == "zero-bubble" else 0.0
        seconds = {"forward": turns * forward, "backward": turns * (backward - later), "weights": turns * later}
        found |= {f"{name} {what}": each for what, each in seconds.items() if each}
        found[f"{name} handling"] = turns * sum(costs.part_handling(part))
        found[f"{name} update"] = costs.part_update(part)
        found[f"{name} step"] = problem.clusters[part.cluster].step
    return found


def time_by_processor() -> None:
    """Time pieces of steps and blocks by this process's computing time: on one core that is their duration on an idle
    machine, without waits.
    """
    clock.time = measurements.time = SimpleNamespace(perf_counter=time.process_time, monotonic=time.monotonic)


def sum_parts(reports: Sequence[Any]) -> dict[str, float]:
    """The median seconds of a step in each lane of the reports' timelines, by kind of work."""
    steps = []
    for report in reports:
        found = defaultdict[str, float](float)
        for span in report.spans:
            found[f"{span.lane} {span.what.split()[0]}"] += span.end - span.start
        steps.append(found)
    return {what: statistics.median(each[what] for each in steps) for what in {what for each in steps for what in each}}


def _memory(name: str) -> int:
    """The process's memory in bytes: current (VmRSS) or peak (VmHWM)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


if __name__ == "__main__":
    main()
