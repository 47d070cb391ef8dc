"""Ten random kills in a run of some ten minutes: two sites behind gateways, over a line of 60 Mbit/s and 20 ms.

    python benchmarks/recovery/random_kills.py             # some twelve minutes, root (tools/wan.py)
    python benchmarks/recovery/random_kills.py --kills 2   # fewer; writes nothing

Each site is a network namespace. A supervisor (`--site`) starts a gateway and `whale-nebula run`, and restarts each
whenever it ends early. Victims and times are random: a worker, both workers at once, a gateway, a launcher, or all of a
site. The run must end with the weights of an undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import yaml
from common import describe_machine, write

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
CLI = [sys.executable, "-m", "whale_nebula.cli.main"]
SITES = ("gpu", "npu")
STEPS, STEP_PAUSE, KILLS, PAUSE_RANGE, DEADLINE = 1100, 0.25, 10, (25.0, 55.0), 1500.0
VICTIMS = ("a worker", "both workers", "a gateway", "a launcher", "a whole site")


# ---------------------------------------------------------------------- what stands at a site
def supervise_site(cluster: str, folder: str) -> int:
    """Keep a gateway and a launcher running until the launcher succeeds; runs in a process of the site."""
    named = ["--config", f"{folder}/clusters.yaml", "--cluster", cluster]
    commands = {
        "gateway": [*CLI, "gateway", *named],
        "run": [
            *CLI,
            "run",
            *named,
            str(HERE.with_name("random_kills_worker.py")),
            "saved",
            str(STEPS),
            str(STEP_PAUSE),
        ],
    }
    home = Path(folder, cluster)  # as on a separate host
    home.mkdir()
    running: dict[str, subprocess.Popen[bytes]] = {}
    while True:
        for name, command in commands.items():
            process = running.get(name)
            if process is not None and process.poll() is None:
                continue
            if name == "run" and process is not None and process.returncode == 0:
                running["gateway"].terminate()
                running["gateway"].wait()
                return 0
            with open(f"{folder}/{cluster}.{name}.txt", "ab") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=home)
        time.sleep(0.2)


# ---------------------------------------------------------------------- who is killed
def find(folder: str, cluster: str) -> dict[str, list[psutil.Process]]:
    """The processes of a site: its gateway, its launcher, and its worker."""
    found: dict[str, list[psutil.Process]] = {"gateway": [], "launcher": [], "worker": []}
    for process in psutil.process_iter():
        try:
            words, home = " ".join(process.cmdline()), process.cwd()
        except psutil.Error:
            continue
        if f"{folder}/clusters.yaml --cluster {cluster}" in words and "whale_nebula.cli.main" in words:
            found["gateway" if " gateway " in words else "launcher"].append(process)
        elif "whale_nebula.launch.child" in words and home == f"{folder}/{cluster}":
            found["worker"].append(process)
    return found


def kill(draw: random.Random, folder: str) -> str:
    """Kill a random victim; returns its name, or "" if it did not exist at the moment."""
    what, site = draw.choice(VICTIMS), draw.choice(SITES)
    there = {name: find(folder, name) for name in SITES}
    chosen = {
        "a worker": there[site]["worker"],
        "both workers": [each for name in SITES for each in there[name]["worker"]],
        "a gateway": there[site]["gateway"],
        "a launcher": there[site]["launcher"],
        "a whole site": [each for kind in there[site].values() for each in kind],
    }[what]
    for process in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return f"{what}{'' if what == 'both workers' else f' ({site})'}" if chosen else ""


def find_last_line(path: Path, word: str) -> str:
    """The last line of a site's output with this word."""
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if word in line] if path.exists() else []
    return lines[-1].strip() if lines else ""


def run(kills: int, seed: int) -> dict[str, Any]:
    """One run; returns the victims, the duration, and the final digest."""
    draw, killed = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        clusters = {
            name: {"workers": [f"10.77.0.{number}:7101"], "gateway": f"10.77.0.{number}:7100"}
            for number, name in enumerate(SITES, 1)
        }
        config = {"run": "ten", "seed": 1, "clusters": clusters, "restarts": {"most": 20, "wait": "1s"}}
        Path(folder, "clusters.yaml").write_text(yaml.safe_dump(config))
        for words in (["init"], ["issue", "--all"]):
            asked = [*CLI, "certs", *words, "--config", f"{folder}/clusters.yaml", "--folder", f"{folder}/certs"]
            subprocess.run(asked, check=True, capture_output=True, cwd=ROOT)
        sites = [[sys.executable, str(HERE), "--site", name, "--folder", folder] for name in SITES]
        wan = [sys.executable, str(ROOT / "tools" / "wan.py"), "--rate", "60mbit", "--delay", "20ms", "--"]
        began = time.monotonic()
        with open(f"{folder}/wan.txt", "wb") as log:
            process = subprocess.Popen([*wan, *sites[0], "---", *sites[1]], stdout=log, stderr=log)
        due = began + draw.uniform(*PAUSE_RANGE)
        while process.poll() is None and time.monotonic() < began + DEADLINE:
            if len(killed) < kills and time.monotonic() >= due:
                what = kill(draw, folder)
                if what:
                    killed.append(what)
                    at = find_last_line(Path(folder, "gpu.run.txt"), "at step ")
                    print(f"{time.monotonic() - began:.0f} s, {at}: {what} is killed", flush=True)
                due = time.monotonic() + draw.uniform(*PAUSE_RANGE)
            time.sleep(0.2)
        seconds, ended = time.monotonic() - began, process.poll()
        digests = {find_last_line(Path(folder, f"{name}.run.txt"), "weights ").split("weights ")[-1] for name in SITES}
        if ended != 0 or len(digests) != 1:
            process.kill()
            raise SystemExit(f"ended with {ended}: {digests}\n" + Path(folder, "gpu.run.txt").read_text()[-3000:])
    return {"killed": killed, "seconds": seconds, "digest": digests.pop()}


def main() -> int:
    """Measure, print and write the result."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=KILLS)
    arguments.add_argument("--seed", type=int, default=1, help="of what is killed when")
    arguments.add_argument("--site", help=argparse.SUPPRESS)
    arguments.add_argument("--folder", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.site:
        return supervise_site(given.site, given.folder)
    found = run(given.kills, given.seed)
    command = [sys.executable, str(HERE.with_name("random_kills_worker.py")), "-", str(STEPS), "0"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    expected = next(line.split("weights ")[-1].strip() for line in said.splitlines() if "weights " in line)
    same = "the same" if expected == found["digest"] else "ANOTHER"
    print(f"{len(found['killed'])} kills in {found['seconds']:.0f} s; weights are {same} as undisturbed")
    if given.kills == KILLS:
        rows = [
            ["killed, in this order", "seconds", "steps", "weights, beside one process that nobody disturbed"],
            [", ".join(found["killed"]), f"{found['seconds']:.0f}", STEPS, f"{same} bits"],
        ]
        write(__file__, {"machine": describe_machine(), **found, "expected": expected}, rows, part="random_kills")
    return 0 if expected == found["digest"] else 1


if __name__ == "__main__":
    sys.exit(main())
