"""Common parts of benchmarks over a slow line: two or more sites on one machine, each running a script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from common import describe_machine, parser, write

ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = ("gpu", "npu")
FREE = ("100gbit", "0ms")
DEADLINE = 1800
CLI = (sys.executable, "-m", "whale_nebula.cli.main")
Line = tuple[str, str]
Rows = list[dict[str, Any]]


def sites(
    line: Line, commands: Sequence[Sequence[str]], follow: Path | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a command in each of two or more sites; returns the JSON output of each ('{"site": ...'), and the bytes of
    the line.

    The line may `follow` a file, which a site rewrites.
    """
    rate, delay = line
    wan = [sys.executable, str(ROOT / "tools" / "wan.py"), "--rate", rate, "--delay", delay]
    wan += ["--follow", str(follow), "--"] if follow else ["--"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*wan, *commands[0], *(word for command in commands[1:] for word in ("---", *command))],
        capture_output=True, text=True, timeout=DEADLINE, env=environment, cwd=ROOT,
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{commands[0][:6]} over {line} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    told = [json.loads(each) for each in ended.stdout.splitlines() if each.startswith('{"site"')]
    return told, json.loads(ended.stderr.splitlines()[-1])["links"]


def run(
    line: Line,
    script: Sequence[str],
    folder: Path,
    *,
    gateways: bool = False,
    follow: Path | None = None,
    names: Sequence[str] = CLUSTERS,
    **config: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a script in all clusters over a line, with certificates; `config` is added to the sites' config."""
    path = folder / "clusters.yaml"
    clusters: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names, start=1):
        clusters[name] = {"workers": [f"10.77.0.{number}:7101"]}
        clusters[name] |= {"gateway": f"10.77.0.{number}:7100"} if gateways else {}
    path.write_text(yaml.safe_dump({"run": "bench", "seed": 1, "clusters": clusters, **config}))
    for command in () if (folder / "certs").exists() else (["init"], ["issue", "--all"]):
        asked = [*CLI, "certs", *command, "--config", str(path), "--folder", str(folder / "certs")]
        subprocess.run(asked, check=True, capture_output=True, cwd=ROOT)
    return sites(line, [_command(path, name, script, gateways) for name in names], follow)


def _command(path: Path, cluster: str, script: Sequence[str], gateways: bool) -> list[str]:
    """The command of a site: the worker, and a gateway if there are any."""
    named = ["--config", str(path), "--cluster", cluster]
    worker = [*CLI, "run", *named, *script]
    if not gateways:
        return worker
    gateway = shlex.join([*CLI, "gateway", *named])
    return ["sh", "-c", f"{gateway} >&2 & g=$!; {shlex.join(worker)}; c=$?; kill $g; wait $g; exit $c"]


def run_benchmark(
    script: str,
    about: str | None,
    *,
    whole: Callable[[int, int], Rows],
    quick: Callable[[], Rows],
    quick_help: str,
    steps: int,
    shape: Mapping[str, int],
    keys: Sequence[str],
) -> int:
    """The `main` of a benchmark by rows: measure (steps, rounds), print and write; with --quick only a little."""
    made = parser(about, f"{quick_help}; writes nothing")
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--rounds", type=int, default=3)
    chosen = made.parse_args()
    if chosen.quick:
        print(*quick(), sep="\n")
        return 0
    rows = whole(chosen.steps, chosen.rounds)
    result = {
        "machine": describe_machine(),
        "shape": shape,
        "steps": chosen.steps,
        "rounds": chosen.rounds,
        "rows": rows,
    }
    write(script, result, [keys, *([row.get(key, "") for key in keys] for row in rows)])
    return int(any(row.get("verdict") == "missed" for row in rows))
