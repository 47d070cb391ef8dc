"""Equality of training in two sites and in one process, bit for bit.

    python benchmarks/equality/run.py    # needs root and /dev/net/tun

Each site is a network namespace (tools/wan.py), in which `whale-nebula run` trains the models of tests/parity/zoo.py;
they are trained in this process too, by the same plans.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
from common import describe_machine, write

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.parity_harness import Cut
from tests.processes.worker_reports import count_sent_bytes, encode_outcome, parse_reports

ROOT = Path(__file__).resolve().parents[2]
LINE = ("--rate", "60mbit", "--delay", "20ms")
CUT, SEED, DEADLINE = (2, 3), 5, 1800
CLUSTERS = ("c0", "c1")
PARTS = ("losses", "history", "gradients", "weights", "outputs")


def name_case(name: str) -> str:
    """A model with its stages and micro-batches, as the worker script names it."""
    return f"{name},{CUT[0]},{CUT[1]}"


def train_in_sites(folder: Path) -> list[Mapping[str, Any]]:
    """The results of the models in each of the two sites."""
    cli = [sys.executable, "-m", "whale_nebula.cli.main"]
    clusters = {name: {"workers": [f"10.77.0.{n}:7101"]} for n, name in enumerate(CLUSTERS, start=1)}
    config = folder / "clusters.yaml"
    config.write_text(yaml.safe_dump({"run": "equal", "seed": SEED, "clusters": clusters}))
    for command in (["init"], ["issue", "--all"]):
        certs_command = [*cli, "certs", *command, "--config", str(config), "--folder", str(folder / "certs")]
        subprocess.run(certs_command, check=True, capture_output=True)
    worker = str(ROOT / "tests" / "processes" / "workers" / "train.py")
    script = [worker, "train_zoo", *map(name_case, ZOO)]
    commands = [
        ["sh", "-c", 'exec "$@" > ' + str(folder / name), "sh", *cli, "run", "--config", str(config), "--cluster", name]
        for name in CLUSTERS
    ]
    wan = [sys.executable, str(ROOT / "tools" / "wan.py"), *LINE, "--"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*wan, *commands[0], *script, "---", *commands[1], *script],
        check=True, cwd=ROOT, env=environment, timeout=DEADLINE,
    )  # fmt: skip
    return [parse_reports((folder / name).read_text("utf-8")) for name in CLUSTERS]


def train_in_this_process(name: str) -> dict[str, Any]:
    """The results of a model in this process, and the bytes of its last step on the emulated line."""
    nb.shutdown()
    keras.utils.set_random_seed(SEED)
    with nb.init(links="10gbit,0ms"):
        return {**encode_outcome(ZOO[name].run(Cut(*CUT))), "sent": count_sent_bytes()}


def compare_model(name: str, sites: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A row: which parts of a model's results are bit-identical everywhere."""
    expected, key = train_in_this_process(name), name_case(name)
    differ = [part for part in PARTS if any(site[key][part] != expected[part] for site in sites)]
    sent_bytes = {link: count for site in sites for link, count in site[f"{key} sent"].items() if count[0]}
    if sent_bytes != expected["sent"]:
        differ.append("bytes")
    return {
        "model": name,
        "weights": len(expected["weights"]),
        "bytes": sum(count[0] for count in sent_bytes.values()),
        "differ": ", ".join(differ) or "nothing",
        "verdict": "missed" if differ else "equal",
    }


def main() -> int:
    """Train everywhere, compare, write."""
    with tempfile.TemporaryDirectory() as folder:
        sites = train_in_sites(Path(folder))
    rows = [compare_model(name, sites) for name in ZOO]
    for row in rows:
        print(row)
    keys = ("model", "weights", "bytes", "differ", "verdict")
    result = {"machine": describe_machine(), "line": " ".join(LINE), "cut": CUT, "rows": rows}
    write(__file__, result, [keys, *([row[key] for key in keys] for row in rows)])
    return int(any(row["verdict"] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
