"""ABNet across two clusters: every row of Nebula-I's Table 5 and Figure 10, and ours.

    python benchmarks/abnet/run.py --text FOLDER          # what is missing: language models, then rows, then times
    python benchmarks/abnet/run.py --text FOLDER --row none int4 --seed 1
    python benchmarks/abnet/run.py --text FOLDER --table  # run nothing

Rows train over a free line, in single-threaded processes; results are kept, so it can be interrupted and continued.
Seconds are those of two separate hosts joined by a slow line (root and /dev/net/tun), with mutual TLS.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import experiment
from common import describe_machine, read_finished_runs, write
from one import options
from rows import ROWS
from separate_processes import one_thread, run_all, start_script
from tables import differences, plot, table
from two_sites import FREE, run

HERE = Path(__file__).resolve().parent
RESULTS, TIMES = HERE / "results.jsonl", HERE / "times.json"
LIMIT = 3600.0
TIMED = ("none", "fp16", "svd9", "svd6", "svd2", "int4z", "axes-2.25")
TIMED += ("topk", "learned2", "shared4", "learned4", "learned8")
LINK_TO_COMPUTE, TIMED_STEPS = 30, 9
Found = dict[str, Any]


# ---------------------------------------------------------------------- running
def pretrain_models(asked: argparse.Namespace) -> None:
    """Pretrain the missing language models that the rows need, both sides at once."""
    for name in sorted({experiment.setting(ROWS[row], asked.steps).pretrained for row in asked.row}):
        command = [sys.executable, str(HERE / "pretrain.py"), *shared_options(asked)]
        folder = experiment.folder_of(asked.kept, name)
        sides = [side for side in experiment.SIDES if not (folder / side / "config.json").exists()]
        running = [subprocess.Popen([*command, side, name], env=one_thread()) for side in sides]
        if any(process.wait() for process in running):
            raise SystemExit("a language model could not be pretrained")


def shared_options(asked: argparse.Namespace) -> list[str]:
    """The options that all parts share."""
    words = ["--text", str(asked.text.resolve()), "--languages", *asked.languages, "--test", asked.test]
    return [*words, "--kept", str(asked.kept.resolve())]


def run_rows(asked: argparse.Namespace) -> None:
    """Run the missing rows, several at a time."""
    done = {(each["row"], each["seed"]) for each in read_finished_runs(RESULTS)}
    pairs = [(name, seed) for seed in asked.seed for name in asked.row if seed in ROWS[name].seeds]
    words = ["--steps", asked.steps, *shared_options(asked)]

    def start(pair: tuple[str, int]) -> subprocess.Popen[str]:
        return start_script([HERE / "one.py", *pair, *words])

    run_all([pair for pair in pairs if pair not in done], start, record_result, jobs=asked.jobs, limit=LIMIT)


def record_result(pair: tuple[str, int], process: subprocess.Popen[str]) -> None:
    """Keep the result of a run."""
    out, _ = process.communicate()
    if process.returncode:
        print(*pair, f"failed ({process.returncode})", flush=True)
        return
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(out.strip().splitlines()[-1] + "\n")
    found = json.loads(out.strip().splitlines()[-1])
    print(*pair, f"BLEU {found['bleu']}, {found['seconds']} s, {found['curve']}", flush=True)


# ---------------------------------------------------------------------- timing
def time_steps(name: str, line: tuple[str, str], asked: argparse.Namespace, folder: Path, steps: int) -> Found:
    """Time some steps of a row in two sites."""
    script = [str(HERE / "site.py"), name, "--timed", str(steps), *shared_options(asked)]
    told_of = {} if line == FREE else {"rate": line[0], "delay": line[1]}
    link = {"between": ["source", "target"], **told_of}
    sites, _ = run(line, script, folder, names=("source", "target"), links=[link])
    return {
        "step": max(each["step"] for each in sites),
        "predicted": max(each["predicted"] for each in sites),
        "computes": sum(each["computes"] for each in sites),
        "links": {key: value for each in sites for key, value in each["links"].items()},
        "raw": {key: value for each in sites for key, value in each["raw"].items()},
    }


def run_times(asked: argparse.Namespace) -> None:
    """Time a step over a free line, then each row over a line that takes 30 times as long."""
    kept: Found = json.loads(TIMES.read_text("utf-8")) if TIMES.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "free" not in kept:
            kept["free"] = time_steps("none", FREE, asked, folder, TIMED_STEPS)
        most = max(kept["free"]["links"].values())
        rate = 8 * most / (LINK_TO_COMPUTE * kept["free"]["step"])
        kept["line"] = [f"{rate / 1e3:.0f}kbit", "20ms"]
        for row in TIMED:
            if row not in kept:
                kept[row] = time_steps(row, tuple(kept["line"]), asked, folder, TIMED_STEPS)
                print(row, kept[row], flush=True)
                TIMES.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


def main() -> int:
    """Run what is requested, and print the results so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time", action="store_true", help="time the steps over a slow line; wants a quiet machine")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if not asked.table:
        pretrain_models(asked)
        run_rows(asked)
        if asked.time:
            run_times(asked)
    runs = read_finished_runs(RESULTS)
    times = json.loads(TIMES.read_text("utf-8")) if TIMES.exists() else {}
    said = differences(asked, runs)
    print(*said, sep="\n")
    plot(runs, times, HERE)
    write(
        __file__, {"machine": describe_machine(), "runs": runs, "times": times, "differences": said}, table(runs, times)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
