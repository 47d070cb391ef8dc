"""Experts on two workers: equality with the dense reference, cost, and gain in loss.

    python benchmarks/experts/run.py           # eight minutes
    python benchmarks/experts/run.py --quick   # one seed, few steps, nothing written

Timed contenders are started once and alternate, forward and back (A B C C B A); each process has one compute thread.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from whale_nebula.launch import spawn  # noqa: E402

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
PARTS = ("exact", "cost", "language")
CLOSE, COSTLY, SEEDS, STEPS = 1e-6, 1.15, (1, 2, 3), 800
DEADLINE = 300


@contextlib.contextmanager
def start_contender(name: str, *words: str) -> Iterator[tuple[str, Any]]:
    """Start a contender's two processes; yields the first one's description, and the sockets to both."""
    env = {**QUIET, "PYTHONPATH": f"{HERE}:{ROOT}"}
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(DEADLINE)
        script = [
            "-m",
            "whale_nebula.launch.child",
            str(HERE / "contender.py"),
            name,
            str(door.getsockname()[1]),
            *words,
        ]
        stack.enter_context(spawn(script, {"a/0": "a", "a/1": "a"}, seed=1, env=env))
        lines = [stack.enter_context(stack.enter_context(door.accept()[0]).makefile("rw")) for _ in range(2)]
        said = [line.readline() for line in lines]
        yield said[0], lines


def ask(lines: Any, steps: int) -> list[Any]:
    """Let both processes run `steps` steps; returns the answer of each."""
    for line in lines:
        line.write(f"{steps}\n")
        line.flush()
    return [json.loads(line.readline()) for line in lines]


def compare() -> list[list[object]]:
    """The difference between two workers' outputs and the dense reference, relative to its largest entry."""
    import numpy as np
    from contender import CASES, make_layers, make_tokens
    from reference import compute_dense

    with start_contender("exact") as (_, lines):
        told = ask(lines, 1)
    rows = []
    for number, options in enumerate(CASES):
        (layer,), x = make_layers(options, 1, 16, 32), make_tokens(16, 12, 16).numpy()
        expected, dropped = compute_dense(layer, x)
        far = max(np.abs(np.asarray(each[number]) - expected).max() for each in told) / np.abs(expected).max()
        said = ", ".join(f"{name}={options[name]}" for name in ("k", "capacity_factor", "row_groups"))
        rows.append(
            [
                f"two workers beside the dense reference: {said}",
                f"{dropped:.0%} dropped",
                f"{far:.1e}",
                common.verdict(far, CLOSE),
            ]
        )
    return rows


def measure(steps: int, rounds: int) -> tuple[dict[str, float], list[str]]:
    """The median step of each contender, in seconds, and the bytes of one of the experts'."""
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        about, experts = stack.enter_context(start_contender("experts"))
        crossing = json.loads(about)
        teams = {"experts": experts}
        teams |= {"dense": stack.enter_context(start_contender("dense"))[1]}
        teams |= {"collectives": stack.enter_context(start_contender("collectives", *crossing))[1]}
        for lines in teams.values():
            ask(lines, 3)
        for _ in range(rounds):
            for name in (*teams, *reversed(teams)):
                found.setdefault(name, []).extend(map(max, zip(*ask(teams[name], steps), strict=True)))
            print({name: round(1e3 * median(each), 1) for name, each in found.items()}, flush=True)
    return {name: round(median(each), 4) for name, each in found.items()}, crossing


def compare_seconds(seconds: dict[str, float]) -> list[list[object]]:
    """A step relative to one of the dense layers and to the collectives."""
    beside = seconds["dense"] + seconds["collectives"]
    ratio = seconds["experts"] / beside
    return [
        ["a step of the experts", "", f"{1e3 * seconds['experts']:.0f} ms", ""],
        [
            "one of dense layers of as much arithmetic, half of the tokens on each worker",
            "",
            f"{1e3 * seconds['dense']:.0f} ms",
            "",
        ],
        ["the collectives of the plan, alone", "", f"{1e3 * seconds['collectives']:.0f} ms", ""],
        [f"experts beside dense and collectives, {COSTLY} at most", "", f"{ratio:.2f}", common.verdict(ratio, COSTLY)],
    ]


def learn(seeds: Sequence[int], steps: int) -> dict[str, list[list[tuple[int, float]]]]:
    """The curves of the language models, dense and with experts, seed by seed."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from language import train

    found: dict[str, list[list[tuple[int, float]]]] = {"dense": [], "experts": []}
    for seed in seeds:
        for name, curves in found.items():
            curves.append(list(train(name == "experts", seed, steps)))
            print(f"seed {seed}, {name}: {curves[-1][-1][1]:.3f} bits a byte", flush=True)
    return found


def rank(curves: dict[str, list[list[tuple[int, float]]]]) -> list[list[object]]:
    """The last held-out losses, seed by seed."""
    last = {name: [curve[-1][1] for curve in each] for name, each in curves.items()}
    won = all(ours < theirs for ours, theirs in zip(last["experts"], last["dense"], strict=True))
    said = {name: " ".join(f"{value:.3f}" for value in each) for name, each in last.items()}
    verdict = "reached" if won else "missed"
    return [
        ["held-out bits a byte, dense, seed by seed", "", said["dense"], ""],
        ["eight experts, seed by seed; fewer with each", "", said["experts"], verdict],
    ]


def draw(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """The curves of all seeds, and their means."""
    with common.picture(path, size=(6, 3.4)) as (axes,):
        for (name, each), colour in zip(curves.items(), ("tab:gray", "tab:blue"), strict=True):
            steps = [number for number, _ in each[0]][1:]
            for curve in each:
                axes.plot(steps, [loss for _, loss in curve][1:], color=colour, alpha=0.35, linewidth=0.8)
            means = [fmean(losses) for losses in zip(*([loss for _, loss in curve][1:] for curve in each), strict=True)]
            axes.plot(steps, means, color=colour, label={"experts": "8 experts"}.get(name, name))
        axes.set(xlabel="step", ylabel="held-out bits a byte")


def main() -> None:
    parser = common.parser(__doc__, "one seed, few steps, nothing written")
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, help="these parts alone; the others stay as they were measured"
    )
    asked = parser.parse_args()
    parts = asked.only or PARTS
    found: dict[str, Any] = {"machine": common.describe_machine()}
    if "exact" in parts:
        found["exact"] = {"rows": compare()}
    if "cost" in parts:
        seconds, crossing = measure(*((4, 1) if asked.quick else (8, 3)))
        found["cost"] = {"rows": compare_seconds(seconds), "seconds": seconds, "crossing": crossing}
    if "language" in parts:
        curves = learn(SEEDS[:1] if asked.quick else SEEDS, 100 if asked.quick else STEPS)
        found["language"] = {"rows": rank(curves), "curves": curves}
    path = HERE / "result.json"
    if not asked.quick and path.exists():
        found = {**json.loads(path.read_text("utf-8")), **found}
    rows = [["what", "", "", ""], *(row for part in PARTS if part in found for row in found[part]["rows"])]
    for row in rows:
        print(*row, sep=" | ")
    if not asked.quick:
        common.write(__file__, found, rows)
        if "language" in parts:
            draw(curves, HERE / "curves.svg")


if __name__ == "__main__":
    main()
