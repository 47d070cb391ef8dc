"""One-way pretraining: the cost of a slow line, the balance of generators and discriminators, and the bytes that cross.

    python benchmarks/pretrain/run.py             # what is missing of all rows: 15 minutes; root and /dev/net/tun
    python benchmarks/pretrain/run.py --table     # what there is so far
    python benchmarks/pretrain/run.py --quick     # one short row of each kind; writes nothing

Each result is a line of results.jsonl at once: it can be interrupted, and continued with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, read_finished_runs, verdict, write
from two_sites import CLI, ROOT, run

from whale_nebula.launch.placement import free_port

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
SHARE_BAR, STEP_BAR, BYTES_BAR, DEADLINE = 0.97, 1.10, 1.01, 900
SLOW = {"60 Mbit/s, 20 ms": "60mbit 20ms", "170 Mbit/s, 20 ms": "170mbit 20ms"}
LINES = [{"kind": "line", "generators": count, "line": line} for line in SLOW for count in (1, 2, 3)]
ROUTED = [
    {"kind": "routed", "generators": 1, "discriminators": 8, "rows": 200, "generator": 0.1, "discriminator": 0.8,
     "micro_batch": 200, "warm": 2, "steps": 4},
    *({"kind": "routed", "generators": count, "discriminators": 1, "rows": 60, "generator": 0.15 * count,
       "discriminator": 0.15, "micro_batch": 60 // count, "warm": 2, "steps": 4} for count in (1, 2, 3)),
]  # fmt: skip
Found = dict[str, Any]


def measure_over_line(case: Found, *, quick: bool) -> Found:
    """Run generators in sites that feed a discriminator in another site, over a free and a slow line alternately."""
    names = [f"g{number}" for number in range(case["generators"])]
    with tempfile.TemporaryDirectory() as folder:
        follow = Path(folder) / "line"
        script = [str(HERE / "program.py"), "--line", str(follow), "--slow", SLOW[case["line"]], "--generators", *names]
        script += ["--rows", "12", "--length", "16", "--width", "32", "--pairs", "2"] if quick else []
        told, crossed = run(("100gbit", "0ms"), script, Path(folder), follow=follow, names=(*names, "discriminator"))
    sites = {each["site"]: each for each in told}
    if len({json.dumps(each["losses"]) for each in told}) > 1:
        raise SystemExit(f"sites do not agree on the losses: {told}")
    slowest = max(told, key=lambda each: sum(each["seconds"]["free"]))["seconds"]
    links = [sites[name]["links"][f"{name}->discriminator"] for name in names]
    sent = {
        "payload": max(link[0] / sites[name]["due"] for name, link in zip(names, links, strict=True)),
        "frames": max(link[1] / sites[name]["due"] for name, link in zip(names, links, strict=True)),
        "bits": 8 * links[0][0] / sites[names[0]]["tokens"],
    }
    return {**case, "free": slowest["free"], "slow": slowest["slow"], "sent": sent, "crossed": crossed}


def measure_routing(case: Found, *, quick: bool) -> Found:
    """The same with sleeping instead of computing, so that the ideal is known."""
    case = {**case, "steps": 2} if quick else case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clusters.yaml"
        clusters = {f"g{number}": 1 for number in range(case["generators"])} | {"npu": case["discriminators"]}
        named = {
            name: {"workers": [f"127.0.0.1:{free_port()}" for _ in range(count)]} for name, count in clusters.items()
        }
        path.write_text(yaml.safe_dump({"seed": 1, "clusters": named}, sort_keys=False))
        ended = subprocess.run(
            [*CLI, "run", "--all", "--config", str(path), str(HERE / "routed.py"), json.dumps(case)],
            capture_output=True, text=True, timeout=DEADLINE, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{case} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"site"')]
    return {**case, "seconds": max((each["seconds"] for each in told), key=sum)}


def matches_case(found: Found, case: Found) -> bool:
    """Whether a row belongs to this case."""
    return all(found.get(name) == value for name, value in case.items())


def make_line_row(case: Found, found: list[Found]) -> list[object]:
    """The table's row for a line."""
    what = f"{case['generators']} generator{'s' * (case['generators'] > 1)}, {case['line']}"
    own = [each for each in found if matches_case(each, case)]
    if not own:
        return [what, *["not measured"] * 5]
    pairs = [pair for each in own for pair in zip(each["free"], each["slow"], strict=True)]
    shares = sorted(free / slow for free, slow in pairs)
    share, free, slow = statistics.median(shares), *(statistics.median(each) for each in zip(*pairs, strict=True))
    sent = own[-1]["sent"]
    said = f"{sent['bits']:.2f} bits, {sent['payload']:.4f}, {sent['frames']:.4f}"
    numbers = [f"{free:.3f} s, {slow:.3f} s", round(share, 3), f"{shares[0]:.3f} to {shares[-1]:.3f}"]
    return [what, *numbers, verdict(share, SHARE_BAR, least=True), said]


def make_routed_row(case: Found, found: list[Found]) -> list[object]:
    """The table's row for generators and discriminators that sleep."""
    what = f"{case['generators']} : {case['discriminators']}"
    each = case["rows"] / case["generators"] * case["generator"]
    ideal = max(each, case["rows"] * case["discriminator"] / case["discriminators"])
    own = next((row for row in found if matches_case(row, case)), None)
    if own is None:
        return [what, round(ideal, 3), *["not measured"] * 3]
    step = statistics.median(own["seconds"])
    return [what, round(ideal, 3), round(step, 3), round(step / ideal, 3), verdict(step / ideal, STEP_BAR)]


def write_tables(found: list[Found]) -> None:
    """Write both tables of the results so far."""
    head: list[object] = [
        "what",
        "a step, free and slow",
        "share",
        "of all pairs",
        "",
        "a token; payload, frames beside the least",
    ]
    result = {
        "machine": describe_machine(),
        "bars": {"share": SHARE_BAR, "step": STEP_BAR, "bytes": BYTES_BAR},
        "rows": len(found),
    }
    write(__file__, result, [head, *(make_line_row(case, found) for case in LINES)])
    head = ["generators : discriminators", "ideal, s", "a step, s", "by the ideal", ""]
    write(__file__, result, [head, *(make_routed_row(case, found) for case in ROUTED)], "routed")


def main() -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--quick", action="store_true", help="one short row of each kind; writes nothing")
    parser.add_argument("--only", choices=("line", "routed"), help="rows of this kind")
    chosen = parser.parse_args()
    measure = {"line": measure_over_line, "routed": measure_routing}
    if chosen.quick:
        print(measure_over_line(LINES[-1], quick=True), measure_routing(ROUTED[2], quick=True), sep="\n")
        return
    for case in () if chosen.table else (*LINES, *ROUTED):
        if chosen.only in (None, case["kind"]) and not any(
            matches_case(each, case) for each in read_finished_runs(RESULTS)
        ):
            row = measure[case["kind"]](case, quick=False)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row)[:400], flush=True)
    write_tables(read_finished_runs(RESULTS))


if __name__ == "__main__":
    main()
