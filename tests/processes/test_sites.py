"""Two sites over mutual TLS: their results, and their behaviour when one is killed, frozen, or cut off."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes.sites import line_before, sites
from tests.processes.worker_runs import run, told_alone
from tests.processes.workers import train
from whale_nebula.launch.placement import free_port

STEPS, REST = 160, 0.02


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process comes to."""
    return told_alone(train.course, STEPS, links="10gbit,0ms")


@pytest.mark.grid
def test_a_cut_and_a_renewed_certificate_change_nothing(tmp_path: Path, alone: dict[str, Any]) -> None:
    with sites(tmp_path) as found, line_before(found, "gpu") as (line, configs):
        found.start("train", "course", STEPS, REST, configs=configs)
        found["npu"].await_line('"steps", 15')
        line.cut()
        time.sleep(5.0)  # what is tested: nothing passes for so long
        line.mend()
        found["npu"].await_line('"steps", 35')
        found.certs("renew")
        assert found.ended() == {"gpu": 0, "npu": 0}, found["npu"].said
        weights, loss = found.same("weights"), found.same("loss")
        assert found["npu"].told["connections"]["gpu/0"] > 1, "the new certificate was not taken up"
    assert (weights, loss) == (alone["weights"], alone["loss"])


@pytest.mark.grid
def test_a_gateway_that_is_killed_and_started_again_costs_nothing(tmp_path: Path, alone: dict[str, Any]) -> None:
    names = ("gpu", "npu")
    clusters = {
        name: {"workers": [f"127.0.0.1:{free_port()}"], "gateway": f"127.0.0.1:{free_port()}"} for name in names
    }
    with sites(tmp_path, clusters=clusters) as found:
        for name in names:
            found.start_gateway(name)
        found.start("train", "course", STEPS, REST)
        found["npu"].await_line('"steps", 15')
        found.gateways["npu"].process.kill()
        found.gateways["npu"].process.wait(10)
        found.start_gateway("npu")
        assert found.ended() == {"gpu": 0, "npu": 0}, found["npu"].said
        assert found.same("weights") == alone["weights"]


@pytest.mark.grid
@pytest.mark.parametrize(("number", "within"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 8.0)], ids=["dead", "frozen"])
def test_a_worker_that_is_gone_ends_the_others_with_its_name(tmp_path: Path, number: int, within: float) -> None:
    with sites(tmp_path) as found:
        found.start("train", "course", 10**4)
        for site in found.started.values():
            site.await_line('"steps", 15')
        os.kill(found["gpu"].worker, number)
        start = time.monotonic()
        assert found["npu"].await_line('"error"') - start < within
        assert "worker 'gpu/0' is gone" in found["npu"].told["error"]
        codes = found.ended()
    assert codes["gpu"] == 137 and codes["npu"] not in (0, 137), codes


@pytest.mark.grid
def test_a_cut_that_outlasts_patience_ends_both_with_a_name(tmp_path: Path) -> None:
    with sites(tmp_path, patience="12s") as found, line_before(found, "gpu") as (line, configs):
        found.start("train", "course", 10**4, configs=configs)
        found["npu"].await_line('"steps", 15')
        line.cut()
        start = time.monotonic()
        heard = {cluster: site.await_line('"error"') - start for cluster, site in found.started.items()}
        assert all(10.0 < seconds < 30.0 for seconds in heard.values()), heard
        assert "gpu/0" in found["npu"].told["error"] and "npu/0" in found["gpu"].told["error"]
        assert all(found.ended().values())


@pytest.mark.parametrize(
    ("shared", "claims", "writers"),
    [
        pytest.param(True, "nobody", ["gpu/0"], marks=pytest.mark.grid, id="one folder"),
        pytest.param(False, "gpu/0", ["gpu/0", "npu/0"], id="two folders and a claim of the other"),
    ],
)
def test_a_file_is_written_once_in_a_folder_whatever_a_peer_claims(
    tmp_path: Path, shared: bool, claims: str, writers: list[str]
) -> None:
    folders = [tmp_path / ("both" if shared else name) for name in ("gpu", "npu")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    found = run("save_weights", {"gpu/0": "gpu", "npu/0": "npu"}, claims, *folders)
    found.result.check()
    assert [worker for worker, told in found.told.items() if told["writes"]] == writers
    assert found.same("there") is True
