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

from tests.processes.sites import SEED, Sites, sites
from tests.processes.worker_runs import Ended, run
from whale_nebula.launch.placement import free_port

WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
SITES = ("c0", "c1")
EPOCHS, STEPS_PER_EPOCH, REST = 12, 6, 0.15
DEADLINE = 60.0


# ---------------------------------------------------------------------- what dies
def kill_worker(found: Sites, cluster: str) -> None:
    os.kill(found[cluster].worker, signal.SIGKILL)


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
        found.start_again(cluster)


def kill_cluster(found: Sites, *clusters: str) -> None:
    """Kill all processes of the clusters, as a loss of power does."""
    kill_workers(found, *clusters)
    for cluster in clusters:
        found.gateways[cluster].process.kill()
        found.gateways[cluster].process.wait(DEADLINE)
    for cluster in clusters:
        found.start_gateway(cluster)
    kill_launcher(found, *clusters)


DEATHS: Mapping[str, Callable[[Sites], None]] = {
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
def start(folder: Path, found: Sites) -> None:
    for cluster in SITES:
        found.start_gateway(cluster)
    (folder / "saved").mkdir()
    found.start("resume", folder / "saved", "-", EPOCHS, "piped", REST)


def options() -> dict[str, Any]:
    clusters = {
        cluster: {
            "workers": [f"127.0.0.1:{free_port()}" for worker in WORKERS if WORKERS[worker] == cluster],
            "gateway": f"127.0.0.1:{free_port()}",
        }
        for cluster in SITES
    }
    return {"clusters": clusters, "restarts": {"most": 9, "wait": "0s"}, "seed": SEED}


def told(found: Sites) -> dict[str, Any]:
    return {name: found.same(name) for name in ("history", "weights")}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    found: Ended = run("resume", WORKERS, "-", "-", EPOCHS)
    found.result.check()
    return {name: found.same(name) for name in ("history", "weights")}


def die(found: Sites, name: str, steps: int) -> None:
    """Let something die once both sites have taken so many steps more."""
    for cluster in SITES:
        found[cluster].await_more('["step", ', steps, DEADLINE)
    DEATHS[name](found)


ORDERS = [random.Random(seed).sample(list(DEATHS), len(DEATHS)) for seed in range(2)]


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ORDERS, ids=["one order", "another order"])
def test_whatever_dies_the_run_ends_as_if_nothing_had(
    undisturbed: dict[str, Any], tmp_path: Path, names: list[str]
) -> None:
    with sites(tmp_path, SITES, **options()) as found:
        start(tmp_path, found)
        for name in names:
            die(found, name, 5)
        assert set(found.ended().values()) == {0}, found["c1"].said
        assert told(found) == undisturbed


@pytest.mark.grid
@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("name", DEATHS)
def test_each_may_die_at_any_time(undisturbed: dict[str, Any], tmp_path: Path, name: str, steps: int) -> None:
    with sites(tmp_path, SITES, **options()) as found:
        start(tmp_path, found)
        die(found, name, steps)
        assert set(found.ended().values()) == {0}, found["c1"].said
        assert told(found) == undisturbed
