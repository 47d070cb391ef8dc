"""Two sites behind gateways, of which all processes are killed in turn: the run ends with the bits of an undisturbed
one.

The test acts as the supervisor of each site: it restarts what ended, by the same command.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes.sites import DEADLINE, SEED, Sites, prepare_sites
from tests.processes.worker_runs import FinishedRun, run_workers
from whale_nebula.launch.placement import free_port

WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
SITES = ("c0", "c1")
EPOCHS, STEPS_PER_EPOCH, PAUSE = 12, 6, 0.15


# ---------------------------------------------------------------------- targets
def kill_worker(found: Sites, cluster: str) -> None:
    os.kill(found[cluster].worker_pid, signal.SIGKILL)


def kill_workers(found: Sites, *clusters: str) -> None:
    for worker in [each for cluster in clusters for each in found[cluster].workers]:
        worker.kill()


def kill_gateway(found: Sites, cluster: str) -> None:
    found.gateways[cluster].process.kill()
    found.gateways[cluster].process.wait(DEADLINE)
    found.start_gateway(cluster)


def kill_launcher(found: Sites, *clusters: str) -> None:
    """Kill the launchers; their workers end by themselves."""
    workers = [each for cluster in clusters for each in found[cluster].workers]
    for cluster in clusters:
        found[cluster].process.kill()
        found[cluster].process.wait(DEADLINE)
    _, left = psutil.wait_procs(workers, DEADLINE)
    assert not left, left
    for cluster in clusters:
        found.restart(cluster)


def kill_cluster(found: Sites, *clusters: str) -> None:
    """Kill all processes of the clusters, as a loss of power does."""
    kill_workers(found, *clusters)
    for cluster in clusters:
        found.gateways[cluster].process.kill()
        found.gateways[cluster].process.wait(DEADLINE)
    for cluster in clusters:
        found.start_gateway(cluster)
    kill_launcher(found, *clusters)


TARGETS: Mapping[str, Callable[[Sites], None]] = {
    "a worker of c0": lambda found: kill_worker(found, "c0"),
    "the worker of c1": lambda found: kill_worker(found, "c1"),
    "both workers of c0": lambda found: kill_workers(found, "c0"),
    "all workers": lambda found: kill_workers(found, *SITES),
    "the gateway of c0": lambda found: kill_gateway(found, "c0"),
    "the gateway of c1": lambda found: kill_gateway(found, "c1"),
    "the launcher of c0": lambda found: kill_launcher(found, "c0"),
    "the launcher of c1": lambda found: kill_launcher(found, "c1"),
    "cluster c0": lambda found: kill_cluster(found, "c0"),
    "cluster c1": lambda found: kill_cluster(found, "c1"),
    "everything": lambda found: kill_cluster(found, *SITES),
}


# ---------------------------------------------------------------------- the run
def start_run(folder: Path, found: Sites) -> None:
    for cluster in SITES:
        found.start_gateway(cluster)
    (folder / "saved").mkdir()
    found.start("resume", folder / "saved", "-", EPOCHS, "piped", PAUSE)


def make_options() -> dict[str, Any]:
    clusters = {
        cluster: {
            "workers": [f"127.0.0.1:{free_port()}" for worker in WORKERS if WORKERS[worker] == cluster],
            "gateway": f"127.0.0.1:{free_port()}",
        }
        for cluster in SITES
    }
    return {"clusters": clusters, "restarts": {"most": 9, "wait": "0s"}, "seed": SEED}


def read_result(found: Sites) -> dict[str, Any]:
    return {name: found.get_common(name) for name in ("history", "weights")}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    found: FinishedRun = run_workers("resume", WORKERS, "-", "-", EPOCHS)
    found.result.check()
    return {name: found.get_common(name) for name in ("history", "weights")}


def kill_target(found: Sites, name: str, steps: int) -> None:
    """Let something die once both sites have taken so many steps more."""
    for cluster in SITES:
        found[cluster].await_more_lines('["step", ', steps)
    TARGETS[name](found)


ORDERS = [random.Random(seed).sample(list(TARGETS), len(TARGETS)) for seed in range(2)]


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", ORDERS, ids=["one order", "another order"])
def test_kills_of_all_targets_do_not_change_the_result(
    undisturbed: dict[str, Any], tmp_path: Path, names: list[str]
) -> None:
    with prepare_sites(tmp_path, SITES, **make_options()) as found:
        start_run(tmp_path, found)
        for name in names:
            kill_target(found, name, 5)
        assert set(found.wait_for_exit_codes().values()) == {0}, found["c1"].last_output
        assert read_result(found) == undisturbed


@pytest.mark.grid
@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("name", TARGETS)
def test_kill_of_one_target_does_not_change_the_result(
    undisturbed: dict[str, Any], tmp_path: Path, name: str, steps: int
) -> None:
    with prepare_sites(tmp_path, SITES, **make_options()) as found:
        start_run(tmp_path, found)
        kill_target(found, name, steps)
        assert set(found.wait_for_exit_codes().values()) == {0}, found["c1"].last_output
        assert read_result(found) == undisturbed
