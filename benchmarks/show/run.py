"""The cost of `whale-nebula show` on a transformer of a hundred layers, beyond TensorFlow's own tracing.

    python benchmarks/show/run.py            # everything; writes result.json and the README's table
    python benchmarks/show/run.py --quick    # eight blocks, to see that it runs; writes nothing

The model is traced and captured once. From the captured step on, the plan is made three times, and written as text, as
a page and as JSON; the median counts, in seconds of one core.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
from common import describe_machine, parser, verdict, write

import whale_nebula as nb
from whale_nebula.models import Sizes, transformer
from whale_nebula.runtime import planning

BLOCKS, QUICK = 100, 8
ROUNDS = 3
SHOW_BAR, PAGE_BAR = 10.0, 2_000_000


def build_model(blocks: int) -> keras.Model:
    """Half of the blocks in one cluster and half in the other, four micro-batches, Adam."""
    sizes = Sizes(vocabulary=1000, length=32, width=64, heads=4, blocks=blocks)
    with nb.cluster(), nb.pipeline(micro_batch=4):
        made = transformer(sizes, around=lambda block: nb.stage(cluster="gpu" if block < blocks // 2 else "npu"))
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def time_call(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> tuple[float, Any]:
    """The duration of a function, and its result; it is Python in one thread, so a core's time is measured."""
    start = clock()
    found = work()
    return clock() - start, found


def measure_show(blocks: int) -> dict[str, Any]:
    """Trace once; then plan, write and draw."""
    nb.init(links="60mbit,20ms")
    rows = np.zeros((32, 32), "int32")
    model = build_model(blocks)
    recorded_arguments: list[Any] = []
    original_plan_step = planning.plan_step

    def record_and_plan(*arguments: Any) -> nb.Plan:
        recorded_arguments.append(arguments)
        return original_plan_step(*arguments)

    planning.plan_step = record_and_plan  # nb.plan calls it once a step is captured
    total_seconds, plan = time_call(lambda: nb.plan(model, rows, rows))
    planning.plan_step = original_plan_step
    plan_seconds = [time_call(lambda: original_plan_step(*recorded_arguments[0]))[0] for _ in range(ROUNDS)]
    wall_seconds, _ = time_call(lambda: original_plan_step(*recorded_arguments[0]), time.perf_counter)
    seconds_by_format = {name: time_call(write)[0] for name, write in _list_writers(plan).items()}
    planning_s = statistics.median(plan_seconds)
    return {
        "blocks": blocks,
        "ops": len(recorded_arguments[0][1].program.graph),
        "traced_s": round(total_seconds - plan_seconds[0], 2),
        "planned_s": round(planning_s, 3),
        "planned_wall_s": round(wall_seconds, 3),
        **{f"{name}_s": round(took, 3) for name, took in seconds_by_format.items()},
        "show_s": round(planning_s + seconds_by_format["text"], 3),
        "show_verdict": verdict(planning_s + seconds_by_format["text"], SHOW_BAR),
        "page_bytes": len(plan.to_html().encode()),
        "page_verdict": verdict(len(plan.to_html().encode()), PAGE_BAR),
        "json_bytes": len(plan.to_json().encode()),
    }


def _list_writers(plan: nb.Plan) -> dict[str, Callable[[], str]]:
    return {"text": plan.to_text, "page": plan.to_html, "json": plan.to_json}


def list_table_rows(found: dict[str, Any]) -> Sequence[Sequence[object]]:
    """The rows of the README's table."""
    return [
        ["what", "measured", "bar", ""],
        [f"tracing and capturing {found['ops']:,} ops", f"{found['traced_s']:.1f} s", "", ""],
        ["from there to the plan", f"{found['planned_s']:.2f} s", "", ""],
        ["the plan as text", f"{found['text_s']:.3f} s", "", ""],
        ["show, beyond tracing", f"{found['show_s']:.2f} s", f"≤ {SHOW_BAR:.0f} s", found["show_verdict"]],
        ["the plan as a page", f"{found['page_s']:.3f} s", "", ""],
        ["size of the page", f"{found['page_bytes'] / 1e3:.0f} kB", "≤ 2,000 kB", found["page_verdict"]],
        ["the plan as JSON", f"{found['json_s']:.3f} s, {found['json_bytes'] / 1e3:.0f} kB", "", ""],
    ]


def main() -> None:
    """Measure and write the result."""
    quick = parser(__doc__, f"{QUICK} blocks; writes nothing").parse_args().quick
    here = describe_machine()
    found = measure_show(QUICK if quick else BLOCKS)
    print(found, flush=True)
    if not quick:
        write(__file__, {"machine": here, **found}, list_table_rows(found))


if __name__ == "__main__":
    main()
