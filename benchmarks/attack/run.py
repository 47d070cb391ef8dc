"""A run over TLS through two gateways under attack: the speed of steps, memory, and admission of new workers.

    python benchmarks/attack/run.py               # ten minutes of attacks, in twelve minutes
    python benchmarks/attack/run.py --seconds 60  # one minute; writes nothing

All attacks run at once, for 50 of every 60 seconds; steps of the calm seconds are the reference.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import yaml

from benchmarks.attack.attacks import ATTACKS, RUN, WARM, Course
from benchmarks.common import describe_machine, verdict, write
from tests.unit.transport.crossing import free_address
from whale_nebula.security.authority import Authority, create
from whale_nebula.security.identity import Identity
from whale_nebula.security.issue import issue, renew_deny_list, revoke

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RATE, ON, OFF = "60mbit", 50.0, 10.0
SLOWER, MEMORY_MIB = 1.10, 64.0
GUARD_SECONDS = 1.5  # around each change, whose steps are not counted
NICE = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
CLI = (sys.executable, "-m", "whale_nebula.cli.main")


class Range:
    """The processes of the run and of the attackers, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[str]] = {}
        self.addresses = {name: free_address() for name in ("gpu", "npu", "gpu/0", "npu/0", "gpu/8", "npu/8")}
        workers = {name: {"workers": [self.addresses[f"{name}/0"]]} for name in ("gpu", "npu")}
        self.config("workers", workers)
        self.write("alone", {"clusters": workers})  # without attackers and line: the reference of the results
        self.config("gateways", {"gpu": {}, "npu": {}})  # they are not told how many workers there are
        certs = folder / "certs"
        authority = Authority.fresh(RUN, {})
        create(certs, authority)
        names = [f"{cluster}/{index}" for cluster in ("gpu", "npu") for index in (0, 7, 8, 9, "gateway")]
        identities = [Identity.of_worker(RUN, name) for name in names]
        made = issue(certs, authority, identities)
        renew_deny_list(certs, authority)
        revoke(certs, authority, [each.peer.serial for each in made if each.peer.identity.worker == "gpu/7"], "stolen")

    def config(self, name: str, clusters: Mapping[str, dict[str, Any]]) -> None:
        """Write a config with these clusters and both gateways."""
        both = {each: {**clusters[each], "gateway": self.addresses[each]} for each in clusters}
        links = [{"between": ["gpu", "npu"], "rate": RATE, "delay": "20ms"}]
        self.write(name, {"clusters": both, "links": links})

    def write(self, name: str, config: Mapping[str, Any]) -> None:
        """Write a config."""
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump({"run": RUN, "seed": 1, **config}))

    def start(self, name: str, command: list[str], told: Mapping[str, Any] | None = None) -> None:
        """Start a process with its output sent to a file."""
        out, err = ((self.folder / f"{name.replace('/', '-')}.{end}").open("w") for end in ("out", "err"))
        process = subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **NICE}, text=True, stdin=subprocess.PIPE,
            stdout=out, stderr=err, process_group=0,
        )  # fmt: skip
        self.started[name] = process
        if told is not None and process.stdin is not None:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()

    def out(self, name: str, end: str = "out") -> str:
        """The output of a process so far."""
        return (self.folder / f"{name.replace('/', '-')}.{end}").read_text()

    def wait(self, name: str, seconds: float) -> dict[str, Any]:
        """Wait for the end of a process; returns its JSON output."""
        code = self.started[name].wait(seconds)
        lines = [line for line in self.out(name).splitlines() if line.startswith("{")]
        if code or not lines:
            raise SystemExit(f"{name} ended with {code}:\n{self.out(name, 'err')[-4000:]}")
        return json.loads(lines[-1])

    def close(self) -> None:
        """End all processes."""
        for process in self.started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)

    def worker(self, cluster: str) -> int:
        """The process of a cluster's worker."""
        for child in psutil.Process(self.started[cluster].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "whale_nebula.launch.child" in " ".join(child.cmdline()):
                    return int(child.pid)
        return self.started[cluster].pid


class Memory:
    """Samples of processes' memory, once a second, in MiB."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self.seen: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(processes,), daemon=True)
        self._thread.start()

    def _look(self, processes: Mapping[str, int]) -> None:
        while not self._over.wait(1.0):
            for name, process in processes.items():
                with contextlib.suppress(psutil.Error):
                    held = psutil.Process(process).memory_info().rss / 2**20
                    self.seen[name].append((time.time(), held))

    def moved(self, course: Course) -> dict[str, float]:
        """The maximum during attacks minus the maximum of the first calm period."""
        self._over.set()
        self._thread.join()
        found = {}
        for name, seen in self.seen.items():
            calm = [held for at, held in seen if at < course.start + course.off]
            attacked = [held for at, held in seen if course.attacks(at)]
            found[name] = round(max(attacked) - max(calm), 1) if calm and attacked else float("nan")
        return found


@contextlib.contextmanager
def places() -> Iterator[Range]:
    """A folder with the processes in it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Range(Path(folder))
        try:
            yield made
        finally:
            made.close()


def train(found: Range, steps: int, config: str = "workers") -> None:
    """Start both clusters."""
    for cluster in ("gpu", "npu"):
        asked = ["--config", str(found.folder / f"{config}.yaml"), "--cluster", cluster]
        found.start(cluster, [*CLI, "run", *asked, str(HERE / "program.py"), str(steps)])


def gateways(found: Range) -> None:
    """Start both gateways, and wait until they listen."""
    for cluster in ("gpu", "npu"):
        asked = ["--config", str(found.folder / "gateways.yaml"), "--cluster", cluster]
        found.start(f"{cluster}/gateway", [*CLI, "gateway", *asked])
    limit = time.monotonic() + 60
    while not all("listens on" in found.out(f"{each}/gateway") for each in ("gpu", "npu")):
        if time.monotonic() > limit:
            raise SystemExit(found.out("gpu/gateway", "err"))
        time.sleep(0.1)


def step_seconds(began: list[float]) -> list[tuple[float, float]]:
    """The begin and duration of each step."""
    return [(one, other - one) for one, other in itertools.pairwise(began)]


def measure(seconds: float) -> dict[str, Any]:
    """One run under attack, and the same steps undisturbed."""
    with places() as found:
        gateways(found)
        train(found, 40)
        trial = [found.wait(cluster, 300) for cluster in ("gpu", "npu")]
        usual = statistics.median(took for _, took in step_seconds(trial[0]["began"])[5:])
        cycles = max(1, round(seconds / ON))
        lasts = cycles * (ON + OFF)
        steps = int((lasts + 5) / usual)
        print(f"{usual:.3f} s a step: {steps} steps, {lasts:g} s, {cycles * ON:g} s of them attacked", flush=True)
        train(found, steps)
        _await_steps(found)
        said = {
            "start": time.time(), "end": time.time() + lasts, "on": ON, "off": OFF,
            "certs": str(found.folder / "certs"),
            "gateway": found.addresses["gpu"], "other_gateway": found.addresses["npu"],
            "victim": found.addresses["gpu/8"], "flooder": found.addresses["npu/8"],
            "revoked": "gpu/7", "watcher": "npu/7",
            "audit": str(found.folder / "audit" / "gpu-gateway.jsonl"),
        }  # fmt: skip
        for name in (*ATTACKS, "join"):
            found.start(name, [sys.executable, str(HERE / "attacks.py"), name], said)
        course = Course(said)
        watched = {f"{each}/gateway": found.started[f"{each}/gateway"].pid for each in ("gpu", "npu")}
        watched |= {f"{each}/0": found.worker(each) for each in ("gpu", "npu")}
        memory = Memory({**watched, "a flooded peer": found.started["be_flooded"].pid})
        told = [found.wait(cluster, 3 * lasts + 120) for cluster in ("gpu", "npu")]
        done = {name: found.wait(name, 60) for name in (*ATTACKS, "join")}
        moved = memory.moved(course)
        train(found, steps, "alone")
        alone = found.wait("gpu", 1200)
        found.wait("npu", 60)
    return {
        "steps": steps,
        "attacked seconds": cycles * ON,
        **compare(course, told[0]["began"]),
        "memory moved, MiB": moved,
        "weights equal": [each["weights"] == alone["weights"] for each in told],
        "loss equal": [each["loss"] == alone["loss"] for each in told],
        "done": done,
    }


def _await_steps(found: Range) -> None:
    """Wait until the workers take steps."""
    limit = time.monotonic() + 120
    while WARM not in found.out("gpu"):
        if time.monotonic() > limit or found.started["gpu"].poll() is not None:
            raise SystemExit(f"gpu takes no steps:\n{found.out('gpu', 'err')[-4000:]}")
        time.sleep(0.2)
    time.sleep(1.0)


def compare(course: Course, began: list[float]) -> dict[str, Any]:
    """Median durations of steps in attacked and in calm seconds."""
    attacked, calm = [], []
    for at, took in step_seconds(began):
        around = [course.attacks(each) for each in (at - GUARD_SECONDS, at, at + took)]
        if course.start + 1 < at < course.end - GUARD_SECONDS and len(set(around)) == 1:
            (attacked if around[0] else calm).append(took)
    attacked_median, calm_median = (statistics.median(each) for each in (attacked, calm))
    return {
        "a step attacked, s": round(attacked_median, 4),
        "a step calm, s": round(calm_median, 4),
        "ratio": round(attacked_median / calm_median, 3),
        "steps compared": [len(attacked), len(calm)],
        "longest step attacked, s": round(max(attacked), 2),
    }


def main() -> int:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of attacks")
    chosen = parser.parse_args()
    found = measure(chosen.seconds)
    joined = found["done"]["join"]
    moved = max(found["memory moved, MiB"].values())
    rows = [
        ["a step, of calm ones", found["ratio"], f"≤ {SLOWER}", verdict(found["ratio"], SLOWER)],
        ["memory moved at most, MiB", moved, f"≤ {MEMORY_MIB:g}", verdict(moved, MEMORY_MIB)],
        [
            "newcomers let in while attacked",
            f"{len(joined['attacked'])}, the slowest in {max(joined['attacked'], default=0.0):.2f} s; "
            f"{len(joined['troubles'])} not",
            "all",
            verdict(len(joined["troubles"]), 0),
        ],
        ["weights and loss of the undisturbed run", found["weights equal"] + found["loss equal"], "the same bits",
         verdict(float(all(found["weights equal"] + found["loss equal"])), 1.0, least=True)],
    ]  # fmt: skip
    print(json.dumps(found, indent=2))
    for row in rows:
        print(*row, sep=" | ")
    if chosen.seconds >= 600:
        write(
            __file__,
            {"machine": describe_machine(), "rate": RATE, **found},
            [["", "measured", "bar", "verdict"], *rows],
        )
    return int(any(row[-1] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
