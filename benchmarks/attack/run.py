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

from benchmarks.attack.attacks import ATTACKS, RUN, STEPS_STARTED, AttackSchedule
from benchmarks.common import describe_machine, verdict, write
from tests.unit.transport.grpc_workers import find_free_address
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


class AttackedRun:
    """The processes of the run and of the attackers, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[str]] = {}
        self.addresses = {name: find_free_address() for name in ("gpu", "npu", "gpu/0", "npu/0", "gpu/8", "npu/8")}
        workers = {name: {"workers": [self.addresses[f"{name}/0"]]} for name in ("gpu", "npu")}
        self.write_gateway_config("workers", workers)
        self.write_config("alone", {"clusters": workers})  # without attackers and line: the reference of the results
        self.write_gateway_config("gateways", {"gpu": {}, "npu": {}})  # they are not told how many workers there are
        certs = folder / "certs"
        authority = Authority.create(RUN, {})
        create(certs, authority)
        names = [f"{cluster}/{index}" for cluster in ("gpu", "npu") for index in (0, 7, 8, 9, "gateway")]
        identities = [Identity.of_worker(RUN, name) for name in names]
        certificates = issue(certs, authority, identities)
        renew_deny_list(certs, authority)
        revoke(
            certs,
            authority,
            [each.peer.serial for each in certificates if each.peer.identity.worker == "gpu/7"],
            "stolen",
        )

    def write_gateway_config(self, name: str, clusters: Mapping[str, dict[str, Any]]) -> None:
        """Write a config with these clusters and both gateways."""
        both = {each: {**clusters[each], "gateway": self.addresses[each]} for each in clusters}
        links = [{"between": ["gpu", "npu"], "rate": RATE, "delay": "20ms"}]
        self.write_config(name, {"clusters": both, "links": links})

    def write_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Write a config."""
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump({"run": RUN, "seed": 1, **config}))

    def start(self, name: str, command: list[str], stdin_json: Mapping[str, Any] | None = None) -> None:
        """Start a process with its output sent to a file."""
        out, err = ((self.folder / f"{name.replace('/', '-')}.{end}").open("w") for end in ("out", "err"))
        process = subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **NICE}, text=True, stdin=subprocess.PIPE,
            stdout=out, stderr=err, process_group=0,
        )  # fmt: skip
        self.started[name] = process
        if stdin_json is not None and process.stdin is not None:
            process.stdin.write(json.dumps(stdin_json) + "\n")
            process.stdin.flush()

    def read_output(self, name: str, end: str = "out") -> str:
        """The output of a process so far."""
        return (self.folder / f"{name.replace('/', '-')}.{end}").read_text()

    def wait(self, name: str, seconds: float) -> dict[str, Any]:
        """Wait for the end of a process; returns its JSON output."""
        code = self.started[name].wait(seconds)
        lines = [line for line in self.read_output(name).splitlines() if line.startswith("{")]
        if code or not lines:
            raise SystemExit(f"{name} ended with {code}:\n{self.read_output(name, 'err')[-4000:]}")
        return json.loads(lines[-1])

    def close(self) -> None:
        """End all processes."""
        for process in self.started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)

    def find_worker(self, cluster: str) -> int:
        """The process of a cluster's worker."""
        for child in psutil.Process(self.started[cluster].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "whale_nebula.launch.child" in " ".join(child.cmdline()):
                    return int(child.pid)
        return self.started[cluster].pid


class Memory:
    """Samples of processes' memory, once a second, in MiB."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(processes,), daemon=True)
        self._thread.start()

    def _sample(self, processes: Mapping[str, int]) -> None:
        while not self._over.wait(1.0):
            for name, process in processes.items():
                with contextlib.suppress(psutil.Error):
                    resident = psutil.Process(process).memory_info().rss / 2**20
                    self.samples[name].append((time.time(), resident))

    def measure_growth(self, schedule: AttackSchedule) -> dict[str, float]:
        """The maximum during attacks minus the maximum of the first calm period."""
        self._over.set()
        self._thread.join()
        growth = {}
        for name, samples in self.samples.items():
            calm = [resident for at, resident in samples if at < schedule.start + schedule.off]
            attacked = [resident for at, resident in samples if schedule.is_attacked(at)]
            growth[name] = round(max(attacked) - max(calm), 1) if calm and attacked else float("nan")
        return growth


@contextlib.contextmanager
def open_run() -> Iterator[AttackedRun]:
    """A folder with the processes in it."""
    with tempfile.TemporaryDirectory() as folder:
        run = AttackedRun(Path(folder))
        try:
            yield run
        finally:
            run.close()


def start_training(run: AttackedRun, steps: int, config: str = "workers") -> None:
    """Start both clusters."""
    for cluster in ("gpu", "npu"):
        arguments = ["--config", str(run.folder / f"{config}.yaml"), "--cluster", cluster]
        run.start(cluster, [*CLI, "run", *arguments, str(HERE / "program.py"), str(steps)])


def start_gateways(run: AttackedRun) -> None:
    """Start both gateways, and wait until they listen."""
    for cluster in ("gpu", "npu"):
        arguments = ["--config", str(run.folder / "gateways.yaml"), "--cluster", cluster]
        run.start(f"{cluster}/gateway", [*CLI, "gateway", *arguments])
    limit = time.monotonic() + 60
    while not all("listens on" in run.read_output(f"{each}/gateway") for each in ("gpu", "npu")):
        if time.monotonic() > limit:
            raise SystemExit(run.read_output("gpu/gateway", "err"))
        time.sleep(0.1)


def list_step_seconds(started_at: list[float]) -> list[tuple[float, float]]:
    """The begin and duration of each step."""
    return [(one, other - one) for one, other in itertools.pairwise(started_at)]


def measure(seconds: float) -> dict[str, Any]:
    """One run under attack, and the same steps undisturbed."""
    with open_run() as run:
        start_gateways(run)
        start_training(run, 40)
        warm_up = [run.wait(cluster, 300) for cluster in ("gpu", "npu")]
        usual_seconds = statistics.median(duration for _, duration in list_step_seconds(warm_up[0]["began"])[5:])
        cycles = max(1, round(seconds / ON))
        total_seconds = cycles * (ON + OFF)
        steps = int((total_seconds + 5) / usual_seconds)
        print(
            f"{usual_seconds:.3f} s a step: {steps} steps, {total_seconds:g} s, {cycles * ON:g} s of them attacked",
            flush=True,
        )
        start_training(run, steps)
        _await_steps(run)
        settings = {
            "start": time.time(), "end": time.time() + total_seconds, "on": ON, "off": OFF,
            "certs": str(run.folder / "certs"),
            "gateway": run.addresses["gpu"], "other_gateway": run.addresses["npu"],
            "victim": run.addresses["gpu/8"], "flooder": run.addresses["npu/8"],
            "revoked": "gpu/7", "watcher": "npu/7",
            "audit": str(run.folder / "audit" / "gpu-gateway.jsonl"),
        }  # fmt: skip
        for name in (*ATTACKS, "join"):
            run.start(name, [sys.executable, str(HERE / "attacks.py"), name], settings)
        schedule = AttackSchedule(settings)
        watched = {f"{each}/gateway": run.started[f"{each}/gateway"].pid for each in ("gpu", "npu")}
        watched |= {f"{each}/0": run.find_worker(each) for each in ("gpu", "npu")}
        memory = Memory({**watched, "a flooded peer": run.started["be_flooded"].pid})
        results = [run.wait(cluster, 3 * total_seconds + 120) for cluster in ("gpu", "npu")]
        done = {name: run.wait(name, 60) for name in (*ATTACKS, "join")}
        growth = memory.measure_growth(schedule)
        start_training(run, steps, "alone")
        undisturbed = run.wait("gpu", 1200)
        run.wait("npu", 60)
    return {
        "steps": steps,
        "attacked seconds": cycles * ON,
        **compare(schedule, results[0]["began"]),
        "memory moved, MiB": growth,
        "weights equal": [each["weights"] == undisturbed["weights"] for each in results],
        "loss equal": [each["loss"] == undisturbed["loss"] for each in results],
        "done": done,
    }


def _await_steps(run: AttackedRun) -> None:
    """Wait until the workers take steps."""
    limit = time.monotonic() + 120
    while STEPS_STARTED not in run.read_output("gpu"):
        if time.monotonic() > limit or run.started["gpu"].poll() is not None:
            raise SystemExit(f"gpu takes no steps:\n{run.read_output('gpu', 'err')[-4000:]}")
        time.sleep(0.2)
    time.sleep(1.0)


def compare(schedule: AttackSchedule, started_at: list[float]) -> dict[str, Any]:
    """Median durations of steps in attacked and in calm seconds."""
    attacked, calm = [], []
    for at, duration in list_step_seconds(started_at):
        around = [schedule.is_attacked(each) for each in (at - GUARD_SECONDS, at, at + duration)]
        if schedule.start + 1 < at < schedule.end - GUARD_SECONDS and len(set(around)) == 1:
            (attacked if around[0] else calm).append(duration)
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
    options = parser.parse_args()
    result = measure(options.seconds)
    join_times = result["done"]["join"]
    growth = max(result["memory moved, MiB"].values())
    rows = [
        ["a step, of calm ones", result["ratio"], f"≤ {SLOWER}", verdict(result["ratio"], SLOWER)],
        ["memory moved at most, MiB", growth, f"≤ {MEMORY_MIB:g}", verdict(growth, MEMORY_MIB)],
        [
            "newcomers let in while attacked",
            f"{len(join_times['attacked'])}, the slowest in {max(join_times['attacked'], default=0.0):.2f} s; "
            f"{len(join_times['troubles'])} not",
            "all",
            verdict(len(join_times["troubles"]), 0),
        ],
        ["weights and loss of the undisturbed run", result["weights equal"] + result["loss equal"], "the same bits",
         verdict(float(all(result["weights equal"] + result["loss equal"])), 1.0, least=True)],
    ]  # fmt: skip
    print(json.dumps(result, indent=2))
    for row in rows:
        print(*row, sep=" | ")
    if options.seconds >= 600:
        write(
            __file__,
            {"machine": describe_machine(), "rate": RATE, **result},
            [["", "measured", "bar", "verdict"], *rows],
        )
    return int(any(row[-1] == "missed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
