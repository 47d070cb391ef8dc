"""Fine-tuning a BERT that is cut in two in the basis of a layer's singular vectors: by layer and rank, with
alternatives.

    python benchmarks/understand/run.py              # what is missing of all rows: half an hour
    python benchmarks/understand/run.py --only svd   # of one contender
    python benchmarks/understand/run.py --table      # what there is so far
    python benchmarks/understand/run.py --quick      # two steps of each contender; writes nothing

Each result is a line of results.jsonl at once: it can be interrupted, and continued with the same command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import describe_machine, picture, read_finished_runs, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
TASKS, RANKS, LAST_BUT_ONE, SEEDS = {"opinion": "accuracy", "similar": "pearson"}, (4, 8, 16, 32), 2, (1, 2, 3)
LOWEST = (1, 2)
SAID = {
    "removed": "svd, residual removed",
    "axes": "axes >> coded, bytes of this rank",
    "lora": "in a by-pass, the frozen path does not cross",
}
WIDTH, LAYERS = 96, 4
WHOLE = 4 * WIDTH * 28 * 32  # bytes of a batch: 32 rows of 28 tokens
CONTENDERS = ("svd int4", "svd int8", "removed", "learned", "shared", "axes", "lora")
PAIRED = ("lora", "learned", "shared", "axes")  # contenders of three seeds, besides "svd" and "removed"
Row = tuple[str, str, int, int, int]
Found = dict[str, Any]


def list_wanted() -> Iterator[Row]:
    """All rows, the most informative first: (task, contender, layer, rank, seed)."""
    yield from _of_three_seeds((8,))
    for task in TASKS:
        for contender, rank in (*(("svd int4", rank) for rank in LOWEST), *(("svd", rank) for rank in LOWEST)):
            yield task, contender, LAST_BUT_ONE, rank, 1
        for contender in CONTENDERS:
            yield task, contender, LAST_BUT_ONE, 8, 1
        for layer in (0, 1, 3):
            for rank in RANKS:
                yield task, "svd", layer, rank, 1
    yield from _of_three_seeds((16, 4, 32))
    for seed, task, contender in product(SEEDS, TASKS, PAIRED):
        yield task, contender, LAST_BUT_ONE, 8, seed


def _of_three_seeds(ranks: Sequence[int]) -> Iterator[Row]:
    for seed in SEEDS:
        for task in TASKS:
            yield task, "uncut", -1, 0, seed
            for rank in ranks:
                yield task, "svd", LAST_BUT_ONE, rank, seed
            yield task, "removed", LAST_BUT_ONE, 8, seed


def key(found: Found) -> Row:
    """The identity of a row."""
    return found["task"], found["contender"], found["layer"], found["rank"], found["seed"]


def run_missing(rows: Sequence[Row]) -> None:
    """Run the rows one after the other, and save each."""
    from benchmarks.understand.tuning import language_model, tune

    weights, words = language_model(ROOT / "build")
    for row in rows:
        began = time.monotonic()
        found = tune(*row, weights, words)
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(*row, found[TASKS[row[0]]], found["loss"][-1], f"{time.monotonic() - began:.0f} s", flush=True)


def run_quick() -> None:
    """Run two steps of each contender, and print the results."""
    from benchmarks.understand.tuning import QUICK, language_model, tune

    weights, words = language_model(ROOT / "build", QUICK)
    for contender in ("uncut", "svd", *CONTENDERS):
        print(tune("opinion", contender, LAST_BUT_ONE, 8, 1, weights, words, QUICK), flush=True)


def worth(found: Sequence[Found], *start: object) -> str:
    """The score in per cent of the rows with this prefix, with the spread over seeds."""
    own = [100 * each[TASKS[each["task"]]] for each in found if key(each)[: len(start)] == start]
    if len(own) < 2:
        return f"{own[0]:.1f}" if own else "not measured"
    return f"{statistics.mean(own):.1f} ± {statistics.stdev(own):.1f} ({len(own)})"


def fewer(found: Sequence[Found], contender: str, rank: int) -> str:
    """The compression ratio in both directions, relative to float32 of the whole width."""
    own = next((e for e in found if (e["contender"], e["rank"]) == (contender, rank) and "there" in e), None)
    return "not measured" if own is None else ", ".join(f"{WHOLE / own[way]:.1f}" for way in ("there", "back"))


def tabulate_layers(found: Sequence[Found], task: str) -> list[list[object]]:
    """The score by the layer of the cut and its rank."""
    head: list[object] = [
        f"{task} ({TASKS[task]}): cut after layer",
        *(f"H/{WIDTH // rank}" for rank in RANKS),
        "uncut",
    ]
    lines = [head]
    for layer in range(LAYERS):
        cells = [worth(found, task, "svd", layer, rank) for rank in RANKS]
        lines.append([f"{layer + 1} of {LAYERS}", *cells, worth(found, task, "uncut")])
    return lines


def tabulate_scores(found: Sequence[Found]) -> list[list[object]]:
    """All contenders in the second to last layer."""
    cases = [("svd", rank) for rank in (*LOWEST, *RANKS)] + [("svd int4", rank) for rank in LOWEST]
    cases += [(name, 8) for name in CONTENDERS]
    lines: list[list[object]] = [["what crosses", "rank", "fewer bytes there, back", *TASKS]]
    lines.append(["uncut", "", "1, 1", *(worth(found, task, "uncut") for task in TASKS)])
    for name, rank in cases:
        scores = [worth(found, task, name, LAST_BUT_ONE, rank) for task in TASKS]
        lines.append([SAID.get(name, name), rank, fewer(found, name, rank), *scores])
    return lines


def draw(found: Sequence[Found]) -> None:
    """Plot the score by the layer of the cut, a line for each rank; bars are of three seeds."""
    with picture(HERE / "layers.svg", len(TASKS)) as every:
        for axes, (task, score) in zip(every, TASKS.items(), strict=True):
            for shade, rank in enumerate(RANKS):
                own = [[100 * each[score] for each in found if key(each)[:4] == (task, "svd", layer, rank)]
                       for layer in range(LAYERS)]  # fmt: skip
                means = [statistics.mean(each) for each in own]
                spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in own]
                at = [layer + 1 + 0.04 * (shade - 1.5) for layer in range(LAYERS)]
                axes.errorbar(at, means, spread, color=f"C{shade}", marker="o", capsize=2, label=f"H / {WIDTH // rank}")
            uncut = statistics.mean(100 * each[score] for each in found if key(each)[:2] == (task, "uncut"))
            axes.axhline(uncut, color="black", linestyle="--", linewidth=1, label="uncut")
            axes.set(xlabel="cut in layer", ylabel=score, title=task)
            axes.set_xticks(range(1, LAYERS + 1))


def main() -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--quick", action="store_true", help="two steps of each contender; writes nothing")
    parser.add_argument("--only", help="one contender")
    parser.add_argument("--task", choices=list(TASKS))
    options = parser.parse_args()
    if options.quick:
        run_quick()
        return
    if not options.table:
        done = {key(each) for each in read_finished_runs(RESULTS)}
        rows = [row for row in dict.fromkeys(list_wanted()) if row not in done]
        rows = [row for row in rows if options.only in (None, row[1]) and options.task in (None, row[0])]
        run_missing(rows)
    found = read_finished_runs(RESULTS)
    result = {"machine": describe_machine(), "rows": len(found), "wanted": len(set(list_wanted()))}
    for task in TASKS:
        write(__file__, result, tabulate_layers(found, task), task)
    write(__file__, result | {"found": found}, tabulate_scores(found))
    draw(found)


if __name__ == "__main__":
    main()
